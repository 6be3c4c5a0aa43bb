"""A prompt that came in pieces has the tokens and the KV of the whole, and computes no more."""

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from engines import wait_for
from families import FAMILIES, VOCAB, make_model
from hypothesis import given, settings
from hypothesis import strategies as st
from test_rope import model_of as rope_model

from qllm import QLLMEngine, SamplingParams
from qllm.errors import (
    ConfigError,
    ContextLengthError,
    InvalidRequestError,
    QueueFullError,
    RequestFailedError,
)
from qllm.frontend.growing import HELD, GrowingText
from qllm.frontend.growing_prompt import PIECE_TOKENS, GrowingPrompt, common_prefix
from qllm.frontend.handle import Handle, Result
from qllm.ingress import Revision
from qllm.record import trace
from qllm.types import FinishReason, RequestStatus

GREEDY = SamplingParams(temperature=0, ignore_eos=True)
SETTINGS: dict[str, Any] = {"conformance": False, "threads": 1, "max_kv_tokens": 2048}
Kv = list[tuple[torch.Tensor, torch.Tensor]]


def ids_of(n: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(n)]


class Engine:
    """An engine on a thread, whose KV is looked at as requests leave it."""

    def __init__(self, model: Any, **how: Any) -> None:
        self.engine = QLLMEngine.from_model(model, **{**SETTINGS, **how})
        self.loop = self.engine._client.loop  # type: ignore[attr-defined]
        self.runner = self.loop.runner
        self.kv: dict[int, Kv] = {}
        remove = self.runner.remove

        def look(number: int) -> None:
            kv = self.runner.requests[number].kv
            layers = [i for i in range(len(self.runner.parts.layers)) if kv.slabs[i] is not None]
            read = [kv.read(layer, 0, kv.committed) for layer in layers]
            self.kv[number] = [(k.clone(), v.clone()) for k, v in read]
            remove(number)

        self.runner.remove = look

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    def settle(self, prompt: GrowingPrompt) -> None:
        """Wait until all that came of a prompt is computed."""
        self.engine.call(lambda: None)
        wait_for(lambda: prompt.handle.status is RequestStatus.OPEN)
        self.engine.call(self.loop.scheduler.check)

    def whole(self, ids: list[int], n: int = 6, **how: Any) -> tuple[Result, Kv]:
        handle = self.engine.submit(ids, "LS", n, sampling=GREEDY, **how)
        return handle.result(60), self.kv[handle.number]

    def end(self, prompt: GrowingPrompt, n: int = 6, **how: Any) -> tuple[Result, Kv]:
        handle = prompt.send(n, sampling=GREEDY, **how)
        return handle.result(60), self.kv[handle.number]


def same(a: Kv, b: Kv) -> bool:
    pairs = [
        (x, y) for one, other in zip(a, b, strict=True) for x, y in zip(one, other, strict=True)
    ]
    return len(pairs) > 0 and all(torch.equal(x, y) for x, y in pairs)


def equal(found: tuple[Result, Kv], want: tuple[Result, Kv]) -> None:
    assert found[0].token_ids == want[0].token_ids
    assert found[0].prompt_token_ids == want[0].prompt_token_ids
    assert same(found[1], want[1])


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model("qwen3_moe", torch.bfloat16)


@pytest.fixture(scope="module")
def engine(model: Any) -> Iterator[Engine]:
    with Engine(model, prefix_cache=False) as made:
        yield made


@pytest.fixture(scope="module")
def cached(model: Any) -> Iterator[Engine]:
    made = Engine(make_model("qwen3_moe", torch.bfloat16), prefix_cache=True)
    with made:
        yield made


Step = tuple[int | None, int]
"""Tokens that stay, or None for all, and how many new ones come."""
STEPS = st.lists(
    st.tuples(st.none() | st.integers(0, 200), st.integers(0, 70)), min_size=1, max_size=8
)


def walk(
    prompt: GrowingPrompt, steps: list[Step], seed: int, settle: Callable[[], None]
) -> list[int]:
    """Grow a prompt step by step; return the tokens that it has at the end."""
    known: list[int] = []
    for i, (keep, more) in enumerate([*steps, (None, 1)]):
        piece = ids_of(more, seed + i)
        if keep is None:
            prompt.append(piece)
            known += piece
        else:
            keep = min(keep, len(known))
            prompt.replace(keep, piece)
            known[keep:] = piece
        if (seed + i) % 2:
            settle()
    return known


