"""A front end's end of the rings between processes of one machine."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

from qllm.errors import InvalidRequestError, InvariantError, QueueFullError
from qllm.ingress.codec import (
    End,
    PromptPart,
    decode_finish,
    decode_prompt,
    decode_token,
    encode_cancel,
    encode_revision,
    encode_submission,
    encode_update,
)
from qllm.ingress.ends import ring_ends
from qllm.ingress.layout import (
    CANCEL_KIND,
    NUMBER_BITS,
    PROMPT_KIND,
    REQUEST_KIND,
    REVISE_KIND,
    TOKEN_KIND,
    UPDATE_KIND,
)
from qllm.ingress.memory import ControlMemory, FrontEndMemory
from qllm.ingress.protocol import Cancel, Revision, Submission, Update
from qllm.ingress.ring import record_bytes
from qllm.ingress.shm import Doorbell
from qllm.types import Priority, Sampled

_MASK = 0xFFFF_FFFF
MIN_REQUEST_BYTES, TOKEN_BYTES = 4 << 20, 1 << 20
MAX_OPEN = 32_767
"""Largest number of open requests of one front end. Its cancel ring has two places per request,
because a stop string and then the caller may cancel. So a cancel always finds a place."""
UPDATE_BYTES = 1024 * record_bytes(16)
"""Largest fill, in bytes, at which the cancel ring still takes an update. So room for cancels
remains."""
CANCEL_BYTES = 2 * (MAX_OPEN + 1) * record_bytes(16) + UPDATE_BYTES
SPARE_BYTES = 64 << 10
"""Room for a request's name and strings, in addition to its largest prompt and bias."""


def ring_bytes(max_prompt: int, vocab_size: int) -> tuple[int, int, int, int]:
    """Return capacities of the LS, BE, cancel and token rings. Untouched pages cost nothing."""
    largest = 4 * max_prompt + 20 * vocab_size + SPARE_BYTES
    request = max(MIN_REQUEST_BYTES, 2 * largest)
    return request, request, CANCEL_BYTES, TOKEN_BYTES


class TokenAt(NamedTuple):
    """A token that a front end read from its ring."""

    sampled: Sampled
    at_ns: int


Heard = TokenAt | PromptPart | End
"""A record that a front end reads from a token ring."""


class FrontEndPort(ABC):
    """A port that sends requests and cancels, and takes tokens: over rings or another transport.

    One thread calls `receive`. Any thread may call the other methods.
    """

    number: int
    """The front end's number, which is the first part of its requests' ids."""

    @abstractmethod
    def submit(self, item: Submission) -> None:
        """Put a request.

        Raises:
            QueueFullError: There is no room now.
            InvalidRequestError: The request would never fit.
        """

    @abstractmethod
    def revise(self, item: Revision) -> None:
        """Write a revision after its request.

        Raises:
            QueueFullError: The ring has no room now.
            InvalidRequestError: The revision would never fit.
        """

    @abstractmethod
    def cancel(self, item: Cancel) -> None:
        """Put a cancel; at most two per open request, of which there are at most MAX_OPEN."""

    @abstractmethod
    def update(self, item: Update) -> None:
        """Write a new class for a request, a pause, or the end of a pause.

        Raises:
            QueueFullError: The engine has not read a thousand earlier ones.
        """

    @property
    @abstractmethod
    def num_waiting(self) -> int:
        """Number of requests that wait in the rings, or in the engine without KV."""

    @abstractmethod
    def ring_use(self) -> dict[str, float]:
        """Return the part of each request ring, by class, that waits for the engine: 0 to 1."""

    @abstractmethod
    def receive(self) -> Iterator[Heard]:
        """Take the records that have arrived."""


