"""Programs of real models whose rows are swapped out and in."""

from qllm.plan import Plan, Row
from qllm.runner.runner import TorchRunner
from qllm.scheduler.compile import compile_program
from qllm.scheduler.program import START, Index, Program
from qllm.types import Grain, Sampled
from tests.support.replay_schedule import Always


def one_pass(runner: TorchRunner, rows: list[Row], frame_id: int) -> Program:
    """A program of these rows, accepted."""
    known = [len(runner.token_ids(row.request_id)) for row in rows]
    program = compile_program(
        Plan(rows=tuple(rows), grain=Grain.EXPERT, stop_below=0),
        frame_id=frame_id,
        samples=[row.hi == n for row, n in zip(rows, known, strict=True)],
        shape=runner.shape,
        cuts=runner.cuts,
    )
    runner.accept(program)
    return program


def finished(runner: TorchRunner, program: Program, at: Index = START) -> list[Sampled]:
    while at != program.end:
        at = runner.run(program, at, Always())
    return runner.finish(program)
