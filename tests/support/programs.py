"""Programs that a runner runs to their end, and the logits of each row."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qllm.plan import CutRule, Plan, Row
from qllm.runner.runner import TorchRunner
from qllm.scheduler.compile import compile_program
from qllm.scheduler.program import START, Program
from qllm.types import Grain, SamplingParams
from tests.support.families import VOCAB

STEPS = 2

GREEDY = SamplingParams(temperature=0)

CUTS = CutRule(
    max_cost=16.0,
    attn_cost_per_kv=0.01,
    min_block=4,
    max_block=8,
    glue_block=8,
    dense_block=8,
    expert_block=4,
)


class Poll:
    """A stop word that fires at every n-th poll."""

    stop_at_ns: int | None = None

    def __init__(self, every: int = 0) -> None:
        self.every, self.polls = every, 0

    @property
    def word(self) -> int:
        self.polls += 1
        return -1 if self.every and self.polls % self.every == 0 else 1 << 30

    def now_ns(self) -> int:
        return 0


def prompt_of(num_tokens: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (num_tokens,), generator=generator).tolist()


def forward(model: Any, ids: list[int], steps: int = STEPS) -> list[Tensor]:
    """Logits of a prompt and of greedy decoding, by the model itself."""
    with torch.no_grad():
        out = model(torch.tensor([ids]), use_cache=True, logits_to_keep=1)
        found = [out.logits[0, -1]]
        for _ in range(steps):
            token = found[-1].argmax().view(1, 1)
            out = model(
                token, past_key_values=out.past_key_values, use_cache=True, logits_to_keep=1
            )
            found.append(out.logits[0, -1])
    return found


def add(runner: TorchRunner, request_id: int, ids: list[int]) -> None:
    runner.add(request_id, ids, GREEDY, len(ids), len(ids) + 8)


_frames = iter(range(1 << 30))


def compiled(runner: TorchRunner, *rows: Row, grain: Grain = Grain.EXPERT) -> Program:
    samples = [
        row.end_layer == runner.shape.num_layers and row.hi == len(runner.token_ids(row.request_id))
        for row in rows
    ]
    plan = Plan(rows=rows, grain=grain, stop_below=5)
    return compile_program(
        plan, frame_id=next(_frames), samples=samples, shape=runner.shape, cuts=runner.cuts
    )


def sweep(runner: TorchRunner, *rows: Row) -> list[int]:
    program = compiled(runner, *rows)
    runner.accept(program)
    assert runner.run(program, START, Poll()) == program.end
    return [token.token_id for token in runner.finish(program)]


def next_row(runner: TorchRunner, request_id: int) -> Row:
    ids = runner.token_ids(request_id)
    return Row(request_id, runner.num_committed(request_id), len(ids), 0, runner.shape.num_layers)


def serve(runner: TorchRunner, request_id: int, steps: int = STEPS) -> None:
    for _ in range(steps + 1):
        sweep(runner, next_row(runner, request_id))


def logits_of(runner: TorchRunner, ids: list[int]) -> list[Tensor]:
    found: list[Tensor] = []
    runner.on_logits = lambda request, position, x: found.append(x.clone())
    add(runner, 1, ids)
    serve(runner, 1)
    runner.close()
    return found


def assert_same(got: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(got) == len(expected)
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert torch.equal(a, b), f"step {i}: {(a - b).abs().max()}"
