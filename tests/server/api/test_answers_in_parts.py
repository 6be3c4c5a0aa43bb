"""Every character of an answer is in one place: content, reasoning, arguments or a tag."""

import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise, permutations, product
from types import SimpleNamespace
from typing import Any

import pytest

from qllm.frontend.detokenizer import Detokenizer
from qllm.grammar import Vocabulary
from qllm.runner.sampling.thinking import Thinking
from qllm.server.api.calls import make_reader
from qllm.server.tools.deltas import merged
from qllm.server.tools.harmony import MARKS
from qllm.server.tools.tool_choice import Choice
from qllm.types import THINK, THOUGHT
from tests.support.script import byte_level, engine_of, id_of
from tests.support.serving import Serving, serving

OPEN, CLOSE = "<tool_call>", "</tool_call>"
TAGS = (THINK, THOUGHT, OPEN, CLOSE)
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {}}} for name in ("f", "look_up")
]
CHOICE = Choice(TOOLS, False, True)

PARTS = [
    THINK, THOUGHT, OPEN, CLOSE, " SOME WORDS.", "\n", "`", "A < B", "É🎉",
    OPEN + '{"name": "f", "arguments": {"T": "A </tool_call> <think> B"}}' + CLOSE,
    OPEN + '\n{"arguments": {"T": "A </tool_call> B"}, "name": "f"}\n' + CLOSE,
    OPEN + '{"name": "f", "parameters": {"X": 1}}' + CLOSE,
    OPEN + '{"name": "f", "INPUT": {"X": 1}}' + CLOSE,
    OPEN + '{"name": "f", "arguments": {"X": 1}, "MORE": 5}' + CLOSE,
    OPEN + '{"name": "f", "arguments": {"X": 1}}', OPEN + '{"name": "f"}' + CLOSE,
    '{"name": ', '"arguments": {', "}", '"',
]  # fmt: skip
"""What is said is in capitals and digits, markup is not: so markup alone may be left out."""
MARKUP = set(' \n<>/_{}:,"' + "".join(TAGS) + "namefargumentsparameters")


def transcripts(seed: int, count: int) -> Iterator[str]:
    rng = random.Random(seed)
    for _ in range(count):
        yield "".join(rng.choices(PARTS, k=rng.randint(1, 6)))
    for first, second in rng.sample([*product(PARTS, PARTS)], 100):
        yield first + second


def tokens_of(text: str, special: Sequence[str], cuts: random.Random | None) -> list[str]:
    """Tokens of a text: those that are special are whole, the rest is cut anywhere."""
    found = []
    for part in re.split("|".join(f"({re.escape(tag)})" for tag in special) or "$^", text):
        if part in special:
            found.append(part)
        elif part:
            ends = [n for n in range(1, len(part)) if cuts is None or cuts.random() < 0.4]
            found += [part[a:b] for a, b in pairwise((0, *ends, len(part)))]
    return found


class Words:
    """A tokenizer whose tokens are those of a list; some are special."""

    chat_template = "<think>"
    unk_token_id = None

    def __init__(self, special: Sequence[str] = ()) -> None:
        self.words: list[str] = list(special)
        self.added_tokens_decoder = {
            i: SimpleNamespace(content=text, special=True) for i, text in enumerate(special)
        }

    def ids(self, words: Sequence[str]) -> list[int]:
        for word in words:
            if word not in self.words:
                self.words.append(word)
        return [self.words.index(word) for word in words]

    def convert_tokens_to_ids(self, text: str) -> int | None:
        return self.words.index(text) if text in self.words else None

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False, **_: Any) -> str:
        gone = self.added_tokens_decoder if skip_special_tokens else ()
        return "".join(self.words[i] for i in ids if i not in gone)


