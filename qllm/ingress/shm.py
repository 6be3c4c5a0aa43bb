"""The engine's end of the transport between processes of one machine: rings in shared memory.

Each front end has its own four rings. A put writes a record, then a new number into the shared
`bell` word. Then it rings the engine's doorbell (an eventfd), which matters only while the engine
sleeps. A running program compares the bell with the number that it saw last, which is one load.
Only if the bell has changed, the engine reads the rings and takes the records.
"""

import os
import select
import struct
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeVar

from qllm.ingress.codec import (
    decode_cancel,
    decode_revision,
    decode_submission,
    decode_update,
    encode_finish,
    encode_prompt,
    encode_token,
)
from qllm.ingress.ends import ring_ends
from qllm.ingress.layout import (
    FINISH_KIND,
    NUMBER_BITS,
    PROMPT_KIND,
    REVISE_KIND,
    TOKEN_KIND,
    UPDATE_KIND,
)
from qllm.ingress.memory import ControlMemory, EngineStats, FrontEndMemory
from qllm.ingress.protocol import CONTROL, Call, Cancel, Item, Revision, Submission, Update
from qllm.ingress.ring import RingError
from qllm.ingress.words import Words, address_of
from qllm.plan import ANY_ARRIVAL
from qllm.record.metrics import RequestMetrics
from qllm.runner.protocol import Watch
from qllm.types import NS_PER_MS, NS_PER_S, FinishReason, RequestId, Sampled

T = TypeVar("T", Submission, Revision, Cancel, Update)

BEAT_NS = NS_PER_S
"""Nanoseconds between two wake-ups of an idle engine, which show that the engine lives."""
BACKLOG_NS = NS_PER_MS
"""Nanoseconds between two checks of a sleeping engine for room in a full token ring."""


def front_end_of(request_id: RequestId) -> int:
    """Return the number of the front end that a request came from."""
    return request_id >> NUMBER_BITS


class Doorbell:
    """An eventfd that one side rings and the other sleeps on."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @classmethod
    def create(cls) -> "Doorbell":
        """Make one."""
        return cls(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))

    def ring(self) -> None:
        """Wake the other side."""
        os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Clear earlier rings. Call this before reading the records that they announced."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def __del__(self) -> None:
        self.close()


class Announcer(Protocol):
    """A signal to a front end that its token ring has new records."""

    def ring(self) -> None:
        """Wake the front end for new records."""
        ...

    def close(self) -> None:
        """Do nothing, because no record follows."""
        ...


class FrontEndPort:
    """The engine's ends of one front end's rings. Used by the loop's thread alone."""

    def __init__(self, block: FrontEndMemory, doorbell: Announcer) -> None:
        self.number = block.number
        ends = ring_ends()
        self._requests = tuple(ends.reader(*block.rings[name]) for name in ("ls", "be"))
        self._cancels = ends.reader(*block.rings["cancel"])
        self.tokens = ends.writer(*block.rings["token"])
        self._words = block.segment.words
        self._doorbell = doorbell
        self._backlog: deque[tuple[int, int, bytes]] = deque()
        self._has_news = False
        self.num_taken = 0
        """Number of requests passed to the loop."""
        self.open: set[RequestId] = set()
        """Ids of requests that were read and have not ended. No two open requests may have one
        id."""

    def take(self) -> tuple[list[Submission | Revision], list[Cancel | Update]]:
        """Take the records of the rings: prompts in the order of their ring, cancels and updates.

        Cancels and updates are read first. So their requests are in the rings by then.

        Raises:
            RingError: A ring is broken, or holds a record that our front ends never write.
        """
        cancels: list[Cancel | Update] = []
        prompts: list[Submission | Revision] = []
        try:
            while (record := self._cancels.read()) is not None:
                if record.kind == UPDATE_KIND:
                    cancels.append(self._own(decode_update(record)))
                else:
                    cancels.append(self._own(decode_cancel(record)))
            for ring in self._requests:
                while (record := ring.read()) is not None:
                    if record.kind == REVISE_KIND:
                        prompts.append(self._own(decode_revision(record)))
                    else:
                        prompts.append(self._new(decode_submission(record)))
        except (ValueError, IndexError, struct.error) as error:
            raise RingError(f"a record that is no request or cancel: {error}") from error
        return prompts, cancels

    def _new(self, item: Submission) -> Submission:
        request_id = self._own(item).request_id
        if request_id in self.open:
            raise RingError(f"front end {self.number} used id {request_id:#x} twice")
        self.open.add(request_id)
        return item

    def _own(self, item: T) -> T:
        if front_end_of(item.request_id) != self.number:
            raise RingError(f"front end {self.number} used id {item.request_id:#x} of another")
        return item

    @property
    def has_news(self) -> bool:
        """True if a ring has a further record, or the beginning of a record."""
        return self._cancels.has_news or any(ring.has_news for ring in self._requests)

    def show_progress(self, num_waiting: int) -> None:
        """Publish the numbers of the front end's taken and waiting requests."""
        self._words[FrontEndMemory.PROGRESS] = (self.num_taken & 0xFFFF_FFFF) << 32 | num_waiting

    def send(self, kind: int, flags: int, body: bytes) -> None:
        """Write a record. If the ring is full, the record waits in the engine's memory."""
        if self._backlog or not self.tokens.write(kind, flags, body):
            self._backlog.append((kind, flags, body))
        self._has_news = True

    def flush(self) -> bool:
        """Wake the front end for new records; return True if a backlog remains."""
        while self._backlog and self.tokens.write(*self._backlog[0]):
            self._backlog.popleft()
            self._has_news = True
        if self._has_news:
            self._has_news = False
            self._doorbell.ring()
        return bool(self._backlog)

    def close(self) -> None:
        """Close the ends of a front end that has ended."""
        self._backlog.clear()
        self._doorbell.close()


