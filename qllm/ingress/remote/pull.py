"""A front end that fetches the tokens that a device wrote; the engine's host sends none.

    front end   LS, BE and cancel rings, token tail   ── WRITE ──>   the engine's block
    front end   token ring, request tails, progress   <── READ ───   the engine's block

A device writes the engine's block (`qllm.device.rings`). The front end reads at its own pace: the
engine's words, and a bounded window of the token ring from its own position. No word tells how far
the ring is written. A record shows by its checksum that it is whole. The bytes of one READ may be
of several moments, so a record may be incomplete. Then the front end reads it again. The word after
a record may be older than the record. A record of an earlier lap has a lower number, so it is not
taken for the next record. Words of eight bytes are read whole.

With a card only the two sides take part. Where UCX emulates, the engine's host copies:
`LinkDriver`.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence

from qllm.ingress.ends import Writer
from qllm.ingress.front_end import Heard
from qllm.ingress.layout import FRONT_END, cell, offset
from qllm.ingress.memory import FrontEndMemory
from qllm.ingress.remote.nixl import NAP_NS, PROFILES, Link, NixlError, NixlFrontEnd
from qllm.ingress.ring import BROKEN_AFTER_NS, RingError
from qllm.types import NS_PER_S

MIN_WINDOW = 1 << 10
"""Smallest number of bytes of the token ring that one READ fetches: 16 tokens. It is doubled after
each READ that found its window full, up to the whole ring."""
MIN_NAP_NS = 20_000
"""Nanoseconds between two looks while tokens arrive. They are doubled after each empty look, up to
NAP_NS."""
WIRE_UP_NS = 10_000_000
"""Nanoseconds between two looks of the engine's host with a card. A card needs these looks only
until both sides have connected."""
_TAILS = ("ls_tail", "be_tail", "cancel_tail")
_TOKEN_TAIL = cell(FRONT_END, "token_tail")
_WORDS_AT = offset(FRONT_END, "ls_tail")
_NUM_WORDS = len(_TAILS) + 1
_LANDING = 2048
"""Offset of the engine's words in our block, between the header and the rings."""
assert cell(FRONT_END, "progress") == _WORDS_AT // 8 + len(_TAILS)


