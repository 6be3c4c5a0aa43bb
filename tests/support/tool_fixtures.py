"""The fixtures of `canitoolcall`: answers of many models, replayed through the server's reader.

The tokenizers of those models are not here. So each character is a token, apart from the tags that
are single tokens in the model's own tokenizer.
"""

import random
import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

from canitoolcall.checks import run_checks
from canitoolcall.chunking import DEFAULT_STRATEGIES, split
from canitoolcall.fixtures import Family, Fixture, load_family, load_fixtures
from canitoolcall.results import (
    CheckResult,
    Observation,
    ParsedToolCall,
    ParseResult,
    Status,
    worst_status,
)

from qllm.frontend.detokenizer import Detokenizer
from qllm.server.api.calls import Reader, make_reader
from qllm.server.tools.deltas import merged
from qllm.server.tools.format import Format
from qllm.server.tools.formats import FORMATS
from qllm.server.tools.tool_choice import Choice

OF_VARIANT = {
    "deepseek-v31": "deepseek-v3.1",
    "deepseek-v32": "deepseek-v3.2",
    "deepseek-v41": "deepseek-v4.1",
    "devstral-2507": "mistral-v11",
    "gemma4": "gemma",
    "glm45-newline": "glm",
    "glm47-compact": "glm-compact",
    "glm53-compact": "glm-compact",
    "gpt-oss": "harmony",
    "kimi-k2-instruct": "kimi-k2",
    "kimi-k2-thinking": "kimi-k2",
    "kimi-k3-xtml": "kimi-k3",
    "llama3-json": "llama3",
    "llama4-pythonic": "llama4",
    "qwen3-hybrid": "hermes",
    "qwen3-thinking-2507": "hermes",
    "qwen3-instruct-2507": "hermes",
    "qwen3-coder": "qwen-xml",
    "qwen3-coder-next": "qwen-xml",
    "qwen3.5": "qwen-xml",
    "qwen3.6": "qwen-xml",
    "qwen3.8": "qwen-xml",
    "v3": "mistral-v3",
    "v11": "mistral-v11",
    "v11-think-text": "mistral-v11",
    "v13": "mistral",
    "v13-think": "mistral",
    "v13plus-think": "mistral",
}
"""Format of each variant of a family, if it has another name here."""
IDS = {
    "harmony": {
        **{200002: "<|return|>", 200003: "<|constrain|>", 200005: "<|channel|>"},
        **{200006: "<|start|>", 200007: "<|end|>", 200008: "<|message|>", 200012: "<|call|>"},
    },
    "kimi-k3": {163587: "<|open|>", 163588: "<|close|>", 163589: "<|sep|>"},
    "mistral": {9: "[TOOL_CALLS]", 32: "[ARGS]", 34: "[THINK]", 35: "[/THINK]"},
}
"""Tags of the tokenizers in which some fixtures spell a tag with ordinary tokens."""
_TAG = re.compile(r"<[^<>\s$=\"{}]{1,40}>|\[/?[A-Z_]+\]|｜DSML｜|<\|\"\|>")
SPELLED = {"<function=", "</function>", "</parameter>", "<invoke", "</invoke>"}
"""Tags that are ordinary text in each of the tokenizers."""
FIRST_TAG = 0x110000
"""Token id of the first tag; smaller ones are characters."""

