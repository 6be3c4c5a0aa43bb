"""Programs on packed weights of 4 and 8 bits: at every boundary the bits of bf16 weights."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qllm.kernels import cpu
from qllm.kernels.cpu.experts import Experts, Formats
from qllm.kernels.cpu.quantised import QuantisedMatrix, matrix_of
from qllm.kernels.quantised import E2M1, Quantised
from qllm.runner.layers import native_experts
from qllm.types import Grain
from tests.support.sweeps import (
    GREEDY,
    LAYERS,
    VOCAB,
    compiled,
    model_of,
    next_row,
    prompt_of,
    run_beside,
    runner_of,
)

assert cpu.MISSING is None, cpu.MISSING
pytestmark = pytest.mark.usefixtures("one_thread")
STEP = 2.0**-5
"""One scale for all, so that what was rounded rounds to itself."""


def rounded(weight: Tensor, code: str) -> Quantised:
    """The nearest weight of a code."""
    n, k = weight.shape
    scale_NG = torch.full((n, -(-k // 32)), STEP, dtype=torch.bfloat16)
    steps = weight.float() / STEP
    if code == "i8":
        codes = steps.round().clamp(-128, 127).to(torch.int8)
        return Quantised("i8", codes, scale_NG, None, 32)
    if code == "u4":
        codes = (steps + 8).round().clamp(0, 15).to(torch.uint8)
    else:
        codes = (steps.unsqueeze(-1) - torch.tensor(E2M1)).abs().argmin(-1).to(torch.uint8)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    offset_NG = -8 * scale_NG if code == "u4" else None
    return Quantised("u4" if code == "u4" else "e2m1", packed, scale_NG, offset_NG, 32)


def code_of(weight: Tensor) -> str:
    """Code of a linear module's weight; the head has another."""
    return "i8" if len(weight) == VOCAB else "u4"


class Packed(Experts):
    """Experts of a bank, packed in 4 bits."""

    def __init__(self, num: int, width: int, hidden: int, *more: Any, cut: Any) -> None:
        up, down = torch.zeros(2 * width, hidden), torch.zeros(hidden, width)
        formats = Formats(rounded(up, "u4"), rounded(down, "e2m1"))
        super().__init__(num, width, hidden, *more, formats=formats, cut=cut)

    def pack(self, expert: int, up: Any, down: Any) -> None:
        super().pack(expert, rounded(up, "u4"), rounded(down, "e2m1"))


def round_weights(model: nn.Module) -> None:
    """Give the model's weights the values that packed ones have."""
    for name, parameter in model.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")) and parameter.dim() == 3:
            code = "u4" if name.endswith("gate_up_proj") else "e2m1"
            for weight in parameter.data:
                weight.copy_(rounded(weight, code).dequantised())
    for module in model.modules():
        if type(module) is nn.Linear:
            weight = module.weight.data
            weight.copy_(rounded(weight, code_of(weight)).dequantised())


@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
def test_every_boundary_holds_what_bf16_weights_leave(
    name: str, fine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, made = model_of(name), []
    round_weights(model)
    plain = runner_of(model, native=False, fine=fine)

    def packed(weights: Sequence[Tensor], *more: Any) -> cpu.Matrix:
        made.append(matrix_of([rounded(w, code_of(weights[0])) for w in weights], *more))
        return made[-1]

    with monkeypatch.context() as patch:
        patch.setattr(native_experts, "Experts", Packed)
        patch.setattr(cpu, "Matrix", packed)
        ours = [runner_of(model, native=native, fine=fine) for native in (False, True)]
    assert len(made) > 2 * LAYERS
    assert all(isinstance(matrix, QuantisedMatrix) for matrix in made)
    cpu.set_threads(1 + fine)
    runners, rng, stops = [plain, *ours], random.Random(fine), 0
    assert ours[1].names["sweep"] == f"{LAYERS} of {LAYERS} layers in one call"
    for request in range(3):
        prompt = prompt_of(rng.randint(5, 40), request)
        for runner in runners:
            runner.add(request, prompt, GREEDY, len(prompt), len(prompt) + 8)
    for seed, grain in enumerate((Grain.EXPERT, Grain.LAYER, Grain.STEP, Grain.EXPERT)):
        rows = [next_row(plain, request) for request in range(3)]
        stops += run_beside(runners, compiled(plain, rows, grain), 0.6, seed)
    assert stops > 10
