"""Tiles of consecutive queries of one sequence, which an attention call reads."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

PREFILL_ROWS = 64
"""Approximate number of (query, head) pairs of a prefill tile."""
FEWEST_QUERIES = 8
"""Fewest queries that a prefill tile has room for."""


class TilePart(NamedTuple):
    """Tiles of at most `block` queries, as int32 tensors of one length; empty ones have `num` 0."""

    block: int
    seq: Tensor
    """Row of the page tables."""
    tok: Tensor
    """First query, in packed order."""
    num: Tensor
    """Number of queries."""
    pos: Tensor
    """Position of the first query in its sequence."""

    @property
    def num_tiles(self) -> int:
        """Number of tiles, with the empty ones."""
        return self.seq.shape[0]


class Tiles(NamedTuple):
    """Decode tiles (block 1) and prefill tiles, and the same facts per token for the references."""

    parts: tuple[TilePart, ...]
    seq_T: Tensor
    """Sequence of each token, -1 for none."""
    pos_T: Tensor
    """Position of each token."""


def query_block(heads_per_group: int) -> int:
    """Return the number of queries of a prefill tile."""
    return max(FEWEST_QUERIES, PREFILL_ROWS // heads_per_group)


class Query(NamedTuple):
    """Tokens [tok, tok + num) of a call: positions [pos, pos + num) of sequence `seq`."""

    seq: int
    tok: int
    pos: int
    num: int


def tile_rows(queries: Sequence[Query], block: int) -> tuple[list[Query], list[Query]]:
    """Cut queries into decode tiles (one query in all) and prefill tiles of at most `block`."""
    decode = [query for query in queries if query.num == 1]
    prefill = [
        Query(seq, tok + a, pos + a, min(block, num - a))
        for seq, tok, pos, num in queries
        if num > 1
        for a in range(0, num, block)
    ]
    return decode, prefill


def tiles_of(queries: Sequence[Query], num_tokens: int, block: int, device: torch.device) -> Tiles:
    """Return the tiles of a call, on the device.

    Args:
        queries: Queries in packed order. Tokens that no query covers are dead.
        num_tokens: Tokens of the call.
        block: Queries of a prefill tile.
        device: Device of the tensors.
    """
    decode, prefill = tile_rows(queries, block)
    seq, pos = [-1] * num_tokens, [0] * num_tokens
    for query in queries:
        for i in range(query.num):
            seq[query.tok + i], pos[query.tok + i] = query.seq, query.pos + i
    parts = []
    for size, tiles in ((1, decode), (block, prefill)):
        columns = zip(*tiles, strict=True) if tiles else ((),) * 4
        q, t, p, n = (torch.tensor(c, dtype=torch.int32).to(device) for c in columns)
        parts.append(TilePart(size, q, t, n, p))
    as_tensor = [torch.tensor(x, dtype=torch.int64).to(device) for x in (seq, pos)]
    return Tiles(tuple(parts), *as_tensor)
