"""HTTP/1.1 on a connection: uvicorn's protocols, within limits of ours.

httptools parses, at a third of h11's cost. It has no limit on a head that does not end, so what it
has to show for the bytes it took is watched here. It also takes what follows the head of a request
that offers another protocol for that protocol, its body too (`Upgrade: h2c`, which Java's and
.NET's clients send): such a connection goes to h11, which reads the body.
"""

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_HELD = 1 << 14
"""Bytes from which on an answer is sent at once."""


class Together:
    """A transport that sends at once what is written in one turn of the event loop.

    An answer is a head and a body: one call of the system instead of two, and its client wakes
    once.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._held: list[bytes] = []
        self._num_held = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send it, soon."""
        if not self._held:
            self._loop.call_soon(self.flush)
        self._held.append(data)
        self._num_held += len(data)
        if self._num_held >= MOST_HELD:
            self.flush()

    def flush(self) -> None:
        """Send what is held."""
        if self._held:
            held, self._held, self._num_held = b"".join(self._held), [], 0
            self._transport.write(held)

    def close(self) -> None:
        """Send what is held, then close."""
        self.flush()
        self._transport.close()


class Protocol(HttpToolsProtocol):
    """Uvicorn's HTTP within limits; `make_protocol` sets them."""

    header_timeout_s: float
    max_header_bytes: int

    def connection_made(self, transport: Any) -> None:
        super().connection_made(Together(transport, self.loop))  # type: ignore[arg-type]
        self._plain = transport
        self._num_unused = 0
        """Bytes that came since a head ended, or a part of a body or its end came."""
        self._deadline = self.loop.call_later(self.header_timeout_s, self._check_header)

    def _check_header(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.transport.close()

    def data_received(self, data: bytes) -> None:
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

    def _refuse(self) -> None:
        msg = "Invalid HTTP request received."
        self.logger.warning(msg)
        self.send_400_response(msg)

    def _to_h11(self, rest: bytes) -> None:
        """Let h11 go on, from the head just read on; `rest` is what came behind it."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False  # its client asks again on another connection
            self.flow.pause_reading()
            return
        self._deadline.cancel()
        self.connections.discard(self)
        version = self.parser.get_http_version().encode()
        first = b"%s %s HTTP/%s\r\n" % (self.parser.get_method(), self.url, version)
        fields = b"".join(b"%s: %s\r\n" % field for field in self.headers)
        after = H11Protocol(self.config, self.server_state, self.app_state, self.loop)
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
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_unused = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_unused = 0
        if not self.parser.should_upgrade():
            super().on_message_complete()


def make_protocol(header_timeout_s: float, max_header_bytes: int) -> type[Protocol]:
    """The protocol of a server.

    Args:
        header_timeout_s: A connection that sends no whole head in this time is closed.
        max_header_bytes: So much may come without any use: as a head that does not end, or
            between the parts of a body.
    """
    limits = {"header_timeout_s": header_timeout_s, "max_header_bytes": max_header_bytes}
    return type("LimitedProtocol", (Protocol,), limits)
