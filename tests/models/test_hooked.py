"""Layers of unknown glue, driven by hooks: the bits of `model.forward`, stopped anywhere.

The reference side runs in a process that does not import qllm.
"""

import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from qllm.errors import ModelError
from qllm.models.loader import load
from qllm.models.parts import known
from qllm.plan import NO_STOP, Plan, Row
from qllm.runner.conformance import check
from qllm.runner.cpu import cpu_runner
from qllm.runner.layers.hooked import HookedLayer
from qllm.runner.runner import TorchRunner
from qllm.scheduler.compile import compile_program
from qllm.scheduler.program import START, Index, OpKind, Program
from qllm.types import Driver, Grain, SamplingParams
from tests.support.families import DTYPES, FAMILIES, VOCAB, make_model
from tests.support.files import ROOT

HERE = ROOT
PROMPTS = {1: [7, 3, 250, 11, 98, 4, 4, 61, 200, 17, 33, 9, 140], 2: [5, 90, 1, 2, 77]}
STEPS = 4

UNKNOWN = ("flex_olmo", "hunyuan_v1_moe")
"""Families whose glue the fast driver does not know: norms after attention and experts; shared
experts before the router."""
OTHERS = (*UNKNOWN, "ernie4_5_moe", "glm4_moe")
"""And one with a dense first layer, and one with shared experts after the routed ones."""

REFERENCE = """
import sys
from pathlib import Path
import torch
from tests.support.families import COMMON, DTYPES, FAMILIES, make_model
from transformers import AutoConfig, AutoModelForCausalLM

torch.set_num_threads(1)  # bits are those of one number of threads
folder, prompts, steps, others = Path(sys.argv[1]), *map(eval, sys.argv[2:])
shared = dict(intermediate_size=96, moe_intermediate_size=48)
more = {
    "flex_olmo": dict(num_experts=8, intermediate_size=48),
    "hunyuan_v1_moe": dict(num_experts=8, moe_topk=4, head_dim=16, intermediate_size=48),
    "ernie4_5_moe": dict(moe_num_experts=8, moe_k=4, moe_num_shared_experts=2,
        moe_layer_start_index=1, moe_layer_end_index=2, moe_layer_interval=1, **shared),
    "glm4_moe": dict(n_routed_experts=8, n_group=2, topk_group=2, n_shared_experts=1,
        first_k_dense_replace=1, head_dim=16, **shared),
}

def make_other(family, dtype):
    config = AutoConfig.for_model(family, **{**COMMON, "pad_token_id": 0}, **more[family])
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn_like(p)
            p.copy_(noise * 0.1 + ("norm" in name) if p.dim() == 1 else noise * p.shape[-1] ** -0.5)
    return model.to(dtype)

def logits(model, prompt):
    out, cache, ids = [], None, torch.tensor([prompt])
    for _ in range(steps):
        result = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = result.past_key_values
        out.append(result.logits[0, -1].clone())
        ids = out[-1].argmax().view(1, 1)
    return torch.stack(out)

found = {}
with torch.inference_mode():
    for name, dtype in DTYPES.items():
        for family in FAMILIES + others:
            if family in others:
                saved = folder / f"{family}-{name}"
                make_other(family, dtype).save_pretrained(saved)
                model = AutoModelForCausalLM.from_pretrained(saved, dtype="auto").eval()
            else:
                model = make_model(family, dtype)
            for key, prompt in prompts.items():
                found[family, name, key] = logits(model, prompt)
assert "qllm" not in sys.modules
torch.save(found, folder / "logits.pt")
"""

References = dict[tuple[str, str, int], Tensor]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    given = [str(folder), repr(PROMPTS), repr(STEPS), repr(OTHERS)]
    subprocess.run([sys.executable, "-c", REFERENCE, *given], cwd=HERE, check=True)
    return folder


@pytest.fixture(scope="module")
def references(folder: Path) -> References:
    found: References = torch.load(folder / "logits.pt")
    return found


