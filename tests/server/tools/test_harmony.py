"""GPT-OSS's form of an answer, read from the tokens of a tokenizer with its marks."""

import json
from typing import Any

import pytest

from qllm.frontend.detokenizer import Detokenizer
from qllm.models.tokenizer import load_tokenizer
from qllm.server.api.calls import HarmonyReader, make_reader
from qllm.server.tools.deltas import merged
from qllm.server.tools.harmony import MARKS
from qllm.server.tools.reader import MarkupReader
from qllm.server.tools.tool_choice import Choice

NONE = Choice((), False, False)
PROMPT = "<|start|>user<|message|>What time is it?<|end|><|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>Grüße 🙂, a thought.<|end|>"
CALL = (
    "<|start|>assistant<|channel|>commentary to=functions.time_of <|constrain|>json<|message|>"
    '{"zone": "CET €"}<|call|>'
)
FINAL = "<|start|>assistant<|channel|>final<|message|>It is 🕛 noon.<|return|>"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    found = load_tokenizer("tiny")
    found.add_special_tokens({"additional_special_tokens": list(MARKS)})
    found.chat_template = "<|channel|>"
    return found


def ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def read(
    tokenizer: Any, text: str, size: int = 1, *, stop: tuple[str, ...] = (), prompt: str = PROMPT
) -> tuple[dict[str, Any], HarmonyReader]:
    """As a server does: text and tokens in pieces of some size."""
    reader = make_reader(tokenizer, ids(tokenizer, prompt), NONE, False)
    assert isinstance(reader, HarmonyReader)
    made, text_of, given = [], Detokenizer(tokenizer, stop), ids(tokenizer, text)
    for at in range(0, len(given), size):
        part = given[at : at + size]
        piece, stopped = text_of.push(part)
        made.append(reader.push(piece, part))
        if stopped:
            break
    made += [reader.push(text_of.finish(), ()), reader.finish()]
    found = merged(made)
    for call in found.get("tool_calls", ()):
        assert call.pop("id").startswith("call_")
    return found, reader


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_reasoning_calls_and_content_are_told_apart(tokenizer: Any, size: int) -> None:
    found, reader = read(tokenizer, THOUGHT + CALL + FINAL, size)
    function = {"name": "time_of", "arguments": '{"zone": "CET €"}'}
    assert found == {
        "reasoning_content": "Grüße 🙂, a thought.",
        "tool_calls": [{"index": 0, "type": "function", "function": function}],
        "content": "It is 🕛 noon.",
    }
    assert reader.num_calls == 1
    assert reader.num_reasoning_tokens == len(ids(tokenizer, "Grüße 🙂, a thought."))


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (FINAL.removeprefix("<|start|>assistant"), {"content": "It is 🕛 noon."}),
        (" to=functions.f<|channel|>commentary json<|message|>{}<|call|>", ["f", "{}"]),
        ("<|channel|>analysis to=functions.f<|message|>{}<|call|>", ["f", "{}"]),
        ("<|channel|>commentary<|message|>I look.<|end|>", {"content": "I look."}),
        ("<|channel|>commentary to=python<|message|>1+1<|call|>", {"reasoning_content": "1+1"}),
        ("<|message|>Plain.<|return|>", {"content": "Plain."}),
        ("<|channel|>final<|message|>Cut o", {"content": "Cut o"}),
        ('<|channel|>commentary to=functions.f<|message|>{"a', ["f", '{"a']),
        ("no form at all", {"content": "no form at all"}),
        ("a head<|start|>assistant<|channel|>final<|message|>b", {"content": "a headb"}),
        ("<|channel|>final<|message|>a<|channel|>final<|message|>b", {"content": "ab"}),
        ('<|channel|>final<|message|>"to=functions.f"', {"content": '"to=functions.f"'}),
    ],
)
def test_other_ways_to_write_it(tokenizer: Any, text: str, want: Any) -> None:
    found, _ = read(tokenizer, text)
    if isinstance(want, list):
        (call,) = found.pop("tool_calls")
        assert list(call["function"].values()) == want
        want = {}
    assert found == want


def test_two_calls(tokenizer: Any) -> None:
    found, reader = read(tokenizer, CALL + CALL.replace("CET €", "UTC"))
    told = [json.loads(call["function"]["arguments"]) for call in found["tool_calls"]]
    assert told == [{"zone": "CET €"}, {"zone": "UTC"}]
    assert [call["index"] for call in found["tool_calls"]] == [0, 1]
    assert reader.num_calls == 2


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_a_stop_string_cuts_what_is_shown(tokenizer: Any, size: int) -> None:
    found, _ = read(tokenizer, THOUGHT + FINAL, size, stop=("noon",))
    assert found == {"reasoning_content": "Grüße 🙂, a thought.", "content": "It is 🕛 "}
    found, _ = read(tokenizer, THOUGHT + FINAL, size, stop=("thought",))
    assert found == {"reasoning_content": "Grüße 🙂, a "}


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_it_knows_whether_the_arguments_of_a_call_have_ended(tokenizer: Any, size: int) -> None:
    found, reader = read(tokenizer, CALL, size)
    assert (reader.num_calls, reader.is_in_call) == (1, False)
    found, reader = read(tokenizer, CALL, size, stop=("CET",))
    assert (found["tool_calls"][0]["function"]["arguments"], reader.is_in_call) == (
        '{"zone": "',
        True,
    )


def test_an_answer_goes_on_with_the_last_message_of_its_prompt(tokenizer: Any) -> None:
    begun = PROMPT + "<|channel|>analysis<|message|>So"
    found, _ = read(tokenizer, " far.<|end|>" + FINAL, prompt=begun)
    assert found == {"reasoning_content": " far.", "content": "It is 🕛 noon."}
    found, _ = read(tokenizer, "noon", prompt=PROMPT + "<|channel|>final<|message|>It is ")
    assert found == {"content": "noon"}


def test_a_forced_call_has_this_form_and_a_model_without_its_marks_another(tokenizer: Any) -> None:
    choice = Choice([{"type": "function", "function": {"name": "f"}}], True, True)
    assert isinstance(make_reader(tokenizer, (5,), choice, True), HarmonyReader)
    other = load_tokenizer("tiny")
    other.chat_template = "<|channel|>"
    assert isinstance(make_reader(other, (5,), choice, False), MarkupReader), "it has no marks"
