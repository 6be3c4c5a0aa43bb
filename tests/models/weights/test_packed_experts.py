"""Expert weights packed in place of the module's: every bit comes back, and they are held once."""

import gc
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from qllm.config import EngineConfig
from qllm.engine.build import make_runner
from qllm.errors import InvariantError, ModelError
from qllm.kernels import cpu
from qllm.kernels.cpu.experts import Experts
from qllm.llm import QLLMEngine
from qllm.runner import conformance
from qllm.runner.cpu import cpu_runner
from qllm.runner.layers.native import NativeDriver
from qllm.runner.layers.native_experts import NativeBank
from qllm.runner.layers.work import Work
from tests.support.families import make_model
from tests.support.packed_experts import assert_whole, bits, experts_of, weights_of
from tests.support.programs import add, forward, prompt_of, serve

assert cpu.MISSING is None, cpu.MISSING
KINDS = tuple(cpu.native.available())


def rand(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def any_bits(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(shape[-1])
    return torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16, generator=generator).view(
        torch.bfloat16
    )


@pytest.mark.sampled(20)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("n", "k"), [(1, 2), (16, 6), (17, 70), (64, 8), (65, 4), (200, 34), (48, 96)]
)
@pytest.mark.parametrize("threads", [1, 3])
def test_unpacking_gives_back_every_bit(kind: str, n: int, k: int, threads: int) -> None:
    cpu.native.use(kind)
    cpu.set_threads(threads)
    try:
        for weight in (any_bits(n, k), any_bits(k, n).t(), any_bits(n, 2 * k)[:, ::2]):
            packed = torch.full((cpu.packed_numel(n, k),), 7.0).bfloat16()
            cpu.pack(weight, packed)
            for out in (rand(n, k), rand(k, n).t(), rand(n, 2 * k)[:, ::2]):
                cpu.unpack(packed, out)
                assert torch.equal(bits(out.contiguous()), bits(weight.contiguous()))
            rest = packed.numel() - n * k
            assert (packed == 0).sum() >= rest  # rows that fill up the last panel
    finally:
        cpu.native.use(KINDS[0])
        cpu.set_threads(1)


def test_a_closed_runner_leaves_the_model_as_it_was() -> None:
    model, ids = make_model("mixtral", torch.bfloat16), prompt_of(9)
    before, expected = weights_of(model), forward(model, ids)
    parameters = dict(model.named_parameters())
    runner = cpu_runner(model)
    for experts in experts_of(model):
        assert experts.gate_up_proj.is_meta
        assert experts.down_proj.is_meta
    runner.close()
    runner.close()
    assert_whole(model, before)
    now = dict(model.named_parameters())
    assert all(now[name] is p for name, p in parameters.items())
    assert "forward" not in vars(experts_of(model)[0])
    for found, logits in zip(forward(model, ids), expected, strict=True):
        assert torch.equal(found, logits)


def test_a_strided_parameter_comes_back_with_its_strides() -> None:
    model = make_model("mixtral", torch.bfloat16)
    for experts in experts_of(model):
        with torch.no_grad():
            turned = experts.down_proj.transpose(1, 2).contiguous().transpose(1, 2)
        experts.down_proj = torch.nn.Parameter(turned, requires_grad=False)
    before = weights_of(model)
    assert not experts_of(model)[0].down_proj.is_contiguous()
    cpu_runner(model).close()
    assert_whole(model, before)


def test_while_packed_the_model_says_so() -> None:
    model, ids = make_model("qwen3_moe", torch.bfloat16), prompt_of(9)
    runner = cpu_runner(model)
    with pytest.raises(ModelError, match="packed for the runner"):
        forward(model, ids)
    with pytest.raises(ModelError, match=r"packed for another runner.*close"):
        cpu_runner(model, kernels="reference")
    runner.close()
    forward(model, ids)
    cpu_runner(model, kernels="reference").close()


def test_only_experts_that_our_kernels_run_are_packed() -> None:
    for runner in (
        cpu_runner(make_model("mixtral")),
        cpu_runner(make_model("mixtral", torch.bfloat16), kernels="reference"),
    ):
        assert not any(e.gate_up_proj.is_meta for e in experts_of(runner.model))


