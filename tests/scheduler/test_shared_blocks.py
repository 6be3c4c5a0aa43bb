"""KV blocks that several requests hold: each counts once, and comes free with its last holder."""

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qllm.engine.kv.prefix import PrefixCache
from qllm.errors import InvariantError
from qllm.plugins import load_policy
from qllm.policy import Freed
from qllm.record import trace
from qllm.scheduler.blocks import BlockPool
from qllm.scheduler.prefix import PageStore
from qllm.scheduler.request import Request
from qllm.sim.runner import SimCosts
from qllm.sim.world import World
from qllm.types import NS_PER_MS, Priority
from tests.support.scheduling import events, finished_well
from tests.support.swap import SwapFuzz, short_of_kv

LS, BE = Priority.LS, Priority.BE
PAGE = 32


def request_of(request_id: int, table: list[int]) -> Request:
    return Request(
        request_id=request_id, priority=BE, arrival_ns=0, num_prompt_tokens=9, max_tokens=9,
        block_table=table,
    )  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_blocks_come_free_with_their_last_holder(seed: int) -> None:
    rng = random.Random(seed)
    pool, tables = BlockPool(rng.randint(1, 12), 16), dict[int, list[int]]()
    for request_id in range(rng.randint(1, 40)):
        if tables and rng.random() < 0.5:
            gone = rng.choice(list(tables))
            others = {b for i, table in tables.items() if i != gone for b in table}
            before, lost = pool.num_free, tables.pop(gone)
            freed = Freed(pool.shared).add(request_of(gone, lost))
            pool.give_back(gone, lost, moving=rng.random() < 0.5)
            assert pool.num_free - before == len(set(lost) - others) == freed
        else:
            names = [bytes([i]) for i in range(rng.randint(0, 3))]
            shared = pool.find(names)
            pool.share(request_id, shared)
            own = pool.take(request_id, rng.randint(0, pool.num_free))
            tables[request_id] = table = [*shared, *own]
            for i, name in enumerate(names[: len(table)]):
                pool.name(name, table[i : i + 1])
        pool.check(tables)
        pool.only(tables).check(tables)
        if tables:
            left = {i: t for i, t in tables.items() if rng.random() < 0.5}
            pool.only(left).check(left)
    for request_id, table in tables.items():
        pool.give_back(request_id, table)
    assert pool.num_free == pool.num_blocks
    assert not pool.has_names


def test_free_blocks_are_not_shared_nor_given_back() -> None:
    pool = BlockPool(4, 16)
    (block,) = pool.take(1, 1)
    for wrong in ([3], [block]):
        with pytest.raises(InvariantError):
            pool.share(1, wrong)
        with pytest.raises(InvariantError):
            pool.give_back(2, wrong)
    pool.share(2, [block])
    with pytest.raises(InvariantError, match="not held by"):
        pool.check({1: [block]})


def test_what_moves_out_is_handed_out_last() -> None:
    pool = BlockPool(4, 16)
    table = pool.take(1, 2)
    pool.give_back(1, table, moving=True)
    assert set(pool.take(2, 2)) & set(table) == set()


def test_what_an_ended_request_left_is_free_and_handed_out_last() -> None:
    pool, lost = BlockPool(8, 16), list[int]()
    tables = {i: pool.take(i, 2) for i in (1, 2, 3)}
    pool.share(4, tables[3])
    for i in (1, 2, 3):
        pool.leave(i, tables[i], lambda i=i: lost.append(i))  # type: ignore[misc]
        pool.give_back(i, tables[i])
    pool.check({4: tables[3]})
    assert pool.num_free == 6
    other = pool.take(5, 2)
    assert not set(other) & {*tables[1], *tables[2]}
    assert not lost
    pool.give_back(4, tables[3])
    pool.clear(2)
    taken = pool.take(6, 6)
    assert set(tables[1]) < set(taken)
    assert sorted(lost) == [1, 3]
    pool.check({5: other, 6: taken})


