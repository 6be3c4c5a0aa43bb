"""CUDA's streams and events on a CPU: copies run as late as CUDA's rules allow; races are found.

What computes runs at once, as it is launched. A copy runs when something that waits for it runs,
no sooner; so whoever forgets to wait finds what was there before. Beside that every access to a
page or to a slot (of KV on the host, of an expert on the device) is compared with all others before
it: two that touch the same bytes, one of them writing, must be ordered by streams and events,
however the device would have timed them (vector clocks; a race is raised at the second access).
`FakeStreams` is a `StreamApi`, which several threads may call.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from threading import RLock
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from qllm.cuda import backend
from qllm.cuda.lanes import Lane
from qllm.cuda.stages import Key, Stages
from qllm.kernels.routing import ExpertWeights, Routing
from qllm.kernels.select import Kernels
from qllm.models.weights.quantised_weights import tensors_of

Clock = Counter[str]


class RaceError(AssertionError):
    """Two accesses that no event orders."""


class Event(NamedTuple):
    """What was launched on a stream so far, and how to have it done."""

    clock: Clock
    done: list[bool]
    stream: "Stream | None"


class Stream:
    """Work that was launched and did not run yet."""

    def __init__(self, name: str) -> None:
        self.name, self.clock = name, Clock()
        self.queue: deque[Callable[[], None]] = deque()

    def run_until(self, done: list[bool]) -> None:
        while not done[0]:
            self.queue.popleft()()


class Accesses:
    """The last accesses to one resource: who wrote, and who has read since."""

    def __init__(self) -> None:
        self.write: tuple[str, int] = ("", 0)
        self.reads: dict[str, int] = {}


def _alone(call: Any) -> Any:
    """Let one thread at a time make a call."""

    @wraps(call)
    def called(self: Any, *given: Any, **more: Any) -> Any:
        with self.lock_of_calls:
            return call(self, *given, **more)

    return called


class FakeStreams:
    """Streams for copies, beside one that computes and the host.

    Args:
        names: Names of the streams in turn. Streams of one name count as one.
    """

    def __init__(self, names: Sequence[str] = ("out", "in")) -> None:
        self.lock_of_calls, self._names = RLock(), names
        self.compute, self.host = Stream("compute"), Stream("host")
        self.streams: list[Stream] = []
        self.locked: dict[int, int] = {}
        """Bytes of memory that is page-locked where it was, by address."""
        self.page_size = 0
        self.accesses: dict[int, Accesses] = {}
        """By address."""
        self.finishes = 0
        """Calls that wait on the host."""
        self.copies: Counter[str] = Counter()
        """Pages copied, by direction."""
        self.unlocked = 0
        self.races: list[str] = []

    # -- the api

    def new_stream(self) -> Stream:
        self.streams.append(Stream(self._names[len(self.streams) % len(self._names)]))
        return self.streams[-1]

    @_alone
    def record(self, stream: Stream | None, *, sleeps: bool = False) -> Event:
        where = stream or self.compute
        event = Event(Clock(where.clock), [stream is None], stream)
        if stream is not None:
            stream.queue.append(lambda: event.done.__setitem__(0, True))
        return event

    @_alone
    def wait(self, stream: Stream | None, event: Event) -> None:
        where = stream or self.compute
        where.clock |= event.clock
        if stream is None:
            self._have(event)
        else:
            stream.queue.append(lambda: self._have(event))

    def _have(self, event: Event) -> None:
        if not event.done[0]:
            assert event.stream is not None
            event.stream.run_until(event.done)

    @_alone
    def finish(self, event: Event) -> None:
        self.finishes += 1
        self._have(event)
        self.host.clock |= event.clock

    @_alone
    def copy(self, to: Tensor, source: Tensor, stream: Stream) -> None:
        assert to.shape == source.shape
        assert all(x[0].is_contiguous() for x in (to, source))
        self.copies[stream.name] += 1
        self._launch(stream)
        for tensor, writes in ((source, False), (to, True)):
            self.access(stream, tensor.data_ptr(), writes)  # of its first byte
        stream.queue.append(partial(_copy, to, source))

    def lock(self, num_bytes: int) -> Tensor:
        memory = torch.full((num_bytes,), 0xFF, dtype=torch.uint8)  # NaNs
        self._locked = [*getattr(self, "_locked", []), memory]
        return memory

    def lock_in_place(self, memory: Tensor) -> None:
        assert memory.data_ptr() not in self.locked, "memory is page-locked twice"
        self.locked[memory.data_ptr()] = memory.nbytes

    def unlock(self, memory: Tensor) -> None:
        where = memory.untyped_storage().data_ptr()
        jobs = [job for stream in self.streams for job in stream.queue if isinstance(job, partial)]
        under_copy = {x.untyped_storage().data_ptr() for job in jobs for x in job.args}
        assert where not in under_copy, "memory under copy is given back"
        self.locked.pop(memory.data_ptr(), None)
        self.unlocked += 1

    # -- who touches what

    def _launch(self, stream: Stream) -> None:
        """Work that is launched comes after all that the host has waited for."""
        stream.clock |= self.host.clock
        stream.clock[stream.name] += 1

    @_alone
    def access(self, stream: Stream, resource: int, writes: bool) -> None:
        """Note an access; it must be after those that conflict with it."""
        seen = self.accesses.setdefault(resource, Accesses())
        before = [seen.write, *(seen.reads.items() if writes else ())]
        for who, when in before:
            if who and who != stream.name and stream.clock[who] < when:
                what = "writes" if writes else "reads"
                text = f"{stream.name} {what} {resource}, and nothing orders it after {who}"
                self.races.append(text)  # an engine takes what is raised for a request's failure
                raise RaceError(text)
        now = stream.clock[stream.name]
        if writes:
            seen.write, seen.reads = (stream.name, now), {}
        else:
            seen.reads[stream.name] = now

    def computes(self, layer: Tensor, pages: Iterable[int], writes: bool) -> None:
        """What computes touches pages of a layer; copies touch all layers at once."""
        self._launch(self.compute)
        stride = layer.stride(0) * layer.itemsize * self.page_size
        base = layer.untyped_storage().data_ptr()
        for page in set(pages):
            self.access(self.compute, base + page * stride, writes)

    def watch(self, kernels: Kernels, page_size: int, capturing: Callable[[], bool]) -> Kernels:
        """The same kernels, of which every launch is noted."""
        self.page_size = page_size

        def write(k: Tensor, v: Tensor, k_SGD: Tensor, v_SGE: Tensor, slots_T: Tensor) -> None:
            self._writes(k_SGD, v_SGE, slots_T, capturing)
            kernels.write(k, v, k_SGD, v_SGE, slots_T)

        def rotate_and_write(*given: Any) -> None:
            self._writes(given[5], given[6], given[7], capturing)
            kernels.rotate_and_write(*given)

        def write_latents(*given: Any) -> Any:
            self._writes(given[3], given[4], given[5], capturing)
            return kernels.write_latents(*given)

        def attend(q: Tensor, k: Tensor, v: Tensor, tables: Tensor, tiles: Any, **how: Any) -> None:
            if not capturing():
                with _disable_current_modes():
                    pages = read_by(tables, tiles.seq_T, tiles.pos_T, page_size)
                self.computes(k, pages, writes=False)
            kernels.attend(q, k, v, tables, tiles, **how)

        def run_experts(
            x: Tensor, weights: ExpertWeights, routing: Routing, lo: int, hi: int, out: Tensor
        ) -> None:
            if weights.place_E is not None and not capturing():
                self._reads_slots(weights, routing.counts_E[lo:hi], lo)
            kernels.run_experts(x, weights, routing, lo, hi, out)

        watched = {"rotate_and_write": rotate_and_write, "write_latents": write_latents}
        watched["run_experts"] = run_experts
        return kernels._replace(write=write, attend=attend, **watched)

    def _writes(self, k: Tensor, v: Tensor, slots_T: Tensor, capturing: Callable[[], bool]) -> None:
        if not capturing():
            pages = [s // self.page_size for s in slots_T.tolist() if s >= 0]
            self.computes(k, pages, writes=True)

    def _reads_slots(self, weights: ExpertWeights, counts_E: Tensor, lo: int) -> None:
        """Record that the computing stream reads the slots of experts that have tokens."""
        assert weights.place_E is not None
        self._launch(self.compute)
        packed = weights.packed or ()
        stacks = [stack for one in packed for stack in tensors_of(one)]
        for expert in counts_E.nonzero()[:, 0].tolist():
            place = int(weights.place_E[lo + expert])
            for stack in stacks or (weights.up_EFD, weights.down_EDI):
                self.access(self.compute, stack[place].data_ptr(), writes=False)

    def replays(self, lane: Lane, key: Key, memory: Tensor) -> None:
        """A stage is replayed on what its lane holds."""
        num, d = key.bucket.tokens, lane.on_device
        tables = d["tables"].view(lane.max_rows, lane.max_pages)
        read = read_by(tables, d["seq"][:num], d["pos"][:num], self.page_size)
        self.computes(memory, read, writes=False)
        written = [s // self.page_size for s in d["slots"][:num].tolist() if s >= 0]
        self.computes(memory, written, writes=True)


def read_by(tables: Tensor, seq_T: Tensor, pos_T: Tensor, page_size: int) -> set[int]:
    """Pages that these queries attend."""
    pages: set[int] = set()
    for seq, pos in zip(seq_T.tolist(), pos_T.tolist(), strict=True):
        if seq >= 0:
            pages |= set(tables[seq, : pos // page_size + 1].tolist())
    return pages


def _copy(to: Tensor, source: Tensor) -> None:
    with torch.inference_mode():
        to.copy_(source)


def install(
    patch: pytest.MonkeyPatch, streams: FakeStreams, page_size: int, fake_cuda: Any = None
) -> None:
    """Let every runner that is made from now on compute under the eyes of the fake."""
    real, replay = backend.kernels, Stages.replay

    def capturing() -> bool:
        return fake_cuda is not None and fake_cuda.capturing_now is not None

    def watched(name: str) -> Kernels:
        return streams.watch(real(name), page_size, capturing)

    def replayed(self: Stages, key: Key) -> None:
        streams.replays(self.lanes[key.whole], key, self._body._pages.layer(0)[0])
        replay(self, key)

    patch.setattr(backend, "kernels", watched)
    patch.setattr(Stages, "replay", replayed)
