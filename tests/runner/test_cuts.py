"""Ops of layers that do not poll inside are cut by rows, but never to read weights more often."""

from typing import Any

import pytest
import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from qllm.plan import NO_CUTS
from qllm.runner.cpu import cpu_runner
from qllm.runner.cuts import MOST_AROUND
from tests.support.families import FAMILIES, make_model
from tests.support.hybrids import SIZES
from tests.support.sweeps import qwen3, run_one_by_one

MOST = 1024
"""Most rows of any op that is cut."""
WIDE = 1 << 11


@pytest.mark.parametrize("bound_ms", [0.001, 0.1, 5.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_op_has_fewer_rows_than_multiply_while_its_weights_are_read(
    family: str, dtype: torch.dtype, bound_ms: float
) -> None:
    runner = cpu_runner(make_model(family, dtype), max_segment_ms=bound_ms)
    run_one_by_one(runner, bound_ms)
    rule, costs = runner.cuts, runner.backend.costs
    ops = [
        (rule.min_block, costs.project_ns, costs.read_ns, MOST_AROUND),
        (rule.max_cost, costs.project_ns, costs.read_ns, MOST),
        (rule.glue_block, costs.glue_row_ns, costs.glue_ns, MOST),
        (rule.dense_block, costs.dense_row_ns, costs.dense_ns, MOST),
        (rule.expert_block, costs.row_ns, costs.unit_ns, MOST),
    ]
    for rows, row_ns, read_ns, most in ops:
        assert rows >= most or rows * max(row_ns, 1.0) >= read_ns
    runner.close()


PARTS: dict[str, dict[str, Any]] = {
    "attention": {"num_attention_heads": WIDE // 32},
    "experts": {"moe_intermediate_size": WIDE},
    "mlp": {"mlp_only_layers": [1], "intermediate_size": WIDE},
    "shared": {"shared_expert_intermediate_size": WIDE},
}


@pytest.mark.parametrize("part", PARTS)
def test_the_bound_that_is_told_is_of_every_kind_of_op(part: str) -> None:
    found = []
    for more in ({}, PARTS[part]):
        torch.manual_seed(0)
        if part == "shared":
            model = Qwen3NextForCausalLM(Qwen3NextConfig(**{**SIZES, **more}))
        else:
            model = qwen3(num_hidden_layers=2, **more)
        model = model.bfloat16().eval()
        runner = cpu_runner(model, kernels="reference", max_segment_ms=0.1)
        text = runner.names["stops"]
        found.append(float(text.removeprefix("between ops (nominal ").removesuffix(" ms)")))
        runner.close()
    assert found[1] > found[0]


def test_what_is_not_cut_is_said_to_be_as_long_as_a_step() -> None:
    runner = cpu_runner(qwen3().bfloat16().eval(), kernels="reference", max_segment_ms=float("inf"))
    assert runner.cuts == NO_CUTS
    assert runner.names["stops"] == "between ops (some as long as a step)"
