"""Threads that read experts from a file, and the order of all threads that use a disk.

    experts for LS --> for BE --> read ahead --> stores of KV    loads of KV have their own thread

Inside a class, experts for the oldest request are read first. A read that has begun is not stopped.
While LS requests exist, a thread rests after a read for BE (`BE_SHARE`). It never rests while LS
waits for a read.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

from qllm.runner.displacing import Use
from qllm.runner.placing import Wanted

Rank = tuple[bool, int, int]
"""Rank of a frame, smallest first: True for BE, and arrival in ns and id of its oldest request."""
LAST: Rank = (True, 1 << 62, 0)
"""Rank of a read for which no frame waits any more."""
NUM_THREADS = 2
"""Number of threads that read. One reads while another checks what it has read."""
BE_SHARE = 0.125
"""Share of a core that a thread takes to read for BE while LS requests exist."""
CLOSE_S = 5.0
"""Seconds that `close` waits for a disk."""


class DiskOrder:
    """The order of the threads that use a disk."""

    def __init__(self) -> None:
        self.lock = threading.Condition()
        """Lock of all queues. The condition is notified after every change."""
        self.num_reads = 0
        """Number of experts that are being read, or wait to be read."""


class DiskThreads:
    """Threads that use a disk, from the end of this constructor until they are closed.

    Args:
        order: Order of all threads that use the disk.
        serve: Function of each thread, by the thread's name.
    """

    def __init__(self, order: DiskOrder, serve: Mapping[str, Callable[[], None]]) -> None:
        self._order, self._lock, self._closing = order, order.lock, False
        self._threads = [
            threading.Thread(target=function, name=name, daemon=True)
            for name, function in serve.items()
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop the threads. A thread that the disk blocks stays."""
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        for thread in self._threads:
            thread.join(CLOSE_S)


@dataclass(slots=True, eq=False)
class Ticket:
    """A frame that waits for experts, or whose experts are in memory and that has not run yet."""

    frame_id: int
    rank: Rank
    use: Use
    """Kind of the frame."""
    wanted: tuple[Wanted, ...]
    """Experts that the frame needs, in the order of its work units."""
    is_range: bool
    """True if the frame needs all of them at once; False if it can run with any of them."""
    since_ns: int
    """Time when the frame began to wait."""
    is_waiting: bool = True
    """True until the frame may run."""
    has_slots: bool = False
    """True if wanted experts that are in memory, or are being read, stay until the frame has run.
    """
    reads: dict[int, "ExpertRead"] = field(default_factory=dict)
    """Reads of wanted experts that have not ended, by row of the table."""
    num_left: int = 0
    """Number of reads after whose end the frame may run."""
    is_wide: bool = False
    """True if the frame has so many tokens that it uses nearly all experts of each layer."""
    error: Exception | None = None
    """Error of a read of a wanted expert."""

    @property
    def is_ls(self) -> bool:
        """True if the frame has a row of LS."""
        return not self.rank[0]


@dataclass(slots=True, eq=False)
class ExpertRead:
    """An expert on its way from the file to a slot."""

    wanted: Wanted
    slot: int
    into: Sized
    """Memory of the slot. It exists until the read has ended, even if the slots are freed."""
    tickets: list[Ticket]
    """Frames that wait for the expert."""
    begun_ns: int | None = None
    """Time when a thread began to read; None if no thread has."""
    ahead: Use | None = None
    """Kind of the frame for which the expert is read ahead; None if a frame has asked for it."""
    is_for_ls: bool = False
    """True if LS waited for the expert when a thread began to read."""
    is_late: bool = False
    """True if the read took longer than the engine waits for a disk."""
    error: Exception | None = None
    is_over: bool = False

    @property
    def rank(self) -> Rank:
        """Rank of the first frame that waits for the expert."""
        return min((ticket.rank for ticket in self.tickets), default=LAST)


