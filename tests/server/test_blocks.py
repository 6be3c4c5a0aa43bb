"""The parts of an answer that `/v1/responses` and `/v1/messages` show."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import openai
import pytest

from qllm.frontend.handle import Piece
from qllm.llm import QLLMEngine
from qllm.server.blocks import Blocks, Kind
from qllm.server.calls import HermesReader
from qllm.types import Logprobs
from tests.support.serving import serving

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
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
    blocks = Blocks(HermesReader(thinks=True, is_thinking=True, calls=True))
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
        (Kind.TEXT, "I say\N{SNOWMAN}<b>: "),
        (Kind.CALL, '{"a": 1}'),
        (Kind.TEXT, "and more"),
    ]
    first, last = (ids for kind, _, ids, _ in shown(WORDS, size) if kind is Kind.TEXT)
    assert first == [5, 6, 7, 8, 9, 10, 11], "no token of a tag or of the space behind it"
    assert last == [before + 1, before + 2], "nor EOS"


def test_tokens_that_come_together_are_one_growth() -> None:
    blocks = Blocks(HermesReader(thinks=True, is_thinking=False, calls=True))
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