class ShmStop:
    """The stop word over shared memory.

    `word` compares the bell with the number seen last, which is one load. docs/design/rings.md
    compares its cost with that of a plain attribute.
    """

    __slots__ = (
        "_address",
        "_bell",
        "_look",
        "lowered_ns",
        "now_ns",
        "seen",
        "stop_at_ns",
        "value",
    )

    def __init__(self, bell: Words, look: Callable[[], None], now_ns: Callable[[], int]) -> None:
        self.stop_at_ns: int | None = None
        self.now_ns = now_ns
        self.lowered_ns = 0
        """Put time of the item that lowered the word last."""
        self.seen = 0
        self.value = ANY_ARRIVAL
        self._bell, self._look = bell, look
        self._address = address_of(bell)

    def watch(self) -> Watch:
        """Return the bell and the number seen last (`qllm.runner.protocol.Stop`)."""
        return Watch(self._address, self.seen)

    @property
    def word(self) -> int:
        """Smallest priority of all items that have arrived and were not drained."""
        if self._bell[0] != self.seen:
            self._look()
        return self.value

    @word.setter
    def word(self, value: int) -> None:
        self.value = value

    def lower(self, priority: int, at_ns: int) -> None:
        """Lower the word for an arrival of this class, put at `at_ns`."""
        if priority < self.value:
            self.value, self.lowered_ns = priority, at_ns


