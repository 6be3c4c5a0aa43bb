"""Experts that come from a disk, on the virtual clock.

    routing: experts of a token --> an op misses some --> the frame is parked with a ticket
    --> slots and order of reads as in an engine --> a disk of a given rate --> the frame runs again

The slots, the choice of who leaves, tickets, parking and the order of reads are those of an engine
(`qllm.runner.placing`, `qllm.engine.storage.waits`). Only the disk and the routing are simulated:
reads end one after the other, at the rate of the disk, and beside computation.
"""

import os
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from qllm.engine.storage.reads import (
    BE_SHARE,
    NUM_THREADS,
    DiskOrder,
    ExpertRead,
    ReadThreads,
    rest_s,
)
from qllm.errors import ConfigError
from qllm.plan import ModelShape
from qllm.runner.placing import LayerPlaces, Placement
from qllm.runner.protocol import Stop
from qllm.scheduler.program import START, Index, OpKind, Program
from qllm.sim.ingress import VirtualIngress
from qllm.sim.runner import SimRunner
from qllm.sim.timeline import hit_rates
from qllm.types import NS_PER_S, RequestId

TOKENS_DRAWN = 32
"""Tokens whose experts are drawn together."""
BLOCKS_KEPT = 1024
"""Most such blocks that are kept, because a decode uses one token after the other."""
Experts = Any
"""Array [T, L, K] of the experts of T tokens in the L layers that have experts."""


class Routing(Protocol):
    """The experts that the tokens of requests use."""

    def of(self, request_id: RequestId, lo: int, hi: int) -> Experts:
        """Return the experts of the tokens [lo, hi) of a request, always the same."""
        ...


class TracedRouting:
    """Routing that was recorded. Request n has the sequence n, modulo the number of sequences.

    Args:
        sequences: Experts [T, L, K] of each recorded request. After its last token it starts again.

    Raises:
        ConfigError: There is no sequence, or one is empty, or they differ in their layers.
    """

    def __init__(self, sequences: Sequence[Experts]) -> None:
        shapes = {np.asarray(one).shape[1:] for one in sequences}
        if len(shapes) != 1 or not all(len(one) for one in sequences):
            raise ConfigError(
                "a routing trace needs at least one sequence, and experts of the same layers for "
                f"at least one token of each; got {len(sequences)} sequences of {sorted(shapes)}"
            )
        self._sequences = [np.asarray(one) for one in sequences]

    @classmethod
    def read(cls, path: str | os.PathLike[str], shape: ModelShape) -> Self:
        """Read the sequences of a file of `numpy.savez`, in the order in which they were given.

        Args:
            path: The file.
            shape: Layers and experts of the simulated model.

        Raises:
            ConfigError: The file is no such file, or its experts are not those of the model.
        """
        try:
            with Path(path).open("rb") as raw, np.load(raw, allow_pickle=False) as file:
                found = cls([file[name] for name in file.files])
        except (OSError, EOFError, TypeError, ValueError, zipfile.BadZipFile) as error:
            raise ConfigError(
                f"{os.fspath(path)!r} is no routing trace ({error}); give a file of numpy.savez "
                "with an array [tokens, layers with experts, experts per token] per request"
            ) from error
        wanted = sum(shape.is_moe), shape.experts_per_token
        for one in found._sequences:
            if one.shape[1:] != wanted or not is_within(one, shape.num_experts):
                raise ConfigError(
                    f"{os.fspath(path)!r} has experts {list(one.shape)} of type {one.dtype}, and "
                    f"the model has {wanted[0]} layers with experts, {wanted[1]} of "
                    f"{shape.num_experts} per token; give a trace of this model"
                )
        return found

    def of(self, request_id: RequestId, lo: int, hi: int) -> Experts:
        """See `Routing.of`."""
        own = self._sequences[request_id % len(self._sequences)]
        return own[np.arange(lo, hi) % len(own)]


def is_within(experts: Experts, num_experts: int) -> bool:
    """Return True if these are numbers of experts."""
    is_whole = np.issubdtype(experts.dtype, np.integer)
    return bool(is_whole and experts.min() >= 0 and experts.max() < num_experts)


