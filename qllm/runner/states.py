"""Recurrent states of requests, by layer and position.

A layer with a state does not attend to the keys of all positions. The layer carries a state from
one token to the next, and cannot go back to an earlier token. So a request holds, for every such
layer, states by the position of the next token:

    states of a layer   {committed: s, hi: s'}     a pass over [committed, hi) reads s and leaves s'

The state after a pass is committed once all layers have computed it. Until then both states are
kept. So a pass that is dropped, stopped or run in another way finds its first state.

A pass that verifies drafted tokens leaves one state, which is right only if all of them are
accepted. So the pass also keeps the inputs of the recurrence of its tokens. If a draft is rejected,
the state is dropped. The next op of the layer first runs the recurrence alone over the accepted
tokens, from the first state of the pass:

    accepted   {n - 1: s, n + d: s'}     s' is the state to continue from
    rejected   {n - 1: s} and inputs     the recurrence over [n - 1, n + a) gives the state at n + a

This is cheaper than the alternatives. A layer of Qwen3-Next has 2 MB of state, and 24 KB of inputs
for a token. A state after each draft would take that memory for each, and time to write it, also if
nothing is rejected. And to compute the accepted tokens again would run all layers for them.

States for other requests are shared by reference. No pass writes to a shared state.

    marks     positions at which a pass stops to leave a state
    lend      give the prefix cache the states of a position
    borrow    continue from states of the prefix cache
"""

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from qllm.errors import InvariantError
from qllm.models.hybrid import LightningState
from qllm.models.layer_cache import LayerCache

NewState = Callable[[], Any]
"""Function that makes the state of one layer for a request without tokens."""
Rerun = Callable[[Any, Tensor, Any], None]
"""Function of a state, the inputs of the tokens after it, and a state to overwrite."""


class Inputs(NamedTuple):
    """The inputs of a layer's recurrence for tokens [first, first + T)."""

    first: int
    given_TW: Tensor
    rerun: Rerun


