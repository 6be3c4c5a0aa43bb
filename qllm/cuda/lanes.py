"""The device tensors that the stages of one class read and write: one lane per class.

A lane holds the rows of one frame at a time. Everything that changes from step to step is data in
these tensors, copied there in one transfer; the residual stream x_TD is what a stage leaves for
the next. Frames of other lanes never touch it, so a frame parked between stages costs nothing;
when another frame of the same class wants the lane, x_TD is copied out first.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from qllm.cuda.pages import PagedKV
from qllm.kernels.tiles import Query, TilePart, Tiles, tile_rows
from qllm.models.frame import Frame
from qllm.types import SamplingParams


class Bucket(NamedTuple):
    """What a graph is captured for."""

    tokens: int
    """Most tokens."""
    prefill: bool
    """Rows may be longer than one token."""


class LaneRow(NamedTuple):
    """One row as a lane takes it; a dead one has no KV."""

    ids: Sequence[int]
    lo: int
    kv: PagedKV | None


class LaneHead(NamedTuple):
    """A row that samples."""

    last: int
    """Its last token, in packed order."""
    position: int
    params: SamplingParams
    seed: int


class Lane:
    """Tensors for at most `max_tokens` tokens of at most `max_rows` rows.

    Args:
        max_tokens: T, the largest bucket.
        max_rows: R.
        max_pages: P, pages of the longest sequence.
        width: Of the residual stream.
        block: Queries of a prefill tile.
        like: Dtype and device of the weights.
    """

    def __init__(
        self, max_tokens: int, max_rows: int, max_pages: int, width: int, block: int, like: Tensor
    ) -> None:
        self.max_rows, self.max_pages, self.block = max_rows, max_pages, block
        self.frame: Frame | None = None
        """Whose x_TD is here."""
        self.loaded: tuple[int, int] | None = None
        """Frame id and group of the rows whose data is here."""
        self.x_TD = like.new_zeros((max_tokens, width))
        self._prefill_tiles = max_tokens // block + max_rows
        sizes = {
            "ids": max_tokens, "pos": max_tokens, "slots": max_tokens, "seq": max_tokens,
            "tables": max_rows * max_pages, "decode": 4 * max_rows,
            "prefill": 4 * self._prefill_tiles, "last": max_rows, "positions": max_rows,
            "seeds": max_rows, "top_k": max_rows, "temperature": max_rows, "top_p": max_rows,
            "min_p": max_rows, "num_tokens": 1,
        }  # fmt: skip
        device = like.device
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
        self.tokens_R = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.peaks_R = torch.zeros(max_rows, dtype=torch.float32, device=device)

    def step_tensors(self, bucket: Bucket) -> tuple[Tensor, Tiles, Tensor]:
        """Tables, tiles and slots of a bucket."""
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
        """Copy the data of the rows to the device; stale parts are made harmless."""
        if self._copied is not None:
            self._copied.synchronize()  # the transfer of before still reads the host's side
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
        for name, nothing in (("last", 0), ("temperature", 0.0), ("top_k", 0), ("top_p", 1.0)):
            h[name][:] = nothing
        for i, (last, position, p, seed) in enumerate(heads):
            h["last"][i], h["positions"][i], h["seeds"][i] = last, position, seed
            h["temperature"][i], h["top_k"][i] = p.temperature, p.top_k
            h["top_p"][i], h["min_p"][i] = p.top_p, p.min_p

    def claim(self, frame: Frame) -> None:
        """Make room for a frame's x_TD; that of the frame before is copied out."""
        if self.frame is frame:
            return
        before = self.frame
        if before is not None:
            if self.holds(before.x_TD):
                before.x_TD = before.x_TD.clone()
            if self.holds(before.master_TD):
                before.master_TD = before.master_TD.clone()
        self.frame = frame

    def holds(self, x_TD: Tensor | None) -> TypeGuard[Tensor]:
        """Whether a tensor is this lane's x_TD."""
        return x_TD is not None and x_TD.data_ptr() == self.x_TD.data_ptr()

    def forget(self, frame: Frame) -> None:
        """A frame is gone."""
        if self.frame is frame:
            self.frame = None
        if self.loaded is not None and self.loaded[0] == frame.program.frame_id:
            self.loaded = None
