"""KV on a device that outlives its row: shared, kept and swapped out, and no copy races.

A CPU stands in for the device; `fake_streams` runs copies as late as CUDA would allow and refuses
two accesses that nothing orders.
"""

import random
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda
from fake_streams import FakeStreams, install
from families import VOCAB, make_model

from qllm import QLLMEngine, SamplingParams, config
from qllm.cuda.backend import CudaBackend, cuda_runner
from qllm.cuda.lanes import Bucket
from qllm.engine import build
from qllm.errors import ConfigError
from qllm.plan import Plan
from qllm.policy import View, next_row
from qllm.record import trace
from qllm.runner.runner import TorchRunner
from qllm.types import Cap

GREEDY = SamplingParams(temperature=0, ignore_eos=True)
BUCKETS = [Bucket(8, False), Bucket(96, True)]
PAGE, BLOCK = 8, 4
SETTINGS: dict[str, Any] = {
    "conformance": False, "threads": 1, "max_num_seqs": 8, "block_size": BLOCK,
    "max_kv_tokens": 512, "kernels": "reference",
}  # fmt: skip


def prompt_of(n: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(n)]


class Device:
    """What stands in for the device of the engines of a test."""

    def __init__(self, patch: pytest.MonkeyPatch, *, stages: bool = False) -> None:
        self.streams = FakeStreams()
        self.cuda = FakeCuda() if stages else None
        patch.setattr(config, "PAGE_SIZE", PAGE)
        patch.setattr(build, "make_runner", self._runner)
        install(patch, self.streams, BLOCK, self.cuda)

    def _runner(self, model: Any, settings: Any) -> TorchRunner:
        graphs = False if self.cuda is None else self.cuda
        return cuda_runner(
            model, num_pages=settings.num_blocks, page_size=settings.block_size, max_num_seqs=8,
            max_total_tokens=256, graphs=graphs, buckets=BUCKETS, layers_per_stage=1,
            spare=build.spare_of(settings, CudaBackend.why_inexact, lambda: self.streams),
        )  # fmt: skip


