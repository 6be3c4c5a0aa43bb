"""Bytes that are of no use to the server: how many it takes."""

import asyncio
from types import SimpleNamespace
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from qllm.server.http.connection import make_protocol

MOST = 4000


def test_bytes_without_use_are_counted_to_the_limit() -> None:
    async def fed(start: bytes) -> int:
        config = uvicorn.Config(lambda *_: None, http=make_protocol(60.0, MOST), ws="none")
        config.load()
        loop, sent = asyncio.get_running_loop(), list[bytes]()
        protocol: Any = config.http_protocol_class(config, ServerState(), {}, loop)
        ends = SimpleNamespace(get_extra_info=lambda *_: None, is_closing=lambda: False)
        ends.write, ends.close = sent.append, lambda: None
        protocol.connection_made(ends)
        protocol.data_received(start)
        num = 0
        while not sent and num < 10 * MOST:
            protocol.data_received(b"a" * 10)
            num += 10
            await asyncio.sleep(0)
        assert sent[0].startswith(b"HTTP/1.1 400")
        return len(start) + num

    for start in (b"GET / HTTP/1.1\r\nX-Long: ", b"GET /"):
        assert MOST < asyncio.run(fed(start)) <= MOST + 10
