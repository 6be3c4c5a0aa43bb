"""Device tensors that the stages of one class read and write. Each class has one lane.

A lane holds the rows of one frame at a time. Everything that changes from step to step is data in
these tensors, copied there in one transfer.

A stage leaves the hidden state of every token in hidden_SD, for the next stage. hidden_SD has one
row per KV slot, and a spare last row for padding and dead rows. A token has a slot of its own as
long as it is under way. A stage gathers the hidden states of its group by slots, and writes them
back at its end. So parked frames, changes of groups, and rows that wait between two frames cost no
copies.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from qllm.cuda.pages import PagedKV
from qllm.kernels.tiles import Query, TilePart, Tiles, tile_rows
from qllm.runner.frame import Frame
from qllm.types import SamplingParams


class Bucket(NamedTuple):
    """A size for which a graph is captured."""

    tokens: int
    """Most tokens."""
    prefill: bool
    """True if rows may be longer than one token."""


class LaneRow(NamedTuple):
    """A row of a lane. A dead row has no KV."""

    ids: Sequence[int]
    lo: int
    kv: PagedKV | None


class LaneHead(NamedTuple):
    """A row that samples."""

    last: int
    """Index of the row's last token, in packed order."""
    position: int
    params: SamplingParams
    seed: int


class Lane:
    """Tensors for at most `max_tokens` tokens of at most `max_rows` rows.

    Args:
        max_tokens: T, the largest bucket.
        max_rows: R.
        max_pages: P, pages of the longest sequence.
        block: Queries of a prefill tile.
        hidden_SD: Hidden states by KV slot, and one spare row.
    """

    def __init__(
        self, max_tokens: int, max_rows: int, max_pages: int, block: int, hidden_SD: Tensor
    ) -> None:
        self.max_tokens, self.max_rows, self.max_pages = max_tokens, max_rows, max_pages
        self.block, self.hidden_SD = block, hidden_SD
        self.loaded: tuple[int, int] | None = None
        """Frame id and group of the rows whose data is loaded."""
        self._taken: Tensor | None = None
        self.prefill_tiles = max_tokens // block + max_rows
        sizes = {
            "ids": max_tokens, "pos": max_tokens, "slots": max_tokens, "seq": max_tokens,
            "gather": max_tokens, "tables": max_rows * max_pages, "decode": 4 * max_rows,
            "prefill": 4 * self.prefill_tiles, "last": max_rows, "positions": max_rows,
            "seeds": max_rows, "top_k": max_rows, "temperature": max_rows, "top_p": max_rows,
            "min_p": max_rows, "num_tokens": 1,
        }  # fmt: skip
        device = hidden_SD.device
        total = sum(sizes.values())
        self._host = torch.zeros(total, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._device = torch.zeros(total, dtype=torch.int64, device=device)
        cuda: Any = torch.cuda
        self._copied = cuda.Event() if device.type == "cuda" else None
        self._here: dict[str, Any] = {}
        self.on_device: dict[str, Tensor] = {}
        at = 0
        for name, size in sizes.items():
            for tensor, views in ((self._host, self._here), (self._device, self.on_device)):
                view = tensor[at : at + size]
                is_real = name in ("temperature", "top_p", "min_p")
                views[name] = view.view(torch.float64) if is_real else view
            at += size
        self._here = {name: view.numpy() for name, view in self._here.items()}
        self.on_device["slots"].fill_(-1)  # without loaded rows, all slots are padding
        self.tokens_R = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.peaks_R = torch.zeros(max_rows, dtype=torch.float32, device=device)

    def step_tensors(self, bucket: Bucket) -> tuple[Tensor, Tiles, Tensor]:
        """Return tables, tiles and slots of a bucket."""
        d, num = self.on_device, bucket.tokens
        rows = min(self.max_rows, num)
        parts = [TilePart(1, *(column[:rows] for column in d["decode"].view(4, -1)))]
        if bucket.prefill:
            tiles = num // self.block + self.max_rows
            columns = (column[:tiles] for column in d["prefill"].view(4, -1))
            parts.append(TilePart(self.block, *columns))
        tables = d["tables"].view(self.max_rows, self.max_pages)
        return tables, Tiles(tuple(parts), d["seq"][:num], d["pos"][:num]), d["slots"][:num]

    def load(self, rows: Sequence[LaneRow], heads: Sequence[LaneHead]) -> None:
        """Copy the data of the rows to the device, and make stale parts harmless."""
        if self._copied is not None:
            self._copied.synchronize()  # the previous transfer still reads the host's side
        h = self._here
        for name, nothing in (("slots", -1), ("seq", -1), ("pos", 0), ("ids", 0)):
            h[name][:] = nothing
        queries, at = [], 0
        tables = h["tables"].reshape(self.max_rows, self.max_pages)
        for r, (ids, lo, kv) in enumerate(rows):
            num = len(ids)
            h["ids"][at : at + num] = ids
            h["pos"][at : at + num] = range(lo, lo + num)
            if kv is not None:
                tables[r, : len(kv.pages)] = kv.pages
                h["slots"][at : at + num] = [kv.slot(t) for t in range(lo, lo + num)]
                h["seq"][at : at + num] = r
                queries.append(Query(r, at, lo, num))
            at += num
        h["gather"][:] = np.where(h["slots"] < 0, len(self.hidden_SD) - 1, h["slots"])
        h["num_tokens"][:] = at
        for name, tiles in zip(("decode", "prefill"), tile_rows(queries, self.block), strict=True):
            columns = h[name].reshape(4, -1)
            columns[:] = 0
            for i, (seq, tok, pos, num) in enumerate(tiles):
                columns[:, i] = seq, tok, num, pos
        self._load_heads(heads)
        self._device.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def _load_heads(self, heads: Sequence[LaneHead]) -> None:
        h = self._here
        for name in ("last", "positions", "seeds", "temperature", "top_k", "min_p"):
            h[name][:] = 0
        h["top_p"][:] = 1.0
        for i, (last, position, p, seed) in enumerate(heads):
            h["last"][i], h["positions"][i], h["seeds"][i] = last, position, seed
            h["temperature"][i], h["top_k"][i] = p.temperature, p.top_k
            h["top_p"][i], h["min_p"][i] = p.top_p, p.min_p

    def put(self, x_TD: Tensor) -> None:
        """Set the hidden states from which the loaded rows continue."""
        if x_TD is not self._taken:  # without states to put, they are in place already
            self.hidden_SD.index_copy_(0, self.on_device["gather"][: len(x_TD)], x_TD)

    def take(self, num_tokens: int) -> Tensor:
        """Return a copy of the hidden states of the loaded rows."""
        gather = self.on_device["gather"][:num_tokens]
        self._taken = self.hidden_SD.index_select(0, gather)
        return self._taken

    def forget(self, frame: Frame) -> None:
        """Forget the rows of a frame that is gone."""
        if self.loaded is not None and self.loaded[0] == frame.program.frame_id:
            self.loaded = self._taken = None
