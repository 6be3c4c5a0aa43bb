"""Serve an app with uvicorn: limits on connections, and a drain before the end."""

import asyncio
import json
import logging
import signal
import socket
import time
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from .config import ServerConfig
from .connection import make_protocol
from .front import Front
from .tls import ssl_context

GOODBYE_S = 5
"""For telling the clients that the drain is over."""


class _TextLines(logging.Formatter):
    """One line each; the second is written out once for all lines of it."""

    _second = -1
    _shown = ""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        if int(record.created) != self._second:
            self._second = int(record.created)
            self._shown = time.strftime(self.default_time_format, time.localtime(self._second))
        return f"{self._shown},{int(record.msecs):03d}"


class _JsonLines(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        found = {
            "time_s": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        found |= getattr(record, "fields", {})
        if record.exc_info:
            found["traceback"] = self.formatException(record.exc_info)
        return json.dumps(found)


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


def log_config(log_format: str) -> dict[str, Any]:
    """The logging of the process, on stderr."""
    formatters = {
        "text": {"()": _TextLines, "fmt": "%(asctime)s %(levelname)s %(name)s: %(message)s"},
        "json": {"()": _JsonLines},
    }
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"ours": formatters[log_format]},
        "handlers": {"ours": {"class": "logging.StreamHandler", "formatter": "ours"}},
        "loggers": {
            name: {"handlers": ["ours"], "level": "INFO", "propagate": False}
            for name in ("uvicorn", "qllm")
        },
    }