class ReadThreads(DiskThreads):
    """The threads that read experts. They change no slot but the memory of their reads.

    The memory of a slot stays as long as the disk blocks the thread that reads into it.

    Args:
        read: Function that reads an expert: number of the layer and of the expert, and memory.
        wake: Function called from a thread when a frame of LS may run, or the engine sleeps.
        now_ns: The engine's clock.
        order: Order of all threads that use the disk.
        num_threads: Number of threads.
    """

    def __init__(
        self,
        read: Callable[[int, int, Any], None],
        wake: Callable[[], None],
        now_ns: Callable[[], int],
        order: DiskOrder,
        num_threads: int = NUM_THREADS,
    ) -> None:
        self._read, self._wake, self._now_ns = read, wake, now_ns
        self._queue: list[ExpertRead] = []
        self._running: list[ExpertRead] = []
        self._finished: list[ExpertRead] = []
        self._is_asleep = self._is_gentle = False
        self.num_resting = 0
        """Number of threads that rest."""
        super().__init__(order, {f"qllm-expert-read-{i}": self._serve for i in range(num_threads)})

    # -- the engine's thread

    def put(self, reads: Sequence[ExpertRead]) -> None:
        """Queue reads."""
        with self._lock:
            self._queue += reads
            self._order.num_reads += len(reads)
            self._lock.notify_all()

    def be_gentle(self, gentle: bool) -> None:
        """Set whether LS requests exist. If so, reads for BE get only a small share of a core."""
        if gentle is not self._is_gentle:
            with self._lock:
                self._is_gentle = gentle
                self._lock.notify_all()

    def cancel(self, read: ExpertRead) -> bool:
        """Take a read out of the queue; return False if it has begun."""
        with self._lock:
            if read not in self._queue:
                return False
            self._queue.remove(read)
            self._order.num_reads -= 1
            self._lock.notify_all()
            return True

    def join(self, ticket: Ticket, read: ExpertRead) -> None:
        """Let a frame wait for a read, too."""
        with self._lock:
            if ticket not in read.tickets:
                read.tickets.append(ticket)
        ticket.reads[read.wanted.number] = read

    def leave(self, ticket: Ticket, read: ExpertRead) -> None:
        """Let a frame wait for a read no longer."""
        with self._lock:
            read.tickets.remove(ticket)
        del ticket.reads[read.wanted.number]

    def expect(self, ticket: Ticket, num: int) -> None:
        """Wake the engine for a frame after so many of its reads have ended from now on."""
        with self._lock:
            ticket.num_left = num - sum(read.is_over for read in ticket.reads.values())
            is_due = ticket.is_ls and ticket.num_left <= 0
        if is_due:
            self._wake()

    def finished(self) -> list[ExpertRead]:
        """Return the reads that have ended since the last call. The engine is awake."""
        with self._lock:
            self._is_asleep = False
            found, self._finished = self._finished, []
        return found

    def sleep(self) -> bool:
        """Wake the engine after the next read; return False if one has ended already."""
        with self._lock:
            self._is_asleep = not self._finished
            return self._is_asleep

    @property
    def is_gentle(self) -> bool:
        """True if LS requests exist."""
        return self._is_gentle

    @property
    def running(self) -> list[ExpertRead]:
        """Reads that have begun and not ended."""
        with self._lock:
            return list(self._running)

    # -- its own threads

    def _serve(self) -> None:
        while (read := self._next()) is not None:
            start = time.thread_time()
            try:
                self._read(*read.wanted[:2], read.into)
            except Exception as error:  # noqa: BLE001 - ends the rows that need the expert
                read.error = error
            self._end(read)
            if not read.is_for_ls:
                self._rest(time.thread_time() - start)

    def _rest(self, busy_s: float) -> None:
        """Rest so that LS requests can use the machine."""
        with self._lock:
            self.num_resting += 1
            self._lock.notify_all()
            self._lock.wait_for(self._may_read, rest_s(busy_s, BE_SHARE))
            self.num_resting -= 1

    def _may_read(self) -> bool:
        """Return True if no thread rests: LS waits for an expert, or no LS exists."""
        waits = any(not read.rank[0] for read in self._queue)
        return waits or self._closing or not self._is_gentle

    def _next(self) -> ExpertRead | None:
        with self._lock:
            while not (self._queue or self._closing):
                self._lock.wait()
            if self._closing:
                return None
            read = min(self._queue, key=lambda read: read.rank)
            self._queue.remove(read)
            self._running.append(read)
            read.begun_ns, read.is_for_ls = self._now_ns(), not read.rank[0]
            return read

    def _end(self, read: ExpertRead) -> None:
        with self._lock:
            self._running.remove(read)
            self._finished.append(read)
            self._order.num_reads -= 1
            read.is_over = True
            for ticket in read.tickets:
                ticket.num_left -= 1
            due = [t for t in read.tickets if t.is_ls and (t.num_left == 0 or read.error)]
            wakes = self._is_asleep or bool(due)
            self._lock.notify_all()
        if wakes:
            self._wake()


def rest_s(busy_s: float, share: float) -> float:
    """Return the seconds that a thread must rest after work, to use only `share` of a core."""
    return busy_s * (1 - share) / share