CUT = (
    "The answer ends inside the arguments of a call, and a stream has delivered them as they "
    "arrived. As in OpenAI's API, the call stays, and the reason of the end is not tool_calls."
)
WRONG = {
    **dict.fromkeys(
        (
            *("deepseek/v3-truncated-mid-arguments", "deepseek/v31-truncated-mid-arguments"),
            *("deepseek/v32-truncated-mid-arguments", "deepseek/v4-truncated-mid-arguments"),
            "deepseek/v41-truncated-mid-arguments",
            *("gemma4/truncated-mid-string", "gemma4/truncated-before-close"),
            "gemma4/truncated-second-parallel-call",
            *("glm/glm47-truncated-inside-arg-value", "glm/glm47-truncated-before-close-call"),
            "glm/glm45-truncated-after-arg-key",
            *("gpt-oss/harmony-truncated-in-arguments", "kimi/k26-truncated-inside-arguments"),
            *("llama/l4-truncated-missing-close-bracket", "llama/l3-truncated-inside-parameters"),
            "mistral/v13think-truncated-in-arguments",
            "qwen3-hermes/bug-sglang-30480-truncated-mid-arguments",
            "qwen3-hermes/truncated-mid-arguments-no-thinking",
            "qwen3-hermes/truncated-mid-arguments-thinking",
            "qwen3-hermes/truncated-second-parallel-call",
            "qwen3-xml/q38-truncated-in-parameter",
        ),
        CUT,
    ),
    "qwen3-hermes/vllm-invalid-json-missing-brace": (
        "The arguments are a whole JSON object, and a stream has delivered them; only the brace "
        "and the tag behind them are missing."
    ),
    "deepseek/vllm-v3-malformed-missing-brace": (
        "A stream has delivered the arguments before their last brace turns out to be missing; "
        "the reason of the end is not tool_calls."
    ),
    "gpt-oss/llamacpp-builtin-python-recipient": (
        "OpenAI's description of Harmony has messages to built-in tools on the analysis channel, "
        "as part of the chain of thought. They are reasoning; no text is lost."
    ),
    "gemma4/vllm-text-before-call": (
        "The template writes no space between text and call, so a space is text; "
        "gemma4/sglang-text-before-call expects that of the same form."
    ),
}
"""Fixtures that the reader does not pass, each with the reason."""


class Token(NamedTuple):
    """A token of an answer."""

    id: int
    text: str
    """Text that the token adds for a reader."""


class Letters:
    """A tokenizer whose tokens are characters and the tags of a format.

    Args:
        format: Format of the model's answers.
        family: Family of the model.
    """

    unk_token_id = None

    def __init__(self, format: Format, family: Family) -> None:
        tags = {
            tag for text in (*format.markup, *format.signs) for tag in _TAG.findall(text)
        } - SPELLED
        is_text = format.name == "mistral-v11"  # Magistral of 2506 spells the tags of reasoning
        self.tags = sorted(tags - {"<think>", "</think>"} if is_text else tags)
        self._pattern = re.compile("|".join(map(re.escape, self.tags)) or "$^")
        self.added_tokens_decoder = {
            FIRST_TAG + n: SimpleNamespace(content=tag, special=True)
            for n, tag in enumerate(self.tags)
        }
        self.chat_template = " ".join((*format.signs, *(format.reasoning or ())))

    def convert_tokens_to_ids(self, text: str) -> int | None:
        return FIRST_TAG + self.tags.index(text) if text in self.tags else None

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False, **_: Any) -> str:
        shown = "" if skip_special_tokens else None
        return "".join(
            chr(i) if i < FIRST_TAG else self.tags[i - FIRST_TAG] if shown is None else shown
            for i in ids
        )

    def ids(self, text: str, places: Sequence[int] | None = None) -> list[int]:
        """The tokens of a text.

        Args:
            text: The text.
            places: Places of the tags that are tokens; by default of all.
        """
        found, at = [], 0
        for tag in self._pattern.finditer(text):
            if places is None or tag.start() in places:
                found += [*map(ord, text[at : tag.start()]), FIRST_TAG + self.tags.index(tag[0])]
                at = tag.end()
        return [*found, *map(ord, text[at:])]


def places_of(text: str, ids: Sequence[int], tags: dict[int, str]) -> list[int] | None:
    """Places of the tags in a text that are tokens of their own; None if all of them are.

    Args:
        text: Text of an answer.
        ids: Its tokens in the model's own vocabulary.
        tags: Tags of that vocabulary.
    """
    spelled = [
        (place.start(), place[0])
        for place in re.finditer("|".join(map(re.escape, tags.values())), text)
    ]
    tokens = [(at, tags[token_id]) for at, token_id in enumerate(ids) if token_id in tags]
    if len(spelled) == len(tokens):
        return None

    def cost(characters: int, num_tokens: int) -> float:
        """Return a cost that grows as so many characters of so many tokens get less likely."""
        if (characters == 0) != (num_tokens == 0) or characters < 0:
            return float("inf")
        return (characters - 3.5 * num_tokens) ** 2 / (1 + num_tokens)

    @cache
    def best(num: int, first: int, at: int, token: int) -> tuple[float, tuple[int, ...]]:
        if num == len(tokens):
            return cost(len(text) - at, len(ids) - token), ()
        place, tag = tokens[num]
        found: tuple[float, tuple[int, ...]] = (float("inf"), ())
        for index in range(first, len(spelled)):
            start, name = spelled[index]
            before = cost(start - at, place - token)
            if name == tag and before < found[0]:
                rest, starts = best(num + 1, index + 1, start + len(tag), place + 1)
                found = min(found, (before + rest, (start, *starts)))
        return found

    price, starts = best(0, 0, 0, 0)
    assert price < float("inf"), text
    return list(starts)


