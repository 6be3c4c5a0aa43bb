"""Tiny models that are wide enough to be split: several panels of columns, many heads."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from qllm.models.weights.formats.rounding import int4
from qllm.models.weights.quantised_linears import QuantisedLinear
from qllm.plan import Row
from qllm.runner.cpu import cpu_runner
from qllm.runner.runner import TorchRunner
from qllm.scheduler.program import START
from tests.support.families import COMMON, MAKERS, attention_of
from tests.support.programs import add, next_row, prompt_of, sweep
from tests.support.stops import run_in_pieces, whole_program
from tests.support.sweeps import Watched

WIDE: dict[str, Any] = {"hidden_size": 192, "vocab_size": 300}
"""Three panels of columns, and a vocabulary that ends inside a panel."""


def _gated() -> Any:
    """Return the config of a model with a gate on attention, shared experts and no states."""
    return Qwen3NextConfig(
        **COMMON,
        head_dim=64,
        partial_rotary_factor=0.5,
        intermediate_size=160,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=80,
        num_experts=8,
        layer_types=["full_attention"] * COMMON["num_hidden_layers"],
    )


CUT = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")
"""Families whose experts `wide_model` makes as wide as a token, so that ranks share each expert."""


def _of_family(family: str, width: int | None) -> Any:
    config = MAKERS[family][0]()
    if width is not None:
        has_own = hasattr(config, "moe_intermediate_size")
        setattr(config, "moe_intermediate_size" if has_own else "intermediate_size", width)
    if family in ("qwen2_moe", "qwen3_moe", "deepseek_v3"):
        config.intermediate_size = 160
    if family == "olmoe":  # its heads share the width of the model
        config.num_attention_heads, config.num_key_value_heads = 6, 3
    return config


SPLIT = (*MAKERS, "gated")
"""Names of models that `wide_model` makes."""


def wide_model(
    name: str, dtype: torch.dtype = torch.bfloat16, seed: int = 0, width: int | None = None
) -> Any:
    """Return a seeded random model in evaluation mode; biases, sinks and norms are random too.

    Args:
        name: Any of SPLIT.
        dtype: Dtype of the weights.
        seed: Seed of the weights.
        width: Width of a token and of experts, for a model of CUT; None is WIDE and narrow experts.
    """
    config = _gated() if name == "gated" else _of_family(name, width)
    config.hidden_size, config.vocab_size = width or WIDE["hidden_size"], WIDE["vocab_size"]
    config._attn_implementation = attention_of(name)
    config._experts_implementation = "grouped_mm"
    make: Any = Qwen3NextForCausalLM if name == "gated" else MAKERS[name][1]
    torch.manual_seed(seed)
    model: nn.Module = make(config)
    with torch.no_grad():
        for path, p in model.named_parameters():
            if p.dim() == 1:
                p.copy_(torch.randn_like(p) * 0.1 + ("norm" in path))
            else:
                p.copy_(torch.randn_like(p) * (0.5 if "embed" in path else p.shape[-1] ** -0.5))
    return model.to(dtype).eval()


WEIGHTS = ("bf16", "int8", "int4", "int4 on int8 rows")
"""Formats of weights: experts in int8, or all of the model in 4 bits."""


def settings_of(weights: str) -> dict[str, str]:
    """Return the settings of a runner with these weights."""
    form, _, rows = weights.partition(" on ")
    return {
        "expert_weights": "auto" if form == "bf16" else form,
        "activations": "int8" if rows else "bf16",
    }


def model_with(name: str, weights: str, width: int | None = None) -> Any:
    """Return a model of `wide_model`, with linear modules in 4 bits if its weights are."""
    model = wide_model(name, width=width)
    if weights.startswith("int4"):
        for path, module in model.named_modules():
            kept = name == "gated" and path.endswith("q_proj")  # a gate is not split in 4 bits
            if type(module) is nn.Linear and min(module.weight.shape) > 1 and not kept:
                QuantisedLinear(module, int4(module.weight.detach()))
    return model


class Served(NamedTuple):
    """The results of some steps of a model."""

    tokens: list[int]
    logits: list[Tensor]
    """Logits of every position whose token was sampled, [V] each."""
    kv: dict[int, list[tuple[Tensor, Tensor]]]
    """Keys and values of every layer, by request."""


PROMPTS = {1: prompt_of(41, 1), 2: prompt_of(9, 2), 3: prompt_of(2, 3)}
PREFILL = [[(1, 0, 17)], [(1, 17, 41), (2, 0, 4)], [(2, 4, 9), (3, 0, 2)]]
"""Steps that compute the prompts, with the positions of each row."""
DECODES = 2
"""Steps with a token of every request."""


def served(runner: TorchRunner) -> Served:
    """Return the results of a runner, which is closed."""
    logits: list[Tensor] = []
    tokens: list[int] = []
    runner.on_logits = lambda request, position, x: logits.append(x.clone())
    num = runner.shape.num_layers
    for request, ids in PROMPTS.items():
        add(runner, request, ids)
    for step in PREFILL:
        tokens += sweep(runner, *(Row(request, lo, hi, 0, num) for request, lo, hi in step))
    for _ in range(DECODES):
        tokens += sweep(runner, *(next_row(runner, request) for request in PROMPTS))
    kv = {request: layers_of(runner.requests[request].kv, num) for request in PROMPTS}
    runner.close()
    return Served(tokens, logits, kv)


def served_whole(name: str, weights: str, width: int | None = None) -> Served:
    """Return the results of a runner of the whole model."""
    return served(cpu_runner(model_with(name, weights, width), **settings_of(weights)))


def group_of(runner: TorchRunner) -> Any:
    """Return the group of a runner's ranks."""
    backend: Any = runner.backend
    return backend.group


def gathers_of(runner: TorchRunner, num_tasks: int | None) -> tuple[int, int]:
    """Return the gathers of a step, in pieces or whole, and the bytes of their tensors."""
    group, program = group_of(runner), whole_program(runner)
    before = group.num_gathers, group.gathered_bytes
    if num_tasks is None:
        assert runner.run(program, START, Watched()) == program.end
    else:
        assert len(run_in_pieces(runner, program, num_tasks)) > 10
    runner.finish(program)
    return group.num_gathers - before[0], group.gathered_bytes - before[1]


def layers_of(kv: Any, num: int) -> list[tuple[Tensor, Tensor]]:
    """Return copies of the keys and values of every layer."""
    found = [kv.read(layer, 0, kv.committed) for layer in range(num)]
    return [(k.clone(), v.clone()) for k, v in found]


def is_same(one: Tensor, other: Tensor) -> bool:
    """Compare every bit."""
    return one.shape == other.shape and torch.equal(
        one.contiguous().view(torch.int16), other.contiguous().view(torch.int16)
    )


def assert_same(found: Served, expected: Served) -> None:
    assert found.tokens == expected.tokens
    assert len(found.logits) == len(expected.logits) > 0
    assert all(map(is_same, found.logits, expected.logits)), "logits differ"
    for request, layers in expected.kv.items():
        for i, (own, other) in enumerate(zip(found.kv[request], layers, strict=True)):
            assert all(map(is_same, own, other)), f"KV of layer {i} differs"
