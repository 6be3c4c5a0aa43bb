"""Text that comes in pieces has the ids of the whole; what is wrong is said, and loses nothing."""

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qllm import QLLMEngine, SamplingParams
from qllm.errors import (
    ConfigError,
    ContextLengthError,
    InvalidRequestError,
    QueueFullError,
    RequestFailedError,
)
from qllm.frontend.handle import Result
from qllm.frontend.incremental_tokens import HELD, SET_ASIDE, IncrementalText
from qllm.frontend.streaming_prompt import PIECE_TOKENS, StreamingPrompt, common_prefix
from qllm.ingress import Revision
from qllm.types import FinishReason, RequestStatus, StructuredOutputs
from tests.support.families import VOCAB, make_model
from tests.support.streaming_prompts import Engine, ids_of
from tests.support.waiting import wait_for


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model("qwen3_moe", torch.bfloat16)


@pytest.fixture(scope="module")
def small(model: Any) -> Iterator[Engine]:
    with Engine(model, prefix_cache=False) as made:
        yield made


@pytest.fixture(scope="module")
def cached(model: Any) -> Iterator[Engine]:
    made = Engine(make_model("qwen3_moe", torch.bfloat16), prefix_cache=True)
    with made:
        yield made


# -- text


@pytest.fixture(scope="module")
def tiny() -> Iterator[QLLMEngine]:
    with QLLMEngine.from_pretrained("tiny", threads=1, conformance=False) as made:
        yield made


ALPHABET = "ab  \n\t.,'0123Ωé你🙂\u0301"


@settings(max_examples=60, deadline=None)
@given(
    text=st.text(alphabet=ALPHABET, min_size=1, max_size=400),
    cuts=st.lists(st.integers(0, 400), max_size=8),
    back=st.integers(0, 30),
)
def test_ids_are_those_of_the_whole_text(
    tiny: QLLMEngine, text: str, cuts: list[int], back: int
) -> None:
    prompt = tiny.open("LS")
    marks = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    for a, b in pairwise(marks):
        prompt.append(text[a:b])
    num, now = prompt.num_tokens, text
    if back and num:
        keep = max(0, num - back)
        prompt.replace(keep, "end of it")
        now = text_of(prompt)
        assert now.endswith("end of it")
        assert text.startswith(now[: -len("end of it")])
    result = prompt.send(1).result(300)
    assert list(result.prompt_token_ids) == tiny.tokenizer(now)["input_ids"]


def text_of(prompt: StreamingPrompt) -> str:
    tokens = prompt._tokens
    assert isinstance(tokens, IncrementalText)
    return tokens.text


WORDS = "The crawler found 12 pages; it's reading the third one, slowly.\n\nThen  more. "


@pytest.mark.parametrize("size", [1, 7, 64, 333])
def test_text_in_pieces_is_not_tokenised_as_a_whole_each_time(tiny: QLLMEngine, size: int) -> None:
    text = WORDS * 30
    tokens = IncrementalText(tiny.tokenizer, lambda text: tiny.tokenizer(text)["input_ids"])
    asked: list[int] = []
    encode = tokens._encode
    tokens._encode = lambda text, special: (asked.append(len(text)), encode(text, special))[1]  # type: ignore[method-assign]
    for at in range(0, len(text), size):
        tokens.append(text[at : at + size])
    tokens.look()
    assert tokens.token_ids == tokens.finish()
    assert tokens.num_whole == 0
    assert max(asked) < 64 + size + 500


def test_a_tokenizer_that_says_no_offsets_is_asked_now_and_then() -> None:
    class Slow:
        asked = 0

        def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
            self.asked += len(text)
            return {"input_ids": [ord(c) % 64 for c in text]}

    slow = Slow()
    tokens = IncrementalText(slow, lambda text: slow(text)["input_ids"])
    for _ in range(2000):
        tokens.append(WORDS[:10])
    assert slow.asked < 10 * 20_000
    assert tokens.finish() == slow(WORDS[:10] * 2000)["input_ids"]
    with pytest.raises(InvalidRequestError, match="does not say where in the text"):
        tokens.replace(5, "x")
    tokens.replace(0, "abc")
    assert tokens.text == "abc"


def append_all(prompt: StreamingPrompt, text: str) -> None:
    for c in text:
        prompt.append(c)