class Replay:
    """A fixture, its tokens, and what makes readers for it.

    Args:
        fixture: The fixture.
        family: Its family.
    """

    def __init__(self, fixture: Fixture, family: Family) -> None:
        model = family.reference_for(fixture.reference_model)
        assert model is not None
        self.fixture, self.family = fixture, family
        variant = model.variant or ""
        self.format = FORMATS[OF_VARIANT.get(variant, variant)]
        self.tokenizer = Letters(self.format, family)
        begun = fixture.generation_prompt
        begun = model.default_generation_prompt if begun is None else begun
        self.prompt = self.tokenizer.ids(begun or "")
        tags = IDS.get(self.format.name)
        places = tags and places_of(fixture.raw_output, fixture.output_token_ids or (), tags)
        ids = self.tokenizer.ids(fixture.raw_output, places or None)
        text_of = Detokenizer(self.tokenizer, prompt=self.prompt, reading=self.reader)
        self.tokens = [Token(token_id, text_of.push([token_id])[0]) for token_id in ids]
        self.rest = text_of.finish()

    def reader(self) -> Reader:
        """The reader that the server makes for the answer."""
        choice = Choice(list(self.fixture.tools), False, True)
        return make_reader(self.tokenizer, self.prompt, choice, False)

    def read(self, parts: Sequence[Sequence[Token]]) -> tuple[list[dict[str, Any]], Reader]:
        """The deltas of an answer that comes in these parts, and its reader at the end."""
        reader, deltas = self.reader(), []
        for part in parts:
            text, ends = "", []
            for token in part:
                text += token.text
                ends.append(len(text))
            deltas.append(reader.push(text, [token.id for token in part], ends))
        return [*deltas, reader.push(self.rest, ()), reader.finish()], reader

    def parsed(self, parts: Sequence[Sequence[Token]]) -> ParseResult:
        """What a client has at the end of an answer that comes in these parts."""
        found = merged(self.read(parts)[0])
        calls = [call["function"] for call in found.get("tool_calls", ())]
        return ParseResult(
            found.get("content"),
            found.get("reasoning_content"),
            tuple(ParsedToolCall(call["name"], call["arguments"]) for call in calls),
        )

    def rows(self, num_cuts: int) -> list[CheckResult]:
        """The rows of all checks: whole, in the strategies of the package, and cut at random."""
        special = {FIRST_TAG + n for n in range(len(self.tokenizer.tags))}
        streams = {}
        for strategy in DEFAULT_STRATEGIES:
            ids = [token.id for token in self.tokens]
            sizes = [len(part) for part in split(ids, strategy, special)]
            streams[strategy.id] = self.parsed(_in_sizes(self.tokens, sizes))
        rng = random.Random(self.fixture.id)
        for num in range(num_cuts):
            places = sorted(rng.choices(range(len(self.tokens) + 1), k=rng.randint(1, 12)))
            sizes = [b - a for a, b in pairwise((0, *places, len(self.tokens)))]
            streams[f"rand:{1000 + num}:8"] = self.parsed(_in_sizes(self.tokens, sizes))
        whole = self.parsed([self.tokens])
        return list(run_checks(self.fixture, self.family, Observation(whole, streams)))


def _in_sizes(tokens: Sequence[Token], sizes: Sequence[int]) -> Iterator[Sequence[Token]]:
    at = 0
    for size in sizes:
        yield tokens[at : at + size]
        at += size


@cache
def replays() -> dict[str, Replay]:
    """All fixtures, by id."""
    families: dict[str, Family] = {}
    found = {}
    for fixture in load_fixtures():
        family = families.setdefault(fixture.family, load_family(fixture.family))
        found[fixture.id] = Replay(fixture, family)
    return found


def status_of(rows: Sequence[CheckResult]) -> Status:
    """The worst status of all rows."""
    return worst_status(row.status for row in rows)
