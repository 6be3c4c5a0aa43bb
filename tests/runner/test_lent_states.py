"""States that others have, too, are read and never written: of every layer, whoever runs first."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

from qllm.models.hybrid import LightningState
from qllm.runner.kv import SlabKV
from qllm.runner.states import States

LAYERS = range(3)


def new_state() -> LightningState:
    state = LightningState()
    state.value = torch.zeros(1)
    return state


def to_spare(states: States, layer: int, lo: int, hi: int, committed: int) -> None:
    """As a kernel that writes to spare states: the sum of the positions so far."""
    for a, b in pairwise(states.stops(lo, hi)):
        before, after = states.advance(layer, a, committed, new_state)
        assert before is not after, "what is left half-way begins again"
        so_far = 0.0 if before is None else float(before.value)
        after.value.fill_(so_far + sum(range(a, b)))
        states.put(layer, b, after, committed)


def by_copy(states: States, layer: int, lo: int, hi: int, committed: int) -> None:
    """As a module that writes to the state it is given."""
    for a, b in pairwise(states.stops(lo, hi)):
        state = states.take(layer, a, committed, new_state)
        state.value += sum(range(a, b))
        states.put(layer, b, state, committed)


def values(lent: dict[int, Any]) -> list[float]:
    return [float(lent[layer].value) for layer in LAYERS]


def passes(marks: set[int], run: Any, states: States, bounds: list[int]) -> Iterator[int]:
    """Run pass after pass, layer after layer; yields where each is committed."""
    states.marks = frozenset(marks)
    for lo, hi in pairwise(bounds):
        for layer in LAYERS:
            run(states, layer, lo, hi, lo)
        yield hi


@pytest.mark.parametrize("run", [to_spare, by_copy])
def test_what_is_lent_stays_while_its_request_goes_on(run: Any) -> None:
    states, kept = States(), {}
    for hi in passes({5, 8}, run, states, [0, 6, 9, *range(10, 30)]):
        # where it began, where it is, and what it was asked to leave
        assert len(states.tensors()) <= (2 + len(states.marks)) * len(LAYERS)
        for at in (5, 8) if hi == 9 else ():
            kept[at] = states.lend(at)
        if hi in (16, 17, 24):
            kept[hi] = states.lend(hi)
    assert sorted(kept) == [5, 8, 16, 17, 24]
    for at, lent in kept.items():
        assert lent is not None
        assert values(lent) == [sum(range(at))] * len(LAYERS)


@pytest.mark.parametrize("run", [to_spare, by_copy])
def test_a_state_that_is_lent_inside_a_pass_is_not_written_by_the_rest_of_it(run: Any) -> None:
    states, last = States(), LAYERS[-1]
    states.marks = frozenset({5})
    for layer in LAYERS[:-1]:
        run(states, layer, 0, 9, 0)
    run(states, last, 0, 5, 0)
    lent = states.lend(5)
    assert lent is not None
    run(states, last, 5, 9, 0)
    assert values(lent) == [sum(range(5))] * len(LAYERS)


@pytest.mark.parametrize("run", [to_spare, by_copy])
def test_two_that_go_on_from_lent_states_do_not_see_each_other(run: Any) -> None:
    first = States()
    assert list(passes({4}, run, first, [0, 7])) == [7]
    lent = first.lend(4)
    assert lent is not None
    others = [States(), States()]
    for i, other in enumerate(others):
        other.borrow(4, lent)
        for hi in passes(set(), run, other, [4, 6 + i, 8, 9, 10]):
            found = [float(t) for t in other.tensors()]
            assert float(max(found)) == sum(range(hi))
    assert values(lent) == [sum(range(4))] * len(LAYERS)


def test_states_that_not_every_layer_left_are_not_lent() -> None:
    states = States()
    states.marks = frozenset({3})
    for layer in LAYERS:
        to_spare(states, layer, 0, 5 if layer else 3, 0)
    states.marks = frozenset({4})
    to_spare(states, 0, 3, 5, 0)
    assert states.lend(3) is None
    assert states.lend(5) is not None


def test_a_request_that_starts_again_holds_no_states() -> None:
    """And one whose prompt is cut before what was committed: they are of other tokens."""
    kv = SlabKV(len(LAYERS), 100)
    for cut in (False, True):
        *_, kv.committed = passes({5}, by_copy, kv.states, [0, 6, 9])
        kv.states.lend(5)
        assert kv.states.tensors()
        kv.cut(9, [])
        assert kv.states.tensors(), "nothing was cut off"
        if cut:
            kv.cut(8, [])
        else:
            kv.clear()
        assert not kv.states.tensors()
        assert not kv.states.marks
        assert list(kv.states.layers) == []
