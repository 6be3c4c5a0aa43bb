"""What stands before a text: the space of its first token, and BOS; and the texts of its tokens.

The tokenizer is of Llama's kind: its decoder strips a space in front of every text.
"""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from qllm import QLLMEngine
from qllm.server.api.answers import Tokens
from qllm.server.api.models import TokenizeRequest
from qllm.server.api.protocol import ChatRequest
from tests.support import batches
from tests.support.script import follower
from tests.support.serving import Serving, serving
from tests.support.tokenizers import sentencepiece_like

SAID = ("d", "▁Paris", "▁and", "<0xE6>", "<0x97>", "<0xA5>", "<eos>")
"""Each is followed by the next one."""
SPECIAL = ("c", "<unk>", "T", "<eos>")
"""Here too; one in the middle is special."""
PROMPT, ANSWER = "a bad", " Paris and日"
TEMPLATE = (
    "<s>{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    "{% if tools %}{{ tools[0].function.name }}{% endif %}{{ reasoning_effort }}{{ extra }}"
    "{% if add_generation_prompt %} d{% endif %}"
)
CHAT = [{"role": "user", "content": "abc"}]


@pytest.fixture(scope="module")
def spaced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Serve a model that goes on with `ANSWER`."""
    tokenizer = sentencepiece_like(("▁Paris", "▁and", "Paris"))
    tokenizer.chat_template = TEMPLATE
    follows: dict[int, int] = {}
    for chain in (SAID, SPECIAL):
        follows |= itertools.pairwise(tokenizer.convert_tokens_to_ids(list(chain)))
    how: dict[str, Any] = {"conformance": False, "threads": 1, "max_kv_tokens": 2048}
    with (
        QLLMEngine.from_model(follower(tokenizer, follows), tokenizer, **how) as engine,
        serving(engine, state_dir=tmp_path_factory.mktemp("spaced")) as made,
    ):
        yield made


def completed(served: Serving, stream: bool = False, **body: Any) -> dict[str, Any]:
    """A choice of `/v1/completions`; one that was streamed is put together."""
    how = {"temperature": 0, "max_tokens": 9, "return_token_ids": True, "stream": stream}
    answer = served.post("/v1/completions", {**how, **body})
    assert answer.status_code == 200, answer.text
    if not stream:
        found: dict[str, Any] = answer.json()["choices"][0]
        return found
    events = [line[len("data: ") :] for line in answer.text.splitlines() if line]
    parts = [json.loads(text)["choices"][0] for text in events[:-1]]
    logprobs: dict[str, list[Any]] = {}
    for part in parts:
        for name, values in (part["logprobs"] or {}).items():
            logprobs.setdefault(name, []).extend(values)
    whole = {**parts[-1], "text": "".join(part["text"] for part in parts), "logprobs": logprobs}
    return {**parts[0], **whole}


def ids_of(served: Serving, text: str, **fields: Any) -> list[int]:
    answer = served.post("/tokenize", {"prompt": text, **fields})
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["tokens"]
    return found


# -- the space


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_ids", [False, True])
def test_a_completion_goes_on_with_its_prompt(spaced: Serving, stream: bool, as_ids: bool) -> None:
    prompt: Any = ids_of(spaced, PROMPT) if as_ids else PROMPT
    assert completed(spaced, stream, prompt=prompt)["text"] == ANSWER
    shown = spaced.front.engine.tokenizer.decode(prompt) if as_ids else PROMPT
    for logprobs in (None, 0, 5):
        found = completed(spaced, stream, prompt=prompt, echo=True, logprobs=logprobs)
        assert found["text"] == shown + ANSWER


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("prompt", [PROMPT, f"<s>{PROMPT}", "é日 the  cat d", "d"])
def test_tokens_and_offsets_fit_the_text(
    spaced: Serving, prompt: str, echo: bool, stream: bool
) -> None:
    for as_ids in (False, True):
        given: Any = ids_of(spaced, prompt) if as_ids else prompt
        found = completed(spaced, stream, prompt=given, echo=echo, logprobs=5)
        text, logprobs = found["text"], found["logprobs"]
        assert echo <= text.startswith(
            spaced.front.engine.tokenizer.decode(given) if as_ids else prompt
        )
        assert "".join(logprobs["tokens"]) == text
        assert len(logprobs["tokens"]) == len(logprobs["text_offset"])
        for token, start in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            assert text[start:].startswith(token)
        rows = zip(
            logprobs["tokens"],
            logprobs["token_logprobs"],
            logprobs["top_logprobs"],
            strict=True,
        )
        assert all(top is None or top[token] == value for token, value, top in rows)
        assert [top is None for top in logprobs["top_logprobs"]].count(True) == echo


def test_a_prompt_that_ends_inside_a_character_is_continued(spaced: Serving) -> None:
    tokenizer = spaced.front.engine.tokenizer
    for num in (1, 2):
        ids = [*ids_of(spaced, "é ab"), *tokenizer.convert_tokens_to_ids(SAID[3 : 3 + num])]
        for logprobs in (None, 1):
            found = completed(spaced, prompt=ids, echo=True, logprobs=logprobs)
            both = [*found["prompt_token_ids"], *found["token_ids"][:-1]]
            assert found["text"] == tokenizer.decode(both) == "<s> é ab日"
        none = completed(spaced, prompt=ids, echo=True, logprobs=1, max_tokens=0)
        assert none["text"] == "".join(none["logprobs"]["tokens"]) == tokenizer.decode(ids)


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_looked_for_in_an_answer_may_begin_with_a_space(
    spaced: Serving, stream: bool
) -> None:
    for stop, text in ((" Paris", ""), (" and", " Paris"), ("d日", " Paris an")):
        found = completed(spaced, stream, prompt=PROMPT, stop=[stop])
        assert (found["text"], found["finish_reason"]) == (text, "stop")
    choices = [" Paris", " ab"]
    assert completed(spaced, stream, prompt=PROMPT, guided_choice=choices)["text"] == " Paris"


@pytest.mark.parametrize("stream", [False, True])
def test_special_tokens_are_shown_where_that_is_asked_for(spaced: Serving, stream: bool) -> None:
    """But for that which ends the answer; a stop string finds them in any case."""
    for skip, text in ((True, "T"), (False, "<unk>T")):
        asked: dict[str, Any] = {"prompt": "a c", "skip_special_tokens": skip, "logprobs": 1}
        found = completed(spaced, stream, **asked)
        assert found["text"] == "".join(found["logprobs"]["tokens"]) == text
        assert found["token_ids"] or stream
        for stop, before in (("T", text[:-1]), ("k>T", "<un"), ("<unk>T", ""), ("<unk>", "")):
            if not skip or stop != "k>T":
                assert completed(spaced, stream, **asked, stop=[stop])["text"] == before
        bare = completed(spaced, stream, **asked, ignore_eos=True, max_tokens=3)
        assert bare["text"] == (text if skip else f"{text}<eos>")


def test_the_text_of_ids_is_that_of_prompt_and_answer(spaced: Serving) -> None:
    found = completed(spaced, prompt=PROMPT)
    before = found["prompt_token_ids"]
    texts = [
        spaced.post("/detokenize", {"tokens": tokens}).json()["prompt"]
        for tokens in (before, [*before, *found["token_ids"][:-1]])
    ]
    assert texts[1] == texts[0] + ANSWER


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_of_every_route_goes_on_with_its_prompt(spaced: Serving, stream: bool) -> None:
    shown: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}
    routes: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": CHAT, "max_tokens": 9, **shown},
        "/v1/messages": {"model": "tiny", "messages": CHAT, "max_tokens": 9},
        "/v1/responses": {
            "input": "abc", "max_output_tokens": 9, "include": ["message.output_text.logprobs"],
        },
    }  # fmt: skip
    for path, body in routes.items():
        answer = spaced.post(path, {**body, "temperature": 0, "stream": stream})
        assert answer.status_code == 200, answer.text
        lines = answer.text.splitlines() if stream else [f"data: {answer.text}"]
        said = [
            json.loads(line[len("data: ") :])
            for line in lines
            if line.startswith("data: ") and line != "data: [DONE]"
        ]
        if path == "/v1/messages" and stream:
            text = "".join(x["delta"].get("text", "") for x in said if "delta" in x)
        elif path == "/v1/messages":
            text = said[0]["content"][0]["text"]
        elif path == "/v1/responses":
            whole = said[-1]["response"] if stream else said[0]
            (part,) = whole["output"][0]["content"]
            text, entries = part["text"], part["logprobs"]
        else:
            choices = [x["choices"][0] for x in said]
            name = "delta" if stream else "message"
            text = "".join(x[name].get("content") or "" for x in choices)
            entries = [y for x in choices for y in (x["logprobs"] or {}).get("content", ())]
        assert text == ANSWER, path
        if path != "/v1/messages":
            entries = [x for x in entries if x["token"] != "<eos>"]
            assert b"".join(bytes(x["bytes"]) for x in entries).decode() == ANSWER
            assert [x["token"] for x in entries[:2]] == [" Paris", " and"]


def test_the_first_token_of_a_text_is_shown_without_the_space_that_the_text_lacks(
    spaced: Serving,
) -> None:
    tokenizer = spaced.front.engine.tokenizer
    token_id = tokenizer.convert_tokens_to_ids("▁Paris")
    shown = Tokens(spaced.front).shown
    for added, text in ((None, " Paris"), (" Paris", " Paris"), ("Paris", "Paris"), ("", " Paris")):
        found = shown(token_id, 0.0, added)
        assert (found.token, found.data) == (text, text.encode())


def test_a_request_in_python_goes_on_with_its_prompt_in_every_way(spaced: Serving) -> None:
    engine = spaced.front.engine
    paused = engine.submit(PROMPT, max_tokens=9)
    paused.pause()
    paused.resume()
    prompt = engine.open()
    for piece in PROMPT:
        prompt.append(piece)
    assert paused.result(60).text == prompt.send(max_tokens=9).result(60).text == ANSWER
    ids = engine.tokenizer.convert_tokens_to_ids([SAID[0]])
    assert engine.submit(ids, max_tokens=9).result(60).text == ANSWER


# -- BOS


@pytest.mark.parametrize("special", [None, True, False])
@pytest.mark.parametrize("written", [0, 1, 2])
def test_a_text_has_one_bos_or_as_many_as_it_says(
    spaced: Serving, special: bool | None, written: int
) -> None:
    """On every way in that takes a text."""
    text, engine = "<s>" * written + PROMPT, spaced.front.engine
    fields: dict[str, Any] = {} if special is None else {"add_special_tokens": special}
    bos, num = engine.tokenizer.bos_token_id, written if special is False else max(written, 1)
    expected = [bos] * num + ids_of(spaced, PROMPT, add_special_tokens=False)
    assert expected.count(bos) == num
    assert ids_of(spaced, text, **fields) == expected
    assert completed(spaced, prompt=text, **fields)["prompt_token_ids"] == expected
    long = completed(spaced, prompt=text, truncate_prompt_tokens=64, **fields)
    assert long["prompt_token_ids"] == expected
    with spaced.client() as client:
        line = batches.line(0, prompt=text, return_token_ids=True, **fields)
        batch = batches.ended(client, batches.start(client, [line]).id)
        (record,) = batches.records(client, batch.output_file_id)
    assert record["response"]["body"]["choices"][0]["prompt_token_ids"] == expected
    if special is not False:
        assert list(engine.submit(text, max_tokens=1).result(60).prompt_token_ids) == expected
        with engine.open(prompt=text) as prompt:
            assert prompt.num_tokens == len(expected)
            assert list(prompt.send(max_tokens=1).prompt_token_ids) == expected


def test_a_prompt_that_came_in_pieces_cannot_leave_bos_out(spaced: Serving) -> None:
    name = spaced.post("/v1/prompts", {"prompt": PROMPT}).json()["id"]
    wrong = spaced.post("/v1/completions", {"prompt_id": name, "add_special_tokens": False})
    assert (wrong.status_code, "add_special_tokens=False" in wrong.text) == (400, True)
    assert spaced.post("/v1/completions", {"prompt_id": name}).status_code == 200


TOOLS = [{"type": "function", "function": {"name": "abc", "parameters": {"type": "object"}}}]
OF_CHATS: dict[str, dict[str, Any]] = {
    "tools": {"tools": TOOLS},
    "chat_template_kwargs": {"chat_template_kwargs": {"extra": "e"}},
    "reasoning_effort": {"reasoning_effort": "high"},
    "add_generation_prompt": {"add_generation_prompt": False},
    "continue_final_message": {"add_generation_prompt": False, "continue_final_message": True},
    "add_special_tokens": {"add_special_tokens": True},
}


def test_tokenize_takes_every_field_of_a_chat_and_counts_what_it_comes_to(spaced: Serving) -> None:
    assert {*TokenizeRequest.of_chats, "add_special_tokens"} == set(OF_CHATS)
    assert set(OF_CHATS) <= set(ChatRequest.model_fields)
    plain = spaced.post("/tokenize", {"messages": CHAT}).json()
    assert plain["max_model_len"] == spaced.front.max_model_len
    for name, fields in OF_CHATS.items():
        body = {"messages": CHAT, **fields}
        counted = spaced.post("/tokenize", body)
        assert counted.status_code == 200, counted.text
        asked = {**body, "max_tokens": 1, "return_token_ids": True}
        answer = spaced.post("/v1/chat/completions", asked)
        assert answer.status_code == 200, answer.text
        tokens = counted.json()["tokens"]
        assert tokens == answer.json()["prompt_token_ids"], name
        assert tokens.count(spaced.front.engine.tokenizer.bos_token_id) == 1
        is_same = name in ("add_special_tokens", "continue_final_message")
        assert is_same or tokens != plain["tokens"], name


@pytest.mark.parametrize("name", TokenizeRequest.of_chats)
def test_fields_of_a_chat_go_with_messages(spaced: Serving, name: str) -> None:
    wrong = spaced.post("/tokenize", {"prompt": "a", **OF_CHATS[name]})
    assert (wrong.status_code, "go with messages" in wrong.text) == (400, True)
