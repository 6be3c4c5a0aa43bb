# Over 500 lines: one law of one policy per test.
"""The policies that plan by themselves: flow, mlfq, laps, rota."""

import copy
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from qllm.errors import ConfigError
from qllm.plan import Plan, Row
from qllm.plugins import installed_policies, load_policy
from qllm.policy import CostTable, View
from qllm.record import trace
from qllm.scheduler.scheduler import Scheduler
from qllm.sim.check import check_policy
from qllm.sim.runner import SimCosts
from qllm.sim.world import LIMITS, World
from qllm.types import NS_PER_MS, Evict, Grain, Priority, RequestId, Slo
from qllm_policies.flow import Flow
from qllm_policies.laps import Laps, boundary
from qllm_policies.mlfq import Mlfq
from qllm_policies.parts import behind_all, fill
from qllm_policies.rota import Rota
from tests.support.scheduling import LAYERS, SHARES, Machine

LS, BE = Priority.LS, Priority.BE
FULL = ["flow", "laps", "mlfq", "rota"]
SLOW = SimCosts(expert_ns=NS_PER_MS, head_ns=NS_PER_MS)


def world_of(policy: Any, seats: int = 8, **limits: Any) -> World:
    return World(policy, replace(LIMITS, max_num_seqs=seats, **limits), costs=SLOW)


def planned(world: World) -> list[tuple[Row, ...]]:
    return [event.rows for event in world.record if isinstance(event, trace.Planned)]


def decoded(world: World) -> list[tuple[RequestId, ...]]:
    """Who decoded, step by step."""
    steps = []
    for rows in planned(world):
        sizes = {r: len(world.submitted[r.request_id].token_ids) for r in rows}
        ids = tuple(r.request_id for r in rows if r.lo >= sizes[r])
        if ids:
            steps.append(ids)
    return steps


# -- what each does and no other


def an_equal_with_an_earlier_deadline_stops_a_prefill_between_layers(policy: Any) -> bool:
    world = world_of(policy)
    late = world.submit(BE, 500, 2)
    soon = world.submit(BE, 30, 2, at_ns=4 * NS_PER_MS, slo=Slo(ttft_ms=20.0))
    world.run()
    parked = [e for e in world.record if isinstance(e, trace.Parked)]
    order = [row.request_id for rows in planned(world) for row in rows]
    return (
        [e.request_ids for e in parked] == [(late,)]
        and not parked[0].inside_layer
        and parked[0].preempted
        and order[:2] == [late, soon]
        and world.metrics[late].evict_recomputed_tokens == 0  # type: ignore[union-attr]
    )


def a_used_up_quantum_lets_equals_pass_to_their_end(policy: Any) -> bool:
    world = world_of(policy, seats=1)
    old = world.submit(BE, 20, 30)
    new = world.submit(BE, 20, 3, at_ns=60 * NS_PER_MS)
    world.run()
    turns = [ids[0] for ids in decoded(world)]
    first = turns.index(new)
    return 3 < first < 20 and turns[first : first + 2] == [new, new] and turns[-1] == old


def it_idles_while_a_short_prompt_waits(policy: Any) -> bool:
    world = world_of(policy)
    world.submit(LS, 30, 2)
    world.run()
    first = next(e for e in world.record if isinstance(e, trace.Planned))
    return first.at_ns >= 5 * NS_PER_MS


def a_newcomer_takes_the_seat_of_who_is_on_time_for_one_token(policy: Any) -> bool:
    """And who is late himself keeps it."""
    first = {}
    for tpot_ms in (0.001, 10_000.0):
        world = world_of(policy, seats=1)
        old = world.submit(BE, 20, 30, slo=Slo(tpot_ms=tpot_ms))
        new = world.submit(BE, 20, 3, slo=Slo(60.0, 10_000.0), at_ns=60 * NS_PER_MS)
        world.run()
        tokens = [e.request_id for e in world.record if isinstance(e, trace.Token)]
        first[tpot_ms] = tokens.index(new)
        if [ids[0] for ids in decoded(world)] != [old] * 29 + [new] * 2:
            return False
    return first[10_000.0] < 25 and first[0.001] == 30


