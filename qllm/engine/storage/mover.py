"""Threads that copy KV pages between RAM and a file, one per direction.

While LS requests exist, each direction takes a small share of a core (`GENTLE_SHARE`): a thread
rests after every page. Loads for LS requests never rest.

    loads for LS --> other loads, with rests --> stores, with rests; stores run while loads rest

Stores also wait for experts that are read from the same disk (`qllm.engine.storage.reads`).
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from qllm.engine.kv.tier import GENTLE_SHARE, PageLoad, StoredPage, Write, Written
from qllm.engine.storage.file import KvFile
from qllm.engine.storage.own_threads import set_own_torch_threads
from qllm.engine.storage.reads import DiskOrder, DiskThreads, rest_s
from qllm.scheduler.prefix import Name
from qllm.types import NS_PER_S

SHARE = 0.5
"""Share of a core that writing may take while no LS request exists."""
LOADS_FIRST_S = 0.05
"""Longest time in seconds that a page to be written waits for pages that are being read."""

_log = logging.getLogger(__name__)


class Mover(DiskThreads):
    """A `Disk` (`qllm.engine.kv.tier`) over a file.

    Args:
        file: The file, which `close` closes.
        wake: Function called from the reading thread when all pages of an LS request are read.
        now_ns: The engine's clock.
        order: Order of the threads that use the disk; None if there are no others.
    """

    def __init__(
        self,
        file: KvFile,
        wake: Callable[[], None],
        now_ns: Callable[[], int],
        order: DiskOrder | None = None,
    ) -> None:
        self.failure: str | None = None
        self._file, self._wake, self._now_ns = file, wake, now_ns
        self._reads: tuple[deque[PageLoad], ...] = (deque(), deque())
        """Loads for LS requests, and loads for other requests."""
        self._is_resting = False
        """True while the reading thread rests so that LS can use the machine."""
        self._writes: deque[Write | tuple[int, ...]] = deque()
        """Pages to write, and slots to erase."""
        self._is_writing = False
        self._done: deque[Written] = deque()
        self._is_gentle = False
        self._in_haste = False
        serve = {"qllm-kv-read": self._serve_reads, "qllm-kv-write": self._serve_writes}
        alone = {name: partial(_alone, function) for name, function in serve.items()}
        super().__init__(order or DiskOrder(), alone)

    # -- the engine's thread

    def write(self, job: Write) -> None:
        """Queue a page to be written."""
        with self._lock:
            self._writes.append(job)
            self._lock.notify_all()

    def read(self, load: PageLoad) -> None:
        """Queue pages to be read. Pages of LS are read first, and reads go before writes."""
        with self._lock:
            self._reads[not load.is_ls].append(load)
            self._lock.notify_all()

    def erase(self, slots: Sequence[int]) -> None:
        """Queue pages to be made unreadable, after all earlier jobs."""
        with self._lock:
            self._writes.append(tuple(slots))
            self._lock.notify_all()

    def be_gentle(self, gentle: bool) -> None:
        """Set whether LS requests exist. If so, only LS loads get more than a small share."""
        if gentle is not self._is_gentle:
            with self._lock:
                self._is_gentle = gentle
                self._lock.notify_all()

    def written(self) -> list[Written]:
        """Return the pages that were written since the last call."""
        found = []
        while self._done:
            found.append(self._done.popleft())
        return found

    # -- any thread

    def settle(self, timeout_s: float) -> bool:
        """Wait until all queued pages are written and erased; return False if time ran out."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._in_haste = True
            self._lock.notify_all()
            while (self._writes or self._is_writing) and self.failure is None:
                left = deadline - time.monotonic()
                if left <= 0 or not self._lock.wait(left):
                    break
            self._in_haste = False
            return not (self._writes or self._is_writing)

    def close(self) -> None:
        """Stop the threads. If the disk blocks a thread, the thread and the file stay open."""
        super().close()
        if not any(thread.is_alive() for thread in self._threads):
            self._file.close()

    # -- its own threads

    def _fail(self, error: Exception) -> None:
        with self._lock:
            is_first, self.failure = self.failure is None, f"{type(error).__name__}: {error}"
            self._lock.notify_all()
        if is_first:
            _log.warning("KV is kept in RAM alone from now on: its file failed (%s)", error)
        self._wake()

    def _serve_reads(self) -> None:
        while (load := self._next_read()) is not None:
            start = time.thread_time()
            try:
                self._read_one(load)
            except Exception as error:  # noqa: BLE001 - after any error of the disk, serving continues
                self._fail(error)
                return
            if load.is_over and load.is_ls:
                self._wake()
            self._rest_from_reading(time.thread_time() - start)

    def _rest_from_reading(self, busy_s: float) -> None:
        """Rest so that LS requests can use the machine."""
        with self._lock:
            self._is_resting = True
            self._lock.notify_all()
            self._lock.wait_for(self._may_read, rest_s(busy_s, GENTLE_SHARE))
            self._is_resting = False

    def _may_read(self) -> bool:
        """Return True if the reading thread may read: LS waits for pages, or no LS exists."""
        return self._closing or not self._is_gentle or bool(self._reads[0])

    def _next_read(self) -> PageLoad | None:
        """Return the load whose next page is read now: the oldest, LS first."""
        with self._lock:
            for queue in self._reads:
                if queue and queue[0].is_over:
                    queue.popleft()
            self._lock.notify_all()
            while not (self._closing or any(self._reads)):
                self._lock.wait()
            return None if self._closing else (self._reads[0] or self._reads[1])[0]

    def _read_one(self, load: PageLoad) -> None:
        """Read the next page of a load, or end the load."""
        if load.num_ready < len(load.pages) and not load.is_given_up:
            name, page = load.pages[load.num_ready]
            if isinstance(page, StoredPage):
                start_ns, busy_ns = time.monotonic_ns(), time.thread_time_ns()
                self._put(load, self._file.read(page.slot, name, page.checksum), name)
                load.elapsed_ns += time.monotonic_ns() - start_ns
                load.busy_ns += time.thread_time_ns() - busy_ns
                load.num_read += 1
            else:
                self._put(load, page, name)
        is_whole = load.num_ready == len(load.pages)
        load.is_over = is_whole or load.is_given_up or load.damaged is not None

    def _put(self, load: PageLoad, page: Any, name: Name) -> None:
        if page is None:
            load.damaged = name
            return
        try:
            load.into(load.num_ready, page)
            load.num_ready += 1
        except Exception as error:  # noqa: BLE001 - this request fails (no memory), not the disk
            _log.warning("KV is not loaded for a request, which computes it: %s", error)
            load.is_given_up = True

    def _serve_writes(self) -> None:
        while (job := self._next_write()) is not None:
            start = time.thread_time()
            try:
                self._write_one(job)
            except Exception as error:  # noqa: BLE001 - after any error of the disk, serving continues
                self._fail(error)
                return
            self._rest(time.thread_time() - start)

    def _next_write(self) -> Write | tuple[int, ...] | None:
        with self._lock:
            self._is_writing = False
            self._lock.notify_all()
            while not self._writes and not self._closing:
                self._lock.wait()
            self._lock.wait_for(self._may_write, LOADS_FIRST_S)
            if not self._writes or self._closing:
                return None
            self._is_writing = True
            return self._writes.popleft()

    def _may_write(self) -> bool:
        """Return True if the writing thread may write: no reads wait, or the reader rests."""
        if self._closing or self._in_haste:
            return True
        is_free = self._is_resting and not self._reads[0]
        return not self._order.num_reads and (is_free or not any(self._reads))

    def _write_one(self, job: Write | tuple[int, ...]) -> None:
        if not isinstance(job, Write):
            self._file.erase(job)
            return
        left_ns = job.until_ns - self._now_ns()
        until_s = time.time() + left_ns / NS_PER_S if left_ns > 0 else 0.0
        checksum = self._file.write(job.slot, job.name, job.page, job.tag, job.is_ls, until_s)
        self._done.append(Written(job.name, StoredPage(job.slot, checksum)))

    def _rest(self, busy_s: float) -> None:
        """Rest so that other threads can use the machine."""
        with self._lock:
            self._is_writing = False
            self._lock.notify_all()
            share = GENTLE_SHARE if self._is_gentle else SHARE
            self._lock.wait_for(lambda: self._closing or self._in_haste, rest_s(busy_s, share))


def _alone(serve: Callable[[], None]) -> None:
    """Serve on this thread, without helper threads of torch."""
    set_own_torch_threads(1)
    serve()
