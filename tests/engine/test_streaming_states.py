"""Prompts that grow where layers carry a state: it goes on, or starts again; answers are the same.

Our kernel carries the states, so that no bit of them, or of KV, depends on how a prompt was cut.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest

from qllm.errors import QueueFullError
from qllm.frontend.handle import Handle
from qllm.frontend.streaming_prompt import StreamingPrompt
from tests.support import tiny_configs
from tests.support.streaming_prompts import GREEDY, Engine, equal
from tests.support.streaming_prompts import ids_of as ids_below
from tests.support.waiting import wait_for

FAMILIES = ("qwen3_next", "qwen3_5_moe_text")


def ids_of(n: int, seed: int = 0) -> list[int]:
    return ids_below(n, seed, tiny_configs.VOCAB)


def engine_of(family: str, **how: Any) -> Engine:
    model = tiny_configs.tiny_model(family).bfloat16()
    return Engine(model, exactness="batch-invariant", **how)


@pytest.fixture(scope="module", params=FAMILIES)
def stateful(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with engine_of(request.param, max_step_tokens=32) as made:
        assert "3 of 4 layers" in made.engine.kernels["state"]
        yield made


def opened(made: Engine, ids: list[int]) -> StreamingPrompt:
    """A prompt of which these came, and were computed."""
    prompt = made.engine.open("LS")
    prompt.append(ids)
    made.settle(prompt)
    return prompt


def test_a_state_goes_on_where_pieces_are_appended(stateful: Engine) -> None:
    ids, prompt = ids_of(150), stateful.engine.open("LS")
    for lo, hi in ((0, 40), (40, 41), (41, 100), (100, 150)):
        prompt.append(ids[lo:hi])
        stateful.settle(prompt)
    found = stateful.end(prompt)
    assert found[0].metrics.revise_lost_tokens == 0
    assert found[0].metrics.num_prefilled_tokens == 150
    equal(found, stateful.whole(ids))


@pytest.mark.parametrize("more", [0, 60])
@pytest.mark.parametrize("keep", [0, 1, 30, 98, 99, 100])
def test_a_state_that_has_seen_what_changes_starts_again(
    stateful: Engine, keep: int, more: int
) -> None:
    first, then = ids_of(100), ids_of(more, 1)
    now = first[:keep] + then or [7]
    before = stateful.loop.prompt_updates.num_restarts
    prompt = opened(stateful, first)  # 99 are computed
    prompt.replace(keep, now[keep:])
    stateful.settle(prompt)
    found = stateful.end(prompt)
    held = keep + more - 1  # the last one is not told before the end
    assert found[0].metrics.revise_lost_tokens == (99 if min(keep, held) < 99 else 0)
    assert stateful.loop.prompt_updates.num_restarts - before == (0 < min(keep, held) < 99)
    equal(found, stateful.whole(now))


def test_the_end_may_be_where_the_state_is(stateful: Engine) -> None:
    """The last token is computed for its logits, and the state has seen it already."""
    ids = ids_of(100)
    prompt = opened(stateful, ids)
    revise = prompt.handle._revise

    def full(*_: object) -> None:
        raise QueueFullError("full")

    prompt.handle._revise = full
    prompt.replace(99, [])
    prompt.handle._revise = revise
    found = stateful.end(prompt)
    assert found[0].metrics.revise_lost_tokens == 99
    equal(found, stateful.whole(ids[:99]))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("swap", [0, 512])
def test_states_of_prompts_are_taken_with_their_kv(family: str, swap: int) -> None:
    """By swap a state stays, and is cut or goes on as any; without it all is computed again."""
    with engine_of(
        family, max_kv_tokens=480, swap_kv_tokens=2 * swap
    ) as made:  # 144 and 96 for states
        for keep in (0, 40, 148, 149):
            first, then = ids_of(149), ids_of(60, 4)
            want = made.whole(first[:keep] + then)
            prompt = opened(made, first)
            made.whole(ids_of(200, 2))  # takes its blocks
            request = made.engine.call(lambda n=prompt.handle.number: made.loop.live[n].request)
            assert request.num_swapped_tokens == (148 if swap else 0)
            assert not request.is_admitted
            prompt.replace(keep, then)
            made.settle(prompt)
            made.whole(ids_of(200, 2))
            found = made.end(prompt)
            assert (found[0].metrics.evictions > 0) is not bool(swap)
            equal(found, want)


PARTS = 6
"""Parts of a sweep over the boundaries of a pass: a case takes each sixth of them."""


@pytest.fixture(scope="module")
def cut_finely() -> Iterator[Callable[[str], Engine]]:
    """Engines of which each pass has as many boundaries as it can have, by family."""
    with ExitStack() as stack:

        @cache
        def made(family: str) -> Engine:
            return stack.enter_context(engine_of(family, max_segment_ms=0.001))

        yield made


@pytest.mark.sampled
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("keep", [0, 10, 24])
@pytest.mark.parametrize("part", range(PARTS))
def test_revised_at_every_boundary_of_a_parked_row(
    family: str, keep: int, part: int, cut_finely: Callable[[str], Engine]
) -> None:
    """A whole prompt of its class stops an open one, which had a state before, and is revised."""
    ids, other = ids_of(65), ids_of(9, 2)
    begin, first, then = ids[:41], ids[41:], ids_of(12, 1)
    made = cut_finely(family)
    now = [*begin, *first[:keep], *then]
    want, mate = made.whole(now), made.whole(other, 2)
    num, at = 0, 1 + part
    while True:  # until a pass has no such boundary
        prompt, mates = opened(made, begin), list[Handle]()
        seen = 0

        def look(
            program: Any, *_: Any, at: int = at, mates: list[Handle] = mates,
            prompt: StreamingPrompt = prompt,
        ) -> None:  # fmt: skip
            nonlocal seen
            seen += program.rows[0].request_id == prompt.handle.number
            if seen == at and not mates:
                mates.append(made.engine.submit(other, "LS", 2, sampling=GREEDY))
                prompt.replace(len(begin) + keep, then)

        made.runner.on_segment = look
        prompt.append(first)
        made.settle(prompt)
        made.runner.on_segment = None
        if not mates:
            prompt.replace(len(begin) + keep, then)
        equal(made.end(prompt), want)
        if not mates:
            break
        assert mates[0].result(300).token_ids == mate[0].token_ids
        num, at = num + 1, at + PARTS
    assert num > 5
    wait_for(lambda: made.engine.stats()["num_live"] == 0)
