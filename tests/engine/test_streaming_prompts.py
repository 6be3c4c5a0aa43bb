"""A prompt that came in pieces has the tokens and the KV of the whole, and computes no more."""

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qllm import SamplingParams
from qllm.frontend.handle import Handle
from qllm.frontend.streaming_prompt import PIECE_TOKENS, StreamingPrompt
from qllm.kernels.cpu import course
from qllm.record import trace
from tests.support.families import FAMILIES, make_model
from tests.support.rope import model_of as rope_model
from tests.support.streaming_prompts import GREEDY, Engine, equal, ids_of
from tests.support.waiting import wait_for


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model("qwen3_moe", torch.bfloat16)


@pytest.fixture(scope="module")
def plain(model: Any) -> Iterator[Engine]:
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
    prompt: StreamingPrompt, steps: list[Step], seed: int, settle: Callable[[], None]
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
    plain: Engine, steps: list[Step], seed: int
) -> None:
    prompt = plain.engine.open("LS")
    known = walk(prompt, steps, seed, lambda: plain.settle(prompt))
    equal(plain.end(prompt), plain.whole(known))


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
def test_no_more_is_computed_than_what_follows_the_common_prefix(plain: Engine, keep: int) -> None:
    first, then = ids_of(100), ids_of(60, 1)
    then[0] = first[keep] + 1 if keep < 100 else then[0]  # the first that differs
    prompt = plain.engine.open("LS")
    prompt.append(first)
    plain.settle(prompt)
    prompt.replace(0, first[:keep] + then)  # says less than it could: the prefix is found
    plain.settle(prompt)
    held = plain.engine.call(lambda: plain.runner.requests[prompt.handle.number])
    assert held.ids == [*first[:keep], *then][:-1]  # none of them waits for the end
    assert held.kv.committed == keep + 59
    found = plain.end(prompt)
    metrics = found[0].metrics
    assert metrics.revise_lost_tokens == max(0, 99 - keep)  # the last one was held back
    assert metrics.num_revisions == 3
    assert metrics.num_prefilled_tokens == keep + 60
    assert metrics.preempt_recomputed_tokens == metrics.retry_recomputed_tokens == 0
    equal(found, plain.whole(first[:keep] + then))


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


def test_sampling_and_limits_are_those_of_send(plain: Engine) -> None:
    ids = ids_of(50)
    how: dict[str, Any] = {
        "sampling": SamplingParams(temperature=1.0, seed=5, logprobs=2, repetition_penalty=1.3,
                                   ignore_eos=True)
    }  # fmt: skip
    want = plain.engine.submit(ids, "LS", 8, **how).result(300)
    prompt = plain.engine.open("LS")
    prompt.append(ids[:30])
    plain.settle(prompt)
    prompt.append(ids[30:])
    found = prompt.send(8, **how).result(300)
    assert (found.token_ids, found.logprobs) == (want.token_ids, want.logprobs)
    asks = SamplingParams(temperature=0, prompt_logprobs=1, ignore_eos=True)
    want = plain.engine.submit(ids, "LS", 2, sampling=asks).result(300)
    prompt = plain.engine.open("LS")
    prompt.append(ids)
    plain.settle(prompt)
    found = prompt.send(2, sampling=asks).result(300)  # computed again: nobody kept hidden states
    assert found.prompt_logprobs == want.prompt_logprobs
    assert found.metrics.revise_lost_tokens == 49
    assert plain.loop.prompt_updates.num_restarts > 0


def test_a_prompt_closes_without_a_further_token(plain: Engine) -> None:
    ids = ids_of(PIECE_TOKENS * 3 + 1)
    prompt = plain.engine.open("BE")
    prompt.append(ids)
    plain.settle(prompt)
    found = plain.end(prompt)
    assert found[0].metrics.revise_lost_tokens == 0
    equal(found, plain.whole(ids))


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


PARTS = 4
"""Parts of a sweep over the boundaries of a pass: a case takes each fourth of them."""


