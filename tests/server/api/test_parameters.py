"""Parameters of vLLM's clients, and what errors and headers say."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.serving import Serving, serving, tiny_engine

CHATS, COMPLETE = "/v1/chat/completions", "/v1/completions"
CHAT = [{"role": "user", "content": "What does json do?"}]


@pytest.fixture(scope="module")
def small() -> Iterator[Serving]:
    """Serve with room for 512 tokens."""
    with tiny_engine(max_kv_tokens=512, conformance=False) as engine, serving(engine) as made:
        yield made


def complete(served: Serving, **more: Any) -> Any:
    body = {"prompt": "def f(x):", "max_tokens": 24, "temperature": 0, "ignore_eos": True, **more}
    answer = served.post(COMPLETE, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_stop_string_can_stay(small: Serving) -> None:
    text = complete(small)["choices"][0]["text"]
    stop = text[8:11]
    at = text.find(stop)
    assert complete(small, stop=stop)["choices"][0]["text"] == text[:at]
    kept = complete(small, stop=stop, include_stop_str_in_output=True)["choices"][0]
    assert kept["text"] == text[: at + len(stop)]
    assert kept["finish_reason"] == "stop"


def test_min_tokens_hold_for_stop_strings(small: Serving) -> None:
    text = complete(small)["choices"][0]["text"]
    cut = complete(small, stop=text[:2])
    assert cut["usage"]["completion_tokens"] < 6
    later = complete(small, stop=text[:2], min_tokens=20)
    assert later["usage"]["completion_tokens"] >= 20
    assert later["choices"][0]["text"].startswith(text[:4])


def test_a_prompt_is_cut_from_its_start(small: Serving) -> None:
    ids = small.front.engine.tokenizer("one two three four five")["input_ids"]
    found = complete(
        small, prompt=["one two three four five"] * 2, truncate_prompt_tokens=3,
        return_token_ids=True,
    )  # fmt: skip
    assert [c["prompt_token_ids"] for c in found["choices"]] == [ids[-3:]] * 2
    assert found["usage"]["prompt_tokens"] == 6


def test_a_prompt_that_is_too_long_is_cut_to_what_leaves_room(small: Serving) -> None:
    most = small.get("/v1/models").json()["data"][0]["max_model_len"]
    assert small.get("/v1/models/tiny").json()["max_model_len"] == most
    ids = [n % 200 for n in range(most + 50)]
    asked = {"prompt": ids, "ignore_eos": True, "return_token_ids": True}
    assert "tokens" in small.post(COMPLETE, asked).json()["error"]["message"]
    for num in (1, 7):
        found = complete(small, **asked, max_tokens=num, truncate_prompt_tokens=-1)
        assert found["choices"][0]["prompt_token_ids"] == ids[-(most - num) :]
        assert found["usage"] == {**found["usage"], "total_tokens": most, "completion_tokens": num}
    short = complete(small, max_tokens=2, truncate_prompt_tokens=-1, return_token_ids=True)
    assert (
        short["choices"][0]["prompt_token_ids"]
        == small.front.engine.tokenizer("def f(x):")["input_ids"]
    )
    for wrong in (0, -2):
        answer = small.post(COMPLETE, {"prompt": "a", "truncate_prompt_tokens": wrong})
        assert answer.status_code == 400
        assert "at least 1, or -1" in answer.json()["error"]["message"]


def test_token_ids(small: Serving) -> None:
    found = complete(small, return_token_ids=True)["choices"][0]
    assert len(found["token_ids"]) == 24
    assert small.front.engine.tokenizer.decode(found["token_ids"]) == found["text"]
    assert found["prompt_token_ids"] == small.front.engine.tokenizer("def f(x):")["input_ids"]
    chunks = small.client().completions.create(
        model="tiny", prompt="def f(x):", max_tokens=24, temperature=0, stream=True,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )  # fmt: skip
    choices = [c.choices[0].model_dump() for c in chunks]
    assert [i for c in choices for i in c.get("token_ids") or ()] == found["token_ids"]
    assert [c["prompt_token_ids"] for c in choices if c.get("prompt_token_ids")] == [
        found["prompt_token_ids"]
    ]
    assert "token_ids" not in complete(small)["choices"][0]


def test_a_chat_tells_the_ids_of_its_prompt_once_beside_its_choices(small: Serving) -> None:
    """As vLLM has it; `prompt_logprobs` too."""
    body = {"messages": CHAT, "max_tokens": 3, "n": 2, "return_token_ids": True, "seed": 1}
    whole = small.post(CHATS, body | {"prompt_logprobs": 0}).json()
    ids = whole["prompt_token_ids"]
    assert len(whole["prompt_logprobs"]) == len(ids) == whole["usage"]["prompt_tokens"]
    assert not [c for c in whole["choices"] if {"prompt_token_ids", "prompt_logprobs"} & c.keys()]
    text = small.post(CHATS, {**body, "stream": True}).text
    parts = [json.loads(x[6:]) for x in text.splitlines() if x.startswith("data: {")]
    assert [part.get("prompt_token_ids") for part in parts] == [ids, *[None] * (len(parts) - 1)]
    for choice in whole["choices"]:
        mine = [c for part in parts for c in part["choices"] if c["index"] == choice["index"]]
        assert [i for c in mine for i in c.get("token_ids", ())] == choice["token_ids"]


def test_the_token_that_max_tokens_0_does_not_show_has_no_id_either(small: Serving) -> None:
    body = {"prompt": "def f(x):", "max_tokens": 0, "echo": True, "return_token_ids": True}
    assert small.post(COMPLETE, body).json()["choices"][0]["token_ids"] == []
    text = small.post(COMPLETE, {**body, "stream": True}).text
    parts = [json.loads(x[6:]) for x in text.splitlines() if x.startswith("data: {")]
    assert not [i for part in parts for c in part["choices"] for i in c.get("token_ids", ())]


@pytest.mark.parametrize("stream", [False, True])
def test_the_echo_of_a_prompt_that_was_cut_is_what_was_left(small: Serving, stream: bool) -> None:
    body = {
        "prompt": "one two three four five", "truncate_prompt_tokens": 3, "echo": True,
        "max_tokens": 2, "temperature": 0,
    }  # fmt: skip
    for more in ({}, {"logprobs": 1}):
        answer = small.post(COMPLETE, {**body, **more, "stream": stream})
        found = [answer.json()] if not stream else [
            json.loads(x[6:]) for x in answer.text.splitlines() if x.startswith("data: {")
        ]  # fmt: skip
        choices = [part["choices"][0] for part in found]
        text = "".join(choice["text"] for choice in choices)
        assert "one" not in text
        assert " five" in text
        for choice in choices:
            said = choice["logprobs"] or {"tokens": (), "text_offset": ()}
            for token, at in zip(said["tokens"], said["text_offset"], strict=True):
                assert text[at:].startswith(token)
    whole = complete(small, **{**body, "truncate_prompt_tokens": 100})["choices"][0]["text"]
    assert whole.startswith("one two")


def test_seeds_below_0(small: Serving) -> None:
    """-1 is none, as vLLM has it; others are seeds, as OpenAI has it."""
    asked = {"temperature": 1.5, "max_tokens": 30}
    text = complete(small, seed=-7, **asked)["choices"][0]["text"]
    assert complete(small, seed=-7, **asked)["choices"][0]["text"] == text
    assert complete(small, seed=-8, **asked)["choices"][0]["text"] != text
    drawn = {complete(small, seed=-1, **asked)["choices"][0]["text"] for _ in range(4)}
    assert len(drawn) > 1
    for seed in (-(2**63) - 1, 2**63):
        wrong = small.post(COMPLETE, {"prompt": "a", "seed": seed})
        error = wrong.json()["error"]
        assert (wrong.status_code, error["param"]) == (400, "seed")
        bound = 2**63 if seed > 0 else -(2**63)
        assert str(bound) in error["message"], "it says what is allowed, seeds below 0 included"


def test_the_last_message_goes_on(small: Serving) -> None:
    chat = [*CHAT, {"role": "assistant", "content": "It reads"}]
    how = {"add_generation_prompt": False, "continue_final_message": True}
    body = {"messages": chat, "max_tokens": 4, "return_token_ids": True, **how}
    found = small.post(CHATS, body).json()
    prompt = small.front.engine.tokenizer.decode(found["prompt_token_ids"])
    assert prompt.endswith("<|im_start|>assistant\nIt reads")
    open_ended = {"messages": CHAT, "max_tokens": 4, "return_token_ids": True}
    open_ended["add_generation_prompt"] = False
    ids = small.post(CHATS, open_ended).json()["prompt_token_ids"]
    assert small.front.engine.tokenizer.decode(ids).endswith("do?<|im_end|>\n")
    wrong = small.post(CHATS, {**body, "add_generation_prompt": True})
    assert "needs add_generation_prompt=false" in wrong.json()["error"]["message"]


def test_a_last_message_that_calls_tools_does_not_go_on(small: Serving) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    last = {"role": "assistant", "content": "It reads", "tool_calls": [call]}
    how = {"add_generation_prompt": False, "continue_final_message": True}
    wrong = small.post(CHATS, {"messages": [*CHAT, last], "max_tokens": 4, **how})
    assert wrong.status_code == 400
    assert "leave tool_calls out" in wrong.json()["error"]["message"]
    no_calls = {**last, "tool_calls": []}
    found = small.post(CHATS, {"messages": [*CHAT, no_calls], "max_tokens": 4, **how})
    assert found.status_code == 200, found.text


def test_a_character_of_several_tokens_has_their_bytes(small: Serving) -> None:
    form = {"type": "json_schema", "name": "x", "schema": {"const": "é🎉"}}
    chat_form = {"type": "json_schema", "json_schema": {"schema": form["schema"]}}
    body = {"messages": CHAT, "logprobs": True, "response_format": chat_form}
    (choice,) = small.post(CHATS, body).json()["choices"]
    asked = {"input": "a", "top_logprobs": 1, "text": {"format": form}}
    (item,) = small.post("/v1/responses", asked).json()["output"]
    for tokens in (choice["logprobs"]["content"], item["content"][0]["logprobs"]):
        assert len(tokens) > len('"é🎉"')
        joined = b"".join(bytes(token["bytes"]) for token in tokens)
        assert joined.decode().startswith('"é🎉"')


def test_a_chat_without_a_limit_is_not_cut_at_256(small: Serving) -> None:
    body = {"messages": CHAT, "ignore_eos": True, "temperature": 0}
    usage = small.post(CHATS, body).json()["usage"]
    assert usage["total_tokens"] == 512


def test_what_asks_for_nothing_is_accepted(small: Serving) -> None:
    asked: dict[str, Any] = {
        "use_beam_search": False, "length_penalty": 1.0, "skip_special_tokens": True,
        "prompt_logprobs": None, "guided_decoding_backend": None,
    }  # fmt: skip
    body = {"messages": CHAT, "max_tokens": 2, "echo": False, "best_of": 1, **asked}
    assert small.post(CHATS, body).status_code == 200
    assert small.post(COMPLETE, {"prompt": "x", "max_tokens": 2, **asked}).status_code == 200
    told = small.post(CHATS, {**body, "use_beam_search": True, "use_beamsearch": True})
    assert told.headers["x-qllm-ignored"] == "use_beam_search, use_beamsearch"
    unknown = small.post(CHATS, {**body, "response_formats": {}, "stop_word": "a"}).json()["error"]
    assert (unknown["code"], unknown["param"]) == ("unknown_field", "stop_word")


def test_candidates_that_are_not_returned_are_told(small: Serving) -> None:
    body = {"prompt": "x", "max_tokens": 2, "n": 2}
    assert "x-qllm-ignored" not in small.post(COMPLETE, {**body, "best_of": 2}).headers
    assert small.post(COMPLETE, {**body, "best_of": 3}).headers["x-qllm-ignored"] == "best_of"


@pytest.mark.parametrize(
    ("path", "body", "fields"),
    [
        (
            CHATS,
            {"messages": CHAT, "max_completion_tokens": 1},
            {
                "top_logprobs": 0, "add_special_tokens": False, "functions": [],
                "function_call": "none", "vllm_xargs": {}, "documents": [], "n": None,
                "ignore_eos": None, "min_tokens": None, "include_stop_str_in_output": None,
                "add_generation_prompt": None, "continue_final_message": None,
                "mm_payload": "tensors", "routed_experts_prompt_start": 0, "stream_interval": None,
                "stream_options": {"include_usage": None},
            },
        ),
        (
            COMPLETE,
            {"prompt": "x", "max_tokens": 1},
            {"add_special_tokens": True, "prompt_embeds": None, "return_token_offsets": False},
        ),
        (
            "/v1/responses",
            {"input": "x", "max_output_tokens": 1},
            {
                "logit_bias": None, "include_stop_str_in_output": False, "stop_token_ids": [],
                "structured_outputs": None, "enable_response_messages": False, "min_tokens": None,
            },
        ),
        (
            "/v1/messages",
            {"model": "tiny", "messages": CHAT, "max_tokens": 1},
            {"cache_salt": None, "chat_template_kwargs": None, "vllm_xargs": None},
        ),
    ],
)  # fmt: skip
def test_what_vllms_clients_send_by_default_is_accepted(
    small: Serving, path: str, body: dict[str, Any], fields: dict[str, Any]
) -> None:
    """The defaults of its own protocol, and null where a field has a default here."""
    for name, value in fields.items():
        assert small.post(path, {**body, name: value}).status_code == 200, name
    for name in ("add_special_tokens", "logit_bias"):
        if name in fields:
            wrong = small.post(path, {**body, name: {"a": "b"}})
            assert (wrong.status_code, name in wrong.text) == (400, True)


def test_parts_that_clients_send_back_may_have_fields_that_are_null(small: Serving) -> None:
    """Anthropic's client has fields of its own in what it got, `toolset_name` for one."""
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    for more, told in (({"toolset_name": None}, None), ({"toolset_name": "x"}, "toolset_name")):
        parts = [{"type": "text", "text": "So.", "parsed": None}, {**call, **more}]
        chat = [*CHAT, {"role": "assistant", "content": parts}, *CHAT]
        body = {"model": "tiny", "max_tokens": 1, "messages": chat}
        answer = small.post("/v1/messages", body)
        name = told and f"messages.content.{told}"
        assert (answer.status_code, answer.headers.get("x-qllm-ignored")) == (200, name)


