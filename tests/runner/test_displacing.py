"""The slots that lose their experts, against a slow choice that goes through all uses again."""

from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qllm.runner.displacing import (
    HALF_LIFE,
    LEAST_SCORE,
    LS_STAYS_NS,
    LS_WEIGHT,
    NONE,
    Displacing,
    Slots,
    Use,
)

TOP_K = 2
Kinds = st.sampled_from(list(Use))


@dataclass
class Slow:
    """All uses so far, from which each question is answered anew."""

    num_slots: int
    uses: list[tuple[tuple[int, ...], Use, int]] = field(default_factory=list)

    def scores(self) -> tuple[Counter[int], Counter[int]]:
        """Return the scores of experts, and those of LS alone."""
        all_of, ls_of = Counter[int](), Counter[int]()
        total = 0
        for numbers, use, _ in self.uses:
            if use is Use.PASSING:
                continue
            before, total = total, total + len(numbers)
            half_life = HALF_LIFE * self.num_slots
            for _ in range(total // half_life - before // half_life):
                for scores in (all_of, ls_of):
                    for number in list(scores):
                        scores[number] /= Fraction(2)  # type: ignore[assignment]
                        if scores[number] < LEAST_SCORE:
                            del scores[number]
            for number in numbers:
                all_of[number] += int(LS_WEIGHT) if use is Use.LS else 1
                ls_of[number] += use is Use.LS
        return all_of, ls_of

    def choose(
        self, slots: Slots, most: int, use: Use, now_ns: int, *, by_right: bool
    ) -> list[int]:
        num = len(slots.owner)
        scores, of_ls = self.scores()
        stays: set[int] = set()
        last = max((at for _, kind, at in self.uses if kind is Use.LS), default=None)
        if use is not Use.LS and last is not None and now_ns < last + LS_STAYS_NS:
            liked = [s for s in range(num) if of_ls[int(slots.owner[s])] > 0]
            liked.sort(key=lambda s: (-of_ls[int(slots.owner[s])], s))
            stays = set(liked[: max(0, min(num // 2, num - 2 * TOP_K))])
        empty = [s for s in range(num) if slots.may_go[s] and slots.owner[s] == NONE]
        rest = [s for s in range(num) if slots.may_go[s] and slots.owner[s] != NONE]
        rest = [s for s in rest if by_right or s not in stays]
        rest.sort(key=lambda s: (scores[int(slots.owner[s])], -slots.used[s], s))
        if use is Use.PASSING and not by_right:
            ring = max(2 * TOP_K, num // 8)
            of = [o if o != NONE else c for o, c in zip(slots.owner, slots.coming, strict=True)]
            cold = sum(one == NONE or scores[int(one)] == 0 for one in of)
            passing = [s for s in rest if scores[int(slots.owner[s])] == 0]
            rest = [*passing, *rest[len(passing) :][: max(0, ring - cold)]][:ring]
        return [*empty, *rest][:most]


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, int, list[Any]]:
    """Slots, experts, and uses with their times."""
    num_slots, num_experts = draw(st.integers(TOP_K, 24)), draw(st.integers(4, 30))
    some = st.lists(st.integers(0, num_experts - 1), max_size=12, unique=True).map(tuple)
    step = st.sampled_from((0, 1, LS_STAYS_NS // 2, LS_STAYS_NS))
    uses, at = [], 0
    for numbers, use, ns in draw(st.lists(st.tuples(some, Kinds, step), max_size=40)):
        at += ns
        uses.append((numbers * draw(st.sampled_from((1, 1, 9))), use, at))
    return num_slots, num_experts, uses


@settings(max_examples=300, deadline=None)
@given(histories(), st.data())
def test_any_uses_lead_to_the_slots_of_the_slow_choice(
    history: tuple[int, int, list[Any]], data: st.DataObject
) -> None:
    num_slots, num_experts, uses = history
    fast, slow = Displacing(num_experts, num_slots, TOP_K), Slow(num_slots)
    now_ns = 0
    for repeated, use, now_ns in uses:
        for numbers in _once(repeated):
            fast.count(np.array(numbers, dtype=np.int64), use, now_ns)
            slow.uses.append((numbers, use, now_ns))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    experts = rng.permutation(num_experts)[:num_slots].tolist()
    held: Any = np.array(experts + [NONE] * (num_slots - len(experts)))
    rng.shuffle(held)
    is_coming = rng.random(num_slots) < 0.2
    owner, coming = np.where(is_coming, NONE, held), np.where(is_coming, held, NONE)
    may_go = (rng.random(num_slots) < 0.8) & ~is_coming
    slots = Slots(owner, coming, rng.integers(0, 5, num_slots), may_go)
    most, kind = data.draw(st.integers(0, num_slots)), data.draw(Kinds)
    by_right = data.draw(st.booleans())
    at = now_ns + data.draw(st.sampled_from((0, LS_STAYS_NS - 1, LS_STAYS_NS)))
    found = fast.choose(slots, most, kind, at, by_right=by_right)
    assert found == slow.choose(slots, most, kind, at, by_right=by_right)
    assert all(may_go[found])
    if by_right:
        assert len(found) == min(most, int(may_go.sum())), "any slot that may go is taken"


def _once(numbers: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return calls in each of which an expert is used once."""
    num = max(Counter(numbers).values(), default=1)
    return [tuple(dict.fromkeys(numbers))] * num


def full(displacing: Displacing, num: int, used: list[int] | None = None) -> Slots:
    """Slots that hold the first experts, all of which may go."""
    owner = np.arange(num)
    return Slots(owner, np.full(num, NONE), np.array(used or [0] * num), np.ones(num, bool))


def test_of_experts_with_one_score_the_one_used_last_leaves() -> None:
    """A prompt whose experts fit only in part finds some of them again in its next pass."""
    num_experts, num_slots = 12, 6
    displacing = Displacing(num_experts, num_slots, TOP_K)
    slots, at = full(displacing, num_slots), 0
    slots.owner[:] = NONE
    hits = 0
    for _ in range(10):
        for expert in range(num_experts):
            at += 1
            if expert not in slots.owner:
                (slot,) = displacing.choose(slots, 1, Use.LS, 0)
                slots.owner[slot] = expert
            else:
                hits += 1
            slots.used[slots.owner == expert] = at
            displacing.count(np.array([expert]), Use.LS, 0)
    assert hits >= 0.8 * 9 * num_slots, "the one used longest ago would never be found"


def test_a_score_ages_until_the_expert_has_none() -> None:
    displacing = Displacing(8, 4, TOP_K)
    displacing.count(np.array([0]), Use.LS, 0)
    slots = full(displacing, 4)
    assert displacing.choose(slots, 4, Use.BE, LS_STAYS_NS)[-1] == 0
    for _ in range(HALF_LIFE * 4 * 3):
        displacing.count(np.array([1]), Use.BE, 0)
    assert displacing.choose(slots, 4, Use.BE, LS_STAYS_NS)[2:] == [0, 1], "BE is used more now"
    for _ in range(HALF_LIFE * 4 * 8):
        displacing.count(np.array([1]), Use.BE, 0)
    assert displacing.choose(slots, 3, Use.BE, LS_STAYS_NS) == [0, 2, 3], "0 has no score"


@pytest.mark.parametrize("num_slots", [TOP_K, 2 * TOP_K, 9, 64])
def test_be_has_the_experts_of_two_tokens_beside_ls(num_slots: int) -> None:
    """With little memory LS has no share, so that BE goes on without displacing LS by right."""
    displacing = Displacing(num_slots, num_slots, TOP_K)
    displacing.count(np.arange(num_slots), Use.LS, 0)
    found = displacing.choose(full(displacing, num_slots), num_slots, Use.BE, 0)
    assert len(found) == num_slots - displacing.num_ls >= min(num_slots, 2 * TOP_K)
    assert displacing.num_ls == (
        32 if num_slots == 64 else max(0, num_slots // 2 * (num_slots > 8))
    )


def test_a_long_prompt_takes_few_slots_of_experts_with_a_score() -> None:
    displacing = Displacing(64, 40, TOP_K)
    slots = full(displacing, 40)
    assert displacing.choose(slots, 40, Use.PASSING, 0) == [0, 1, 2, 3, 4], "not all that are cold"
    displacing.count(np.arange(37), Use.BE, 0)
    assert displacing.choose(slots, 40, Use.PASSING, 0) == [37, 38, 39, 0, 1]
    assert displacing.choose(slots, 3, Use.PASSING, 0) == [37, 38, 39]
    slots.owner[39], slots.may_go[39] = NONE, False
    slots.coming[39] = 60
    assert displacing.choose(slots, 40, Use.PASSING, 0) == [37, 38, 0, 1], "one comes already"
    slots.coming[39] = 5
    assert displacing.choose(slots, 40, Use.PASSING, 0) == [37, 38, 0, 1, 2]
    assert len(displacing.choose(slots, 40, Use.PASSING, 0, by_right=True)) == 39


def test_uses_of_a_long_prompt_do_not_count() -> None:
    displacing = Displacing(8, 4, TOP_K)
    displacing.count(np.array([0]), Use.PASSING, 0)
    assert displacing.choose(full(displacing, 4, [0, 9, 0, 0]), 1, Use.BE, 0) == [1]
