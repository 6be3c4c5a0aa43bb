"""Captured stages on a CPU: a driver that runs programs by stages, and its prompts."""

import random
from typing import Any

from qllm.cuda.backend import cuda_runner
from qllm.cuda.lanes import Bucket
from qllm.plan import NO_CUTS, NO_STOP, Plan, Row
from qllm.runner.runner import TorchRunner
from qllm.scheduler.compile import compile_program
from qllm.scheduler.program import START, Program
from qllm.types import Grain, SamplingParams
from tests.support import interpret  # noqa: F401 - mends the interpreter
from tests.support.fake_cuda import FakeCuda
from tests.support.families import VOCAB, make_model

GREEDY = SamplingParams(temperature=0)

BUCKETS = [Bucket(4, False), Bucket(64, True)]

NUM_PAGES = 64


def device_runner(family: str, **settings: Any) -> TorchRunner:
    how = {"num_pages": NUM_PAGES, "page_size": 4, "max_num_seqs": 4, "max_total_tokens": 96}
    return cuda_runner(make_model(family), **{**how, "graphs": False, **settings})


def captured_runner(family: str, **settings: Any) -> tuple[TorchRunner, FakeCuda]:
    fake = FakeCuda()
    how = {"graphs": fake, "buckets": BUCKETS, "layers_per_stage": 1, **settings}
    return device_runner(family, **how), fake


class Poll:
    """A stop word that fires now and then."""

    stop_at_ns: int | None = None

    def __init__(self, rng: random.Random | None = None, p: float = 0.0) -> None:
        self.rng, self.p = rng or random.Random(0), p

    @property
    def word(self) -> int:
        return -1 if self.rng.random() < self.p else 1 << 30

    def now_ns(self) -> int:
        return 0


class Driver:
    """Drives a runner as the engine would."""

    def __init__(self, runner: TorchRunner) -> None:
        self.runner, self.frames = runner, 0
        self.tables = runner.backend.new_tables()
        self.tokens: dict[int, list[int]] = {}

    def add(self, request: int, ids: list[int], sampling: SamplingParams = GREEDY) -> None:
        self.runner.add(request, ids, sampling, len(ids), len(ids) + 24)
        self.tokens[request] = []

    def row(self, request: int, most: int = 1 << 30) -> Row:
        lo, num = self.runner.num_committed(request), len(self.runner.token_ids(request))
        return Row(request, lo, min(num, lo + most), 0, self.runner.shape.num_layers)

    def program(self, rows: list[Row], grain: Grain) -> Program:
        self.frames += 1
        samples = [
            row.end_layer == self.runner.shape.num_layers
            and row.hi == len(self.runner.token_ids(row.request_id))
            for row in rows
        ]
        program = compile_program(
            Plan(rows=tuple(rows), grain=grain, stop_below=NO_STOP if grain is Grain.STEP else 5),
            frame_id=self.frames,
            samples=samples,
            shape=self.runner.shape,
            cuts=NO_CUTS,
        )
        self.runner.accept(program, self.tables.cover(program.rows))
        return program

    def finish(self, program: Program) -> None:
        for token in self.runner.finish(program):
            self.tokens[token.request_id].append(token.token_id)

    def sweep(self, rows: list[Row], grain: Grain = Grain.STEP) -> None:
        program = self.program(rows, grain)
        assert self.runner.run(program, START, Poll()) == program.end
        self.finish(program)


def prompt_of(num: int, seed: int) -> list[int]:
    rng = random.Random(1000 * num + seed)
    return [rng.randrange(VOCAB) for _ in range(num)]


PROMPTS = [prompt_of(n, 1) for n in (23, 7, 40)]


def schedule(
    runner: TorchRunner, sampling: SamplingParams, grain: Grain, prompts: list[list[int]] = PROMPTS
) -> dict[int, list[int]]:
    """Chunks beside decodes: every kind of batch."""
    driver = Driver(runner)
    for i, ids in enumerate(prompts):
        driver.add(i, ids, sampling)
    driver.sweep([driver.row(0), driver.row(1)], grain)
    driver.sweep([driver.row(2, 16), driver.row(0), driver.row(1)], grain)
    driver.sweep([driver.row(0), driver.row(2, 16)], grain)
    for _ in range(5):
        driver.sweep([driver.row(i) for i in range(3)], grain)
    assert all(len(tokens) >= 5 for tokens in driver.tokens.values())
    return driver.tokens


def sampling_of(temperature: float) -> SamplingParams:
    return SamplingParams(temperature=temperature, top_p=0.9, top_k=40, seed=11)


def forget(runner: TorchRunner) -> None:
    for request in range(3):
        runner.remove(request)
