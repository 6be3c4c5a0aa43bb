"""KV on a device that outlives its row: shared, kept and swapped out, and no copy races.

A CPU stands in for the device; `fake_streams` runs copies as late as CUDA would allow and refuses
two accesses that nothing orders.
"""

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from qllm import QLLMEngine, SamplingParams, config
from qllm.cuda.backend import CudaBackend, cuda_runner
from qllm.cuda.copies import PROBE_BYTES, measured_bytes_per_ms
from qllm.cuda.lanes import Bucket
from qllm.engine import build
from qllm.errors import CheckpointError, ConfigError
from qllm.plan import Plan
from qllm.policy import View, next_row
from qllm.record import trace
from qllm.runner.runner import TorchRunner
from qllm.types import Cap
from tests.support.fake_cuda import FakeCuda
from tests.support.fake_streams import FakeStreams, install
from tests.support.families import VOCAB, make_model
from tests.support.inside import runner_of
from tests.support.waiting import wait_for

GREEDY = SamplingParams(temperature=0, ignore_eos=True)
BUCKETS = [Bucket(8, False), Bucket(64, True)]
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
        spare = build.spare_of(
            settings, CudaBackend.why_inexact, lambda: self.streams, torch.device("cpu")
        )
        self.streams.copies.clear()  # those that were to be measured
        self.streams.finishes = 0
        return cuda_runner(
            model, num_pages=settings.num_blocks, page_size=settings.block_size, max_num_seqs=8,
            max_total_tokens=64, graphs=graphs, buckets=BUCKETS, layers_per_stage=1,
            spare=spare,
        )  # fmt: skip


