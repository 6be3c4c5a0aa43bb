"""KV over the link of a simulated machine: both directions at once, and passes that wait for it."""

from dataclasses import replace

import pytest

from qllm.plan import ModelShape, Plan, Row
from qllm.scheduler.compile import compile_program
from qllm.sim.costs import CostFile
from qllm.sim.presets import preset
from qllm.sim.runner import SimRunner, VirtualClock
from qllm.sim.timeline import SimCosts
from qllm.types import SamplingParams

SHAPE = ModelShape(2, 8, 2, (True, True), 97, 4096)
OUT_NS, IN_NS = 1_000, 3_000
"""Times of one token's copy out and back."""
COSTS = SimCosts(out_token_ns=OUT_NS, in_token_ns=IN_NS)
TOKENS = 10


class Link:
    """A simulated runner of three requests, whose first two hold KV of ten tokens."""

    def __init__(self, costs: SimCosts = COSTS) -> None:
        self.clock = VirtualClock()
        self.runner = SimRunner(SHAPE, self.clock, costs)
        for request_id in range(3):
            self.runner.add(request_id, [1] * (TOKENS + 1), SamplingParams(seed=0), TOKENS, 64)
        self.runner.refer(0, [0], TOKENS)
        self.runner.refer(1, [1], TOKENS)

    def begin_ns(self, request_id: int, blocks: list[int], lo: int = TOKENS) -> int:
        """Return the time at which a pass of one row can begin."""
        row = Row(request_id, lo, TOKENS + 1, 0, SHAPE.num_layers)
        program = compile_program(
            Plan(rows=(row,)),
            frame_id=request_id,
            samples=[True],
            shape=SHAPE,
            cuts=self.runner.cuts,
        )
        self.runner.accept(program, [blocks])
        return self.clock.at_ns


def test_a_pass_waits_until_its_kv_is_back() -> None:
    link = Link()
    link.runner.swap_out(0)
    link.runner.swap_in(0, [2])
    assert link.clock.at_ns == 0  # moves run beside computation
    assert link.begin_ns(0, [2]) == TOKENS * (OUT_NS + IN_NS)


def test_a_copy_out_and_a_copy_back_run_at_the_same_time() -> None:
    link = Link()
    link.runner.swap_out(0)
    link.clock.at_ns = 1_000_000  # the first copy has ended
    link.runner.swap_in(0, [2])
    link.runner.swap_out(1)
    assert link.begin_ns(0, [2]) == 1_000_000 + TOKENS * IN_NS
    assert link.begin_ns(2, [1], lo=0) == 1_000_000 + TOKENS * max(IN_NS, OUT_NS)


def test_copies_of_one_direction_follow_each_other() -> None:
    link = Link()
    link.runner.swap_out(0)
    link.runner.swap_out(1)
    assert link.begin_ns(2, [1], lo=0) == 2 * TOKENS * OUT_NS


def test_a_block_is_written_only_after_its_last_kv_is_copied_out() -> None:
    link = Link()
    link.runner.swap_out(0)
    link.clock.at_ns = 1_000_000
    link.runner.swap_out(1)
    link.runner.swap_in(0, [1])  # into the block that is being copied out
    assert link.begin_ns(0, [1]) == 1_000_000 + TOKENS * (OUT_NS + IN_NS)


def test_a_pass_with_other_blocks_does_not_wait() -> None:
    link = Link()
    link.runner.swap_out(0)
    assert link.begin_ns(2, [5], lo=0) == 0


def test_without_a_link_moves_take_no_time() -> None:
    link = Link(SimCosts())
    link.runner.swap_out(0)
    link.runner.swap_in(0, [0])
    assert link.begin_ns(0, [0]) == 0


def test_a_move_that_blocks_the_machine_is_paid_in_addition() -> None:
    link = Link(replace(COSTS, move_token_ns=7))
    link.runner.swap_out(0)
    assert link.clock.at_ns == TOKENS * 7


@pytest.mark.parametrize(
    ("machine", "bytes_per_ns"), [("gh200", 450), ("h100", 64), ("h200", 64), ("cpu", None)]
)
def test_a_preset_has_the_link_of_its_machine(machine: str, bytes_per_ns: int | None) -> None:
    costs = preset(machine, "300m").sim_costs()
    token_bytes = 2 * 4 * 64 * 12 * 2  # KV of the 300M model: 4 heads of 64, 12 layers, bfloat16
    want = 0 if bytes_per_ns is None else token_bytes / (bytes_per_ns * 0.8)
    assert costs.out_token_ns == costs.in_token_ns == pytest.approx(want)
    assert costs.swap_token_ns == pytest.approx(want)


def test_a_cost_file_without_a_link_still_reads() -> None:
    whole = preset("gh200", "300m")
    older = {k: v for k, v in whole.costs.items() if k not in ("out_token_ns", "in_token_ns")}
    found = CostFile.model_validate(whole.model_dump() | {"costs": older})
    assert found.sim_costs().out_token_ns == found.sim_costs().in_token_ns == 0