@settings(max_examples=40, deadline=None)
@given(steps=STEPS, seed=st.integers(0, 1000))
def test_any_cutting_has_the_tokens_and_the_kv_of_the_whole(
    engine: Engine, steps: list[Step], seed: int
) -> None:
    prompt = engine.engine.open("LS")
    known = walk(prompt, steps, seed, lambda: engine.settle(prompt))
    equal(engine.end(prompt), engine.whole(known))


@settings(max_examples=25, deadline=None)
@given(steps=STEPS, seed=st.integers(0, 1000))
def test_the_prefix_cache_serves_open_prompts_and_learns_from_them(
    cached: Engine, steps: list[Step], seed: int
) -> None:
    if seed % 2:
        cached.engine.reset_prefix_cache()
    prompt = cached.engine.open("BE")
    known = walk(prompt, steps, seed, lambda: cached.settle(prompt))
    found = cached.end(prompt)
    cached.engine.call(cached.loop.prefix.check)
    hit = cached.whole(known)
    if len(known) > 64:
        assert hit[0].metrics.num_cached_tokens == (len(known) - 1) // 64 * 64
    cached.engine.reset_prefix_cache()
    cold = cached.whole(known)
    equal(found, cold)
    equal(hit, cold)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str) -> None:
    rng = random.Random(family)
    with Engine(make_model(family, torch.bfloat16), prefix_cache=False, max_step_tokens=24) as made:
        for seed in range(3):
            prompt = made.engine.open("LS")
            steps = [
                (rng.choice([None, rng.randrange(60)]), rng.randrange(1, 40)) for _ in range(4)
            ]
            known = walk(prompt, steps, seed, lambda p=prompt: made.settle(p))  # type: ignore[misc]
            equal(made.end(prompt), made.whole(known))


@pytest.mark.parametrize("keep", [0, 1, 37, 99, 100])
def test_no_more_is_computed_than_what_follows_the_common_prefix(engine: Engine, keep: int) -> None:
    first, then = ids_of(100), ids_of(60, 1)
    then[0] = first[keep] + 1 if keep < 100 else then[0]  # the first that differs
    prompt = engine.engine.open("LS")
    prompt.append(first)
    engine.settle(prompt)
    prompt.replace(0, first[:keep] + then)  # says less than it could: the prefix is found
    engine.settle(prompt)
    found = engine.end(prompt)
    metrics = found[0].metrics
    assert metrics.revise_lost_tokens == max(0, 99 - keep)  # the last one was held back
    assert metrics.num_revisions == 3
    assert metrics.num_prefilled_tokens == keep + 60
    assert metrics.preempt_recomputed_tokens == metrics.retry_recomputed_tokens == 0
    equal(found, engine.whole(first[:keep] + then))


def test_each_token_of_a_prompt_that_only_grows_is_computed_once(model: Any) -> None:
    with Engine(make_model("qwen3_moe", torch.bfloat16), prefix_cache=False, record=True) as made:
        prompt, ids = made.engine.open("LS"), ids_of(200)
        for at in range(0, 200, 40):
            prompt.append(ids[at : at + 40])
            made.settle(prompt)
        result, _ = made.end(prompt, 1)
        planned = [e for e in made.engine.trace if isinstance(e, trace.Planned)]
        assert sum(row.num_tokens for e in planned for row in e.rows) == 200
        assert len(planned) == 6  # a pass per piece, and the last token's
        revised = [e for e in made.engine.trace if isinstance(e, trace.Revised)]
        assert [e.is_open for e in revised] == [True] * 5 + [False]
        assert revised[-1].token_ids == tuple(ids)
        assert result.metrics.open_ms is not None


