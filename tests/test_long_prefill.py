"""Stopping the end of a prefill of 32k tokens: between two boundaries lies little attention."""

from itertools import pairwise

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from qllm.compile import compile_program
from qllm.plan import START, Index, OpKind, Plan, Program, Row
from qllm.runner import TorchRunner
from qllm.types import Grain, SamplingParams

LONG, TOKENS, HEADS, GROUPS, HEAD, BOUND_MS = 32768, 24, 12, 4, 64, 5.0


class Lowered:
    """A stop word that is low from the start: every boundary stops."""

    word = 0
    stop_at_ns: int | None = None

    def now_ns(self) -> int:
        return 0


@pytest.fixture(scope="module")
def runner() -> TorchRunner:
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
    model = Qwen3MoeForCausalLM(config).bfloat16().eval()
    made = TorchRunner(model, max_segment_ms=BOUND_MS)
    made.add(0, [3] * LONG, SamplingParams(temperature=0), LONG, LONG)
    kv, done = made._requests[0].kv, LONG - TOKENS
    for layer in range(2):
        kv.write(layer, *(torch.randn(1, GROUPS, done, HEAD).bfloat16() for _ in "kv"), 0)
    kv.committed = done
    return made


def program_of(runner: TorchRunner) -> Program:
    return compile_program(
        Plan(rows=(Row(0, LONG - TOKENS, LONG, 0, 2),), grain=Grain.EXPERT, stop_below=1),
        frame_id=0,
        samples=[True],
        shape=runner.shape,
        cuts=runner.cuts,
    )


def test_blocks_of_queries_shrink_until_the_bound_holds(runner: TorchRunner) -> None:
    (marks,) = program_of(runner).row_blocks
    gigaflops = [4e-9 * HEADS * HEAD * (hi - lo) * hi for lo, hi in pairwise(marks)]
    assert max(gigaflops) / 50 <= BOUND_MS / 1000  # a slow core: 50 GFLOP/s
    assert runner.cuts.block(0) >= 32


def test_a_stop_is_seen_between_any_two_blocks(runner: TorchRunner) -> None:
    program, ran = program_of(runner), []
    runner.on_segment = lambda p, at, begin, end: ran.append(p.ops[at.op].kind)
    runner.accept(program)
    index: Index = START
    while index != program.end:
        before = len(ran)
        index = runner.run(program, index, Lowered())
        assert len(ran) == before + 1
    runner.finish(program)
    (marks,) = program.row_blocks
    assert ran.count(OpKind.ATTN) == 2 * (len(marks) - 1) >= TOKENS  # two layers