def test_the_reference_has_the_weights_while_it_computes() -> None:
    model, ids = make_model("mixtral", torch.bfloat16), prompt_of(9)
    before, expected = weights_of(model), forward(model, ids)
    runner = cpu_runner(model)
    name = runner.fingerprint()
    with runner.as_reference():
        assert_whole(model, before)
        assert torch.equal(forward(model, ids)[0], expected[0])
    assert experts_of(model)[0].gate_up_proj.is_meta
    conformance.check(model, runner)
    add(runner, 1, ids)
    serve(runner, 1)
    assert runner.fingerprint() == name
    runner.close()
    again = cpu_runner(model, kernels="reference")
    assert again.fingerprint() == name


def test_a_dropped_runner_gives_the_weights_back() -> None:
    model = make_model("mixtral", torch.bfloat16)
    before = weights_of(model)
    cpu_runner(model)
    gc.collect()
    assert_whole(model, before)


def test_a_layer_that_does_not_fit_leaves_the_model_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("mixtral", torch.bfloat16)
    before, made = weights_of(model), []

    def huge_empty(*args: Any, real: Any = cpu.huge_empty) -> Tensor:
        made.append(args)
        if len(made) > 3:  # the second of two in the second layer
            raise MemoryError("no memory")
        return real(*args)

    monkeypatch.setattr(cpu, "huge_empty", huge_empty)
    monkeypatch.setattr(cpu.Arena, "take", lambda self, *s: torch.empty(s, dtype=torch.bfloat16))
    with pytest.raises(MemoryError, match="no memory") as caught:
        cpu_runner(model)
    assert len(made) == 4
    assert_whole(model, before)  # although what failed is still referred to
    assert caught.tb is not None


def test_a_model_that_fails_conformance_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("mixtral", torch.bfloat16)
    before = weights_of(model)
    real = Experts.run

    def wrong(self: Experts, *args: Any) -> None:
        real(self, *args)
        args[-1].mul_(-3)

    monkeypatch.setattr(Experts, "run", wrong)
    monkeypatch.setattr(NativeDriver, "whole", None)  # a sweep would not call it
    with pytest.raises(ModelError, match=r"differ from model\.forward.*first different: layer 0"):
        QLLMEngine.from_model(model, policy="fcfs")
    assert_whole(model, before)


def test_a_bank_that_left_does_not_compute() -> None:
    bank = NativeBank(experts_of(make_model("mixtral", torch.bfloat16))[0])
    work = Work(bank, torch.tensor([[0, 1]]), 8)
    with pytest.raises(InvariantError, match="given back"):
        work.run(torch.zeros(1, 64).bfloat16(), 0, 2)


def test_make_runner_packs_models_of_any_size() -> None:
    """No budget in bytes is left for experts: they take the place of the originals."""
    model = make_model("mixtral", torch.bfloat16)
    runner = make_runner(model, EngineConfig())
    assert runner.names["experts"].startswith("qllm")
    runner.close()


MEMORY = """
import ctypes, re, torch
from transformers import MixtralConfig, MixtralForCausalLM
from qllm.runner.cpu import cpu_runner

def read(name):
    text = open("/proc/self/status").read()
    return int(re.search(name + r":\\s+(\\d+) kB", text)[1]) / 1024

ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: what is freed goes back at once
config = MixtralConfig(
    vocab_size=64, hidden_size=512, intermediate_size=1024, num_hidden_layers=3,
    num_attention_heads=8, num_key_value_heads=2, num_local_experts=16,
)
with torch.device("meta"):
    model = MixtralForCausalLM(config)
model = model.bfloat16().to_empty(device="cpu").eval()
for p in model.parameters():
    p.detach().fill_(0.01)
cpu_runner(model).close()  # what a first runner allocates for itself
for step in ("packed", "whole"):
    before = read("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")
    if step == "packed":
        runner = cpu_runner(model)
    else:
        runner.close()
    print(read("VmRSS") - before, read("VmHWM") - before)
"""


def test_the_experts_are_in_memory_once() -> None:
    """Three layers of 48 MiB: packing adds no copy, and its peak is about a layer above."""
    out = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    packed, whole = (tuple(map(float, line.split())) for line in out.stdout.split("\n")[:2])
    for grown, peak in (packed, whole):
        assert abs(grown) < 16, (packed, whole)
        assert peak < 48 + 16, (packed, whole)
