"""Serve an app with uvicorn: limits on connections, and a drain before the end."""

import asyncio
import json
import logging
import socket
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from .config import ServerConfig
from .front import Front

GOODBYE_S = 5
"""For telling the clients that the drain is over."""


class _JsonLines(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        found = {
            "time_s": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            found["traceback"] = self.formatException(record.exc_info)
        return json.dumps(found)


def _protocol(header_timeout_s: float) -> type[H11Protocol]:
    """Uvicorn's HTTP, which also closes a connection that sends no whole header in time."""

    class Protocol(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.loop.call_later(header_timeout_s, self._check_header)

        def _check_header(self) -> None:
            if self.cycle is None and not self.transport.is_closing():
                self.transport.close()

    return Protocol


class Server(uvicorn.Server):
    """Drains: what is in flight may end by itself, after `drain_s` it ends with an error.

    It also ends when no further engine will be made.
    """

    def __init__(self, config: uvicorn.Config, front: Front, drain_s: int) -> None:
        super().__init__(config)
        self._front = front
        self._drain_s = drain_s

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second; whether to end."""
        return await super().on_tick(counter) or self._front.gave_up is not None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by uvicorn when it has been told to end."""
        self._front.draining.set()
        asyncio.get_running_loop().call_later(self._drain_s, self._front.cancel)
        await super().shutdown(sockets)


def make_server(app: FastAPI, config: ServerConfig) -> Server:
    """Make a server that is not running yet."""
    return Server(
        uvicorn.Config(
            app,
            host=config.host,
            port=config.port,
            http=_protocol(config.header_timeout_s),
            ws="none",
            h11_max_incomplete_event_size=config.max_header_bytes,
            timeout_keep_alive=config.keep_alive_s,
            timeout_graceful_shutdown=config.drain_s + GOODBYE_S,
            server_header=False,
            access_log=False,  # the guard's line has the id of the request
            log_config=log_config(config.log_format),
        ),
        app.state.front,
        config.drain_s,
    )


def log_config(log_format: str) -> dict[str, Any]:
    """The logging of the process: one line per request, on stderr."""
    formatters = {
        "text": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"},
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