class FrontEndRings(FrontEndPort):
    """A port that puts requests and cancels into rings, and takes tokens."""

    def __init__(self, block: FrontEndMemory) -> None:
        self.number = block.number
        self._words = block.segment.words
        ends = ring_ends()
        self.ls = ends.writer(*block.rings["ls"])
        self.be = ends.writer(*block.rings["be"])
        self.cancels = ends.writer(*block.rings["cancel"])
        self._tokens = ends.reader(*block.rings["token"])
        self._lock = threading.Lock()
        self._num_submitted = 0
        self._is_held = self._has_news = False

    @abstractmethod
    def _ring(self) -> None:
        """Wake the engine for new records. The caller holds the lock."""

    def submit(self, item: Submission) -> None:
        """Put a request into the ring of its class.

        Raises:
            QueueFullError: The ring has no room now.
            InvalidRequestError: The request would never fit.
        """
        flags, body = encode_submission(item)
        is_ls = item.priority < Priority.BE
        with self._lock:
            self._num_submitted += 1  # counted here before the engine can count it
            try:
                done = (self.ls if is_ls else self.be).write(REQUEST_KIND, flags, body)
            except ValueError as error:
                self._num_submitted -= 1
                raise InvalidRequestError(f"the request is too large: {error}") from error
            if not done:
                self._num_submitted -= 1
                raise QueueFullError(
                    f"the ring for {'LS' if is_ls else 'BE'} requests is full: the engine has not "
                    "looked at it since they came; try again later"
                )
            if self._is_held:
                self._has_news = True
            else:
                self._ring()

    def hold(self) -> None:
        """Delay the wake-up until `release`, so that the engine wakes once for all requests."""
        with self._lock:
            self._is_held = True

    def release(self) -> None:
        """Wake the engine for requests written since `hold`, and for later ones."""
        with self._lock:
            has_news, self._is_held, self._has_news = self._has_news, False, False
            if has_news:
                self._ring()

    def revise(self, item: Revision) -> None:
        """Write a revision into the ring of its request, the ring of the request's class.

        Raises:
            QueueFullError: The ring has no room now.
            InvalidRequestError: The revision would never fit.
        """
        flags, body = encode_revision(item)
        ring = self.ls if item.rest.priority < Priority.BE else self.be
        with self._lock:
            try:
                done = ring.write(REVISE_KIND, flags, body)
            except ValueError as error:
                raise InvalidRequestError(f"the piece is too large: {error}") from error
            if not done:
                raise QueueFullError(
                    "the ring for requests is full: the engine has not looked at it since they "
                    "came; try again later"
                )
            self._ring()

    def cancel(self, item: Cancel) -> None:
        """Put a cancel; at most two per open request, of which there are at most MAX_OPEN."""
        with self._lock:
            if not self.cancels.write(CANCEL_KIND, 0, encode_cancel(item)):
                raise InvariantError(f"more than two cancels for each of {MAX_OPEN} requests")
            self._ring()

    def update(self, item: Update) -> None:
        """Write a new class for a request, a pause, or the end of a pause.

        Raises:
            QueueFullError: The engine has not read a thousand earlier ones.
        """
        with self._lock:
            if self.cancels.num_used >= UPDATE_BYTES:
                raise QueueFullError("the engine has not taken earlier updates; try again later")
            if not self.cancels.write(UPDATE_KIND, 0, encode_update(item)):
                raise InvariantError(f"more than two cancels for each of {MAX_OPEN} requests")
            self._ring()

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait in the rings, or in the engine without KV."""
        progress = self._words[FrontEndMemory.PROGRESS]
        return ((self._num_submitted - (progress >> 32)) & _MASK) + (progress & _MASK)

    def ring_use(self) -> dict[str, float]:
        """Return the part of each request ring that waits for the engine: 0 to 1."""
        return {"LS": self.ls.fill, "BE": self.be.fill}

    def receive(self) -> Iterator[Heard]:
        """Take the records of the token ring."""
        yield from self._records()

    def _records(self) -> Iterator[Heard]:
        while (record := self._tokens.read()) is not None:
            if record.kind == TOKEN_KIND:
                yield TokenAt(*decode_token(record))
            elif record.kind == PROMPT_KIND:
                yield decode_prompt(record)
            else:
                yield decode_finish(record)


class FrontEnd(FrontEndRings):
    """The front end's end of shared memory."""

    def __init__(
        self, block: FrontEndMemory, control: ControlMemory, engine: Doorbell, ours: Doorbell
    ) -> None:
        super().__init__(block)
        self.control = control
        self.doorbell = ours
        """The doorbell that the engine rings after writing tokens."""
        self._engine = engine
        self._num_rung = 0

    def stop(self) -> None:
        """Ask the engine to end."""
        with self._lock:
            self.control.stop = True
            self._ring()

    def _ring(self) -> None:
        """Write a new number into the bell, then ring the doorbell to wake the engine."""
        self._num_rung += 1
        bell = (self.number + 1) << NUMBER_BITS | self._num_rung
        self.control.words[ControlMemory.BELL] = bell
        self._engine.ring()

    def receive(self) -> Iterator[Heard]:
        self.doorbell.clear()
        yield from super().receive()

    def close(self) -> None:
        """Close the file descriptors."""
        self._engine.close()
        self.doorbell.close()
