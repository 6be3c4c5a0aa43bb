"""The file tier of the prefix cache, as the engine's thread sees it: which page lies where.

Pages that were kept go out while the engine computes, and come back for requests that begin with
them. All decisions are here; a `Disk` does what they say on threads of its own and is looked at
once per turn of the loop.

    kept in RAM --> unsaved --> written --> in the file, found by name, also by the next engine
                                               |
    RAM, lent to the request  <-- read <-------'   (not there, damaged, late: it is computed)
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from qllm.errors import InvariantError
from qllm.scheduler.prefix import Name, PageStore, Tag
from qllm.types import NS_PER_MS, Priority

WRITING_BYTES = 16 << 20
"""Pages on their way to the file at once; at least two."""
FIRST_NS_PER_BYTE = 10.0
"""Until a page was read: 100 MB/s."""
SLACK_NS = 50 * NS_PER_MS
"""A load is not late before this."""
NEW_WEIGHT = 0.25
"""Weight of the page that was read last in the estimate."""
LATE = 3
"""A load is late once it takes so many times its estimate."""


class Kept(NamedTuple):
    """A page in the file: its place, and the sum of its bytes."""

    slot: int
    checksum: int


class Write(NamedTuple):
    """One page that is to go out."""

    name: Name
    slot: int
    page: Any
    tag: Tag
    is_ls: bool
    until_ns: int


class Read(NamedTuple):
    """Pages that one request waits for."""

    pages: tuple[tuple[Name, Kept], ...]
    is_ls: bool
    number: int


class Done(NamedTuple):
    """What became of one page, or, with an empty name, that all of a `Read` was looked at."""

    name: Name
    kept: Kept | None
    """Where a written page is; None of one that was read."""
    page: Any = None
    """What was read; None if the page is not there whole."""
    number: int = 0
    """Number of the `Read`."""
    elapsed_ns: int = 0


class Disk(Protocol):
    """What moves pages. Nothing here waits."""

    @property
    def failure(self) -> str | None:
        """Why it moves nothing any more."""
        ...

    def write(self, job: Write) -> None:
        """Write a page, soon."""
        ...

    def read(self, job: Read) -> None:
        """Read pages, soon: LS first, before what is to be written."""
        ...

    def erase(self, slots: Sequence[int]) -> None:
        """Make pages unreadable, after what was asked for before."""
        ...

    def be_gentle(self, gentle: bool) -> None:
        """Take a smaller share of the machine from now on: LS requests are there."""
        ...

    def done(self) -> list[Done]:
        """What was done since the last call."""
        ...


@dataclass(slots=True)
class Load:
    """A request that waits for pages of the file."""

    names: Sequence[Name]
    """Pages of its prefix, as far as there may be any."""
    missing: set[Name]
    """Those not here yet."""
    priority: int
    tag: Tag
    number: int
    late_ns: int
    pinned: list[Name]
    is_over: bool = False
    """All that it waits for was looked at."""


@dataclass(slots=True)
class TierCounts:
    """What the tier did so far."""

    stored: int = 0
    """Pages written."""
    loaded: int = 0
    """Pages read for requests."""
    damaged: int = 0
    """Pages that were not there whole."""
    late: int = 0
    """Requests that did not wait longer and compute."""


class FileTier:
    """Pages in a file, and those on their way. Lives on the engine's thread.

    Args:
        disk: Moves pages.
        index: What lies in the file; its `gone` is taken.
        free: Slots with nothing in them.
        page_bytes: Bytes of a page.
        prefill_ns: Predicted time to compute so many tokens; 0 if it is not known.
    """

    def __init__(
        self,
        disk: Disk,
        index: PageStore[Kept],
        free: Iterable[int],
        page_bytes: int,
        prefill_ns: Callable[[int], int],
    ) -> None:
        self.disk, self.index, self.page_bytes = disk, index, page_bytes
        self._prefill_ns = prefill_ns
        self._free = list(free)
        index.gone = self._freed
        self.counts = TierCounts()
        self._unsaved: tuple[OrderedDict[Name, None], ...] = (OrderedDict(), OrderedDict())
        """Pages in RAM that are not in the file, LS and others, oldest first."""
        self._writing: dict[Name, Write | None] = {}
        """On their way; None of one that was deleted meanwhile."""
        self._loads: dict[int, Load] = {}
        self._reading: dict[Name, tuple[bool, int]] = {}
        """Pages asked for: whether for LS, and the last request that asked."""
        self._num_loads = 0
        self._num_read = 0
        self._ns_per_byte = FIRST_NS_PER_BYTE
        self._lent: set[Name] = set()
        """Pages that RAM has no room for and keeps until they are written."""

    def _freed(self, kept: Kept) -> None:
        self._free.append(kept.slot)

    @property
    def is_open(self) -> bool:
        """Whether pages go out and come back."""
        return self.disk.failure is None

    @property
    def has_unsaved(self) -> bool:
        """Whether pages are kept that are not on their way to the file yet."""
        return self.is_open and any(self._unsaved)

    @property
    def is_busy(self) -> bool:
        """Whether something is on its way, or could be."""
        return self.is_open and bool(self._writing or self._loads or any(self._unsaved))

    # -- out

    def offer(self, name: Name, is_ls: bool) -> None:
        """A page is kept in RAM, or was used there: have it in the file too."""
        if name not in self.index and name not in self._writing:
            other, order = self._unsaved[is_ls], self._unsaved[not is_ls]
            if is_ls:
                other.pop(name, None)
            if name not in other:
                order[name] = None

    def has_room(self) -> bool:
        """Whether a page may be lent to RAM until it is written."""
        return self.is_open and len(self._lent) < self._most

    def would_take(self, priority: int, now_ns: int) -> bool:
        """Whether a page of this class will have a place in the file."""
        return self.is_open and (bool(self._free) or self.index.may_displace(priority, now_ns))

    def take_lent(self, name: Name, is_ls: bool) -> None:
        """A page was lent to RAM: have it in the file and give it back then."""
        self._lent.add(name)
        self.offer(name, is_ls)

    def _give_back(self, name: Name, ram: PageStore[Any]) -> None:
        if name in self._lent:
            self._lent.discard(name)
            ram.unpin([name])

    @property
    def _most(self) -> int:
        """Most pages on their way at once."""
        return max(2, WRITING_BYTES // self.page_bytes)

    def store(self, ram: PageStore[Any], now_ns: int) -> None:
        """Let pages go out, LS first, as many as may be on their way at once."""
        most = self._most
        for priority, order in zip((Priority.LS, Priority.BE), self._unsaved, strict=True):
            while order and len(self._writing) < most:
                name, _ = order.popitem(last=False)
                if name not in ram or name in self.index or name in self._writing:
                    self._give_back(name, ram)
                    continue
                if not self._free and not self.index.make_room(priority, now_ns):
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

    # -- back

    def load(
        self, names: Sequence[Name], ram: PageStore[Any], priority: int, tag: Tag, now_ns: int
    ) -> Load | None:
        """Start to load what a request needs of the file; None if it need not wait.

        Args:
            names: The pages of its prefix that it can use.
            ram: Where they go.
            priority: Its class.
            tag: Whose it is.
            now_ns: The engine's clock.
        """
        room = ram.capacity - self._num_lent
        if priority > Priority.LS:
            room //= 2
        names = names[: self._num_there(names, ram, room)]
        missing = [name for name in names if name not in ram]
        if not missing or not self.is_open:
            return None
        is_ls = priority <= Priority.LS
        asked = [n for n in missing if n not in self._reading or self._reading[n][0] < is_ls]
        ahead = self._num_read + len(asked)
        estimate_ns = int(ahead * self.page_bytes * self._ns_per_byte)
        compute_ns = self._prefill_ns(len(missing))
        if compute_ns and estimate_ns > compute_ns:
            return None
        self._num_loads += 1
        here = [name for name in names if name in ram]
        ram.pin(here)
        found = Load(
            names,
            set(missing),
            priority,
            tag,
            self._num_loads,
            now_ns + max(SLACK_NS, LATE * estimate_ns),
            here,
        )
        self._loads[found.number] = found
        self._reading.update(dict.fromkeys(asked, (is_ls, found.number)))
        self._num_read += len(asked)
        pages = tuple((name, self.index.read(name)) for name in asked)
        self.disk.read(Read(pages, is_ls, found.number))
        return found

    @property
    def _num_lent(self) -> int:
        return sum(len(load.pinned) + len(load.missing) for load in self._loads.values())

    def _num_there(self, names: Sequence[Name], ram: PageStore[Any], room: int) -> int:
        """How many of the first pages are in RAM or in the file, up to so many."""
        count = 0
        while count < min(len(names), max(0, room)) and (
            names[count] in ram or names[count] in self.index
        ):
            count += 1
        return count

    def is_late(self, load: Load, now_ns: int) -> bool:
        """Whether a request waits no longer."""
        return load.is_over or not self.is_open or now_ns >= load.late_ns

    def end(self, load: Load, ram: PageStore[Any]) -> None:
        """A request waits no longer: what came for it is nobody's any more."""
        ram.unpin(load.pinned)
        del self._loads[load.number]

    # -- each turn

    def turn(self, ram: PageStore[Any], now_ns: int) -> None:
        """Take what was read and written, and let more go out."""
        for done in self.disk.done():
            if not done.name:
                if (load := self._loads.get(done.number)) is not None:
                    load.is_over = True
            elif done.kept is not None:
                self._written(done, ram, now_ns)
            else:
                self._read(done, ram, now_ns)
        if self.is_open:
            self.store(ram, now_ns)
        elif self._lent:
            ram.unpin(list(self._lent))
            self._lent.clear()

    def _written(self, done: Done, ram: PageStore[Any], now_ns: int) -> None:
        job = self._writing.pop(done.name)
        assert done.kept is not None
        if job is None:  # deleted: its slot is erased after it
            self._free.append(done.kept.slot)
            return
        self._give_back(done.name, ram)
        self.counts.stored += 1
        priority = Priority.LS if job.is_ls else Priority.BE
        self.index.add(done.name, done.kept, priority, now_ns, job.tag, job.until_ns)

    def _read(self, done: Done, ram: PageStore[Any], now_ns: int) -> None:
        self._num_read -= 1
        name = done.name
        if self._reading.get(name, (False, 0))[1] == done.number:
            del self._reading[name]
        is_known = name in self.index
        if done.page is None:
            if is_known and name not in self._reading:
                self.counts.damaged += 1
                self._forget([name])
            return
        seen = done.elapsed_ns / self.page_bytes
        self._ns_per_byte += NEW_WEIGHT * (seen - self._ns_per_byte)
        if not is_known:  # deleted meanwhile
            return
        for load in self._loads.values():
            if name not in load.missing:
                continue
            load.missing.discard(name)
            load.pinned.append(name)
            if name in ram:
                ram.pin([name])
            else:
                ram.lend(name, done.page, load.priority, now_ns, load.tag)
            self.counts.loaded += 1
            self.index.touch([name], load.priority, now_ns)

    # -- deletion

    def _forget(self, names: Iterable[Name]) -> None:
        """Delete pages; one that is being read is nobody's by the time that it comes."""
        slots = []
        for name in names:
            slots.append(self.index.read(name).slot)
            self.index.drop(name)
        if slots:
            self.disk.erase(slots)

    def expire(self, before_ns: int) -> None:
        """Delete what nobody has used since then."""
        self._forget(self.index.unused_since(before_ns))

    def delete(self, tag: Tag, ram: PageStore[Any]) -> int:
        """Delete the pages of an owner or a salt, those on their way too; return how many.

        What is in RAM is not pinned from here any more.
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
        for load in self._loads.values():
            if load.tag.startswith(tag):
                ram.unpin(load.pinned)
                load.pinned.clear()
                load.missing.clear()
                load.is_over = True
        return len(names) + len(slots)

    def erase_all(self) -> None:
        """After all pages were deleted: leave nothing in the file, wherever it came from."""
        self.disk.erase(range(self.index.capacity))

    def touch(self, names: Sequence[Name], priority: int, now_ns: int, until_ns: int) -> None:
        """A request uses pages, wherever it found them."""
        self.index.touch([n for n in names if n in self.index], priority, now_ns, until_ns)

    def pins(self) -> Iterator[Name]:
        """The pages in RAM that are pinned from here, each as often as it is."""
        yield from self._lent
        for load in self._loads.values():
            yield from load.pinned

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
