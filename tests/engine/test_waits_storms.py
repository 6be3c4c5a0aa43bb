"""Frames that wait for experts, in storms: the tokens of an engine with all experts in memory.

Reads take drawn times, so they end in any order. Requests of both classes come, are cancelled,
paused, evicted and swapped out, and change their class, while their frames wait.
"""

import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qllm import QLLMEngine, SamplingParams
from qllm.errors import RequestFailedError
from qllm.frontend.handle import Handle
from qllm.kernels import cpu
from qllm.models.loader import load
from qllm.models.weights.expert_file import ExpertFile
from qllm.record import trace
from qllm.types import RequestStatus
from tests.support.experts_in_file import loaded, saved
from tests.support.inside import loop_of, runner_of
from tests.support.storms import Chaos, Storm, fine, prompt_of, same
from tests.support.sweeps import kv_of
from tests.support.waiting import wait_for

assert cpu.MISSING is None, cpu.MISSING
SETTINGS: dict[str, Any] = {
    "conformance": False,
    "threads": 1,
    "max_kv_tokens": 2048,
    "exactness": "batch-invariant",
    "max_segment_ms": 0.4,
}
GREEDY = SamplingParams(temperature=0, ignore_eos=True)


@contextmanager
def slow_reads(seed: int, most_ms: float = 3.0) -> Iterator[None]:
    """Let each read of an expert take a drawn time."""
    rng, lock, real = random.Random(seed), threading.Lock(), ExpertFile.read

    def read(file: ExpertFile, layer: int, expert: int, into: memoryview) -> None:
        with lock:
            ms = rng.choice((0.0, rng.random() * most_ms))
        time.sleep(ms / 1000)
        real(file, layer, expert, into)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExpertFile, "read", read)
        yield


def in_slots(folder: Path, num_slots: int, **settings: Any) -> QLLMEngine:
    """An engine with memory for so many experts."""
    slot_bytes = max(layer.expert_bytes for layer in loaded(folder)[1].layers)
    model = loaded(folder, max_bytes=num_slots * slot_bytes)[0]
    return QLLMEngine.from_model(model, **{**SETTINGS, **settings})


def resident(folder: Path, **settings: Any) -> QLLMEngine:
    return QLLMEngine.from_model(load(folder, dtype="bfloat16").model, **{**SETTINGS, **settings})


def events_of(engine: QLLMEngine, kind: type) -> list[Any]:
    return [e for e in runner_events(engine) if isinstance(e, kind)]


def runner_events(engine: QLLMEngine) -> list[Any]:
    record = loop_of(engine).record
    assert record is not None
    return list(record.events)


@dataclass
class WaitStorm(Storm):
    """A storm that also pauses requests and changes their class."""

    num_updates: int = 8

    def disturb(self) -> None:
        live = [handle for handle, _ in self.handles if handle.finish_reason is None]
        if live and self.num_updates and self.rng.random() < 0.5:
            self.num_updates -= 1
            handle = self.rng.choice(live)
            how = self.rng.choice(("pause", "LS", "BE"))
            if how == "pause":
                handle.pause()
                threading.Timer(0.02, handle.resume).start()
            else:
                handle.update(priority=how)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kv", ["much", "evicts", "swaps"])
@pytest.mark.parametrize("policy", ["qllm2", "fcfs", "priority", "chaos"])
@pytest.mark.parametrize(
    ("family", "kernels"),
    [("qwen3_moe", "fast"), ("gpt_oss", "fast"), ("mixtral", "reference")],
)
def test_a_storm_has_the_tokens_of_resident_experts(
    tmp_path: Path, family: str, kernels: str, policy: str, kv: str, seed: int
) -> None:
    """The memory is drawn. The least is that for the experts of one token."""
    more = random.Random(f"{family}{policy}{kv}{seed}").choice((0, 0, 1, 3, 7))
    folder = saved(tmp_path, family)
    settings: dict[str, Any] = {"kernels": kernels, "policy": policy, "record": True}
    if policy == "chaos":
        settings["policy"] = Chaos(seed)
    if kv != "much":
        settings["max_kv_tokens"] = 160
        settings["swap_kv_tokens"] = 320 if kv == "swaps" else 0
    with resident(folder, kernels=kernels) as one:
        top_k = runner_of(one).shape.experts_per_token
        with slow_reads(seed), in_slots(folder, top_k + more, **settings) as engine:
            fine(engine, rows=kernels == "fast")
            storm = WaitStorm(engine, seed)
            results = storm.run()
            stats = engine.stats()["experts"]
            assert stats["waiting"] == 0
            assert stats["BE"]["loads"] + stats["LS"]["loads"] > 3 * top_k
            waits = [e for e in events_of(engine, trace.Ran) if e.why == "experts"]
            assert len(waits) > 20
        for (handle, _), result in zip(storm.handles, results, strict=True):
            assert same(result, one.submit(priority="LS", **storm.specs[handle.number]).result(60))


def submit_three(engine: QLLMEngine) -> list[Handle]:
    found: list[Handle] = engine.call(
        lambda: [
            engine.submit(prompt_of(5 + 9 * i, i), "BE", 8, sampling=GREEDY, request_id=str(i))
            for i in range(3)
        ]
    )
    return found