def read(
    tokenizer: Words,
    ids: Sequence[int],
    prompt: Sequence[int],
    sizes: random.Random | None,
    **params: Any,
) -> dict[str, Any]:
    """A whole message, of tokens that come one by one or several together."""
    reader = make_reader(tokenizer, prompt, CHOICE, False)
    text_of = Detokenizer(
        tokenizer, reading=lambda: make_reader(tokenizer, prompt, CHOICE, False), **params
    )
    made, rest, stopped = [], list(ids), False
    while rest and not stopped:
        num = 1 if sizes is None else sizes.randint(1, 5)
        text, taken, ends = "", rest[:num], []
        for token_id in taken:
            part, stopped = text_of.push([token_id]) if not stopped else ("", True)
            text += part
            ends.append(len(text))
        made.append(reader.push(text, taken, ends))
        rest = rest[num:]
    made += [reader.push(text_of.finish(), ()), reader.finish()]
    found = merged(made)
    found["calls"] = [
        (call["function"]["name"], call["function"]["arguments"])
        for call in found.pop("tool_calls", ())
    ]
    return found


def left_of(text: str, found: dict[str, Any]) -> str:
    """The characters of an answer that no field has."""
    shown = [found.get("reasoning_content", ""), found.get("content", "")]
    shown += [arguments for _, arguments in found["calls"]]
    counts = Counter(text)
    counts.subtract("".join(shown))
    assert min(counts.values(), default=0) >= 0, "a character is shown twice, or was never said"
    return "".join(counts.elements())


PROMPTS = ["<|im_start|>assistant", "<|im_start|>assistant" + THINK]


@pytest.mark.parametrize("special", [(), TAGS, TAGS[:2], (THOUGHT,)], ids=len)
@pytest.mark.parametrize("prompt", PROMPTS, ids=["", "opened"])
def test_no_character_is_lost_however_an_answer_comes(special: Sequence[str], prompt: str) -> None:
    rng = random.Random(len(special))
    tokenizer = Words(special)
    begun = tokenizer.ids(tokens_of(prompt, special, rng))
    for text in transcripts(len(special), 40):
        letters = tokenizer.ids(tokens_of(text, special, None))
        whole = read(tokenizer, letters, begun, None)
        assert set(left_of(text, whole)) <= MARKUP, text
        together = read(tokenizer, letters, begun, rng)
        assert together == whole, text
        others = tokenizer.ids(tokens_of(text, special, rng))
        assert read(tokenizer, others, begun, rng) == whole, text
        for name, arguments in whole["calls"]:
            assert name == "f"
            assert arguments.startswith("{")


@pytest.mark.parametrize("special", [(), TAGS, TAGS[:2], (THOUGHT,)], ids=len)
@pytest.mark.parametrize("prompt", PROMPTS, ids=["", "opened"])
def test_a_budget_counts_only_what_is_shown_as_reasoning(
    special: Sequence[str], prompt: str
) -> None:
    rng, tokenizer = random.Random(len(special)), Words(special)
    begun = tokenizer.ids(tokens_of(prompt, special, rng))
    vocabulary = Vocabulary(tokenizer, 10**6, frozenset())
    for text in transcripts(len(special), 40):
        reader = make_reader(tokenizer, begun, CHOICE, False)
        reading, thinking = reader, Thinking(None, vocabulary, begun)
        text_of = Detokenizer(tokenizer, reading=lambda reading=reading: reading)
        ids = tokenizer.ids(tokens_of(text, special, None))
        for num, token_id in enumerate(ids, 1):
            text_of.push([token_id])
            thinking.forced(ids[:num])
            assert reader.is_thinking or not thinking.is_inside, text
            if OPEN not in text:
                assert thinking.is_inside == reader.is_thinking, text


def test_no_character_is_lost_wherever_an_answer_is_cut_off() -> None:
    for special in ((), TAGS):
        tokenizer = Words(special)
        for text in islice(transcripts(7, 12), 12):
            letters = tokenizer.ids(tokens_of(text, special, None))
            for num in range(len(letters)):
                shown = read(tokenizer, letters[:num], (), None)
                said = tokenizer.decode(letters[:num])
                assert set(left_of(said, shown)) <= MARKUP, said


