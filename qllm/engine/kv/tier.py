"""The file tier of the prefix cache on the engine's thread: the place of each page.

Cached pages are stored while the engine computes, and loaded for requests that begin with the same
tokens. All decisions are made here. A `Disk` executes the decisions on its own threads. The loop
polls the `Disk` once per iteration.

    cached in RAM --> unsaved --> written --> in the file, found by name, also by the next engine
                                                 |
    KV of a request  <-- read <------------------'   (not there, damaged, late: it is computed)
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from qllm.engine.costs import SAMPLES_PER_COST, StepCosts
from qllm.errors import InvariantError
from qllm.policy import Tier
from qllm.scheduler.prefix import Name, PageStore, Tag
from qllm.types import NS_PER_MS, Priority

WRITING_BYTES = 16 << 20
"""Most bytes that are being written to the file at once; always at least two pages."""
GENTLE_SHARE = 0.01
"""Share of a core for writes, and for reads, while LS requests exist. Loads for LS have no limit.
"""
FIRST_NS_PER_BYTE = 10
"""Estimated nanoseconds to read a byte, used until a page was read: 100 MB/s."""
FIRST_BUSY = 0.5
"""Estimated share of a read in which the thread computes, used until a page was read."""
SLACK_NS = 200 * NS_PER_MS
"""Minimum time before a load counts as late."""
LATE = 3
"""Factor on the estimated time after which a load counts as late."""


class StoredPage(NamedTuple):
    """A page in the file: its slot and its checksum."""

    slot: int
    checksum: int


class Write(NamedTuple):
    """A page to write."""

    name: Name
    slot: int
    page: Any
    tag: Tag
    is_ls: bool
    until_ns: int


class Written(NamedTuple):
    """A page that was written."""

    name: Name
    kept: StoredPage


@dataclass(slots=True)
class PageLoad:
    """The load of a request's first pages into the request's KV. The request waits for the load.

    One thread reads the pages in order, and stops at the first page that is missing or damaged.
    """

    pages: Sequence[tuple[Name, StoredPage | Any]]
    """Name of each page, with the place in the file, or with the page itself if in RAM."""
    into: Callable[[int, Any], None]
    """Function that stores a page, given its number, in the request's future KV."""
    is_ls: bool
    tag: Tag
    late_ns: int = 0
    """Time at which the request stops waiting."""
    num_ready: int = 0
    num_read: int = 0
    """Pages that were read from the file."""
    elapsed_ns: int = 0
    """Time that reading these pages took, without the pauses of the thread."""
    busy_ns: int = 0
    """Part of `elapsed_ns` in which the thread computed checksums or copied."""
    damaged: Name | None = None
    """Name of the page that was missing or damaged."""
    is_over: bool = False
    """True once reading has stopped."""
    is_given_up: bool = False
    """True once no request waits for the load."""


class Disk(Protocol):
    """The interface of threads that write and read pages. No method blocks."""

    @property
    def failure(self) -> str | None:
        """Reason why reading and writing stopped, or None."""
        ...

    def write(self, job: Write) -> None:
        """Queue a page to be written."""
        ...

    def read(self, load: PageLoad) -> None:
        """Queue pages to be read. Loads for LS come first, and all reads before any write."""
        ...

    def erase(self, slots: Sequence[int]) -> None:
        """Queue slots to be made unreadable, after all earlier jobs."""
        ...

    def be_gentle(self, gentle: bool) -> None:
        """Record whether LS requests exist. While they exist, other work gets only `GENTLE_SHARE`.

        Loads for LS requests are never slowed down.
        """
        ...

    def written(self) -> list[Written]:
        """Return the pages written since the last call."""
        ...


@dataclass(slots=True)
class TierCounts:
    """Counts of the tier so far."""

    stored: int = 0
    """Pages written."""
    loaded: int = 0
    """Pages read for requests."""
    damaged: int = 0
    """Pages that were missing or damaged."""
    late: int = 0
    """Requests that stopped waiting for a late load, and compute instead."""
    quicker: int = 0
    """Requests that compute because computing is faster than the file."""


