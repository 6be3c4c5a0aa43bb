"""Experts that come and go on a device: the tokens of a device with all experts, and no race.

A CPU stands in for the device. `fake_streams` runs copies as late as CUDA would allow. It refuses
two accesses to a slot that nothing orders.
"""

import gc
import random
import threading
from typing import Any

import pytest
import torch

from qllm import QLLMEngine, SamplingParams
from qllm.cuda.backend import cuda_runner
from qllm.cuda.slots import DeviceResidency, ExpertRoom
from qllm.errors import ConfigError, InvariantError, ModelError
from qllm.frontend.handle import Handle
from qllm.runner import conformance
from qllm.runner.runner import TorchRunner
from qllm.scheduler.program import START, OpKind
from qllm.types import Grain
from tests.support.captured import GREEDY, Driver, Poll, prompt_of, sampling_of, schedule
from tests.support.expert_slots import PAGE, SlotDevice, expert_streams, in_slots, sizes_of
from tests.support.experts_in_file import draw_residents, errors_of, residency_of
from tests.support.fake_cuda import FakeCuda
from tests.support.fake_streams import FakeStreams, install
from tests.support.families import DTYPES, FAMILIES, TOP_K, make_model

KERNELS = ["torch", "triton"]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> FakeStreams:
    made = expert_streams()
    install(monkeypatch, made, PAGE)
    return made


def resident(model: Any, **settings: Any) -> TorchRunner:
    """A runner on the device with all experts there."""
    return cuda_runner(model, num_pages=128, page_size=PAGE, graphs=False, **settings)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("grain", [Grain.STEP, Grain.EXPERT])
def test_a_runner_has_the_tokens_of_one_with_all_experts(
    streams: FakeStreams, family: str, grain: Grain
) -> None:
    """With the least room: the experts of one token in one layer."""
    model, sampling = make_model(family, torch.bfloat16), sampling_of(0.8)
    runner = resident(model)
    wanted, read = schedule(runner, sampling, grain), runner.expert_bytes
    runner.close()
    top_k = runner.shape.experts_per_token
    runner = in_slots(model, top_k, streams)
    assert schedule(runner, sampling, grain) == wanted
    assert runner.expert_bytes == read
    residency = residency_of(runner)
    assert residency.num_resident == residency.num_slots == top_k
    assert residency.num_reads > 2 * top_k
    runner.close()
    assert not streams.races


def kept_logits(runner: TorchRunner) -> dict[tuple[int, int], torch.Tensor]:
    """All logits of a runner, as it computes them."""
    found: dict[tuple[int, int], torch.Tensor] = {}

    def keep(request: int, position: int, logits: torch.Tensor) -> None:
        found[request, position] = logits.clone()

    runner.on_logits = keep
    return found


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("seed", range(6))
def test_drawn_experts_slots_and_stops_change_no_logit(
    streams: FakeStreams, kernels: str, seed: int
) -> None:
    """Drawn are the number of slots, the experts in them before a pass, and stops of the pass."""
    rng = random.Random(seed)
    model = make_model(rng.choice(FAMILIES), DTYPES[rng.choice(list(DTYPES))], seed=seed)
    prompts = [prompt_of(rng.randint(1, 12), seed), prompt_of(3, seed)]
    found = []
    for num_slots in (None, rng.randint(TOP_K, sizes_of(model)[1] - 1)):
        if num_slots is None:
            runner = resident(model, kernels_name=kernels)
        else:
            runner = in_slots(model, num_slots, streams, kernels_name=kernels)
        logits = kept_logits(runner)
        driver = Driver(runner)
        for i, ids in enumerate(prompts):
            driver.add(i, ids)
        for _ in range(3):
            if num_slots is not None:
                draw_residents(runner, rng)
            program = driver.program([driver.row(i) for i in range(2)], Grain.EXPERT)
            index = START
            while index != program.end:
                index = runner.run(program, index, Poll(rng, 0.5))
            driver.finish(program)
        runner.close()
        found.append((driver.tokens, logits))
    assert found[0][0] == found[1][0]
    assert found[0][1].keys() == found[1][1].keys() != set()
    assert all(torch.equal(wanted, found[1][1][key]) for key, wanted in found[0][1].items())
    assert not streams.races


