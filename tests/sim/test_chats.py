"""What `prefix` finds of what engines keep, in a model of chats (`chats.py`)."""

import pytest

from qllm.fleet.routes import by_class, by_prefix, round_robin
from tests.support.chats import ANSWERED, ASKED, FIRST, LIVES, PAGE, TURNS, served

TALKS = 18 * LIVES * TURNS


@pytest.mark.parametrize("load", [0.05, 0.3])
def test_prefix_finds_twice_what_round_robin_does_and_halves_the_wait(load: float) -> None:
    for seed in range(2):
        prefix, turns, first = (
            served(r, 3, load, seed) for r in (by_prefix, round_robin, by_class)
        )
        assert prefix.hit_share >= 2 * turns.hit_share
        assert prefix.hit_share >= 1.5 * first.hit_share
        assert prefix.mean_ttft_s <= 0.5 * turns.mean_ttft_s
        assert sum(prefix.sent) == TALKS
        assert min(prefix.sent) >= 0.8 * max(prefix.sent), "idle engines are taken in turns"


def test_nearly_all_that_could_be_found_is() -> None:
    lengths = [FIRST + ASKED + turn * (ASKED + ANSWERED) for turn in range(TURNS)]
    pages = sum((length - ASKED - 1) // PAGE for length in lengths[1:])
    most = PAGE * pages / sum(lengths)
    assert served(by_prefix, 3, 0.05, 0).hit_share >= 0.95 * most
    assert served(by_prefix, 3, 0.85, 0).hit_share >= 0.9 * most


def test_one_beginning_that_all_share_gathers_not_all_of_them_at_one_engine() -> None:
    """They wait less than where prompts are dealt out in turns."""
    prefix, turns = (served(route, 3, 0.6, 0, shared=1000) for route in (by_prefix, round_robin))
    assert min(prefix.sent) >= 0.5 * max(prefix.sent)
    assert prefix.mean_ttft_s <= 0.6 * turns.mean_ttft_s
