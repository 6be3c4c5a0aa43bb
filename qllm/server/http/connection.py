"""HTTP/1.1 on a connection: uvicorn's protocols, with time and size limits added.

httptools parses at a third of h11's cost, but it has no limit on an endless head. So this module
counts the bytes that it takes without any event. If a request offers another protocol (such as
`Upgrade: h2c` from Java's and .NET's clients), httptools also takes the request's body for that
protocol. Such a connection is passed to h11, which reads the body.

A client that has ended its side of a connection (`nc -N`, `shutdown`) may still read, or may be
gone: both look the same. So its answer continues, and the server sometimes writes bytes that a
client must skip. A client that is gone replies with a reset, which ends its requests. TLS cannot
end only one side, and HTTP/1.0 allows no bytes before an answer: there, the end is a disconnect.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Literal

import httptools
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_HELD = 1 << 14
"""Bytes of an answer that are sent without waiting for more."""
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
"""An interim response. Any number may precede an answer; clients skip them."""
COMMENT = b"9\r\n: alive\n\n\r\n"
"""A chunk with an SSE comment, which clients skip."""
FIRST_PROBE_S, MOST_PROBE_S = 0.1, 10.0
"""First and longest wait between two probes of a half-closed connection, in seconds."""


class Together:
    """A transport that joins all writes of one event loop iteration.

    An answer's head and body then need one system call instead of two, and wake the client once.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._held: list[bytes] = []
        self._num_held = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send the data at the end of this event loop iteration, or at once if much is held."""
        if not self._held:
            self._loop.call_soon(self.flush)
        self._held.append(data)
        self._num_held += len(data)
        if self._num_held >= MOST_HELD:
            self.flush()

    def flush(self) -> None:
        """Send the held data."""
        if self._held:
            held, self._held, self._num_held = b"".join(self._held), [], 0
            self._transport.write(held)

    def close(self) -> None:
        """Send the held data, then close."""
        self.flush()
        self._transport.close()


class Presence:
    """The connection state of a request's client, for routes that do not call `receive`."""

    def __init__(self) -> None:
        self._is_gone = False
        self._told: Callable[[], None] | None = None

    def tell_when_gone(self, gone: Callable[[], None]) -> Callable[[], None]:
        """Call `gone` when the client goes, at once if it is gone; return a function to undo it."""
        self._told = gone
        if self._is_gone:
            gone()
        return self._forget

    def _forget(self) -> None:
        self._told = None

    def leave(self) -> None:
        """Record that the client is gone, and report it."""
        self._is_gone = True
        if self._told is not None:
            self._told()


class Limited:
    """Limits that uvicorn's two protocols lack: time for a head, and half-closed connections."""

    header_timeout_s: float
    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    scheme: Literal["http", "https"] | None
    cycle: Any
    _deadline: asyncio.TimerHandle | None = None
    """Timer that closes a connection whose head is not complete in time."""
    _probe: asyncio.TimerHandle | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_came()
        if self._probe is not None:
            self._probe.cancel()
        super().connection_lost(exc)  # type: ignore[misc]

    def _expect_head(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.header_timeout_s, self.transport.close)

    def _head_came(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _end_after_answer(self) -> None:
        """Answer the requests that have arrived whole, then close."""
        self.cycle.keep_alive = False

    @property
    def _answered(self) -> Any:
        """The cycle whose answer is next or in progress."""
        return self.cycle

    def eof_received(self) -> Any:
        """Return True to keep the connection: its client sends no more, but may read."""
        if self.scheme == "https" or not self._is_answering or self.cycle.more_body:
            return False
        if self.cycle.scope["http_version"] == "1.0":
            return False
        self._end_after_answer()
        self._look_for_client(FIRST_PROBE_S)
        return True

    def _look_for_client(self, again_s: float) -> None:
        answered = self._answered
        if not answered.response_started:
            self.transport.write(CONTINUE)
        elif answered.scope["state"].get("has_events") and not answered.response_complete:
            self.transport.write(COMMENT)
        more = min(2 * again_s, MOST_PROBE_S)
        self._probe = self.loop.call_later(again_s, self._look_for_client, more)


class AfterOffer(Limited, H11Protocol):
    """A connection whose client has offered another protocol."""

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._is_answering and self.conn.trailing_data[0]:
            self._expect_head()

    def handle_events(self) -> None:
        super().handle_events()
        if self._is_answering:
            self._head_came()


class Protocol(Limited, HttpToolsProtocol):
    """uvicorn's HTTP protocol with limits, which `make_protocol` sets."""

    max_header_bytes: int

    def connection_made(self, transport: Any) -> None:
        super().connection_made(Together(transport, self.loop))  # type: ignore[arg-type]
        self._plain = transport
        self._num_unused = 0
        """Bytes since the last complete head, piece of a body, or end of a body."""
        self._takes_more = True
        self._active: Any = None
        self._presence: Presence | None = None
        self._expect_head()

    @property
    def _answered(self) -> Any:
        return self._active

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._active = cycle
        self._presence = cycle.scope["state"]["presence"] = Presence()
        super()._start_asgi_task(cycle, app)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._presence is not None:
            self._presence.leave()

    def data_received(self, data: bytes) -> None:
        if not self._takes_more:
            return
        self._unset_keepalive_if_required()
        self._num_unused += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._to_h11(data[offer.args[0] :])
        except httptools.HttpParserError:
            self._refuse()
        else:
            if self._num_unused > self.max_header_bytes:
                self._refuse()
            elif not self._is_answering:
                self._expect_head()

    def _refuse(self) -> None:
        msg = "Invalid HTTP request received."
        self.logger.warning(msg)
        if self._is_answering and not self.cycle.more_body:
            self._end_after_answer()
        elif self._is_answering and self.cycle.response_started:
            self.transport.close()
        else:
            self.send_400_response(msg)

    def _end_after_answer(self) -> None:
        """Answer the requests that have arrived whole, and drop later bytes; the client retries."""
        super()._end_after_answer()
        self._takes_more = False

    def _to_h11(self, rest: bytes) -> None:
        """Pass the connection to h11, from the head just read. `rest` holds the bytes after it."""
        if self._is_answering:
            self._end_after_answer()
            return
        self._head_came()
        self.connections.discard(self)
        version = self.parser.get_http_version().encode()
        first = b"%s %s HTTP/%s\r\n" % (self.parser.get_method(), self.url, version)
        fields = b"".join(b"%s: %s\r\n" % field for field in self.headers)
        after = AfterOffer(self.config, self.server_state, self.app_state, self.loop)
        after.header_timeout_s = self.header_timeout_s
        self._plain.set_protocol(after)
        after.connection_made(self._plain)
        after.data_received(first + fields + b"\r\n" + rest)

    # -- called by the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        is_trailer = self.cycle is not None and self.cycle.scope is self.scope
        if not is_trailer:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._num_unused = 0
        self._head_came()
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_unused = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_unused = 0
        if not self.parser.should_upgrade():
            self.cycle.scope["state"]["is_whole"] = True
            super().on_message_complete()


def make_protocol(header_timeout_s: float, max_header_bytes: int) -> type[Protocol]:
    """Return the protocol class of a server.

    Args:
        header_timeout_s: Seconds within which a whole head must arrive; else the connection closes.
        max_header_bytes: Bytes that may arrive without an event: in a head that does not end, or
            between the parts of a body.
    """
    limits = {"header_timeout_s": header_timeout_s, "max_header_bytes": max_header_bytes}
    return type("LimitedProtocol", (Protocol,), limits)
