"""Consecutive ops of a program in one call of all ranks: `qllm.runner.sweep` over shared memory.

Tensors of a frame that an op reads or writes lie in memory that all ranks share. So a frame has one
state, which rank 0 parks, saves and restores. Other ranks keep only what they have done inside an
op, on a desk.
"""

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import c_int64

import torch
from torch import Tensor

from qllm.runner.buffers import LayerBuffers, Sizes, Storage
from qllm.runner.frame import Frame, LayerState, NewStep
from qllm.runner.layers.attention import Span
from qllm.runner.layers.native import NativeLayer
from qllm.runner.layers.native_experts import NativeBank
from qllm.runner.layers.work import Bank, Work
from qllm.runner.sweep import LayerOps, LayerOpStruct, Sweep, SweepStruct
from qllm.scheduler.program import Op, OpKind
from qllm.sharded.desks import Desks
from qllm.sharded.group import SWEEP, Calls
from qllm.sharded.memory import SharedMemory
from qllm.sharded.plan import ShardPlan

SPAN_INTS, UNIT_INTS = 6, 3
"""Integers of a `Span` and of a `Unit` in kernels.h."""


class SweepCall(ctypes.Structure):
    """`SweepCall` in ranks.h."""

    _fields_ = (
        ("sweep", SweepStruct),
        ("desk", c_int64),
        ("is_new", c_int64),
        ("done", c_int64),
        ("inside", c_int64),
        ("kept_bytes", c_int64),
    )


