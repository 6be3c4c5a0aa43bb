import gzip
import json
from typing import Any

import httpx
import openai
import pytest
from pydantic import ValidationError

from qllm.errors import EngineClosedError, QueueFullError
from qllm.llm import QLLMEngine
from qllm.server.api.messages_protocol import MessagesRequest
from qllm.server.api.models import DetokenizeRequest, TokenizeRequest
from qllm.server.api.protocol import ChatRequest, CompletionRequest
from qllm.server.api.responses_protocol import ResponsesRequest
from qllm.server.requests import bodies
from qllm.server.requests.apart import LONG
from tests.support.serving import Serving, serving
from tests.support.waiting import wait_for

CHAT = [{"role": "user", "content": "What does json.dumps do?"}]
ENDLESS = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True}


def is_idle(engine: QLLMEngine) -> bool:
    return engine.stats()["num_live"] == 0


COMPLETE, CHATS = "/v1/completions", "/v1/chat/completions"


@pytest.mark.parametrize(
    ("path", "fields", "param", "says"),
    [
        (COMPLETE, {"stopp": 1}, "stopp", "unknown field 'stopp': it is no field here; did"),
        (COMPLETE, {"stream_options": {"n": 2}}, "stream_options.n", "unknown field"),
        (COMPLETE, {"slo": {"tpot_ms": 0}}, "slo.tpot_ms",
         "slo.tpot_ms: Input should be greater than 0, not 0"),
        (COMPLETE, {"stream_options": {"include_usage": "x"}}, "stream_options.include_usage",
         "valid boolean, not 'x'"),
        (COMPLETE, {"structured_outputs": {"x": 5}}, "structured_outputs.x", "unknown field"),
        (COMPLETE, {"echo": True, "logprobs": 21}, "logprobs", "20"),
        (COMPLETE, {"suffix": "x"}, "suffix", "not served here"),
        (COMPLETE, {"temperature": -1}, "temperature", "[0, 100]"),
        (COMPLETE, {"top_p": 0}, "top_p", "(0, 1]"),
        (COMPLETE, {"n": 0}, "n", "n: Input should be greater than or equal to 1, not 0"),
        (COMPLETE, {"n": True}, "n", "integer"),
        (COMPLETE, {"prompt": []}, "prompt", "empty list"),
        (COMPLETE, {"prompt": ""}, None, "prompt is empty"),
        (COMPLETE, {"prompt": ["a", 1]}, "prompt", "valid"),
        (COMPLETE, {"prompt": [1, 9999]}, None, "9999"),
        (COMPLETE, {"max_tokens": 0}, None, "needs echo=true"),
        (COMPLETE, {"max_tokens": -1, "echo": True}, "max_tokens", "0"),
        (CHATS, {"max_tokens": 0}, "max_tokens", "1"),
        (COMPLETE, {"prompt": [5] * 5000}, None, "4096"),
        (COMPLETE, {"logprobs": 21}, "logprobs", "20"),
        (COMPLETE, {"logit_bias": {"x": 1}}, "logit_bias", "token id"),
        (COMPLETE, {"min_tokens": 17}, "min_tokens", "at most max_tokens, here 16"),
        (COMPLETE, {"min_tokens": -1}, "min_tokens", "0"),
        (COMPLETE, {"bad_words": [" "]}, "bad_words", "blank"),
        (COMPLETE, {"bad_words": ["a"] * 257}, None, "at most 256"),
        (COMPLETE, {"allowed_token_ids": []}, "allowed_token_ids", "non-empty"),
        (COMPLETE, {"allowed_token_ids": [3072]}, None, "3072"),
        (COMPLETE, {"allowed_token_ids": [5], "bad_words": ["a"]}, None, "may leave no token"),
        (COMPLETE, {"stop": [""]}, "stop", "non-empty"),
        (COMPLETE, {"service_tier": "gold"}, "service_tier", "'flex'"),
        (COMPLETE, {"service_tier": "flex", "priority": 0}, None, "different classes"),
        (COMPLETE, {"prompt": ["a"] * 100, "n": 2}, "n", "at most 128"),
        (CHATS, {"messages": []}, "messages", "at least 1"),
        (CHATS, {"messages": [{"role": "user"}]}, None, "role and content"),
        (CHATS, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         "messages", "'image_url' is not supported"),
        (CHATS, {"response_format": {"type": "yaml"}}, "response_format.type", "'json_object'"),
        (CHATS, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages",
         "has text=None"),
        (CHATS, {"messages": [*CHAT, 5]}, "messages[1]", "dictionary, not 5"),
        (CHATS, {"tool_choice": "required"}, "tool_choice", "needs tools"),
        (CHATS, {"tool_choice": "some"}, "tool_choice", "'required'"),
        (CHATS, {"tools": [{}]}, "tools", r"tools[0] must be"),
        (CHATS, {"modalities": ["text", "audio"]}, "modalities", "not served here"),
        (CHATS, {"functions": [{"name": "f"}]}, "functions", "use tools"),
        (CHATS, {"top_logprobs": 2}, None, "needs logprobs"),
        (CHATS, {"max_tokens": 2, "max_completion_tokens": 3}, None, "differ"),
        (CHATS, {"chat_template_kwargs": {"chat_template": "x"}}, None, "no variable"),
    ],
)  # fmt: skip
def test_a_wrong_body_is_refused_by_name(
    served: Serving, path: str, fields: Any, param: str | None, says: str
) -> None:
    body = {"prompt": "a"} if path == COMPLETE else {"messages": CHAT}
    answer = served.post(path, {**body, **fields})
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert says in error["message"]


