"""The embedding and the output head of a model on all its ranks."""

import ctypes
import math
from array import array
from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from qllm.kernels import cpu
from qllm.models.discover import ModelParts
from qllm.runner.layers.linears import HEAD_BLOCK, Head, HeadBlocks
from qllm.runner.layers.native_parts import norm_of
from qllm.runner.protocol import NEVER
from qllm.sharded.desks import Desk, Desks
from qllm.sharded.group import EMBED, HEAD, Calls
from qllm.sharded.memory import SharedMemory
from qllm.types import Grain


class HeadCall(ctypes.Structure):
    """`HeadCall` in ranks.h."""

    _fields_ = (
        ("x", c_void_p),
        ("rows", c_int64),
        ("first_block", c_int64),
        ("end_block", c_int64),
        ("peaks", c_void_p),
        ("ids", c_void_p),
        ("logits", c_void_p),
        ("vocabulary", c_int64),
        ("desk", c_int64),
        ("is_new", c_int64),
        ("grain", c_int64),
        ("watch", c_void_p),
        ("seen", c_int64),
        ("stop_ns", c_int64),
        ("tasks_left", c_int64),
        ("is_done", c_int64),
        ("call_ns", c_int64),
        ("longest_ns", c_int64),
        ("kept_bytes", c_int64),
    )


class EmbedCall(ctypes.Structure):
    """`EmbedCall` in ranks.h."""

    _fields_ = (("x", c_void_p), ("ids", c_void_p), ("num", c_int64))


class RankEmbedding:
    """The lookup from token ids to the residual stream of the first layer.

    Args:
        group: Ranks.
        memory: Memory that they share.
        parts: Parts of the model.
    """

    def __init__(self, group: Calls, memory: SharedMemory, parts: ModelParts) -> None:
        self._group, self._memory = group, memory
        self._multiplier, like = parts.embedding_multiplier, parts.like
        self._num, self._width = parts.lm_head.out_features, parts.lm_head.in_features
        self._dtype = like.dtype

    def __call__(self, ids: list[int]) -> Tensor:
        """Return rows [T, D].

        Raises:
            IndexError: An id is not in the table.
        """
        if not 0 <= min(ids) <= max(ids) < self._num:
            wrong = next(i for i in ids if not 0 <= i < self._num)
            raise IndexError(f"token id {wrong} must be in [0, {self._num})")
        memory = self._memory
        numbers = memory.copy(torch.tensor(ids, dtype=torch.int64))
        x_TD = memory.empty((len(ids), self._width), self._dtype)
        place = memory.empty((ctypes.sizeof(EmbedCall),), torch.uint8)
        call = EmbedCall.from_address(place.data_ptr())
        call.x, call.ids, call.num = x_TD.data_ptr(), numbers.data_ptr(), len(ids)
        memory.share(place)
        self._group.call(EMBED, place.data_ptr())
        memory.share(x_TD)  # rank 0 has all rows
        return x_TD if self._multiplier is None else x_TD * self._multiplier