class SkewedRouting:
    """Drawn routing: each token chooses by the popularity of experts, whatever others chose.

    Each layer has its own order of popularity. Tokens of real text that follow each other use more
    experts in common, so bytes are rough. `TracedRouting` is near.

    Args:
        shape: Layers and experts.
        skew: Exponent of the popularity; see `qllm.sim.timeline.expert_coverage`.
        seed: Seed of the draw.
    """

    def __init__(self, shape: ModelShape, skew: float, seed: int = 0) -> None:
        num, self._top_k, self._seed = shape.num_experts, shape.experts_per_token, seed
        rng = np.random.default_rng(seed)
        self._named_LE = np.stack([rng.permutation(num) for _ in range(sum(shape.is_moe))])
        self._kept: dict[tuple[RequestId, int], Experts] = {}
        """The last blocks of tokens that were drawn."""
        self._rates_E = np.minimum(hit_rates(num, self._top_k, skew), 1 - 1e-9)

    def of(self, request_id: RequestId, lo: int, hi: int) -> Experts:
        """See `Routing.of`."""
        first = lo // TOKENS_DRAWN
        blocks = range(first, (hi - 1) // TOKENS_DRAWN + 1)
        drawn = np.concatenate([self._block(request_id, block) for block in blocks])
        return drawn[lo - first * TOKENS_DRAWN : hi - first * TOKENS_DRAWN]

    def _block(self, request_id: RequestId, block: int) -> Experts:
        """Return the experts [T, L, K] of some tokens, each expert with its own probability.

        The rates of the experts, in a drawn order, are laid end to end on a line of length K. The
        points u, u + 1, ... of the line hit the experts, where u is drawn.
        """
        key = request_id, block
        if key not in self._kept:
            if len(self._kept) == BLOCKS_KEPT:
                del self._kept[next(iter(self._kept))]
            rng = np.random.default_rng((self._seed, request_id, block))
            num_layers, num = self._named_LE.shape
            order_TLE = rng.random((TOKENS_DRAWN, num_layers, num)).argsort(axis=2)
            ends_TLE = self._rates_E[order_TLE].cumsum(axis=2)
            ends_TLE[..., -1] = self._top_k  # exactly
            start_TL1 = 1 - rng.random((TOKENS_DRAWN, num_layers, 1))
            hits_TLE = np.diff(np.floor(ends_TLE - start_TL1), axis=2, prepend=-1.0) > 0
            places_TLK = order_TLE[hits_TLE].reshape(TOKENS_DRAWN, num_layers, self._top_k)
            named_TLE = np.broadcast_to(self._named_LE, order_TLE.shape)
            self._kept[key] = np.take_along_axis(named_TLE, places_TLK, axis=2)
        return self._kept[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsOnDisk:
    """The experts of a simulated model whose experts are in a file."""

    max_bytes: int
    """Most bytes of experts in memory."""
    expert_bytes: int
    """Bytes of an expert in the file."""
    bytes_per_s: float
    """Rate at which the disk returns experts (`qllm.measure.disk_rate`)."""
    routing: Routing
    busy_share: float = 0.5
    """Share of a read in which its thread computes. While LS requests exist, a thread rests after
    a read for BE in proportion to this time."""

    def __post_init__(self) -> None:
        if not (self.bytes_per_s > 0 and self.expert_bytes > 0 and 0 <= self.busy_share <= 1):
            raise ConfigError(
                f"bytes_per_s={self.bytes_per_s!r} and expert_bytes={self.expert_bytes!r} must be "
                f"> 0, and busy_share={self.busy_share!r} in [0, 1]"
            )

    @property
    def read_ns(self) -> int:
        """Nanoseconds of the disk for an expert."""
        return max(1, round(self.expert_bytes * NS_PER_S / self.bytes_per_s))

    def placement(self, shape: ModelShape) -> "SimPlacement":
        """Return empty slots.

        Raises:
            ConfigError: `max_bytes` has no room for the experts of one token in one layer, or room
                for all.
        """
        num_layers, top_k = sum(shape.is_moe), shape.experts_per_token
        least, total = top_k * self.expert_bytes, num_layers * shape.num_experts * self.expert_bytes
        if not least <= self.max_bytes < total:
            raise ConfigError(
                f"max_expert_bytes={self.max_bytes} must be in [{least}, {total}), from the "
                "experts of one token in one layer to all experts, to be simulated with a disk; "
                "leave max_expert_bytes out to have all experts in memory"
            )
        return SimPlacement([shape.num_experts] * num_layers, self, top_k)


class SimPlacement(Placement):
    """Slots without memory. All share the bytes of one expert, which nothing reads.

    Args:
        nums: Number of experts of each layer.
        disk: The experts.
        top_k: Experts per token.
    """

    def __init__(self, nums: Sequence[int], disk: ExpertsOnDisk, top_k: int) -> None:
        super().__init__(nums, disk.expert_bytes, disk.max_bytes // disk.expert_bytes, top_k)
        self._room = memoryview(bytes(disk.expert_bytes))

    def name_of(self, layer: int) -> str:
        """See `Placement.name_of`."""
        return f"layer {layer} of those with experts"

    def read(self, layer: int, expert: int, into: Any) -> None:
        """Do nothing: `VirtualReads` takes the time."""

    def _memory_of(self, layer: int, slot: int) -> memoryview:
        return self._room

    def _address_of(self, slot: int) -> int:
        return slot + 1


class VirtualReads(ReadThreads):
    """The threads that read experts, on a virtual clock and without threads.

    As many reads as an engine has threads have begun at a time. The disk serves them in turn.

    Args:
        read: Not used.
        wake: Function called when a frame of LS may run, or the engine sleeps.
        now_ns: The engine's clock.
        order: Order of all threads that use the disk.
        disk: The experts.
    """

    def __init__(
        self,
        read: Callable[[int, int, memoryview], None],
        wake: Callable[[], None],
        now_ns: Callable[[], int],
        order: DiskOrder,
        *,
        disk: ExpertsOnDisk,
    ) -> None:
        super().__init__(read, wake, lambda: self.at_ns, order, num_threads=0)
        self._engine_ns, self._disk = now_ns, disk
        self._rest_ns = round(rest_s(disk.busy_share * disk.read_ns, BE_SHARE))
        self.at_ns = now_ns()
        """Time up to which reads have begun and ended."""
        self._disk_ns = 0
        """Time when the disk has served all reads that have begun."""
        self._rests = [0] * NUM_THREADS
        """Time until which each thread rests that does not read."""
        self._ends: list[tuple[int, ExpertRead]] = []
        """Reads that have begun, with the times when they end: the first to end first."""

    def put(self, reads: Sequence[ExpertRead]) -> None:
        """See `ReadThreads.put`."""
        self.advance()
        super().put(reads)
        self._start()

    def cancel(self, read: ExpertRead) -> bool:
        """See `ReadThreads.cancel`."""
        self.advance()
        return super().cancel(read)

    def be_gentle(self, gentle: bool) -> None:
        """See `ReadThreads.be_gentle`."""
        self.advance()
        super().be_gentle(gentle)
        self._start()

    def finished(self) -> list[ExpertRead]:
        """See `ReadThreads.finished`."""
        self.advance()
        return super().finished()

    def next_ns(self) -> int | None:
        """Return the next time when a read ends or a rest does; None if nothing is read."""
        if self._ends:
            return self._ends[0][0]
        return max(self.at_ns, min(self._rests)) if self._queue else None

    def advance(self) -> None:
        """Let reads begin and end until now."""
        now_ns = self._engine_ns()
        self._start()
        while (times := self._times()) and min(times) <= now_ns:
            self.at_ns = min(times)
            while self._ends and self._ends[0][0] <= self.at_ns:
                _, read = self._ends.pop(0)
                self._end(read)
                rest_ns = 0 if read.is_for_ls else self._rest_ns
                self._rests.append(self.at_ns + rest_ns)
            self._start()
        self.at_ns = max(self.at_ns, now_ns)

    def _times(self) -> list[int]:
        """Return the times of the next events after which a read may begin."""
        rests = [at_ns for at_ns in self._rests if at_ns > self.at_ns] if self._queue else []
        return [self._ends[0][0], *rests] if self._ends else rests

    def _start(self) -> None:
        """Begin reads, one for each thread that does not rest."""
        while self._queue and self._rests:
            first_ns = min(self._rests)
            if first_ns > self.at_ns and not self._may_read():
                return
            self._rests.remove(first_ns)
            read = self._next()
            assert read is not None
            self._disk_ns = max(self.at_ns, self._disk_ns) + self._disk.read_ns
            self._ends.append((self._disk_ns, read))


class ReadingIngress(VirtualIngress):
    """An ingress whose waits also end when an expert has been read."""

    reads: VirtualReads | None = None

    @property
    def is_empty(self) -> bool:
        """See `VirtualIngress.is_empty`. A read that has not ended arrives, too."""
        return super().is_empty and (self.reads is None or self.reads.next_ns() is None)

    def next_ns(self) -> int | None:
        """See `VirtualIngress.next_ns`."""
        times = [super().next_ns(), None if self.reads is None else self.reads.next_ns()]
        return min((at_ns for at_ns in times if at_ns is not None), default=None)

    def arrive(self) -> None:
        """See `VirtualIngress.arrive`."""
        if self.reads is not None:
            self.reads.advance()
        super().arrive()


class SimMissing(NamedTuple):
    """Experts that a frame needs and that are not in a slot."""

    residency: LayerPlaces
    experts: tuple[int, ...]
    is_range: bool = False


@dataclass(slots=True)
class _Begun:
    """An EXPERTS op that has begun."""

    op: int
    experts: list[int]
    """Experts in the order in which the op uses them."""
    num_done: int = 0


class ReadingRunner(SimRunner):
    """A `SimRunner` that stops where experts are missing.

    The experts of an op are used in their order, those in slots first, and share its time evenly.
    """

    places: Placement
    routing: Routing

    def use_disk(self, places: Placement, routing: Routing) -> None:
        """Take experts from slots. Called once, before any program."""
        self.places, self.routing = places, routing
        numbers = [sum(self.shape.is_moe[:i]) for i in range(self.shape.num_layers)]
        self._layers = [
            LayerPlaces(places, numbers[i], self.shape.num_experts) if is_moe else None
            for i, is_moe in enumerate(self.shape.is_moe)
        ]
        self._numbers = numbers
        self._missing: dict[int, SimMissing] = {}
        self._begun: dict[int, _Begun] = {}
        self._routed: dict[int, Experts] = {}

    def missing(self, program: Program) -> SimMissing | None:
        """Return the experts without which the last run of a program could not go on."""
        return self._missing.get(program.frame_id)

    def accept(self, program: Program, tables: Sequence[Sequence[int]]) -> None:
        """See `SimRunner.accept`."""
        super().accept(program, tables)
        rows = program.rows
        found = [self.routing.of(row.request_id, row.lo, row.hi) for row in rows]
        self._routed[program.frame_id] = np.concatenate(found)

    def finish(self, program: Program) -> list[Any]:
        """See `SimRunner.finish`."""
        self._drop(program)
        return super().finish(program)

    def split(self, program: Program, index: Index) -> None:
        """See `SimRunner.split`."""
        self._drop(program)
        super().split(program, index)

    def drop(self, program: Program) -> None:
        """See `SimRunner.drop`."""
        self._drop(program)
        super().drop(program)

    def _drop(self, program: Program) -> None:
        for kept in (self._missing, self._begun, self._routed):
            kept.pop(program.frame_id, None)

    def run(self, program: Program, start: Index, stop: Stop) -> Index:
        """See `SimRunner.run`. It also ends where experts are missing."""
        self._missing.pop(program.frame_id, None)
        if start != START:
            self._between_runs(program)
        at, is_stopped = start, False
        for i in range(start.op, len(program.ops)):
            op = program.ops[i]
            layer = self._layers[op.layer] if op.kind is OpKind.EXPERTS else None
            if layer is None:
                continue
            at, is_stopped = self._go(program, at, max(at, Index(i, 0)), stop)
            if not is_stopped:
                at, is_stopped = self._experts(program, at, stop, layer)
            if is_stopped:
                return at
        at, _ = self._go(program, at, program.end, stop)
        return at

    def _experts(
        self, program: Program, at: Index, stop: Stop, layer: LayerPlaces
    ) -> tuple[Index, bool]:
        """Run an EXPERTS op with the experts in slots.

        Returns:
            The index, and True if the run ends there.
        """
        begun = self._begun.get(program.frame_id)
        if begun is None or begun.op != at.op:
            begun = _Begun(at.op, self._needed(program, at.op))
            self._begun[program.frame_id] = begun
        num_done = begun.num_done
        rest = begun.experts[num_done:]
        here = [expert for expert in rest if layer.has(expert)]
        gone = [expert for expert in rest if not layer.has(expert)]
        begun.experts[num_done:] = [*here, *gone]
        num, num_here = len(begun.experts), num_done + len(here)
        units = self.frames[program.frame_id].timeline.units_of(at.op)
        end = Index(at.op, max(at.pos, units * num_here // num)) if gone else Index(at.op + 1, 0)
        index, is_stopped = self._go(program, at, end, stop)
        if index == end:
            begun.num_done = num_here
        else:
            begun.num_done = max(num_done, num * index.pos // units)
        if used := begun.experts[num_done : begun.num_done]:
            layer.use(used)
        if gone and index == end and not is_stopped:
            self._missing[program.frame_id] = SimMissing(layer, tuple(gone))
        return index, is_stopped or bool(gone)

    def _needed(self, program: Program, op: int) -> list[int]:
        """Return the experts of an EXPERTS op."""
        _, layer, group, lo, hi = program.ops[op]
        routed_TLK, offsets = self._routed[program.frame_id], program.offsets
        rows = [routed_TLK[offsets[r] : offsets[r + 1]] for r in program.groups[group]]
        used = np.concatenate(rows)[lo:hi, self._numbers[layer]]
        found: list[int] = np.unique(used).tolist()
        return found
