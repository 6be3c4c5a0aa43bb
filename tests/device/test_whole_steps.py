"""Steps that nothing would stop run whole where each boundary inside one costs a launch."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from qllm.device import lanes
from qllm.plan import Row
from qllm.plugins import load_policy
from qllm.policy import CostTable
from qllm.scheduler.batch import runs_whole
from qllm.types import Priority, SamplingParams
from tests.support.native_lanes import LIMITS, dry_loop

LS, BE = Priority.LS, Priority.BE
LAYERS = 3
DECODES = (Row(1, 5, 6, 0, LAYERS), Row(2, 9, 10, 0, LAYERS))


def is_whole(rows: tuple[Row, ...] = DECODES, slice_ns: int | None = None, **other: Any) -> bool:
    view: Any = SimpleNamespace(
        whole_steps=other.get("whole_steps", True),
        costs=CostTable((1000, 1000), 10),
        shape=SimpleNamespace(num_layers=LAYERS),
    )
    tier_of = {1: LS, 2: other.get("tier", LS)}
    return runs_whole(view, rows, tier_of, LS, slice_ns)


def test_decodes_of_the_best_class_alone_run_whole() -> None:
    assert is_whole()
    assert not is_whole(whole_steps=False)
    assert not is_whole(tier=BE)  # joined: newcomers of the best class stop it
    assert not is_whole((Row(1, 0, 6, 0, LAYERS),))  # a prefill is long
    assert not is_whole((Row(1, 5, 6, 1, LAYERS),))  # it was parked
    assert not is_whole((Row(1, 5, 6, 0, 2),))


def test_a_slice_that_outlasts_the_step_stops_nothing() -> None:
    assert is_whole(slice_ns=1_000_000)
    assert not is_whole(slice_ns=1)


def stages_of_steps(priority: int, whole_steps: bool) -> list[int]:
    """Stages of each step of a request alone: its prefill, then its decodes."""
    limits = replace(LIMITS, whole_steps=whole_steps)
    loop, _ = dry_loop(load_policy("qllm2"), limits=limits)
    loop.add(
        [1, 2, 3], priority=priority, arrival_ns=0, sampling=SamplingParams(),
        seed=0, max_tokens=4, request_id=1,
    )  # fmt: skip
    found = []
    for step in range(3):
        found.append(0)
        while True:
            loop.replay(loop.before(step))
            found[-1] += 1
            if loop.after(step) == lanes.OVER:
                break
    return found


@pytest.mark.parametrize(
    ("priority", "whole_steps", "stages"),
    [(LS, True, [3, 1, 1]), (LS, False, [3, 3, 3]), (BE, True, [3, 3, 3])],
)
def test_a_decode_step_of_the_best_class_is_one_stage(
    priority: int, whole_steps: bool, stages: list[int]
) -> None:
    """The native side decides so too (`tests/long/differential.py` compares the two)."""
    assert stages_of_steps(priority, whole_steps) == stages


@pytest.mark.parametrize(("step_ns", "stages"), [(1000, 1), (2_000_000_000, 3)])
def test_a_slice_of_the_stall_bound_that_a_step_may_outlast_ends_it(
    step_ns: int, stages: int
) -> None:
    """A BE request holds KV and is due within a second; nobody rides along."""
    limits = replace(LIMITS, whole_steps=True)
    loop, _ = dry_loop(load_policy("qllm2", {"ride_frac": 0}), limits=limits)
    loop.scheduler.costs = CostTable((step_ns, step_ns), 10)
    found = []
    for step, priority in enumerate((BE, LS, None)):
        if priority is not None:
            loop.add(
                [1, 2, 3], priority=priority, arrival_ns=step, sampling=SamplingParams(),
                seed=0, max_tokens=4, request_id=step,
            )  # fmt: skip
        found.append(0)
        while True:
            loop.replay(loop.before(step))
            found[-1] += 1
            if loop.after(step) == lanes.OVER:
                break
    assert found == [3, 3, stages]