def missing_of(runner: TorchRunner, driver: Driver) -> Any:
    """Begin a pass whose experts are missing; return its program, place and missing experts."""
    residency_of(runner).parks = True
    program = driver.program([driver.row(0)], Grain.STEP)
    index = runner.run(program, START, Poll())
    return program, index, runner.missing(program)


def test_a_pass_parks_where_an_expert_is_missing(streams: FakeStreams) -> None:
    """It has run all other experts of that layer."""
    model = make_model("mixtral")
    runner = in_slots(model, sizes_of(model)[1] - 1, streams)
    driver = Driver(runner)
    driver.add(0, prompt_of(5, 1))
    driver.add(1, prompt_of(5, 1))
    driver.sweep([driver.row(1)])  # reads what it needs by itself
    wanted = driver.tokens[1][0]
    residency = residency_of(runner)
    layer = residency.layer(0)
    gone = next(e for e in range(8) if layer.has(e))
    slot = residency.place(gone)
    assert slot is not None
    program = driver.program([driver.row(0)], Grain.STEP)
    residency.reserve(layer.wanted(gone), slot)  # it leaves; another read never ends
    residency.parks = True
    index = runner.run(program, START, Poll())
    missing = runner.missing(program)
    assert missing is not None
    assert (missing.experts, missing.is_range) == ((gone,), False)
    op = program.ops[index.op]
    assert (op.kind, op.layer) == (OpKind.EXPERTS, 0)
    assert index.pos > 0
    assert runner.run(program, index, Poll()) == index, "and stays there"
    residency.end_read(slot, None)
    residency.parks = False
    assert runner.run(program, index, Poll()) == program.end
    driver.finish(program)
    assert driver.tokens[0] == [wanted]
    runner.close()
    assert not streams.races


def test_a_parked_pass_goes_on_in_a_runner_with_other_slots(streams: FakeStreams) -> None:
    """The order of its experts is part of its state. Without slots a pass has ranges instead, and
    neither goes on as the other."""
    model, rng = make_model("qwen3_moe"), random.Random(3)
    runner = in_slots(model, 6, streams)
    driver = Driver(runner)
    driver.add(0, prompt_of(9, 2))
    draw_residents(runner, rng)
    program, index, missing = missing_of(runner, driver)
    while not index.pos:  # until the pass is inside an op
        with missing.in_memory():
            index = runner.run(program, index, Poll())
        missing = runner.missing(program)
    state, frame = runner.export_request(0), runner.export_frame(program, index)
    tokens = []
    for num_slots in (4, 13):
        other = in_slots(make_model("qwen3_moe"), num_slots, streams)
        tables = other.backend.new_tables()
        other.import_request(0, GREEDY, *state, *tables.cover(program.rows))
        other.import_frame(program, index, frame)
        assert other.run(program, index, Poll()) == program.end
        tokens.append([token.token_id for token in other.finish(program)])
        other.close()
    whole = resident(make_model("qwen3_moe"))
    own = Driver(whole)
    own.add(0, prompt_of(9, 2))
    own.sweep([own.row(0)])
    assert tokens == [own.tokens[0]] * 2
    with pytest.raises(InvariantError, match="other expert units"):
        whole.import_frame(program, index, frame)
    runner.close()
    own.add(1, prompt_of(9, 2))
    program, stop = own.program([own.row(1)], Grain.EXPERT), Poll(random.Random(0), 1.0)
    index = START
    while not index.pos:
        index = whole.run(program, index, stop)
    state, frame = whole.export_request(1), whole.export_frame(program, index)
    whole.close()
    other = in_slots(make_model("qwen3_moe"), 4, streams)
    other.import_request(1, GREEDY, *state, *other.backend.new_tables().cover(program.rows))
    with pytest.raises(InvariantError, match="other expert units"):
        other.import_frame(program, index, frame)
    other.close()


class Forgetful(DeviceResidency):
    """Slots that forget which kernels read them."""

    def used(self, slots: Any) -> None:
        pass


class Hasty(DeviceResidency):
    """Slots that count as filled when their copies have begun."""

    def read(self, layer: int, expert: int, into: Any) -> None:
        finish = self._api.finish
        self._api.finish = lambda event: None  # type: ignore[method-assign]
        try:
            super().read(layer, expert, into)
        finally:
            self._api.finish = finish  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", [Forgetful, Hasty])
