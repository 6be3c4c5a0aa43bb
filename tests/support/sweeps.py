"""Tiny models, stop words and runners side by side: what the tests of sweeps share."""

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from qllm.kernels import cpu
from qllm.models.discover import base_model
from qllm.plan import CutRule, Plan, Row
from qllm.runner.cpu import CpuBackend, cpu_runner
from qllm.runner.cuts import cut_rule
from qllm.runner.protocol import Watch
from qllm.runner.runner import TorchRunner
from qllm.runner.sweep import NOTHING
from qllm.scheduler.compile import compile_program
from qllm.scheduler.program import START, Index, OpKind, Program
from qllm.types import Grain, SamplingParams

assert cpu.MISSING is None, cpu.MISSING
LAYERS, TOP_K, VOCAB = 4, 4, 160
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "num_experts_per_tok": TOP_K,
    "tie_word_embeddings": False,
}
FINE = CutRule(
    max_cost=12.0,
    attn_cost_per_kv=0.01,
    min_block=2,
    max_block=8,
    glue_block=8,
    dense_block=8,
    expert_block=3,
)
GREEDY = SamplingParams(temperature=0)


def qwen3(**more: Any) -> nn.Module:
    more = {"num_experts": 8, "moe_intermediate_size": 80, "norm_topk_prob": True, **more}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**COMMON, "head_dim": 32, **more}))


def part_dense() -> nn.Module:
    return qwen3(mlp_only_layers=[1], intermediate_size=96)


def part_torch() -> nn.Module:
    model = part_dense()
    model.get_submodule("model.layers.1.mlp").act_fn = nn.GELU()
    return model


def mixtral() -> nn.Module:
    own = {"num_local_experts": 8, "intermediate_size": 80, "sliding_window": 9, "head_dim": 32}
    return MixtralForCausalLM(MixtralConfig(**COMMON, **own))


def olmoe() -> nn.Module:
    return OlmoeForCausalLM(OlmoeConfig(**COMMON, num_experts=8, intermediate_size=80))


MAKERS = {
    "qwen3": qwen3,
    "part_dense": part_dense,
    "part_torch": part_torch,
    "mixtral": mixtral,
    "olmoe": olmoe,
}


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = MAKERS[name]()
    for parameter in model.parameters():
        scale = 0.1 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
        parameter.data = torch.randn_like(parameter) * scale + (parameter.dim() == 1)
    return model.bfloat16().eval()


class Poll:
    """A stop word that fires at random; without `watch`, so that the caller looks at it."""

    stop_at_ns: int | None = None

    def __init__(self, seed: int, share: float) -> None:
        self.rng, self.share, self.polls = random.Random(seed), share, 0

    @property
    def word(self) -> int:
        self.polls += 1
        return -1 if self.rng.random() < self.share else 1 << 30

    def now_ns(self) -> int:
        return 0


class Watched:
    """A stop word with a cell that a native call may watch."""

    def __init__(self) -> None:
        self.cell = torch.zeros(1, dtype=torch.int64)
        self.word = 1 << 30
        self.stop_at_ns: int | None = None
        self.at_ns = 0

    def now_ns(self) -> int:
        return self.at_ns

    def watch(self) -> Watch:
        return Watch(self.cell.data_ptr(), int(self.cell))


class Ringing(Watched):
    """One whose cell is never as it was: a native call comes back at every boundary."""

    def watch(self) -> Watch:
        return Watch(self.cell.data_ptr(), -1)


class Asked:
    """A stop word for which every call of `run` returns after so many tasks."""

    stop_at_ns: int | None = None
    word = 0

    def __init__(self, num_tasks: int) -> None:
        self.num_tasks = num_tasks
        self.cell = torch.zeros(1, dtype=torch.int64)

    def now_ns(self) -> int:
        return 0

    def watch(self) -> Watch:
        return Watch(self.cell.data_ptr(), int(self.cell), self.num_tasks)


def count_calls(patch: pytest.MonkeyPatch, name: str) -> list[int]:
    """A list that gets one entry per call of a native function that takes one address."""
    made: list[int] = []
    real = getattr(cpu.native, name)

    def call(address: int) -> None:
        made.append(address)
        real(address)

    patch.setattr(cpu.native, name, call)
    return made


