"""Experts of gpt_oss with our kernels: transposed, gate and up in turn, biases, clamped."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from qllm.kernels import cpu
from qllm.runner import conformance
from qllm.runner.cpu import cpu_runner
from qllm.runner.layers.experts import TorchBank
from qllm.runner.layers.native_experts import NativeBank, is_covered
from qllm.runner.layers.rows import PLAIN
from qllm.runner.layers.work import Work
from tests.support.families import make_model
from tests.support.packed_experts import assert_whole, experts_of, weights_of
from tests.support.programs import add, forward, prompt_of, serve

assert cpu.MISSING is None, cpu.MISSING
KINDS = tuple(cpu.native.available())
E = 3


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    cpu.native.use(request.param)
    yield request.param
    cpu.native.use(KINDS[0])
    cpu.set_threads(1)


def rand(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).bfloat16()


def experts(d: int, f: int) -> Any:
    """Half of what reaches the gate is over its limit of 7."""
    made: Any = GptOssExperts(
        GptOssConfig(hidden_size=d, intermediate_size=f, num_local_experts=E)
    ).bfloat16()
    with torch.no_grad():
        made.gate_up_proj.copy_(rand(E, d, 2 * f, seed=3) * 8 * d**-0.5)
        made.gate_up_proj_bias.copy_(rand(E, 2 * f, seed=4) * 3)
        made.down_proj.copy_(rand(E, f, d, seed=5))
        made.down_proj_bias.copy_(rand(E, d, seed=6) * 20)
    return made.requires_grad_(requires_grad=False)


def run(bank: Any, x: Tensor, rows: int = 1024) -> Tensor:
    """Slots of every token at every expert, [tokens, E, D]."""
    bank.pack()
    work = Work(bank, torch.arange(E).repeat(len(x), 1), rows)
    for i in range(len(work.units)):
        work.run(x, i, i + 1)
    bank.unpack()
    return work.slots_SD[work.inverse_S].view(len(x), E, -1)


def expected(module: Any, x: Tensor) -> Tensor:
    """In fp64, rounded to bf16 where the module rounds."""

    def half(t: Tensor) -> Tensor:
        return t.bfloat16().double()

    h = torch.einsum("td,edf->tef", x.double(), module.gate_up_proj.double())
    h = half(h + module.gate_up_proj_bias.double())
    gate, up = h[..., 0::2].clamp(max=7.0), h[..., 1::2].clamp(-7.0, 7.0)
    glu = half(gate * half(torch.sigmoid(half(gate * 1.702))))
    out = torch.einsum("tef,efd->ted", half(half(up + 1) * glu), module.down_proj.double())
    return out + module.down_proj_bias.double()


def close(found: Tensor, wanted: Tensor, steps: float) -> None:
    size = wanted.abs().clamp(min=float(wanted.abs().mean()) / 2)
    assert ((found.double() - wanted).abs() <= steps * size / 128).all()


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.double().norm())


@pytest.mark.sampled(20)
@pytest.mark.parametrize(("d", "f"), [(64, 32), (70, 40), (130, 66)])
@pytest.mark.parametrize("tokens", [1, 6, 7, 40])
def test_they_compute_what_the_module_computes(kind: str, d: int, f: int, tokens: int) -> None:
    module, x = experts(d, f), rand(tokens, d, seed=2)
    assert is_covered(module)
    wanted = expected(module, x)
    theirs = run(TorchBank(module, PLAIN, in_place=False), x)
    ours = run(NativeBank(module), x)
    close(ours, wanted, 0.7)
    assert distance(ours, wanted) < distance(theirs, wanted) < 0.005


def test_rows_do_not_depend_on_each_other_nor_on_threads(kind: str) -> None:
    module, x = experts(130, 66), rand(100, 130, seed=2)
    whole = run(NativeBank(module), x)
    for rows in (1, 5, 6, 7, 33):
        assert torch.equal(run(NativeBank(module), x[-rows:]), whole[-rows:])
    assert torch.equal(run(NativeBank(module), x, rows=7), whole)
    cpu.set_threads(3)
    assert torch.equal(run(NativeBank(module), x), whole)


@pytest.mark.parametrize("weights", ["int8", "int8-g64"])
def test_int8_is_close_to_what_it_rounds(kind: str, weights: str) -> None:
    module, x = experts(128, 64), rand(9, 128, seed=2)
    plain = run(NativeBank(module), x)
    found = run(NativeBank(module, weights), x)  # leaves the rounded weights
    assert 2 * distance(found, expected(module, x)) < distance(found, plain) < 0.05


def test_a_closed_runner_leaves_them_as_they_were() -> None:
    model, ids = make_model("gpt_oss", torch.bfloat16), prompt_of(20)
    before = weights_of(model)
    expected_logits = forward(model, ids)
    runner = cpu_runner(model)
    assert experts_of(model)[0].gate_up_proj.is_meta
    assert runner.names["experts"] == f"qllm {KINDS[0]} (3)"
    conformance.check(model, runner)
    found: list[Tensor] = []
    runner.on_logits = lambda request, position, x: found.append(x.clone())
    add(runner, 1, ids)
    serve(runner, 1)
    assert (found[0] - expected_logits[0]).abs().max() < 0.1 * expected_logits[0].abs().max()
    runner.close()
    assert_whole(model, before)


def test_another_gate_stays_with_torch() -> None:
    class Other(GptOssExperts):
        def _apply_gate(self, gate_up: Tensor) -> Tensor:
            return gate_up[..., ::2]

    made: Any = Other(GptOssConfig(hidden_size=8, intermediate_size=8, num_local_experts=2))
    assert not is_covered(made.bfloat16())