def test_sampling_and_limits_are_those_of_send(engine: Engine) -> None:
    ids = ids_of(50)
    how: dict[str, Any] = {
        "sampling": SamplingParams(temperature=1.0, seed=5, logprobs=2, repetition_penalty=1.3,
                                   ignore_eos=True)
    }  # fmt: skip
    want = engine.engine.submit(ids, "LS", 8, **how).result(60)
    prompt = engine.engine.open("LS")
    prompt.append(ids[:30])
    engine.settle(prompt)
    prompt.append(ids[30:])
    found = prompt.send(8, **how).result(60)
    assert (found.token_ids, found.logprobs) == (want.token_ids, want.logprobs)
    asks = SamplingParams(temperature=0, prompt_logprobs=1, ignore_eos=True)
    want = engine.engine.submit(ids, "LS", 2, sampling=asks).result(60)
    prompt = engine.engine.open("LS")
    prompt.append(ids)
    engine.settle(prompt)
    found = prompt.send(2, sampling=asks).result(60)  # computed again: nobody kept hidden states
    assert found.prompt_logprobs == want.prompt_logprobs
    assert found.metrics.revise_lost_tokens == 49
    assert engine.loop.revising.num_restarts > 0


def test_a_prompt_closes_without_a_further_token(engine: Engine) -> None:
    ids = ids_of(PIECE_TOKENS * 3 + 1)
    prompt = engine.engine.open("BE")
    prompt.append(ids)
    engine.settle(prompt)
    found = engine.end(prompt)
    assert found[0].metrics.revise_lost_tokens == 0
    equal(found, engine.whole(ids))


# -- a parked row


def stops_of(made: Engine, ids: list[int]) -> int:
    """Segments of a lone prefill of a prompt."""
    count = 0

    def look(*_: Any) -> None:
        nonlocal count
        count += 1

    made.runner.on_segment = look
    made.whole(ids, 1)
    made.runner.on_segment = None
    return count


@pytest.mark.parametrize("keep", [0, 20, 59, 60])
def test_revised_at_every_boundary_of_a_parked_row(model: Any, keep: int) -> None:
    first, then, other = ids_of(61), ids_of(30, 1), ids_of(9, 2)
    with Engine(
        make_model("qwen3_moe", torch.bfloat16), prefix_cache=False, max_segment_ms=0.001
    ) as made:
        want, mate = made.whole(first[:keep] + then), made.whole(other, 2)
        num_kept = num_killed = 0
        for at in range(1, stops_of(made, first[:60])):
            prompt, seen, mates = made.engine.open("LS"), [at], list[Handle]()

            def look(
                program: Any, *_: Any, seen: list[int] = seen, mates: list[Handle] = mates,
                prompt: GrowingPrompt = prompt,
            ) -> None:  # fmt: skip
                if program.rows[0].request_id != prompt.handle.number or not seen[0]:
                    return
                seen[0] -= 1
                if not seen[0]:  # a whole prompt stops the pass, and the revision finds it parked
                    mates.append(made.engine.submit(other, "LS", 2, sampling=GREEDY))
                    prompt.replace(keep, then)

            before = made.loop.revising.lost_tokens
            made.runner.on_segment = look
            prompt.append(first)
            wait_for(lambda mates=mates: mates)  # type: ignore[misc]
            made.settle(prompt)
            made.runner.on_segment = None
            equal(made.end(prompt), want)
            assert mates[0].result(60).token_ids == mate[0].token_ids
            num_kept += made.loop.revising.lost_tokens == before
            num_killed += 1
        assert num_killed > 20
        assert num_kept > 0


def test_a_parked_row_goes_on_where_nothing_changed_before_its_end(model: Any) -> None:
    """And dies if the change lies before it."""
    kinds = {60: trace.Resumed, 10: trace.Dropped}
    for keep, kind in kinds.items():
        with Engine(
            make_model("qwen3_moe", torch.bfloat16), prefix_cache=False, max_segment_ms=0.001,
            record=True,
        ) as made:  # fmt: skip
            prompt, done = made.engine.open("LS"), threading.Event()

            def look(
                *_: Any, keep: int = keep, done: threading.Event = done,
                prompt: GrowingPrompt = prompt, made: Engine = made,
            ) -> None:  # fmt: skip
                if not done.is_set():
                    done.set()
                    made.engine.submit(ids_of(9), "LS", 1, sampling=GREEDY)
                    prompt.replace(keep, ids_of(40, 3))

            made.runner.on_segment = look
            prompt.append(ids_of(61))
            done.wait(60)
            made.settle(prompt)
            frames = [e.frame_id for e in made.engine.trace if isinstance(e, trace.Planned)]
            assert kind in {
                type(e) for e in made.engine.trace if getattr(e, "frame_id", 0) == frames[0]
            }
            prompt.cancel()


