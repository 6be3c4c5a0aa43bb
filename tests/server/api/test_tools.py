"""Tools and reasoning, as agents' clients use them."""

import json
from itertools import accumulate
from typing import Any

import jsonschema_rs
import openai
import pytest

from qllm.frontend.prompts import flat_message, render_chat
from qllm.llm import QLLMEngine
from qllm.models.tokenizer import load_tokenizer
from qllm.server.api.calls import PlainReader, TemplateReader, make_reader
from qllm.server.tools.deltas import merged
from qllm.server.tools.formats import HERMES
from qllm.server.tools.reader import MarkupReader
from qllm.server.tools.tool_choice import Choice
from tests.support.serving import Serving

CHAT: list[Any] = [{"role": "user", "content": "What is the weather in Bonn?"}]
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"place": {"$ref": "#/$defs/place"}, "days": {"enum": [1, 3]}},
    "required": ["place", "days"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "string", "maxLength": 6}},
}
TIME: dict[str, Any] = {
    "type": "object",
    "properties": {"zone": {"enum": ["CET", "UTC"]}},
    "required": ["zone"],
    "additionalProperties": False,
}
SCHEMAS = {"weather": WEATHER, "time_of": TIME}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": "x", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]


def check(call: Any) -> None:
    jsonschema_rs.validate(SCHEMAS[call.function.name], json.loads(call.function.arguments))


@pytest.mark.parametrize("seed", range(3))
def test_a_required_call(client: openai.OpenAI, seed: int) -> None:
    done = client.chat.completions.create(
        model="tiny", messages=CHAT, tools=TOOLS, tool_choice="required", max_tokens=1500, seed=seed
    ).choices[0]
    assert done.finish_reason == "tool_calls"
    assert done.message.content is None
    assert done.message.tool_calls
    ids = {call.id for call in done.message.tool_calls}
    assert len(ids) == len(done.message.tool_calls)
    for call in done.message.tool_calls:
        check(call)


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_named_call_is_one_call_of_that_tool(client: openai.OpenAI, name: str) -> None:
    done = client.chat.completions.create(
        model="tiny", messages=CHAT, tools=TOOLS, max_tokens=1500, seed=1,
        tool_choice={"type": "function", "function": {"name": name}},
    ).choices[0]  # fmt: skip
    (call,) = done.message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == name
    check(call)


def test_calls_one_by_one(client: openai.OpenAI) -> None:
    for seed in range(3):
        done = client.chat.completions.create(
            model="tiny", messages=CHAT, tools=TOOLS, tool_choice="required", max_tokens=300,
            parallel_tool_calls=False, seed=seed,
        ).choices[0]  # fmt: skip
        assert len(done.message.tool_calls or ()) == 1


def test_a_streamed_call_is_the_same(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "tiny", "messages": CHAT, "tools": TOOLS, "tool_choice": "required",
        "max_tokens": 1500, "seed": 5,
    }  # fmt: skip
    whole = client.chat.completions.create(**asked).choices[0].message
    with client.chat.completions.stream(**asked) as stream:
        events = [event.type for event in stream]
        found = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.done" in events
    assert found.finish_reason == "tool_calls"
    assert whole.tool_calls
    assert [(c.function.name, c.function.arguments) for c in found.message.tool_calls or ()] == [
        (c.function.name, c.function.arguments)  # type: ignore[union-attr]
        for c in whole.tool_calls
    ]