def test_a_request_that_loses_blocks_is_counted_with_those_that_share_them() -> None:
    first, second = request_of(1, [0, 1, 2]), request_of(2, [0, 1, 3])
    freed = Freed({0: 2, 1: 2})
    assert freed.add(first) == 1
    trial = freed.copy()
    assert trial.add(second) == 3
    assert freed.add(second) == 3
    assert Freed({0: 2, 1: 2}, [[2, 3]]).add(first) == 0


# -- decisions on a virtual clock


def sharing(policy: Any, limits: Any, num_kept: int = 100, costs: SimCosts | None = None) -> World:
    world = World(policy, limits, costs=costs)
    world.loop.prefix = world.loop.effects._prefix = PrefixCache(
        world.runner, "", PageStore[Any](num_kept), PAGE, world.scheduler.found, world.clock,
        world.scheduler.pool, named=world.scheduler.name_pages,
    )  # fmt: skip
    return world


@pytest.mark.parametrize("seed", range(12))
def test_any_plan_over_shared_blocks_gives_every_request_its_tokens(seed: int) -> None:
    r = random.Random(seed)
    limits = replace(
        short_of_kv(r.choice([30, 60, 400]), r.choice([4, 10_000])),
        max_num_seqs=r.choice([2, 3, 8]),
    )
    policy = SwapFuzz(seed) if seed % 2 else load_policy(r.choice(["qllm2", "rota", "priority"]))
    world = sharing(policy, limits, r.choice([3, 100]))
    for i in range(8):  # prompts of the simulator begin alike
        world.submit(r.choice([0, 3, 10]), r.randint(1, 400), r.randint(1, 10), at_ns=i * 10**6)
    while not world.idle:
        world.step()
        assert world.loop.prefix is not None
        world.loop.prefix.check()
        assert world.clock.at_ns < 10**12
    assert not world.loop.policy_errors
    finished_well(world)
    assert not world.scheduler.pool.has_names


def test_thirty_two_chats_hold_their_system_prompt_once() -> None:
    limits = replace(short_of_kv(480, 0), max_num_seqs=32, max_step_tokens=4096)
    world = sharing(load_policy("qllm2"), limits, costs=SimCosts(expert_ns=1_000))
    world.submit(LS, 2048, 200)
    while not world.tokens[0]:
        world.step()
    for i in range(31):  # a copy for each would take 31 * 128 blocks
        world.submit(LS, 2048 + 20 + i, 100)
    most = 0
    while not world.idle:
        world.step()
        most = max(most, limits.num_blocks - world.scheduler.pool.num_free)
    finished_well(world)
    assert most <= 128 + 32 * (-(-(51 + 200) // 16))
    assert not events(world, trace.Evicted)
    assert world.loop.prefix is not None
    assert world.loop.prefix.stats()["shared_tokens"] == 31 * 2048


def test_ls_takes_the_blocks_of_all_requests_that_share_them() -> None:
    """One victim would free little: what it shares stays with the other."""
    limits = replace(short_of_kv(40, 10_000), max_num_seqs=8)
    world = sharing(load_policy("qllm2"), limits)
    for tokens in (8 * PAGE, 8 * PAGE + 40):
        world.submit(BE, tokens, 60)
        while not world.tokens[len(world.submitted) - 1]:
            world.step()
    assert len(world.scheduler.pool.shared) == 8 * PAGE // 16
    chat = world.submit(LS, 560, 3)
    prefix, world.loop.prefix = world.loop.prefix, None
    world.loop.take()  # the chat finds nothing
    world.loop.prefix = prefix
    world.run()
    finished_well(world)
    assert {e.request_id for e in events(world, trace.SwappedOut)} == {0, 1}
    assert world.tokens[chat] == 3


def test_a_hit_does_not_wait_for_a_request_that_the_same_plan_evicts() -> None:
    """The blocks that a planned request refers to are its own before victims are chosen."""
    limits = replace(short_of_kv(24, 0), max_num_seqs=8)
    world = sharing(load_policy("qllm2"), limits)
    world.submit(BE, 200, 60)
    while not world.tokens[0]:
        world.step()
    world.submit(LS, 340, 4)
    world.run()
    finished_well(world)
    assert world.clock.at_ns < 10**4 * NS_PER_MS
