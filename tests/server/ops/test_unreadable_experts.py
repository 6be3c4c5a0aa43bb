"""The probe /ready of an engine whose experts cannot be read."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from qllm.server.http.errors import ApiError
from qllm.server.ops.probes import _refuse_unready


def front_of(failure: str | None, max_expert_bytes: int | None = 1, fleet: Any = None) -> Any:
    def stats() -> dict[str, Any]:
        assert max_expert_bytes is not None
        return {"experts": {} if failure == "all fit" else {"failure": failure}}

    config = SimpleNamespace(max_expert_bytes=max_expert_bytes)
    engine = SimpleNamespace(config=config, stats=stats, fleet=fleet)
    front = SimpleNamespace(engine=engine, unavailable=lambda: None)
    front.all = (front,)
    return front


def test_an_engine_whose_reads_fail_is_not_ready() -> None:
    with pytest.raises(ApiError, match="experts cannot be read: the disk is gone") as raised:
        asyncio.run(_refuse_unready(front_of("the disk is gone")))
    assert (raised.value.status_code, raised.value.code) == (503, "experts_unreadable")


def test_a_server_is_ready_while_one_of_its_models_is() -> None:
    bad, good = front_of("the disk is gone"), front_of(None)
    bad.all = (bad, good)
    asyncio.run(_refuse_unready(bad))
    bad.all = (bad, bad)
    with pytest.raises(ApiError, match="experts cannot be read"):
        asyncio.run(_refuse_unready(bad))


@pytest.mark.parametrize(
    "front",
    [front_of(None), front_of("all fit"), front_of("", None), front_of("", fleet=object())],
)
def test_others_are_ready(front: Any) -> None:
    asyncio.run(_refuse_unready(front))