HALF = "ab\ud800"
"""The first half of a surrogate pair: JSON can say it, UTF-8 cannot."""
HALVES: dict[str, list[dict[str, Any]]] = {
    COMPLETE: [
        {"prompt": HALF}, {"prompt": ["a", HALF]}, {"model": HALF}, {"stop": HALF},
        {"stop": ["a", HALF]}, {"suffix": HALF}, {"user": HALF}, {"service_tier": HALF},
        {"logit_bias": {HALF: 1}}, {"metadata": {HALF: 1}}, {"metadata": {"a": [{"b": HALF}]}},
        {HALF: 1}, {"stream_options": {HALF: True}}, {"slo": {"ttft_ms": HALF}},
        {"prompt_cache_key": HALF}, {"moderation": HALF}, {"stream": True, "prompt": HALF},
    ],
    CHATS: [
        {"messages": [{"role": "user", "content": HALF}]},
        {"messages": [{"role": HALF, "content": "a"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": HALF}]}]},
        {"messages": [{"role": "user", "content": "a", HALF: "b"}]},
        {"tools": [{"type": "function", "function": {"name": HALF}}]},
        {"chat_template_kwargs": {"a": HALF}}, {"chat_template_kwargs": {HALF: "a"}},
        {"response_format": {"type": HALF}}, {"tool_choice": HALF}, {"reasoning_effort": HALF},
        {"modalities": [HALF]}, {"prediction": {"content": HALF}}, {"verbosity": HALF},
    ],
    "/tokenize": [{"prompt": HALF}, {"model": HALF}, {"prompt": None, "messages": [HALF]}],
    "/detokenize": [{"model": HALF}, {"tokens": [HALF]}],
}  # fmt: skip
WHOLE: dict[str, dict[str, Any]] = {
    COMPLETE: {"prompt": "a"}, CHATS: {"messages": CHAT},
    "/tokenize": {"prompt": "a"}, "/detokenize": {"tokens": [1]},
}  # fmt: skip


@pytest.mark.parametrize("path", WHOLE)
def test_half_a_surrogate_pair_is_400_in_every_string(served: Serving, path: str) -> None:
    for fields in HALVES[path]:
        content = json.dumps({**WHOLE[path], **fields})  # with the escape
        assert "\\ud800" in content
        headers = {"content-type": "application/json"}
        answer = httpx.post(f"{served.url}{path}", content=content, headers=headers, timeout=60)
        assert answer.status_code == 400, (fields, answer.text)
        message = answer.json()["error"]["message"]
        assert "holds '\\ud800' at position 2, half of a surrogate pair" in message
        assert "the body" in message


def test_a_form_in_an_encoding_that_has_halves_is_400(served: Serving) -> None:
    body = (
        b'--x\r\nContent-Disposition: form-data; name="\\ud800"\r\n\r\na\r\n'
        b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="\\ud800"\r\n\r\n{}\r\n'
        b"--x--\r\n"
    )
    kind = {"content-type": "multipart/form-data; boundary=x; charset=unicode_escape"}
    answer = httpx.post(f"{served.url}/v1/files", content=body, headers=kind, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "\\ud800")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "seed": 1' + b"0" * 5000 + b"}",
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "user": ' + b"[" * 20000 + b"]" * 20000 + b"}",
    ],
)
def test_a_body_that_is_no_body_is_400(served: Serving, content: bytes) -> None:
    answer = httpx.post(
        f"{served.url}/v1/completions",
        timeout=60,
        content=content,
        headers={"Content-Type": "application/json"},
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize("content", [b"", b"prompt=a", b"\xff\x00"])
def test_a_body_of_another_type_is_400(served: Serving, content: bytes) -> None:
    for headers in ({}, {"Content-Type": "text/plain"}, {"Content-Type": "application/x-www-form"}):
        answer = httpx.post(
            f"{served.url}/v1/completions", content=content, headers=headers, timeout=60
        )
        assert answer.status_code == 400
        assert answer.json()["error"]["message"]


@pytest.mark.parametrize("name", ["a\nb", "a b", "\u4e2d", "\u00fc", "", "a\x7f"])
def test_a_request_id_fits_into_a_header_and_a_line_of_the_log(served: Serving, name: str) -> None:
    answer = served.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "request_id": name})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "request_id")
    assert "printable ASCII" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", [CHATS, "/v1/responses", "/v1/messages"])
