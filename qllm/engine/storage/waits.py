"""Frames that wait for experts, and the slots that the reads of these experts get.

    a run misses experts -> its frame is parked with a ticket -> the ticket gets slots -> reads
    -> enough experts are in memory -> policies see the frame again -> it runs, and asks again

Slots are given in the order of tickets: the oldest LS, then the oldest BE. A ticket holds its slots
until its frame has run, so each read leads to at least one task. The first ticket may take slots
that others hold, and LS may take those of BE, except slots that are being read into. So the first
frame always goes on, whatever the number of slots, and then the next.

A pass of many tokens uses nearly all experts of each layer. So when it has what it needs, experts
of its next layers are read ahead, as long as no other frame waits for the disk. They get slots as a
long prompt of BE does, and lose them to any frame that needs the slots.

All of this runs on the engine's thread. Threads only read (`qllm.engine.storage.reads`).
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

from qllm.engine.storage.reads import (
    NUM_THREADS,
    DiskOrder,
    ExpertRead,
    Rank,
    ReadThreads,
    Ticket,
)
from qllm.errors import ModelError
from qllm.policy import RankPolicy
from qllm.runner.displacing import Use
from qllm.runner.placing import LayerPlaces, Placement
from qllm.scheduler.decision import Parked
from qllm.scheduler.program import Index, Program
from qllm.scheduler.scheduler import Scheduler
from qllm.types import NS_PER_MS, NS_PER_S, Cap, Priority

DEADLINE_NS = 30 * NS_PER_S
"""Longest time that an expert is read. After it, the frames that wait for the expert fail."""
LONG_TOKENS = 16
"""Tokens of prompts in a pass of BE from which on its experts pass through few slots."""
AHEAD_USES = 3
"""Uses per expert from which on a pass uses nearly all experts of a layer. With an even router, a
twentieth of the experts is not used."""
MOST_FAILURES = 3
"""Number of failed reads in a row after which the engine is not ready."""

_log = logging.getLogger(__name__)


def parks_for_experts(policy: Any) -> bool:
    """Return True if frames under a policy may wait for experts while others run.

    A policy that makes plans of its own and asks for no stops inside a pass may not know parked
    frames. Then the runner reads experts by itself, and all others wait.
    """
    stops = Cap.YIELD_LAYER | Cap.YIELD_EXPERT
    return isinstance(policy, RankPolicy) or bool(policy.needs & stops)


class Missed(Protocol):
    """Experts that a frame needs and that are not in memory: `Missing` of a runner."""

    @property
    def residency(self) -> LayerPlaces: ...
    @property
    def experts(self) -> tuple[int, ...]: ...
    @property
    def is_range(self) -> bool: ...


class ExpertWaits:
    """The `Waits` of an engine (`qllm.engine.protocol`) whose experts are in a file.

    Args:
        scheduler: Owner of the frames.
        residency: Slots for experts.
        missing: Function that returns the experts that the last run of a program missed.
        wake: Function that wakes the loop, and stops its program. Called from other threads.
        now_ns: The engine's clock.
        order: Order of all threads that use the disk.
        deadline_ns: Longest time that an expert is read.
        threads: Class of the threads that read.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        residency: Placement,
        missing: Callable[[Program], Missed | None],
        wake: Callable[[], None],
        now_ns: Callable[[], int],
        order: DiskOrder,
        deadline_ns: int = DEADLINE_NS,
        threads: Callable[..., ReadThreads] = ReadThreads,
    ) -> None:
        self._scheduler, self._residency, self._missing = scheduler, residency, missing
        self._deadline_ns = deadline_ns
        self._threads = threads(residency.read, wake, now_ns, order)
        self._tickets: dict[int, Ticket] = {}
        self._reads: dict[int, ExpertRead] = {}
        """Reads that have not been taken back, by row of the table."""
        self.reads_ahead = True
        """False to read no expert before a frame has asked for it."""
        self._ahead: dict[int, tuple[int, int]] = {}
        """Experts that were read ahead and not used yet: time of the read, and bytes, by row."""
        self._num_failures = 0
        self.failure: str | None = None
        """Error of the last read, if `MOST_FAILURES` reads in a row have failed."""
        zero = {"uses": 0, "loads": 0, "bytes": 0, "waits_ms": 0.0}
        self._counts: dict[str, dict[str, Any]] = {name: dict(zero) for name in ("LS", "BE")}
        self._counts["ahead"] = {"loads": 0, "bytes": 0, "unused_bytes": 0}
        residency.parks = True

    # -- the loop

    def ran(self, program: Program, end: Index, start_ns: int, end_ns: int) -> bool:
        """See `Waits.ran`."""
        use = self._use(program)
        num_uses = self._residency.count(use, end_ns)
        self._counts["LS" if use is Use.LS else "BE"]["uses"] += num_uses
        self._count_ahead()
        frame_id = program.frame_id
        missing = None if end == program.end else self._missing(program)
        ticket = self._tickets.pop(frame_id, None)
        if missing is None:
            self._void(ticket)
            return False
        wanted = tuple(map(missing.residency.wanted, missing.experts))
        parked = self._scheduler.running
        assert parked is not None
        made = Ticket(frame_id, self._rank(parked), use, wanted, missing.is_range, end_ns)
        op = program.ops[end.op]
        num_chosen = self._residency.top_k * (op.hi - op.lo)
        made.is_wide = num_chosen >= AHEAD_USES * missing.residency.num_experts
        for one in wanted:
            if (read := self._reads.get(one.number)) is not None:
                self._threads.join(made, read)
        self._void(ticket)
        self._tickets[frame_id] = made
        self._scheduler.held_up(end, start_ns, end_ns, len(wanted))
        return True

    def turn(self, now_ns: int) -> Iterator[tuple[Parked, Exception]]:
        """See `Waits.turn`."""
        for read in self._threads.finished():
            self._take_back(read)
        if not (self._tickets or self._reads):
            return
        self._look(now_ns)
        live = self._scheduler.requests.values()
        self._threads.be_gentle(any(r.priority <= Priority.LS and not r.is_paused for r in live))
        order = sorted(self._tickets.values(), key=lambda ticket: ticket.rank)
        self._drop_ahead(order)
        is_blocked = False
        for ticket in order:
            if ticket.is_waiting and not ticket.has_slots:
                has_slots = self._give(ticket, order, now_ns, may_take=not is_blocked)
                is_blocked = is_blocked or not has_slots
        if len(order) == 1:
            self._read_ahead(order[0], now_ns)
        self._find_late(now_ns, order)
        yield from self._failed()
        for ticket in list(self._tickets.values()):
            if ticket.is_waiting and self._is_enough(ticket):
                self._end_wait(ticket, now_ns)

    def sleep(self) -> bool:
        """See `Waits.sleep`."""
        return self._threads.sleep()

    def next_turn_ns(self, now_ns: int) -> int | None:
        """See `Waits.next_turn_ns`."""
        waits = any(ticket.is_waiting for ticket in self._tickets.values())
        return now_ns + self._deadline_ns // 4 if waits and self._reads else None

    def close(self) -> None:
        """Stop the threads. The runner reads experts by itself from now on."""
        self._residency.parks = False
        self._threads.close()

    def stats(self) -> dict[str, Any]:
        """Return the statistics of reads. Callable from any thread."""
        return {
            "waiting": sum(ticket.is_waiting for ticket in list(self._tickets.values())),
            "failure": self.failure,
            **{name: dict(counts) for name, counts in self._counts.items()},
        }

    # -- tickets

    def _look(self, now_ns: int) -> None:
        """Count the waits until now. Void tickets of frames that are gone, moved out or paused."""
        scheduler = self._scheduler
        for frame_id, ticket in list(self._tickets.items()):
            parked = scheduler.frames.get(frame_id)
            waits = parked is not None and parked.waits_for is not None
            if parked is None or waits is not ticket.is_waiting:
                self._void(self._tickets.pop(frame_id))
            elif all(r.is_paused for r, _ in parked.alive(parked.program.rows, scheduler.requests)):
                scheduler.end_wait(parked)
                self._void(self._tickets.pop(frame_id))
            else:
                ticket.rank, ticket.use = self._rank(parked), self._use(parked.program)
                if ticket.is_waiting:
                    scheduler.count_wait(parked, now_ns, is_own=ticket.has_slots)

    def _rank(self, parked: Parked) -> Rank:
        alive = parked.alive(parked.program.rows, self._scheduler.requests)
        return min((r.priority > Priority.LS, r.arrival_ns, r.request_id) for r, _ in alive)

    def _use(self, program: Program) -> Use:
        """Return the kind of a frame that uses experts."""
        rows, requests = program.rows, self._scheduler.requests
        if any(
            requests[r.request_id].priority <= Priority.LS for r in rows if r.request_id in requests
        ):
            return Use.LS
        num_prompt = sum(row.num_tokens for row in rows if row.num_tokens > 1)
        return Use.PASSING if num_prompt >= LONG_TOKENS else Use.BE

    def _void(self, ticket: Ticket | None) -> None:
        """Give up the slots of a ticket. Reads that have begun end, and their experts stay."""
        if ticket is None:
            return
        ticket.is_waiting = ticket.has_slots = False
        for read in list(ticket.reads.values()):
            self._threads.leave(ticket, read)
            if not read.tickets and self._threads.cancel(read):
                self._forget(read, None)

    def _end_wait(self, ticket: Ticket, now_ns: int) -> None:
        ticket.is_waiting, ticket.has_slots = False, True
        counts = self._counts["LS" if ticket.is_ls else "BE"]
        counts["waits_ms"] += (now_ns - ticket.since_ns) / NS_PER_MS
        self._scheduler.end_wait(self._scheduler.frames[ticket.frame_id])

    def _is_enough(self, ticket: Ticket) -> bool:
        """Return True if the frame of a ticket can run, and that is worth a turn."""
        num = self._num_here(ticket.wanted)
        if ticket.is_range:
            return num == len(ticket.wanted)
        return num >= self._enough(ticket) or (num > 0 and not ticket.reads)

    def _enough(self, ticket: Ticket) -> int:
        """Return the number of experts that are worth a turn of the frame: those of one token."""
        num = len(ticket.wanted)
        return num if ticket.is_range else min(num, self._residency.top_k)

    def _num_here(self, wanted: Iterable[Any]) -> int:
        return sum(self._residency.place(one.number) is not None for one in wanted)

    # -- slots

    def _give(
        self, ticket: Ticket, order: Sequence[Ticket], now_ns: int, *, may_take: bool
    ) -> bool:
        """Give slots to a ticket, and queue its reads; return False if there are too few slots.

        Args:
            ticket: Ticket without slots.
            order: All tickets, first to last.
            now_ns: The engine's clock.
            may_take: False if an earlier ticket lacks slots. Then this one gets no further slots.
        """
        absent = [one for one in ticket.wanted if self._residency.place(one.number) is None]
        for one in absent:
            if (read := self._reads.get(one.number)) is not None:
                self._threads.join(ticket, read)
        new = [one for one in absent if one.number not in self._reads]
        num_there = len(ticket.wanted) - len(new)
        num_needed = max(0, self._enough(ticket) - num_there)
        slots = self._slots(ticket, len(new), num_needed, order, now_ns) if may_take else []
        if num_there + len(slots) < (len(ticket.wanted) if ticket.is_range else 1):
            return False
        reads = []
        for one, slot in zip(new, slots, strict=False):
            into = self._residency.reserve(one, slot)
            self._reads[one.number] = read = ExpertRead(one, slot, into, [ticket])
            ticket.reads[one.number] = read
            reads.append(read)
        self._threads.put(reads)
        ticket.has_slots = True
        if num := min(self._enough(ticket) - self._num_here(ticket.wanted), len(ticket.reads)):
            self._threads.expect(ticket, num)
        return True

    def _is_in_the_way(self, use: Use) -> bool:
        """Return True if nothing is read ahead for a kind of frame, because LS requests exist."""
        return self._threads.is_gentle and use is not Use.LS

    def _drop_ahead(self, order: Sequence[Ticket]) -> None:
        """Take back reads for which no frame has asked, if other frames wait or LS requests exist.

        A read that has begun ends.
        """
        for read in list(self._reads.values()):
            if read.ahead is None or read.tickets:
                continue
            is_dropped = len(order) > 1 or self._is_in_the_way(read.ahead)
            if is_dropped and self._threads.cancel(read):
                self._forget(read, None)

    def _read_ahead(self, ticket: Ticket, now_ns: int) -> None:
        """Queue reads for the next layers of a pass that uses nearly all experts."""
        is_allowed = self.reads_ahead and not self._is_in_the_way(ticket.use)
        if not (is_allowed and ticket.is_wide and ticket.has_slots):
            return
        residency, here = self._residency, self._places(ticket)
        if len(here) + len(ticket.reads) < len(ticket.wanted):
            return
        num = sum(read.ahead is not None for read in self._reads.values()) + len(self._ahead)
        room = max(0, residency.displacing.num_passing - num)
        layers = range(ticket.wanted[0].layer + 1, residency.num_layers)
        absent = (one for layer in layers for one in residency.absent(layer))
        wanted = list(islice((one for one in absent if one.number not in self._reads), room))
        here.update(slot for slot in map(residency.place, self._ahead) if slot is not None)
        slots = residency.free_slots(len(wanted), here, Use.PASSING, now_ns)
        reads = []
        for one, slot in zip(wanted, slots, strict=False):
            into = residency.reserve(one, slot)
            self._reads[one.number] = read = ExpertRead(one, slot, into, [], ahead=ticket.use)
            reads.append(read)
        self._threads.put(reads)

    def _count_ahead(self) -> None:
        """Count the experts that were read ahead and have lost their slots without a use."""
        residency = self._residency
        for number, (since, num_bytes) in list(self._ahead.items()):
            is_used, is_gone = residency.table[number, 1] > since, residency.place(number) is None
            if is_used or is_gone:
                del self._ahead[number]
            if is_gone and not is_used:
                self._counts["ahead"]["unused_bytes"] += num_bytes

    def _slots(
        self, ticket: Ticket, most: int, least: int, order: Sequence[Ticket], now_ns: int
    ) -> list[int]:
        """Return at most `most` slots.

        To have `least`, the first ticket displaces any expert that no ticket holds. Then slots that
        later tickets hold are taken.
        """
        residency = self._residency
        places = {t.frame_id: self._places(t) for t in order if t.has_slots}
        own = self._places(ticket)
        is_first, held = ticket is order[0], own.union(*places.values())
        found = residency.free_slots(most, held, ticket.use, now_ns)
        if len(found) < least and is_first:
            found = residency.free_slots(least, held, ticket.use, now_ns, by_right=True)
        if len(found) >= least:
            return found
        later = [t for t in order if t.has_slots and t.rank > ticket.rank]
        later = [t for t in later if is_first or t.is_ls < ticket.is_ls]
        kept = own.union(*(places[t.frame_id] for t in order if t.has_slots and t not in later))
        for read in reversed(list(self._reads.values())):
            others = [t for t in read.tickets if t not in later]
            if len(found) < least and not others and self._threads.cancel(read):
                for one in list(read.tickets):
                    self._threads.leave(one, read)
                    one.has_slots = False
                self._forget(read, None)
                found.append(read.slot)
        for other in reversed(later):
            for slot in places[other.frame_id] - kept:
                if len(found) < least and slot not in found:
                    found.append(slot)
                    for t in later:
                        t.has_slots = t.has_slots and slot not in places[t.frame_id]
        return found

    def _places(self, ticket: Ticket) -> set[int]:
        """Return the slots with experts that a ticket wants."""
        found = (self._residency.place(one.number) for one in ticket.wanted)
        return {slot for slot in found if slot is not None}

    # -- reads

    def _take_back(self, read: ExpertRead) -> None:
        """Put an expert that was read into the table, or count a failure."""
        number = read.wanted.number
        is_be = read.rank[0] if read.ahead is None else read.ahead is not Use.LS
        for ticket in list(read.tickets):
            self._threads.leave(ticket, read)
            ticket.error = ticket.error or read.error
        self._forget(read, number if read.error is None else None)
        if read.error is None:
            self._num_failures, self.failure = 0, None
            names = ("BE" if is_be else "LS", *(() if read.ahead is None else ("ahead",)))
            for counts in map(self._counts.__getitem__, names):
                counts["loads"] += 1
                counts["bytes"] += len(read.into)
            if read.ahead is not None:
                self._ahead[number] = int(self._residency.table[number, 1]), len(read.into)
        elif not read.is_late:
            self._fail(read.error)

    def _forget(self, read: ExpertRead, number: int | None) -> None:
        del self._reads[read.wanted.number]
        self._residency.end_read(read.slot, number)

    def _fail(self, error: Exception) -> None:
        self._num_failures += 1
        if self._num_failures >= MOST_FAILURES:
            self.failure = str(error)
        _log.warning("an expert was not read: %s", error)

    def _find_late(self, now_ns: int, order: Sequence[Ticket]) -> None:
        """Set the error of tickets whose experts the disk does not return.

        These are the tickets of late reads. If every thread has such a read, all others fail, too.
        The first ticket fails if late reads alone keep slots from it.
        """
        running = self._threads.running
        for read in running:
            assert read.begun_ns is not None
            if not read.is_late and now_ns - read.begun_ns >= self._deadline_ns:
                read.is_late = True
                self._fail(self._late_error(read))
        late = [read for read in running if read.is_late]
        for ticket in order if late else ():
            own = [read for read in late if ticket in read.tickets]
            is_stuck = len(late) == NUM_THREADS and (ticket.reads or not ticket.has_slots)
            if ticket is order[0] and not ticket.has_slots:
                is_stuck = is_stuck or len(late) == len(self._reads)
            if ticket.is_waiting and (own or is_stuck):
                ticket.error = ticket.error or self._late_error((own or late)[0])

    def _late_error(self, read: ExpertRead) -> ModelError:
        layer, expert, _ = read.wanted
        return ModelError(
            f"expert {expert} of {self._residency.name_of(layer)} was not read within "
            f"{self._deadline_ns / NS_PER_S:g} s; {self._residency.cure}"
        )

    def _failed(self) -> Iterator[tuple[Parked, Exception]]:
        """Yield the frames whose experts cannot be read, each as the running frame."""
        for frame_id, ticket in list(self._tickets.items()):
            parked = self._scheduler.frames.get(frame_id)
            if ticket.is_waiting and ticket.error is not None and parked is not None:
                self._void(self._tickets.pop(frame_id))
                self._scheduler.take_up(parked)
                yield parked, ticket.error
