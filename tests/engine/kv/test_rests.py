"""The rest of an ended request's KV is cached. No request waits for the rest or lacks a block."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from qllm import QLLMEngine, SamplingParams
from qllm.engine.kv.prefix import PrefixCache
from qllm.ingress import Submission
from qllm.plugins import load_policy
from qllm.record import trace
from qllm.scheduler.prefix import PageStore, tag_of
from qllm.sim.runner import SimRunner
from qllm.sim.world import World
from qllm.types import NS_PER_MS, NS_PER_S, Evict, FinishReason, Priority, Slo
from tests.support.families import VOCAB, make_model
from tests.support.inside import loop_of
from tests.support.scheduling import events
from tests.support.swap import SwapFuzz, short_of_kv

GREEDY = SamplingParams(temperature=0, ignore_eos=True)
LS, BE = Priority.LS, Priority.BE
PAGE = 32


class Page(tuple[int, int]):
    """A page of the simulator, as the one part of a copy."""

    nbytes = 1


class Keeper:
    """Copies of the simulator's KV, which must be what its request wrote."""

    def __init__(self, runner: SimRunner) -> None:
        self._runner, self._hold = runner, runner._hold
        self.refer, self.kv_regime = runner.refer, runner.kv_regime
        self.num_written = Counter[int]()
        """Number of times that each block was given to a request that writes to the block."""
        self.num_copied = 0
        runner._hold = self.hold  # type: ignore[method-assign]

    def hold(self, request_id: int, blocks: Any) -> None:
        held = len(self._runner.requests[request_id].blocks)
        self.num_written.update(blocks[held:])
        self._hold(request_id, blocks)

    def kv_of(self, request_id: int) -> Any:
        request = self._runner.requests[request_id]
        return request, {block: self.num_written[block] for block in request.blocks}

    def is_whole(self, kv: Any) -> bool:
        return all(self.num_written[block] == count for block, count in kv[1].items())

    def copy_out(self, kv: Any, lo: int, hi: int) -> tuple[Page]:
        assert self.is_whole(kv), "another request wrote to the blocks"
        self.num_copied += 1
        return (Page(self._runner.copy_out(kv[0], lo, hi)),)

    def copy_in(self, request_id: int, lo: int, hi: int, page: tuple[Page]) -> None:
        self._runner.copy_in(request_id, lo, hi, tuple(page[0]))  # type: ignore[arg-type]


def world_of(
    policy: Any, num_blocks: int, *, most: int = 1, num_kept: int = 1000, **how: Any
) -> tuple[World, Keeper, PrefixCache]:
    """A world whose prefix cache may copy `most` pages between two looks for arrivals."""
    limits = replace(short_of_kv(num_blocks, 200), max_num_seqs=4)
    world = World(policy, limits)
    keeper = Keeper(world.runner)
    prefix = PrefixCache(
        keeper, "", PageStore[Any](num_kept), PAGE, world.scheduler.found,  # type: ignore[arg-type]
        world.clock, world.scheduler.pool, most, **how,
    )  # fmt: skip
    prefix._page_bytes = 1
    world.loop.prefix = world.loop.effects._prefix = prefix
    return world, keeper, prefix


def ask(world: World, priority: int, num_tokens: int, text: int, **how: Any) -> int:
    """Let a request arrive whose prompt is the beginning of a text; return its id."""
    at_ns, timeout_ns = how.pop("at_ns", world.clock.at_ns), how.pop("timeout_ns", None)
    request_id = len(world.submitted)
    world.submitted[request_id] = item = Submission(
        request_id=request_id, name=str(request_id), priority=priority,
        token_ids=tuple((text * 7 + i * (text + 1)) % 97 for i in range(num_tokens)),
        sampling=SamplingParams(seed=0), stop_ids=frozenset(), slo=Slo(), arrival_ns=at_ns,
        deadline_ns=None if timeout_ns is None else at_ns + timeout_ns, **how,
    )  # fmt: skip
    world.ingress.put_at(at_ns, item)
    return request_id


def settle(world: World, prefix: PrefixCache) -> None:
    """Iterate while nothing arrives, as an idle engine does, as long as pages are copied."""
    for _ in range(1000):
        if not list(prefix.rests):
            return
        world.step()
    raise AssertionError("rests stay")


def cached(prefix: PrefixCache, item: Submission) -> int:
    """Return the number of first pages of a prompt that are cached."""
    return prefix.store.find(prefix.chain(item, item.token_ids).upto(item.num_prompt_tokens))