class FileTier:
    """Pages in a file, and pages being written or read. Lives on the engine's thread.

    The class has many short methods, because callers may use a page in any state.

    Args:
        disk: Reader and writer of pages.
        index: Pages in the file. This class sets the index's `gone`.
        free: Empty slots.
        page_bytes: Bytes of a page.
        page_size: Tokens of a page.
        costs: Costs of moving and computing. The times of loads are recorded there.
    """

    def __init__(
        self,
        disk: Disk,
        index: PageStore[StoredPage],
        free: Iterable[int],
        page_bytes: int,
        page_size: int,
        costs: StepCosts,
    ) -> None:
        self.disk, self.index, self.page_bytes = disk, index, page_bytes
        self._page_size, self._costs = page_size, costs
        self._busy = FIRST_BUSY
        """Share of the reading time in which the reading thread computes."""
        self._is_gentle = False
        self._free = list(free)
        index.gone = self._freed
        self.counts = TierCounts()
        self._unsaved: tuple[OrderedDict[Name, None], ...] = (OrderedDict(), OrderedDict())
        """Pages in RAM that are not in the file: LS pages and others, oldest first."""
        self._writing: dict[Name, Write | None] = {}
        """Pages being written; None for a page that was deleted meanwhile."""
        self._loads: list[PageLoad] = []
        """Loads that are not over."""
        self._lent: set[Name] = set()
        """Pages in RAM beyond the size of the store, until these pages are written."""

    def _freed(self, kept: StoredPage) -> None:
        self._free.append(kept.slot)

    @property
    def is_open(self) -> bool:
        """True while pages can be stored and loaded."""
        return self.disk.failure is None

    @property
    def has_unsaved(self) -> bool:
        """True if there are cached pages whose write has not started."""
        return self.is_open and any(self._unsaved)

    @property
    def is_busy(self) -> bool:
        """True if a page is being written or read, or waits to be written."""
        return self.is_open and bool(self._writing or self._loads or any(self._unsaved))

    # -- stores

    def offer(self, name: Name, is_ls: bool) -> None:
        """Mark a page that was cached or used in RAM to be stored in the file."""
        if name not in self.index and name not in self._writing:
            other, order = self._unsaved[is_ls], self._unsaved[not is_ls]
            if is_ls:
                other.pop(name, None)
            if name not in other:
                order[name] = None

    def has_room(self) -> bool:
        """Return True if RAM may hold one more page beyond its size until the page is written."""
        return self.is_open and len(self._lent) < self._most

    def would_take(self, priority: int, now_ns: int) -> bool:
        """Return True if there will be a place in the file for a page of this class."""
        return self.is_open and (bool(self._free) or self.index.may_displace(priority, now_ns))

    def take_lent(self, name: Name, is_ls: bool) -> None:
        """Write a page that RAM holds beyond its size, then remove the page from RAM."""
        self._lent.add(name)
        self.offer(name, is_ls)

    def _give_back(self, name: Name, ram: PageStore[Any]) -> None:
        if name in self._lent:
            self._lent.discard(name)
            ram.unpin([name])

    @property
    def _most(self) -> int:
        """Return the most pages that may be written at the same time."""
        return max(2, WRITING_BYTES // self.page_bytes)

    def store(self, ram: PageStore[Any], now_ns: int) -> None:
        """Start to write pages, LS first, up to the limit of concurrent writes."""
        most = self._most
        for priority, order in zip((Priority.LS, Priority.BE), self._unsaved, strict=True):
            while order and len(self._writing) < most:
                name, _ = order.popitem(last=False)
                if name not in ram or name in self.index or name in self._writing:
                    self._give_back(name, ram)
                    continue
                if not self._free and not self.index.displace(priority, now_ns):
                    self._give_back(name, ram)
                    continue
                job = Write(
                    name,
                    self._free.pop(),
                    ram.read(name),
                    ram.tag(name),
                    priority == Priority.LS,
                    ram.until_ns(name),
                )
                self._writing[name] = job
                self.disk.write(job)

    # -- loads

    def load(
        self,
        names: Sequence[Name],
        ram: PageStore[Any],
        into: Callable[[int, Any], None],
        is_ls: bool,
        tag: Tag,
        now_ns: int,
    ) -> PageLoad | None:
        """Start to load the first pages of a request. Return None if the request need not wait.

        Args:
            names: Pages of the prefix that the request can use.
            ram: Store of pages in RAM, which need not be read.
            into: Function that stores a page, as in `PageLoad`.
            is_ls: True for an LS request.
            tag: Owner and salt.
            now_ns: The engine's clock.
        """
        if not self.is_open:
            return None
        pages: list[tuple[Name, Any]] = []
        num_read = 0
        for name in names:
            if name in ram:
                pages.append((name, ram.read(name)))
            elif name in self.index:
                pages.append((name, self.index.read(name)))
                num_read += 1
            else:
                break
        ahead = [x for x in self._loads if x.is_ls or not is_ls]
        num_first = sum(len(x.pages) - x.num_ready for x in ahead if x.is_ls)
        num_then = num_read + sum(len(x.pages) - x.num_ready for x in ahead if not x.is_ls)
        first_ns, paced = self._read_ns(num_first), 1.0 if is_ls else self._pace
        estimate_ns = first_ns + self._read_ns(num_then) * (paced if self._is_gentle else 1)
        compute_ns = self._costs.prefill_ns(num_read * self._page_size)
        if not num_read:
            return None
        if compute_ns and estimate_ns > compute_ns:
            self.counts.quicker += 1
            return None
        latest_ns = LATE * int(first_ns + self._read_ns(num_then) * paced)
        late_ns = now_ns + max(SLACK_NS, latest_ns)
        load = PageLoad(pages, into, is_ls, tag, late_ns)
        self._loads.append(load)
        self.disk.read(load)
        return load

    def be_gentle(self, gentle: bool) -> None:
        """Tell the `Disk` whether LS requests exist."""
        self._is_gentle = gentle
        self.disk.be_gentle(gentle)

    def _read_ns(self, num_pages: int) -> int:
        """Return the predicted time to read pages at full speed."""
        ns = self._costs.table().move(Tier.FILE, num_pages * self._page_size)
        return num_pages * self.page_bytes * FIRST_NS_PER_BYTE if ns is None else ns

    @property
    def _pace(self) -> float:
        """Return the factor by which reads take longer while LS requests exist.

        The thread pauses after each page.
        """
        return 1 + self._busy * (1 / GENTLE_SHARE - 1)

    @property
    def num_coming(self) -> int:
        """Return the number of pages that are being loaded."""
        return sum(len(load.pages) for load in self._loads)

    # -- each iteration

    def turn(self, ram: PageStore[Any], now_ns: int) -> None:
        """Handle pages that were read and written, and start to store more."""
        for done in self.disk.written():
            self._written(done, ram, now_ns)
        for load in [load for load in self._loads if load.is_over]:
            self._loads.remove(load)
            self._loaded(load)
        if self.is_open:
            self.store(ram, now_ns)
        elif self._lent:
            ram.unpin(list(self._lent))
            self._lent.clear()

    def _loaded(self, load: PageLoad) -> None:
        self.counts.loaded += load.num_read
        if load.num_read and load.elapsed_ns:
            self._costs.moved(Tier.FILE, load.num_read * self._page_size, load.elapsed_ns)
            busy = min(1.0, load.busy_ns / load.elapsed_ns)
            self._busy += (busy - self._busy) / SAMPLES_PER_COST
        name = load.damaged
        kept = dict(load.pages).get(name) if name is not None else None
        if name is not None and name in self.index and self.index.read(name) == kept:
            self.counts.damaged += 1
            self._forget([name])

    def _written(self, done: Written, ram: PageStore[Any], now_ns: int) -> None:
        job = self._writing.pop(done.name)
        if job is None:  # deleted meanwhile: an erase of the slot is queued
            self._free.append(done.kept.slot)
            if done.name in ram:  # cached again meanwhile
                self.offer(done.name, ram.is_ls(done.name))
            return
        self._give_back(done.name, ram)
        self.counts.stored += 1
        priority = Priority.LS if job.is_ls else Priority.BE
        self.index.add(done.name, done.kept, priority, now_ns, job.tag, job.until_ns)

    # -- deletion

    def _forget(self, names: Iterable[Name]) -> None:
        """Delete pages. A page that is being read is dropped after the read."""
        slots = []
        for name in names:
            slots.append(self.index.read(name).slot)
            self.index.drop(name)
        if slots:
            self.disk.erase(slots)

    def expire(self, before_ns: int) -> None:
        """Delete pages that were last used before `before_ns`."""
        self._forget(self.index.unused_since(before_ns))

    def delete(self, tag: Tag, ram: PageStore[Any]) -> int:
        """Delete the pages of an owner or a salt, including pages that are being written.

        Return the number of pages.

        The tier also unpins such pages in RAM.
        """
        names = self.index.tagged(tag)
        self._forget(names)
        slots = []
        for name, job in self._writing.items():
            if job is not None and job.tag.startswith(tag):
                self._writing[name] = None
                slots.append(job.slot)
        if slots:
            self.disk.erase(slots)
        for name in [name for name in self._lent if ram.tag(name).startswith(tag)]:
            self._give_back(name, ram)
        for load in self._loads:
            load.is_given_up |= load.tag.startswith(tag)
        return len(names) + len(slots)

    def erase_all(self) -> None:
        """Erase the whole file. All pages must be deleted before."""
        self.disk.erase(range(self.index.capacity))

    def touch(self, names: Sequence[Name], priority: int, now_ns: int, until_ns: int) -> None:
        """Record that a request uses pages in RAM or in the file."""
        self.index.touch([n for n in names if n in self.index], priority, now_ns, until_ns)

    def pins(self) -> Iterator[Name]:
        """Yield the pages in RAM that the tier has pinned."""
        return iter(self._lent)

    def check(self) -> None:
        """Compare the index with the slots.

        Raises:
            InvariantError: A slot is in two places, or in none.
        """
        self.index.check({})
        slots = [self.index.read(name).slot for name in self.index.names()]
        slots += [*self._free, *(job.slot for job in self._writing.values() if job is not None)]
        num_deleted = sum(job is None for job in self._writing.values())
        if len(slots) + num_deleted != self.index.capacity or len(set(slots)) != len(slots):
            raise InvariantError(f"{len(slots)} slots of {self.index.capacity} are accounted for")