class Puller:
    """A reader that fetches a device's block into our copy. One thread at a time.

    Args:
        link: Connected link.
        block: Our copy.
        writers: Writers of the LS, BE and cancel rings.
    """

    def __init__(self, link: Link, block: FrontEndMemory, writers: Sequence[Writer]) -> None:
        self._link, self._words, self._writers = link, block.segment.words, writers
        self._ring_at, self._capacity = block.offsets["token"], len(block.rings["token"][0])
        self._transfer: int | None = None
        self._wrong_since_ns: int | None = None
        self._start = 0
        self.window = min(MIN_WINDOW, self._capacity)
        """Number of bytes of the ring that the next READ fetches."""

    @property
    def is_under_way(self) -> bool:
        """True while a READ is under way. The ring must not be read then."""
        return self._transfer is not None

    def pull(self) -> bool:
        """Begin a READ if none is under way; return True if one has ended.

        Raises:
            NixlError: The READ failed.
            RingError: The engine's words make no sense.
        """
        self._link.drive()
        if self._transfer is None:
            self._start = self._words[_TOKEN_TAIL]
            self._transfer = self._link.fetch(self._ranges())
        if not self._link.is_done(self._transfer):
            return False
        self._transfer = None
        self._take_words()
        return True

    def _ranges(self) -> list[tuple[int, int, int]]:
        at = self._start % self._capacity
        first = min(self.window, self._capacity - at)
        parts = [(self._ring_at + at, first), (self._ring_at, self.window - first)]
        words = (_LANDING, _WORDS_AT, 8 * _NUM_WORDS)
        return [words, *((at, at, size) for at, size in parts if size)]

    def _take_words(self) -> None:
        """Store a tail if it is plausible. A wrong tail would overwrite unread records."""
        first, landed = _WORDS_AT // 8, _LANDING // 8
        wrong = False
        for i, writer in enumerate(self._writers):
            tail = self._words[landed + i]
            if self._words[first + i] <= tail <= writer.head:
                self._words[first + i] = tail
            else:
                wrong = True
        self._words[first + len(_TAILS)] = self._words[landed + len(_TAILS)]
        now_ns = time.monotonic_ns()
        if not wrong:
            self._wrong_since_ns = None
        elif self._wrong_since_ns is None:
            self._wrong_since_ns = now_ns
        elif now_ns - self._wrong_since_ns > BROKEN_AFTER_NS:
            raise RingError(
                "the engine says that it took more of a ring than was put, or less than before: "
                "its memory was overwritten"
            )

    def adapt(self, has_more: bool) -> bool:
        """Choose the next window after records were taken; return True if any came.

        Args:
            has_more: True if the beginning of a further record has arrived.
        """
        num_taken = self._words[_TOKEN_TAIL] - self._start
        if has_more or num_taken == self.window:
            self.window = min(2 * self.window, self._capacity)
        elif num_taken < self.window // 4:
            self.window = max(self.window // 2, min(MIN_WINDOW, self._capacity))
        return num_taken > 0


class PullingFrontEnd(NixlFrontEnd):
    """A front end of an engine whose block only a device writes."""

    def __init__(self, block: FrontEndMemory, link: Link) -> None:
        super().__init__(block, link)
        self._puller = Puller(link, block, (self.ls, self.be, self.cancels))
        self._nap_ns = MIN_NAP_NS

    @property
    def nap_s(self) -> float:  # type: ignore[override]
        """Seconds to wait before the next `receive` while requests are open."""
        nap_ns = MIN_NAP_NS if self._puller.is_under_way else self._nap_ns
        return nap_ns / NS_PER_S

    def receive(self) -> Iterator[Heard]:
        """Take records that have arrived. Repeated calls drive the link."""
        with self._lock:
            if self._is_closed:
                return
            self._mirror.pump()
            if not self._puller.pull():
                return
        yield from self._records()
        if self._puller.adapt(self._tokens.has_news):
            self._nap_ns = MIN_NAP_NS
        else:
            self._nap_ns = min(2 * self._nap_ns, NAP_NS)


class LinkDriver:
    """A thread of the engine's process that lets UCX make progress for front ends that pull.

    Where UCX emulates, this thread copies every record. With a card the thread is needed until both
    sides have connected. It posts nothing and touches no record.

    Args:
        profile: Profile of the links.
        broken: Function that is called with the number of a front end whose link failed, and the
            reason.
    """

    def __init__(self, profile: str, broken: Callable[[int, str], None]) -> None:
        assert profile in PROFILES
        self._nap_s = (WIRE_UP_NS if profile == "rdma" else NAP_NS) / NS_PER_S
        self._broken = broken
        self._links: dict[int, Link] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="qllm-links", daemon=True)
        self._thread.start()

    def add(self, number: int, link: Link) -> None:
        """Drive one more link. From any thread."""
        with self._lock:
            self._links[number] = link

    def remove(self, number: int) -> None:
        """Stop driving a link, and close it. Idempotent. From any thread."""
        with self._lock:
            link = self._links.pop(number, None)
            if link is not None:
                link.close()

    def _run(self) -> None:
        while not self._ended.wait(self._nap_s):
            for number, why in self._drive():
                self.remove(number)
                self._broken(number, why)

    def _drive(self) -> list[tuple[int, str]]:
        failed = []
        with self._lock:
            for number, link in self._links.items():
                try:
                    link.drive()
                except NixlError as error:
                    failed.append((number, str(error)))
        return failed

    def close(self) -> None:
        """Close all links and end the thread."""
        self._ended.set()
        self._thread.join()
        for number in list(self._links):
            self.remove(number)
