"""Recurrent states of requests, by layer and position.

A layer with a state does not attend to the keys of all positions: it carries a state from one token
to the next, and cannot go back. So a request holds, for every such layer, states by the position at
which the next token goes on:

    states of a layer   {committed: s, hi: s'}     a pass over [committed, hi) reads s and leaves s'

What a pass left is not committed before all layers have it; until then both are kept, so that a
pass that is forgotten, stopped in between or run in another way finds where it began.

States that other requests are to begin with leave by reference: nobody writes to them any more.

    marks     positions that a pass stops at on its way, each to leave a state there
    lend      the prefix cache has the states of a position now
    borrow    a request goes on from states that the prefix cache has
"""

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from qllm.errors import InvariantError
from qllm.models.hybrid import LightningState
from qllm.models.layer_cache import LayerCache

NewState = Callable[[], Any]
"""Makes the state of one layer of a request that has no token yet."""


class States:
    """States of one request, by layer and position. Empty without recurrent layers."""

    def __init__(self) -> None:
        self._held: dict[int, dict[int, Any]] = {}
        self.marks: frozenset[int] = frozenset()
        """Positions whose states stay until they are lent, or the marks are others."""
        self._lent: set[int] = set()
        """Positions whose states others have, too."""

    def _is_fixed(self, position: int, committed: int) -> bool:
        """Whether nobody may write to the states of a position."""
        return position == committed or position in self.marks or position in self._lent

    def stops(self, lo: int, hi: int) -> list[int]:
        """Where a pass over [lo, hi) ends or leaves a state on its way, `lo` included."""
        return [lo, *sorted(p for p in self.marks if lo < p < hi), hi]

    def lend(self, position: int) -> dict[int, Any] | None:
        """The states of all layers at a position, for `borrow`; None if there is none.

        Nobody writes to them from now on; the position is marked no more.
        """
        self.marks -= {position}
        found = {i: held[position] for i, held in self._held.items() if position in held}
        if not found or len(found) < len(self._held):
            return None
        here = {p for held in self._held.values() for p in held}
        self._lent = {p for p in self._lent if p in here} | {position}
        return found

    def borrow(self, position: int, states: Mapping[int, Any]) -> None:
        """Go on from states that `lend` gave; the caller commits the tokens before."""
        self._held = {layer: {position: state} for layer, state in states.items()}
        self._lent = {position}

    def take(self, layer: int, position: int, committed: int, new_state: NewState) -> Any:
        """The state with which a token at a position goes on, for `put` to hold when it went on.

        Raises:
            InvariantError: The layer was not run up to there, or has forgotten it.
        """
        if position == 0:
            return new_state()
        held = self._held.get(layer, {})
        if position not in held:
            raise InvariantError(f"layer {layer} has no state at position {position} (I9)")
        if isinstance(saved := held[position], Saved):
            held[position] = new_state().load(saved.tensors)
        if self._is_fixed(position, committed):
            return copy.deepcopy(held[position])
        return held.pop(position)

    def advance(
        self, layer: int, position: int, committed: int, new_state: NewState
    ) -> tuple[Any | None, Any]:
        """The state with which a token goes on, and one to be overwritten with the next, for `put`.

        They are one if nobody needs the first any more; the second is one that nobody needs, if
        there is one. The first of a request without tokens is None.

        Raises:
            InvariantError: As `take`.
        """
        if position == 0:
            return None, new_state()
        held = self._held.get(layer, {})
        if position not in held:
            raise InvariantError(f"layer {layer} has no state at position {position} (I9)")
        if not self._is_fixed(position, committed):
            state = held.pop(position)
            return state, state
        for p in [p for p in held if p in self._lent and p not in (committed, position)]:
            if p not in self.marks:
                del held[p]  # before another is made: a request has two
        spare = next((p for p in held if not self._is_fixed(p, committed)), None)
        return held[position], new_state() if spare is None else held.pop(spare)

    def last(self, layer: int, new_state: NewState) -> Any:
        """The state of the last token that the layer has seen, itself."""
        held = self._held[layer]
        position = max(held)
        if isinstance(saved := held[position], Saved):
            held[position] = new_state().load(saved.tensors)
        return held[position]

    def put(self, layer: int, position: int, state: Any, committed: int) -> None:
        """Hold a state, that of the committed tokens, and those of marks; the others go."""
        held, kept = self._held.setdefault(layer, {}), {committed, *self.marks}
        self._held[layer] = {p: s for p, s in held.items() if p in kept} | {position: state}

    def clear(self) -> None:
        """The request computes again from its first token."""
        self._held.clear()
        self._lent.clear()
        self.marks = frozenset()

    @property
    def layers(self) -> Collection[int]:
        """Those that left a state: they write no keys and values."""
        return self._held.keys()

    @property
    def num_bytes(self) -> int:
        """Bytes of all states. Callable from any thread."""
        return sum(t.nbytes for t in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Those of all states. Callable from any thread."""
        held = [state for at in list(self._held.values()) for state in list(at.values())]
        return [t for state in held for t in tensors_of(state).values()]

    def export(self) -> dict[str, Tensor]:
        """Copies by name: "state.LAYER.POSITION.NAME"."""
        return {
            f"state.{layer}.{position}.{name}": tensor.clone()
            for layer, by_position in self._held.items()
            for position, state in by_position.items()
            for name, tensor in tensors_of(state).items()
        }

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up what `export` gave; other names are passed over."""
        found: dict[tuple[int, int], dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith("state."):
                _, layer, position, which = name.split(".", 3)
                found.setdefault((int(layer), int(position)), {})[which] = tensor
        for (index, at), named in found.items():
            self._held.setdefault(index, {})[at] = _restored(named)


class Saved(NamedTuple):
    """A `LayerCache` that was restored; its layer makes the empty one."""

    tensors: dict[str, Tensor]


def tensors_of(state: Any) -> dict[str, Tensor]:
    """Tensors of one state, by name."""
    if isinstance(state, Saved):
        return state.tensors
    if isinstance(state, LayerCache):
        return state.tensors()
    if isinstance(state, LightningState):
        return {} if state.value is None else {"value": state.value}
    found = {}
    for kind in ("conv", "recurrent"):
        for which, tensor in getattr(state, f"{kind}_states").items():
            if tensor is not None:
                found[f"{kind}.{which}"] = tensor
    return found


def _restored(tensors: Mapping[str, Tensor]) -> Any:
    """The state that had these tensors."""
    if any(name.startswith("cache.") for name in tensors):
        return Saved(dict(tensors))
    if "value" in tensors:
        state = LightningState()
        state.value = tensors["value"]
        return state
    numbers = {name: int(name.split(".")[1]) for name in tensors}
    layer = LinearAttentionLayer(number_of_states=max(numbers.values()) + 1)
    for name, which in numbers.items():
        kind = f"{name.split('.')[0]}_states"
        layer.lazy_initialization(**{kind: tensors[name], "state_idx": which})  # type: ignore[arg-type]
        getattr(layer, kind)[which].copy_(tensors[name])
        layer.has_previous_state[which] = True
    return layer
