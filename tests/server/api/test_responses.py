"""`/v1/responses`, as OpenAI's own client calls it."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from openai.types.responses import ParsedResponseFunctionToolCall, Response, ResponseStreamEvent
from pydantic import BaseModel, Field, TypeAdapter

from qllm.llm import QLLMEngine
from qllm.server.api.response_writer import ResponseWriter
from tests.support.engines import pid_of
from tests.support.serving import Serving, serving, tiny_engine
from tests.support.waiting import wait_for

TOOL: dict[str, Any] = {
    "type": "function",
    "name": "time_of",
    "description": "The time.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"zone": {"enum": ["CET", "UTC"]}},
        "required": ["zone"],
        "additionalProperties": False,
    },
}
WRONG = {"type": "json_schema", "name": "x", "schema": {"type": "foo"}}
ASKED: dict[str, Any] = {"model": "tiny", "input": "What does json.dumps do?"}
GREEDY: dict[str, Any] = {**ASKED, "temperature": 0, "max_output_tokens": 40}
LONG = "Tell me about the json module and what it can do for me. " * 8


class Person(BaseModel):
    name: str = Field(max_length=5)
    kind: Literal["cat", "dog"]


@pytest.fixture(scope="module")
def keyed(shared_engine: QLLMEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Serve two keys."""
    state = tmp_path_factory.mktemp("state")
    with serving(shared_engine, state_dir=state, api_keys="none,other") as made:
        yield made


@pytest.fixture
def responding(keyed: Serving, engine: QLLMEngine) -> Iterator[openai.OpenAI]:
    """Yield a client with one of the keys."""
    with keyed.client() as made:
        yield made


# -- one response


def test_a_response(responding: openai.OpenAI) -> None:
    found = responding.responses.create(**GREEDY, instructions="Be brief.", metadata={"a": "b"})
    assert found.status in ("completed", "incomplete")
    assert found.output_text
    assert (found.instructions, found.metadata) == ("Be brief.", {"a": "b"})
    assert found.usage
    assert found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens
    assert responding.responses.retrieve(found.id) == found


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"instructions": "Be brief."},
        {"tools": [TOOL], "tool_choice": "required"},
        {"input": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    ],
)
def test_input_tokens_are_those_of_the_response(
    responding: openai.OpenAI, more: dict[str, Any]
) -> None:
    asked = {**ASKED, **more}
    greedy = {"temperature": 0, "max_output_tokens": 16}  # one that is drawn may be empty
    counted = responding.responses.input_tokens.count(**asked)
    found = responding.responses.create(**asked, **greedy)
    assert counted.object == "response.input_tokens"
    assert found.usage
    assert counted.input_tokens == found.usage.input_tokens
    more_asked = {"model": "tiny", "previous_response_id": found.id}
    again = responding.responses.input_tokens.count(**more_asked, input="And loads?")
    next_found = responding.responses.create(**more_asked, input="And loads?", **greedy)
    assert next_found.usage
    assert again.input_tokens == next_found.usage.input_tokens > counted.input_tokens
    without = responding.responses.input_tokens.count(**more_asked)
    assert counted.input_tokens < without.input_tokens < again.input_tokens


def test_what_cannot_be_counted(responding: openai.OpenAI) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"model": "tiny"}, "input is empty"),
        ({"model": "tiny", "input": "a", "extra_body": {"max_tokens": 1}}, "max_tokens"),
        ({"model": "tiny", "input": "a", "tool_choice": {"type": "function", "name": "x"}}, "x"),
    ]
    for asked, says in wrong:
        with pytest.raises(openai.BadRequestError, match=says):
            responding.responses.input_tokens.count(**asked)
    with pytest.raises(openai.BadRequestError, match="no response 'resp_none'"):
        responding.responses.input_tokens.count(model="tiny", previous_response_id="resp_none")
    with pytest.raises(openai.NotFoundError):
        responding.responses.input_tokens.count(model="other", input="a")


def test_too_few_tokens_are_incomplete(responding: openai.OpenAI) -> None:
    found = responding.responses.create(**{**GREEDY, "max_output_tokens": 2})
    assert found.status == "incomplete"
    assert found.incomplete_details
    assert found.incomplete_details.reason == "max_output_tokens"
    assert found.output[0].status == "incomplete"  # type: ignore[union-attr]


