"""Ranks of the device runner on a CPU: tokens, logits and KV of one device, wherever it stops."""

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qllm import QLLMEngine
from qllm.config import EngineConfig
from qllm.cuda.backend import cuda_runner
from qllm.cuda.gathers import Gathers, Nccl, OneDevice, gathers_of
from qllm.cuda.ranked import RankMlp
from qllm.cuda.shares import most_kv_bytes
from qllm.engine import build
from qllm.errors import ConfigError, ModelError
from qllm.kernels.reference import silu_mul
from qllm.models import loader
from qllm.models.discover import discover
from qllm.plan import Row
from qllm.runner import conformance
from qllm.runner.layers import rows
from qllm.runner.runner import TorchRunner
from qllm.scheduler.program import START, Index
from qllm.types import Grain
from tests.support import interpret  # noqa: F401 - mends the interpreter
from tests.support.captured import BUCKETS, GREEDY, NUM_PAGES, Driver, Poll, prompt_of, schedule
from tests.support.device_storms import on_device as engine_on_device
from tests.support.device_storms import storm
from tests.support.device_weights import on_device
from tests.support.fake_cuda import FakeCuda
from tests.support.families import DTYPES, FAMILIES, make_model
from tests.support.rank_devices import FakeDevices
from tests.support.sharded import PREFILL, PROMPTS, Served, layers_of, wide_model

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def one_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch compute products and gates in fp64, and round each result once.

    Otherwise the libraries behind torch choose an order of a sum by the number of outputs, and an
    implementation of the exponential by the place of a value in its tensor.
    """
    einsum, matmul = torch.einsum, torch.matmul

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = matmul(x.double(), weight.double().t()).to(x.dtype)
        return y if bias is None else y + bias

    def bmm(x: Tensor, other: Tensor, *, out: Tensor | None = None) -> Tensor:
        y = matmul(x.double(), other.double()).to(x.dtype)
        return y if out is None else out.copy_(y)

    def summed(equation: str, *given: Tensor) -> Tensor:
        return einsum(equation, *(x.double() for x in given)).to(given[0].dtype)

    def silu(x: Tensor, inplace: bool = False) -> Tensor:
        return (x.double() / (1 + torch.exp(-x.double()))).to(x.dtype)

    monkeypatch.setattr(nn.functional, "linear", linear)
    monkeypatch.setattr(rows, "_linear", linear)  # of the head
    monkeypatch.setattr(nn.functional, "silu", silu)
    monkeypatch.setattr(torch, "einsum", summed)
    monkeypatch.setattr(torch, "bmm", bmm)


def runner_of(model: Any, tp: int, **settings: Any) -> TorchRunner:
    how = {"num_pages": NUM_PAGES, "page_size": 4, "max_num_seqs": 4, "max_total_tokens": 96}
    return cuda_runner(model, **{**how, "graphs": False, "tp": tp, **settings})


def answered(runner: TorchRunner, grain: Grain) -> list[int]:
    """Return the tokens of prompts in chunks, and of decode steps."""
    driver, num = Driver(runner), runner.shape.num_layers
    for request, ids in PROMPTS.items():
        driver.add(request, ids)
    for step in PREFILL:
        driver.sweep([Row(request, lo, hi, 0, num) for request, lo, hi in step], grain)
    for _ in range(3):
        driver.sweep([driver.row(request) for request in PROMPTS], grain)
    return [t for tokens in driver.tokens.values() for t in tokens]


def served(runner: TorchRunner, grain: Grain = Grain.EXPERT) -> Served:
    """Return the results of prompts in chunks, and of decode steps; the runner is closed."""
    logits: list[Tensor] = []
    runner.on_logits = lambda request, position, x: logits.append(x.clone())
    tokens, num = answered(runner, grain), runner.shape.num_layers
    kv = {request: layers_of(runner.requests[request].kv, num) for request in PROMPTS}
    runner.close()
    return Served(tokens, logits, kv)


def assert_same_bits(found: Served, expected: Served) -> None:
    assert found.tokens == expected.tokens
    assert len(set(expected.tokens)) > 3
    assert len(found.logits) == len(expected.logits) > 0
    assert all(map(torch.equal, found.logits, expected.logits)), "logits differ"
    for request, layers in expected.kv.items():
        for i, (own, other) in enumerate(zip(found.kv[request], layers, strict=True)):
            assert all(map(torch.equal, own, other)), f"KV of layer {i} differs"


# -- bits


@pytest.mark.sampled(10)
@pytest.mark.usefixtures("one_rounding")
@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_have_the_bits_of_one_device(family: str, tp: int) -> None:
    """Heads, KV heads that ranks share, uneven columns and experts, and a split vocabulary."""
    expected = served(runner_of(wide_model(family, torch.float32), 1))
    assert_same_bits(served(runner_of(wide_model(family, torch.float32), tp)), expected)


@pytest.mark.usefixtures("one_rounding")
def test_ranks_that_split_a_product_by_its_inputs_have_other_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This is the usual tensor parallelism: each rank adds a part of every sum."""
    expected = served(runner_of(wide_model("qwen2_moe", torch.float32), 1))
    whole = dict[RankMlp, Tensor]()
    own = RankMlp.__init__

    def with_down(self: RankMlp, mlp: Any, *args: Any) -> None:
        own(self, mlp, *args)
        whole[self] = mlp.down_proj.weight.detach()

    def by_inputs(self: RankMlp, x_TD: Tensor) -> Tensor:
        inner = torch.cat([silu_mul(into.whole(x_TD)) for into in self._into], 1)
        parts = zip(inner.tensor_split(2, 1), whole[self].tensor_split(2, 1), strict=True)
        one, other = (nn.functional.linear(x, weight) for x, weight in parts)
        return one + other

    monkeypatch.setattr(RankMlp, "__init__", with_down)
    monkeypatch.setattr(RankMlp, "__call__", by_inputs)
    found = served(runner_of(wide_model("qwen2_moe", torch.float32), 2))
    assert not all(map(torch.equal, found.logits, expected.logits))
    both = zip(found.logits, expected.logits, strict=True)
    assert all(torch.allclose(one, other, atol=1e-3) for one, other in both)


