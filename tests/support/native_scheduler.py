"""The native scheduler: `qllm.scheduler.scheduler.Scheduler` in C++ on one block of memory.

The same source compiles for a GPU (docs/design/device-loop.md). Here it is the engine's scheduler
on the host: it decides on integers, and this class keeps the `Request` objects of the engine up
to date. Decisions are those of `Scheduler`, one by one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from qllm.device import layout
from qllm.device.block import FRAME, ROW, Block
from qllm.device.deciding import SLOT, NativeDecider
from qllm.device.layout import NONE
from qllm.errors import CheckpointError, PolicyError
from qllm.plan import CutRule, ModelShape
from qllm.scheduler.be_share import Owed
from qllm.scheduler.blame import Blame
from qllm.scheduler.blocks import SwapSpace
from qllm.scheduler.decision import Drop, Effect, Limits, Parked
from qllm.scheduler.program import Index, Program
from qllm.scheduler.request import Request
from qllm.scheduler.ride import Riding
from qllm.scheduler.rules import check_state
from qllm.types import NS_PER_MS, FrameId, Frontier, RequestId


class NativePool:
    """The KV blocks of a block of state, as `qllm.scheduler.blocks.BlockPool` shows them."""

    def __init__(self, block_size: int, block: Block) -> None:
        self.block_size = block_size
        self.num_blocks = block.sizes["num_blocks"]
        self.block = block

    @property
    def num_free(self) -> int:
        """Blocks nobody holds."""
        return self.block.get("num_free")

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens of one request need."""
        return -(-num_tokens // self.block_size)

    def check(self, tables: Mapping[RequestId, Sequence[int]]) -> None:
        """See `Block.check_blocks`."""
        self.block.check_blocks(tables)


class NativeScheduler(NativeDecider):
    """State of the decisions. One owner: the engine loop.

    Args:
        policy: A `RankPolicy`; its `rank` is compiled here.
        shape: Layers of the model.
        cuts: Where ops are cut.
        limits: Settings.
        capacity: Live requests there is room for at first; the block grows.
        settings: More of `NativeDecider`.

    Raises:
        ConfigError: The policy cannot be compiled, or numba or the extension is missing.
    """

    def __init__(
        self,
        policy: Any,
        shape: ModelShape,
        cuts: CutRule,
        limits: Limits,
        *,
        capacity: int = 256,
        **settings: Any,
    ) -> None:
        super().__init__(policy, shape, cuts, limits, capacity=capacity, **settings)
        self.requests: dict[RequestId, Request] = {}
        self._slots: dict[RequestId, int] = {}
        self.pool = NativePool(limits.block_size, self.block)
        self.swap, self.num_spared = SwapSpace(0), 0
        self.away: dict[RequestId, Parked] = {}

    @property
    def riding(self) -> Riding:
        """What other tiers may take from decoding requests of the best tier."""
        return Riding(*(self.block.get(f"ride_{name}") for name in Riding._fields))

    @property
    def owed(self) -> Owed:
        """Return the time that BE is owed, and the times that both classes have had."""
        get = self.block.get
        owed = (get("owed_ns"), get("owed_since_ns"))
        flags = (bool(get(name)) for name in ("owed_ls", "owed_grows", "owed_pays"))
        return Owed(*owed, *flags, get("ls_ns"), get("be_ns"), get("paid_ns"))

    @property
    def suspects(self) -> list[RequestId]:
        """Requests of a frame that raised; rerun one by one, before anything else."""
        slots = self.block.ints("suspects", self.block.get("num_suspects"))
        return [self.block.request(slot)[0] for slot in slots]

    # -- requests come and go

    def add(self, request: Request, now_ns: int) -> None:
        """A request arrived."""
        slot = self._add(request)
        if request.num_output_tokens:
            restore(self.block, slot, request)

    def _add(self, request: Request) -> int:
        ttft_ms, tpot_ms = request.slo
        numbers = (
            request.request_id,
            request.priority,
            request.arrival_ns,
            NONE if ttft_ms is None else int(ttft_ms * NS_PER_MS),
            NONE if tpot_ms is None else int(tpot_ms * NS_PER_MS),
            request.num_prompt_tokens,
        )
        slot: int = self._do(self.native.add, *numbers)
        if slot < 0:
            old = self.block.sizes["capacity"]
            self.block = self.pool.block = grown(self.block, 2 * old)
            self._do(self.native.add_slots, old)
            slot = self._do(self.native.add, *numbers)
        self.requests[request.request_id] = request
        self._slots[request.request_id] = slot
        return slot

    def remove(self, request_id: RequestId, now_ns: int) -> list[Effect]:
        """A request ended, for whatever reason: its row dies, its blocks come back."""
        request = self.requests.pop(request_id)
        self._do(self.native.remove, self._slots.pop(request_id))
        request.finished = True
        request.block_table = []
        request.reset()
        return self._take_effects()

    def blame(self, error: PolicyError, now_ns: int) -> Blame:
        """Every request: a compiled rank cannot raise, so no single one is to blame."""
        return Blame(tuple(self.requests), False)

    def evict(self, request_id: RequestId, for_request: RequestId) -> list[Effect]:
        """Take the KV of a request; it starts again from its first token."""
        owed = self.block.get("num_effects")
        self._do(self.native.evict, self._slots[request_id], for_request)
        return self._take_effects(owed)

    def adopt(self, request: Request, *, swapped: bool = False) -> None:
        """Take over a request of a checkpoint: its counters stand, its blocks are taken anew.

        Raises:
            CheckpointError: Its KV does not fit now.
        """
        front = request.frontier
        reached = request.num_computed_tokens if front is None else front.hi
        need, free = self.pool.blocks_for(reached), self.pool.num_free
        if need > free:
            raise CheckpointError(
                f"a request of the checkpoint needs {need} KV blocks, {free} are free; raise "
                "max_kv_tokens or let other requests finish"
            )
        slot = self._add(request)
        restore(self.block, slot, request)
        self._do(self.native.adopt, slot)
        self._refresh(request)

    def adopt_frame(
        self, program: Program, index: Index, dead: set[RequestId], now_ns: int
    ) -> None:
        """Take over a parked frame whose live requests were adopted.

        Raises:
            CheckpointError: It has more rows than there are seats.
        """
        if len(program.rows) > self.limits.max_num_seqs:
            raise CheckpointError(
                f"a frame of the checkpoint has {len(program.rows)} rows; max_num_seqs is "
                f"{self.limits.max_num_seqs}"
            )
        parked = Parked(program=program, index=index, parked_ns=now_ns, dead=set(dead))
        frame = self._do(self.native.new_frame)
        restore_frame(self.block, frame, parked, self._slots)
        self._do(self.native.park, frame)
        self.frames[program.frame_id] = parked
        for row in parked.held_rows():
            self.requests[row.request_id].frame_id = program.frame_id

    def new_frame_id(self) -> FrameId:
        """An id no frame had before."""
        frame_id = self.block.get("next_frame_id") + 1
        self.block.set(next_frame_id=frame_id)
        return frame_id

    # -- what the engine sees of them

    def _starts(self, rows: Sequence[tuple[int, ...]], now_ns: int) -> None:
        for numbers in rows:
            request = self.requests[numbers[0]]
            if not request.block_table:
                request.admitted_ns = request.last_progress_ns = now_ns
            self.block.extend_table(numbers[SLOT], request.block_table)

    def _resumes(self, parked: Parked) -> None:
        for row in parked.held_rows():
            self.requests[row.request_id].frame_id = None

    def _evicted(self, request_id: RequestId) -> None:
        request = self.requests[request_id]
        request.block_table = []
        request.reset()
        request.evictions += 1

    def _moved(self, parked: Parked) -> None:
        for row in parked.program.rows:
            if row.request_id not in parked.dead:
                self._refresh(self.requests[row.request_id])

    def failed(self) -> tuple[list[Effect], list[Request]]:
        """The running program raised: drop its frame and rerun its requests one by one.

        Returns:
            Effects, and the requests that failed alone: they must end in `error`.
        """
        program, slots = self._fail()
        return [Drop(program)], [self.requests[self.block.request(slot)[0]] for slot in slots]

    def _refresh(self, request: Request) -> None:
        """Bring the engine's view of a request up to date."""
        slot = self._slots[request.request_id]
        (_, _, _, _, _, request.served_ns, request.last_progress_ns, first_ns, last_ns) = (
            numbers := self.block.request(slot)
        )[:9]
        request.first_token_ns = None if first_ns == NONE else first_ns
        request.last_token_ns = None if last_ns == NONE else last_ns
        _, request.num_tokens, request.num_computed_tokens, *rest = numbers[13:]
        lo, hi, layer, frame, _, request.preemptions, request.failures = rest[3:10]
        request.frontier = None if layer < 0 else Frontier(lo, hi, layer)
        request.frame_id = None if frame < 0 else self.block.frame(frame)[0]
        self.block.extend_table(slot, request.block_table)

    def check(self) -> None:
        """Check the invariants of the state; called by tests after every step, and when idle.

        Raises:
            InvariantError: Requests, frames, blocks and order do not agree.
        """
        check_state(self.requests, self.frames, self.pool, self.swap, self.away)
        self.block.check_order(self._slots)


def grown(block: Block, capacity: int) -> Block:
    """A copy with room for more requests; the new slots are not linked yet."""
    bigger = Block({**block.sizes, "capacity": capacity}, block.zeros)
    own = {"capacity", *(f"at_{section.name}" for section in layout.SECTIONS)}
    num_cells = layout.STATE.itemsize // 8
    for at in set(range(num_cells)) - {block.index(name) for name in own}:
        bigger.memory[at] = block.memory[at]
    for section in layout.SECTIONS:
        old = block.array(section.name)
        bigger.array(section.name)[: len(old)] = old
    return bigger


def restore(block: Block, slot: int, request: Request) -> None:
    """Write the counters of a request that was added as a new one."""
    record = block.array("requests")[slot]
    for name in ("served_ns", "last_progress_ns", "evictions", "preemptions", "failures"):
        record[name] = getattr(request, name)
    for name in ("first_token_ns", "last_token_ns"):
        at_ns = getattr(request, name)
        record[name] = NONE if at_ns is None else at_ns
    record["num_tokens"] = request.num_tokens
    record["num_computed"] = request.num_computed_tokens
    if request.frontier is not None:
        record["front_lo"], record["front_hi"], record["front_layer"] = request.frontier


def restore_frame(block: Block, frame: int, parked: Parked, slots: Mapping[RequestId, int]) -> None:
    """Write a parked frame, and to its live requests that they are in it."""
    program, index = parked.program, parked.index
    FRAME.pack_into(
        block.bytes,
        block.offsets["frames"] + frame * FRAME.size,
        *(program.frame_id, parked.parked_ns, program.stop_below, len(program.rows)),
        *(program.layer_at(index), program.inside_layer(index), program.grain, -1, 0),
    )
    at, requests = block.rows_at(frame), block.array("requests")
    for row, samples in zip(program.rows, program.samples, strict=True):
        is_dead = row.request_id in parked.dead
        slot = 0 if is_dead else slots[row.request_id]
        flags = layout.SAMPLES * samples | layout.DEAD * is_dead
        ROW.pack_into(block.bytes, at, *row, slot, flags)
        at += ROW.size
        if not is_dead:
            requests[slot]["frame"] = frame
