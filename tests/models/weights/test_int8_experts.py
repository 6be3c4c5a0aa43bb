"""int8 experts: what is rounded and how, and that nothing else changes."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qllm.config import EngineConfig
from qllm.engine.build import make_runner
from qllm.errors import ConfigError
from qllm.kernels import cpu
from qllm.kernels.cpu.experts import Int8Stack
from qllm.llm import QLLMEngine
from qllm.runner import conformance
from qllm.runner.cpu import cpu_runner
from qllm.runner.layers.native_experts import NativeBank
from qllm.runner.layers.work import Work
from tests.support.families import make_model
from tests.support.programs import add, forward, logits_of, prompt_of, serve

assert cpu.MISSING is None, cpu.MISSING
KINDS = tuple(cpu.native.available())
FORMATS = ("int8", "int8-g64")
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


def experts_of(up: Tensor, down: Tensor) -> Any:
    module: Any = nn.Module()
    module.is_transposed, module.is_concatenated, module.has_bias = False, True, False
    module.gate_up_proj = nn.Parameter(up.clone(), requires_grad=False)
    module.down_proj = nn.Parameter(down.clone(), requires_grad=False)
    return module


def run(up: Tensor, down: Tensor, weights: str, x: Tensor, rows: int = 1024) -> Tensor:
    """Slots of every token at every expert, [tokens, E, D]."""
    bank: Any = NativeBank(experts_of(up, down), weights)
    bank.pack()
    ids = torch.arange(E).repeat(len(x), 1)
    work = Work(bank, ids, rows)
    for i in range(len(work.units)) if rows < 1024 else ():
        work.run(x, i, i + 1)
    if rows == 1024:
        work.run(x, 0, len(work.units))
    return work.slots_SD[work.inverse_S].view(len(x), E, -1)


def rounded(weight: Tensor, group: int) -> Tensor:
    """What int8 makes of weights [E, n, k], in fp64 and column by column."""
    out = torch.empty(weight.shape, dtype=torch.float64)
    for lo in range(0, weight.shape[2], group):
        part = weight[..., lo : lo + group].float()
        scale = part.abs().amax(-1, keepdim=True) / 127
        out[..., lo : lo + group] = (part / scale).round().double() * scale.double()
    return out


def expected(up: Tensor, down: Tensor, x: Tensor) -> Tensor:
    """SwiGLU in fp64, rounded to bf16 where the modules round."""

    def half(t: Tensor) -> Tensor:
        return t.bfloat16().double()

    h = half(torch.einsum("td,efd->tef", x.double(), up))
    gate, linear = h.chunk(2, -1)
    return torch.einsum("tef,edf->ted", half(half(F.silu(gate)) * linear), down)


SHAPES = [(64, 32), (70, 40), (130, 66), (256, 100)]
"""D and F: panels of every width, and groups that end inside of a row."""


@pytest.mark.sampled(40)
@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize(("d", "f"), SHAPES)
@pytest.mark.parametrize("tokens", [1, 5, 6, 7, 40])
def test_the_product_is_that_of_the_rounded_weights(
    kind: str, weights: str, d: int, f: int, tokens: int
) -> None:
    up, down, x = rand(E, 2 * f, d) * d**-0.5, rand(E, d, f, seed=1), rand(tokens, d, seed=2)
    up[:, :, d // 2] *= 9  # groups have scales of their own
    groups = (64, 64) if weights == "int8-g64" else (d, f)
    wanted = expected(rounded(up, groups[0]), rounded(down, groups[1]), x)
    found = run(up, down, weights, x).double()
    size = wanted.abs().clamp(min=float(wanted.abs().mean()) / 2)
    assert ((found - wanted).abs() <= 2.5 * size / 128).all()
    plain = expected(up.double(), down.double(), x)
    error, noise = (found - plain).norm() / plain.norm(), (found - wanted).norm() / wanted.norm()
    assert 2 * noise < error < 0.05  # closer to the rounded weights than to the given ones


@pytest.mark.parametrize("d", [64, 70])
def test_integers_are_multiplied_as_bf16_multiplies_them(kind: str, d: int) -> None:
    """Rows with a 127 have the scale 1: with one scale per row no bit differs."""
    generator = torch.Generator().manual_seed(0)
    up = torch.randint(-127, 128, (E, 2 * 40, d), generator=generator).bfloat16()
    down = torch.randint(-127, 128, (E, d, 40), generator=generator).bfloat16()
    up[:, :, 0], down[:, :, -1] = 127, -127
    x = rand(9, d) / 512
    assert torch.equal(run(up, down, "int8", x), run(up, down, "auto", x))


@pytest.mark.parametrize("weights", FORMATS)
def test_rows_do_not_depend_on_their_number_the_units_or_the_threads(
    kind: str, weights: str
) -> None:
    up, down, x = rand(E, 2 * 66, 130), rand(E, 130, 66, seed=1), rand(512, 130, seed=2)
    whole = run(up, down, weights, x)
    assert whole.unique().numel() > 100
    for rows in (1, 2, 3, 5, 6, 7, 33, 97):
        assert torch.equal(run(up, down, weights, x[-rows:]), whole[-rows:])
    assert torch.equal(run(up, down, weights, x[:20], rows=3), whole[:20])
    cpu.set_threads(3)
    for _ in range(5):
        assert torch.equal(run(up, down, weights, x), whole)


@pytest.mark.parametrize(
    ("n", "k", "group"), [(16, 64, 64), (50, 70, 64), (7, 30, 100), (80, 66, 2)]
)
def test_rounding_is_to_the_nearest_and_happens_once(kind: str, n: int, k: int, group: int) -> None:
    weight = rand(n, k) * torch.logspace(-6, 3, n).unsqueeze(1)
    weight[3] = 0
    weight = weight.bfloat16()
    stack = Int8Stack(2, n, k, group)
    stack.pack(1, weight)
    out = torch.empty_like(weight)
    stack.unpack(1, out)
    step = stack.scales[1, :, :n].t().repeat_interleave(min(group, k), 1)[:, :k]
    assert ((out.float() - weight.float()).abs() <= step / 2 + weight.float().abs() / 256).all()
    assert torch.equal(out[3], weight[3])
    assert not torch.equal(out, weight)
    again = Int8Stack(2, n, k, group)
    again.pack(1, out.t().contiguous().t())
    assert torch.equal(again.packed[1], stack.packed[1])
    assert torch.equal(again.scales[1], stack.scales[1])


def test_what_is_not_finite_is_refused() -> None:
    for value in (torch.inf, torch.nan):
        weight = rand(16, 64)
        weight[5, 60] = value
        with pytest.raises(ValueError, match="not finite"):
            Int8Stack(1, 16, 64, 64).pack(0, weight)


# -- a runner


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_a_runner_with_int8_is_close_to_one_without(family: str, weights: str) -> None:
    ids = prompt_of(9)
    plain = logits_of(cpu_runner(make_model(family, torch.bfloat16)), ids)
    runner = cpu_runner(make_model(family, torch.bfloat16), expert_weights=weights)
    conformance.check(runner.model, runner)
    assert runner.names["experts"].startswith(f"qllm {KINDS[0]} {weights} (")
    found = logits_of(runner, ids)
    assert not torch.equal(found[0], plain[0])  # afterwards the tokens may be others
    assert (found[0] - plain[0]).abs().max() < 0.1 * plain[0].abs().max()


@pytest.mark.parametrize("weights", FORMATS)
def test_the_reference_and_a_closed_model_have_the_rounded_weights(weights: str) -> None:
    model, ids = make_model("mixtral", torch.bfloat16), prompt_of(9)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    runner = cpu_runner(model, expert_weights=weights)
    with runner.as_reference():
        first = forward(model, ids)
    with runner.as_reference():
        assert torch.equal(forward(model, ids)[0], first[0])
    runner.close()
    assert torch.equal(forward(model, ids)[0], first[0])
    for name, p in model.named_parameters():
        if "experts" not in name:
            assert torch.equal(p, before[name]), name
            continue
        group = 64 if weights == "int8-g64" else p.shape[2]
        assert torch.equal(p.detach(), rounded(before[name], group).bfloat16())


def test_a_runner_that_is_dropped_gives_weights_back_wherever_tensors_are_made() -> None:
    """Garbage is collected at any time, such as while a model is made on the meta device."""
    model, ids = make_model("mixtral", torch.bfloat16), prompt_of(9)
    runner = cpu_runner(model, expert_weights="int8")
    with runner.as_reference():
        first = forward(model, ids)
    with torch.device("meta"):
        del runner
        gc.collect()
    assert torch.equal(forward(model, ids)[0], first[0])


def test_another_format_is_another_model_and_reads_half() -> None:
    names, read = set(), []
    for weights in ("auto", *FORMATS):
        runner = cpu_runner(make_model("mixtral", torch.bfloat16), expert_weights=weights)
        names.add(runner.fingerprint())
        add(runner, 1, prompt_of(9))
        serve(runner, 1)
        read.append(runner.expert_bytes)
        runner.close()
    assert len(names) == 3
    assert 0.5 < read[1] / read[0] <= read[2] / read[0] < 0.6


def test_where_int8_cannot_be_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"expert_weights='int3'.*int8, int8-g64"):
        EngineConfig(expert_weights="int3")
    with pytest.raises(ConfigError, match="needs kernels='fast'"):
        EngineConfig(expert_weights="int8", kernels="reference")
    with pytest.raises(ConfigError, match="kernels='reference' has no others"):
        cpu_runner(
            make_model("mixtral", torch.bfloat16), kernels="reference", expert_weights="int8"
        )
    with pytest.raises(ConfigError, match="layer 0 has MixtralExperts in float32"):
        make_runner(make_model("mixtral"), EngineConfig(expert_weights="int8"))
    model = make_model("mixtral")
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    with pytest.raises(ConfigError, match="on CUDA experts are rounded while a checkpoint"):
        make_runner(model, EngineConfig(expert_weights="int8-g64"))
    monkeypatch.undo()
    monkeypatch.setattr(cpu, "MISSING", "no compiler")
    with pytest.raises(ConfigError, match="no compiler; use 'auto'"):
        make_runner(make_model("mixtral", torch.bfloat16), EngineConfig(expert_weights="int8"))


def test_an_engine_serves_with_int8() -> None:
    with QLLMEngine.from_pretrained(
        "tiny", policy="fcfs", run_in="thread", expert_weights="int8-g64", threads=1
    ) as engine:
        assert "int8-g64" in engine.kernels["experts"]
        assert len(engine.generate(["def f(x):"], max_tokens=4, progress=False)[0].token_ids) == 4
