"""The number of drafted tokens, in simulated worlds: never far below the best fixed number."""

import random

import pytest

from qllm.policy import CostTable
from qllm.scheduler.drafts import CHOICES, Utility

MS = 1_000_000
ZEN = CostTable((10 * MS, 12 * MS, 18 * MS, 27 * MS, 45 * MS, 80 * MS), MS)
"""A verify row of 5 tokens costs twice a row of one."""
FLAT = CostTable((10 * MS, 10 * MS, 11 * MS, 11 * MS, 12 * MS, 14 * MS), MS)
STEEP = CostTable((10 * MS, 19 * MS, 38 * MS, 76 * MS, 150 * MS, 300 * MS), MS)
WORLDS = {
    "always right": lambda n, k: 1.0,
    "always wrong": lambda n, k: 0.0,
    "half": lambda n, k: 0.5,
    "first ones": lambda n, k: 0.9 if k < 2 else 0.0,
    "in turns": lambda n, k: 0.95 if n // 200 % 2 else 0.05,
    "seldom": lambda n, k: 0.1,
}


def served(
    costs: CostTable, world: str, fixed: int | None, num_others: int, draft_ns: int = 0
) -> float:
    """Nanoseconds per token of a request, and of those beside it, for 4,000 steps."""
    rng, utility = random.Random(5), Utility()
    tokens = steps_ns = 0
    for _ in range(4000):
        num = fixed
        if num is None:
            num = utility.most(costs, num_others, 8, lambda n: n * draft_ns)
        accepted = 0
        while accepted < num and rng.random() < WORLDS[world](tokens, accepted):
            accepted += 1
        if num:
            utility.saw(num, accepted)
        tokens += 1 + accepted
        steps_ns += costs.decode(num_others + 1 + num) + num * draft_ns
    return steps_ns / (tokens + 4000 * num_others)


@pytest.mark.parametrize("num_others", [0, 3])
@pytest.mark.parametrize("costs", [ZEN, FLAT, STEEP], ids=["zen", "flat", "steep"])
@pytest.mark.parametrize("world", WORLDS)
def test_it_is_nearly_as_good_as_the_best_fixed_number(
    world: str, costs: CostTable, num_others: int
) -> None:
    best = min(served(costs, world, n, num_others) for n in (0, *CHOICES) if n <= 8)
    assert best / served(costs, world, None, num_others) >= 0.97


@pytest.mark.parametrize("draft_ns", [MS // 2, 3 * MS, 9 * MS, 25 * MS])
@pytest.mark.parametrize("costs", [ZEN, FLAT, STEEP], ids=["zen", "flat", "steep"])
@pytest.mark.parametrize("world", WORLDS)
def test_it_weighs_the_time_that_a_drafter_takes(
    world: str, costs: CostTable, draft_ns: int
) -> None:
    """As of a draft model that takes a part of the model's time, or more than all of it."""
    best = min(served(costs, world, n, 0, draft_ns) for n in (0, *CHOICES) if n <= 8)
    assert best / served(costs, world, None, 0, draft_ns) >= 0.93


def test_a_drafter_that_takes_longer_than_the_model_is_seldom_asked() -> None:
    utility, asked = Utility(), 0
    for _ in range(1000):
        num = utility.most(FLAT, 0, 8, lambda n: n * 15 * MS)
        asked += num
        if num:
            utility.saw(num, num)
    assert asked < 30
    assert utility.most(FLAT, 0, 8) == 8


@pytest.mark.parametrize("world", ["always right", "always wrong", "half"])
def test_a_new_request_begins_as_others_went(world: str) -> None:
    """Its first rows are those of a request that has run for long."""
    rng, usual = random.Random(1), Utility()
    for n in range(500):
        accepted = 0
        while accepted < 4 and rng.random() < WORLDS[world](n, accepted):
            accepted += 1
        usual.saw(4, accepted)
    new = Utility.like(usual)
    assert new.most(ZEN, 0, 8) == {"always right": 8, "always wrong": 0, "half": 1}[world]
    new.saw(8, 8)
    new.saw(8, 8)
    new.saw(8, 8)
    assert new.most(ZEN, 0, 8) >= 1, "its own drafts count more than those of others"


def test_nothing_is_drafted_beyond_the_limit() -> None:
    utility = Utility()
    for _ in range(100):
        num = utility.most(FLAT, 0, 3)
        assert num <= 3
        utility.saw(num, num)
    assert utility.most(FLAT, 0, 0) == 0


def test_a_drafter_that_fails_is_tried_again_now_and_then() -> None:
    utility = Utility()
    nums = []
    for _ in range(300):
        nums.append(utility.most(ZEN, 0, 4))
        if nums[-1]:
            utility.saw(nums[-1], 0)
    trials = [n for n in nums if n]
    assert 10 < len(trials) < 40
    assert set(trials[3:]) == {1}
    lost_ns = sum(ZEN.decode(1 + n) - ZEN.decode(1) for n in trials)
    assert lost_ns < 0.03 * 300 * ZEN.decode(1)


def test_where_none_pays_it_is_reckoned_again_after_a_few_tokens() -> None:
    asked: list[int] = []

    def takes(num_drafts: int) -> int:
        asked.append(num_drafts)
        return 10**9

    costs, utility = CostTable((10**6, 2 * 10**6), 1), Utility()
    assert [utility.most(costs, 0, 4, takes) for _ in range(42)] == [0] * 42
    each = len(CHOICES) + 1
    assert len(asked) == 11 * each, "at the first token and each fourth one after it"
    utility.most(costs, 3, 4, takes)
    assert len(asked) == 12 * each, "other rows change what pays"
    utility.most(costs, 3, 4, takes)
    assert len(asked) == 12 * each
    utility.saw(1, 1)
    utility.most(costs, 3, 4, takes)
    assert len(asked) == 13 * each, "a verified row does too"
