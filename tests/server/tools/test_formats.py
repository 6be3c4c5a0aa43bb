"""Formats of tool calls: the choice of one, those of packages, and the work of reading."""

import json
import sys
import types
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any

import pytest
import regex

from qllm.errors import ConfigError
from qllm.llm import QLLMEngine
from qllm.server.app import create_app
from qllm.server.config import load_config
from qllm.server.tools import choose
from qllm.server.tools.choose import GROUP, check_name, format_of, formats, told
from qllm.server.tools.deltas import merged
from qllm.server.tools.format import Format
from qllm.server.tools.formats import FORMATS, HERMES
from qllm.server.tools.patterns import patterns_of
from qllm.server.tools.reader import MarkupReader
from tests.support.serving import serving

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": "string"},
        "b": {"type": "array", "items": {"type": "integer"}},
        "c": {"$ref": "#/$defs/count"},
        "d": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    },
    "$defs": {"count": {"type": "integer"}},
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]
READ = [format for format in FORMATS.values() if not format.has_heads]


class Tokenizer(SimpleNamespace):
    """A tokenizer of a template and tokens. Like real ones, it is equal to no other."""

    __hash__, __eq__ = object.__hash__, object.__eq__


def reader(format: Format, **how: Any) -> MarkupReader:
    return MarkupReader(format, thinks=True, is_thinking=False, tools=TOOLS, **how)


def read(format: Format, text: str, size: int = 1000) -> dict[str, Any]:
    found = reader(format)
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    whole = merged([*(found.push(part, ()) for part in parts), found.finish()])
    whole["calls"] = [
        (call["function"]["name"], call["function"]["arguments"])
        for call in whole.pop("tool_calls", ())
    ]
    return whole


# -- the choice


