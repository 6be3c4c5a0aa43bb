"""Serve an app with uvicorn: limits on connections, and a drain before the end."""

import asyncio
import signal
import socket
import time
from types import FrameType

import uvicorn
from fastapi import FastAPI

from qllm.logs import log_config
from qllm.server.config import ServerConfig
from qllm.server.http.connection import make_protocol
from qllm.server.http.tls import ssl_context
from qllm.server.requests.front import Front

GOODBYE_S = 5
"""For telling the clients that the drain is over."""


class Server(uvicorn.Server):
    """Leaves in three steps: it is not ready, takes nothing new, and ends what is left.

    After SIGTERM /ready answers 503 for `shutdown_delay_s`, while all else goes on; then the
    socket closes, and what is in flight may end by itself; after `drain_s` it ends with an error.
    It also ends when no further engine will be made.
    """

    def __init__(self, config: uvicorn.Config, front: Front) -> None:
        super().__init__(config)
        self._front = front
        self._drain_s = front.config.drain_s
        self._leaves_at = 0.0
        """When the socket closes, once the server was told to end."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by uvicorn at a signal; a second one does not wait."""
        waits = sig == signal.SIGTERM and not self._front.leaving
        delay_s = self._front.config.shutdown_delay_s if waits else 0.0
        self._leaves_at = time.monotonic() + delay_s
        self._front.leaving = True
        super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second; whether to end."""
        told = await super().on_tick(counter) and time.monotonic() >= self._leaves_at
        return told or self._front.gave_up is not None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by uvicorn when it has been told to end."""
        self._front.draining.set()
        asyncio.get_running_loop().call_later(self._drain_s, self._front.cancel)
        await super().shutdown(sockets)


def make_server(app: FastAPI, config: ServerConfig) -> Server:
    """Make a server that is not running yet.

    Raises:
        ConfigError: The files for TLS are wrong.
    """
    context = ssl_context(config)
    return Server(
        uvicorn.Config(
            app,
            host=config.host,
            port=config.port,
            http=make_protocol(config.header_timeout_s, config.max_header_bytes),
            ws="none",
            h11_max_incomplete_event_size=config.max_header_bytes,
            timeout_keep_alive=config.keep_alive_s,
            timeout_graceful_shutdown=config.drain_s + GOODBYE_S,
            server_header=False,
            access_log=False,  # `access` has the class and TTFT too
            ssl_context_factory=None if context is None else lambda *_: context,
            log_config=log_config(config.log_format),
        ),
        app.state.front,
    )
