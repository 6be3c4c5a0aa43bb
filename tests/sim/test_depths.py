"""`qllm.sim.depths`: the choice as it is, over profiles, and counts that add up."""

import random
from typing import Any

import pytest

from bench.sim.depths import PROFILE, mixes
from qllm.errors import ConfigError
from qllm.fleet.choice import Rules
from qllm.models.depth_profile import Bin, DepthEntry, DepthProfile, parsed
from qllm.sim.depths import Asked, Speed, candidates_of, simulate_depths

BINS = (Bin(0, 0), Bin(0, 0), Bin(0, 0), Bin(100, 50), Bin(100, 90), Bin(100, 99), Bin(100, 100))
SURE = (Bin(0, 0),) * 6 + (Bin(100, 100),)


def entry(depth: int, agreement: float, batch_per_s: float, **more: Any) -> DepthEntry:
    bins = SURE if agreement == 1 else BINS
    found = DepthEntry(
        depth, {"chat": agreement}, bins, batch_per_s / 4, batch_per_s, 1000.0, 0, 64
    )
    return found._replace(**more)


def profile(*entries: DepthEntry, model: str = "A") -> DepthProfile:
    return DepthProfile(model, "x", entries[-1].depth, None, 8, entries)


TWO = profile(entry(2, 0.999, 300.0), entry(8, 1.0, 100.0))


def requests(count: int, answer: int = 80) -> list[Asked]:
    return [Asked("chat", 40, answer)] * count


def test_one_candidate_has_the_speed_of_its_profile() -> None:
    for seats, per_s in (1, 25.0), (8, 100.0):
        found = simulate_depths(requests(40), [TWO], fixed="A", seats=seats)
        seconds = 40 * 40 / 1000.0 + 40 * 80 / per_s
        assert found.seconds == pytest.approx(seconds, rel=1e-6)
        assert (found.tokens, found.differing) == (3200, 0)
        assert found.by_candidate == {"A": 3200}


def test_a_step_lies_on_the_line_through_both_speeds() -> None:
    speed = Speed.of(entry(2, 1.0, 400.0), 8)
    assert speed.step_s + speed.row_s == pytest.approx(1 / 100)
    assert speed.step_s + 8 * speed.row_s == pytest.approx(8 / 400)
    assert speed.token_s == 1 / 1000
    more = Speed.of(entry(2, 1.0, 1000.0, alone_per_s=100.0), 8)
    assert more.row_s == 0, "eight together take less time than one"


def test_one_candidate_pays_for_its_audits_too() -> None:
    found = simulate_depths(requests(400), [TWO], fixed="A@2", share=1.0)
    assert found.audited == 400
    seconds = 400 * (40 + 120) / 1000.0 + 400 * 80 / 300.0
    assert found.seconds == pytest.approx(seconds, rel=1e-6)
    assert 0 < found.disagreement < 0.003


def test_the_choice_goes_to_a_fast_candidate_and_keeps_the_bound() -> None:
    found = simulate_depths(requests(600), [TWO])
    assert found.tokens == 600 * 80 == sum(found.by_candidate.values())
    assert found.by_candidate["A@2"] > 0.9 * found.tokens
    assert found.changes == 1
    assert found.disagreement < 0.003
    again = simulate_depths(requests(600), [TWO])
    assert again == found, "the same seed"
    assert simulate_depths(requests(600), [TWO], seed=1) != found


def test_a_candidate_over_the_bound_never_answers() -> None:
    bad = profile(entry(2, 0.9, 300.0), entry(8, 1.0, 100.0))
    found = simulate_depths(requests(300), [bad])
    assert (found.by_candidate, found.changes, found.differing) == ({"A": 24_000}, 0, 0)
    more = simulate_depths(requests(300), [bad], rules=Rules(max_disagreement=0.2))
    assert more.by_candidate["A@2"] > 0


def test_low_tokens_deepen_and_open_requests_go_with_it() -> None:
    unsure = tuple(Bin(100, 40) if n < 3 else Bin(0, 0) for n in range(7))
    both = profile(entry(2, 0.999, 300.0, bins=unsure), entry(8, 1.0, 100.0))
    assert candidates_of(both)[0].low == 0.5
    found = simulate_depths(requests(100), [both])
    assert found.changes == 2
    assert 51 <= found.by_candidate["A@2"] < 200, "eight open requests would have 640"
    assert found.tokens == 8000


def test_two_models_are_candidates_beside_each_other() -> None:
    other = profile(entry(3, 0.5, 900.0), entry(6, 1.0, 150.0), model="B")
    names = [one.name for one in candidates_of(TWO, other)]
    assert names == ["A@2", "A", "B@3", "B"]
    found = simulate_depths(requests(300), [TWO, other])
    assert set(found.by_candidate) <= {"A@2", "A", "B"}


def test_what_is_unknown_is_refused() -> None:
    with pytest.raises(ConfigError, match="candidate 'B' is unknown; there are A@2, A"):
        simulate_depths(requests(1), [TWO], fixed="B")
    with pytest.raises(ConfigError, match="has no text 'code'; it has chat"):
        simulate_depths([Asked("code", 1, 1)], [TWO])


def test_the_bench_has_a_profile_with_the_bounds_that_its_rows_need() -> None:
    assert parsed(PROFILE.text()) == PROFILE
    kinds = mixes(random.Random(0), 3)
    assert set(kinds) == set(PROFILE.depths[0].agreement)
    shallow, middle, whole = PROFILE.depths
    assert {name for name, x in shallow.agreement.items() if x >= 0.98} == {"json"}
    assert {name for name, x in middle.agreement.items() if x >= 0.98} == {"json", "chat"}
    assert whole.agreed == 1
