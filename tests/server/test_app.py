"""The app is whole before the first request comes."""

import asyncio

import httpx
import pytest

from qllm import QLLMEngine
from qllm.server.app import create_app
from qllm.server.config import ServerConfig


def test_routes_are_made_before_the_first_request(
    engine: QLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = create_app(engine, ServerConfig())
    made: list[object] = []
    monkeypatch.setattr("fastapi.routing.get_dependant", lambda **how: made.append(how))

    async def first() -> int:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return (await client.get("/v1/models")).status_code

    assert asyncio.run(first()) == 200
    assert made == []
