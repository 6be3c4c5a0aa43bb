"""Stopping the end of a prefill, or a decode, of 128k tokens: between two polls lies little
attention, counted in FLOPs. Layers that are swept poll inside ops, others between blocks of
keys."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from qllm.kernels import cpu
from qllm.kernels.cpu.attention import KEY_BLOCK
from qllm.plan import Plan, Row
from qllm.runner.cpu import cpu_runner
from qllm.runner.kv import SlabKV
from qllm.runner.layers.attention import Span, Step
from qllm.runner.runner import TorchRunner
from qllm.runner.sweep import KEY_VALUES
from qllm.scheduler.compile import compile_program
from qllm.scheduler.program import START, Index, OpKind, Program
from qllm.types import Grain, SamplingParams
from tests.support.families import FAMILIES, make_model
from tests.support.sweeps import Asked, run_one_by_one

LONG, TOKENS, HEADS, GROUPS, HEAD, BOUND_MS = 131072, 24, 12, 4, 64, 5.0
GREEDY = SamplingParams(temperature=0)


class Lowered:
    """A stop word that is low from the start: every boundary stops."""

    word = 0
    stop_at_ns: int | None = None

    def now_ns(self) -> int:
        return 0


class Never(Lowered):
    """One that nobody lowers."""

    word = 1 << 30


def long_runner(dtype: torch.dtype) -> TorchRunner:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=HEAD,
        num_experts=8,
        moe_intermediate_size=64,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        max_position_embeddings=LONG,
        tie_word_embeddings=False,
    )
    model = Qwen3MoeForCausalLM(config).to(dtype).eval()
    return cpu_runner(model, max_segment_ms=BOUND_MS)


@pytest.fixture(scope="module")
def swept() -> TorchRunner:
    return long_runner(torch.bfloat16)


@pytest.fixture(scope="module")
def runner() -> TorchRunner:
    """One whose ops run one by one."""
    made = long_runner(torch.bfloat16)
    run_one_by_one(made, BOUND_MS)
    return made


def hold(runner: TorchRunner, request: int, done: int) -> None:
    """A request whose first tokens have KV: zeros."""
    runner.add(request, [3] * LONG, GREEDY, LONG, LONG)
    kv = runner.requests[request].kv
    kv.base((GROUPS, HEAD, HEAD), torch.empty(0, dtype=torch.bfloat16))
    for slab in kv.slabs:
        assert slab is not None
        for kept in slab:
            kept[:, :, :done].zero_()
    kv.reach(done)
    kv.committed = done


def program_of(runner: TorchRunner, *rows: Row, frame: int = 0) -> Program:
    return compile_program(
        Plan(rows=rows, grain=Grain.EXPERT, stop_below=1),
        frame_id=frame,
        samples=[True] * len(rows),
        shape=runner.shape,
        cuts=runner.cuts,
    )


def at_the_end(runner: TorchRunner, tokens: list[int]) -> Program:
    """The last tokens, so many each, of requests that have the KV of all before."""
    for request, num in enumerate(tokens):
        hold(runner, request, LONG - num)
    rows = [Row(request, LONG - num, LONG, 0, 2) for request, num in enumerate(tokens)]
    return program_of(runner, *rows)


def segments(runner: TorchRunner, program: Program) -> list[tuple[Index, Index]]:
    """Run to the end, stopping wherever a stop is seen: where each segment began and ended."""
    seen, index = [], START
    runner.accept(program)
    while index != program.end:
        begin, index = index, runner.run(program, index, Lowered())
        seen.append((begin, index))
    runner.finish(program)
    return seen


@pytest.mark.parametrize("tokens", [[TOKENS], [1], [1, 1, 1]])
def test_no_segment_of_an_attention_has_more_flops_than_the_bound(
    runner: TorchRunner, tokens: list[int]
) -> None:
    program = at_the_end(runner, tokens)
    attended = dict.fromkeys(program.ops, 0)
    for begin, end in segments(runner, program):
        op = program.ops[begin.op]
        if op.kind is not OpKind.ATTN:
            continue
        keys = (end.pos if end.op == begin.op else LONG) - begin.pos
        assert keys % KEY_BLOCK == 0
        gigaflops = 4e-9 * HEADS * HEAD * (op.hi - op.lo) * keys
        slow = 80 if cpu.kind() in cpu.SUM_PAIRS else 50  # GFLOP/s of a slow core
        assert gigaflops / slow <= BOUND_MS / 1000
        megabytes = 1e-6 * 4 * GROUPS * HEAD * (op.hi - op.lo if TOKENS not in tokens else 1) * keys
        assert megabytes / 5 <= BOUND_MS  # and 5 GB/s
        attended[op] += (op.hi - op.lo) * keys
    assert sum(attended.values()) == 2 * LONG * sum(tokens)  # two layers
    for request in range(len(tokens)):
        runner.remove(request)


def test_blocks_of_queries_shrink_with_their_position(runner: TorchRunner) -> None:
    plain = long_runner(torch.float32)  # torch does not stop between keys
    for made in (runner, plain):
        cuts, costs = made.cuts, made.backend.costs
        assert cuts.block(0) > cuts.block(LONG) == cuts.min_block
        read_ns = costs.segment_ns - costs.attn_ns
        assert cuts.min_block * costs.project_ns >= read_ns, "as long as its weights are read"
        assert cuts.min_block // 2 * costs.project_ns < read_ns


def test_ops_that_are_swept_are_cut_by_memory_alone(swept: TorchRunner) -> None:
    small_cuts = {
        cpu_runner(make_model("olmoe", torch.bfloat16), max_segment_ms=bound).cuts
        for bound in (0.001, 5.0, 1000.0)
    }
    assert len(small_cuts) == 1
    assert swept.cuts.attn_cost_per_kv == 0
    assert swept.cuts.max_cost > 2048


@pytest.mark.parametrize("tokens", [[TOKENS], [1], [1, 1, 1]])
def test_no_task_of_a_swept_attention_has_more_flops_than_the_bound(
    swept: TorchRunner, tokens: list[int]
) -> None:
    """Tasks are counted: each has the same share of the op's work, but for the last of its keys."""
    program = at_the_end(swept, tokens)
    assert len(program.ops) == 10
    swept.accept(program)
    at = START
    while program.ops[at.op].kind is not OpKind.ATTN:
        at = swept.run(program, at, Lowered())
    first = at.op
    num_tasks = 0
    while at.op == first:
        at, num_tasks = swept.run(program, at, Asked(1)), num_tasks + 1
    swept.drop(program)
    for request in range(len(tokens)):
        swept.remove(request)
    num_queries = min(TOKENS, 48 // (HEADS // GROUPS))  # of a tile
    keys = KEY_VALUES // (2 * HEAD)
    assert num_tasks >= GROUPS * LONG // keys
    gigaflops = 4e-9 * HEADS // GROUPS * HEAD * num_queries * keys
    assert gigaflops / 50 <= BOUND_MS / 1000, "on a core with 50 GFLOP/s"


def test_what_attention_over_latents_costs() -> None:
    costs = cpu_runner(make_model("deepseek_v3", torch.bfloat16)).backend.costs
    rank, rotated, heads = 32, 32, 4
    rate = 120 if cpu.kind() in cpu.SUM_PAIRS else 70
    assert costs.query_key_ns == pytest.approx(2 * heads * (2 * rank + rotated) / rate)
    assert costs.key_ns == pytest.approx(2 * (rank + rotated) / 6)


def test_keys_outside_a_window_are_not_counted() -> None:
    span = Span(SlabKV(1, LONG), 0, LONG - 1, LONG)
    step = Step([span, span._replace(lo=1000, hi=1010)], 11, latent=False)
    assert step.first_key(None) == 0
    assert step.first_key(64) == 896  # the block of key 937
    assert step.num_keys == LONG
    assert Step([span], 1, latent=False).first_key(LONG * 2) == 0
    assert Step([], 1, latent=False).num_keys == 0


def test_without_a_bound_nothing_is_cut() -> None:
    free = cpu_runner(make_model("mixtral", torch.bfloat16), max_segment_ms=float("inf"))
    assert free.backend.costs.keys(1 << 20, 1, 1 << 31) > 1 << 30


# -- the bits


def small(family: str) -> TorchRunner:
    """A runner whose attention stops after every block of keys."""
    made = cpu_runner(make_model(family, torch.bfloat16))
    run_one_by_one(made, BOUND_MS)
    made.backend.costs = replace(made.backend.costs, query_key_ns=1e12)
    return made


def logits_of(runner: TorchRunner) -> list[Tensor]:
    found: list[Tensor] = []
    runner.on_logits = lambda request, position, x: found.append(x.clone())
    return found


PROMPTS = [[7 * i % 250 for i in range(200)], [5 * i % 250 for i in range(150)]]
ROWS = tuple(Row(i, 0, len(p), 0, 3) for i, p in enumerate(PROMPTS))


def add(runner: TorchRunner) -> None:
    for request, prompt in enumerate(PROMPTS):
        runner.add(request, prompt, GREEDY, len(prompt), 300)


@pytest.mark.parametrize("family", FAMILIES)
def test_stopping_between_keys_changes_no_bit(family: str) -> None:
    whole, cut, outs = small(family), small(family), []
    whole.backend.costs = replace(whole.backend.costs, query_key_ns=1e-9, key_ns=1e-9)
    stops = []
    for made in (whole, cut):
        outs.append(logits_of(made))
        add(made)
        program = program_of(made, *ROWS)
        parts = segments(made, program)
        stops.append(sum(program.ops[b.op].kind is OpKind.ATTN and e.pos > 0 for b, e in parts))
        row = tuple(Row(request, len(p), len(p) + 1, 0, 3) for request, p in enumerate(PROMPTS))
        segments(made, program_of(made, *row, frame=1))
    assert stops[0] == 0
    assert stops[1] > 3
    assert len(outs[0]) == len(outs[1]) == 4
    assert all(torch.equal(a, b) for a, b in pairwise([torch.stack(out) for out in outs]))


def park(runner: TorchRunner) -> tuple[Program, Index]:
    """Both prompts, stopped between the keys of the second layer."""
    add(runner)
    program, index = program_of(runner, *ROWS), START
    runner.accept(program)
    while not (index.pos and program.ops[index.op][:2] == (OpKind.ATTN, 1)):
        index = runner.run(program, index, Lowered())
    assert program.inside_layer(index)
    return program, index


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3"])
def test_a_frame_that_stopped_between_keys_goes_on_elsewhere(family: str) -> None:
    here, there = small(family), small(family)
    expected, found = logits_of(here), logits_of(there)
    program, index = park(here)
    frame = here.export_frame(program, index)
    bytes_held = here.frames[0].num_bytes()
    assert bytes_held >= sum(t.nbytes for name, t in frame.items() if name.startswith("begun."))
    for request in range(2):
        tensors, meta = here.export_request(request)
        there.import_request(request, GREEDY, tensors, meta)
    there.import_frame(program, index, frame)
    for runner in (here, there):
        assert runner.run(program, index, Never()) == program.end
        runner.finish(program)
    assert len(found) == len(expected) == 2
    assert torch.equal(torch.stack(found), torch.stack(expected))


def test_a_row_may_die_between_keys() -> None:
    alone, both = small("mixtral"), small("mixtral")
    expected, found = logits_of(alone), logits_of(both)
    program, index = park(both)
    both.kill(program, 0)  # the longer one
    both.remove(0)
    assert both.run(program, index, Never()) == program.end
    both.finish(program)
    add(alone)
    segments(alone, program_of(alone, ROWS[1]))
    assert len(found) == len(expected) == 1
    assert torch.equal(found[0], expected[0])
