"""A form begins behind the reasoning of a model whose prompt has begun to reason."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from qllm.grammar import Vocabulary
from qllm.llm import QLLMEngine
from qllm.runner.sampling.thinking import Thinking
from qllm.types import FinishReason, SamplingParams
from tests.support.letters import Letters
from tests.support.serving import serving, tiny_engine

PROMPT = "What does json.dumps do?<think>"
BUDGET = 40
FORM = {"regex": "[a-c]{60}<think>[a-c]{30}"}
WHOLE = re.compile("(?s)(.*)</think>([a-c]{60}<think>[a-c]{30})")
SETTINGS: dict[str, Any] = {"exactness": "batch-invariant", "conformance": False}


def sampling(**more: Any) -> SamplingParams:
    given = {"seed": 4, "temperature": 1.0, "structured_outputs": FORM, **more}
    return SamplingParams(**{"thinking_token_budget": BUDGET, **given})


@pytest.fixture(scope="module")
def exact() -> Iterator[QLLMEngine]:
    with tiny_engine(**SETTINGS) as made:
        yield made


def test_the_form_begins_behind_the_reasoning(exact: QLLMEngine) -> None:
    result = exact.submit(PROMPT, max_tokens=400, sampling=sampling()).result(300)
    assert result.finish_reason is FinishReason.STOP
    found = WHOLE.fullmatch(result.text)
    assert found, result.text
    free = sampling(structured_outputs=None, min_tokens=BUDGET)
    want = exact.submit(PROMPT, max_tokens=BUDGET, sampling=free).result(300)
    assert result.token_ids[:BUDGET] == want.token_ids, "it reasons as it would without a form"
    none = exact.submit(PROMPT, max_tokens=400, sampling=sampling(thinking_token_budget=0))
    assert (found := WHOLE.fullmatch(none.result(300).text))
    assert found[1] == ""


def test_without_reasoning_it_begins_with_the_first_token(exact: QLLMEngine) -> None:
    """The budget counts nothing in a form, whatever words it has."""
    asked = sampling(thinking_token_budget=3)
    result = exact.submit("json.dumps", max_tokens=400, sampling=asked).result(300)
    assert re.fullmatch(FORM["regex"], result.text)


def test_reasoning_without_a_budget_does_not_end_the_answer(exact: QLLMEngine) -> None:
    """EOS would end an answer that has not got its form."""
    bias = {i: 100.0 for i in exact.vocabulary.eos_token_ids}
    asked = sampling(thinking_token_budget=None, logit_bias=bias)
    result = exact.submit(PROMPT, max_tokens=30, sampling=asked).result(300)
    assert result.finish_reason is FinishReason.LENGTH
    assert len(result.token_ids) == 30
    assert not set(result.token_ids) & set(exact.vocabulary.eos_token_ids)


@pytest.mark.parametrize("swap", [0, 2048])
def test_it_survives_an_eviction_and_a_swap(swap: int) -> None:
    settings = {**SETTINGS, "max_kv_tokens": 256, "swap_kv_tokens": swap, "run_in": "thread"}
    with tiny_engine(**settings) as engine:
        want = engine.submit(PROMPT, "BE", 180, sampling=sampling()).result(300)
        assert WHOLE.fullmatch(want.text)
        for num_tokens in (BUDGET // 2, BUDGET + 20):
            handle = engine.submit(PROMPT, "BE", 180, sampling=sampling())
            for _ in handle:
                if len(handle.token_ids) >= num_tokens:
                    break
            handle.pause()  # its KV is free for all
            engine.submit([5] * 180, "LS", max_tokens=60, sampling=SamplingParams(ignore_eos=True))
            handle.resume()
            assert handle.result(300).token_ids == want.token_ids


def test_a_checkpoint_keeps_the_state(exact: QLLMEngine, tmp_path: Path) -> None:
    want = exact.submit(PROMPT, "BE", 400, sampling=sampling()).result(300)
    with tiny_engine(**SETTINGS) as other:
        handle = other.submit(PROMPT, "BE", 400, sampling=sampling())
        for _ in handle:
            if len(handle.token_ids) >= BUDGET // 2:
                break
        handle.pause()
        assert other.checkpoint(tmp_path / "file") == 1
        handle.cancel()
    (restored,) = exact.restore(tmp_path / "file")
    restored.resume()
    assert restored.result(300).token_ids == want.token_ids


# -- over HTTP

SCHEMA = {
    "type": "object",
    "properties": {"zone": {"enum": ["CET", "<think>"]}},
    "required": ["zone"],
    "additionalProperties": False,
}
CHAT: dict[str, Any] = {
    "model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 200, "seed": 3,
    "thinking_token_budget": 20,
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
}  # fmt: skip


def test_over_http_streamed_and_not(exact: QLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = exact.tokenizer.chat_template
    monkeypatch.setattr(exact.tokenizer, "chat_template", plain + "<think>")
    with serving(exact) as served, served.client() as client:
        whole = served.post("/v1/chat/completions", CHAT).json()["choices"][0]
        said = whole["message"]
        assert whole["finish_reason"] == "stop"
        assert json.loads(said["content"])["zone"] in ("CET", "<think>")
        assert said["reasoning_content"]
        text = served.post("/v1/chat/completions", {**CHAT, "stream": True}).text
        deltas = [
            json.loads(line[6:])["choices"][0]["delta"]
            for line in text.splitlines()
            if line.startswith("data: {")
        ]
        for name in ("content", "reasoning_content"):
            assert "".join(delta.get(name) or "" for delta in deltas) == said[name]
        form: Any = {"type": "json_schema", "name": "x", "schema": SCHEMA}
        found = client.responses.create(
            model="tiny", input="x", max_output_tokens=200, text={"format": form},
            extra_body={"seed": 3, "reasoning": {"max_tokens": 20}},
        )  # fmt: skip
        assert [item.type for item in found.output] == ["reasoning", "message"]
        assert found.output_text == said["content"]
        tool = {"type": "function", "function": {"name": "time_of", "parameters": SCHEMA}}
        forced = {**CHAT, "response_format": None, "tools": [tool], "tool_choice": "required"}
        called = served.post("/v1/chat/completions", forced).json()["choices"][0]["message"]
        assert called["reasoning_content"]
        arguments = called["tool_calls"][0]["function"]["arguments"]
        assert json.loads(arguments)["zone"] in ("CET", "<think>")


# -- the state


def letters(text: str) -> list[int]:
    return list(text.encode())


def test_where_the_form_begins_is_a_function_of_the_tokens() -> None:
    vocabulary = Vocabulary(Letters(), 128, frozenset())
    text = "so </th </think>[1]</think><think>"
    following = Thinking(None, vocabulary, letters("<think>"), once=True)
    places: dict[int, int | None] = {}
    for count in range(len(text) + 1):
        outputs = letters(text[:count])
        fresh = Thinking(None, vocabulary, letters("<think>"), once=True)
        assert fresh.forced(outputs) == following.forced(outputs)
        assert fresh.ended == following.ended
        places[count] = fresh.ended
        missing = text[:count].endswith("</think") and count < text.index(">") + 1
        assert following.forced(outputs) == (ord(">") if missing else None)
    end = text.index(">") + 1
    assert {count for count, place in places.items() if place == end} == set(
        range(end, len(text) + 1)
    )
    assert following.forced(letters("a")) is None
    assert following.ended is None, "it began again"


class Pairs(Letters):
    """Token 200 is `k>`, 201 `k> {` and 202 a tag and a line break."""

    more: ClassVar = {200: "k>", 201: "k> {", 202: "</think>\n"}

    def decode(self, ids: list[int], **how: Any) -> str:
        return "".join(self.more.get(i) or chr(i) for i in ids)


@pytest.mark.parametrize(("last", "wrong"), [(200, None), (201, "'{'"), (202, None)])
def test_a_token_that_goes_on_behind_the_tag_ends_the_request(last: int, wrong: str | None) -> None:
    """Else the answer would begin with what its form does not know of."""
    vocabulary = Vocabulary(Pairs(), 300, frozenset())
    thinking = Thinking(None, vocabulary, letters("<think>"), once=True)
    thinking.forced([*letters("a" if last == 202 else "</thin"), last])
    assert thinking.ended == (2 if last == 202 else 7)
    assert (thinking.wrong is None) is (wrong is None)
    assert wrong is None or wrong in str(thinking.wrong)
