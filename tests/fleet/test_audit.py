"""`qllm.fleet.audit`: a sample that is the same every time, counts, and an interval that holds."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qllm import QLLMEngine, SamplingParams
from qllm.errors import ConfigError
from qllm.fleet.audit import SHARE, Audits, Estimate, is_audited, num_differing, wilson
from qllm.types import Logprobs
from tests.support.serving import tiny_engine


def test_wilsons_interval_has_its_published_values() -> None:
    """Newcombe 1998, table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29."""
    for hits, num, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        assert wilson(hits, num) == pytest.approx((low, high), abs=1e-4)
    assert wilson(0, 0) == (0, 1)
    assert Estimate().upper == 1
    assert Estimate(1, 100, 100).upper == 1


@given(st.integers(0, 500), st.integers(1, 500))
def test_the_interval_has_the_rate_inside_and_narrows(hits: int, num: int) -> None:
    hits = min(hits, num)
    low, high = wilson(hits, num)
    assert 0 <= low <= hits / num <= high <= 1
    wider = wilson(10 * hits, 10 * num)
    assert wider[1] - wider[0] < high - low


@pytest.mark.parametrize("rate", [0.005, 0.02, 0.1, 0.4])
def test_a_known_rate_is_in_the_interval_of_95_in_100_runs(rate: float) -> None:
    """2,000 runs of 1,000 positions, so that chance moves the share by 0.5 % only."""
    rng, inside = random.Random(3), 0
    for _ in range(2000):
        audits = Audits(window=1000)
        for _ in range(10):
            found = audits.add(100, sum(rng.random() < rate for _ in range(100)))
        assert (found.num_answers, found.num_positions) == (10, 1000)
        low, high = found.bounds
        inside += low <= rate <= high
    assert inside / 2000 == pytest.approx(0.95, abs=0.025)


def test_the_sample_is_a_share_of_the_requests_and_the_same_every_time() -> None:
    ids = [f"request-{n}" for n in range(40_000)]
    audited = [one for one in ids if is_audited(one)]
    assert len(audited) / len(ids) == pytest.approx(SHARE, abs=0.004)
    assert audited == [one for one in reversed(ids) if is_audited(one)][::-1]
    more = {one for one in ids if is_audited(one, 0.2)}
    assert more > set(audited), "a larger share has all that a smaller one has"
    other = {one for one in ids if is_audited(one, seed=1)}
    assert len(other & set(audited)) / len(audited) == pytest.approx(SHARE, abs=0.02)
    assert not any(is_audited(one, 0) for one in ids)
    assert all(is_audited(one, 1) for one in ids)
    for share in (-0.1, 1.5, float("nan")):
        with pytest.raises(ConfigError, match=r"must be in \[0, 1\]"):
            is_audited("a", share)


def scores(*best: int) -> list[Logprobs | None]:
    return [None, *(Logprobs(-1.0, ((one, -0.5), (99, -2.0))) for one in best)]


def test_only_positions_of_the_answer_count() -> None:
    tokens = [1, 2, 3, 4, 5]
    assert num_differing(tokens, scores(2, 3, 4, 5), 3) == (2, 0)
    assert num_differing(tokens, scores(7, 7, 4, 5), 3) == (2, 0), "the prompt is given"
    assert num_differing(tokens, scores(2, 3, 7, 5), 3) == (2, 1)
    assert num_differing(tokens, scores(2, 3, 4, 7), 3) == (2, 1)
    assert num_differing(tokens, scores(2, 3, 4, 5), 5) == (0, 0)
    for wrong, begin in (scores(2, 3, 4), 3), (scores(2, 3, 4, 5), 0), (scores(2, 3, 4, 5), 6):
        with pytest.raises(ValueError, match="of them the prompt"):
            num_differing(tokens, wrong, begin)
    with pytest.raises(ValueError, match="needs the most likely token"):
        num_differing(tokens, [*scores(2, 3, 4), Logprobs(-1.0, ())], 3)


def test_old_answers_are_forgotten_and_whole() -> None:
    audits = Audits(window=100)
    assert audits.add(60, 6) == Estimate(1, 60, 6)
    assert audits.add(60, 0) == Estimate(2, 120, 6)
    assert audits.add(40, 1) == Estimate(3, 100, 1)
    audits.clear()
    assert audits.estimate == Estimate()
    for num, differing in (3, 4), (3, -1):
        with pytest.raises(ValueError, match="positions differ"):
            audits.add(num, differing)


def test_an_audit_of_an_engine_counts_what_greedy_answers_say() -> None:
    """The whole model agrees with itself everywhere, and finds a token that was put in."""

    def audited(engine: QLLMEngine, tokens: list[int], begin: int) -> tuple[int, int]:
        how = SamplingParams(temperature=0, prompt_logprobs=1)
        found = engine.submit(tokens, "BE", 1, sampling=how).result(60)
        assert found.prompt_logprobs is not None
        return num_differing(tokens, found.prompt_logprobs, begin)

    with tiny_engine(run_in="thread", conformance=False) as engine:
        greedy = SamplingParams(temperature=0, ignore_eos=True)
        found = engine.submit("def parse(", "LS", 24, sampling=greedy).result(60)
        begin = len(found.prompt_token_ids)
        own = [*found.prompt_token_ids, *found.token_ids]
        num, differing = audited(engine, own, begin)
        assert (num, differing) == (24, 0)
        other = [*own[:begin], own[begin] ^ 1, *own[begin + 1 :]]
        assert audited(engine, other, begin)[1] >= 1
