"""A world whose runner misses experts: real slots and threads, reads that a test lets end."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from qllm.engine.storage.reads import DiskOrder, ReadThreads
from qllm.engine.storage.waits import ExpertWaits
from qllm.models.weights.expert_file import (
    ExpertFile,
    ExpertLayer,
    parts_of,
    room_for,
    written,
)
from qllm.runner.protocol import Stop
from qllm.runner.residency import FileResidency, Missing, Residency
from qllm.scheduler.program import Index, OpKind, Program
from qllm.scheduler.scheduler import Scheduler
from qllm.sim.runner import SimCosts
from qllm.sim.world import LIMITS, FlakyRunner, World
from qllm.types import NS_PER_S, RequestId
from tests.support import waiting

NUM_EXPERTS, TOP_K = 40, 2
SLOT_BYTES = 4096
DEADLINE_NS = 30 * NS_PER_S


def _wait_for(condition: Callable[[], Any]) -> None:
    waiting.wait_for(condition, 10)


Experts = Callable[[RequestId], Sequence[int]]


def own_experts(request_id: RequestId) -> Sequence[int]:
    """Two experts that no other request uses."""
    return (2 * request_id, 2 * request_id + 1)


def file_of(folder: Path, num_layers: int = 1) -> ExpertFile:
    """A file of layers. Every byte of an expert is its row of the table and one."""
    layers = [
        ExpertLayer(f"layers.{i + 1}.experts", NUM_EXPERTS, 24, 16, parts_of({"up": 4000}))
        for i in range(num_layers)
    ]
    with written(folder / "experts", {"weights": "a"}, layers) as writer:
        for i, layer in enumerate(layers):
            writer.start(layer)
            for expert in range(NUM_EXPERTS):
                room = room_for(layer.expert_bytes)
                room[:] = bytes([i * NUM_EXPERTS + expert + 1]) * layer.expert_bytes
                writer.write(expert, room)
            writer.finish((None, None))
    return ExpertFile(folder / "experts", {"weights": "a"})


class MissingRunner(FlakyRunner):
    """A runner whose programs need the experts of their requests from layer 1 on, in any order.

    Each layer of the file needs the same numbers.
    """

    residency: Residency
    experts_of: Experts

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self.missed: dict[int, Missing] = {}
        self.ranges: set[RequestId] = set()
        """Requests that need all of their experts at once."""
        self.used: dict[tuple[int, int], set[int]] = {}
        """Experts that each EXPERTS op has computed with, by frame and op."""

    def run(self, program: Program, start: Index, stop: Stop) -> Index:
        self.missed.pop(program.frame_id, None)
        dead, num_layers = self.frames[program.frame_id].dead, self.residency.num_layers
        rows = [row.request_id for row in program.rows if row.request_id not in dead]
        for i, op in enumerate(program.ops):
            if op.kind is not OpKind.EXPERTS or not 1 <= op.layer <= num_layers or i < start.op:
                continue
            layer = self.residency.layer(op.layer - 1)
            used = self.used.setdefault((program.frame_id, i), set())
            need = dict.fromkeys(e for r in rows for e in self.experts_of(r) if e not in used)
            here = [e for e in need if layer.has(e)]
            is_range = not self.ranges.isdisjoint(rows)
            if is_range and len(here) < len(need):
                here = []
            for expert in here:
                slot = layer.slot(expert)
                assert slot is not None
                number = layer.wanted(expert).number
                assert bytes(slot.numpy().data) == bytes([number + 1]) * SLOT_BYTES
            used.update(here)
            layer.use(here)
            if gone := tuple(e for e in need if e not in used):
                at = Index(i, 0)
                if start < at:
                    at = super().run(replace(program, ops=program.ops[:i]), start, stop)
                if at == (i, 0):
                    self.missed[program.frame_id] = Missing(layer, gone, is_range=is_range)
                return at
        return super().run(program, start, stop)

    def missing(self, program: Program) -> Missing | None:
        """See `TorchRunner.missing`."""
        return self.missed.get(program.frame_id)


class WaitWorld(World):
    """A world with slots for experts.

    Args:
        folder: Folder for the file.
        policy: Policy.
        num_slots: Slots.
        experts_of: Experts of each request.
        num_layers: Layers of the file.
        settings: More arguments of `World`.
    """

    def __init__(
        self,
        folder: Path,
        policy: Any,
        num_slots: int = TOP_K,
        experts_of: Experts = own_experts,
        num_layers: int = 1,
        **settings: Any,
    ) -> None:
        limits = settings.pop("limits", replace(LIMITS, max_num_seqs=1))
        super().__init__(policy, limits, **settings)
        runner = MissingRunner(
            self.runner.shape, self.clock, SimCosts(), self.runner.cuts, self.ingress
        )
        runner.poisoned = {}
        file = file_of(folder, num_layers)
        self.residency = runner.residency = FileResidency(file, num_slots * SLOT_BYTES, TOP_K)
        self.residency.enter()
        runner.experts_of = experts_of
        self.runner: MissingRunner = runner
        loop = self.loop
        loop.runner = loop.effects._runner = loop.prompt_updates._runner = runner
        self.order = DiskOrder()
        self.num_wakes = 0
        self._gates: dict[int, threading.Event] = {}
        self.begun: list[int] = []
        """Experts whose reads have begun, in order, by row of the table."""
        self.wrong: dict[int, Exception] = {}
        """Errors of reads of experts, by row of the table."""
        self.is_open = False
        """True lets reads end by themselves."""
        residency: Any = self.residency
        self._file_read, residency.read = residency.read, self._read
        assert isinstance(self.scheduler, Scheduler)
        self.waits = loop.waits = ExpertWaits(
            self.scheduler, self.residency, runner.missing, self._wake, self.clock, self.order
        )

        self.loop_looks = False
        """True lets an idle loop look for late reads, which moves the clock."""
        waits: Any = self.waits
        real = waits.next_turn_ns
        waits.next_turn_ns = lambda now_ns: real(now_ns) if self.loop_looks else None

    def _wake(self) -> None:
        self.num_wakes += 1

    def gate(self, expert: int) -> threading.Event:
        """Return the event that lets a read of an expert end. An expert is a row of the table."""
        return self._gates.setdefault(expert, threading.Event())

    def _read(self, layer: int, expert: int, into: memoryview) -> None:
        number = layer * NUM_EXPERTS + expert
        gate = self.gate(number)
        self.begun.append(number)
        into[:] = bytes(len(into))
        _wait_for(lambda: self.is_open or gate.is_set())
        if number in self.wrong:
            raise self.wrong[number]
        self._file_read(layer, expert, into)

    @property
    def threads(self) -> ReadThreads:
        return self.waits._threads

    def settle(self) -> None:
        """Wait until each thread reads, or nothing waits to be read."""
        threads = self.threads
        _wait_for(lambda: not threads._queue or len(threads._running) == len(threads._threads))
        _wait_for(lambda: all(read.wanted.number in self.begun for read in threads.running))

    def let(self, *experts: int) -> None:
        """Let reads of experts end, and wait until they have."""
        for expert in experts:
            read = next(r for r in self.threads.running if r.wanted.number == expert)
            self.gate(expert).set()
            _wait_for(lambda read=read: read.is_over)
            del self._gates[expert]

    def stop_at_wait(self, most: int = 200) -> None:
        """Step until nothing can run before a read ends."""
        for _ in range(most):
            if not self.step() and self.waiting:
                self.settle()
                return
        raise AssertionError("nothing waits")

    @property
    def waiting(self) -> set[RequestId]:
        """Requests whose frames wait."""
        return {i for i, r in self.scheduler.requests.items() if r.lacks_experts}

    def run_open(self) -> None:
        """Let all reads end by themselves, and run until all requests have ended."""
        self.is_open = True
        for _ in range(100_000):
            if self.idle:
                return
            if not self.step() and self.order.num_reads:
                _wait_for(lambda: self.threads._finished)
        raise AssertionError("it does not end")

    def close(self) -> None:
        """Let all reads end, and stop the threads."""
        self.is_open = True
        self.waits.close()