@pytest.mark.usefixtures("one_rounding")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "deepseek_v3"])
def test_ranks_in_bf16_have_the_bits_of_one_device(family: str) -> None:
    expected = served(runner_of(wide_model(family), 1))
    assert_same_bits(served(runner_of(wide_model(family), 2)), expected)


@pytest.mark.usefixtures("one_rounding")
@pytest.mark.parametrize(("family", "rounding"), [("qwen3_moe", "int4"), ("gpt_oss", "mxfp4")])
def test_ranks_share_quantised_experts(
    family: str, rounding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(family, DTYPES["bf16"]).save_pretrained(tmp_path)
    both = []
    for tp in (1, 2):
        runner = runner_of(on_device(tmp_path, rounding, monkeypatch), tp)
        experts = [e for e in runner.backend.layers.experts if e is not None]
        assert all(e.weights.packed is not None for e in experts)
        both.append(served(runner))
    assert_same_bits(both[1], both[0])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "qwen3_moe"])
def test_interpreted_kernels_run_the_experts_of_ranks(family: str) -> None:
    """A rank's weights begin with its first expert, and tiles name experts of the layer."""
    tokens = []
    for name in ("torch", "triton"):
        driver = Driver(runner_of(make_model(family), 2, kernels_name=name))
        for i in (0, 1):
            driver.add(i, prompt_of(7, 1)[: 3 + i])
        driver.sweep([driver.row(0), driver.row(1)])
        driver.sweep([driver.row(0), driver.row(1)])
        tokens.append(driver.tokens)
    assert tokens[0] == tokens[1]
    assert all(len(found) == 2 for found in tokens[1].values())