def test_a_short_answer_leaves_all_whole_pages_of_its_long_prompt() -> None:
    model = make_model("mixtral", torch.bfloat16)
    rng = random.Random(1)
    ids = [rng.randrange(VOCAB) for _ in range(64 * 6 + 1)]
    with QLLMEngine.from_model(model, conformance=False, threads=1, max_kv_tokens=2048) as engine:
        cold = engine.submit(ids[:70], "LS", 2, sampling=GREEDY).result(300)
        prefix, most = loop_of(engine).prefix, []
        engine.call(lambda: setattr(prefix, "_copy_bytes", 2 * prefix._page_bytes))
        engine.reset_prefix_cache()
        seek = prefix.seek
        prefix.seek = lambda: (most.append(prefix._num_copied_out), seek())
        first = engine.submit(ids, "LS", 1, sampling=GREEDY).result(300)
        for _ in range(5):  # each call is an iteration of the idle loop
            engine.call(prefix.check)
        assert engine.call(lambda: len(prefix.store)) == 6
        again = engine.submit([*ids, *first.token_ids, 1], "LS", 1, sampling=GREEDY).result(300)
        assert max(most) == 2
        assert not list(prefix.rests)
    assert not cold.metrics.num_cached_tokens
    assert again.metrics.num_cached_tokens == 6 * 64


@pytest.mark.parametrize("end", ["answer", "cancel", "timeout", "stop of the engine's BE"])
def test_every_end_leaves_the_committed_kv(end: str) -> None:
    """While others run: a few pages after each step, and all of them at last."""
    world, keeper, prefix = world_of(load_policy("qllm2"), 400)
    be = world.submit(BE, 5, 60)
    priority = BE if end.endswith("BE") else LS
    num_tokens = 1 if end == "answer" else 50
    timeout_ns = NS_PER_S // 10 if end == "timeout" else None
    chat = ask(world, priority, PAGE * 9 + 3, 1, max_tokens=num_tokens, timeout_ns=timeout_ns)
    while not world.tokens[chat]:
        world.step()
    assert keeper.num_copied == 1
    if end == "timeout":
        world.clock.at_ns += NS_PER_S // 10
    elif end != "answer":
        world.cancel(chat)
    while be not in world.finished:
        before = keeper.num_copied
        world.step()
        assert keeper.num_copied <= before + 1
    assert not list(prefix.rests)
    assert cached(prefix, world.submitted[chat]) == 9


def test_no_request_waits_for_a_rest() -> None:
    """A request that needs the blocks gets them at once. The pages that were copied stay."""
    world, keeper, prefix = world_of(load_policy("qllm2"), 30)
    first = ask(world, LS, 16 * 20, 1, max_tokens=1)
    while first not in world.finished:
        world.step()
    assert list(prefix.rests)
    assert world.scheduler.pool.num_free == 30
    before = keeper.num_copied
    ask(world, LS, 16 * 25, 2, max_tokens=1)
    assert world.step()
    assert first not in [rest.user.request.request_id for rest in prefix.rests]
    world.run()
    assert cached(prefix, world.submitted[first]) == before == 1
    assert not events(world, trace.Evicted)


def test_any_plan_copies_no_block_that_another_request_wrote() -> None:
    num_rests = [play(seed) for seed in range(12)]
    assert sum(map(bool, num_rests)) > 9, "they were not what this test is for"


def play(seed: int) -> int:
    """Run a storm; return how often an iteration left a rest."""
    r = random.Random(seed)
    most, num_kept = r.choice([1, 2]), r.choice([3, 20, 1000])
    policy = SwapFuzz(seed) if seed % 2 else load_policy(r.choice(["qllm2", "rota", "priority"]))
    shares = r.random() < 0.5
    num_blocks = r.choice([40, 80, 400])
    world, keeper, prefix = world_of(policy, num_blocks, most=most, num_kept=num_kept)
    if shares:
        prefix._named = world.scheduler.name_pages
    for i in range(10):
        timeout_ns = r.choice([None, None, 30 * NS_PER_MS])
        request_id = ask(
            world, r.choice([LS, BE]), r.randint(1, 500), r.randrange(4), at_ns=i * 10**6,
            timeout_ns=timeout_ns, max_tokens=r.randint(1, 5),
        )  # fmt: skip
        if r.random() < 0.2:
            world.cancel(request_id, i * 10**6 + r.randrange(10**7))
    num_rests = 0
    while not world.idle:
        before = keeper.num_copied
        world.step()
        prefix.check()
        assert keeper.num_copied <= before + most
        rests = list(prefix.rests)
        num_rests += len(rests)
        assert all(keeper.is_whole(rest.kv) for rest in rests), "it takes memory of others"
        assert world.clock.at_ns < 10**12
    settle(world, prefix)
    assert world.scheduler.pool.num_free == world.scheduler.limits.num_blocks
    assert not world.loop.policy_errors
    assert not world.scheduler.pool.has_names, "swapped-out requests have no blocks to name"
    return num_rests