# -- who goes first


class Paused:
    """Holds the loop still while a test puts several things in."""

    def __init__(self, made: Engine) -> None:
        self._go, self._in = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=lambda: made.engine.call(self._wait))

    def _wait(self) -> None:
        self._in.set()
        self._go.wait(60)

    def __enter__(self) -> None:
        self._thread.start()
        self._in.wait(60)

    def __exit__(self, *_: object) -> None:
        self._go.set()
        self._thread.join()


@pytest.mark.parametrize("policy", ["qllm2", "fcfs", "chunked-priority", "mlfq", "rota", "laps"])
def test_an_open_prompt_takes_no_seat_from_a_whole_one(policy: str) -> None:
    with Engine(
        make_model("qwen3_moe", torch.bfloat16), prefix_cache=False, max_num_seqs=1, record=True,
        policy=policy,
    ) as made:  # fmt: skip
        prompt = made.engine.open("LS")  # it came first
        with Paused(made):
            prompt.append(ids_of(100))
            whole = made.engine.submit(ids_of(30, 1), "LS", 1, sampling=GREEDY)
        whole.result(60)
        made.settle(prompt)
        planned = [e.rows[0].request_id for e in made.engine.trace if isinstance(e, trace.Planned)]
        assert planned[:2] == [whole.number, prompt.handle.number]
        prompt.cancel()


@pytest.mark.parametrize("level", ["LS", "BE"])
def test_an_idle_prompt_gives_up_kv_and_computes_it_again(level: str) -> None:
    """Also for a worse class, if nobody else could go on."""
    with Engine(
        make_model("qwen3_moe", torch.bfloat16), prefix_cache=False, max_kv_tokens=256
    ) as made:
        want = made.whole(ids_of(150))
        prompt = made.engine.open("LS")
        prompt.append(ids_of(149))
        made.settle(prompt)
        other = made.engine.submit(ids_of(200, 1), level, 2, sampling=GREEDY).result(60)
        assert other.metrics.evictions == 0
        prompt.append(ids_of(150)[149:])
        found = made.end(prompt)
        equal(found, want)
        assert found[0].metrics.evictions == 1


def test_a_worse_class_takes_no_kv_of_an_idle_prompt_while_others_go_on() -> None:
    with Engine(
        make_model("qwen3_moe", torch.bfloat16), prefix_cache=False, max_kv_tokens=256, record=True
    ) as made:
        prompt = made.engine.open("LS")
        prompt.append(ids_of(149))
        made.settle(prompt)
        with Paused(made):
            better = made.engine.submit(ids_of(40, 1), "LS", 20, sampling=GREEDY)
            worse = made.engine.submit(ids_of(200, 2), "BE", 2, sampling=GREEDY)
        better.result(60)
        worse.result(60)
        events = list(made.engine.trace)
        ended = next(i for i, e in enumerate(events) if isinstance(e, trace.Finished))
        assert events[ended].request_id == better.number
        taken = next(i for i, e in enumerate(events) if isinstance(e, trace.Evicted))
        assert events[taken].request_id == prompt.handle.number
        assert taken > ended


def test_swapped_out_prompts_are_cut_where_they_lie(model: Any) -> None:
    how = {"max_kv_tokens": 256, "swap_kv_tokens": 512, "prefix_cache": False}
    with Engine(make_model("qwen3_moe", torch.bfloat16), **how) as made:
        for keep in (0, 40, 148):
            ids = ids_of(149)[:keep] + ids_of(60, 4)
            want = made.whole(ids)
            prompt = made.engine.open("LS")
            prompt.append(ids_of(149))
            made.settle(prompt)
            made.whole(ids_of(200, 2))  # takes its blocks
            assert made.engine.call(
                lambda n=prompt.handle.number: made.loop.live[n].request.num_swapped_tokens
            ) == 148  # fmt: skip
            with Paused(made):
                prompt.replace(keep, ids_of(60, 4))
            made.engine.call(made.loop.scheduler.check)
            found = made.end(prompt)
            equal(found, want)
            assert found[0].metrics.revise_lost_tokens == 148 - keep
            assert found[0].metrics.evictions == 0


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
    result = prompt.send(1).result(60)
    assert list(result.prompt_token_ids) == tiny.tokenizer(now)["input_ids"]