def test_long_bodies_are_read_beside_the_event_loop(
    served: Serving, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """And what is wrong with them is said as of short ones."""

    def parse(raw: bytes) -> Any:
        assert len(raw) < LONG
        return json.loads(raw)

    monkeypatch.setattr(bodies, "loads", parse)
    for wrong, kind in (
        ({"seed": "x"}, "application/json"),
        ({"n_predict": {"a": 1}}, "application/json"),
        ({}, "text/plain"),
    ):
        said = []
        for text in ("x", "x" * LONG):
            name = "input" if path == "/v1/responses" else "messages"
            sent = json.dumps({name: [{"role": "user", "content": text}], **wrong}).encode()
            answer = httpx.post(
                f"{served.url}{path}", content=sent, headers={"content-type": kind}, timeout=60
            )
            assert answer.status_code == 400
            said.append(answer.json()["error"])
        assert said[0] == said[1]
    for num in (0, LONG):
        kinds = {"content-type": "application/json"}
        sent = b" " * num + b"{]"
        answer = httpx.post(f"{served.url}{path}", content=sent, headers=kinds, timeout=60)
        assert f"at line 1, column {num + 2}" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
def test_an_unforeseen_error_is_an_answer_like_others(
    engine: QLLMEngine, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """It has an id, is counted, and a web page may read it."""
    body = {"prompt": "a"}
    if path == "/v1/messages":
        body = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
    with serving(engine, cors_origins="https://a") as served:
        monkeypatch.setattr(served.front, "of", lambda _: {}["no"])
        answer = served.post(path, body, headers={"Origin": "https://a"})
        assert answer.status_code == 500
        assert answer.json().get("type") == ("error" if path == "/v1/messages" else None)
        assert "KeyError" in answer.json()["error"]["message"]
        assert answer.headers["access-control-allow-origin"] == "https://a"
        assert answer.headers["x-request-id"].startswith("req-")
        assert served.metric("qllm:requests_refused_total", status="500") == 1


def test_the_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="use 'tiny'") as missing:
        client.completions.create(model="gpt", prompt="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="in \\[0, 100\\]"):
        client.completions.create(model="tiny", prompt="a", temperature=101)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt")
    assert client.models.retrieve("tiny").id == "tiny"
    assert [m.id for m in client.models.list()] == ["tiny"]


def test_a_packed_body_is_refused(served: Serving) -> None:
    packed = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    url = f"{served.url}/v1/completions"
    refused = httpx.post(url, content=gzip.compress(b"{}"), headers=packed, timeout=60)
    text = "the header Content-Encoding is 'gzip'; send the body plain"
    assert (refused.status_code, refused.json()["error"]["message"]) == (415, text)


def test_other_paths_and_methods(served: Serving) -> None:
    missing, wrong = served.get("/nothing"), served.get("/v1/completions")
    assert (missing.status_code, wrong.status_code) == (404, 405)
    assert wrong.headers["allow"] == "POST"
    both = httpx.put(f"{served.url}/v1/requests/a", timeout=60)
    assert (both.status_code, both.headers["allow"]) == (405, "GET, PATCH")
    assert both.json()["error"]["message"].endswith("use GET, PATCH")
    assert "GET /nothing" in missing.json()["error"]["message"]
    assert wrong.json()["error"]["message"] == "GET is not allowed at /v1/completions; use POST"
    empty = httpx.post(f"{served.url}/v1/messages", timeout=60).json()
    assert empty["error"]["message"] == "the body is missing; send JSON"
    bad = served.post("/v1/completions", {"prompt": "a"}, headers={"x-qllm-priority": "UP"})
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "x-qllm-priority")


@pytest.mark.parametrize(
    ("error", "status", "raised"),
    [
        (QueueFullError("9 requests wait already"), 429, openai.RateLimitError),
        (EngineClosedError("the engine crashed"), 503, openai.InternalServerError),
    ],
)
def test_an_engine_that_refuses(
    client: openai.OpenAI,
    engine: QLLMEngine,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    status: int,
    raised: Any,
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(engine, "submit", refuse)
    with pytest.raises(raised, match=str(error)) as found:
        client.completions.create(model="tiny", prompt="a")
    assert found.value.status_code == status
    assert found.value.response.headers.get("retry-after") == "1"


def test_a_choice_that_cannot_be_submitted_takes_the_others_back(
    served: Serving, engine: QLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, left = engine.submit, iter(range(2))

    def limited(*args: Any, **keywords: Any) -> Any:
        if next(left, None) is None:
            raise QueueFullError("full")
        return submit(*args, **keywords)

    monkeypatch.setattr(engine, "submit", limited)
    assert served.post("/v1/completions", {**ENDLESS, "n": 3}).status_code == 429
    wait_for(lambda: is_idle(engine))
    assert served.front._num_ls == 0


def test_a_tokenizer_that_raises_costs_no_seat(
    served: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> str:
        raise IndexError("piece id is out of range")

    with monkeypatch.context() as patch:
        patch.setattr(type(served.front.engine.tokenizer), "decode", broken)
        for _ in range(3):
            served.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 3})
    wait_for(lambda: served.front._num_ls == 0 and not served.front._settling)
    answer = served.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 3})
    assert answer.status_code == 200