def test_too_long_a_context_has_its_code(small: Serving) -> None:
    error = small.post(COMPLETE, {"prompt": [5] * 600}).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "512" in error["message"]


@pytest.mark.parametrize(
    ("content", "headers", "says"),
    [
        (b'{"prompt": "a",\n "n": }', {"content-type": "application/json"}, "line 2, column 7"),
        (b"{", {"content-type": "application/json"}, "line 1, column 2"),
        (b'{"a": "\n"}', {"content-type": "application/json"}, "control character at line 1, c"),
        (
            b'{"a": 1' + b"0" * 5000 + b"}",
            {"content-type": "application/json"},
            "the body cannot be read: Exceeds the limit",
        ),
        (b"\xff", {"content-type": "application/json"}, "cannot be read: 'utf-8' codec can't"),
        (b'{"prompt": "a"}', {}, "the header Content-Type is missing; send 'application/json'"),
        (b'{"prompt": "a"}', {"content-type": "text/plain"}, "Content-Type is 'text/plain'"),
    ],
)
def test_a_body_that_is_no_json_says_where(
    small: Serving, content: bytes, headers: dict[str, str], says: str
) -> None:
    answer = httpx.post(f"{small.url}{COMPLETE}", content=content, headers=headers, timeout=60)
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]


def test_the_id_of_a_request_comes_back(small: Serving) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    plain = small.post(COMPLETE, body)
    assert plain.headers["x-request-id"] == plain.json()["id"]
    named = small.post(COMPLETE, {**body, "request_id": "mine"})
    assert named.json()["id"] == named.headers["x-request-id"] == "cmpl-mine"
    for path, status in ((COMPLETE, 200), ("/nowhere", 404)):
        answer = small.post(path, body, headers={"x-request-id": "theirs-1"})
        assert answer.status_code == status
        assert answer.headers["x-request-id"] == "theirs-1"