def text_of(prompt: GrowingPrompt) -> str:
    growing = prompt._growing
    assert isinstance(growing, GrowingText)
    return growing.text


WORDS = "The crawler found 12 pages; it's reading the third one, slowly.\n\nThen  more. "


@pytest.mark.parametrize("size", [1, 7, 64, 333])
def test_text_in_pieces_is_not_tokenised_as_a_whole_each_time(tiny: QLLMEngine, size: int) -> None:
    text = WORDS * 30
    growing = GrowingText(tiny.tokenizer, lambda text: tiny.tokenizer(text)["input_ids"])
    asked: list[int] = []
    encode = growing._encode
    growing._encode = lambda text, special: (asked.append(len(text)), encode(text, special))[1]  # type: ignore[method-assign]
    for at in range(0, len(text), size):
        growing.append(text[at : at + size])
    growing.look()
    assert growing.token_ids == growing.finish()
    assert growing.num_whole == 0
    assert max(asked) < 64 + size + 500


def test_a_tokenizer_that_says_no_offsets_is_asked_now_and_then() -> None:
    class Slow:
        asked = 0

        def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
            self.asked += len(text)
            return {"input_ids": [ord(c) % 64 for c in text]}

    slow = Slow()
    growing = GrowingText(slow, lambda text: slow(text)["input_ids"])
    for _ in range(2000):
        growing.append(WORDS[:10])
    assert slow.asked < 10 * 20_000
    assert growing.finish() == slow(WORDS[:10] * 2000)["input_ids"]
    with pytest.raises(InvalidRequestError, match="does not say where in the text"):
        growing.replace(5, "x")
    growing.replace(0, "abc")
    assert growing.text == "abc"


def append_all(prompt: GrowingPrompt, text: str) -> None:
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
        prompt.send(1).result(60)
        # nothing was lost, and the engine heard of pieces, not of bytes
        assert prompt.handle.result().metrics.num_revisions <= longest // PIECE_TOKENS + 8


def test_the_last_message_of_a_chat_grows(tiny: QLLMEngine) -> None:
    chat = [{"role": "system", "content": "You read."}, {"role": "user", "content": "Read: "}]
    want = tiny.submit([chat[0], {**chat[1], "content": "Read: " + WORDS * 9}], "LS", 6).result(60)
    prompt = tiny.open("LS", chat)
    for at in range(0, len(WORDS) * 9, 100):
        prompt.append((WORDS * 9)[at : at + 100])
    found = prompt.send(6).result(60)
    assert found.prompt_token_ids == want.prompt_token_ids
    assert found.text == want.text
    assert found.metrics.revise_lost_tokens == 0
    prompt = tiny.open("LS", chat)
    with pytest.raises(InvalidRequestError, match=r"from_token=1 must be an integer in \["):
        prompt.replace(1, "the template's own tokens")
    prompt.replace(0, "All of it is new.")
    want = tiny.submit([chat[0], {**chat[1], "content": "All of it is new."}], "LS", 6).result(60)
    assert prompt.send(6).result(60).text == want.text


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
    want = tiny.submit("".join(f"page {i}. " for i in range(5)), "LS", 5).result(60)
    assert (result.token_ids, result.text, text) == (want.token_ids, want.text, want.text)
    assert left == FinishReason.CANCELLED


def test_a_stop_string_ends_the_answer(tiny: QLLMEngine) -> None:
    want = tiny.submit(WORDS, "LS", 30).result(60).text
    stop = want[8:12]
    assert stop
    prompt = tiny.open("LS", WORDS[:20])
    prompt.append(WORDS[20:])
    result = prompt.send(30, stop=stop).result(60)
    assert (result.finish_reason, result.text) == (FinishReason.STOP, want[: want.find(stop)])


def test_times_count_from_the_last_piece_and_from_the_first(tiny: QLLMEngine) -> None:
    prompt = tiny.open("LS", "a b c")
    opened = prompt.handle
    wait_for(lambda: opened.status is RequestStatus.OPEN)
    threading.Event().wait(0.05)
    metrics = prompt.send(2).result(60).metrics
    assert metrics.open_ms is not None
    assert metrics.open_ms >= 50
    assert metrics.ttft_ms is not None
    assert metrics.e2e_ms is not None
    whole = tiny.submit("a b c", "LS", 2).result(60).metrics
    assert whole.open_ms is None
    assert whole.num_revisions == 0