PROPERTIES: dict[str, Callable[[Any], bool]] = {
    "flow": an_equal_with_an_earlier_deadline_stops_a_prefill_between_layers,
    "mlfq": a_used_up_quantum_lets_equals_pass_to_their_end,
    "laps": it_idles_while_a_short_prompt_waits,
    "rota": a_newcomer_takes_the_seat_of_who_is_on_time_for_one_token,
}


@pytest.mark.parametrize("name", FULL)
def test_a_full_policy_has_a_trace_property_that_no_other_has(name: str) -> None:
    found = [other for other in installed_policies() if PROPERTIES[name](load_policy(other))]
    assert found == [name]


# -- in any world


@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize(
    ("num_states", "seed"),
    [
        (800, 0),
        pytest.param(3000, 0, marks=pytest.mark.slow),  # the same, of more states
        pytest.param(3000, 1, marks=pytest.mark.slow),
    ],
)
def test_a_full_policy_passes_many_worlds(name: str, num_states: int, seed: int) -> None:
    report = check_policy(load_policy(name), num_states=num_states, seed=11 + seed)
    assert report.evictions
    assert (report.preemptions > 0) == (name == "flow")


SETTINGS: list[Any] = [
    Flow(ls_ttft_ms=1, be_ttft_ms=1, tpot_ms=1),
    Flow(batch_tokens=1),
    Mlfq(quantum_ms=1, levels=3, starve_ms=5),
    Mlfq(levels=1),
    Laps(short_tokens=20, window_ms=50, chunk_tokens=7),
    Laps(short_tokens=10_000, max_batch=1, window_ms=0),
    Rota(ttft_share=0, lag_weight=0, ttft_ms=1),
    Rota(tpot_share=0),
]


@pytest.mark.parametrize(
    "num_states",
    [400, pytest.param(1500, marks=pytest.mark.slow)],  # the smaller number in the short lane
)
@pytest.mark.parametrize("policy", SETTINGS, ids=repr)
def test_their_settings_pass_too(policy: Any, num_states: int) -> None:
    check_policy(policy, num_states=num_states, seed=5)


class FullMachine(Machine):
    """The machine of test_scheduler under the full policies."""

    @initialize(
        policy=st.sampled_from([*FULL, *SETTINGS]),
        blocks=st.sampled_from([14, 20, 200]),
        seats=st.integers(1, 4),
        tokens=st.sampled_from([40, 512]),
        grain=st.sampled_from(Grain),
        exact=st.booleans(),
        share=st.sampled_from(SHARES),
        most=st.integers(1, 16),
        exit_layer=st.integers(0, LAYERS - 1),
    )
    def start(self, policy: Any, **how: Any) -> None:
        fresh = load_policy(policy) if isinstance(policy, str) else copy.deepcopy(policy)
        super().start(policy=fresh, **how)


FullMachine.TestCase.settings = settings(
    Machine.TestCase.settings, max_examples=100, stateful_step_count=25
)
TestFullMachine = FullMachine.TestCase


@pytest.mark.parametrize("name", FULL)
def test_planning_changes_nothing_of_the_policy(name: str) -> None:
    class Looking(Scheduler):
        def _ask(self, view: View) -> Plan:
            before = copy.deepcopy(vars(self.policy))
            plan = super()._ask(view)
            assert vars(self.policy) == before
            return plan

    world = World(load_policy(name), replace(LIMITS, max_num_seqs=2), scheduler=Looking)
    for i in range(6):
        world.submit([LS, BE][i % 2], 40 + 90 * i, 8, at_ns=i * 9 * NS_PER_MS)
    world.run()
    assert not world.loop.policy_errors
    assert len(world.finished) == 6


