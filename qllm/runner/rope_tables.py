"""Tables of position embeddings, and the embeddings of the rows of a frame.

Static rope types give a position the same values in every call, so values are computed once into a
table. Other types also depend on a length (`qllm.runner.rope`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

Tables = tuple[Tensor, ...]
"""Tables of angles: cos and sin, each [1, T, H], or complex numbers [1, T, H / 2]."""


@dataclass(frozen=True, slots=True)
class Switch:
    """The dependence of a model's frequencies on the length."""

    at: int
    """Greatest length with the original frequencies."""
    is_binary: bool
    """True if all lengths above `at` have the same values. Otherwise each length has its own
    values."""
    recomputes: bool
    """True if KV of a length up to `at` is not used for greater lengths."""

    def length_of(self, num_prompt_tokens: int, num_tokens: int) -> int:
        """Return the length n whose frequencies apply to positions below n.

        A later position p has length p + 1.

        Args:
            num_prompt_tokens: Number of prompt tokens of the request.
            num_tokens: Number of prompt and output tokens known now.
        """
        if self.recomputes and num_tokens > self.at:
            return num_tokens
        return num_prompt_tokens

    def regime(self, num_prompt_tokens: int, num_tokens: int) -> str:
        """Return a name of the frequencies.

        Requests with equal names have equal frequencies everywhere.
        """
        length = self.length_of(num_prompt_tokens, num_tokens)
        if length <= self.at:
            return "short"
        return "long" if self.is_binary else f"length {length}"