# -- bad input


def test_what_was_sent_is_closed(tiny: QLLMEngine) -> None:
    prompt = tiny.open("LS", "text")
    prompt.send(1).result(60)
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
        (lambda p: p.send(10**9), "exceed"),
        (lambda p: p.send(1, timeout_s=-1), "timeout_s"),
        (lambda p: p.send(1, temperature=-1), "temperature"),
        (lambda p: p.send(1, sampling=SamplingParams(n=2)), "n=2"),
    ],
)
def test_bad_input_leaves_a_prompt_as_it_was(
    tiny: QLLMEngine, call: Callable[[GrowingPrompt], Any], message: str
) -> None:
    prompt = tiny.open("LS", "some words")
    with pytest.raises(InvalidRequestError, match=message):
        call(prompt)
    prompt.append("")  # nothing is something too
    assert (
        list(prompt.send(1).result(60).prompt_token_ids)
        == tiny.tokenizer("some words")["input_ids"]
    )


def test_bad_input_of_ids(engine: Engine) -> None:
    for piece in ([VOCAB], [-1], ["a"], [1.5], "text", 5):
        prompt = engine.engine.open("LS", [1, 2])
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
            engine.engine.open("LS", wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="is empty"):
        engine.engine.open("LS").send(1)
    emptied = engine.engine.open("LS", [1, 2, 3])
    emptied.replace(0, [])
    with pytest.raises(InvalidRequestError, match="no tokens"):
        emptied.send(1)
    emptied.cancel()
    with pytest.raises(InvalidRequestError, match="priority"):
        engine.engine.open("best")
    engine.engine.call(lambda: None)
    engine.engine.call(engine.loop.scheduler.check)


def test_a_loop_that_cannot_serve_it_says_so(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = engine.engine.config.__class__(max_kv_tokens=64)
    object.__setattr__(config, "loop", "conditional")
    monkeypatch.setattr(engine.engine, "config", config)
    with pytest.raises(ConfigError, match="takes whole prompts only"):
        engine.engine.open("LS")


def test_a_full_ring_loses_no_piece(tiny: QLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    front_end = tiny._client._front_end  # type: ignore[attr-defined]
    want = tiny.submit(WORDS * 9, "LS", 5).result(60)
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
    assert prompt.send(5).result(60).token_ids == want.token_ids


def test_an_engine_that_closes_ends_open_prompts(model: Any) -> None:
    made = Engine(make_model("qwen3_moe", torch.bfloat16))
    prompt = made.engine.open("LS", ids_of(40))
    made.engine.close()
    assert prompt.handle.finish_reason is FinishReason.CANCELLED
    with pytest.raises(RequestFailedError, match="has ended"):
        prompt.append(ids_of(40))


def test_many_threads_grow_prompts_of_their_own(tiny: QLLMEngine) -> None:
    texts = [f"{i} " + WORDS * (1 + i % 3) for i in range(6)]
    want = [tiny.submit(text, "LS", 4).result(60).token_ids for text in texts]
    found: dict[int, Any] = {}

    def grow(i: int) -> None:
        prompt = tiny.open("BE" if i % 2 else "LS")
        for at in range(0, len(texts[i]), 13):
            prompt.append(texts[i][at : at + 13])
        found[i] = prompt.send(4).result(60).token_ids

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


def test_rope_that_follows_the_length_is_computed_again() -> None:
    """Phi's long factors hold for all of a prompt that is longer than the original length."""
    made = Engine(rope_model("phimoe-longrope", "bf16"), prefix_cache=False)
    with made:
        at = made.runner.rope.switch.at
        ids = ids_of(at + 20)
        prompt = made.engine.open("LS")
        prompt.append(ids[: at - 5])
        made.settle(prompt)
        prompt.append(ids[at - 5 :])
        made.settle(prompt)
        found = made.end(prompt)
        assert found[0].metrics.revise_lost_tokens == at - 6
        assert made.loop.revising.num_restarts == 1
        equal(found, made.whole(ids))