def test_a_hundred_thousand_pieces_of_one_byte(tiny: QLLMEngine) -> None:
    text = (WORDS * 100_000)[:100_000]
    with QLLMEngine.from_pretrained(
        "tiny", run_in="thread", threads=1, conformance=False, max_kv_tokens=65_536
    ) as made:
        longest = made._client.info.shape.max_position
        prompt = made.open("LS")
        with pytest.raises(ContextLengthError, match="so far, and at most"):
            append_all(prompt, text)
        assert prompt.num_tokens > longest - HELD - 64
        prompt.replace(50, "short")
        prompt.send(1).result(300)
        # nothing was lost, and the engine heard of pieces, not of bytes
        assert prompt.handle.result().metrics.num_revisions <= longest // PIECE_TOKENS + 8


def test_the_last_message_of_a_chat_grows(tiny: QLLMEngine) -> None:
    chat = [{"role": "system", "content": "You read."}, {"role": "user", "content": "Read: "}]
    want = tiny.submit([chat[0], {**chat[1], "content": "Read: " + WORDS * 9}], "LS", 6).result(300)
    prompt = tiny.open("LS", chat)
    for at in range(0, len(WORDS) * 9, 100):
        prompt.append((WORDS * 9)[at : at + 100])
    found = prompt.send(6).result(300)
    assert found.prompt_token_ids == want.prompt_token_ids
    assert found.text == want.text
    assert found.metrics.revise_lost_tokens == 0
    prompt = tiny.open("LS", chat)
    with pytest.raises(InvalidRequestError, match=r"from_token=1 must be an integer in \["):
        prompt.replace(1, "the template's own tokens")
    prompt.replace(0, "All of it is new.")
    want = tiny.submit([chat[0], {**chat[1], "content": "All of it is new."}], "LS", 6).result(300)
    assert prompt.send(6).result(300).text == want.text


# -- ways to use it


def test_async(tiny: QLLMEngine) -> None:
    async def pages() -> AsyncIterator[str]:
        for i in range(5):
            await asyncio.sleep(0)
            yield f"page {i}. "

    async def ask() -> tuple[Result, str, str]:
        async with tiny.open("LS") as prompt:
            await prompt.extend(pages())
            handle = prompt.send(5)
            text = "".join([piece.text async for piece in handle])
            result = await handle
        async with tiny.open("LS") as left:
            left.append("nobody sends this")
        return result, text, str(left.handle.finish_reason)

    result, text, left = asyncio.run(ask())
    want = tiny.submit("".join(f"page {i}. " for i in range(5)), "LS", 5).result(300)
    assert (result.token_ids, result.text, text) == (want.token_ids, want.text, want.text)
    assert left == FinishReason.CANCELLED


def test_a_stop_string_ends_the_answer(tiny: QLLMEngine) -> None:
    want = tiny.submit(WORDS, "LS", 30).result(300).text
    stop = want[8:12]
    assert stop
    prompt = tiny.open("LS", WORDS[:20])
    prompt.append(WORDS[20:])
    result = prompt.send(30, stop=stop).result(300)
    assert (result.finish_reason, result.text) == (FinishReason.STOP, want[: want.find(stop)])


def test_a_form_of_the_answer(tiny: QLLMEngine) -> None:
    form = StructuredOutputs(regex="[0-9]{4} [a-z]{3}")
    asks = SamplingParams(temperature=1.0, seed=3, structured_outputs=form)
    want = tiny.submit(WORDS, "LS", 30, sampling=asks).result(300)
    prompt = tiny.open("LS", WORDS[:20])
    prompt.append(WORDS[20:])
    found = prompt.send(30, sampling=asks).result(300)
    assert (found.token_ids, found.text) == (want.token_ids, want.text)
    assert re.fullmatch(str(form.regex), found.text)


def test_times_count_from_the_last_piece_and_from_the_first(tiny: QLLMEngine) -> None:
    prompt = tiny.open("LS", "a b c")
    opened = prompt.handle
    wait_for(lambda: opened.status is RequestStatus.OPEN)
    threading.Event().wait(0.05)
    metrics = prompt.send(2).result(300).metrics
    assert metrics.open_ms is not None
    assert metrics.open_ms >= 50
    assert metrics.ttft_ms is not None
    assert metrics.e2e_ms is not None
    whole = tiny.submit("a b c", "LS", 2).result(300).metrics
    assert whole.open_ms is None
    assert whole.num_revisions == 0


# -- bad input


