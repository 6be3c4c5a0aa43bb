"""The fixtures of `canitoolcall`: what nine families write, and what clients get."""

import json
import random
from collections import defaultdict

import pytest
from canitoolcall.results import Status

from qllm.server.tools.choose import format_of
from tests.support.tool_fixtures import CUT, WRONG, replays, status_of

NAMES = sorted(replays())


def check(name: str, num_cuts: int) -> None:
    """A fixture passes all checks, or it is on the list of wrong ones and fails only as said."""
    rows = replays()[name].rows(num_cuts)
    told = {row.check: row.detail for row in rows if row.status is not Status.PASS}
    if name not in WRONG:
        assert status_of(rows) is Status.PASS, told
        return
    assert told, f"{name} passes: take it from the list of wrong fixtures"
    assert not told.keys() & {"split_invariance", "stream_equals_nonstream"}, told


def sample() -> list[str]:
    """Some fixtures of each format, others with another seed."""
    found = defaultdict(list)
    for name in random.Random(0).sample(NAMES, len(NAMES)):
        found[replays()[name].format.name].append(name)
    return [name for names in found.values() for name in names[:5]]


@pytest.mark.parametrize("name", sample())
def test_a_sample_of_fixtures_passes_all_checks(name: str) -> None:
    check(name, 10)


@pytest.mark.slow  # all fixtures, in 200 cuts each: two minutes
@pytest.mark.parametrize("name", NAMES)
def test_each_fixture_passes_all_checks_in_random_cuts(name: str) -> None:
    check(name, 200)


def test_no_fixture_is_missing_and_the_list_of_wrong_ones_has_no_other() -> None:
    assert len(NAMES) == 469
    assert set(WRONG) <= set(NAMES)
    assert len(WRONG) <= 25


@pytest.mark.parametrize("name", [name for name in NAMES if WRONG.get(name) == CUT])
def test_a_call_that_is_cut_off_is_reported_as_far_as_it_goes_and_not_as_a_call_to_make(
    name: str,
) -> None:
    """Its arguments are no JSON yet; the calls before it are whole."""
    replay = replays()[name]
    deltas, reader = replay.read([[token] for token in replay.tokens])
    assert reader.is_in_call
    found: dict[int, str] = defaultdict(str)
    for delta in deltas:
        for part in delta.get("tool_calls", ()):
            found[part["index"]] += part["function"]["arguments"]
    *whole, last = found.values()
    assert all(isinstance(json.loads(text), dict) for text in whole)
    with pytest.raises(json.JSONDecodeError):
        json.loads(last)


def test_a_formats_signs_choose_it() -> None:
    for replay in replays().values():
        assert format_of(replay.tokenizer) is replay.format, replay.fixture.id


@pytest.mark.parametrize(
    "name", [name for name, x in replays().items() if "long-arguments" in x.fixture.tags]
)
def test_arguments_come_while_the_call_is_written(name: str) -> None:
    """Not at its end: what is held back is shorter than a tag."""
    replay = replays()[name]
    deltas, _ = replay.read([[token] for token in replay.tokens])
    written = 0
    begun = next(n for n, delta in enumerate(deltas) if delta.get("tool_calls"))
    for number, delta in enumerate(deltas[: len(replay.tokens)]):
        written += sum(len(part["function"]["arguments"]) for part in delta.get("tool_calls", ()))
        if number > begun + 120:
            assert written > (number - begun) / 2 - 120
    assert begun < len(replay.tokens) / 4