TEMPLATES = {
    "hermes": "{{ '<tool_call>\\n{\"name\": \"' + c.name + '\"}' }}<think>",
    "qwen-xml": "<tool_call>\n<function=' + c.name + '>\n<parameter=' + k + '>",
    "glm": "<tool_call>{{ c.name }}\n<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>",
    "glm-compact": "<tool_call>{{ c.name }}<arg_key>{{ k }}</arg_key><arg_value>{{ v }}",
    "deepseek-v3": "<｜tool▁calls▁begin｜>function<｜tool▁sep｜>' + name + '\\n```json\\n'",
    "deepseek-v3.1": "<｜tool▁call▁begin｜>'+ name + '<｜tool▁sep｜>' + arguments",
    "deepseek-v3.2": "<｜DSML｜function_calls>",
    "deepseek-v4": "<｜DSML｜tool_calls>",
    "kimi-k2": "<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>{{ arguments }}",
    "kimi-k3": "<|open|>message<|sep|>...<|close|>message<|sep|>",
    "minimax": "<minimax:tool_call>\n<invoke name=\"' + c.name + '\">",
    "mistral-v3": "[TOOL_CALLS] [{{ c.function | tojson }}]",
    "mistral-v11": "[TOOL_CALLS]{{ c.name }}[ARGS]{{ c.arguments }}",
    "mistral": "[THINK]{{ thought }}[/THINK][TOOL_CALLS]{{ c.name }}[ARGS]{{ c.arguments }}",
    "gemma": "<|tool_call>call:{{ c.name }}{...}<tool_call|><|channel>thought",
    "llama3": "<|python_tag|>",
    "llama4": "<|python_start|>",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_format_is_found_by_the_chat_template(name: str) -> None:
    tokenizer = Tokenizer(chat_template=TEMPLATES[name])
    found = format_of(tokenizer)
    assert found is not None
    assert found.name == name
    assert name in told(tokenizer, "auto")


def test_the_template_counts_more_than_tokens_that_it_does_not_use() -> None:
    """As in a model of Nous on Llama 3, whose tokenizer still has Llama's tags."""
    tokens = {5: SimpleNamespace(content="<|python_tag|>", special=True)}
    tokenizer = Tokenizer(chat_template=TEMPLATES["hermes"], added_tokens_decoder=tokens)
    assert format_of(tokenizer) is HERMES
    tokenizer.chat_template = "{{ messages }}"
    assert format_of(tokenizer) is FORMATS["llama3"]
    tokenizer = Tokenizer(chat_template="{{ messages }}", added_tokens_decoder={})
    assert format_of(tokenizer) is None
    assert "hermes, because no sign" in told(tokenizer, "auto")
    assert format_of(tokenizer, "glm") is FORMATS["glm"]
    assert told(tokenizer, "glm") == "glm (tool_calls)"


def test_an_unknown_name_ends_the_start_with_the_known_ones(engine: QLLMEngine) -> None:
    check_name("auto")
    check_name("kimi-k2")
    config = load_config(None, {}, {"model": "tiny", "tool_calls": "hermess"})
    for start in (lambda: check_name("hermess"), lambda: create_app(engine, config)):
        with pytest.raises(ConfigError, match=r"tool_calls='hermess' is unknown; use auto, or one"):
            start()
    with pytest.raises(ConfigError, match="qwen-xml"):
        check_name("")
    config = load_config(None, {}, {"model": "tiny", "tool_calls": "harmony"})
    with pytest.raises(ConfigError, match="the tokenizer has not all of them"):
        create_app(engine, config)


def test_the_setting_chooses_the_format_of_an_answer(
    engine: QLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The template of `tiny` writes no call: its answer is what the reader is given."""
    made: list[str] = []

    def spy(tokenizer: Any, name: str) -> Any:
        made.append(name)
        return format_of(tokenizer, name)

    monkeypatch.setattr("qllm.server.api.calls.format_of", spy)
    with serving(engine, tool_calls="glm") as served:
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        for path, more in (
            ("/v1/chat/completions", body),
            ("/v1/messages", {**body, "model": "tiny"}),
            ("/v1/responses", {"input": "x", "max_output_tokens": 1}),
        ):
            made.clear()
            assert served.post(path, more).status_code == 200
            assert set(made) == {"glm"}, path


# -- plug-ins


THEIRS = Format("theirs", calls=("<<$name|$arguments>>",), signs=("<<", ">>"), reasoning=None)


@pytest.fixture
def points(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EntryPoint]]:
    module = types.ModuleType("their_formats")
    vars(module).update(FORMAT=THEIRS, WRONG=7)
    monkeypatch.setitem(sys.modules, "their_formats", module)
    found = [EntryPoint("theirs", "their_formats:FORMAT", GROUP)]
    monkeypatch.setattr("qllm.plugins.entry_points", lambda group: found if group == GROUP else [])
    for cache in (choose.formats, choose._detected):
        cache.cache_clear()
    yield found
    for cache in (choose.formats, choose._detected):
        cache.cache_clear()


def test_a_package_adds_a_format(points: list[EntryPoint]) -> None:
    assert formats()["theirs"] is THEIRS
    check_name("theirs")
    assert format_of(Tokenizer(chat_template="<<name>>")) is THEIRS
    found = read(THEIRS, 'so <<f|{"a": "x"}>> done')
    assert found == {"content": "so  done", "calls": [("f", '{"a": "x"}')]}


@pytest.mark.parametrize(
    ("point", "says"),
    [
        (EntryPoint("theirs", "their_formats:GONE", GROUP), "cannot be loaded from their_formats"),
        (EntryPoint("theirs", "their_formats:WRONG", GROUP), "not a qllm.server.tools.format.Form"),
        (
            EntryPoint("glm", "their_formats:FORMAT", GROUP),
            "'glm' of their_formats:FORMAT has a na",
        ),
        (EntryPoint("auto", "their_formats:FORMAT", GROUP), "has a name of ours"),
    ],
)
def test_a_broken_package_is_named(points: list[EntryPoint], point: EntryPoint, says: str) -> None:
    points[:] = [point]
    with pytest.raises(ConfigError, match=regex.escape(says)):
        formats()


# -- what is written, read again


def written(format: Format, values: dict[str, str]) -> str:
    """A call of `f` as the format's first template writes it."""
    call = format.calls[0]
    fields = {"$name": "f", "$index": "0", "$id": "1"}
    if "$json" in call:
        name, arguments = format.keys
        call = call.replace("$json", f'{{"{name}": "f", "{arguments}": $arguments}}')
    if format.argument:
        kinds = {"a": "string", "b": "array", "c": "number", "d": "null"}
        fields["$arguments"] = "".join(
            format.argument.replace("$key", key)
            .replace("$type", kinds[key])
            .replace("$string", str(key == "a").lower())
            .replace("$value", json.loads(value) if key == "a" else value)
            for key, value in values.items()
        )
    else:
        quote, (begin, assign, end) = format.notation.quotes[0], format.notation.outer
        is_json = not format.notation.bare
        said = [
            f'"{key}": {value}' if is_json
            else f"{key}{assign}{quote + json.loads(value) + quote if key == 'a' else value}"
            for key, value in values.items()
        ]  # fmt: skip
        fields["$arguments"] = begin + ", ".join(said) + end
    for field, text in fields.items():
        call = call.replace(field, text)
    before, after = format.sections[0] if format.sections else ("", "")
    return before + format.between.join([call, call]) + after


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("format", READ, ids=lambda x: x.name)
def test_what_a_template_writes_is_read(format: Format, size: int) -> None:
    values = {"a": '"x y"', "b": "[1, 2]", "c": "3", "d": "null"}
    thought = "" if format.reasoning is None else "so".join(format.reasoning)
    found = read(format, thought + written(format, values), size)
    want = {"a": "x y", "b": [1, 2], "c": 3, "d": None}
    assert [(name, json.loads(text)) for name, text in found["calls"]] == [("f", want)] * 2
    assert found.get("content", "") == ""
    assert found.get("reasoning_content", "") == ("so" if thought else "")


@pytest.mark.parametrize("format", READ, ids=lambda x: x.name)
def test_what_is_reported_is_certain(format: Format) -> None:
    """After each character the arguments so far begin those of the whole answer."""
    text = written(format, {"a": '"x <y"', "b": "[1]", "c": "3", "d": "null"})
    whole, found, deltas = read(format, text), reader(format), []
    for character in text:
        deltas.append(found.push(character, ()))
        said = [call["function"] for call in merged(deltas).get("tool_calls", ())]
        for call, (name, arguments) in zip(said, whole["calls"], strict=False):
            assert call["name"] == name
            assert arguments.startswith(call["arguments"])
    assert len([delta for delta in deltas if delta]) > 8


def test_a_call_that_breaks_after_its_arguments_began_stays_open() -> None:
    """Routes do not end such an answer with the reason `tool_calls`."""
    found = reader(HERMES)
    begun = found.push('<tool_call>\n{"name": "f", "arguments": {"a": "x", ', ())
    assert begun["tool_calls"][0]["function"]["name"] == "f"
    found.push("</tool_call> So.", ())
    assert found.is_in_call
    found.finish()
    assert found.is_in_call


# -- work


class Counted:
    """A pattern that counts the characters it is given."""

    def __init__(self, pattern: Any, counts: list[int]) -> None:
        self._pattern, self._counts = pattern, counts

    def __getattr__(self, name: str) -> Any:
        def look(text: str, pos: int = 0, **how: Any) -> Any:
            found = getattr(self._pattern, name)(text, pos, **how)
            is_open = found is None or (name == "search" and found.partial)
            self._counts[0] += (len(text) if is_open else found.end()) - pos + 1
            return found

        return look


TEXTS = {
    "plain": "some text, no call. ",
    "space": " \n",
    "openers": "{opener}",
    "openers of objects": "{opener}{{",
    "texts in objects": '{opener}{{"',
    "heads": "{head}",
    "calls": "{call}",
    "half a tag": "<",
    "ends": "</",
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("format", READ, ids=lambda x: x.name)
def test_the_work_grows_with_the_answer_and_not_faster(
    format: Format, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The characters that patterns look at, in answers that come token by token."""
    counts = [0]

    def counted(*args: Any, **how: Any) -> Any:
        found = patterns_of(*args, **how)
        changed = {
            name: Counted(value, counts)
            for name, value in found._asdict().items()
            if value is not None and name != "quotes"
        }
        return found._replace(**changed)

    monkeypatch.setattr("qllm.server.tools.reader.patterns_of", counted)
    call = written(format, {"a": '"x"'})
    head = call.partition("x")[0]
    opener = (format.sections[0][0] if format.sections else "") + format.calls[0].partition("$")[0]
    opener = opener or "{"
    unit = TEXTS[text].format(opener=opener, head=head, call=call)
    work = []
    for length in (6_000, 12_000):
        counts[0] = 0
        found = reader(format)
        answer = (unit * (length // len(unit) + 1))[:length]
        for at in range(0, length, 8):
            found.push(answer[at : at + 8], ())
        found.finish()
        work.append(counts[0])
    assert work[1] <= 2.3 * work[0] + 4_000
    assert work[1] <= 400 * 12_000
