"""The parts of an answer that `/v1/responses` and `/v1/messages` show."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from fastapi.responses import JSONResponse

from qllm.frontend.handle import Piece
from qllm.llm import QLLMEngine
from qllm.server.api.blocks import Blocks, Kind
from qllm.server.api.messages import MessageWriter
from qllm.server.api.messages_protocol import MessagesRequest
from qllm.server.http.errors import parse
from qllm.server.tools.formats import HERMES
from qllm.server.tools.reader import MarkupReader
from qllm.server.tools.response_tools import plain_input
from qllm.types import FinishReason, Logprobs
from tests.support.serving import serving

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TOOLS: list[Any] = [{"type": "function", "function": {"name": "f"}}]
WORDS = ["Hm", "m", "</", "think>", "\n\n", "I", " say", "", "", "\N{SNOWMAN}", "<b", ">: "]
WORDS += [*CALL, "\n", "and", " more", ""]


def pieces(words: Sequence[str], size: int) -> list[Piece]:
    """One token per word, so many of which come together. A log-probability is its token's id."""
    found = []
    for first in range(0, len(words), size):
        some = words[first : first + size]
        ids = tuple(range(first, first + len(some)))
        logprobs = tuple(Logprobs(float(-i), ()) for i in ids)
        found.append(Piece("".join(some), ids, logprobs, None, tuple(accumulate(map(len, some)))))
    return found


def shown(words: Sequence[str], size: int, *, is_cut: bool = False) -> list[tuple[Any, ...]]:
    """Kind, text and tokens of each block, and whether it is whole."""
    blocks = Blocks(MarkupReader(HERMES, thinks=True, is_thinking=True, tools=TOOLS))
    tokens: dict[int, list[int]] = {}
    texts: dict[int, str] = {}
    changes = [change for piece in pieces(words, size) for change in blocks.push(piece)]
    for change in (*changes, *blocks.finish(is_cut=is_cut)):
        texts[change.block.index] = texts.get(change.block.index, "") + change.added
        ids = [i for piece in change.pieces for i in piece.token_ids]
        assert [-x.chosen for piece in change.pieces for x in piece.logprobs] == ids
        tokens.setdefault(change.block.index, []).extend(ids)
    assert texts == {block.index: block.text for block in blocks.all}
    return [(b.kind, b.text, tokens[b.index], b.is_whole) for b in blocks.all]


@pytest.mark.parametrize("size", [1, 2, 3, 7, len(WORDS)])
def test_how_many_tokens_come_together_changes_nothing(size: int) -> None:
    before = 12 + len(CALL)
    assert [(kind, text) for kind, text, *_ in shown(WORDS, size)] == [
        (Kind.REASONING, "Hmm"),
        (Kind.TEXT, "I say\N{SNOWMAN}<b>:"),
        (Kind.CALL, '{"a": 1}'),
        (Kind.TEXT, " and more"),
    ]
    first, last = (ids for kind, _, ids, _ in shown(WORDS, size) if kind is Kind.TEXT)
    assert first == [5, 6, 7, 8, 9, 10, 11], "no token of a tag or of the space behind it"
    assert last == [before, before + 1, before + 2], "with white space, without EOS"


def test_tokens_that_come_together_are_one_growth() -> None:
    blocks = Blocks(MarkupReader(HERMES, thinks=True, is_thinking=False, tools=TOOLS))
    (piece,) = pieces(["a", "b", "c", "</think> ", "d"], 5)
    assert [(c.what, c.added) for c in blocks.push(piece)] == [
        ("open", ""),
        ("grow", "abc</think> d"),
    ]


def test_the_part_in_which_an_answer_is_cut_off_is_not_whole() -> None:
    words = [*WORDS, *CALL]
    assert [whole for *_, whole in shown(words, 3, is_cut=True)] == [True] * 4 + [False]
    assert all(whole for *_, whole in shown(words, 3))
    in_call = words[: -len("1}}\n</tool_call>")]
    assert [whole for *_, whole in shown(in_call, 3)] == [True] * 4 + [False]


