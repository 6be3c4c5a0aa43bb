"""A turn whose client removed the reasoning of the answer before it finds the rest of it cached."""

from collections.abc import Iterator
from itertools import takewhile
from typing import Any

import pytest

from qllm import QLLMEngine
from qllm.engine.kv.states import ANSWER_HEAD
from qllm.frontend.prompts import render_chat
from tests.support.chat_templates import GLM_45, HERMES, MINIMAX_M2, QWEN_XML, with_template
from tests.support.hybrid_prefix import engine_of, prompt_of, run
from tests.support.hybrids import NATIVE, VOCAB, make_hybrid

PAGE = 64
TEMPLATES = {"hermes": HERMES, "qwen xml": QWEN_XML, "glm 4.5": GLM_45, "minimax m2": MINIMAX_M2}
TURNS = 6


@pytest.fixture(scope="module", params=NATIVE)
def hybrid(request: pytest.FixtureRequest) -> Iterator[QLLMEngine]:
    with engine_of(make_hybrid(request.param)) as engine:
        yield engine


@pytest.mark.parametrize("head", [0, 1, 7, ANSWER_HEAD])
def test_a_prompt_without_the_begin_of_the_answer_finds_all_other_pages(
    hybrid: QLLMEngine, head: int
) -> None:
    """Try every length around the end of a page. The client's prompt lacks the last tokens."""
    for length in (191, 192, 193, 193 + head, 192 + head, 191 + head, 200, 209, 255):
        first = prompt_of(length, seed=1000 * head + length)
        run(hybrid, first, 4)
        common = length - head
        again = run(hybrid, [*first[:common], *prompt_of(40, seed=length)], 2)
        assert again.metrics.num_cached_tokens >= min(common, length - 1) // PAGE * PAGE


def session() -> Iterator[list[dict[str, Any]]]:
    """Yield the messages of each turn of an agent whose client sends no reasoning back."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Use the tools. " * 12},
        {"role": "user", "content": "Find the fault."},
    ]
    for number in range(TURNS):
        yield messages
        function = {"name": "read", "arguments": {"file": f"part{number}.py", "from": number}}
        call = {"id": f"call_{number}", "type": "function", "function": function}
        said = {"role": "assistant", "content": None, "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": call["id"], "content": f"line {number} " * 20}
        messages = [*messages, said, result]
        if number == TURNS // 2:
            messages = [*messages, {"role": "user", "content": "Go on."}]


def num_common(one: list[int], other: list[int]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))


def found_and_common(engine: QLLMEngine, name: str, vocab: int) -> tuple[int, int]:
    """Tokens that the turns of a session found cached, and those of pages that they could find."""
    tokenizer = with_template(TEMPLATES[name])
    found = common = 0
    earlier: list[list[int]] = []
    for messages in session():
        ids = [i % vocab for i in render_chat(messages, tokenizer)]
        result = run(engine, ids, 30)
        found += result.metrics.num_cached_tokens
        common += max((num_common(ids, x) for x in earlier), default=0) // PAGE * PAGE
        earlier.append([*ids, *result.token_ids])
    assert common > 1000
    return found, common


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_session_of_a_hybrid_finds_nine_tenths(hybrid: QLLMEngine, name: str) -> None:
    found, common = found_and_common(hybrid, name, VOCAB)
    assert found >= 0.9 * common


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_session_finds_all_of_it(shared_engine: QLLMEngine, name: str) -> None:
    found, common = found_and_common(shared_engine, name, shared_engine.vocabulary.vocab_size)
    assert found >= 0.95 * common