def test_weights_read_are_counted_once() -> None:
    """All ranks sort the slots of all experts, and the owner counts."""
    read = []
    for tp in (1, 2):
        runner = runner_of(make_model("mixtral"), tp)
        schedule(runner, GREEDY, Grain.EXPERT)
        read.append(runner.expert_bytes)
        runner.close()
    assert read[0] == read[1] > 0


# -- stops


def parked(runner: TorchRunner, num_stops: int) -> tuple[Driver, Any, Index]:
    """Run a prompt up to a stop. Another request decodes meanwhile."""
    driver = Driver(runner)
    driver.add(2, PROMPTS[2])
    driver.sweep([driver.row(2)])
    driver.add(1, PROMPTS[1])
    program = driver.program([driver.row(1)], Grain.EXPERT)
    at = START
    for _ in range(num_stops):
        at = runner.run(program, at, Poll(p=1.0))
    driver.sweep([driver.row(2)])
    return driver, program, at


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("one_rounding")
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "olmoe", "deepseek_v3"])
def test_ranks_stop_at_every_boundary_and_go_on(family: str) -> None:
    """A prompt and a decode step that were parked have the bits of uncut ones."""
    model = wide_model(family, torch.float32)
    runner = runner_of(model, 2)
    conformance.check(model, runner)
    runner.close()


@pytest.mark.usefixtures("one_rounding")
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3)])
@pytest.mark.parametrize("num_stops", [2, 4, 5, 7, 11])
def test_a_parked_frame_goes_on_with_another_number_of_ranks(
    before: int, after: int, num_stops: int
) -> None:
    """It is parked in each kind of op, and inside the experts."""
    one, other = (runner_of(wide_model("qwen2_moe", torch.float32), tp) for tp in (before, after))
    driver, program, at = parked(one, num_stops)
    assert at != program.end
    moved = Driver(other)
    for request in (1, 2):
        state, meta = one.export_request(request)
        row = Row(request, 0, len(one.token_ids(request)), 0, one.shape.num_layers)
        blocks = moved.tables.cover([row])[0]
        other.import_request(request, GREEDY, state, meta, blocks)
    other.import_frame(program, at, one.export_frame(program, at))
    tokens = []
    for runner in (one, other):
        assert runner.run(program, at, Poll()) == program.end
        tokens.append([s.token_id for s in runner.finish(program)])
    assert tokens[0] == tokens[1]
    for request in (1, 2):
        num = one.shape.num_layers
        both = [layers_of(runner.requests[request].kv, num) for runner in (one, other)]
        for (k, v), (other_k, other_v) in zip(*both, strict=True):
            assert torch.equal(k, other_k)
            assert torch.equal(v, other_v)
    assert driver.tokens[2]
    one.close()
    other.close()


# -- captured stages


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_captured_stages_of_ranks_have_the_tokens_of_ops_one_by_one(family: str) -> None:
    """On one device a stage contains the ranks and the copies between them."""
    expected = served(runner_of(wide_model(family, torch.float32), 1))
    for grain in (Grain.STEP, Grain.LAYER):
        fake = FakeCuda()
        runner = runner_of(
            wide_model(family, torch.float32), 2, graphs=fake, buckets=BUCKETS, layers_per_stage=1
        )
        assert answered(runner, grain) == expected.tokens
        num = runner.shape.num_layers
        assert len(fake.replays) >= 6 * (1 if grain is Grain.STEP else num)
        runner.close()