def test_a_streamed_item_that_was_cut_off_says_so(engine: QLLMEngine) -> None:
    """Each `output_item.done` has the item that the response ends with."""
    asked: dict[str, Any] = {"model": "tiny", "input": "Hi.", "max_output_tokens": 5}
    asked["temperature"] = 0
    for more, status in (({}, "incomplete"), ({"stop": ["e", "a", "i", "o", "t"]}, "completed")):
        with serving(engine) as served, served.client() as client:
            events = list(client.responses.create(**asked, stream=True, extra_body=more))
        done = [e.item for e in events if e.type == "response.output_item.done"]
        end = events[-1]
        assert isinstance(
            end,
            openai.types.responses.ResponseCompletedEvent
            | openai.types.responses.ResponseIncompleteEvent,
        )
        assert done == end.response.output
        assert [getattr(item, "status", None) for item in done] == [status]


NO_OBJECTS = [
    '{"x": 1,}', '{"x": NaN}', '{"x": 1e400}', r'{"x": "\ud83d"}', '{"x": }', "{]",
    f'{{"x": {"9" * 5000}}}', f'{{"x": {"[" * 100_000}{"]" * 100_000}}}',
]  # fmt: skip
"""Arguments that are no JSON object, or one that no JSON of an answer can say."""
OBJECTS = ['{"x": 1, "y": [2, "é \\n"]}', "{}", r'{"x": "\ud83d\ude00"}']


class Said:
    """An answer of one piece.

    Args:
        text: What it says.
        reason: Why it ended.
    """

    def __init__(self, text: str, reason: FinishReason) -> None:
        self.handles = [SimpleNamespace(prompt_token_ids=(), stop_string=None)]
        self.num_tokens, self._text, self._reason = [1], text, reason

    def usage(self) -> dict[str, Any]:
        cached = {"cached_tokens": 0}
        return {"prompt_tokens": 1, "completion_tokens": 1, "prompt_tokens_details": cached}

    async def pieces(self, silence_s: float | None) -> AsyncIterator[tuple[int, Any]]:
        yield 0, Piece(self._text, (1,), (), None, (len(self._text),))
        yield 0, self._reason


def message(text: str, reason: FinishReason) -> tuple[dict[str, Any], str]:
    """A message as a whole, and its events."""
    body = {
        "model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    }  # fmt: skip
    front: Any = SimpleNamespace(
        engine=SimpleNamespace(tokenizer=None),
        model_name="tiny",
        config=SimpleNamespace(tool_calls="auto"),
    )
    writer = MessageWriter(front, parse(MessagesRequest, body).chat())

    async def made() -> tuple[dict[str, Any], str]:
        said: Any = Said(text, reason)
        return await writer.body(said), "".join([x async for x in writer.events(said, None, 1)])

    return asyncio.run(made())


@pytest.mark.parametrize("said", [*NO_OBJECTS, *OBJECTS], ids=lambda said: said[:20])
def test_a_call_is_never_run_with_other_arguments_than_were_said(said: str) -> None:
    call = f'{{"name": "f", "arguments": {said}}}'
    whole, events = message(f"<tool_call>{call}</tool_call>", FinishReason.STOP)
    JSONResponse(whole)
    (block,) = whole["content"]
    if said in NO_OBJECTS:
        assert block == {"type": "text", "text": call}
    else:
        assert (block["type"], block["input"]) == ("tool_use", json.loads(said))
    why = "end_turn" if said in NO_OBJECTS else "tool_use"
    assert whole["stop_reason"] == why
    assert f'"stop_reason":"{why}"' in events
    cut = call[: -len(said) // 2 - 1]
    whole, _ = message(f"<tool_call>{cut}", FinishReason.LENGTH)
    assert whole["stop_reason"] == "max_tokens"
    (block,) = whole["content"]
    assert block["type"] == "text"
    assert block["text"].removeprefix("<tool_call>") == cut


@pytest.mark.parametrize(
    "said", ["", "[1]", '{"input": 5}', '{"input": "a", "more": "b"}', r'{"input": "\ud83d"}', "{"]
)
def test_a_plain_input_that_is_none_is_shown_with_all_that_it_has(said: str) -> None:
    assert plain_input(said) == said
    assert plain_input(r'{"input": "a\n\u00e9"}') == "a\né"
    assert not plain_input('{"input": ""}')