def test_an_order_that_is_left_out_is_found(
    monkeypatch: pytest.MonkeyPatch, streams: FakeStreams, kind: type[DeviceResidency]
) -> None:
    monkeypatch.setattr("qllm.cuda.layers.DeviceResidency", kind)
    runner = in_slots(make_model("mixtral"), TOP_K, streams)
    with pytest.raises((ModelError, AssertionError), match="nothing orders it after"):
        schedule(runner, GREEDY, Grain.STEP)
    assert streams.races


def test_experts_are_page_locked_while_a_runner_is_open_and_no_longer(
    streams: FakeStreams,
) -> None:
    model = make_model("mixtral")
    weights = [p for name, p in model.named_parameters() if ".experts." in name]
    for _ in range(2):
        runner = in_slots(model, TOP_K, streams)
        assert streams.locked == {p.data_ptr(): p.nbytes for p in weights}
        driver = Driver(runner)
        driver.add(0, prompt_of(5, 1))
        driver.sweep([driver.row(0)])
        runner.close()
        assert not streams.locked
        runner.close()
    assert streams.unlocked == 2 * len(weights)


def test_experts_of_a_runner_that_is_dropped_are_unlocked(streams: FakeStreams) -> None:
    model = make_model("mixtral")
    runner = in_slots(model, TOP_K, streams)
    assert streams.locked
    del runner
    gc.collect()
    assert not streams.locked
    in_slots(model, TOP_K, streams).close()  # they can be locked again


def test_a_runner_that_cannot_lock_its_experts_unlocks_those_it_has(
    monkeypatch: pytest.MonkeyPatch, streams: FakeStreams
) -> None:
    lock = streams.lock_in_place

    def full(memory: torch.Tensor) -> None:
        if len(streams.locked) == 3:
            raise MemoryError("no more pages")
        lock(memory)

    monkeypatch.setattr(streams, "lock_in_place", full)
    with pytest.raises(MemoryError, match="no more pages"):
        in_slots(make_model("mixtral"), TOP_K, streams)
    assert not streams.locked
    assert streams.unlocked == 3


def test_too_little_room_is_refused_and_room_for_all_needs_no_slots(streams: FakeStreams) -> None:
    model = make_model("mixtral")
    size, num = sizes_of(model)
    wanted = rf"room for 3 experts, and a token uses 4 .* least {4 * size}, or {num * size} for all"
    with pytest.raises(ConfigError, match=wanted):
        cuda_runner(model, num_pages=8, room=ExpertRoom(streams, 4 * size - 1))
    runner = cuda_runner(model, num_pages=8, room=ExpertRoom(streams, num * size))
    assert runner.residency is None
    assert not streams.locked
    runner.close()


def test_the_start_up_check_reads_each_expert_at_most_once(streams: FakeStreams) -> None:
    model = make_model("qwen3_moe", torch.bfloat16)
    runner = in_slots(model, TOP_K, streams, graphs=FakeCuda())
    conformance.check(model, runner)
    residency = residency_of(runner)
    assert 0 < residency.num_reads <= residency.num_experts
    assert "host decides" in runner.names["stages"]
    assert runner.names["experts"] == "torch fused, 4 of 16 experts at a time"
    runner.close()
    assert not streams.races


# -- engines

SETTINGS: dict[str, Any] = {
    "conformance": False, "threads": 1, "max_num_seqs": 8, "block_size": PAGE,
    "max_kv_tokens": 1024, "kernels": "reference",
}  # fmt: skip
ENDLESS = SamplingParams(temperature=0, ignore_eos=True)


def submit_all(engine: QLLMEngine, seed: int = 0, num: int = 9) -> list[Handle]:
    """Requests of both classes, in one go."""

    def submit(i: int) -> Handle:
        cls = "LS" if i % 3 == 0 else "BE"
        return engine.submit(prompt_of(5 + 4 * i, seed + i), cls, 6, sampling=ENDLESS)

    found: list[Handle] = engine.call(lambda: [submit(i) for i in range(num)])
    return found


def storm(
    patch: pytest.MonkeyPatch, model: Any, num_slots: int | None, **settings: Any
) -> tuple[list[tuple[int, ...]], dict[str, Any], SlotDevice]:
    """Tokens of requests of both classes, the statistics, and the device."""
    device = SlotDevice(patch, num_slots)
    with QLLMEngine.from_model(model, **SETTINGS, **settings) as engine:
        handles = submit_all(engine)
        next(iter(handles[1]))
        handles.append(engine.submit(prompt_of(3, 99), "LS", 6, sampling=ENDLESS))
        tokens = [tuple(handle.result(300).token_ids) for handle in handles]
        return tokens, engine.stats(), device