TURN = {"role": "user", "content": "a"}


def say(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 1, "messages": [TURN, {"role": role, "content": parts}]}


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/v1/messages", say({"type": "text"}), "messages[1].content[0].text: Field required"),
        ("/v1/messages", say({"type": "text", "text": 5}),
         "messages[1].content[0].text: Input should be a valid string, not 5"),
        ("/v1/messages", say({"type": "image", "source": {}}),
         "messages[1].content[0]: Input should be of type 'text', 'thinking', 'skipped', "
         "'compaction', 'document', 'search_result', 'tool_use', 'tool_result', "
         "'..._tool_use', '..._tool_result', not 'image'"),
        ("/v1/messages", say({"type": "tool_result", "tool_use_id": "x",
                              "content": [{"type": "text", "text": "a"}, {"type": "image"}]}),
         "messages[1].content[0].content[1]: Input should be of type 'text', 'tool_reference', "
         "'document', 'search_result', 'compaction', not 'image'"),
        ("/v1/messages", say({"type": "tool_result", "tool_use_id": "x"}, role="assistant"),
         "messages[1]: a message of role 'assistant' cannot hold a tool_result block"),
        ("/v1/messages", {**say(), "messages": [{"role": "user", "content": 5}]},
         "messages[0].content: Input should be a valid list, not 5"),
        ("/v1/responses", {"input": [TURN, {"role": "user", "content": [{"type": "input_text"}]}]},
         "input[1].content[0].text: Field required"),
        ("/v1/responses", {"input": "a", "metadata": {"user": 1}, "user": "b"},
         "metadata: the value of 'user' is 1; it must be text"),
        ("/v1/responses", {"input": "a", "seed": [*range(9)]},
         "seed: Input should be a valid integer, not a list"),
        ("/v1/responses", {"input": "a", "max_output_tokens": {}},
         "max_output_tokens: Input should be a valid integer, not an object"),
        ("/v1/responses", {"input": "a", "tools": [{"type": "function"}]},
         "tools[0].name: Field required"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("padding", ["", " " * 20_000])
def test_what_is_wrong_inside_a_body_is_told_with_its_place(
    served: Serving, path: str, body: Any, says: str, padding: str
) -> None:
    """A long body is read elsewhere than a short one."""
    headers = {"content-type": "application/json"}
    content = json.dumps(body) + padding
    answer = httpx.post(f"{served.url}{path}", content=content, headers=headers, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == says


def test_a_wrong_value_in_a_map_is_told_by_its_name(served: Serving) -> None:
    for path, fields, says in (
        (COMPLETE, {"prompt": "a", "logit_bias": {"7": 1, "8": "x"}},
         "logit_bias: the value of '8' is 'x'; it must be a number"),
        ("/v1/responses", {"input": "a", "metadata": {"a": []}},
         "metadata: the value of 'a' is a list; it must be text"),
    ):  # fmt: skip
        answer = served.post(path, fields)
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, says)


def test_a_line_of_a_streamed_body_is_refused_with_the_place_in_it(served: Serving) -> None:
    first = {"prompt": "a", "stream_options": {"include_usage": "x"}}
    headers = {"content-type": "application/x-ndjson"}
    for lines, says in (
        ([first], "line 1: stream_options.include_usage: Input should be a valid boolean, not 'x'"),
        ([{"prompt": "a"}, {"append": 5}], "line 2: append: Input should be"),
    ):
        content = "".join(f"{json.dumps(line)}\n" for line in lines)
        answer = httpx.post(f"{served.url}{COMPLETE}", content=content, headers=headers, timeout=60)
        assert answer.json()["error"]["message"].startswith(says)


MANY = 2000


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (ChatRequest, {"messages": [5] * MANY}),
        (ChatRequest, {"messages": CHAT, "tools": [5] * MANY}),
        (ChatRequest, {"messages": CHAT, "stop": [5] * MANY}),
        (ChatRequest, {"messages": CHAT, "allowed_token_ids": ["a"] * MANY}),
        (ChatRequest, {"messages": CHAT, "bad_words": [5] * MANY}),
        (ChatRequest, {"messages": CHAT, "guided_choice": [5] * MANY}),
        (ChatRequest, {"messages": CHAT, "structured_outputs": {"choice": [5] * MANY}}),
        (ChatRequest, {"messages": CHAT, "logit_bias": dict.fromkeys(map(str, range(MANY)), "a")}),
        (ChatRequest, {"messages": CHAT, **dict.fromkeys(map(str, range(MANY)))}),
        (CompletionRequest, {"prompt": [None] * MANY}),
        (CompletionRequest, {"prompt": [["a"] * MANY] * MANY}),
        (MessagesRequest, {"messages": [{"role": "x"}] * MANY}),
        (MessagesRequest, say(*[{"type": "x"}] * MANY)),
        (MessagesRequest, {**say(), "messages": [TURN], "tools": [{}] * MANY}),
        (MessagesRequest, {**say(), "messages": [TURN], "stop_sequences": [5] * MANY}),
        (ResponsesRequest, {"input": [{"role": "x"}] * MANY}),
        (ResponsesRequest, {"input": [{"role": "user", "content": [{"type": "x"}] * MANY}]}),
        (ResponsesRequest, {"input": [{"type": "reasoning", "content": [{}] * MANY}]}),
        (ResponsesRequest, {"input": "a", "tools": [{}] * MANY}),
        (ResponsesRequest, {"input": "a", "include": [5] * MANY}),
        (ResponsesRequest, {"input": "a", "metadata": dict.fromkeys(map(str, range(MANY)), 1)}),
        (DetokenizeRequest, {"tokens": ["a"] * MANY}),
        (TokenizeRequest, {"messages": [5] * MANY}),
    ],
)
def test_what_is_wrong_a_thousand_times_is_told_once(model: Any, body: Any) -> None:
    """Errors are listed with the interpreter's lock: all others would wait meanwhile."""
    with pytest.raises(ValidationError) as wrong:
        model.model_validate(body)
    assert wrong.value.error_count() < 10
