"""The shipped policies: each passes `check_policy`, and each does what no other one does."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest

from qllm.errors import ConfigError, PolicyError
from qllm.plan import NO_STOP, Plan, Row
from qllm.plugins import installed_policies, load_policy
from qllm.policy import RankPolicy, View, next_row
from qllm.record import trace
from qllm.sim.check import check_policy
from qllm.sim.runner import SimCosts
from qllm.sim.world import LIMITS, World
from qllm.types import NS_PER_MS, Cap, Grain, Priority, Slo
from qllm_policies.qllm import Qllm
from qllm_policies.qllm2 import Qllm2

LS, BE = Priority.LS, Priority.BE
SETTINGS: dict[str, dict[str, Any]] = {
    "chunked": {"step_tokens": 64},
    "chunked-priority": {"step_tokens": 64},
    "edf": {},
    "fcfs": {},
    "layered": {"group_tokens": 64},
    "ls-first": {},
    "priority": {},
    "priority-layered": {"group_tokens": 64},
    "qllm": {},
    "qllm2": {},
}
"""Settings at which a small world shows what is peculiar to a policy."""
NAMES = sorted(SETTINGS)


ALL = sorted(set(installed_policies()) | set(NAMES))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ALL)
def test_a_shipped_policy_passes_check_policy(name: str) -> None:
    report = check_policy(load_policy(name))
    assert report.num_states >= 2000
    assert report.evictions


@pytest.mark.parametrize("name", ALL)
def test_a_short_check_passes_and_finds_the_same_again(name: str) -> None:
    first, again = (check_policy(load_policy(name), num_states=300, seed=7) for _ in range(2))
    assert first.num_states >= 300
    assert first == again


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("qllm2", {"chunk_tokens": 48}),
        ("qllm2", {"max_be_stall_ms": None}),
        ("chunked", {"step_tokens": 24}),
        ("chunked-priority", {"step_tokens": 7, "chunk_tokens": 5}),
        ("layered", {"group_tokens": 20}),
        ("layered", {"group_tokens": 1, "chunk_tokens": 33}),
        ("priority-layered", {"group_tokens": 20, "max_be_stall_ms": 100}),
        ("priority-layered", {"group_tokens": 90, "max_groups": 2, "max_be_stall_ms": None}),
        ("edf", {"min_chunk_tokens": 3, "tpot_ms": 20}),
    ],
)
@pytest.mark.parametrize(
    "num_states",
    [250, pytest.param(1000, marks=pytest.mark.slow)],  # the smaller number in the short lane
)
def test_their_settings_pass_too(name: str, settings: dict[str, Any], num_states: int) -> None:
    check_policy(load_policy(name, settings), num_states=num_states, seed=1)


# -- what each does and no other


class Steps:
    """The steps of a mixed world under a policy, as its trace tells them."""

    def __init__(self, policy: Any) -> None:
        self.world = World(
            policy, replace(LIMITS, max_num_seqs=4), costs=SimCosts(expert_ns=NS_PER_MS)
        )
        for i in range(6):
            soon = Slo(ttft_ms=300.0) if i == 5 else None
            self.world.submit(BE, 200, 20, at_ns=i * 7 * NS_PER_MS, slo=soon)
            self.world.submit(LS, 30, 6, at_ns=(20 + i * 45) * NS_PER_MS)
        for i in range(3):
            self.world.submit(LS, 30, 6, at_ns=(26 + i * 45) * NS_PER_MS)
            self.world.submit(BE, 300, 20, at_ns=(30 + i * 40) * NS_PER_MS)
        self.world.run()
        self.events = list(self.world.record)

    def priority(self, row: Row) -> int:
        return self.world.submitted[row.request_id].priority

    def is_prefill(self, row: Row) -> bool:
        return row.lo < len(self.world.submitted[row.request_id].token_ids)

    def programs(self) -> Iterator[tuple[Row, ...]]:
        yield from (e.rows for e in self.events if isinstance(e, trace.Planned))

    def mates_of_ls_prefills(self) -> set[str]:
        mates = set()
        for rows in self.programs():
            if any(self.priority(r) == LS and self.is_prefill(r) for r in rows):
                others = [r for r in rows if self.priority(r) == BE]
                mates |= {"prefill" if self.is_prefill(r) else "decode" for r in others}
        return mates

    def ls_overtakes(self) -> bool:
        order = list(dict.fromkeys(r.request_id for rows in self.programs() for r in rows))
        arrivals = [self.world.submitted[i].arrival_ns for i in order]
        return arrivals != sorted(arrivals)

    def hurries_a_be_deadline(self) -> bool:
        """The one BE request with a target starts before older ones of its class."""
        order = list(dict.fromkeys(r.request_id for rows in self.programs() for r in rows))
        be = [i for i in order if self.world.submitted[i].priority == BE]
        return any(
            self.world.submitted[b].arrival_ns < self.world.submitted[a].arrival_ns
            for a, b in pairwise(be)
            if self.world.submitted[a].slo.ttft_ms is not None
        )

    def largest_step(self) -> int:
        return max(sum(row.num_tokens for row in rows) for rows in self.programs())

    def layers_passed(self) -> set[tuple[int, int]]:
        """Layers that prefill rows pass in one step, where it is not all of them."""
        layers = self.world.runner.shape.num_layers
        rows = {(r.start_layer, r.end_layer) for rows in self.programs() for r in rows}
        return {(a, b) for a, b in rows if b < layers or (a, b - a) == (layers, 0)}

    def ls_passes_a_parked_cohort(self) -> bool:
        """An LS prefill runs while a BE prefill stands between two groups of layers."""
        parked: set[int] = set()
        for rows in self.programs():
            here = {r.request_id for r in rows}
            if parked - here and any(self.priority(r) == LS and self.is_prefill(r) for r in rows):
                return True
            parked -= here
            parked |= {
                r.request_id
                for r in rows
                if self.priority(r) == BE and r.end_layer < self.world.runner.shape.num_layers
            }
        return False

    def parks(self) -> bool:
        return any(isinstance(e, trace.Parked) for e in self.events)

    def parks_inside_layers(self) -> bool:
        return any(isinstance(e, trace.Parked) and e.inside_layer for e in self.events)


PROPERTIES: dict[str, Callable[[Steps], bool]] = {
    "chunked": lambda s: not s.ls_overtakes() and s.largest_step() == 64,
    "chunked-priority": lambda s: s.ls_overtakes() and s.largest_step() == 64,
    "edf": lambda s: s.hurries_a_be_deadline(),
    "fcfs": lambda s: not s.ls_overtakes() and not s.layers_passed() and s.largest_step() > 64,
    "layered": lambda s: not s.ls_overtakes() and bool(s.layers_passed()),
    "ls-first": lambda s: (
        s.ls_overtakes()
        and "decode" in s.mates_of_ls_prefills()
        and s.largest_step() > 64
        and not s.layers_passed()
        and not s.hurries_a_be_deadline()
    ),
    "priority-layered": lambda s: s.ls_passes_a_parked_cohort(),
    "qllm": lambda s: s.parks_inside_layers() and s.mates_of_ls_prefills() == {"prefill"},
    "priority": lambda s: not s.parks() and s.ls_overtakes() and not s.mates_of_ls_prefills(),
    "qllm2": lambda s: s.parks_inside_layers() and not s.mates_of_ls_prefills(),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_policy_has_a_trace_property_that_no_other_has(name: str) -> None:
    steps = Steps(load_policy(name, SETTINGS[name]))
    assert [other for other, holds in PROPERTIES.items() if holds(steps)] == [name]


def test_qllm2_at_grain_step_is_priority() -> None:
    def rows(policy: Any) -> list[tuple[Row, ...]]:
        return list(Steps(policy).programs())

    assert rows(Qllm2(grain=Grain.STEP)) == rows(load_policy("priority"))
    assert rows(Qllm2()) != rows(load_policy("priority"))


def story(world: World) -> list[str]:
    """One word per row and one string per program: 3p is a prefill row of request 3."""
    world.run(500)
    out = []
    for event in world.record:
        if isinstance(event, trace.Planned):
            words = []
            for row in event.rows:
                prompt = len(world.submitted[row.request_id].token_ids)
                words.append(f"{row.request_id}{'p' if row.lo < prompt else 'd'}")
            out.append(" ".join(words))
    return out


def test_qllm_keeps_the_order_of_algorithm_1() -> None:
    world = World(Qllm(max_batch=2))
    for priority in (BE, BE, LS):
        world.submit(priority, 20, 3)
    assert story(world) == ["2p 0p", "2d 0d", "2d 0d", "1p", "1d", "1d"]
    world = World(Qllm(max_batch=2))  # a full batch of LS decodes goes before an LS prefill
    for _ in range(3):
        world.submit(LS, 20, 3)
    assert story(world) == ["0p 1p", "0d 1d", "0d 1d", "2p", "2d", "2d"]


def test_qllm_starves_be_prefill_behind_be_decodes_and_qllm2_does_not() -> None:
    stories = {}
    for policy in (Qllm(), Qllm2()):
        world = World(policy)
        world.submit(BE, 20, 30)
        world.step()
        world.submit(BE, 20, 2)
        stories[type(policy)] = story(world)
    assert stories[Qllm][-2:] == ["1p", "1d"]
    assert stories[Qllm2].index("0d 1p") == 1


def test_a_name_or_a_setting_that_is_unknown_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown policy 'nope'; installed: .*qllm2"):
        load_policy("nope")
    with pytest.raises(ConfigError, match="no parameter 'speed'"):
        load_policy("qllm2", {"speed": 1})


# -- what check_policy finds


class Simple:
    """LS alone while there is LS; else everything."""

    needs = Cap.NONE

    def plan(self, view: View) -> Plan:
        best = min(min(r.priority for r in view.requests), LS + 1)
        some = [r for r in view.requests if r.priority <= best] or list(view.requests)
        rows: list[Row] = []
        tokens, free = view.max_step_tokens, view.num_free_blocks
        for r in sorted(some, key=lambda r: (not r.is_admitted, r.request_id)):
            row = next_row(r, view, max(1, tokens))
            need = view.blocks_needed(row)
            fits = need <= free or (r.is_admitted and not rows)
            if fits and (r.is_decoding or row.num_tokens <= tokens):
                rows.append(row)
                free -= need
                tokens -= 0 if r.is_decoding else row.num_tokens
        wait = view.now_ns + NS_PER_MS
        return Plan(rows=tuple(rows[: view.max_num_seqs]), stop_below=NO_STOP, wait_until_ns=wait)


def test_check_policy_finds_a_policy_that_writes_to_the_view() -> None:
    class Writer(Simple):
        def plan(self, view: View) -> Plan:
            view.requests[0].served_ns += 1  # type: ignore[misc]
            return super().plan(view)

    class Hooked(Simple):
        def on_step_done(self, view: View, report: Any) -> None:
            if view.requests:
                view.requests[0].block_table.append(1)  # type: ignore[attr-defined]

    with pytest.raises(PolicyError, match="policy Writer changes requests or frames in plan"):
        check_policy(Writer(), num_states=50)
    with pytest.raises(PolicyError, match=r"policy Hooked changes .* in on_step_done"):
        check_policy(Hooked(), num_states=50)


def test_check_policy_finds_a_policy_that_is_not_deterministic() -> None:
    calls: list[int] = []

    class Moody(Simple):
        def plan(self, view: View) -> Plan:
            calls.append(1)
            plan = super().plan(view)
            return replace(plan, slice_ns=len(calls) * NS_PER_MS)

    with pytest.raises(PolicyError, match="policy Moody is not deterministic"):
        check_policy(Moody(), num_states=50)


def test_check_policy_lets_a_policy_keep_its_own_state() -> None:
    class Counting(Simple):
        def __init__(self) -> None:
            self.count = 0

        def on_arrival(self, view: View, request: Any) -> None:
            self.count += 1

        def plan(self, view: View) -> Plan:
            return replace(super().plan(view), slice_ns=(1 + self.count) * NS_PER_MS)

    mine = Counting()
    report = check_policy(mine, num_states=300)
    assert (mine.count, report.policy) == (0, "Counting")


def test_check_policy_wants_two_ints_of_a_rank() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Floats(RankPolicy):
        def rank(self, *numbers: int) -> tuple[int, int]:
            return numbers[1], numbers[0] / 3  # type: ignore[return-value]

    with pytest.raises(PolicyError, match=r"Floats raised TypeError: rank returned .* two ints"):
        check_policy(Floats(), num_states=50)


def test_check_policy_finds_a_stall() -> None:
    class Sleeper(Simple):
        def plan(self, view: View) -> Plan:
            plan = super().plan(view)
            rows = [r for r in plan.rows if view.by_id[r.request_id].priority <= LS]
            return replace(plan, rows=tuple(rows))

    with pytest.raises(PolicyError, match=r"policy Sleeper stalls: .* requests \[.*seed 0"):
        check_policy(Sleeper(), num_states=2000)


def test_check_policy_holds_a_policy_to_the_bound_it_declares() -> None:
    class Liar(Simple):
        max_be_stall_ms = 100

    with pytest.raises(PolicyError, match=r"policy Liar lets .* max_be_stall_ms=100 \(I14\)"):
        check_policy(Liar(), num_states=50)


def test_check_policy_finds_a_plan_that_breaks_a_rule() -> None:
    class Half(Simple):
        def half(self, row: Row) -> Row:
            return row._replace(end_layer=1) if row.num_tokens == 1 else row

        def plan(self, view: View) -> Plan:
            plan = super().plan(view)
            return replace(plan, rows=tuple(map(self.half, plan.rows)))

    with pytest.raises(PolicyError, match=r"policy Half .*\(I4\).*world \d+ of seed 3"):
        check_policy(Half(), num_states=200, seed=3)
