"""The uvicorn server of an app, with limits on connections and a drain before the end."""

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
"""Seconds after the drain in which clients receive the errors."""


class Server(uvicorn.Server):
    """A server that stops in three steps: not ready, then no new requests, then no requests.

    After SIGTERM, /ready answers 503 for `shutdown_delay_s`, while requests are still served. Then
    the socket closes, and requests in flight may finish. After `drain_s` the rest end with an
    error. The server also stops when no further engine will be started.
    """

    def __init__(self, config: uvicorn.Config, front: Front) -> None:
        super().__init__(config)
        self._front = front
        self._drain_s = front.config.drain_s
        self._leaves_at = 0.0
        """Monotonic time in seconds at which the socket closes after a signal."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop when uvicorn reports a signal. A second signal skips the delay."""
        waits = sig == signal.SIGTERM and not self._front.leaving
        delay_s = self._front.config.shutdown_delay_s if waits else 0.0
        self._leaves_at = time.monotonic() + delay_s
        self._front.leaving = True
        super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        """Return True to stop. uvicorn calls this ten times a second."""
        told = await super().on_tick(counter) and time.monotonic() >= self._leaves_at
        return told or any(front.gave_up is not None for front in self._front.all)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain, then stop. uvicorn calls this at the end."""
        self._front.draining.set()
        for front in self._front.all:
            asyncio.get_running_loop().call_later(self._drain_s, front.cancel)
        await super().shutdown(sockets)


def make_server(app: FastAPI, config: ServerConfig) -> Server:
    """Return a server that is not running yet.

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
            access_log=False,  # `access` also logs the class and TTFT
            ssl_context_factory=None if context is None else lambda *_: context,
            log_config=log_config(config.log_format),
        ),
        app.state.front,
    )
