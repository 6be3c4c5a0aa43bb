"""The policies that plan by themselves: flow, mlfq, laps, rota."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qllm import trace
from qllm.check import LIMITS, World, check_policy
from qllm.errors import ConfigError
from qllm.plan import Plan, Row
from qllm.plugins import installed_policies, load_policy
from qllm.policy import View
from qllm.scheduler import Scheduler
from qllm.sim import SimCosts
from qllm.types import NS_PER_MS, Cap, Evict, Grain, Priority, RequestId, Slo
from qllm_policies.flow import Flow
from qllm_policies.laps import Laps
from qllm_policies.mlfq import Mlfq
from qllm_policies.parts import age, fill
from qllm_policies.rota import Rota

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


def decodes_take_turns_whatever_their_targets(policy: Any) -> bool:
    world = world_of(policy, seats=1)
    for tpot_ms in (1.0, 500.0, 10_000.0):
        world.submit(BE, 20, 12, slo=Slo(ttft_ms=1.0, tpot_ms=tpot_ms))
    world.run()
    turns = [ids[0] for ids in decoded(world)]
    middle = turns[6:24]
    return all(len(set(middle[i : i + 3])) == 3 for i in range(len(middle) - 2))


PROPERTIES: dict[str, Callable[[Any], bool]] = {
    "flow": an_equal_with_an_earlier_deadline_stops_a_prefill_between_layers,
    "mlfq": a_used_up_quantum_lets_equals_pass_to_their_end,
    "laps": it_idles_while_a_short_prompt_waits,
    "rota": decodes_take_turns_whatever_their_targets,
}


@pytest.mark.parametrize("name", FULL)
def test_a_full_policy_has_a_trace_property_that_no_other_has(name: str) -> None:
    found = [other for other in installed_policies() if PROPERTIES[name](load_policy(other))]
    assert found == [name]
