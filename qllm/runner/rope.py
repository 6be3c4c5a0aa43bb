"""Position embeddings of a frame, by the model's own rotary module.

A model may have one kind of embedding for all layers, one for every type of layer (sliding and
full attention turn by other angles), or none.

Static rope types give a position the same values in every call, so they are computed once into
a table. LongRoPE and dynamic NTK choose their frequencies by the *length* of a call, the position
of its last token + 1. Here the length of a position is that of the call in which `generate` would
compute it, which depends on the request alone:

    prompt of n tokens     0 ... n-1            length n, however the prompt is cut into passes
    decoded token          p >= n               length p + 1
    Phi-3, Phi-3.5-MoE     every position       the number of tokens that are known

The third row is for families whose `generate` drops its cache when the original length is
crossed (`Switch.recomputes`): the engine evicts the request there, and all of it is computed again
with the long factors. In the others cached keys keep the factors they were computed with.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qllm.models.digests import source_digest
from qllm.models.discover import ModelParts, base_model
from qllm.models.positions import STATIC_ROPE
from qllm.runner.frame import RequestState
from qllm.scheduler.program import Program
from qllm.types import RequestId

RECOMPUTES = {"5840db95a957"}
"""Digests of `prepare_inputs_for_generation` that drop the cache at the original length."""
Tables = tuple[Tensor, ...]
"""cos and sin, each [1, T, H]; or one tensor of complex numbers [1, T, H / 2]."""


@dataclass(frozen=True, slots=True)
class Switch:
    """How the frequencies of a model depend on the length."""

    at: int
    """Longest length with the original frequencies."""
    is_binary: bool
    """Every longer length has the same values; else each has its own."""
    recomputes: bool
    """KV of a length up to `at` is not used beyond it."""

    def length_of(self, num_prompt_tokens: int, num_tokens: int) -> int:
        """The length n that chooses frequencies below position n; a later position p uses p + 1.

        Args:
            num_prompt_tokens: Of the request.
            num_tokens: Prompt and output known now.
        """
        if self.recomputes and num_tokens > self.at:
            return num_tokens
        return num_prompt_tokens

    def regime(self, num_prompt_tokens: int, num_tokens: int) -> str:
        """Name of what frequencies depend on beside positions: equal names, equal frequencies."""
        length = self.length_of(num_prompt_tokens, num_tokens)
        if length <= self.at:
            return "short"
        return "long" if self.is_binary else f"length {length}"


def switch_of(model: nn.Module, rotary_emb: Any) -> Switch | None:
    """How the frequencies of a model depend on the length; None if they do not."""
    kind = getattr(rotary_emb, "rope_type", "default")
    if isinstance(kind, Mapping):  # by the type of the layer; discovery took static ones only
        return None
    config = base_model(model).config
    parameters = getattr(config, "rope_parameters", None) or {}
    # Phi-3.5-MoE scales by `short_mscale` or `long_mscale` whatever the type
    is_binary = kind == "longrope" or (kind != "default" and "long_mscale" in parameters)
    if kind in STATIC_ROPE and not is_binary:
        return None
    at = getattr(rotary_emb, "original_max_seq_len", 0)
    if is_binary:
        at = parameters["original_max_position_embeddings"]
    prepare = getattr(type(model), "prepare_inputs_for_generation", None)
    drops = (
        prepare is not None
        and hasattr(config, "original_max_position_embeddings")
        and source_digest(prepare) in RECOMPUTES
    )
    return Switch(int(at), is_binary, is_binary and drops)


class Ropes:
    """The tables of a model, by kind of embedding.

    Args:
        model: The model.
        parts: Its parts.
        device: Of the tables.
        dtype: Of the tables.
    """

    def __init__(
        self, model: nn.Module, parts: ModelParts, device: torch.device, dtype: torch.dtype
    ) -> None:
        rotary = parts.rotary_emb
        self.switch = None if rotary is None else switch_of(model, rotary)
        self._tables: dict[str | None, RopeTable] = {}
        self._takes_ids, self._device = parts.around is not None, device
        attend = [layer for layer in parts.layers if layer.new_state is None]
        for kind in {layer.rope_kind for layer in attend} if rotary is not None else ():
            call: Any = rotary if kind is None else partial(rotary, layer_type=kind)  # type: ignore[arg-type,misc]
            self._tables[kind] = RopeTable(call, device, dtype, self.switch)

    @property
    def recompute_above(self) -> int | None:
        """See `ModelShape`."""
        return self.switch.at if self.switch is not None and self.switch.recomputes else None

    def rows(
        self, program: Program, requests: Mapping[RequestId, RequestState]
    ) -> dict[str | None, Tables]:
        """Embeddings of the rows of a program, by kind.

        They depend on each row's request alone; a row that is dead has no request. Layers that are
        called as the model's forward calls them get token ids in their place, [1, T].
        """
        if self._takes_ids:
            ids: list[int] = []
            for row in program.rows:
                own = requests.get(row.request_id)
                ids += [0] * row.num_tokens if own is None else own.ids[row.lo : row.hi]
            return {None: (torch.tensor([ids], device=self._device),)}
        ranges = [(row.lo, row.hi) for row in program.rows]
        if self.switch is None:
            return self.of(ranges)
        lengths = []
        for row in program.rows:
            held = requests.get(row.request_id)
            known = (0, 0) if held is None else (held.num_prompt_tokens, len(held.ids))
            lengths.append(self.switch.length_of(*known))
        return self.of(ranges, lengths)

    def of(
        self, ranges: Sequence[tuple[int, int]], lengths: Sequence[int] | None = None
    ) -> dict[str | None, Tables]:
        """`RopeTable.of`, by kind."""
        return {kind: table.of(ranges, lengths) for kind, table in self._tables.items()}


class RopeTable:
    """Embeddings of positions, by the lengths that matter to the model.

    Args:
        rotary_emb: The model's module, or a call of it for one kind of layers.
        device: Of the tables.
        dtype: Of the tables.
        switch: How the frequencies depend on the length; None if they do not.
    """

    def __init__(
        self,
        rotary_emb: Callable[..., Any],
        device: torch.device,
        dtype: torch.dtype,
        switch: Switch | None = None,
    ) -> None:
        self._module = rotary_emb
        self._like = torch.empty(0, device=device, dtype=dtype)
        self.switch = switch
        self._tables: dict[bool, Tables] = {}
        """Tables of positions [0, n), grown by doubling, of short and long frequencies."""

    def _call(self, lo: int, hi: int, length: int) -> Tables:
        """The module's values of positions [lo, hi) in a call of a length, at least `hi`."""
        positions = torch.arange(lo, hi, device=self._like.device)
        if self.switch is None:
            found = self._module(self._like, positions.unsqueeze(0))
            return found if isinstance(found, tuple) else (found,)
        # Dynamic NTK keeps the longest length that it was called with; a short call ends that.
        first, last = positions.new_zeros((1, 1)), positions.new_full((1,), length - 1)
        self._module(self._like, first)
        cos, sin = self._module(self._like, torch.cat((positions, last)).unsqueeze(0))
        self._module(self._like, first)
        return cos[:, :-1], sin[:, :-1]

    def _rows(self, lo: int, hi: int, length: int) -> Tables:
        """Positions [lo, hi) of one length, at least `hi`."""
        switch = self.switch
        is_long = switch is not None and length > switch.at
        if switch is not None and is_long and not switch.is_binary:
            return self._call(lo, hi, length)
        found = self._tables.get(is_long)
        if found is None or hi > found[0].shape[1]:
            size = 1024
            while size < hi:
                size *= 2
            if switch is not None and not is_long:
                size = min(size, switch.at)  # a longer table would be a longer call
            found = self._tables[is_long] = self._call(0, size, max(size, length if is_long else 0))
        return tuple(table[:, lo:hi] for table in found)

    def of(self, ranges: Sequence[tuple[int, int]], lengths: Sequence[int] | None = None) -> Tables:
        """Embeddings of ranges of positions, packed: T tokens.

        Args:
            ranges: Positions [lo, hi) of each row.
            lengths: `Switch.length_of` each row; without them every position has its own.
        """
        parts = []
        for (lo, hi), length in zip(ranges, lengths or [0] * len(ranges), strict=True):
            parts += [self._rows(*part) for part in self._split(lo, hi, length)]
        if len(parts) == 1:
            return parts[0]
        return tuple(torch.cat(tables, 1) for tables in zip(*parts, strict=True))

    def _split(self, lo: int, hi: int, length: int) -> list[tuple[int, int, int]]:
        """Ranges of one length each: lo, hi, length."""
        switch = self.switch
        edge = hi if switch is None else max(length, switch.at)
        parts = [(lo, min(hi, edge), edge)] if lo < edge else []
        if switch is None or hi <= edge:
            return parts
        first = max(lo, edge)
        if switch.is_binary:
            return [*parts, (first, hi, hi)]
        return [*parts, *((p, p + 1, p + 1) for p in range(first, hi))]