@pytest.mark.parametrize("special", [(), TAGS], ids=["spelled", "tokens"])
def test_a_stop_string_ends_what_is_said_and_never_the_reasoning(special: Sequence[str]) -> None:
    tokenizer = Words(special)
    for text in islice(transcripts(3, 120), 120):
        ids = tokenizer.ids(tokens_of(text, special, None))
        whole = read(tokenizer, ids, (), None)
        said = whole.get("content", "") + "".join(x for _, x in whole["calls"])
        for stop in ("ORD", "B", "1", "😀", "S.\n"):
            cut = read(tokenizer, ids, (), random.Random(0), stop=(stop,))
            if stop not in said:
                assert cut == whole, (text, stop)
            elif not whole["calls"]:
                assert cut.get("content", "") == said[: said.index(stop)], (text, stop)
            thought, all_of_it = (x.get("reasoning_content", "") for x in (cut, whole))
            assert all_of_it.startswith(thought)
            if stop in thought:
                stops = tokenizer.ids([stop]) if len(stop) == 1 else ()
                ended = read(tokenizer, ids, (), None, stop_ids=frozenset(stops))
                assert ended.get("reasoning_content", "").startswith(thought)


@pytest.mark.parametrize("special", [(), TAGS], ids=["spelled", "tokens"])
@pytest.mark.parametrize("order", list(permutations(["name", "arguments", "id"])))
@pytest.mark.parametrize("alias", ["arguments", "parameters"])
def test_a_tag_inside_an_argument_ends_nothing(
    special: Sequence[str], order: Sequence[str], alias: str
) -> None:
    written = '{"T": "A </tool_call> <tool_call> \\" } B"}'
    fields = {"name": '"name": "f"', "arguments": f'"{alias}": {written}', "id": '"id": "1"'}
    text = f"SO {OPEN}\n{{{', '.join(fields[name] for name in order)}}}\n{CLOSE}\n DONE"
    tokenizer = Words(special)
    for cuts in (None, random.Random(1)):
        found = read(tokenizer, tokenizer.ids(tokens_of(text, special, cuts)), (), None)
        assert found == {"content": "SO DONE", "calls": [("f", written)]}


@pytest.mark.parametrize("special", [(), TAGS], ids=["spelled", "tokens"])
@pytest.mark.parametrize("name", [r'"\ud83d"', r'"f\udc00"', '""', "null", "7", r'"\x"'])
@pytest.mark.parametrize(
    "order", ['"name": {}, "arguments": {{}}', '"arguments": {{}}, "name": {}']
)
def test_a_call_without_a_name_that_can_be_sent_is_text(
    special: Sequence[str], name: str, order: str
) -> None:
    tokenizer, text = Words(special), f"{OPEN}{{{order.format(name)}}}{CLOSE}"
    for cuts in (None, random.Random(1)):
        ids = tokenizer.ids(tokens_of(text, special, cuts))
        assert read(tokenizer, ids, (), cuts) == {"content": text, "calls": []}


@pytest.mark.parametrize("key", ["args", "input", "params", "Arguments", "arguments "])
def test_a_call_whose_arguments_are_not_understood_is_text(key: str) -> None:
    tokenizer, text = Words(), f'{OPEN}{{"name": "f", "{key}": {{"x": 1}}}}{CLOSE}'
    assert read(tokenizer, tokenizer.ids([*text]), (), None) == {"content": text, "calls": []}
    text = f'{OPEN}{{"name": "f"}}{CLOSE}'
    assert read(tokenizer, tokenizer.ids([*text]), (), None) == {"calls": [("f", "{}")]}


# -- forms that a tokenizer reads by its `response_template`

