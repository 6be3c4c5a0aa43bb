"""The drafter that looks up what followed the last tokens before."""

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qllm import SamplingParams
from qllm.drafters import lookup
from qllm.drafters.lookup import LEAST, LONGEST, MOST_PLACES, NO_TOKEN, Lookup
from qllm.drafters.protocol import DraftRequest, TokenIds


def drafter(prediction: Sequence[int] = ()) -> Lookup:
    sampling = SamplingParams(prediction=tuple(prediction))
    return Lookup(DraftRequest(0, 1, sampling, lambda outputs, most: ()))


def searched(ids: Sequence[int], most: int) -> list[int]:
    """The proposal that the definition gives, by a search of all places."""
    last = list(ids[-LEAST:])
    places = [p for p in range(LEAST, len(ids)) if list(ids[p - LEAST : p]) == last]
    best, longest = 0, 0
    for place in places[::-1][:MOST_PLACES]:
        num = LEAST
        while num < min(LONGEST, place) and ids[place - 1 - num] == ids[len(ids) - 1 - num]:
            num += 1
        if num > longest:
            best, longest = place, num
    found = list(ids[best : best + most]) if best else []
    return found[: found.index(NO_TOKEN)] if NO_TOKEN in found else found


@given(
    st.lists(st.integers(0, 2), max_size=40),
    st.lists(st.integers(0, 2), min_size=1, max_size=60),
    st.integers(1, 30),
    st.integers(1, 8),
)
def test_it_finds_what_a_search_of_all_places_finds(
    prediction: list[int], ids: list[int], begin: int, most: int
) -> None:
    made = drafter(prediction)
    for end in range(min(begin, len(ids)), len(ids) + 1):
        found = made.propose(TokenIds(ids[:end]), most)
        assert found == searched([*prediction, NO_TOKEN, *ids[:end]], most)


def test_the_longest_match_wins() -> None:
    ids = [9, 1, 2, 3, 70, 8, 1, 2, 3, 71, 5, 1, 2, 3, 72, 8, 1, 2, 3]
    assert drafter().propose(ids, 2) == [71, 5]


def test_a_prediction_is_searched_too_and_never_left() -> None:
    assert drafter([1, 2, 3, 4, 5]).propose([7, 1, 2, 3], 9) == [4, 5]


def test_a_long_prompt_is_indexed_over_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "INDEXED_AT_ONCE", 10)
    ids, made = [*range(50), 20, 21, 22], drafter()
    found = [made.propose(ids, 1) for _ in range(6)]
    assert found == [[]] * 2 + [[23]] * 4


def test_the_work_per_token_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every place of this text matches: it has the same few tokens again and again."""
    rng, made = random.Random(0), drafter()
    ids = [rng.randrange(2) for _ in range(100_000)]
    counts, seen = [], list[int]()
    matched = made._matched
    monkeypatch.setattr(made, "_matched", lambda place: seen.append(place) or matched(place))
    for end in (1000, 50_000, 100_000):
        while len(made._before) < end:
            made.propose(TokenIds(ids[:end]), 4)
        before = len(seen)
        made.propose(TokenIds(ids[:end]), 4)
        counts.append(len(seen) - before)
    assert counts == [MOST_PLACES] * 3


def test_a_call_indexes_no_more_than_its_part_of_a_long_prompt() -> None:
    made, sizes = drafter(), []
    ids = TokenIds(range(100_000))
    for _ in range(110):
        made.propose(ids, 4)
        sizes.append(len(made._before))
    grown = [b - a for a, b in itertools.pairwise(sizes)]
    assert max(grown) == lookup.INDEXED_AT_ONCE
    assert sizes[-1] == len(ids) + 1, "the prediction has one place of its own"
