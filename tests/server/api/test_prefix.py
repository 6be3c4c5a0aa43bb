"""The prefix cache over HTTP: what `usage` says, and who shares with whom."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from qllm import QLLMEngine
from qllm.server.http.access import ANYBODY
from qllm.server.http.guard import Keys
from tests.support.serving import Serving, serving, tiny_engine

HITS = "qllm:prefix_cache_hit_tokens_total"
TEXT = "What does json.dumps do with a dict? " * 20


@pytest.fixture(scope="module")
def shared_keyed(shared_engine: QLLMEngine) -> Iterator[Serving]:
    with serving(shared_engine, api_keys="a,b", admin_api_key="root") as made:
        yield made


@pytest.fixture
def keyed(shared_keyed: Serving, engine: QLLMEngine) -> Serving:
    """Return a server with two keys and one of an administrator; its prefix cache is empty."""
    return shared_keyed


@pytest.fixture(scope="module")
def forgetful() -> Iterator[QLLMEngine]:
    """Yield an engine that keeps few tokens, and none for being an LS request's."""
    kept: dict[str, Any] = {"prefix_cache_tokens": 1024, "keep_ls_s": 0}
    with tiny_engine(prefix_cache=True, conformance=False, **kept) as made:
        yield made


def post(served: Serving, path: str, key: str, body: dict[str, Any]) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{served.url}{path}", json=body, headers=headers, timeout=60)


def cached(served: Serving, key: str, **fields: Any) -> int:
    body = {"prompt": TEXT, "temperature": 0, "max_tokens": 2, **fields}
    answer = post(served, "/v1/completions", key, body)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def deleted(served: Serving, key: str, body: dict[str, Any]) -> int:
    answer = post(served, "/delete_kv", key, body)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["deleted_pages"])


def test_keys_and_salts_share_nothing_and_a_reset_forgets(keyed: Serving) -> None:
    before = keyed.metric(HITS)
    assert cached(keyed, "a") == 0
    found = cached(keyed, "a")
    assert found >= 64
    assert found % 64 == 0
    assert cached(keyed, "b") == 0
    assert cached(keyed, "a", cache_salt="x") == 0
    assert cached(keyed, "a", cache_salt="x") == found
    assert keyed.metric(HITS) == before + 2 * found
    assert cached(keyed, "b", cache_ttl_s=60) == found
    assert post(keyed, "/delete_kv", "c", {}).status_code == 401
    assert deleted(keyed, "a", {"cache_salt": "x"}) == found // 64
    assert cached(keyed, "a", cache_salt="x") == 0
    assert cached(keyed, "a") == found
    assert deleted(keyed, "a", {}) == 2 * (found // 64)
    assert [cached(keyed, "a"), cached(keyed, "a", cache_salt="x")] == [0, 0]
    assert cached(keyed, "b") == found, "another's key deletes nothing"
    assert post(keyed, "/reset_prefix_cache", "c", {}).status_code == 401
    refused = post(keyed, "/reset_prefix_cache", "a", {})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_admin")
    assert "admin_api_key" in refused.json()["error"]["message"]
    assert cached(keyed, "b") == found
    assert post(keyed, "/reset_prefix_cache", "root", {}).status_code == 200
    assert cached(keyed, "b") == 0


def test_who_may_do_what_concerns_all() -> None:
    names = {key: Keys([key]).caller(f"Bearer {key}") for key in ("a", "b", "root")}
    assert Keys([]).is_admin(ANYBODY)
    assert Keys(["a"]).is_admin(names["a"])
    assert Keys(["a", "a"]).is_admin(names["a"])
    assert not Keys(["a", "b"]).is_admin(names["a"])
    three = Keys(["a", "b", "root"], "root")
    assert [three.is_admin(name) for name in names.values()] == [False, False, True]
    assert not Keys(["a", "root"], "root").is_admin(names["a"])


@pytest.mark.parametrize("ttl_s", ["x", 0, -1, 1e300])
def test_a_bad_hint_is_refused(keyed: Serving, ttl_s: Any) -> None:
    body = {"prompt": TEXT, "max_tokens": 2, "cache_ttl_s": ttl_s}
    answer = post(keyed, "/v1/completions", "a", body)
    assert answer.status_code == 400
    assert "cache_ttl_s" in answer.text


@pytest.mark.parametrize("salt", [5, "x" * 257, ["a"]])
def test_a_bad_salt_is_refused(keyed: Serving, salt: Any) -> None:
    body = {"prompt": TEXT, "max_tokens": 2, "cache_salt": salt}
    answer = post(keyed, "/v1/completions", "a", body)
    assert answer.status_code == 400
    assert "cache_salt" in answer.text


TOOL = {"type": "function", "function": {"name": "time_of", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("fields", "settings", "is_kept"),
    [
        ({"tools": [TOOL]}, {}, True),
        ({"tools": [TOOL]}, {"tool_ttl_s": 0}, False),
        ({"tools": [TOOL], "cache_ttl_s": 1e-9}, {}, False),
        ({"tools": [TOOL], "service_tier": "flex"}, {}, False),
        ({"tools": [TOOL], "tool_choice": "none"}, {}, False),
        ({}, {}, False),
    ],
)
def test_a_conversation_with_tools_keeps_its_pages(
    forgetful: QLLMEngine, fields: dict[str, Any], settings: dict[str, Any], is_kept: bool
) -> None:
    chat = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2, **fields}

    def found() -> int:
        answer = post(served, "/v1/chat/completions", "a", chat)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    forgetful.reset_prefix_cache()
    with serving(forgetful, api_keys="a", **settings) as served:
        assert found() == 0
        assert (whole := found()) >= 64
        for n in range(12):
            cached(served, "a", prompt=f"{n} {TEXT}")
        assert (found() == whole) is is_kept