@pytest.fixture
def no_known_glue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer counts as unknown."""
    monkeypatch.setattr(known, "layer", lambda *_: known.Known(None, "a test"))


class Always:
    word = NO_STOP
    stop_at_ns: int | None = None

    def now_ns(self) -> int:
        return 0


class Driven:
    """A runner whose logits are kept, and its requests."""

    def __init__(self, model: Any) -> None:
        self.runner = cpu_runner(model, max_segment_ms=float("inf"), kernels="reference")
        self.logits: dict[int, list[Tensor]] = {1: [], 2: []}
        self.runner.on_logits = lambda request_id, _, row: self.logits[request_id].append(row)
        self.frames = count()
        self.kinds: set[OpKind] = set()

    def add(self, request_id: int) -> None:
        prompt = PROMPTS[request_id]
        self.runner.add(request_id, prompt, SamplingParams(temperature=0), len(prompt), 64)

    def begin(self, request_id: int, grain: Grain) -> Program:
        lo, hi = self.runner.num_committed(request_id), len(self.runner.token_ids(request_id))
        program = compile_program(
            Plan(
                rows=(Row(request_id, lo, hi, 0, self.runner.shape.num_layers),),
                grain=grain,
                stop_below=0,
            ),
            frame_id=next(self.frames),
            samples=[True],
            shape=self.runner.shape,
            cuts=self.runner.cuts,
        )
        self.runner.accept(program)
        return program

    def drive(self, request_id: int, grain: Grain) -> Iterator[tuple[Program, Index]]:
        """Run the request, stopping at every boundary that the grain allows."""
        self.add(request_id)
        for _ in range(STEPS):
            program, index = self.begin(request_id, grain), START
            while index != program.end:
                index = self.runner.run(program, index, Always())
                self.kinds |= {program.ops[index.op].kind} if index != program.end else set()
                yield program, index
            self.runner.finish(program)


def untouched(model: nn.Module) -> bool:
    """Packed `nn.Linear`s keep their own forward until `close`; nothing else may."""
    others = (module for module in model.modules() if type(module) is not nn.Linear)
    return not any("forward" in vars(module) for module in others)


def assert_same(found: list[Tensor], expected: Tensor) -> None:
    assert torch.equal(torch.stack(found), expected)
    assert not torch.equal(torch.stack(found)[1:], expected[:-1])  # the comparison has power
    assert len({int(row.argmax()) for row in expected}) > 1


def model_of(family: str, name: str, folder: Path) -> Any:
    if family in FAMILIES:
        return make_model(family, DTYPES[name])
    return load(folder / f"{family}-{name}").model


@pytest.mark.sampled(10)
@pytest.mark.usefixtures("no_known_glue")
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_hooked_layers_give_the_bits_of_forward_when_parked_at_every_boundary(
    family: str, name: str, folder: Path, references: References
) -> None:
    model = model_of(family, name, folder)
    driven = Driven(model)
    assert Driver.HOOKED in driven.runner.drivers
    assert Driver.FAST not in driven.runner.drivers
    first, second = driven.drive(1, Grain.EXPERT), driven.drive(2, Grain.EXPERT)
    while next(first, None) or next(second, None):  # the other frame runs in between
        next(second, None)
        assert untouched(model)
    assert driven.kinds == set(OpKind) - {OpKind.EMBED}
    for request_id in PROMPTS:
        assert_same(driven.logits[request_id], references[family, name, request_id])


@pytest.mark.parametrize("family", UNKNOWN)
def test_discovery_gives_a_family_it_does_not_know_to_hooks(
    family: str, folder: Path, references: References
) -> None:
    driven = Driven(model_of(family, "bf16", folder))
    for layer, kind in zip(driven.runner.parts.layers, driven.runner.drivers, strict=True):
        assert kind is Driver.HOOKED or not layer.is_moe
    for _ in driven.drive(1, Grain.STEP):
        pass
    assert_same(driven.logits[1], references[family, "bf16", 1])


@pytest.mark.usefixtures("no_known_glue")
@pytest.mark.parametrize(
    "every",
    [5, pytest.param(1, marks=pytest.mark.slow)],  # a part of the same boundaries
)
@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss", "hunyuan_v1_moe", "ernie4_5_moe"])
def test_a_frame_goes_on_in_a_runner_that_never_saw_its_layers(
    family: str, every: int, folder: Path, references: References, tmp_path: Path
) -> None:
    whole = Driven(model_of(family, "bf16", folder))
    whole.add(1)
    program, index, number = whole.begin(1, Grain.EXPERT), START, 0
    while index != program.end:
        index = whole.runner.run(program, index, Always())
        number += 1
        if number % every and index != program.end:
            continue
        state = (whole.runner.export_frame(program, index), *whole.runner.export_request(1))
        torch.save(state, tmp_path / "state.pt")
        frame, tensors, meta = torch.load(tmp_path / "state.pt", weights_only=True)
        fresh = Driven(model_of(family, "bf16", folder))
        fresh.runner.import_request(1, SamplingParams(temperature=0), tensors, meta)
        fresh.runner.import_frame(program, index, frame)
        if index != program.end:
            at = index
            while at != program.end:
                at = fresh.runner.run(program, at, Always())
            assert torch.equal(fresh.logits[1][0], references[family, "bf16", 1][0]), index
    assert number > 2 * every


@pytest.mark.usefixtures("no_known_glue")
def test_the_model_can_be_used_while_a_frame_is_parked(references: References) -> None:
    model = make_model("qwen2_moe", torch.bfloat16)
    driven = Driven(model)
    for _ in driven.drive(1, Grain.EXPERT):
        with torch.inference_mode():
            out = model(torch.tensor([PROMPTS[2]]), logits_to_keep=1).logits[0, -1]
        assert torch.equal(out, references["qwen2_moe", "bf16", 2][0])
    assert_same(driven.logits[1], references["qwen2_moe", "bf16", 1])


def test_a_dense_layer_is_hooked_whole() -> None:
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 3}
    config = LlamaConfig(**sizes, intermediate_size=96, num_attention_heads=4)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    calls: list[tuple[Tensor, dict[str, Any], Tensor]] = []

    def keep(_: nn.Module, args: Any, kwargs: Any, out: Tensor) -> None:
        calls.append((args[0], kwargs, out))

    for layer in model.model.layers:
        layer.register_forward_hook(keep, with_kwargs=True)
    with torch.inference_mode():
        model(torch.tensor([PROMPTS[1]]), use_cache=False)
        assert len(calls) == 3
        for layer, (x, kwargs, out) in zip(model.model.layers, calls[:], strict=True):
            hooked = HookedLayer(layer, layer.self_attn)
            mid = hooked.attend(x[0], **kwargs)
            assert torch.equal(hooked.combine(x[0], mid, **kwargs), out[0])


class Part(nn.Module):
    def __init__(self, out: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.out = out
        self.calls = 0

    def forward(self, x: Tensor, *args: Tensor) -> Any:
        self.calls += 1
        if isinstance(self.out, Exception):
            raise self.out
        return x if self.out is None else self.out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts, self.shared = Part(), Part()


class Odd(nn.Module):
    """A layer that calls its parts as often as it is told."""

    def __init__(self, attention: int = 1, shared: int = 1, experts: int = 1) -> None:
        super().__init__()
        self.attn, self.block = Part(), Block()
        self.counts = attention, shared, experts

    def forward(self, x: Tensor) -> Tensor:
        attention, shared, experts = self.counts
        for _ in range(attention):
            x = self.attn(x)[0] + x
        for _ in range(shared):
            x = self.block.shared(x)
        ids = torch.zeros((x.shape[0], 1), dtype=torch.long)
        for _ in range(experts):
            x = self.block.experts(x, ids, ids)
        return x


X = torch.ones(3, 4)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"attention": 0}, "did not call its attention"),
        ({"attention": 2}, "called its attention 2 times, not once"),
        ({"shared": 2}, "called its shared 2 times, not once"),
        ({"experts": 0}, "did not reach its experts"),
        ({"experts": 2}, "called its experts 2 times, not once"),
    ],
)
def test_a_layer_that_cannot_be_hooked_is_refused(counts: dict[str, int], message: str) -> None:
    layer = Odd(**counts)
    hooked = HookedLayer(layer, layer.attn, None, layer.block.experts)
    with pytest.raises(ModelError, match=f"Odd cannot be hooked: it {message}"):  # noqa: PT012
        mid = hooked.attend(X)
        routed = hooked.route(X, mid)
        hooked.combine(X, mid, routed.siblings, X)
    assert untouched(layer)


def test_attention_and_shared_experts_run_once_and_the_experts_outside() -> None:
    layer = Odd()
    hooked = HookedLayer(layer, layer.attn, None, layer.block.experts)
    mid = hooked.attend(X)
    hidden, _, _, siblings = hooked.route(X, mid)
    assert set(siblings) == {"shared"}
    assert torch.equal(hooked.combine(X, mid, siblings, 7 * hidden), 14 * X[0])
    assert (layer.attn.calls, layer.block.shared.calls, layer.block.experts.calls) == (1, 1, 0)


def test_an_error_inside_a_part_leaves_the_layer_as_it_was() -> None:
    layer = Odd()
    hooked = HookedLayer(layer, layer.attn, None, layer.block.experts)
    layer.block.shared.out = ValueError("broken")
    with pytest.raises(ValueError, match="broken"):
        hooked.route(X, X)
    assert untouched(layer)


def own_forward(x: Tensor, *args: Tensor) -> Tensor:
    return x


def test_a_forward_that_was_set_on_the_instance_is_put_back() -> None:
    layer = Odd()
    layer.attn.forward = own_forward  # type: ignore[method-assign]
    HookedLayer(layer, layer.attn, None, layer.block.experts).route(X, X)
    assert vars(layer.attn)["forward"] is own_forward


# conformance


def snapshot(model: Any, runner: TorchRunner) -> Any:
    config = model.config
    return (
        config._attn_implementation,
        config._experts_implementation,
        runner.segments.longest_ns,
        runner.on_logits,
        runner.on_segment,
        [len(vars(module)) for module in model.modules()],
    )


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("family", OTHERS)
def test_conformance_holds_and_leaves_no_trace(family: str, name: str, folder: Path) -> None:
    model = model_of(family, name, folder)
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    runner = cpu_runner(model)
    before = snapshot(model, runner)
    check(model, runner)
    assert snapshot(model, runner) == before
    check(model, runner)


def test_conformance_wants_close_logits_of_a_batch_invariant_runner(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("flex_olmo", "fp32", folder)
    runner = cpu_runner(model, batch_invariant=True)
    check(model, runner)
    wrong: Any = runner._drivers[1]
    real = wrong.combine
    monkeypatch.setattr(wrong, "combine", lambda x, *rest: real(x, *rest) * 1.05)
    with pytest.raises(ModelError, match="layer 1"):
        check(model, runner)


def test_conformance_names_the_first_layer_that_differs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("flex_olmo", "fp32", folder)
    runner = cpu_runner(model)
    wrong: Any = runner._drivers[1]
    real = wrong.combine
    monkeypatch.setattr(wrong, "combine", lambda x, *rest: real(x, *rest) + 1e-4)
    with pytest.raises(ModelError) as caught:
        check(model, runner)
    message = str(caught.value)
    assert "model 'flex_olmo'" in message
    assert "first different: layer 1 (driver 'hooked')" in message


def test_conformance_sees_what_only_preemption_breaks(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("flex_olmo", "fp32", folder)
    runner = cpu_runner(model)
    wrong: Any = runner._drivers[1]
    real = wrong.attend
    buffer = torch.zeros(64, model.config.hidden_size)

    def shared_buffer(x: Tensor, *rest: Any) -> Tensor:
        out: Tensor = real(x, *rest)
        buffer[: len(out)] = out
        return buffer[: len(out)]

    monkeypatch.setattr(wrong, "attend", shared_buffer)
    with pytest.raises(ModelError, match="parked"):
        check(model, runner)


def test_conformance_names_the_layer_that_raises(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("flex_olmo", "fp32", folder)
    runner = cpu_runner(model)

    def broken(*args: Tensor) -> Tensor:
        raise TypeError("missing argument")

    monkeypatch.setattr(runner._drivers[2], "route", broken)
    with pytest.raises(ModelError, match=r"ROUTE of layer 2 \(driver 'hooked'\).*missing"):
        check(model, runner)