class RankHead(Head):
    """The output head: each rank multiplies by its token ids.

    A call that stops keeps what ranks have done on the frame's desk. `HeadBlocks.at` stays as it
    was until all ranks have done all blocks.

    Args:
        group: Ranks.
        memory: Memory that they share.
        desks: Pool of the frames' desks.
        parts: Parts of the model.
    """

    def __init__(self, group: Calls, memory: SharedMemory, desks: Desks, parts: ModelParts) -> None:
        self._group, self._memory, self._desks = group, memory, desks
        self.norm, self.kernel = norm_of(parts.norm), f"qllm {cpu.kind()} on {group.size} ranks"
        self.vocab_size, self.block_size = parts.lm_head.out_features, HEAD_BLOCK
        self.num_blocks = -(-self.vocab_size // HEAD_BLOCK)
        place = memory.empty((ctypes.sizeof(HeadCall),), torch.uint8)
        self._place, self._shared = place, HeadCall.from_address(place.data_ptr())
        self._ready: tuple[Tensor, Tensor] | None = None
        """Rows [B, D], and all of their logits [B, V]."""

    def best(
        self, x_BD: Tensor, blocks: HeadBlocks, peaks_B: "array[float]", ids_B: "array[int]"
    ) -> bool:
        desk, shape = self._desks.at(blocks.course), (self._group.size, len(x_BD))
        if not desk.held:
            floats, ints = (self._memory.empty(shape, t) for t in (torch.float32, torch.int64))
            desk.held = self._memory.copy(x_BD), floats, ints
        x, peaks, ids = desk.held
        if self._run(desk, blocks, x, peaks=peaks, ids=ids):
            for rank in range(self._group.size):
                found = zip(peaks[rank].tolist(), ids[rank].tolist(), strict=True)
                for row, (peak, token_id) in enumerate(found):
                    if is_better((peak, token_id), (peaks_B[row], ids_B[row])):
                        peaks_B[row], ids_B[row] = peak, token_id
        return True

    def ready(self, x_BD: Tensor, blocks: HeadBlocks, step: int) -> range:
        desk, shape = self._desks.at(blocks.course), (len(x_BD), self.vocab_size)
        if not desk.held:
            desk.held = self._memory.copy(x_BD), self._memory.empty(shape, x_BD.dtype)
        x, logits = desk.held
        if not self._run(desk, blocks, x, logits=logits):
            return range(0)
        self._ready = x_BD, logits
        return range(self.num_blocks)

    def __call__(self, x_BD: Tensor, block: int) -> Tensor:
        """Return the logits [B, up to block_size] of one block."""
        first = block * self.block_size
        if self._ready is not None and self._ready[0] is x_BD:
            return self._ready[1][:, first : first + self.block_size]
        logits = self._memory.empty((len(x_BD), self.vocab_size), x_BD.dtype)
        desk = self._desks.take()
        blocks = HeadBlocks(at=block, end=block + 1, grain=Grain.STEP, stop_ns=NEVER)
        blocks.tasks_left, blocks.course = NEVER, desk.address
        self._run(desk, blocks, self._memory.copy(x_BD), logits=logits)
        return logits[:, first : first + self.block_size]

    def _run(self, desk: Desk, blocks: HeadBlocks, x_BD: Tensor, **tensors: Tensor) -> bool:
        """Run blocks on all ranks; return True if all ranks are done.

        Args:
            desk: Desk of the frame.
            blocks: Range of blocks, and a stop.
            x_BD: Rows, in shared memory.
            tensors: Results in shared memory: `peaks` and `ids`, or `logits`.
        """
        call, stop = self._shared, ("grain", "watch", "seen", "stop_ns", "tasks_left")
        is_whole = self.num_blocks == blocks.end
        ctypes.pointer(call)[0] = HeadCall(
            **{name: tensor.data_ptr() for name, tensor in tensors.items()},
            **{name: getattr(blocks, name) for name in stop},
            x=x_BD.data_ptr(),
            rows=len(x_BD),
            first_block=0 if is_whole else blocks.at,
            end_block=blocks.end,
            vocabulary=self.vocab_size,
            desk=desk.address - 1,
            is_new=desk.is_new,
        )
        self._memory.share(self._place)
        self._group.call(HEAD, self._place.data_ptr())
        desk.is_new, desk.is_held, desk.num_bytes = False, not call.is_done, call.kept_bytes
        blocks.call_ns, blocks.longest_ns = call.call_ns, call.longest_ns
        if call.is_done:
            blocks.at, desk.held = blocks.end, ()
        return bool(call.is_done)


def is_better(one: tuple[float, int], best: tuple[float, int]) -> bool:
    """Return True if a logit with its token id wins against another one.

    NaN is larger than any number. Of equal logits the lower id wins.
    """
    (peak, token_id), (highest, chosen) = one, best
    if math.isnan(peak) or math.isnan(highest):
        both = math.isnan(peak) and math.isnan(highest)
        return token_id < chosen if both else math.isnan(peak)
    return peak > highest or (peak == highest and token_id < chosen)