@pytest.mark.parametrize(
    ("name", "settings", "text"),
    [
        ("flow", {"tpot_ms": 0}, "tpot_ms=0 must be an integer >= 1"),
        ("flow", {"batch_tokens": 1.5}, "batch_tokens=1.5 must be an integer >= 1"),
        ("mlfq", {"levels": 0}, "levels=0 must be an integer >= 1"),
        ("mlfq", {"quantum_ms": True}, "quantum_ms=True must be an integer >= 1"),
        ("laps", {"window_ms": -1}, "window_ms=-1 must be an integer >= 0"),
        ("laps", {"short_tokens": 0}, "short_tokens=0 must be an integer >= 1"),
        ("rota", {"ttft_share": -0.1}, r"ttft_share=-0.1 must be a number in \[0, 1000\]"),
        ("rota", {"ttft_share": -1}, r"ttft_share=-1 must be a number in \[0, 1000\]"),
        ("rota", {"lag_weight": "3"}, r"lag_weight='3' must be a number in \[0, 1000\]"),
        ("laps", {"speed": 1}, "no parameter 'speed'; it has: short_tokens, window_ms"),
    ],
)
def test_a_parameter_that_is_out_of_range_is_refused(
    name: str, settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        load_policy(name, settings)


# -- flow


def test_flow_goes_on_with_the_parked_prefill_when_the_earlier_one_is_done() -> None:
    world = world_of(Flow())
    late = world.submit(BE, 400, 1)
    for i in range(2):
        world.submit(BE, 10, 1, at_ns=(3 + i) * NS_PER_MS, slo=Slo(ttft_ms=9.0 - 3 * i))
    world.run()
    ends = [e.request_id for e in world.record if isinstance(e, trace.Finished)]
    assert ends == [2, 1, late]
    assert sum(e.request_id == late for e in world.record if isinstance(e, trace.Token)) == 1
    assert [e.start for e in world.record if isinstance(e, trace.Ran)].count((0, 0)) == 3


def test_flow_decodes_when_a_target_would_be_missed_and_no_sooner() -> None:
    world = world_of(Flow(be_ttft_ms=60_000, tpot_ms=100))
    talker = world.submit(BE, 10, 6)
    while not world.tokens[talker]:
        world.step()
    for _ in range(20):
        world.submit(BE, 512, 1)
    world.run()
    times = [e.at_ns for e in world.record if isinstance(e, trace.Token) and e.request_id == talker]
    gaps = [(b - a) / NS_PER_MS for a, b in pairwise(times)]
    assert all(80 <= gap <= 115 for gap in gaps[:-1]), gaps  # a layer takes about 13 ms


def test_flow_gives_a_prefill_what_time_the_decodes_can_spare() -> None:
    world = world_of(Flow(tpot_ms=100))
    world.submit(BE, 10, 6)
    while not world.tokens[0]:
        world.step()
    world.submit(BE, 400, 1)
    world.loop.take()
    world.scheduler.costs = CostTable((30 * NS_PER_MS,), NS_PER_MS)
    told_ns = world.clock.at_ns
    plan = world.scheduler.policy.plan(world.scheduler.view(told_ns + 10 * NS_PER_MS))
    assert [row.request_id for row in plan.rows] == [1]
    assert plan.slice_ns == (100 - 30 - 10) * NS_PER_MS
    plan = world.scheduler.policy.plan(world.scheduler.view(told_ns + 70 * NS_PER_MS))
    assert [row.request_id for row in plan.rows] == [0]


def test_flow_resumes_a_prefill_before_one_that_is_due_later() -> None:
    world = world_of(Flow())
    world.submit(BE, 500, 1)
    world.submit(BE, 500, 1, at_ns=3 * NS_PER_MS)
    world.run()
    assert [e.request_id for e in world.record if isinstance(e, trace.Finished)] == [0, 1]
    assert next(e.request_ids for e in world.record if isinstance(e, trace.Parked)) == (0,)
    assert [rows[0].request_id for rows in planned(world)] == [0, 1]


def test_flow_takes_turns_when_no_target_can_be_met() -> None:
    world = world_of(Flow(tpot_ms=1))
    world.submit(BE, 10, 40)
    world.submit(BE, 500, 1, at_ns=20 * NS_PER_MS)
    world.run()
    parked = [e for e in world.record if isinstance(e, trace.Parked)]
    assert [e.layer for e in parked] == [2, 3]
    assert [e.request_id for e in world.record if isinstance(e, trace.Finished)] == [1, 0]


def test_flow_batches_short_prompts_and_runs_a_long_one_alone() -> None:
    world = world_of(Flow(batch_tokens=100))
    for size in (40, 300, 70, 60, 30):
        world.submit(BE, size, 1)
    world.run()
    assert [tuple(r.request_id for r in rows) for rows in planned(world)] == [
        (0,),
        (1,),
        (2,),
        (3, 4),
    ]


# -- mlfq

COSTS = CostTable((NS_PER_MS,), NS_PER_MS)
"""One millisecond per decode row and per prefill token."""


def level(world: World, request_id: RequestId) -> int:
    return world.scheduler.policy._entries[request_id].level


@pytest.mark.parametrize(("tokens", "expected"), [(1, 0), (20, 0), (21, 1), (40, 1), (81, 3)])
def test_mlfq_joins_the_level_with_a_quantum_for_the_prefill(tokens: int, expected: int) -> None:
    world = world_of(Mlfq())
    world.scheduler.costs = COSTS
    world.submit(BE, tokens, 2)
    world.loop.take()
    assert level(world, 0) == expected


def test_mlfq_lets_a_short_prompt_pass_a_long_one_that_came_first() -> None:
    world = world_of(Mlfq(), seats=1)
    world.scheduler.costs = COSTS
    world.submit(BE, 400, 1)
    world.submit(BE, 10, 1)
    world.run()
    assert [r.request_id for rows in planned(world) for r in rows] == [1, 0]


def test_mlfq_evicts_from_the_worst_level_first() -> None:
    world = world_of(Mlfq())
    world.scheduler.costs = COSTS
    for tokens in (10, 400, 30, 100):
        world.submit(BE, tokens, 9)
    world.step()
    view = world.scheduler.view(world.clock.at_ns)
    assert all(r.is_admitted for r in view.requests)
    order = [i for i, _ in world.scheduler.policy.victims(view, 1, frozenset({0}))]
    assert order == [1, 3, 2]


def test_mlfq_demotes_by_doubling_quanta() -> None:
    world = world_of(Mlfq(quantum_ms=30, levels=4))
    world.submit(BE, 10, 100)
    seen: list[tuple[int, int]] = []
    while not world.idle:
        world.step()
        if 0 in world.loop.live and (not seen or seen[-1][0] != level(world, 0)):
            seen.append((level(world, 0), world.clock.at_ns // NS_PER_MS))
    assert [number for number, _ in seen] == [0, 1, 2, 3]
    stays = [b - a for (_, a), (_, b) in pairwise(seen[1:])]
    assert 60 <= stays[0] < 80
    assert 120 <= stays[1] < 140
    assert not world.scheduler.policy._entries


def test_mlfq_brings_back_a_starving_request() -> None:
    longest = {}
    for starve_ms in (100, 10_000):
        world = world_of(Mlfq(starve_ms=starve_ms), seats=1)
        old = world.submit(BE, 20, 20)
        for i in range(60):
            world.submit(BE, 10, 2, at_ns=(60 + i * 11) * NS_PER_MS)
        world.run()
        mine = [e.at_ns for e in world.record if isinstance(e, trace.Token) and e.request_id == old]
        longest[starve_ms] = max(b - a for a, b in pairwise(mine)) / NS_PER_MS
    assert longest[100] < longest[10_000] / 2, longest


# -- laps


def test_laps_gathers_short_prompts_for_a_window() -> None:
    world = world_of(Laps(window_ms=7))
    world.scheduler.costs = CostTable((40 * NS_PER_MS,), NS_PER_MS // 10)  # reading: 20 ms
    for ms in (0, 3, 6, 9):
        world.submit(BE, 30, 1, at_ns=ms * NS_PER_MS)
    world.run()
    first = next(e for e in world.record if isinstance(e, trace.Planned))
    assert first.at_ns == 6 * NS_PER_MS  # the next one is expected at 9, behind the window
    assert [r.request_id for r in first.rows] == [0, 1, 2]


@pytest.mark.parametrize(
    ("reading_ms", "arrivals_ms", "start_ms"),
    [
        (40, (0,), 7),  # no time between arrivals is known: the whole window
        (40, (0, 1), 2),  # the next one was expected at 2 and did not come
        (40, (0, 1, 2), 3),
        (2, (0, 2), 2),  # two prompts would wait 2 ms each, to save 1 ms
        (5, (0, 1), 2),  # two prompts wait 1 ms each, to save 2.5 ms
    ],
)
def test_the_window_of_laps_ends_when_the_next_prompt_is_not_worth_the_wait(
    reading_ms: int, arrivals_ms: tuple[int, ...], start_ms: int
) -> None:
    world = world_of(Laps(window_ms=7))
    world.scheduler.costs = CostTable((reading_ms * NS_PER_MS,), NS_PER_MS // 100)
    for ms in arrivals_ms:
        world.submit(BE, 30, 1, at_ns=ms * NS_PER_MS)
    world.run()
    first = next(e for e in world.record if isinstance(e, trace.Planned))
    assert first.at_ns == start_ms * NS_PER_MS


def test_laps_does_not_wait_when_short_prompts_are_rare() -> None:
    world = world_of(Laps(short_tokens=64, window_ms=7))
    for ms in (0, 200, 400):
        world.submit(BE, 30, 1, at_ns=ms * NS_PER_MS)
    world.run()
    starts = [e.at_ns for e in world.record if isinstance(e, trace.Planned)]
    assert starts == [ms * NS_PER_MS for ms in (7, 200, 400)]


@pytest.mark.parametrize("num_cached", [0, 352])
def test_a_later_round_is_short_for_laps_if_the_cache_has_the_earlier_rounds(
    num_cached: int,
) -> None:
    world = world_of(Laps(short_tokens=64, chunk_tokens=100, window_ms=0))
    world.submit(BE, 30, 1)
    first = world.submit(BE, 400, 1, at_ns=1)
    later = world.submit(BE, 400, 1, at_ns=2)

    while later not in world.scheduler.requests:
        world.step()
    if num_cached:
        world.scheduler.found(later, num_cached, [])
    plan = world.scheduler.policy.plan(world.scheduler.view(world.clock.at_ns))
    assert [row.request_id for row in plan.rows] == [later if num_cached else first]


def test_a_long_prompt_stays_long_to_its_end() -> None:
    """Its last chunk has as many tokens as a short prompt, and shares no step with one."""
    world = world_of(Laps(short_tokens=64, chunk_tokens=100, window_ms=0))
    long = world.submit(BE, 330, 1)
    for i in range(60):
        world.submit(LS, 30, 1, at_ns=(1 + 3 * i) * NS_PER_MS)
    world.run()
    steps = [{row.request_id for row in rows} for rows in planned(world)]
    assert [ids for ids in steps if long in ids] == [{long}] * 4
    assert world.scheduler.policy._begun == set()  # forgotten


@pytest.mark.parametrize(
    ("decode_ms", "prefill_us", "tokens"),
    [
        ((9.0,), 700, 6),
        ((9.0, 10.0, 12.0, 16.0, 25.0, 40.0), 700, 17),  # at 16: 17; at 32: 28
        ((9.0, 10.0, 11.0, 12.0), 700, 8),  # the last entry
        ((9.0, 9.0), 700, 6),
        ((0.5, 1.0), 700, 1),  # one token computes for longer than it reads
        ((20.0,) * 7, 33, 303),
        ((9.0, 10.0), 0, 10_000_000),  # nothing was measured
    ],
)
def test_a_prompt_is_short_if_reading_weights_takes_longer_than_computing(
    decode_ms: tuple[float, ...], prefill_us: int, tokens: int
) -> None:
    costs = CostTable(tuple(int(ms * NS_PER_MS) for ms in decode_ms), 1000 * prefill_us)
    assert boundary(costs) == tokens


def test_laps_does_not_wait_for_a_full_batch_or_a_late_target() -> None:
    full = world_of(Laps(window_ms=500, max_batch=2))
    full.submit(BE, 30, 1)
    full.submit(BE, 30, 1, at_ns=NS_PER_MS)
    full.run()
    late = world_of(Laps(short_tokens=64, window_ms=500, margin_ms=4))
    late.scheduler.costs = COSTS
    late.submit(LS, 30, 1, slo=Slo(ttft_ms=50.0))
    late.run()
    starts = [next(e.at_ns for e in w.record if isinstance(e, trace.Planned)) for w in (full, late)]
    assert starts == [NS_PER_MS, (50 - 30 - 4) * NS_PER_MS]


def test_laps_never_mixes_kinds_and_starves_no_request() -> None:
    world = world_of(Laps(chunk_tokens=64, window_ms=1))
    long = world.submit(BE, 500, 1)
    world.submit(LS, 20, 15)
    for i in range(40):
        world.submit(LS, 60, 1, at_ns=(5 + i * 12) * NS_PER_MS)
    world.run()
    kinds = []
    for rows in planned(world):
        decode = {row.lo >= len(world.submitted[row.request_id].token_ids) for row in rows}
        is_long = {row.request_id == long for row in rows}
        assert (len(decode), len(is_long)) == (1, 1), rows
        kinds.append("d" if decode == {True} else "l" if is_long == {True} else "s")
    assert "".join(kinds).rstrip("s") == "lsds" * 8 + "ds" * 5 + "d"


def test_laps_runs_one_long_prompt_at_a_time() -> None:
    world = world_of(Laps(chunk_tokens=512))
    for _ in range(2):
        world.submit(BE, 300, 1)
    world.run()
    steps = [tuple(row.request_id for row in rows) for rows in planned(world)]
    assert steps == [(0,), (1,)]


# -- rota


def test_rota_is_first_come_first_served_while_everything_fits() -> None:
    world = world_of(Rota(), seats=3)
    for _ in range(3):
        world.submit(BE, 20, 3)
    world.run()
    assert decoded(world) == [(0, 1, 2), (0, 1, 2)]


def test_rota_takes_turns_where_it_is_told_to() -> None:
    world = world_of(Rota(tpot_share=0), seats=1)
    for tpot_ms in (1.0, 500.0, 10_000.0):
        world.submit(BE, 20, 12, slo=Slo(ttft_ms=1.0, tpot_ms=tpot_ms))
    world.run()
    middle = [ids[0] for ids in decoded(world)][6:24]
    assert all(len(set(middle[i : i + 3])) == 3 for i in range(len(middle) - 2))


def test_rota_lets_the_longest_running_go_first() -> None:
    world = world_of(Rota(tpot_share=0), seats=2)
    for _ in range(3):
        world.submit(BE, 20, 40, slo=Slo(ttft_ms=1.0))
    policy, scheduler = world.scheduler.policy, world.scheduler
    while len(world.tokens) < 3:
        world.step()
    for _ in range(6):
        lags = {
            r.request_id: policy.lag_ns(r, world.clock.at_ns) for r in scheduler.requests.values()
        }
        ran = {row.request_id for row in planned(world)[-1]}
        assert all((lag < 0) == (i in ran) for i, lag in lags.items()), (lags, ran)
        (left_out,) = set(lags) - ran
        first = min(ran, key=lambda i: (lags[i], -i))
        world.step()
        now = {row.request_id for row in planned(world)[-1]}
        assert left_out in now
        assert first not in now


def test_rota_keeps_the_order_of_arrival_while_everything_fits() -> None:
    world = world_of(Rota(ttft_share=0), seats=3, max_step_tokens=100)
    world.submit(BE, 100, 9)
    world.submit(BE, 100, 9, at_ns=NS_PER_MS)
    world.submit(BE, 100, 9, at_ns=2 * NS_PER_MS)
    world.run()
    assert [rows[0].request_id for rows in planned(world)[:3]] == [0, 0, 0]


def test_rota_admits_a_newcomer_once_it_lags() -> None:
    first = {}
    for ttft_ms in (100.0, 400.0):
        world = world_of(Rota(ttft_share=0.5), seats=1)
        for _ in range(2):
            world.submit(BE, 20, 60, slo=Slo(ttft_ms=1.0))
        late = world.submit(BE, 20, 2, slo=Slo(ttft_ms=ttft_ms), at_ns=NS_PER_MS)
        world.run()
        token = next(e for e in world.record if isinstance(e, trace.Token) and e.request_id == late)
        first[ttft_ms] = token.at_ns / NS_PER_MS
    assert 50 < first[100.0] < 150
    assert 200 < first[400.0] < 450


# -- filling a batch


def some_view(blocks: int, requests: list[tuple[int, int, bool]]) -> View:
    """Requests by class, prompt tokens, and whether their prompt is done."""
    world = world_of(Mlfq(), num_blocks=blocks, max_step_tokens=4096)
    for priority, tokens, _ in requests:
        world.submit(priority, tokens, 4)
    world.loop.take()
    for request, (_, tokens, is_done) in zip(
        world.scheduler.requests.values(), requests, strict=True
    ):
        if is_done:
            need = world.scheduler.pool.blocks_for(tokens)
            request.block_table = world.scheduler.pool.take(request.request_id, need)
            request.commit(tokens, 0, 1)
    return world.scheduler.view(0)


def filled(view: View) -> list[RequestId]:
    return [row.request_id for row in fill(view, view.requests)]


def test_a_batch_takes_no_more_kv_than_there_is() -> None:
    assert filled(some_view(20, [(BE, 160, False), (BE, 160, False)])) == [0, 1]
    assert filled(some_view(19, [(BE, 160, False), (BE, 160, False)])) == [0]


def test_a_newcomer_without_kv_holds_up_the_newcomers_behind_it() -> None:
    view = some_view(20, [(BE, 156, True), (BE, 300, False), (BE, 16, False), (BE, 12, True)])
    assert filled(view) == [0, 3]


def test_kv_of_a_worse_class_counts_and_that_of_equals_only_for_holders_of_kv() -> None:
    assert filled(some_view(10, [(LS, 100, False), (BE, 156, True)])) == [0]
    assert filled(some_view(10, [(BE, 100, False), (BE, 156, True)])) == [1]
    assert filled(some_view(10, [(BE, 16, True), (BE, 144, True)]))[0] == 0


def test_victims_are_behind_every_request_that_stays() -> None:
    requests = [(BE, 16, True), (LS, 16, True), (BE, 16, False), (BE, 16, True), (LS, 16, False)]
    view = some_view(10, requests)

    def victims(*keep: RequestId) -> list[RequestId]:
        return [r.request_id for r in behind_all(view, keep)]

    assert victims(0) == [3]
    assert victims(1) == victims(4) == victims(1, 4) == [0, 3]
    assert victims(2) == victims(0, 2) == victims(3) == []


# -- short of KV


def short_of_kv(policy: Any) -> World:
    world = world_of(policy, num_blocks=24)
    for size in (100, 160, 110):
        world.submit(BE, size, 60)
    while len(world.tokens) < 3:
        world.step()
    world.submit(BE, 60, 2)
    world.clock.at_ns += 10**11
    world.loop.take()
    return world


@pytest.mark.parametrize("name", ["mlfq", "rota"])
def test_others_than_the_kept_lose_their_blocks_where_kv_is_short(name: str) -> None:
    world = short_of_kv(load_policy(name))
    view = world.scheduler.view(world.clock.at_ns)
    pairs = world.scheduler.policy.victims(view, 1, frozenset({0}))
    assert {i for i, _ in pairs} == {1, 2}
    assert {way for _, way in pairs} == {Evict.SWAP}


def test_rota_gives_a_newcomer_no_kv_of_others() -> None:
    world = short_of_kv(Rota(ttft_ms=1))
    view = world.scheduler.view(world.clock.at_ns)
    assert view.num_free_blocks < 4
    assert 3 not in {row.request_id for row in world.scheduler.policy.plan(view).rows}