def test_a_stream_has_the_events_of_the_api(responding: openai.OpenAI) -> None:
    whole = responding.responses.create(**GREEDY)
    events = list(responding.responses.create(**GREEDY, stream=True))
    names = [event.type.removeprefix("response.") for event in events]
    assert names[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    ends = ["output_text.done", "content_part.done", "output_item.done", whole.status]
    assert names[-4:] == ends
    assert set(names[4:-4]) == {"output_text.delta"}
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text == events[-1].response.output_text  # type: ignore[union-attr]


@pytest.mark.usefixtures("engine")
def test_every_event_is_of_their_types(keyed: Serving) -> None:
    """Not read by the client, which takes anything, but held to its types."""
    judge: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    for more in ({}, {"tools": [TOOL], "tool_choice": "required"}):
        body = {**GREEDY, **more, "stream": True}
        answer = keyed.post("/v1/responses", body, headers={"authorization": "Bearer none"})
        blocks = [x for x in answer.text.split("\n\n") if x.startswith("event: ")]
        assert len(blocks) > 8
        for block in blocks:
            name, data = block.split("\n")
            event = judge.validate_json(data.removeprefix("data: "))
            assert event.type == name.removeprefix("event: ")


@pytest.mark.parametrize("streamed", [False, True])
def test_parse(responding: openai.OpenAI, streamed: bool) -> None:
    if not streamed:
        found = responding.responses.parse(**ASKED, text_format=Person)
    else:
        with responding.responses.stream(**ASKED, text_format=Person) as stream:
            for _ in stream:
                pass
            found = stream.get_final_response()
    assert isinstance(found.output_parsed, Person)
    assert found.text
    assert found.text.format
    assert found.text.format.type == "json_schema"


def test_a_call_and_its_result(responding: openai.OpenAI) -> None:
    how: dict[str, Any] = {**ASKED, "tools": [TOOL], "tool_choice": "required"}
    with responding.responses.stream(**how, parallel_tool_calls=False) as stream:
        names = [event.type for event in stream]
        found = stream.get_final_response()
    assert "response.function_call_arguments.delta" in names
    (call,) = found.output
    assert isinstance(call, ParsedResponseFunctionToolCall)
    assert call.parsed_arguments["zone"] in ("CET", "UTC")  # type: ignore[index]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "12:00"}
    items: Any = [{"role": "user", "content": "What time is it?"}, *found.output, result]
    assert responding.responses.create(model="tiny", input=items, tools=[TOOL]).usage  # type: ignore[list-item]
    more = responding.responses.create(model="tiny", input=[result], previous_response_id=found.id)
    assert more.usage
    assert more.usage.input_tokens > 20


def test_some_tools_are_allowed(responding: openai.OpenAI) -> None:
    other = {**TOOL, "name": "other"}
    allowed: Any = {
        "type": "allowed_tools", "mode": "required",
        "tools": [{"type": "function", "name": "other"}],
    }  # fmt: skip
    found = responding.responses.create(
        **ASKED, tools=[TOOL, other], tool_choice=allowed, max_output_tokens=300
    )
    assert {item.name for item in found.output if item.type == "function_call"} == {"other"}


def test_log_probabilities(responding: openai.OpenAI) -> None:
    found = responding.responses.create(
        **GREEDY, include=["message.output_text.logprobs"], top_logprobs=2
    )
    (message,) = found.output
    part = message.content[0]  # type: ignore[union-attr]
    assert "".join(x.token for x in part.logprobs).startswith(found.output_text)  # type: ignore[union-attr]
    assert all(len(x.top_logprobs) == 2 for x in part.logprobs)  # type: ignore[union-attr]


def test_tokens_keep_their_spaces(
    responding: openai.OpenAI, engine: QLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.tokenizer, "clean_up_tokenization_spaces", True)
    name = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    monkeypatch.setattr(engine.tokenizer, name, True)
    form = {"type": "json_schema", "name": "x", "schema": {"enum": [" ..."]}}
    asked = {"include": ["message.output_text.logprobs"], "text": {"format": form}}
    how: dict[str, Any] = {**GREEDY, **asked}
    found = responding.responses.create(**how)
    tokens = [x.token for x in found.output[0].content[0].logprobs]
    assert "".join(tokens).startswith(found.output_text)


def test_reasoning_is_an_item_and_has_a_budget(
    responding: openai.OpenAI, engine: QLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = engine.tokenizer.chat_template
    monkeypatch.setattr(engine.tokenizer, "chat_template", plain + "<think>")
    extra = {"reasoning": {"max_tokens": 5}, "seed": 3, "ignore_eos": True}
    how = {**ASKED, "max_output_tokens": 40}
    found = responding.responses.create(**how, extra_body=extra)
    assert [item.type for item in found.output] == ["reasoning", "message"]
    assert found.output[0].content[0].type == "reasoning_text"  # type: ignore[union-attr,index]
    assert found.usage
    thought = found.usage.output_tokens_details.reasoning_tokens
    end = len(engine.tokenizer("</think>", add_special_tokens=False)["input_ids"])
    assert 5 <= thought <= 5 + end
    names = [x.type for x in responding.responses.create(**how, stream=True, extra_body=extra)]
    assert "response.reasoning_text.delta" in names
    how_chat: dict[str, Any] = {
        "model": "tiny", "messages": [{"role": "user", "content": ASKED["input"]}],
        "max_tokens": 40,
        "extra_body": {"thinking_token_budget": 5, "seed": 3, "ignore_eos": True},
    }  # fmt: skip
    whole = responding.chat.completions.create(**how_chat)
    assert whole.usage.completion_tokens_details.reasoning_tokens == thought
    options = {"include_usage": True}
    *_, last = responding.chat.completions.create(**how_chat, stream=True, stream_options=options)
    assert last.usage.completion_tokens_details.reasoning_tokens == thought
    chat = whole.choices[0].message
    text = found.output[0].content[0].text  # type: ignore[union-attr,index]
    assert chat.reasoning_content == text  # type: ignore[attr-defined]
    body = {"model": "tiny", "max_tokens": 40, "messages": [{"role": "user", "content": "x"}]}
    body["thinking"] = {"type": "enabled", "budget_tokens": 5}
    answer = httpx.post(
        f"{str(responding.base_url).removesuffix('/v1/')}/v1/messages", json=body, timeout=60,
        headers={"x-api-key": "none"},
    ).json()  # fmt: skip
    assert answer["content"][0]["type"] == "thinking"
    assert all("think>" not in str(block) for block in answer["content"])


# -- state


def test_a_conversation_goes_on(responding: openai.OpenAI) -> None:
    first = responding.responses.create(**{**GREEDY, "input": LONG})
    second = responding.responses.create(**GREEDY, previous_response_id=first.id)
    third = responding.responses.create(**GREEDY, previous_response_id=second.id)
    said = [{"role": "user", "content": LONG}, *first.output]
    said += [{"role": "user", "content": GREEDY["input"]}, *second.output]
    by_hand = responding.responses.create(
        **{**GREEDY, "input": [*said, {"role": "user", "content": GREEDY["input"]}]}, store=False
    )
    assert third.output_text == by_hand.output_text
    assert third.usage
    assert by_hand.usage
    assert third.usage.input_tokens == by_hand.usage.input_tokens
    assert third.usage.input_tokens_details.cached_tokens > 0
    items = responding.responses.input_items.list(second.id).data
    assert [item.role for item in items] == ["user"]  # type: ignore[union-attr]
    with pytest.raises(openai.NotFoundError):
        responding.responses.retrieve(by_hand.id)


def test_a_foreign_key_sees_nothing(keyed: Serving, responding: openai.OpenAI) -> None:
    mine = responding.responses.create(**GREEDY)
    with keyed.client("other") as other:
        for ask in (
            other.responses.retrieve,
            other.responses.delete,
            other.responses.cancel,
            lambda name: other.responses.input_items.list(name).data,
        ):
            with pytest.raises(openai.NotFoundError):
                ask(mine.id)
        with pytest.raises(openai.BadRequestError, match="there is no response"):
            other.responses.create(**GREEDY, previous_response_id=mine.id)
    assert responding.responses.retrieve(mine.id) == mine


def test_what_was_deleted_is_gone(responding: openai.OpenAI) -> None:
    first = responding.responses.create(**GREEDY)
    second = responding.responses.create(**GREEDY, previous_response_id=first.id)
    responding.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="there is no response"):
        responding.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError, match="is gone"):
        responding.responses.create(**GREEDY, previous_response_id=second.id)