def test_what_was_sent_is_closed(tiny: QLLMEngine) -> None:
    prompt = tiny.open("LS", "text")
    prompt.send(1).result(300)
    for call in (
        lambda: prompt.append("x"),
        lambda: prompt.replace(0, "x"),
        lambda: prompt.send(1),
    ):
        with pytest.raises(InvalidRequestError, match="was sent"):
            call()
    prompt.cancel()
    gone = tiny.open("LS", "text")
    gone.cancel()
    gone.cancel()
    with pytest.raises(RequestFailedError, match="has ended"):
        gone.append("x" * 200)
    with pytest.raises(RequestFailedError, match="has ended"):
        gone.send(1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: p.replace(-1, "x"), r"from_token=-1 must be an integer in \[0, "),
        (lambda p: p.replace(99, "x"), r"from_token=99 must be an integer in \[0, .*tokens so far"),
        (lambda p: p.replace("3", "x"), "from_token='3'"),
        (lambda p: p.replace(True, "x"), "from_token=True"),
        (lambda p: p.append(b"x"), "must be text"),
        (lambda p: p.append([1, 2]), "must be text"),
        (lambda p: p.append(None), "must be text"),
        (lambda p: p.append("\ud800"), "a piece"),
        (lambda p: p.replace(0, "\ud800"), "a piece"),
        (lambda p: p.send(0), "max_tokens=0"),
        (lambda p: p.send(1, min_tokens=2), "min_tokens=2 must"),
        (lambda p: p.send(1, timeout_s=-1), "timeout_s"),
        (lambda p: p.send(1, temperature=-1), "temperature"),
        (lambda p: p.send(1, sampling=SamplingParams(n=2)), "n=2"),
    ],
)
def test_bad_input_leaves_a_prompt_as_it_was(
    tiny: QLLMEngine, call: Callable[[StreamingPrompt], Any], message: str
) -> None:
    prompt = tiny.open("LS", "some words")
    with pytest.raises(InvalidRequestError, match=message):
        call(prompt)
    prompt.append("")  # nothing is something too
    assert (
        list(prompt.send(1).result(300).prompt_token_ids)
        == tiny.tokenizer("some words")["input_ids"]
    )


def test_bad_input_of_ids(small: Engine) -> None:
    for piece in ([VOCAB], [-1], ["a"], [1.5], "text", 5):
        prompt = small.engine.open("LS", [1, 2])
        with pytest.raises(InvalidRequestError):
            prompt.append(piece)  # type: ignore[arg-type]
        assert prompt.num_tokens == 2
        prompt.cancel()
    for wrong in (
        "no tokenizer here",
        [VOCAB],
        [{"role": "user"}],
        [{"role": "user", "content": "x"}],
    ):
        with pytest.raises(InvalidRequestError):
            small.engine.open("LS", wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="is empty"):
        small.engine.open("LS").send(1)
    emptied = small.engine.open("LS", [1, 2, 3])
    emptied.replace(0, [])
    with pytest.raises(InvalidRequestError, match="no tokens"):
        emptied.send(1)
    emptied.cancel()
    with pytest.raises(InvalidRequestError, match="priority"):
        small.engine.open("best")
    small.engine.call(lambda: None)
    small.engine.call(small.loop.scheduler.check)