def test_too_few_tokens_are_no_call(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(
        model="tiny", messages=CHAT, tools=TOOLS, tool_choice="required", max_tokens=4
    ).choices[0]
    assert done.finish_reason == "length"
    assert done.message.tool_calls is None
    assert str(done.message.content).lstrip().startswith("<")


def test_calls_and_their_results_go_back_into_the_template(
    served: Serving, engine: QLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the template of tiny, which adds contents up; and with one that walks arguments."""
    call = {"name": "weather", "arguments": '{"place": "Bonn"}'}
    chat = [
        *CHAT,
        {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "a", "content": None},
        {"role": "assistant", "content": None, "tool_calls": []},
    ]
    body = {"messages": chat[:3], "max_tokens": 2}
    assert served.post("/v1/chat/completions", body).status_code == 200
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments.place }}"
    )
    template += "{% endfor %}{{ m.content }};{% endfor %}"
    monkeypatch.setattr(engine.tokenizer, "chat_template", template)
    answer = served.post("/v1/chat/completions", {**body, "max_tokens": 1}).json()
    want = engine.tokenizer("What is the weather in Bonn?;Bonn;;")["input_ids"]
    assert answer["usage"]["prompt_tokens"] == len(want)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "'weather', 'time_of'"),
        ({"tool_choice": {"type": "allowed_tools"}}, "auto"),
        ({"tool_choice": "required", "guided_regex": "a"}, "can have no other form"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]}, "tools[0]"),
        ({"tool_choice": "required", "tools": None}, "needs tools"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "two functions are called 'weather'"),
        ({"tools": TOOLS[:1] * 2, "tool_choice": "none"}, "two functions are called 'weather'"),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"type": "foo"}}}
                ],
                "tool_choice": "required",
            },
            "tool_0_f: Invalid type: foo",
        ),
        (
            {
                "tools": [
                    *TOOLS,
                    {
                        "type": "function",
                        "function": {
                            "name": "Book-a.Room",
                            "parameters": {"properties": {"a": {"items": {"type": "foo"}}}},
                        },
                    },
                ],
                "tool_choice": "required",
            },
            "in tool_2_book_a_room at /properties/a/items: Invalid type: foo",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"items": {"type": "foo"}}},
                }
            },
            "in answer at /items: Invalid type: foo",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": '{"a": '}}],
                    }
                ]
            },
            "arguments of a call of 'f' are no JSON: Expecting value: line 1 column 7 (char 6); "
            "if it was cut off, leave it out or go on from before it",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": "[" * 5000}}],
                    }
                ]
            },
            "arguments of a call of 'f' are no JSON: maximum recursion depth",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [3]}]}, "an entry of tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": {"a": 1}}]}, "must be a list of calls"),
    ],
)
def test_refusals(served: Serving, more: dict[str, Any], says: str) -> None:
    answer = served.post("/v1/chat/completions", {"messages": CHAT, "tools": TOOLS, **more})
    assert answer.status_code == 400, answer.text
    assert says in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("stop", "why"),
    [("C", "stop"), ("zone", "stop"), ("</tool", "tool_calls"), ("</tool_call>", "tool_calls")],
)
def test_a_call_that_a_stop_string_cuts_is_no_call_to_make(
    served: Serving, client: openai.OpenAI, stop: str, why: str
) -> None:
    """Its arguments are no JSON. Behind them a stop string may end the answer."""
    asked: dict[str, Any] = {
        "model": "tiny", "messages": CHAT, "tools": TOOLS[1:], "tool_choice": "required",
        "stop": stop, "seed": 2, "max_tokens": 200,
    }  # fmt: skip
    (choice,) = client.chat.completions.create(**asked).choices
    assert choice.finish_reason == why
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    if why == "tool_calls":
        check(call)
    else:
        with pytest.raises(json.JSONDecodeError):
            json.loads(call.function.arguments)
    streamed, reasons = "", []
    for chunk in client.chat.completions.create(**asked, stream=True):
        for part in chunk.choices[0].delta.tool_calls or ():
            streamed += (part.function and part.function.arguments) or ""
        reasons.append(chunk.choices[0].finish_reason)
    assert (streamed, reasons[-1]) == (call.function.arguments, choice.finish_reason)
    body: dict[str, Any] = {"input": "x", "tool_choice": "required", "stop": stop, "seed": 2}
    body["tools"] = [{"type": "function", "name": "f", "parameters": TIME}]
    item = served.post("/v1/responses", body).json()["output"][-1]
    is_whole = item["arguments"].rstrip().endswith("}")
    assert item["status"] == ("completed" if is_whole else "incomplete")


# -- readers

ANSWER = (
    "<think>\nIs it far? a<b\n</think>\n\nLet me see.\n<tool_call>\n"
    '{"name": "weather", "arguments": {"place": "</Bönn>"}}\n</tool_call>\n<tool_call>\n'
    '{"name": "time_of", "arguments": {}}</tool_call>'
)


def hermes(*, thinks: bool = True, is_thinking: bool = False, calls: bool = True) -> MarkupReader:
    tools = TOOLS if calls else ()
    return MarkupReader(HERMES, thinks=thinks, is_thinking=is_thinking, tools=tools)


def read(text: str, size: int, **how: bool) -> tuple[dict[str, Any], int]:
    reader = hermes(**how)
    parts = [text[i : i + size] for i in range(0, len(text), size)]
    found = merged([*(reader.push(part, ()) for part in parts), reader.finish()])
    for call in found.get("tool_calls", ()):
        assert call.pop("id").startswith("call_")
    return found, reader.num_calls


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_an_answer_is_read_the_same_in_any_pieces(size: int) -> None:
    found, num_calls = read(ANSWER, size)
    assert num_calls == 2
    assert found["reasoning_content"] == "Is it far? a<b"
    assert found["content"] == "Let me see."
    assert [call["index"] for call in found["tool_calls"]] == [0, 1]
    first = found["tool_calls"][0]["function"]
    assert (first["name"], json.loads(first["arguments"])) == ("weather", {"place": "</Bönn>"})


@pytest.mark.parametrize("size", [1, 3])
def test_arguments_come_as_they_are_made(size: int) -> None:
    """The name first, then pieces; a tag, a quote or a bracket inside a string ends nothing."""
    arguments = json.dumps({"a": '</tool_call>"}] \\', "b": [{"c": {}}, "ö"]}, ensure_ascii=False)
    call = f'<tool_call>\n{{"name": "f\\u00f6", "arguments": {arguments}}}\n</tool_call>'
    text = f"{call}\n{call} bye"
    reader = hermes(thinks=False)
    deltas = [reader.push(text[i : i + size], ()) for i in range(0, len(text), size)]
    parts = [part for delta in deltas for part in delta.get("tool_calls", ())]
    heads = [part for part in parts if "id" in part]
    assert [(head["index"], head["function"]["name"]) for head in heads] == [(0, "fö"), (1, "fö")]
    assert all(len(part["function"]["arguments"]) <= size for part in parts)
    assert len(parts) >= 2 * len(arguments) / size
    whole = merged([*deltas, reader.finish()])
    assert [call["function"]["arguments"] for call in whole["tool_calls"]] == [arguments] * 2
    assert whole["content"] == "bye"  # without the space before it


@pytest.mark.parametrize("size", [1, 1000])
def test_calls_with_their_parts_in_another_order_stay_apart(size: int) -> None:
    calls = [f'<tool_call>{{"arguments": {{"a": {n}}}, "name": "f"}}</tool_call>' for n in (1, 2)]
    found, num_calls = read("\n".join(calls), size)
    assert num_calls == 2
    assert [call["index"] for call in found["tool_calls"]] == [0, 1]
    arguments = [json.loads(call["function"]["arguments"]) for call in found["tool_calls"]]
    assert arguments == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("size", [1, 1000])
def test_a_call_that_is_cut_off_keeps_what_it_has(size: int) -> None:
    found, num_calls = read('<tool_call>{"name": "f", "arguments": {"a": "b', size)
    assert num_calls == 1
    assert found["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": "b'}
    assert "content" not in found


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    "text",
    [
        '{"arguments": {"a": 1}, "name": "f"}',
        '{"name": "f", "arguments": "{\\"a\\": 1}"}',
        '{"name": "f", "arguments": {"a": 1}, "id": 3}',
        ' { "name" : "f" , "arguments" : {"a": 1} } ',
    ],
)
def test_other_ways_to_write_a_call(text: str, size: int) -> None:
    found, _ = read(f"<tool_call>{text}</tool_call>", size)
    (call,) = found["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("f", {"a": 1})


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize(
    ("text", "how", "want"),
    [
        (" plain <b> text <tool", {}, {"content": " plain <b> text <tool"}),
        (
            "far\n</think> yes",
            {"is_thinking": True},
            {"reasoning_content": "far", "content": "yes"},
        ),
        ("never ends", {"is_thinking": True}, {"reasoning_content": "never ends"}),
        ("<tool_call>{oops</tool_call>!", {}, {"content": "<tool_call>{oops</tool_call>!"}),
        ('<tool_call>["name"]</tool_call>', {}, {"content": '<tool_call>["name"]</tool_call>'}),
        (
            '<tool_call>{"name": 5}</tool_call>',
            {},
            {"content": '<tool_call>{"name": 5}</tool_call>'},
        ),
        ('a<tool_call>{"na', {}, {"content": 'a<tool_call>{"na'}),
        ("<tool_call>{}", {"calls": False}, {"content": "<tool_call>{}"}),
        ("<think>a", {"thinks": False}, {"content": "<think>a"}),
    ],
)
def test_what_is_no_call_stays_text(
    text: str, how: dict[str, bool], want: dict[str, str], size: int
) -> None:
    assert read(text, size, **how) == (want, 0)


class Templated:
    """A tokenizer that parses by itself."""

    chat_template = "x"
    response_template = "any thing"

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [len(text)]}

    def decode(self, ids: list[int], **how: Any) -> str:
        return "".join({1: "t ", 2: "c f a 1"}.get(i, "?") for i in ids)

    def parse_response(self, ids: list[int], prefix: list[int], tools: Any) -> dict[str, Any]:
        if ids == [9]:
            raise ValueError("no such form")
        assert (ids, prefix, len(tools)) == ([1, 2], [7], 2)
        call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
        return {"role": "assistant", "content": "c", "thinking": "t", "tool_calls": [call]}


def test_a_tokenizer_that_parses_is_asked() -> None:
    choice = Choice(TOOLS, False, True)
    reader = make_reader(Templated(), (7,), choice, False)
    assert isinstance(reader, TemplateReader)
    assert reader.push("t ", (1,)) == reader.push("c f a 1", (2,)) == {}
    found = reader.finish()
    assert (found["content"], found["reasoning_content"], reader.num_calls) == ("c", "t", 1)
    assert found["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    other = make_reader(Templated(), (7,), choice, False)
    other.push("text", (9,))
    assert other.finish() == {"content": "text"}
    assert isinstance(make_reader(Templated(), (7,), choice, True), MarkupReader)


class Whole(Templated):
    """Its answers are reasoning up to a bar, then content."""

    def decode(self, ids: list[int], **how: Any) -> str:
        return "".join(map(chr, ids))

    def parse_response(self, ids: list[int], prefix: list[int], tools: Any) -> dict[str, Any]:
        thought, _, content = self.decode(ids).partition("|")
        return {"thinking": thought.strip(), "content": content.strip()}


@pytest.mark.parametrize(
    ("whole", "shown", "want"),
    [
        ("so | it isSTOP, no", "so | it is", {"reasoning_content": "so", "content": "it is"}),
        ("so | it is ST ", "so | it is", {"reasoning_content": "so", "content": "it is"}),
        ("so | it is", "so | it is", {"reasoning_content": "so", "content": "it is"}),
        ("so it isSTOP", "so it is", {"reasoning_content": "so it is"}),
    ],
)
def test_a_tokenizer_that_parses_does_not_bring_back_what_a_stop_string_cut_off(
    whole: str, shown: str, want: dict[str, str]
) -> None:
    reader = make_reader(Whole(), (), Choice((), False, False), False)
    reader.push(shown, [ord(x) for x in whole])
    assert {name: text.strip() for name, text in reader.finish().items()} == want


class Stripping(Whole):
    """It strips a space in front of a text."""

    def decode(self, ids: list[int], **how: Any) -> str:
        return super().decode(ids).removeprefix(" ")


def test_what_a_stop_string_cuts_off_is_found_where_a_space_is_stripped() -> None:
    reader = make_reader(Stripping(), (ord("p"),), Choice((), False, False), False)
    reader.push(" t|a", [ord(x) for x in " t|a STOP"])
    assert reader.finish() == {"content": "a", "reasoning_content": "t"}


def test_the_reader_follows_the_template(
    engine: QLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, none = engine.tokenizer, Choice((), False, False)
    assert isinstance(make_reader(tokenizer, (5,), none, False), PlainReader)
    monkeypatch.setattr(tokenizer, "chat_template", "...<think>...")
    opened = tokenizer("x <think>\n")["input_ids"]
    reader = make_reader(tokenizer, opened, none, False)
    assert reader.push("so</think>yes", ()) == {"reasoning_content": "so", "content": "yes"}
    reader = make_reader(tokenizer, tokenizer("x")["input_ids"], none, False)
    assert reader.push("so</think>yes", ()) == {"content": "so</think>yes"}


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + m['content'] }}{% endfor %}",
        "{% for m in messages %}{{ m.content | trim }}{% endfor %}",
        "{% for m in messages %}{% if '</think>' in m.content %}"
        "{{ m.content.split('</think>')[-1] }}{% endif %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% for k, v in c.function.arguments"
        ".items() %}{{ k ~ v }}{% endfor %}{% endfor %}{% endfor %}",
        "{% for m in messages %}{% if m.tool_calls is defined and m.tool_calls %}"
        "{{ m.tool_calls[0].function | tojson }}{% endif %}{{ m.content[:3] }}{% endfor %}",
        "{% for m in messages %}{% if 'tool_calls' in m %}{% if m.tool_calls | length < 1 %}"
        "{{ raise_exception('no calls') }}{% endif %}{% endif %}{{ m.content }}{% endfor %}",
    ],
    ids=["added up", "trimmed", "split", "walked", "as json", "counted"],
)
def test_messages_without_content_go_through_templates(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The idioms of the families: each of them fails on a content that is missing or null."""
    tokenizer = load_tokenizer("tiny")
    monkeypatch.setattr(tokenizer, "chat_template", template)
    function = {"name": "weather", "arguments": '{"place": "Bonn"}'}
    call = {"id": "a", "type": "function", "function": function}
    for missing in ({}, {"content": None}):
        chat = [
            *CHAT,
            {"role": "assistant", "tool_calls": [call, call], **missing},
            {"role": "tool", "tool_call_id": "a", **missing},
            {"role": "assistant", "content": "So.", "tool_calls": None},
            {"role": "assistant", "refusal": "No.", "tool_calls": [], **missing},
        ]
        assert render_chat(chat, tokenizer)
        chat = [flat_message(message) for message in chat]
        assert render_chat(chat, tokenizer)


def test_tokens_of_reasoning_are_counted_the_same_however_they_come() -> None:
    """One by one or all together: those up to the end of the tag."""
    texts = ["ab", "c", "</th", "ink", ">", "x", "y"]
    found = []
    for sizes in ([1] * 7, [7], [3, 4], [6, 1]):
        reader = hermes(is_thinking=True, calls=False)
        at = 0
        for size in sizes:
            parts = texts[at : at + size]
            ends = list(accumulate(len(part) for part in parts))
            reader.push("".join(parts), range(at, at + size), ends)
            at += size
        found.append(reader.num_reasoning_tokens)
    assert found == [5] * 4