class SharedStorage(Storage):
    """Memory of buffers that all ranks read and write."""

    def __init__(self, memory: SharedMemory) -> None:
        super().__init__()
        self.memory = memory

    def fresh(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self.memory.empty(shape, dtype)


class BlockWork(Work):
    """Expert work of ranks on several hosts, each of which computes some columns of all slots.

    Each rank keeps its columns in a block, [S, columns]. The blocks of all ranks have the memory of
    `slots_SD`, one after the other.
    """

    __slots__ = ("blocks", "memory")

    blocks: list[Tensor]
    """Block of each rank."""
    memory: SharedMemory

    def results(self) -> Tensor:
        self.memory.fetch([(block, rank) for rank, block in enumerate(self.blocks)])
        return torch.cat(self.blocks, dim=1)


class RankBuffers(LayerBuffers):
    """Tensors of the layer that a call of ranks is in.

    Args:
        x_TD: Input of the layer.
        layer: Layer of rank 0.
        sizes: Sizes of the experts' work.
        storage: Memory of the tensors.
        widths: Widths of the tensors that ranks gather, by their fields of `SweepStruct`.
        has_shared: True if shared experts run in layers with routed ones.
        columns: Columns of each rank, of the banks whose ranks keep blocks: see `BlockWork`.
    """

    def __init__(
        self,
        x_TD: Tensor,
        layer: NativeLayer,
        sizes: Sizes,
        storage: SharedStorage,
        widths: Mapping[str, int],
        has_shared: bool,
        columns: Mapping[Bank, Sequence[range]],
    ) -> None:
        super().__init__(x_TD, layer, sizes, storage)
        self._memory, self._columns = storage.memory, columns
        self._unit_rows, num, dtype = sizes.unit_rows, len(x_TD), x_TD.dtype
        if has_shared and layer.router is not None:
            self.shared_TD = storage.take("shared", tuple(x_TD.shape), dtype)
        given = {name: storage.take(name, (num, width), dtype) for name, width in widths.items()}
        self.places = self._places() | {name: x.data_ptr() for name, x in given.items()}

    def load_from(self, state: LayerState) -> None:
        super().load_from(state)
        held = (self.mid_TD, self.normed_TD, self.ids_TK, self.weights_TK, self.slots_SD)
        work = state.work
        if work is not None and work.bank in self._columns:
            columns = self._columns[work.bank]
            for block, own in zip(self._blocks(columns), columns, strict=True):
                block.copy_(work.slots_SD[:, own.start : own.stop])
        for tensor in (*held, self.next_TD, self.shared_TD):
            if tensor is not None:
                self._memory.share(tensor)

    def _blocks(self, columns: Sequence[range]) -> list[Tensor]:
        """Return the block of each rank."""
        num = len(self.slots_SD)
        flat = self.slots_SD.view(-1)
        return [flat[num * own.start : num * own.stop].view(num, len(own)) for own in columns]

    def _work(self, bank: Bank, num_units: int) -> Work:
        columns = self._columns.get(bank)
        if columns is None:
            work = Work(bank, self.ids_TK, self._unit_rows)
        else:
            work = BlockWork(bank, self.ids_TK, self._unit_rows)
            work.blocks, work.memory = self._blocks(columns), self._memory
        work.slots_SD = self.slots_SD
        return work


def _counted(s: SweepStruct) -> int:
    """Return the slots of a restored frame that count as done. Ranks compute all of the op again.

    Units of one process follow each other. Ranks leave an op with no unit done.
    """
    if not s.pos:
        return 0
    last = (c_int64 * UNIT_INTS).from_address(s.units + (s.pos - 1) * UNIT_INTS * 8)
    return int(last[2])


class RankSweep(Sweep):
    """The layers of a model, in calls of all its ranks.

    Args:
        group: Ranks.
        memory: Memory that they share.
        banks: Experts of every layer; None for a dense layer.
        plan: Share of each rank.
        rows_from: Least rows of an ATTN op whose output projection is split by rows.
        piece_rows: Least rows of a piece that goes to another host while the next is computed.
    """

    def __init__(
        self,
        group: Calls,
        memory: SharedMemory,
        banks: Sequence[NativeBank | None],
        plan: ShardPlan,
        rows_from: int,
        piece_rows: int,
    ) -> None:
        layers = group.own.layers
        self._group, self._memory = group, memory
        self._rows_from, self.piece_rows = rows_from, piece_rows
        self._banks = tuple(banks)
        self._layers = [layer.native for layer in layers]
        self._kv_widths = layers[0].mixer.slab[1:]
        self._widths = {
            "heads": max(layer.native.out.num_in for layer in layers),
            "inner": max(layer.mlp_width for layer in layers),
            "queries": max(layer.query_columns for layer in layers),
            "expert_inner": max(layer.expert_inner for layer in layers),
        }
        """Widths of gathered tensors. A call uses the same tensors for several layers."""
        self._has_shared = any(layer.has_shared for layer in layers)
        self._columns: dict[Bank, Sequence[range]] = {}
        for i, bank in enumerate(banks if group.hosts else ()):
            shares = [rank.layers[i] for rank in plan.ranks]
            if bank is not None and shares[0].cut is not None:
                self._columns[bank] = [share.columns for share in shares]
        self._num_experts = max((bank.num_experts for bank in banks if bank is not None), default=0)
        self._structs = group.own.structs
        self._spare, self._residency = {}, None
        self.courses = self.desks = Desks()
        place = memory.empty((ctypes.sizeof(SweepCall),), torch.uint8).zero_()
        self._place, self._shared = place, SweepCall.from_address(place.data_ptr())

    def enter(self) -> None:
        """Do nothing: ranks have packed their weights."""

    def leave(self) -> None:
        """Do nothing: ranks keep their weights."""

    def _call(self, s: SweepStruct) -> None:
        desk, call, counted = self.desks.at(s.course), self._shared, _counted(s)
        s.rows_from, s.piece_rows = self._rows_from, self.piece_rows
        call.sweep, call.desk, call.is_new = s, desk.address - 1, desk.is_new
        self._memory.share(self._place)
        self._group.call(SWEEP, ctypes.addressof(call))
        ctypes.pointer(s)[0] = call.sweep
        desk.done, desk.is_held, desk.num_bytes = call.done, bool(call.inside), call.kept_bytes
        desk.is_new = False
        s.slots_done -= counted
        s.begun = 0
        s.pos, s.num_units = 0, s.tokens * s.top_k  # those of all ranks, or fewer

    def _input(self, frame: Frame, group: int, layer: int) -> Tensor:
        x = frame.activate(group)
        if not self._memory.holds(x):
            x = frame.x_TD = self._memory.copy(x)
        return x

    def _prepared(
        self, frame: Frame, ops: tuple[Op, ...], x_TD: Tensor, new_step: NewStep
    ) -> LayerOps:
        size, memory, steps, keep = self._group.size, self._memory, [], []
        place = memory.empty((size * len(ops) * ctypes.sizeof(LayerOpStruct),), torch.uint8).zero_()
        structs = (LayerOpStruct * (size * len(ops))).from_address(place.data_ptr())
        for i, (kind, _, group, lo, hi) in enumerate(ops):
            parts = structs[i :: len(ops)]
            for part in parts:
                part.kind, part.lo, part.hi = kind, lo, hi
            if kind is not OpKind.ATTN:
                continue
            step = frame.step_of(group, lo, hi, new_step)
            steps.append(step)
            tables = frame.rope.of(group, lo, hi, frame.tokens(group))
            copies = [memory.copy(table) for table in tables]
            spans = self._spans(step.spans, x_TD.dtype)
            keep += [spans, *copies]
            for part, own in zip(parts, spans, strict=True):
                part.num_spans, part.whole = len(step.spans), step.num_attended == step.num_tokens
                part.spans = own.data_ptr()
                part.cos, part.sin = copies[0].data_ptr(), copies[-1].data_ptr()
        memory.share(place)
        return LayerOps(ops, structs, steps, (place, *keep))

    def _spans(self, spans: Sequence[Span], dtype: torch.dtype) -> Tensor:
        """Return the spans for each rank, [ranks, spans, 6], with the addresses of its KV."""
        rows: list[list[list[int]]] = [[] for _ in range(self._group.size)]
        for kv, at, lo, hi in spans:
            for row, base in zip(rows, kv.bases(self._kv_widths, dtype), strict=True):
                row.append([*base, kv.capacity, at, lo, hi])
        found = self._memory.empty((len(rows), len(spans), SPAN_INTS), torch.int64)
        found.copy_(torch.tensor(rows, dtype=torch.int64).view(found.shape))
        self._memory.share(found)
        return found

    def _buffers(
        self, x_TD: Tensor, layer: NativeLayer, sizes: Sizes, storage: Storage | None
    ) -> LayerBuffers:
        shared = storage if isinstance(storage, SharedStorage) else SharedStorage(self._memory)
        return RankBuffers(
            x_TD, layer, sizes, shared, self._widths, self._has_shared, self._columns
        )