@pytest.fixture(params=[False, True], ids=["ops", "stages"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch, stages=request.param)


def engine_of(model: Any = None, **settings: Any) -> QLLMEngine:
    model = make_model("mixtral") if model is None else model
    return QLLMEngine.from_model(model, **{**SETTINGS, **settings})


def run(engine: QLLMEngine, ids: list[int], n: int = 6, priority: str = "LS") -> Any:
    return engine.submit(ids, priority, n, sampling=GREEDY).result(60)


def test_a_hit_has_the_tokens_of_a_cold_run(device: Device) -> None:
    shared = prompt_of(40)
    prompts = [shared + prompt_of(5 + i, i + 1) for i in range(3)]
    with engine_of(prefix_cache=False) as engine:
        cold = [run(engine, ids).token_ids for ids in prompts]
    with engine_of(prefix_cache="approximate") as engine:
        found = [run(engine, ids) for ids in prompts]
    assert [r.token_ids for r in found] == cold
    assert [r.metrics.num_cached_tokens for r in found] == [0, 40, 40]
    assert device.streams.copies["out"] > 0
    assert device.streams.copies["in"] == 2 * 2 * 40 // BLOCK


def test_chats_at_once_refer_to_the_pages_of_their_system_prompt(device: Device) -> None:
    """Four chats hold it once; what is copied out is what each of them computed."""
    system = prompt_of(40)
    prompts = [[*system, *prompt_of(3 + i, i + 1)] for i in range(4)]
    with engine_of(prefix_cache=False) as engine:
        want = [run(engine, ids, 12).token_ids for ids in prompts]
    with engine_of(prefix_cache="approximate", policy=Held()) as engine:
        handles = [engine.submit(ids, "LS", 12, sampling=GREEDY) for ids in prompts]
        found = [handle.result(60).token_ids for handle in handles]
        stats = engine.stats()
    assert found == want
    assert stats["prefix_cache"]["shared_tokens"] == 3 * 40
    assert device.streams.copies["in"] == 0
    assert stats["kv_blocks_used"] == 0
    assert device.streams.finishes <= 2  # as the engine's memory is given back


class Held:
    """The first request goes alone until it has a token; the others only once all are there."""

    needs = Cap.NONE

    def plan(self, view: View) -> Plan:
        first = view.requests[0]
        rest = view.requests[1:]
        if not first.num_output_tokens:
            return Plan(rows=(next_row(first, view),))
        if first.num_output_tokens < 4 and len(view.requests) < 4:
            return Plan(wait_until_ns=view.now_ns + 1_000_000)
        return Plan(rows=tuple(next_row(r, view) for r in (first, *rest)))


BIG, SMALL = 44, 30


@pytest.mark.parametrize("at", [3, 14])
def test_be_swapped_out_at_any_boundary_keeps_its_tokens(device: Device, at: int) -> None:
    """KV for one request: an LS arrival takes it wherever the other is, inside a layer too."""
    ids = prompt_of(BIG, 1)
    with engine_of(max_kv_tokens=64, swap_kv_tokens=256, policy="qllm2", record=True) as engine:
        alone = run(engine, ids, 8, "BE")
        handles, count = list[Any](), 0

        def disturb(*_: object) -> None:
            nonlocal count
            count += 1
            if count == at:
                handles.append(engine.submit(prompt_of(SMALL, 2), "LS", 2, sampling=GREEDY))

        runner = engine._client.runner  # type: ignore[attr-defined]
        runner.on_segment = disturb
        found = run(engine, ids, 8, "BE")
        runner.on_segment = None
        assert [len(h.result(60).token_ids) for h in handles] == [2] * len(handles)
        assert found.token_ids == alone.token_ids
        assert found.metrics.evict_recomputed_tokens == 0
        swap = engine.stats()["swap"]
        back = [e for e in engine.trace.events if isinstance(e, trace.SwappedIn)]
    assert swap["blocks_used"] == 0
    assert swap["in_tokens"] == swap["out_tokens"] == sum(e.num_tokens for e in back)
    assert back, "the LS request took nothing"
    assert 0 < device.streams.copies["in"] <= device.streams.copies["out"]
    assert not device.streams.races


def test_what_cuda_does_not_have_is_refused_with_the_reason(device: Device) -> None:
    for asked in ("auto", True):
        if asked == "auto":
            with engine_of(prefix_cache=asked) as engine:
                assert "padded to" in engine.stats()["prefix_cache"]["off"]
        else:
            with pytest.raises(ConfigError, match=r"padded to.*'approximate'"):
                engine_of(prefix_cache=asked)


def test_where_kernels_are_batch_invariant_it_is_on_by_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CudaBackend, "why_inexact", "")
    device = Device(monkeypatch)
    with engine_of() as engine:
        first, again = (run(engine, prompt_of(43)) for _ in "ab")
    assert first.token_ids == again.token_ids
    assert again.metrics.num_cached_tokens == 40
    assert not device.streams.races


def test_kv_in_a_file_is_refused_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnCuda:
        device = torch.device("cuda")

    with pytest.raises(ConfigError, match=r"kv_dir='/x' needs an exact prefix cache.*padded to"):
        build.make_runner(OnCuda(), config.EngineConfig(kv_dir="/x"))


@pytest.mark.gpu
def test_on_a_gpu_swap_and_sharing_change_no_token() -> None:
    model = make_model("mixtral", torch.float32).cuda()
    prompts = [prompt_of(150)[:130] + prompt_of(20 + i, i) for i in range(4)]
    settings = {"conformance": False, "max_num_seqs": 4}
    found = []
    for more in (
        {"max_kv_tokens": 2048, "prefix_cache": False},
        {"max_kv_tokens": 256, "swap_kv_tokens": 2048, "prefix_cache": "approximate"},
    ):
        with QLLMEngine.from_model(model, **settings, **more) as engine:
            first = run(engine, prompts[0], 8, "BE").token_ids
            handles = [
                engine.submit(ids, "LS" if i == 3 else "BE", 24, sampling=GREEDY)
                for i, ids in enumerate(prompts)
            ]
            found.append([first, *(handle.result(120).token_ids for handle in handles)])
    assert found[0] == found[1]