class States:
    """The states of one request, by layer and position. Empty without recurrent layers."""

    def __init__(self) -> None:
        self._held: dict[int, dict[int, Any]] = {}
        self.marks: frozenset[int] = frozenset()
        """Positions whose states stay until the states are lent, or the marks change."""
        self._lent: set[int] = set()
        """Positions whose states the prefix cache also holds."""
        self._drafted: range | None = None
        """Positions after drafted tokens of the pass; None if the pass verifies none."""
        self._inputs: dict[int, Inputs] = {}
        """Inputs of a pass that verifies drafted tokens, by layer."""
        self._owed: dict[int, Inputs] = {}
        """Inputs of accepted tokens, by layer. `_settle` computes the state after them."""
        self._spare: dict[int, Any] = {}
        """A dropped state by layer. The next op of the layer overwrites it."""

    def begin(self, num_known: int, hi: int) -> None:
        """Begin a pass that ends at `hi`. Tokens from `num_known` on are drafted."""
        self._drafted = range(num_known + 1, hi + 1) if hi > num_known else None

    def inputs(self, layer: int, committed: int, width: int, rerun: Rerun) -> Tensor | None:
        """Return where the pass keeps the inputs of its tokens, [T, width]; None if it need not.

        Args:
            layer: Index of the layer.
            committed: Position of the pass's first token.
            width: Number of inputs of a token.
            rerun: Function that computes a state from the inputs.
        """
        if self._drafted is None:
            return None
        num, found = self._drafted.stop - 1 - committed, self._inputs.get(layer)
        if found is None or (found.first, len(found.given_TW)) != (committed, num):
            given_TW = torch.empty((num, width), dtype=torch.bfloat16)
            found = self._inputs[layer] = Inputs(committed, given_TW, rerun)
        return found.given_TW

    def _is_fixed(self, position: int, committed: int) -> bool:
        """Return True if no pass may write to the states of a position."""
        return position == committed or position in self.marks or position in self._lent

    def stops(self, lo: int, hi: int) -> list[int]:
        """Return `lo` and the positions at which a pass over [lo, hi) leaves a state or ends."""
        return [lo, *sorted(p for p in self.marks if lo < p < hi), hi]

    def lend(self, position: int) -> dict[int, Any] | None:
        """Return the states of all layers at a position, for `borrow`; None if there are none.

        From then on no pass writes to the states, and the position is no longer marked.
        """
        self.marks -= {position}
        self._settle_all()
        found = {i: held[position] for i, held in self._held.items() if position in held}
        if not found or len(found) < len(self._held):
            return None
        here = {p for held in self._held.values() for p in held}
        self._lent = {p for p in self._lent if p in here} | {position}
        return found

    def borrow(self, position: int, states: Mapping[int, Any]) -> None:
        """Continue from states that `lend` returned.

        The caller commits the tokens before `position`.
        """
        self._held = {layer: {position: state} for layer, state in states.items()}
        self._lent = {position}

    def take(self, layer: int, position: int, committed: int, new_state: NewState) -> Any:
        """Return the state before a position.

        The caller advances the state in place and calls `put`.

        Raises:
            InvariantError: The layer was not run up to the position, or has dropped its state.
        """
        if position == 0:
            return new_state()
        self._settle(layer)
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
        """Return the state before a token, and a state to overwrite with the next state, for `put`.

        The first state stays as it is until `put`, so that an op that reads it can restart. It is
        None for a request without tokens. The second is an unneeded state, if there is one.

        Raises:
            InvariantError: The layer was not run up to the position, or has dropped its state.
        """
        if position == 0:
            return None, new_state()
        self._settle(layer)
        held = self._held.get(layer, {})
        if position not in held:
            raise InvariantError(f"layer {layer} has no state at position {position} (I9)")
        for p in [p for p in held if p in self._lent and p not in (committed, position)]:
            if p not in self.marks:
                del held[p]  # deleted before another is made, so that a request has two
        if (unused := self._spare.pop(layer, None)) is not None:
            return held[position], unused
        spare = next((p for p in held if p != position and not self._is_fixed(p, committed)), None)
        return held[position], new_state() if spare is None else held.pop(spare)

    def last(self, layer: int, new_state: NewState) -> Any:
        """Return the state after the last token that the layer has seen.

        The state is not a copy.
        """
        self._settle(layer)
        held = self._held[layer]
        position = max(held)
        if isinstance(saved := held[position], Saved):
            held[position] = new_state().load(saved.tensors)
        return held[position]

    def put(self, layer: int, position: int, state: Any, committed: int) -> None:
        """Store a state, and drop all other states that are not committed or marked."""
        held, kept = self._held.setdefault(layer, {}), {committed, *self.marks}
        self._held[layer] = {p: s for p, s in held.items() if p in kept} | {position: state}

    def commit(self, position: int) -> None:
        """Commit the first `position` tokens of a pass, and drop the states after them.

        A dropped state is one after a rejected draft. The state at `position` is then owed.

        Raises:
            InvariantError: A layer has neither the state nor the inputs that give it.
        """
        if self._drafted is None:
            return
        inputs, self._inputs, self._drafted = self._inputs, {}, None
        for layer, held in self._held.items():
            for late in [p for p in held if p > position]:
                self._spare[layer] = held.pop(late)
            if position in held or layer in self._owed:
                continue
            if layer not in inputs:
                raise InvariantError(f"layer {layer} cannot go back to position {position} (I9)")
            begin, given_TW, rerun = inputs[layer]
            first = max(held)
            accepted = given_TW[first - begin : position - begin]
            self._owed[layer] = Inputs(first, accepted, rerun)

    def _settle(self, layer: int) -> None:
        """Compute the state that a layer owes, if it owes one."""
        owed = self._owed.get(layer)
        if owed is None:
            return
        held, state = self._held[layer], self._spare.pop(layer)
        owed.rerun(held[owed.first], owed.given_TW, state)
        held[owed.first + len(owed.given_TW)] = state
        del self._owed[layer]

    def _settle_all(self) -> None:
        for layer in list(self._owed):
            self._settle(layer)

    def clear(self) -> None:
        """Drop all states. The request is computed again from its first token."""
        for held in (self._held, self._lent, self._inputs, self._owed, self._spare):
            held.clear()
        self.marks, self._drafted = frozenset(), None

    @property
    def layers(self) -> Collection[int]:
        """Layers that have left a state. These layers write no keys and values."""
        return self._held.keys()

    @property
    def num_bytes(self) -> int:
        """Bytes of all states. Callable from any thread."""
        return sum(t.nbytes for t in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Return the tensors of all states. Callable from any thread."""
        held = [state for at in list(self._held.values()) for state in list(at.values())]
        held += list(self._spare.values())
        inputs = [*list(self._inputs.values()), *list(self._owed.values())]
        kept = [one.given_TW for one in inputs]
        return [t for state in held for t in tensors_of(state).values()] + kept

    def export(self) -> dict[str, Tensor]:
        """Return copies of the tensors by name: "state.LAYER.POSITION.NAME".

        States after drafted tokens of an unfinished pass are left out.
        """
        self._settle_all()
        drafted = self._drafted or ()
        return {
            f"state.{layer}.{position}.{name}": tensor.clone()
            for layer, by_position in self._held.items()
            for position, state in by_position.items()
            if position not in drafted
            for name, tensor in tensors_of(state).items()
        }

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the tensors of `export`. Tensors with other names are ignored."""
        found: dict[tuple[int, int], dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith("state."):
                _, layer, position, which = name.split(".", 3)
                found.setdefault((int(layer), int(position)), {})[which] = tensor
        for (index, at), named in found.items():
            self._held.setdefault(index, {})[at] = _restored(named)


class Saved(NamedTuple):
    """The tensors of a restored `LayerCache`. The layer loads the tensors into an empty cache."""

    tensors: dict[str, Tensor]


def tensors_of(state: Any) -> dict[str, Tensor]:
    """Return the tensors of one state, by name."""
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
    """Return the state that had these tensors."""
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