# -- the background


def ended(client: openai.OpenAI, response_id: str) -> Response:
    wait_for(lambda: client.responses.retrieve(response_id).status not in ("queued", "in_progress"))
    return client.responses.retrieve(response_id)


def test_a_response_in_the_background(responding: openai.OpenAI) -> None:
    want = responding.responses.create(**GREEDY)
    begun = responding.responses.create(**GREEDY, background=True)
    assert (begun.status, begun.output, begun.service_tier) == ("queued", [], "flex")
    found = ended(responding, begun.id)
    assert (found.status, found.output_text) == (want.status, want.output_text)
    assert found.service_tier == "flex", "the class that it was served with"
    assert responding.responses.create(**GREEDY, previous_response_id=begun.id).output


def test_a_response_in_the_background_that_cannot_be_written_has_failed(
    responding: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody asks for it for ever."""
    monkeypatch.setattr(ResponseWriter, "body", lambda *_: {}["no"])
    found = ended(responding, responding.responses.create(**GREEDY, background=True).id)
    assert found.status == "failed"
    assert found.error is not None
    assert "KeyError" in found.error.message


def test_cancel(responding: openai.OpenAI, engine: QLLMEngine) -> None:
    how: dict[str, Any] = {**ASKED, "background": True, "max_output_tokens": 3000}
    begun = responding.responses.create(**how, extra_body={"min_tokens": 2900})
    found = responding.responses.cancel(begun.id)
    assert found.status == "cancelled"
    wait_for(lambda: engine.stats()["num_live"] == 0)
    assert responding.responses.retrieve(begun.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="is cancelled; go on from the response be"):
        responding.responses.create(**GREEDY, previous_response_id=begun.id)
    plain = responding.responses.create(**GREEDY)
    with pytest.raises(openai.BadRequestError, match="background=true"):
        responding.responses.cancel(plain.id)
    deleted = responding.responses.create(**how, extra_body={"min_tokens": 2900})
    responding.responses.delete(deleted.id)
    wait_for(lambda: engine.stats()["num_live"] == 0)


def test_a_restart_goes_on(engine: QLLMEngine, tmp_path: Path) -> None:
    """The first server ends at once; the next one on the same folder answers."""
    want = None
    settings: dict[str, Any] = {"state_dir": tmp_path, "drain_s": 0, "batch_concurrency": 1}
    with serving(engine, **settings) as first, first.client() as client:
        want = client.responses.create(**GREEDY)
        blocker = client.responses.create(
            **ASKED, background=True, max_output_tokens=3000, extra_body={"min_tokens": 2900}
        )
        begun = client.responses.create(**GREEDY, background=True, previous_response_id=want.id)
        wait_for(lambda: client.responses.retrieve(blocker.id).status == "in_progress")
        assert client.responses.retrieve(begun.id).status == "queued"
    with serving(engine, state_dir=tmp_path) as second, second.client() as client:
        assert client.responses.cancel(blocker.id).status == "cancelled"
        found = ended(client, begun.id)
        now = client.responses.create(**GREEDY, previous_response_id=want.id)
    assert (found.status, found.output_text) == (now.status, now.output_text)
    assert found.previous_response_id == want.id


def test_an_engine_that_dies_is_asked_again(tmp_path: Path) -> None:
    def make() -> QLLMEngine:
        return tiny_engine(conformance=False)

    with ExitStack() as stack:
        served = stack.enter_context(
            serving(make(), make, state_dir=tmp_path, restart_backoff_s=0.1, hang_s=0)
        )
        stack.callback(lambda: served.front.engine.close())
        client = stack.enter_context(served.client())
        want = client.responses.create(**GREEDY)
        how: dict[str, Any] = {**GREEDY, "background": True}
        long = client.responses.create(
            **{**how, "max_output_tokens": 3000}, extra_body={"min_tokens": 2500}
        )
        wait_for(lambda: served.front.answers)
        os.kill(pid_of(served.front.engine), signal.SIGKILL)
        found = ended(client, long.id)
        assert found.status in ("completed", "incomplete")
        assert found.output_text.startswith(want.output_text[:10])


# -- refusals


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(
    ("more", "says", "param"),
    [
        ({"n_predict": 1}, "unknown field 'n_predict'", "n_predict"),
        ({"input": []}, "input is empty", "input"),
        ({"input": [5]}, "input", "input[0]"),
        ({"input": [None]}, "input", "input[0]"),
        (
            {"input": [{"type": "item_reference", "id": "x"}]},
            "input[0]: Input should be of type 'message', 'function_call', "
            "'function_call_output', 'custom_tool_call', '..._call', '..._call_output', 'mcp_...', "
            "'reasoning', not 'item_reference'",
            "input[0]",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "'input_image'",
            "input[0].content[0]",
        ),
        ({"tools": [TOOL, TOOL]}, "two functions are called 'time_of'", "tools"),
        ({"tool_choice": "maybe"}, "'auto', 'none' or 'required'", "tool_choice"),
        ({"tool_choice": "required"}, "needs tools", "tool_choice"),
        ({"truncation": "middle"}, "'disabled'", "truncation"),
        ({"conversation": "c"}, "not served here; use input", "conversation"),
        ({"background": True, "store": False}, "needs store", None),
        ({"background": True, "temperature": -1}, "temperature=-1", "temperature"),
        ({"background": True, "text": {"format": WRONG}}, "Invalid type: foo", None),
        ({"background": True, "min_tokens": 9, "max_output_tokens": 3}, "min_tokens=9", None),
        (
            {"text": {"format": {"type": "json_schema", "name": "x"}}},
            "text.format: schema must be given",
            "text.format",
        ),
        ({"previous_response_id": "resp_x"}, "there is no response", "previous_response_id"),
        ({"max_output_tokens": 0}, "greater than or equal to 1", "max_output_tokens"),
    ],
)
def test_refusals(keyed: Serving, more: dict[str, Any], says: str, param: str | None) -> None:
    headers = {"authorization": "Bearer none"}
    answer = keyed.post("/v1/responses", {**ASKED, **more}, headers=headers)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert says in error["message"]
    assert param is None or error["param"] == param


def test_without_a_state_folder_nothing_is_kept(engine: QLLMEngine) -> None:
    with serving(engine) as served, served.client() as client:
        found = client.responses.create(**GREEDY)
        assert found.output_text
        assert found.model_dump()["store"] is False
        asks: list[Callable[[], Any]] = [
            lambda: client.responses.create(**GREEDY, store=True),
            lambda: client.responses.create(**GREEDY, background=True),
            lambda: client.responses.create(**GREEDY, previous_response_id=found.id),
        ]
        for ask in asks:
            with pytest.raises(openai.BadRequestError, match="--state-dir"):
                ask()
        with pytest.raises(openai.NotFoundError, match="--state-dir"):
            client.responses.retrieve(found.id)


def test_old_responses_are_forgotten(tmp_path: Path) -> None:
    from qllm.server.http.errors import ApiError
    from qllm.server.state.response_store import KEPT_S, ResponseStore
    from qllm.server.state.store import Store

    store = Store(tmp_path)
    kept = ResponseStore(store)
    response: dict[str, Any] = {"status": "completed", "previous_response_id": None, "output": []}
    now_s = int(time.time())
    kept.add("me", "{}", "[]", {**response, "id": "a"}, now_s=now_s)
    kept.add("me", "{}", "[]", {**response, "id": "b", "status": "queued"}, now_s=now_s)
    kept.add("me", "{}", "[]", {**response, "id": "c"}, now_s=now_s + KEPT_S)
    assert kept.get("a", "me")["id"] == "a"
    kept.add("me", "{}", "[]", {**response, "id": "d"}, now_s=now_s + KEPT_S + 1)
    with pytest.raises(ApiError, match="there is no response 'a'"):
        kept.get("a", "me")
    assert kept.unfinished() == ["b"]
    assert kept.get("c", "me")["id"] == "c"
    (plan,) = store.rows("EXPLAIN QUERY PLAN DELETE FROM responses WHERE created_at < 5")
    assert "INDEX responses_by_age" in plan["detail"], "it does not read what it keeps"
    store.close()