@pytest.fixture(params=[False, True], ids=["ops", "stages"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch, stages=request.param)


def engine_of(model: Any = None, **settings: Any) -> QLLMEngine:
    model = make_model("mixtral") if model is None else model
    return QLLMEngine.from_model(model, **{**SETTINGS, **settings})


def run(engine: QLLMEngine, ids: list[int], n: int = 6, priority: str = "LS") -> Any:
    return engine.submit(ids, priority, n, sampling=GREEDY).result(300)


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


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> dict[int, dict[str, torch.Tensor]]:
    """All KV of requests as it is when they end, by their number."""
    found: dict[int, dict[str, torch.Tensor]] = {}
    remove = TorchRunner.remove

    def look_and_remove(self: Any, request_id: Any) -> None:
        kv = self.requests[request_id].kv
        copies = kv._memory.copies
        if copies is not None:
            copies.finish()
        found[request_id] = {name: t.clone() for name, t in kv.export()}
        remove(self, request_id)

    monkeypatch.setattr(TorchRunner, "remove", look_and_remove)
    return found


class Cut:
    """Prompts up to the end of the shared part, then the rest."""

    needs = Cap.NONE

    def plan(self, view: View) -> Plan:
        rows = []
        for request in view.requests:
            row = next_row(request, view)
            rows.append(row._replace(hi=min(row.hi, 40)) if row.lo < 40 else row)
        return Plan(rows=tuple(rows[:1]))


def test_a_hit_has_the_kv_of_a_cold_run_to_the_last_bit(
    device: Device, ended: dict[int, dict[str, torch.Tensor]]
) -> None:
    """In passes of the same rows: what was copied, and all that was computed after it."""
    shared = prompt_of(40)
    prompts = [shared + prompt_of(5 + i, i + 1) for i in range(3)]
    kv, tokens = [], []
    for cache in (False, "approximate"):
        ended.clear()
        with engine_of(prefix_cache=cache, policy=Cut()) as engine:
            found = [run(engine, ids) for ids in prompts]
        tokens.append([r.token_ids for r in found])
        kv.append([ended[i] for i in sorted(ended)])
    assert [r.metrics.num_cached_tokens for r in found] == [0, 40, 40]
    assert tokens[0] == tokens[1]
    for cold, warm in zip(*kv, strict=True):
        assert len(cold) == len(warm) > 0
        for name, t in cold.items():
            assert t.shape[2] > 45
            assert torch.equal(t, warm[name]), name
    assert not device.streams.races


def test_chats_at_once_refer_to_the_pages_of_their_system_prompt(device: Device) -> None:
    """Four chats hold it once; what is copied out is what each of them computed."""
    system = prompt_of(40)
    prompts = [[*system, *prompt_of(3 + i, i + 1)] for i in range(4)]
    with engine_of(prefix_cache=False) as engine:
        want = [run(engine, ids, 12).token_ids for ids in prompts]
    with engine_of(prefix_cache="approximate", policy=Held()) as engine:
        handles = [engine.submit(ids, "LS", 12, sampling=GREEDY) for ids in prompts]
        found = [handle.result(300).token_ids for handle in handles]
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


class HeldThenStops(Held):
    """Nobody runs any more once all have six tokens."""

    def plan(self, view: View) -> Plan:
        if len(view.requests) == 4 and all(r.num_output_tokens >= 6 for r in view.requests):
            return Plan(wait_until_ns=view.now_ns + 1_000_000)
        return super().plan(view)


@pytest.mark.parametrize("to", ["a device", "a CPU"])
def test_a_checkpoint_of_chats_that_share_blocks_goes_on_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, to: str
) -> None:
    """Each of them has KV of its own there; there is room for that, or it is refused."""
    system, path = prompt_of(40), tmp_path / "chats.safetensors"
    prompts = [[*system, *prompt_of(3 + i, i + 1)] for i in range(4)]
    cuts: dict[str, Any] = {"max_segment_ms": math.inf}
    make = build.make_runner
    device, model = Device(monkeypatch), make_model("mixtral")
    with engine_of(model, prefix_cache=False, **cuts) as engine:
        want = [run(engine, ids, 12).token_ids for ids in prompts]
    few = {"max_kv_tokens": 40 + 4 * 24}
    with engine_of(
        model, prefix_cache="approximate", policy=HeldThenStops(), **cuts, **few
    ) as engine:
        handles = [engine.submit(ids, "LS", 12, sampling=GREEDY) for ids in prompts]
        wait_for(lambda: all(len(handle.token_ids) >= 6 for handle in handles))
        assert engine.stats()["prefix_cache"]["shared_tokens"] == 3 * 40
        engine.checkpoint(str(path))
    if to == "a CPU":
        monkeypatch.setattr(build, "make_runner", make)
    with (
        engine_of(model, prefix_cache=False, **cuts, **few) as engine,
        pytest.raises(CheckpointError, match="KV blocks"),
    ):
        engine.restore(str(path))
    with engine_of(model, prefix_cache="auto", **cuts) as engine:
        found = [handle.result(300).token_ids for handle in engine.restore(str(path))]
        assert engine.stats()["kv_blocks_used"] == 0
    assert sorted(found) == sorted(want)
    assert not device.streams.races


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

        runner = runner_of(engine)
        runner.on_segment = disturb
        found = run(engine, ids, 8, "BE")
        runner.on_segment = None
        assert [len(h.result(300).token_ids) for h in handles] == [2] * len(handles)
        assert found.token_ids == alone.token_ids
        assert found.metrics.evict_recomputed_tokens == 0
        swap = engine.stats()["swap"]
        back = [e for e in engine.trace.events if isinstance(e, trace.SwappedIn)]
    assert swap["blocks_used"] == 0
    assert swap["in_tokens"] == swap["out_tokens"] == sum(e.num_tokens for e in back)
    assert back, "the LS request took nothing"
    pages = [-(-e.num_tokens // BLOCK) for e in back]
    assert device.streams.copies["in"] == 2 * sum(pages)
    # it may go away again before it runs, and what is whole is not copied out twice
    assert device.streams.copies["out"] >= 2 * max(pages)
    assert not device.streams.races


class Bus(FakeStreams):
    """Copies that take a while, in each direction another; the first one longest."""

    def __init__(self, out_ns: int, in_ns: int) -> None:
        super().__init__()
        self.now_ns, self._took = 0, {"out": out_ns, "in": in_ns}

    def copy(self, to: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        is_first = not self.copies[stream.name]
        super().copy(to, source, stream)

        def tick() -> None:
            self.now_ns += self._took[stream.name] * (2 if is_first else 1)

        stream.queue.append(tick)


@pytest.mark.parametrize(("out_ns", "in_ns"), [(500_000, 2_000_000), (2_000_000, 400_000)])
def test_how_fast_kv_moves_is_that_of_the_slower_direction(out_ns: int, in_ns: int) -> None:
    bus = Bus(out_ns, in_ns)
    found = measured_bytes_per_ms(bus, torch.device("cpu"), lambda: bus.now_ns)
    assert found == PROBE_BYTES // 2
    assert bus.unlocked == 1
    assert not bus.races


@pytest.mark.parametrize(("bytes_per_ms", "swaps"), [(10**9, True), (1, False)])
def test_who_loses_its_blocks_moves_out_where_the_bus_is_fast(
    device: Device, monkeypatch: pytest.MonkeyPatch, bytes_per_ms: int, swaps: bool
) -> None:
    monkeypatch.setattr(build, "measured_bytes_per_ms", lambda *_: bytes_per_ms)
    with engine_of(max_kv_tokens=64, swap_kv_tokens=256, policy="qllm2") as engine:
        want = [run(engine, prompt_of(BIG, 1), 8, "BE"), run(engine, prompt_of(SMALL, 2), 2)]
        batch = engine.submit(prompt_of(BIG, 1), "BE", 8, sampling=GREEDY)
        next(iter(batch))
        found = [run(engine, prompt_of(SMALL, 2), 2), batch.result(300)]
        moved = engine.stats()["swap"]["out_tokens"]
    assert [r.token_ids for r in reversed(found)] == [r.token_ids for r in want]
    if found[1].metrics.evictions:
        assert not swaps
    assert bool(moved) is swaps


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
            found.append([first, *(handle.result(300).token_ids for handle in handles)])
    assert found[0] == found[1]