@pytest.mark.parametrize("num_first", [0, 25, 70])
def test_a_checkpoint_of_waiting_frames_goes_on_elsewhere(tmp_path: Path, num_first: int) -> None:
    """After some reads, the disk stands still until the checkpoint is written."""
    folder, gate, real = saved(tmp_path, "qwen3_moe"), threading.Event(), ExpertFile.read
    with resident(folder) as one:
        wanted = {h.request_id: h.result(60).token_ids for h in submit_three(one)}
        top_k = runner_of(one).shape.experts_per_token
    count = 0

    def read(file: ExpertFile, layer: int, expert: int, into: memoryview) -> None:
        nonlocal count
        count += 1
        assert count <= num_first or gate.wait(60)
        real(file, layer, expert, into)

    path = tmp_path / "waits.qllm"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExpertFile, "read", read)
        with in_slots(folder, top_k) as engine:
            handles = submit_three(engine)
            wait_for(lambda: count > num_first and engine.stats()["experts"]["waiting"] > 0)
            assert engine.checkpoint(path) > 0
            gate.set()
            assert {h.request_id: h.result(60).token_ids for h in handles} == wanted
    with in_slots(folder, top_k + 2) as other:
        found = {h.request_id: h.result(60).token_ids for h in other.restore(path)}
    assert found.items() <= wanted.items()
    assert found


def written_kv(engine: QLLMEngine, handle: Handle, *, is_whole: bool = False) -> dict[str, Tensor]:
    """Return the KV of a request in the layers that its frame has left behind, or in all."""

    def look() -> dict[str, Tensor]:
        runner, scheduler = runner_of(engine), loop_of(engine).scheduler
        frames = [f for f in scheduler.frames.values() if handle.number in f.program.request_ids]
        layers = [frame.program.layer_at(frame.index) for frame in frames]
        num = runner.shape.num_layers
        kv = kv_of(runner, handle.number, num if is_whole else min(layers, default=num))
        return {name: tensor.clone() for name, tensor in kv.items()}

    found: dict[str, Tensor] = engine.call(look)
    return found


def assert_begins_with(found: dict[str, Tensor], begin: dict[str, Tensor]) -> None:
    """Compare the tokens that both have."""
    for name, tensor in begin.items():
        num = min(tensor.shape[2], found[name].shape[2])
        assert num >= PROMPT
        assert torch.equal(found[name][:, :, :num], tensor[:, :, :num]), name


PROMPT = 21


def test_kv_of_a_frame_that_waits_has_its_bits_and_keeps_them(tmp_path: Path) -> None:
    """Another request runs while the frame waits. The file of experts is read again and again."""
    folder, real = saved(tmp_path, "mixtral"), ExpertFile.read
    gate, is_shut = threading.Event(), threading.Event()
    how: dict[str, Any] = {"request_id": "a", "sampling": GREEDY}
    with resident(folder) as one:
        top_k = runner_of(one).shape.experts_per_token
        tokens = one.submit(prompt_of(PROMPT, 1), "BE", 90, **how).result(60).token_ids
        handle = one.submit(prompt_of(PROMPT, 1), "BE", 1000, **how)
        next(piece for piece in handle if len(handle.token_ids) > 94)
        handle.pause()
        wait_for(lambda: handle.status is RequestStatus.PAUSED)
        wanted = written_kv(one, handle, is_whole=True)  # further than the others will come

    def read(file: ExpertFile, layer: int, expert: int, into: memoryview) -> None:
        if is_shut.is_set():
            assert gate.wait(60)
        real(file, layer, expert, into)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExpertFile, "read", read)
        with in_slots(folder, top_k) as engine:
            num_waits = 0
            handle = engine.submit(prompt_of(PROMPT, 1), "BE", 90, **how)
            pieces = iter(handle)
            next(pieces)
            for _ in range(12):
                gate.clear()
                is_shut.set()
                wait_for(lambda: engine.stats()["experts"]["waiting"] > 0 or handle.finish_reason)
                if handle.finish_reason is not None:
                    break
                before = written_kv(engine, handle)
                assert_begins_with(wanted, before)
                num_waits += bool(before)
                other = engine.submit(prompt_of(9, 2), "LS", 2, sampling=GREEDY)
                is_shut.clear()
                gate.set()
                other.result(60)
                if handle.finish_reason is None:
                    assert_begins_with(written_kv(engine, handle, is_whole=True), before)
            assert num_waits >= 2
            assert handle.result(60).token_ids == tokens


def test_a_file_that_is_cut_off_while_it_is_used_ends_requests_and_no_engine(
    tmp_path: Path,
) -> None:
    folder = saved(tmp_path, "qwen3_moe")
    file = loaded(folder)[1]
    with in_slots(folder, 4) as engine:
        wanted = [handle.result(60).token_ids for handle in submit_three(engine)]
        whole = file.path.read_bytes()
        os.truncate(file.path, 4096)
        for handle in submit_three(engine):
            with pytest.raises(RequestFailedError, match=r"expert \d+ of .* is cut off"):
                handle.result(60)
        assert "is cut off" in engine.stats()["experts"]["failure"]
        with file.path.open("r+b") as out:
            out.write(whole)
        assert [handle.result(60).token_ids for handle in submit_three(engine)] == wanted
        assert engine.stats()["experts"]["failure"] is None
