"""Errors as agents' clients read them: which may be tried again, and how a stream ends."""

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from qllm.errors import EngineClosedError, QllmError, QueueFullError
from qllm.llm import QLLMEngine
from qllm.server.http.errors import ApiError
from qllm.server.requests.open_answer import Answer
from tests.support.serving import CHAT, Serving, bodies

BODIES = bodies(4)
AGAIN = (429, 503, 529)


@pytest.mark.parametrize("path", BODIES)
def test_an_error_has_the_shape_and_headers_of_its_route(path: str) -> None:
    for status in (400, 401, 403, 404, 405, 408, 409, 413, 429, 431, 500, 503, 504, 507):
        for retry_after_s in (None, 7):
            error = ApiError(status, "no", code="x", retry_after_s=retry_after_s)
            answer = error.response(path)
            is_anthropic = path == "/v1/messages"
            assert answer.status_code == (529 if is_anthropic and status == 503 else status)
            body = json.loads(bytes(answer.body))
            assert set(body["error"]) >= {"type", "message"}
            assert (body.get("type") == "error") == is_anthropic
            may = retry_after_s is not None or answer.status_code in AGAIN
            assert answer.headers.get("x-should-retry") == ("true" if may else None)
            assert answer.headers.get("retry-after") == (str(retry_after_s or 1) if may else None)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (QueueFullError("9 requests wait already"), 429, "rate_limit_error"),
        (EngineClosedError("the engine crashed"), 503, "overloaded_error"),
    ],
)
def test_a_refusal_of_the_engine_may_be_tried_again(
    served: Serving,
    engine: QLLMEngine,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    error: QllmError,
    status: int,
    kind: str,
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(engine, "submit", refuse)
    for stream in (False, True):
        answer = served.post(path, {**BODIES[path], "stream": stream})
        assert answer.headers["x-should-retry"] == "true"
        assert answer.headers["retry-after"] == "1"
        assert answer.headers["x-request-id"]
        if path == "/v1/messages":
            assert answer.status_code == (529 if status == 503 else status)
            detail = {"type": kind, "message": str(error)}
            assert answer.json() == {"type": "error", "error": detail}
            assert answer.headers["request-id"]
        else:
            assert answer.status_code == status
            assert answer.json()["error"]["message"] == str(error)


def test_openais_client_tries_again(
    served: Serving, engine: QLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, errors = engine.submit, [QueueFullError("full"), EngineClosedError("gone")]

    def limited(*args: Any, **keywords: Any) -> Any:
        if errors:
            raise errors.pop()
        return submit(*args, **keywords)

    monkeypatch.setattr(engine, "submit", limited)
    base = openai._base_client.BaseClient
    monkeypatch.setattr(base, "_calculate_retry_timeout", lambda *_: 0.0)
    with served.client() as client:
        patient = client.with_options(max_retries=2)
        found = patient.responses.create(model="tiny", input="a", max_output_tokens=16)
    assert found.output_text
    assert not errors


def cut(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Make every answer fail after its first piece."""
    pieces = Answer.pieces

    async def failing(self: Answer, *args: Any) -> AsyncIterator[Any]:
        async for piece in pieces(self, *args):
            yield piece
            raise error

    monkeypatch.setattr(Answer, "pieces", failing)


@pytest.mark.parametrize("error", [ApiError(503, "gone", code="engine_restarting"), KeyError("x")])
@pytest.mark.parametrize("path", BODIES)
def test_a_stream_that_fails_ends_with_its_routes_error(
    served: Serving, monkeypatch: pytest.MonkeyPatch, path: str, error: Exception
) -> None:
    cut(monkeypatch, error)
    answer = served.post(path, {**BODIES[path], "stream": True})
    assert answer.status_code == 200
    *_, last = [part for part in answer.text.split("\n\n") if part]
    name, _, data = last.rpartition("data: ")
    found = json.loads(data)
    assert "[DONE]" not in answer.text
    if path == "/v1/messages":
        kind = "overloaded_error" if isinstance(error, ApiError) else "api_error"
        assert (name, found["type"], found["error"]["type"]) == ("event: error\n", "error", kind)
    elif path == "/v1/responses":
        assert (name, found["type"]) == ("event: response.failed\n", "response.failed")
        assert found["response"]["status"] == "failed"
        assert found["response"]["error"]["code"] in ("engine_restarting", "internal_error")
    else:
        assert (name, set(found)) == ("", {"error"})
        assert found["error"]["type"] == "server_error"


def test_openais_client_hears_that_a_stream_failed(
    served: Serving, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut(monkeypatch, ApiError(503, "the engine is gone"))
    how: dict[str, Any] = {"model": "tiny", "stream": True}
    for begin in (
        lambda: client.chat.completions.create(messages=CHAT, **how),  # type: ignore[call-overload]
        lambda: client.completions.create(prompt="a", **how),
    ):
        with pytest.raises(openai.APIError, match="the engine is gone"):
            list(begin())
    *_, last = client.responses.create(input="a", **how)
    assert (last.type, last.response.error.message) == ("response.failed", "the engine is gone")