def test_a_loop_that_cannot_serve_it_says_so(
    small: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small.engine.config.__class__(max_kv_tokens=64)
    object.__setattr__(config, "loop", "conditional")
    monkeypatch.setattr(type(small.engine._client), "config", config)
    with pytest.raises(ConfigError, match="takes whole prompts only"):
        small.engine.open("LS")


def test_a_full_ring_loses_no_piece(tiny: QLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    front_end = tiny._client._front_end  # type: ignore[attr-defined]
    want = tiny.submit(WORDS * 9, "LS", 5).result(300)
    prompt, revise, is_full = tiny.open("LS"), front_end.revise, [True]

    def full(item: Revision) -> None:
        if is_full[0]:
            raise QueueFullError("full")
        revise(item)

    monkeypatch.setattr(front_end, "revise", full)
    prompt.append(WORDS * 5)
    prompt.append(WORDS * 4)
    with pytest.raises(QueueFullError):
        prompt.send(5)
    is_full[0] = False
    assert prompt.send(5).result(300).token_ids == want.token_ids


def test_an_engine_that_closes_ends_open_prompts(model: Any) -> None:
    made = Engine(make_model("qwen3_moe", torch.bfloat16))
    prompt = made.engine.open("LS", ids_of(40))
    made.engine.close()
    assert prompt.handle.finish_reason is FinishReason.CANCELLED
    with pytest.raises(RequestFailedError, match="has ended"):
        prompt.append(ids_of(40))


def test_many_threads_grow_prompts_of_their_own(tiny: QLLMEngine) -> None:
    texts = [f"{i} " + WORDS * (1 + i % 3) for i in range(6)]
    want = [tiny.submit(text, "LS", 4).result(300).token_ids for text in texts]
    found: dict[int, Any] = {}

    def grow(i: int) -> None:
        prompt = tiny.open("BE" if i % 2 else "LS")
        for at in range(0, len(texts[i]), 13):
            prompt.append(texts[i][at : at + 13])
        found[i] = prompt.send(4).result(300).token_ids

    threads = [threading.Thread(target=grow, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(6)] == want


def test_common_prefix() -> None:
    assert [common_prefix(a, b) for a, b in (([], [1]), ([1, 2], [1, 2, 3]), ([1, 2], [1, 3]))] == [
        0,
        2,
        1,
    ]


class Counting:
    """A tokenizer of one token per character, which counts the characters that it is given."""

    is_fast = True

    def __init__(self, agrees: bool = True) -> None:
        self.num_chars, self.agrees = 0, agrees

    def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> dict[str, Any]:
        self.num_chars += len(text)
        shift = 0 if self.agrees else len(text)  # every token depends on all of the text
        ids = [(ord(c) + shift) % 64 for c in text]
        return {"input_ids": ids, "offset_mapping": [(i, i + 1) for i in range(len(text))]}


@pytest.mark.parametrize("agrees", [True, False])
@pytest.mark.parametrize("step", [1, 100])
def test_the_characters_that_are_tokenised_grow_with_the_text_alone(
    agrees: bool, step: int
) -> None:
    """Not with its square: also where the context never comes out as it was."""
    for size in (20_000, 100_000):
        tokenizer = Counting(agrees)
        tokens = IncrementalText(tokenizer, lambda text, t=tokenizer: t(text)["input_ids"])  # type: ignore[misc]
        for at in range(0, size, step):
            tokens.append("abcdefghij"[(at // step) % 10] * step)
        assert tokenizer.num_chars < 16 * size
        assert tokens.num_bytes == size
        assert bool(tokens.num_whole) is not agrees
        assert not agrees or len(tokens._tail) < 2 * SET_ASIDE  # what is joined with each piece
        tokens.look()
        assert tokens.token_ids == tokens.finish()


def test_telling_the_engine_looks_at_no_token_that_cannot_have_changed(
    tiny: QLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = [0]

    def counted(a: Any, b: Any) -> int:
        seen[0] += len(a)
        return common_prefix(a, b)

    monkeypatch.setattr("qllm.frontend.streaming_prompt.common_prefix", counted)
    prompt = tiny.open("LS")
    append_all(prompt, WORDS * 60)
    assert seen[0] < 1000
    prompt.replace(prompt.num_tokens - 3, "x")
    assert seen[0] < 1000
    prompt.cancel()


def test_what_is_refused_first_does_not_say_what_a_prompt_is_made_of(tiny: QLLMEngine) -> None:
    for wrong in (b"bytes", {1: 2}, [-1], 5, None):
        prompt = tiny.open("LS")
        for change in (prompt.append, lambda piece, p=prompt: p.replace(0, piece)):
            with pytest.raises(InvalidRequestError):
                change(wrong)  # type: ignore[operator]
        prompt.append("text")
        assert prompt.num_bytes == 4
        prompt.cancel()


def test_bytes_are_those_of_what_is_there(tiny: QLLMEngine) -> None:
    prompt = tiny.open("LS", "añ🙂b" * 40)
    for _ in range(3):
        prompt.replace(prompt.num_tokens // 2, "ü" * 30)
        prompt.append("")
        assert prompt.num_bytes == len(text_of(prompt).encode())
    prompt.replace(0, "")
    assert (prompt.num_bytes, prompt.num_tokens, text_of(prompt)) == (0, 0, "")
    prompt.append("é")
    assert prompt.num_bytes == 2
    assert prompt.send(1).result(300).prompt_token_ids == tuple(tiny.tokenizer("é")["input_ids"])
    ids = tiny.open("LS", [1, 2, 3])
    ids.replace(1, [5])
    assert ids.num_bytes == 8
    ids.cancel()