@pytest.mark.parametrize("policy", ["qllm2", "priority-layered"])
def test_a_storm_of_an_engine_with_ranks_gives_the_tokens_of_the_cpu(
    monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    wanted, _, _ = storm(policy)
    fakes: list[FakeCuda] = []
    engine_on_device(monkeypatch, fakes, tp=2)
    found, stats, engine = storm(policy)
    assert found == wanted
    assert len(fakes[0].replays) > 5
    assert "graphs" in engine._client.info.kernels["stages"]
    assert engine._client.info.kernels["ranks"] == "2 on one device, copies"
    assert [rank["pid"] for rank in stats["ranks"]] == [stats["pid"]] * 2
    owner, other = (rank["weight_bytes"] for rank in stats["ranks"])
    assert 0 < other < owner < stats["weight_bytes"]


def test_an_engine_of_a_checkpoint_has_ranks_on_its_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A CPU stands in for the device; the start-up check follows the model's own forward."""
    asked: list[tuple[str, int]] = []
    own = loader.load

    def load(name: str, *, device: str, tp: int, **how: Any) -> loader.LoadedModel:
        asked.append((device, tp))
        return own(name, **how)

    monkeypatch.setattr(loader, "load", load)
    monkeypatch.setattr(loader, "check_device", torch.device)
    fakes, tokens = list[FakeCuda](), []
    for tp in (1, 2):
        engine_on_device(monkeypatch, fakes, tp=tp)
        with QLLMEngine.from_pretrained(
            "tiny", device="cuda", tp=tp, run_in="thread", threads=1, max_num_seqs=8,
            max_kv_tokens=2048,
        ) as engine:  # fmt: skip
            asking = engine.submit("The capital of France is", "LS", 8)
            tokens.append(asking.result(300).token_ids)
            assert len(engine.stats()["ranks"]) == (0 if tp == 1 else tp)
    assert [(str(device), tp) for device, tp in asked] == [("cuda", 1), ("cuda", 2)]
    assert tokens[0] == tokens[1]
    assert fakes[1].replays


# -- devices of their own


@pytest.mark.sampled(4)
@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_between_devices_nccl_moves_what_ranks_need(family: str, tp: int) -> None:
    """No operation of a rank reads memory of another rank, and NCCL gets what it allows."""
    expected = served(runner_of(wide_model(family, torch.float32), 1))
    devices = FakeDevices(tp)
    with devices.memory:
        model = wide_model(family, torch.float32)
        runner = runner_of(model, tp, gathers=devices, graphs=FakeCuda())
        assert "several devices" in runner.backend.not_captured
        found = served(runner)
    assert found.tokens == expected.tokens
    assert {"broadcast", "all_gather"} == {*devices.nccl.calls}


def test_an_operation_on_memory_of_another_rank_is_found() -> None:
    devices = FakeDevices(2)
    with devices.memory:
        one, other = devices.spread(torch.ones(3))
        with pytest.raises(AssertionError, match=r"rank 0 ran .* on memory of rank 1"):
            one + other
        with devices.on(1):
            assert (other + other).sum() == 6


@pytest.mark.parametrize("widths", [(3, 3), (64, 128, 0), (0, 5)])
def test_a_gather_of_uneven_parts_has_each_part(widths: tuple[int, ...]) -> None:
    """NCCL gathers parts of one size, so parts are padded."""
    devices = FakeDevices(len(widths))
    made: list[tuple[Gathers, AbstractContextManager[Any]]] = [
        (devices, devices.memory),
        (OneDevice(torch.device("cpu"), len(widths)), nullcontext()),
    ]
    for gathers, context in made:
        parts = [torch.randn(4, width) for width in widths]
        with context:
            given = [gathers.put(rank, part) for rank, part in enumerate(parts)]
            found = [*gathers.to_all(given), gathers.to_owner(given)]
            copies = gathers.spread(given[0])
        assert len(found) == len(widths) + 1
        for own in found:
            assert all(map(torch.equal, own, parts))
        assert len(copies) == len(widths)
        assert all(torch.equal(copy, parts[0]) for copy in copies)


@pytest.mark.parametrize(("there", "tp", "kind"), [(1, 4, OneDevice), (2, 2, Nccl), (8, 2, Nccl)])
def test_ranks_have_devices_of_their_own_if_there_are_enough(
    there: int, tp: int, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    found = gathers_of(torch.device("cuda"), tp)
    assert isinstance(found, kind)
    names = [f"cuda:{rank}" for rank in range(tp)] if kind is Nccl else ["cuda"] * tp
    assert list(map(str, found.devices)) == names


def test_more_ranks_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"tp=3: there are 2 CUDA devices.*use tp=2, or CUDA_VIS"):
        gathers_of(torch.device("cuda"), 3)


# -- settings and refusals


def test_the_number_of_ranks_reaches_the_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnCuda:
        device = torch.device("cuda")

    asked: list[int] = []
    monkeypatch.setattr("qllm.cuda.backend.cuda_runner", lambda _, tp, **how: asked.append(tp))
    config = EngineConfig(tp=3, max_kv_tokens=1024)
    config.check_place("thread", "cuda")
    build.make_runner(OnCuda(), config)
    assert asked == [3]


@pytest.mark.parametrize("setting", [{"swap_kv_tokens": 256}, {"prefix_cache": "approximate"}])
def test_copies_of_kv_out_of_ranks_are_refused(setting: dict[str, Any]) -> None:
    config = EngineConfig(tp=2, **setting)
    with pytest.raises(ConfigError, match="tp=2 on CUDA: no KV of several ranks is copied"):
        config.check_place("thread", "cuda")


def hooked_attention(model: Any) -> None:
    model.model.layers[1].self_attn.o_proj.register_forward_hook(lambda *_: None)


def hooked_head(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize(
    ("family", "change", "tp", "text"),
    [
        ("mixtral", hooked_attention, 2, "layer 1 has a hook on its attention or MLP"),
        ("mixtral", hooked_head, 2, "a hook listens to its head"),
        ("gated", None, 2, "layer 0 has attention of an unknown kind"),
        ("mixtral", None, 5, "tp=5 is too many ranks: layer 0 has 4 query heads"),
    ],
)
def test_what_ranks_cannot_share_is_refused_by_name(
    family: str, change: Callable[[Any], None] | None, tp: int, text: str
) -> None:
    model = wide_model(family, torch.float32)
    if change is not None:
        change(model)
    with pytest.raises((ModelError, ConfigError), match=text):
        runner_of(model, tp)


def test_kv_is_counted_on_the_device_that_has_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Latents are on every rank, and two ranks may have one KV head."""
    models = [wide_model(name, torch.float32) for name in ("mixtral", "deepseek_v3")]
    parts = [discover(model) for model in models]
    found = [most_kv_bytes(m, p, 4, 800) for m, p in zip(models, parts, strict=True)]
    assert found == [4 * 400, 4 * 800]
    apart = Nccl([torch.device("cuda", rank) for rank in range(4)], calls=random)
    monkeypatch.setattr("qllm.cuda.shares.gathers_of", lambda *_: apart)
    found = [most_kv_bytes(m, p, 4, 800) for m, p in zip(models, parts, strict=True)]
    assert found == [400, 800]
    charges = [runner_of(wide_model("mixtral", torch.float32), tp).charge for tp in (1, 4)]
    assert charges[1].token_bytes == 2 * charges[0].token_bytes


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_on_a_gpu_two_ranks_have_the_tokens_of_one(family: str) -> None:
    """In fp32 the last bits may differ, because cuBLAS chooses an order by the columns."""
    tokens = []
    for tp in (1, 2):
        model = make_model(family).cuda()
        with QLLMEngine.from_model(model, threads=1, max_kv_tokens=4096, tp=tp) as engine:
            handles = [engine.submit(prompt_of(n, 1), "BE", 12) for n in (40, 7, 23)]
            tokens.append([handle.result(300).token_ids for handle in handles])
    assert tokens[0] == tokens[1]