def test_the_log_probabilities_of_the_prompt(small: Serving) -> None:
    """Those of `echo` with `logprobs`, by token id."""
    ids = small.front.engine.tokenizer("def f(x):")["input_ids"]
    echo = complete(small, max_tokens=2, echo=True, logprobs=2)["choices"][0]["logprobs"]
    found = complete(small, max_tokens=2, prompt_logprobs=2)["choices"][0]
    first, *rest = found["prompt_logprobs"]
    assert first is None
    assert len(rest) == len(ids) - 1
    for at, (token_id, of_token) in enumerate(zip(ids[1:], rest, strict=True), 1):
        chosen = of_token[str(token_id)]
        assert chosen["logprob"] == echo["token_logprobs"][at]
        assert chosen["decoded_token"] == echo["tokens"][at]
        assert sorted(x["rank"] for x in of_token.values() if x["rank"]) == [1, 2]
        best = max(of_token.values(), key=lambda x: x["logprob"])
        assert best["rank"] == 1
    assert found["logprobs"] is None
    chat = small.post(CHATS, {"messages": CHAT, "max_tokens": 1, "prompt_logprobs": 0}).json()
    said = chat["prompt_logprobs"]
    assert len(said) == chat["usage"]["prompt_tokens"]
    assert all(len(x) == 1 for x in said[1:])
    for more in ({"stream": True}, {"echo": True, "logprobs": 1}, {"n": 1, "logprobs": 99}):
        wrong = small.post(COMPLETE, {"prompt": "x y", "prompt_logprobs": 2, **more})
        assert wrong.status_code == 400