class ShmIngress:
    """The engine's end. The loop's thread calls all methods but `put`.

    Args:
        control: The engine's control block.
        doorbell: Doorbell that the loop sleeps on.
        now_ns: The engine's clock.
        close: Function that ends the loop. It is called on the loop's thread, between two programs,
            after `control.stop`.
        broken: Function that is called with the number of a front end that was detached for a
            broken ring, and the reason.
    """

    def __init__(
        self,
        control: ControlMemory,
        doorbell: Doorbell,
        now_ns: Callable[[], int],
        close: Callable[[], None],
        broken: Callable[[int, str], None],
    ) -> None:
        self.control, self.doorbell = control, doorbell
        self.ports: dict[int, FrontEndPort] = {}
        self._bell = control.words[control.BELL : control.BELL + 1]
        self.stop = ShmStop(self._bell, self._look, now_ns)
        self._close, self._broken = close, broken
        self._now_ns = now_ns
        self._items: list[Item] = []
        self._local: deque[Item] = deque()
        self._local_lock = threading.Lock()
        self._num_local = 0
        self._num_steps = 0
        self._closing = False

    def put(self, item: Item) -> None:
        """Put an item of this process. Callable from any thread."""
        with self._local_lock:
            self._local.append(item)
            self._num_local += 1
            self._bell[0] = self._num_local
        self.doorbell.ring()

    def drain(self) -> list[Item]:
        """Take everything that has arrived, and send the results of the last step."""
        self.flush()
        self._num_steps += 1
        self.control.heartbeat_ns = self._now_ns()
        self._look()
        items, self._items = self._items, []
        self.stop.word = ANY_ARRIVAL
        for item in items:
            if isinstance(item, Submission):
                self.ports[front_end_of(item.request_id)].num_taken += 1
        return items

    def attach(self, port: FrontEndPort) -> None:
        """Serve one more front end."""
        self.ports[port.number] = port
        self.stop.seen = -1  # an earlier look may have missed items from before this call

    def wait(self, timeout_ns: int | None) -> None:
        """Sleep until an item arrives or the time has passed, at most `BEAT_NS`."""
        limit_ns = BACKLOG_NS if self.flush() else BEAT_NS
        if timeout_ns is not None:
            limit_ns = min(limit_ns, max(0, timeout_ns))
        if self._bell[0] == self.stop.seen:
            select.select((self.doorbell.fd,), (), (), limit_ns / NS_PER_S)
        self.doorbell.clear()

    def decided(self, num_live: int, num_waiting: int) -> None:
        """Publish the engine's load and flush pending tokens."""
        self.flush()
        self.control.write_stats(EngineStats(self._num_steps, num_live, num_waiting))
        for port in self.ports.values():
            port.show_progress(num_waiting)

    def detach(self, number: int) -> None:
        """Remove a front end and the records in its rings."""
        port = self.ports.pop(number, None)
        if port is not None:
            port.close()
        self._items = [
            item
            for item in self._items
            if isinstance(item, Call) or front_end_of(item.request_id) != number
        ]

    def flush(self) -> bool:
        """Send pending tokens to the front ends; return True if some must wait."""
        backlogs = [port.flush() for port in self.ports.values()]
        return any(backlogs)

    def _look(self) -> None:
        """Take the records of the rings into `_items`, and lower the stop word for these items."""
        self.stop.seen = self._bell[0]
        prompts: list[Submission | Revision] = []
        cancels: list[Cancel | Update] = []
        for port in list(self.ports.values()):
            try:
                more, gone = port.take()
            except RingError as error:
                self.detach(port.number)
                self._broken(port.number, str(error))
                continue
            prompts += more
            cancels += gone
        prompts.sort(key=lambda item: item.arrival_ns)
        for item in prompts:
            came_ns = item.arrival_ns if item.arrival_ns >= 0 else self._now_ns()
            if isinstance(item, Revision):
                self.stop.lower(item.word, came_ns)
            elif item.wrong is None:
                self.stop.lower(item.priority, came_ns)  # replayed: it is older than this engine
        if self.control.stop and not self._closing:
            self._closing = True
            self._local.append(Call(self._close))
        if cancels or self._local:
            self.stop.lower(CONTROL, self._now_ns())
        self._items += (*prompts, *cancels)
        while self._local:
            self._items.append(self._local.popleft())


class RingSink:
    """A sink that writes tokens and ends into the token ring of their front end."""

    def __init__(self, ports: dict[int, FrontEndPort]) -> None:
        self._ports = ports

    def on_token(self, sampled: Sampled, at_ns: int) -> bool:
        """Write one token. The next `drain` wakes the front end."""
        port = self._ports.get(front_end_of(sampled.request_id))
        if port is not None:
            if sampled.prompt is not None:
                for part in encode_prompt(sampled.request_id, sampled.prompt):
                    port.send(PROMPT_KIND, 0, part)
            flags, body = encode_token(sampled, at_ns)
            port.send(TOKEN_KIND, flags, body)
        return False

    def on_finish(
        self,
        request_id: RequestId,
        reason: FinishReason,
        error: str | None,
        metrics: RequestMetrics | None,
    ) -> None:
        """Write the end of a request. The loop wakes the front end before the next program."""
        port = self._ports.get(front_end_of(request_id))
        if port is not None:
            flags, body = encode_finish(request_id, reason, error, metrics)
            port.send(FINISH_KIND, flags, body)
            port.open.discard(request_id)