@pytest.fixture(scope="module")
def cut_finely() -> Iterator[Engine]:
    """An engine of which each pass has as many boundaries as it can have."""
    made = make_model("qwen3_moe", torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(course, "OP_BYTES", 1)
        engine = Engine(made, prefix_cache=False)
    object.__setattr__(engine.runner.backend.costs, "range_ns", 0.5)
    with engine:
        yield engine


@pytest.mark.sampled
@pytest.mark.parametrize("keep", [0, 20, 35, 36])
@pytest.mark.parametrize("part", range(PARTS))
def test_revised_at_every_boundary_of_a_parked_row(
    cut_finely: Engine, keep: int, part: int
) -> None:
    first, then, other, made = ids_of(37), ids_of(18, 1), ids_of(9, 2), cut_finely
    want, mate = made.whole(first[:keep] + then), made.whole(other, 2)
    num_kept = num_killed = 0
    for at in range(1 + part, stops_of(made, first[:36]), PARTS):
        prompt, seen, mates = made.engine.open("LS"), [at], list[Handle]()

        def look(
            program: Any, *_: Any, seen: list[int] = seen, mates: list[Handle] = mates,
            prompt: StreamingPrompt = prompt,
        ) -> None:  # fmt: skip
            if program.rows[0].request_id != prompt.handle.number or not seen[0]:
                return
            seen[0] -= 1
            if not seen[0]:  # a whole prompt stops the pass, and the revision finds it parked
                mates.append(made.engine.submit(other, "LS", 2, sampling=GREEDY))
                prompt.replace(keep, then)

        before = made.loop.prompt_updates.lost_tokens
        made.runner.on_segment = look
        prompt.append(first)
        wait_for(lambda mates=mates: mates)  # type: ignore[misc]
        made.settle(prompt)
        made.runner.on_segment = None
        equal(made.end(prompt), want)
        assert mates[0].result(300).token_ids == mate[0].token_ids
        num_kept += made.loop.prompt_updates.lost_tokens == before
        num_killed += 1
    assert num_killed > 10
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
                prompt: StreamingPrompt = prompt, made: Engine = made,
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
        policy=policy, policy_settings={"short_tokens": 256} if policy == "laps" else {},
    ) as made:  # fmt: skip
        prompt = made.engine.open("LS")  # it came first
        with Paused(made):
            prompt.append(ids_of(100))
            whole = made.engine.submit(ids_of(30, 1), "LS", 1, sampling=GREEDY)
        whole.result(300)
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
        other = made.engine.submit(ids_of(200, 1), level, 2, sampling=GREEDY).result(300)
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
        better.result(300)
        worse.result(300)
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


@pytest.mark.parametrize("kind", ["phimoe-longrope", "mixtral-dynamic"])
def test_rope_that_follows_the_length_is_computed_again(kind: str) -> None:
    """Phi's long factors hold for all of a prompt that is longer than the original length.

    With dynamic NTK each longer length has its own, and the last token is a length of its own.
    """
    with Engine(rope_model(kind, "bf16"), prefix_cache=False) as made:
        at = made.runner.rope.switch.at
        ids = ids_of(at + 40)
        prompt = made.engine.open("LS")
        for lo, hi in ((0, at - 5), (at - 5, at + 20), (at + 20, at + 40)):
            prompt.append(ids[lo:hi])
            made.settle(prompt)
        found = made.end(prompt)
        lost = [at - 6] if kind == "phimoe-longrope" else [at - 6, at + 19, at + 39]
        assert found[0].metrics.revise_lost_tokens == sum(lost)
        assert made.loop.prompt_updates.num_restarts == len(lost)
        equal(found, made.whole(ids))


def test_kept_in_a_file_too(model: Any, tmp_path: Path) -> None:
    how: dict[str, Any] = {"prefix_cache": True, "kv_dir": str(tmp_path), "kv_dir_gib": 0.01}
    known: list[int] = []
    with Engine(make_model("qwen3_moe", torch.bfloat16), **how) as made:
        prompt = made.engine.open("BE")
        known = walk(prompt, [(None, 150), (70, 60), (None, 90)], 1, lambda: made.settle(prompt))
        found = made.end(prompt)
    with Engine(make_model("qwen3_moe", torch.bfloat16), **how) as made:
        prompt = made.engine.open("LS")
        prompt.append(known[:100])
        made.settle(prompt)
        prompt.append(known[100:])
        equal(made.end(prompt), found)
        made.engine.call(made.loop.prefix.check)
    with Engine(make_model("qwen3_moe", torch.bfloat16), prefix_cache=False) as made:
        equal(made.whole(known), found)