def runner_of(
    model: nn.Module, *, native: bool, fine: bool = False, **settings: Any
) -> TorchRunner:
    """A runner of a copy: experts belong to one runner at a time."""
    runner = cpu_runner(copy.deepcopy(model), max_segment_ms=float("inf"), **settings)
    if not native:
        runner.backend.sweep = NOTHING
    if fine:
        runner.backend.cuts = FINE
        object.__setattr__(runner.backend.costs, "range_ns", 2.5 * runner.backend.costs.unit_ns)
    return runner


def run_one_by_one(runner: TorchRunner, max_segment_ms: float) -> None:
    """Let every op run by itself, cut by rows and keys as those of layers that are not swept."""
    backend = runner.backend
    assert isinstance(backend, CpuBackend)
    backend.sweep = NOTHING
    config = base_model(runner.model).config
    backend.cuts, backend.costs = cut_rule(
        runner.parts, config, max_segment_ms, stops_between_keys=True
    )


_frames = iter(range(1 << 30))


def compiled(runner: TorchRunner, rows: list[Row], grain: Grain) -> Program:
    last = [row.end_layer == runner.shape.num_layers for row in rows]
    known = [row.hi == len(runner.token_ids(row.request_id)) for row in rows]
    return compile_program(
        Plan(rows=tuple(rows), grain=grain, stop_below=5),
        frame_id=next(_frames),
        samples=[a and b for a, b in zip(last, known, strict=True)],
        shape=runner.shape,
        cuts=runner.cuts,
    )


def prompt_of(num_tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(num_tokens)]


def next_row(runner: TorchRunner, request: int) -> Row:
    ids = runner.token_ids(request)
    return Row(request, runner.num_committed(request), len(ids), 0, runner.shape.num_layers)


def held(runner: TorchRunner, program: Program, at: Index) -> dict[str, Tensor]:
    """What a frame holds, without the rows that no op has written yet."""
    out = runner.export_frame(program, at)
    ops, layer = program.ops, runner.frames[program.frame_id].layer
    if at.op == len(ops) or not program.inside_layer(at):
        return out
    here = ops[at.op]
    done = [op for op in ops[: at.op] if op.layer == here.layer and op.kind is not OpKind.EMBED]
    ends = {op.kind: op.hi for op in done}
    if "mid" in out:  # else its first ATTN op has stopped between keys
        out["mid"] = out["mid"][: ends[OpKind.ATTN]]
    if "next" in out:
        out["next"] = out["next"][: ends[OpKind.COMBINE]]
    if layer.work is not None and at.pos:
        out["work.slots"] = out["work.slots"][: layer.work.units[at.pos - 1].hi]
    return out


def kv_of(runner: TorchRunner, request: int, layers: int) -> dict[str, Tensor]:
    """Return the written KV of the first layers, and their states."""
    tensors = runner.export_request(request)[0]
    kinds = [f"{kind}.{i}." for i in range(layers) for kind in ("k", "v", "state")]
    return {name: t for name, t in tensors.items() if f"{name}.".startswith(tuple(kinds))}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def experts_read(runner: TorchRunner) -> int:
    """How many experts were read; their bytes depend on how they are packed."""
    banks = [bank for bank in runner.backend.compute.banks if bank is not None]
    if not banks:
        return runner.expert_bytes
    num_read, rest = divmod(runner.expert_bytes, banks[0].unit_bytes)
    assert rest == 0
    return num_read


def run_beside(runners: list[TorchRunner], program: Program, share: float, seed: int) -> int:
    """Run a program in all runners, compare at every stop; returns how often it stopped."""
    for runner in runners:
        runner.accept(program)
    at, stops, polls = START, 0, [Poll(seed, share) for _ in runners]
    while at != program.end:
        ends = [r.run(program, at, poll) for r, poll in zip(runners, polls, strict=True)]
        assert len(set(ends)) == 1
        at = ends[0]
        states = [held(runner, program, at) for runner in runners]
        for runner, state, poll in zip(runners[1:], states[1:], polls[1:], strict=True):
            assert_same(state, states[0])
            assert poll.polls == polls[0].polls
            assert experts_read(runner) == experts_read(runners[0])
            for row, request in enumerate(program.request_ids):
                done = program.frontier_layer(row, at)
                assert_same(kv_of(runner, request, done), kv_of(runners[0], request, done))
                mine, theirs = (r.requests[request].kv.written for r in (runner, runners[0]))
                assert mine == theirs
        stops += at != program.end
    sampled = [[s.token_id for s in runner.finish(program)] for runner in runners]
    assert all(tokens == sampled[0] for tokens in sampled)
    return stops