@pytest.mark.parametrize("policy", ["qllm2", "priority-layered", "mlfq"])
@pytest.mark.parametrize(("family", "num_slots"), [("mixtral", 4), ("qwen3_moe", 9)])
def test_an_engine_has_the_tokens_of_one_with_all_experts(
    monkeypatch: pytest.MonkeyPatch, policy: str, family: str, num_slots: int
) -> None:
    """LS preempts BE, and both wait for experts. Under "mlfq" the engine itself reads them."""
    model = make_model(family)
    settings = (
        {"policy": policy, "preempt_at": "expert"} if policy == "qllm2" else {"policy": policy}
    )
    wanted, _, _ = storm(monkeypatch, model, None, **settings)
    found, stats, device = storm(monkeypatch, model, num_slots, **settings)
    assert found == wanted
    told = stats["experts"]
    assert (told["slots"], told["file"]) == (num_slots, "page-locked memory of the host")
    assert told["resident"] == num_slots
    if policy == "mlfq":
        assert told["blocking"]["loads"] > num_slots
    else:
        assert told["blocking"]["loads"] == 0
        for name in ("LS", "BE"):
            assert min(told[name]["uses"], told[name]["loads"]) > 0
    assert not device.streams.races
    assert not device.streams.locked, "the memory is given back at the end"
    num_reads = sum(residency_of(runner).num_reads for runner in device.runners)
    assert device.streams.copies["experts"] >= 2 * num_reads > 0


class Gate:
    """Copies of experts that wait until they are let go."""

    def __init__(self, streams: FakeStreams) -> None:
        self.opened, self.waiting = threading.Event(), threading.Semaphore(0)
        self._finish, streams.finish = streams.finish, self.finish  # type: ignore[method-assign]

    def finish(self, event: Any) -> None:
        self.waiting.release()
        assert self.opened.wait(60)
        self._finish(event)


def test_a_request_that_waits_for_a_copy_can_be_cancelled_and_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model("mixtral")
    device = SlotDevice(monkeypatch, 4)
    with QLLMEngine.from_model(model, **SETTINGS) as engine:
        wanted = engine.submit(prompt_of(7, 1), "LS", 6, sampling=ENDLESS).result(300).token_ids
        gate = Gate(device.streams)
        gone = engine.submit(prompt_of(9, 2), "BE", 6, sampling=ENDLESS)
        assert gate.waiting.acquire(timeout=60)
        other = engine.submit(prompt_of(7, 1), "LS", 6, sampling=ENDLESS)
        gone.cancel()
        assert gone.result(300).finish_reason == "cancelled"
        gate.opened.set()
        assert other.result(300).token_ids == wanted
        assert engine.stats()["experts"]["waiting"] == 0
    assert not device.streams.races


def first_of(engine: QLLMEngine, prompt: list[int]) -> Any:
    return engine.submit(prompt, "LS", 1, sampling=ENDLESS).result(300).token_ids


def test_an_error_of_a_copy_ends_the_requests_that_need_the_expert_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model("qwen3_moe")
    device = SlotDevice(monkeypatch, 5)
    prompts = [prompt_of(1, i) for i in range(12)]
    with QLLMEngine.from_model(model, **SETTINGS) as engine:
        wanted = [
            engine.submit(p, "LS", 1, sampling=ENDLESS).result(300).token_ids for p in prompts
        ]
        broken = model.model.layers[0].mlp.experts.gate_up_proj[3].data_ptr()
        copy = device.streams.copy

        def fail(to: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
            if source.data_ptr() == broken:
                raise RuntimeError("cudaErrorInvalidValue")
            copy(to, source, stream)

        monkeypatch.setattr(device.streams, "copy", fail)
        handles = [engine.submit(p, "BE", 1, sampling=ENDLESS) for p in prompts]
        errors = errors_of(handles, wanted)
        assert 0 < len(errors) < len(prompts)
        assert all("expert 3 of layer 0 " in text for text in errors)
        assert all("was not copied to the device (RuntimeError: cudaE" in text for text in errors)
        monkeypatch.setattr(device.streams, "copy", copy)
        assert [first_of(engine, prompt) for prompt in prompts] == wanted