CALLED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
JSON_CALL: dict[str, Any] = {
    "content": "json",
    "transform": {
        "type": "function",
        "function": {"name": "{content.name}", "arguments": "{content.arguments}"},
    },
}
XML = {
    "content": "xml-inline",
    "content_args": {"tag_pattern": r"<parameter=(?P<key>\w+)>(?P<value>.*?)</parameter>"},
}
LINES = {"content": "kv-lines"}
NAMED = {"open_pattern": r"<call (?P<name>\w+)>", "close": "</call>", "transform": CALLED}
THOUGHTS = {"open": "<think>", "close": "</think>"}
FIELDS: list[dict[str, Any]] = [
    {
        "content": {},
        "thinking": THOUGHTS,
        "tool_calls": {"open": OPEN, "close": CLOSE, "repeats": True, **JSON_CALL},
    },
    {"content": {}, "tool_calls": {**NAMED, **XML, "repeats": True}},
    {"content": {}, "tool_calls": {**NAMED, **LINES, "repeats": True}},
    {"content": {"open": "<say>", "close": "</say>"}, "thinking": THOUGHTS},
    {"content": {}, "thinking": THOUGHTS, "citations": {"open": "<cite>", "close": "</cite>"}},
    {"content": {}, "tool_calls": {"open": OPEN, "close": CLOSE, "content": "json"}},
]
"""Fields of templates that checkpoints may have; each loses what it has no place for."""
SAID = [
    "WORDS. ", "<think>HMM</think>", "<think>MORE", "</think>", "<say>SAID</say>",
    "<cite>THERE</cite>", "<call look_up><parameter=x>ONE\n</parameter> ASIDE </call>",
    "<call f><parameter=x>A</parameter><parameter=x>B</parameter></call>", "<call f>",
    "<call f>x: LINE\ny LOST</call>",
    *(f"{OPEN}{call}{CLOSE}" for call in (
        '{"name": "f", "arguments": {"x": "Q\\nR"}}', '{"name": "\\ud83d", "arguments": {}}',
        '{"name": "f", "arguments": {"x": "HALF \\ud83d"}}', '{"name": "f", "arguments": "NONE"}',
        '{"name": "f", "arguments": {"x": "É", "x": "TWICE"}}', '{"INPUT": {}}',
        '{"name": "f", "arguments": {"x": 1}, "MORE": "Z"}', '{"name": "f", "arguments": [7]}',
        '[{"name": "f", "arguments": {"x": "IN A LIST"}}]',
    )),
]  # fmt: skip


@pytest.mark.parametrize("fields", FIELDS, ids=lambda fields: "-".join(fields))
def test_no_word_is_lost_that_a_response_template_has_no_place_for(fields: dict[str, Any]) -> None:
    rng, tokenizer = random.Random(len(fields)), byte_level([], [])
    tokenizer.response_template = {"start_anchor": "assistant", "fields": fields}
    num_calls = 0
    for parts in [*product(SAID), *product(SAID, SAID), *(rng.choices(SAID, k=4) for _ in "1234")]:
        text = "".join(parts)
        ids = tokenizer(text)["input_ids"]
        reader = make_reader(tokenizer, tokenizer("assistant")["input_ids"], CHOICE, False)
        assert reader.push(text, ids) == {}
        found = reader.finish()
        calls = found.get("tool_calls", ())
        num_calls += len(calls)
        assert reader.num_calls == len(calls)
        shown = f"{found.get('content')} {found.get('reasoning_content')} "
        for call in calls:
            json.dumps(call, ensure_ascii=False).encode()
            arguments = json.loads(call["function"]["arguments"])
            shown += f"{call['function']} {' '.join(map(str, arguments.values()))}"
        said = re.findall(r"[A-ZÉ]+", text.replace("\\n", " "))
        assert not Counter(said) - Counter(re.findall("[A-ZÉ]+", shown)), (text, found)
    assert fields.get("tool_calls", {}).get("repeats", False) == (num_calls > 0)


# -- GPT-OSS's form

KINDS = {
    "<|channel|>analysis<|message|>HMM, WORDS.<|end|>": "reasoning_content",
    "<|start|>assistant<|channel|>analysis<|message|>MORE.<|end|>": "reasoning_content",
    '<|start|>assistant to=f<|channel|>commentary json<|message|>{"X": 1}<|call|>': "calls",
    '<|start|>assistant<|channel|>commentary to=functions.f<|message|>{"X": 2}<|call|>': "calls",
    '<|channel|>analysis to=look_up <|constrain|>json<|message|>{"X": 3}<|call|>': "calls",
    "<|channel|>final<|message|>É🎉 SAID.<|return|>": "content",
    "<|channel|>commentary<|message|>BEFORE.<|end|>": "content",
    "PLAIN": "content",
}


