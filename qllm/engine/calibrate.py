"""Measurement of step costs before an engine serves, for a loop that does not fit costs itself."""

from collections.abc import Callable

from qllm.engine.costs import COST_LEVELS, StepCosts
from qllm.ingress.inproc import StopWord
from qllm.plan import ANY_ARRIVAL, ModelShape, Plan, Row
from qllm.policy import CostTable
from qllm.runner.protocol import Runner
from qllm.scheduler.blocks import BlockTables
from qllm.scheduler.compile import compile_program
from qllm.scheduler.decision import Limits
from qllm.scheduler.program import START, Program
from qllm.types import FrameId, Grain, RequestId, SamplingParams

PROMPT = 32
"""Tokens of the prompt of each measured request."""
ROUNDS = 3
GREEDY = SamplingParams(temperature=0, seed=0)


def measure_costs(runner: Runner, limits: Limits, now_ns: Callable[[], int]) -> CostTable:
    """Run a prefill and decodes of 1, 2, 4 ... requests, and fit a cost table to the times.

    Args:
        runner: A runner without requests. The measured requests are removed from the runner at the
            end.
        limits: Upper bounds of requests, tokens and blocks of the measurement.
        now_ns: A clock. After `runner.run` returns, the clock must include the work of that run.
    """
    costs, stop = StepCosts(), StopWord(now_ns)  # never lowered here
    prompt = max(1, min(PROMPT, limits.max_step_tokens))
    sizes = [1 << level for level in range(COST_LEVELS) if 1 << level <= limits.max_num_seqs]
    room, each = limits.num_blocks, limits.block_size
    while len(sizes) > 1 and _blocks(sizes, prompt, runner.shape, each) > room:
        sizes.pop()
    frame_id, tables = FrameId(1 << 40), BlockTables(room, each, runner.shape)

    def run(rows: list[Row]) -> None:
        nonlocal frame_id
        program = _program(runner, limits, frame_id, rows)
        frame_id = FrameId(frame_id + 1)
        start_ns = now_ns()
        runner.accept(program, tables.cover(program.rows))
        runner.run(program, START, stop)
        runner.finish(program)
        costs.observe(program, now_ns() - start_ns)

    for i in range(sizes[-1]):
        runner.add(RequestId(i), [1] * prompt, GREEDY, prompt, prompt + ROUNDS * len(sizes) + 1)
        run([Row(RequestId(i), 0, prompt, 0, runner.shape.num_layers)])
    length = dict.fromkeys(range(sizes[-1]), prompt)
    for size in sizes:
        for _ in range(ROUNDS):
            layers = runner.shape.num_layers
            run([Row(RequestId(i), length[i], length[i] + 1, 0, layers) for i in range(size)])
            for i in range(size):
                length[i] += 1
    for i in range(sizes[-1]):
        runner.remove(RequestId(i))
    return costs.table()


def _blocks(sizes: list[int], prompt: int, shape: ModelShape, block_size: int) -> int:
    """Return the KV blocks of all requests.

    The first requests take part in decodes of every size.
    """
    rounds = [ROUNDS * sum(size > i for size in sizes) for i in range(sizes[-1])]
    return sum(shape.blocks_for(prompt + tokens, block_size) for tokens in rounds)


def _program(runner: Runner, limits: Limits, frame_id: FrameId, rows: list[Row]) -> Program:
    return compile_program(
        Plan(rows=tuple(rows), grain=Grain.STEP, stop_below=ANY_ARRIVAL),
        frame_id=frame_id,
        samples=[True] * len(rows),
        shape=runner.shape,
        cuts=runner.cuts,
        one_query_from=[PROMPT] * len(rows) if limits.batch_invariant else None,
    )