class RopeRows(NamedTuple):
    """Embeddings of positions [0, n)."""

    tables: Tables
    num_positions: int
    places: list[tuple[int, int]]
    """Address of each table, and the bytes of a position in it."""

    @classmethod
    def of(cls, given: Tables) -> "RopeRows":
        """Return tables together with their addresses."""
        tables = tuple(t.contiguous() for t in given)
        num = tables[0].shape[1]
        return cls(tables, num, [(t.data_ptr(), t.nbytes // num) for t in tables])


class RopeTable:
    """Embeddings of positions, for every length that the model distinguishes.

    Args:
        rotary_emb: Rotary module of the model, or a call of the module for one kind of layers.
        device: Device of the tables.
        dtype: Dtype of the tables.
        switch: Dependence of the frequencies on the length; None if there is none.
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
        self._tables: dict[bool, RopeRows] = {}
        """Tables of positions [0, n), with short (False) and long (True) frequencies. A table grows
        by doubling."""

    def _call(self, lo: int, hi: int, length: int) -> Tables:
        """Return the module's values of positions [lo, hi) in a call of `length`, at least `hi`."""
        positions = torch.arange(lo, hi, device=self._like.device)
        if self.switch is None:
            found = self._module(self._like, positions.unsqueeze(0))
            return found if isinstance(found, tuple) else (found,)
        # Dynamic NTK keeps the greatest length of any call. A short call resets this length.
        first, last = positions.new_zeros((1, 1)), positions.new_full((1,), length - 1)
        self._module(self._like, first)
        cos, sin = self._module(self._like, torch.cat((positions, last)).unsqueeze(0))
        self._module(self._like, first)
        return cos[:, :-1], sin[:, :-1]

    def _rows(self, lo: int, hi: int, length: int) -> Tables:
        """Return the values of positions [lo, hi) for `length`, at least `hi`."""
        found = self._table(hi, length)
        if found is None:
            return self._call(lo, hi, length)
        return tuple(table[:, lo:hi] for table in found.tables)

    def _table(self, hi: int, length: int) -> RopeRows | None:
        """Return a table with the positions below `hi` for `length`; None if there is no table."""
        switch = self.switch
        is_long = switch is not None and length > switch.at
        if switch is not None and is_long and not switch.is_binary:
            return None
        found = self._tables.get(is_long)
        if found is None or hi > found.num_positions:
            size = 1024
            while size < hi:
                size *= 2
            if switch is not None and not is_long:
                size = min(size, switch.at)  # a longer table would need a longer call
            made = self._call(0, size, max(size, length if is_long else 0))
            found = self._tables[is_long] = RopeRows.of(made)
        return found

    def rows_of(self, lo: int, hi: int, length: int) -> RopeRows | None:
        """Return the table that contains positions [lo, hi) contiguously; None if there is none."""
        parts = self._split(lo, hi, length)
        return self._table(*parts[0][1:]) if len(parts) == 1 else None

    def of(self, ranges: Sequence[tuple[int, int]], lengths: Sequence[int] | None = None) -> Tables:
        """Return the embeddings of ranges of positions, packed: T tokens.

        Args:
            ranges: Positions [lo, hi) of each row.
            lengths: Result of `Switch.length_of` for each row; None gives every position its own
                length.
        """
        parts = []
        for (lo, hi), length in zip(ranges, lengths or [0] * len(ranges), strict=True):
            parts += [self._rows(*part) for part in self._split(lo, hi, length)]
        if len(parts) == 1:
            return parts[0]
        return tuple(torch.cat(tables, 1) for tables in zip(*parts, strict=True))

    def _split(self, lo: int, hi: int, length: int) -> list[tuple[int, int, int]]:
        """Return ranges of positions that have one length each, as (lo, hi, length)."""
        switch = self.switch
        edge = hi if switch is None else max(length, switch.at)
        parts = [(lo, min(hi, edge), edge)] if lo < edge else []
        if switch is None or hi <= edge:
            return parts
        first = max(lo, edge)
        if switch.is_binary:
            return [*parts, (first, hi, hi)]
        return [*parts, *((p, p + 1, p + 1) for p in range(first, hi))]


class RowRopes:
    """The embeddings of the rows of a program, packed, and made on demand.

    Args:
        tables: Tables of the model, by kind (`LayerParts.rope_kind`); empty if layers have none.
        ranges: Positions of the rows: see `RopeTable.of`.
        lengths: Lengths of the rows: see `RopeTable.of`.
        given: Embeddings of the kind None, used instead of the tables.
    """

    def __init__(
        self,
        tables: Mapping[str | None, RopeTable],
        ranges: Sequence[tuple[int, int]],
        lengths: Sequence[int] | None = None,
        given: Tables | None = None,
    ) -> None:
        self._tables, self._ranges, self._lengths = tables, ranges, lengths
        self._whole: dict[str | None, Tables] = {} if given is None else {None: given}
        self._parts: dict[tuple[int, int, int, str | None], Tables] = {}
        self._kept: RopeRows | None = None
        """Table whose addresses kernels use. Meanwhile the model may have made a longer table."""

    def of(
        self, group: int, lo: int, hi: int, tokens: Tensor | None, kind: str | None = None
    ) -> Tables:
        """Return the embeddings of tokens [lo, hi) of a group; empty if there are none.

        Args:
            group: Number of the group.
            lo: First token.
            hi: End of the tokens.
            tokens: Packed positions of the group's tokens; None if the group has all tokens.
            kind: Kind of the embeddings.
        """
        key = (group, lo, hi, kind)
        found = self._parts.get(key)
        if found is None:
            found = self._all(kind)
            if tokens is not None:
                found = tuple(t.index_select(1, tokens.to(t.device)) for t in found)
            if found and hi - lo != found[0].shape[1]:
                found = tuple(t[:, lo:hi] for t in found)
            self._parts[key] = found
        return found

    def _all(self, kind: str | None) -> Tables:
        if kind not in self._whole:
            table = self._tables.get(kind)
            self._whole[kind] = () if table is None else table.of(self._ranges, self._lengths)
        return self._whole[kind]

    def addresses(self, group: int, lo: int, hi: int, tokens: Tensor | None) -> list[int]:
        """Return the addresses of the tensors of `of`, valid as long as this object lives.

        A single row is read in place in the tables. A torch slice would take a tenth of a
        millisecond when the weights of a step have evicted all code from the caches.
        """
        if len(self._ranges) == 1 and None in self._tables:
            (first, end), length = self._ranges[0], self._lengths[0] if self._lengths else 0
            self._kept = self._kept or self._tables[None].rows_of(first, end, length)
            if self._kept is not None:
                return [address + (first + lo) * size for address, size in self._kept.places]
        found = tuple(t.contiguous() for t in self.of(group, lo, hi, tokens))
        self._parts[group, lo, hi, None] = found
        return [t.data_ptr() for t in found]


NO_ROPES = RowRopes({}, ())