def test_no_character_of_gpt_oss_is_lost() -> None:
    rng, tokenizer = random.Random(0), Words(MARKS)
    tokenizer.chat_template = "<|channel|>"
    begun = tokenizer.ids(tokens_of("<|start|>assistant", MARKS, None))
    for parts in [*product(KINDS, KINDS), *(rng.choices(list(KINDS), k=4) for _ in range(30))]:
        text = "".join(parts)
        want: dict[str, str] = {"content": "", "reasoning_content": "", "calls": ""}
        for part in parts:
            want[KINDS[part]] += part.split("<|message|>")[-1].partition("<|")[0]
        for cuts, sizes in ((None, None), (None, rng), (rng, rng)):
            found = read(tokenizer, tokenizer.ids(tokens_of(text, MARKS, cuts)), begun, sizes)
            found["calls"] = "".join(arguments for _, arguments in found["calls"])
            assert {name: found.get(name, "") for name in want} == want, text
        ids = tokenizer.ids(tokens_of(text, MARKS, None))
        for stop in ("WORD", "analysis", "MORE"):
            assert (
                read(tokenizer, ids, begun, rng, stop=(stop,))["calls"]
                == read(tokenizer, ids, begun, rng)["calls"]
            ), "reasoning, or a head, has ended the answer"


# -- over HTTP

ANSWERS = [
    [THINK, "I reason. STOP", THOUGHT, "Four.", " STOP", " more"],
    [OPEN, '{"name": "f", "arguments": {"x": 1}}', CLOSE],
    ["text ", "<|im_start|>", "other"],
    ["Use the `", "<think", "> tag", "` to reason", " aloud."],
]


@pytest.fixture(scope="module")
def scripted() -> Iterator[Serving]:
    with engine_of(ANSWERS, TAGS) as engine, serving(engine) as made:
        yield made


def asked(scripted: Serving, number: int, **more: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "x"}], "temperature": 0, **more}
    answer = scripted.post(
        "/v1/chat/completions", {**body, "chat_template_kwargs": {"start": f"<S{number}>"}}
    ).json()
    (choice,) = answer["choices"]
    return {**choice["message"], "why": choice["finish_reason"]}


def test_tags_that_are_special_tokens_are_tags(scripted: Serving) -> None:
    found = asked(scripted, 0)
    assert (found["reasoning_content"], found["content"]) == ("I reason. STOP", "Four. STOP more")
    found = asked(scripted, 0, stop=["STOP"])
    assert (found["reasoning_content"], found["content"]) == ("I reason. STOP", "Four. ")
    (call,) = asked(scripted, 1, tools=TOOLS)["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"x": 1}


def test_a_stop_string_may_be_a_special_token(scripted: Serving) -> None:
    for stop in ("<|im_start|>", " <|im_start|>", "<|im_start|>other"):
        found = asked(scripted, 2, stop=[stop])
        assert (found["content"].strip(), found["why"]) == ("text", "stop")
    body = {"prompt": "<S2>", "stop": ["<|im_start|>"], "temperature": 0}
    assert scripted.post("/v1/completions", body).json()["choices"][0]["text"] == "text "


def test_an_answer_may_speak_of_a_tag(scripted: Serving) -> None:
    found = asked(scripted, 3)
    assert found["content"] == "Use the `<think> tag` to reason aloud."
    assert "reasoning_content" not in found


def test_a_stop_id_does_not_end_the_reasoning(scripted: Serving) -> None:
    tokenizer = scripted.front.engine.tokenizer
    inside, behind = (id_of(tokenizer, text) for text in ("I reason. STOP", "Four."))
    found = asked(scripted, 0, stop_token_ids=[inside])
    assert (found["content"], found["why"]) == ("Four. STOP more", "stop")
    found = asked(scripted, 0, stop_token_ids=[inside, behind])
    assert (found["reasoning_content"], found["content"]) == ("I reason. STOP", "Four.")