FORGETS: dict[str, Callable[[World, PrefixCache, bytes], object]] = {
    "delete": lambda world, prefix, salt: prefix.delete(tag_of(salt), ()),
    "reset": lambda world, prefix, salt: prefix.reset(),
    "age": lambda world, prefix, salt: prefix.turn(),
}


@pytest.mark.parametrize("how", FORGETS)
def test_deleted_kv_does_not_come_back(how: str) -> None:
    world, keeper, prefix = world_of(load_policy("qllm2"), 400, ttl_ns=NS_PER_S)
    world.submit(LS, PAGE * 9, 1)
    while not world.idle:
        world.step()
    (rest,) = prefix.rests
    other = replace(rest.user.submission, cache_salt=32 * b"x")
    world.clock.at_ns += NS_PER_S - 1
    prefix.turn()
    prefix.delete(tag_of(other.cache_salt), ())
    assert list(prefix.rests), "it is that of another owner, and young"
    world.clock.at_ns += 1
    FORGETS[how](world, prefix, rest.user.submission.cache_salt)
    assert not list(prefix.rests)
    world.step()
    assert (len(prefix.store), keeper.num_copied) == (0, 1)


def test_a_request_whose_kv_was_deleted_leaves_no_rest() -> None:
    world, _, prefix = world_of(load_policy("qllm2"), 400)
    chat = world.submit(LS, PAGE * 9, 5)
    while not world.tokens[chat]:
        world.step()
    prefix.delete(tag_of(world.submitted[chat].cache_salt), ())
    world.run()
    assert not list(prefix.rests)
    assert not len(prefix.store)


def test_the_rests_of_chats_come_first_and_displaced_ones_are_given_up() -> None:
    world, keeper, prefix = world_of(load_policy("qllm2"), 400, num_kept=4)
    be = ask(world, BE, PAGE * 3, 1, max_tokens=1)
    while be not in world.finished:
        world.step()
    chat = ask(world, LS, PAGE * 5, 2, max_tokens=1)
    while chat not in world.finished:
        world.step()
    assert [rest.user.request.request_id for rest in prefix.rests] == [chat, be]
    settle(world, prefix)
    assert cached(prefix, world.submitted[chat]) == 4
    assert keeper.num_copied <= 3 + 5, "no page is copied twice"


def first_page(prefix: PrefixCache, item: Submission) -> bytes:
    return prefix.chain(item, item.token_ids).upto(PAGE)[0]


@pytest.mark.parametrize("runs", [True, False])
def test_a_displaced_page_is_copied_again_only_if_it_went_before_the_end(runs: bool) -> None:
    """A rest is copied once, from the first page that is not cached at the end."""
    world, keeper, prefix = world_of(load_policy("qllm2"), 400)
    chat = ask(world, LS, PAGE * 9, 1, max_tokens=50)
    while not world.tokens[chat]:
        world.step()
    item = world.submitted[chat]
    if runs:
        prefix.store.drop(first_page(prefix, item))
    world.loop.finish(chat, FinishReason.CANCELLED)
    if not runs:
        prefix.store.drop(first_page(prefix, item))
    settle(world, prefix)
    assert (cached(prefix, item), keeper.num_copied) == ((9, 10) if runs else (0, 1))


@pytest.mark.parametrize("swapped", [True, False])
def test_a_request_that_ends_without_kv_in_blocks_leaves_no_rest(swapped: bool) -> None:
    """It is swapped out, or an iteration failed between its blocks and its pages."""
    world, _, prefix = world_of(load_policy("qllm2"), 400)
    chat = ask(world, LS, PAGE * 9, 1, max_tokens=50)
    while not world.tokens[chat]:
        world.step()
    if swapped:
        for effect in world.scheduler.evict(chat, chat, Evict.SWAP):
            world.loop.effects.apply(effect)
    else:
        chat = ask(world, LS, PAGE * 9, 1, max_tokens=50)
        world.loop.take()
    request = world.scheduler.requests[chat]
    if not swapped:
        request.block_table = world.scheduler.pool.take(chat, 20)
    assert request.num_computed_tokens >= PAGE
    world.loop.finish(chat, FinishReason.CANCELLED)
    assert not list(prefix.rests)
    world.scheduler.check()
