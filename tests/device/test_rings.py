"""Rings in the memory of a device: made, registered, given to the loop by address."""

import ctypes
import logging
import os
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qllm.device.launcher import DeviceEngine
from qllm.device.ring_memory import RingMemory, Vram
from qllm.device.rings import DeviceRings, check_device, ring_memory_of
from qllm.errors import ConfigError, DeviceError
from qllm.ingress.front_end import FrontEnd, TokenAt
from qllm.ingress.memory import ControlMemory, FrontEndMemory, Segment
from qllm.ingress.remote import nixl as transport
from qllm.ingress.remote.nixl import Link, NixlError
from qllm.ingress.remote.pull import PullingFrontEnd
from qllm.ingress.shm import Doorbell
from qllm.ingress.words import address_of
from qllm.sim.runner import VirtualClock
from qllm.types import FinishReason, SamplingParams
from tests.support.fake_loop import FakeLoopApi
from tests.support.fake_vram import FakeCuda
from tests.support.loop_world import World, engine_of, jobs_of
from tests.support.native_stages import LIMITS, LONGEST, policy_of, runner_of
from tests.support.on_device import device_calls, locked_pages, pinned_zeros
from tests.support.pulled import Answerer, block_of, submission, tokens_of
from tests.support.stage_worlds import STAGE_NS

CUDA1 = torch.device("cuda", 1)
CPU = torch.device("cpu")
VRAM = RingMemory("vram", "a test")
NO_DRIVER = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
HOPPER = {"rdma": 1, "ordering": 100, "maps_host": 1, "same_pointer": 1}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    runner_of.cache_clear()


# -- the memory


def test_a_block_on_a_device_is_made_and_attached_and_never_touched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake, engine = FakeCuda(monkeypatch), Answerer()
    block = DeviceRings(0, (5000, 4096, 4096, 8192), VRAM, CUDA1)
    names = [name for name, *_ in fake.calls]
    assert names == [
        "GetDevice", "SetDevice", "Malloc", "attribute", "Memset", "SetDevice", "Memcpy",
    ]  # fmt: skip
    assert fake.device == 0, "whose device is current was changed"
    size = 4096 + 8192 + 4096 + 4096 + 8192
    assert block.memory.num_bytes == -(-size // 65536) * 65536
    assert fake.calls[2] == ("Malloc", block.memory.num_bytes)
    assert fake.calls[4] == ("Memset", block.memory.address, 0, block.memory.num_bytes)
    near = FrontEndMemory.create(0, (5000, 4096, 4096, 8192))
    header = fake.written[block.memory.address]
    assert header == bytes(near.segment.bytes[: len(header)])
    assert len(header) == 48
    base, at = block.memory.address, near.segment.address
    assert block.capacities == near.capacities
    assert block.progress - base == 8 * FrontEndMemory.PROGRESS
    for name, ring in block.rings.items():
        bytes_, tail = near.rings[name]
        assert ring == (base + address_of(bytes_) - at, base + address_of(tail) - at, len(bytes_))
    block.attach_to(engine.server)
    assert engine.server.memory.get("num_silent") == 1
    block.close()
    block.close()
    assert [call for call in fake.calls if call[0] == "Free"] == [("Free", base)]
    near.segment.close()


@pytest.mark.parametrize(
    ("fail", "says"),
    [
        ("Malloc", "cudaMalloc, for 65536 bytes"),
        ("attribute", "SetAttribute"),
        ("Memset", "Memset"),
    ],
)
def test_memory_that_cannot_be_had_is_given_back_and_said(
    fail: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeCuda(monkeypatch, fail)
    with pytest.raises(DeviceError, match=says):
        Vram(100, 1)
    assert ("Free" in [name for name, *_ in fake.calls]) == (fail != "Malloc")
    assert fake.device == 0


@NO_DRIVER
def test_calls_reach_cuda_with_the_arguments_it_takes() -> None:
    """Without a driver every call answers so: a wrong argument would be a TypeError instead."""
    from cuda.bindings import driver, runtime

    with pytest.raises(DeviceError, match=r"InsufficientDriver.* to cudaGetDevice"):
        Vram(100)
    memory = Vram.__new__(Vram)
    memory._runtime, memory.address, memory.num_bytes, memory.device = runtime, 4096, 65536, 0
    calls: dict[str, tuple[Any, ...]] = {
        "cudaSetDevice": (0,),
        "cudaMalloc": (65536,),
        "cudaMemset": (4096, 0, 65536),
    }
    for name, arguments in calls.items():
        with pytest.raises(DeviceError, match=f"InsufficientDriver.* to {name}"):
            memory._call(name, *arguments)
    with pytest.raises(DeviceError, match=r"InsufficientDriver.* to cudaMemcpy"):
        memory.write(64, b"header")
    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
    with pytest.raises(Exception, match='"cuda" is an NVIDIA driver library'):
        driver.cuPointerSetAttribute(1, attribute, 4096)
    memory.close()
    assert memory.address == 0


# -- its link


class FakeAgent:
    """Takes what NIXL is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def register_memory(self, regions: Any, kind: str) -> str:
        self.told.append(("register", regions, kind))
        return "registered"

    def get_agent_metadata(self) -> bytes:
        return b"m"

    def add_remote_agent(self, metadata: bytes) -> str:
        return "other"

    def get_xfer_descs(self, ranges: Any, kind: str) -> Any:
        return ranges, kind

    def initialize_xfer(self, *what: Any) -> str:
        self.told.append(what)
        return "transfer"

    def transfer(self, transfer: str) -> None:
        assert transfer == "transfer"


def test_memory_of_a_device_is_registered_and_reached_as_such(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import nixl._api as api

    agent = FakeAgent()
    monkeypatch.setattr(api, "nixl_agent", lambda *_: agent)
    monkeypatch.setattr(transport, "check_profile", lambda profile: None)
    for name in transport.PROFILES["rdma"].environment:
        monkeypatch.setenv(name, "")
    FakeCuda(monkeypatch)
    block = DeviceRings(3, (4096,) * 4, VRAM, CUDA1)
    far = Link("engine", "rdma", block.memory, is_pulled=block.is_pulled)
    assert os.environ["UCX_TLS"] == "rc,self,cuda_copy", "UCX would take it for the host's"
    assert far.offer == (b"m", block.memory.address, "VRAM", 1, True)
    segment = Segment.create("x", 8192)
    near = Link("front end", "rdma", segment)
    assert os.environ["UCX_TLS"] == "rc,self"
    assert near.offer == (b"m", segment.address, "DRAM", 0, False)
    near.connect(far.offer)
    near.post([(64, 8)])
    near.fetch([(2048, 64, 32)])
    ours, theirs = segment.address, block.memory.address
    assert agent.told == [
        ("register", [(theirs, block.memory.num_bytes, 1, "")], "VRAM"),
        ("register", [(ours, 8192, 0, "")], "DRAM"),
        ("WRITE", ([(ours + 64, 8, 0)], "DRAM"), ([(theirs + 64, 8, 1)], "VRAM"), "other"),
        ("READ", ([(ours + 2048, 32, 0)], "DRAM"), ([(theirs + 64, 32, 1)], "VRAM"), "other"),
    ]
    segment.close()


@NO_DRIVER
def test_nixl_says_so_where_memory_is_no_devices() -> None:
    segment = Segment.create("x", 8192)
    memory: Any = SimpleNamespace(
        kind="VRAM", device=0, address=segment.address, num_bytes=8192, keeps=segment
    )
    with pytest.raises(NixlError, match="registering 8192 bytes of VRAM over NIXL failed"):
        Link(f"x-{os.urandom(3).hex()}", "tcp", memory)
    segment.close()


# -- where it lies


def test_the_home_is_the_devices_choice(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[int] = []
    said = dict(HOPPER)

    def attributes(device: int) -> dict[str, int]:
        asked.append(device)
        return said

    monkeypatch.setattr("qllm.device.rings.attributes_of", attributes)
    with caplog.at_level(logging.INFO, "qllm"):
        assert ring_memory_of(CUDA1, "rdma").name == "vram"
    assert asked == [1]
    assert "rings lie in vram memory: the network card writes it" in caplog.text
    assert ring_memory_of(CUDA1, "tcp").name == "pinned"
    assert ring_memory_of(CUDA1, None).name == "pinned"
    assert ring_memory_of(CUDA1, "rdma", "pinned").name == "pinned"
    said["ordering"] = 0
    with pytest.raises(ConfigError, match=r"level 0 .*; use 'pinned'"):
        ring_memory_of(torch.device("cuda"), "rdma", "vram")
    assert asked[-1] == 0
    with pytest.raises(ConfigError, match="needs a device, and the model lies on cpu"):
        ring_memory_of(CPU, "rdma", "vram")


def test_a_block_on_another_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch)
    block = DeviceRings(2, (4096,) * 4, VRAM, CUDA1)
    check_device(block, CUDA1)
    for device in (torch.device("cuda"), torch.device("cuda", 0), CPU):
        with pytest.raises(ConfigError, match="front end 2 lie in the memory of device 1"):
            check_device(block, device)
    with pytest.raises(ConfigError, match="front end 2 lie"):
        _engine([block], ControlMemory.create(0), VirtualClock())
    host = block_of(0, 4096)
    check_device(host, CUDA1)
    host.close()


def test_an_engine_page_locks_what_lies_in_the_host_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the first call that needs a real device."""
    FakeCuda(monkeypatch)
    api = FakeLoopApi()
    monkeypatch.setattr("qllm.device.rings.attributes_of", lambda device: HOPPER)
    control, near = ControlMemory.create(0), FrontEndMemory.create(0, (8192,) * 4)
    far = [DeviceRings(1, (8192,) * 4, VRAM, CUDA1), block_of(2, 8192)]
    backend: Any = SimpleNamespace(stages=object(), pages=None, shape=None, device=CUDA1)

    def stop(*_: Any, **settings: Any) -> None:
        raise DeviceError("here a device is needed")

    server = SimpleNamespace(attach=lambda *_, **how: None)
    loop = SimpleNamespace(server=server)
    monkeypatch.setattr("qllm.device.launcher.DeviceLoop", lambda *_, **settings: loop)
    monkeypatch.setattr("qllm.device.launcher.OnDevice", stop)
    with pytest.raises(DeviceError, match="here a device is needed"):
        DeviceEngine(
            backend, policy_of("fcfs"), LIMITS, control=control, front_ends=[near, *far],
            now_ns=VirtualClock(), max_total_tokens=LONGEST, api=api, function=object(),
        )  # fmt: skip
    segments = [control.segment, near.segment, far[1].memory]
    assert api.pinned == [(segment.address, segment.num_bytes) for segment in segments]


# -- the loop behind it


def _engine(blocks: list[Any], control: ControlMemory, clock: VirtualClock) -> DeviceEngine:
    return DeviceEngine(
        runner_of("mixtral").backend, policy_of("qllm2"), LIMITS, control=control,
        front_ends=blocks, now_ns=clock, max_total_tokens=LONGEST, api=FakeLoopApi(),
        function=object(), capacity=64, ls_slots=2,
    )  # fmt: skip


def test_the_loop_of_the_device_serves_a_front_end_that_pulls() -> None:
    """Over real NIXL, and the host in the place of the device: the tokens are the engine's."""
    jobs = jobs_of(4)
    plain = World("mixtral", "qllm2", jobs)
    plain.run_on_the_host()
    world = World("mixtral", "qllm2", jobs)
    world.block = block_of(0, 1 << 16)  # type: ignore[assignment]
    ours = FrontEndMemory.create(0, (1 << 16,) * 4)
    name = os.urandom(4).hex()
    far = Link(f"engine-{name}", "tcp", world.block.memory, is_pulled=True)
    near = Link(f"front-end-{name}", "tcp", ours.segment)
    near.connect(far.offer)
    puller = PullingFrontEnd(ours, near)

    class Front:
        """A front end that also lets its link go on."""

        submit, cancel, stop = puller.submit, puller.cancel, world.front_end.stop

        @staticmethod
        def receive() -> list[Any]:
            far.drive()
            return list(puller.receive())

    world.front_end = Front()  # type: ignore[assignment]
    engine = engine_of(world, runner_of("mixtral"), "qllm2")
    assert engine.memory.read("stopped") == 0
    assert engine.loop.server.memory.get("num_silent") == 1
    engine.serve()
    assert world.tokens() == plain.tokens()
    assert set(world.ends().values()) == {FinishReason.LENGTH}
    engine.close()
    while near._reads:
        Front.receive()
    puller.close()
    far.close()
    world.block.close()  # type: ignore[attr-defined]


def test_an_ls_request_of_a_front_end_without_a_bell_stops_a_frame() -> None:
    trusting, looking = _stages_until_ls(rings_bell=True), _stages_until_ls(rings_bell=False)
    assert looking < trusting


def _stages_until_ls(rings_bell: bool) -> int:
    """Stages until an LS request has its token that came, with no bell, after a BE stage."""
    ids = tuple(random.Random(3).randrange(50) for _ in range(40))
    world = World("mixtral", "qllm2", [])
    server, far = world.loop.server, block_of(0, 1 << 16)
    server.detach(0, 0)
    server.attach(0, far.rings, far.progress, rings_bell=rings_bell)
    assert isinstance(far.memory, Segment)
    front_end = FrontEnd(
        FrontEndMemory(far.memory), world.control, Doorbell.create(), Doorbell.create()
    )
    front_end._ring = lambda: None  # type: ignore[method-assign]
    front_end.submit(_greedy(0, 10, ids))
    world.loop.prepare()
    num_stages = 0
    for _ in range(30):
        branch = world.loop.turn()
        if branch < 0:
            continue
        num_stages += 1
        with torch.inference_mode():
            world.stages.replay(world.loop.keys[branch])
        world.clock.at_ns += STAGE_NS
        if num_stages == 1:
            front_end.submit(_greedy(1, 0, ids[:4]))
        for record in front_end.receive():
            if isinstance(record, TokenAt) and record.sampled.request_id == 1:
                front_end.close()
                far.close()
                return num_stages
    raise AssertionError("the LS request got no token")


def _greedy(number: int, priority: int, ids: tuple[int, ...]) -> Any:
    item = submission(number, priority, 1, 3)
    return replace(
        item, token_ids=ids, sampling=SamplingParams(temperature=0, seed=0), arrival_ns=0
    )


class EngineCard:
    """What a network card would do, by copies of one process.

    Args:
        ours: Address of the front end's block.
        theirs: Of the engine's.
        copy: Copies to, from, bytes, and whether to the engine's.
    """

    def __init__(self, ours: int, theirs: int, copy: Callable[[int, int, int, bool], Any]) -> None:
        self.ours, self.theirs, self.copy = ours, theirs, copy

    def drive(self) -> None:
        """It goes by itself."""

    def post(self, ranges: Any) -> None:
        for at, size in ranges:
            self.copy(self.theirs + at, self.ours + at, size, True)

    def fetch(self, ranges: Any) -> None:
        for to, at, size in ranges:
            self.copy(self.ours + to, self.theirs + at, size, False)

    def is_done(self, transfer: Any) -> bool:
        return True

    def close(self) -> None:
        """Nothing is held."""


def _served(
    block: DeviceRings,
    copy: Callable[[int, int, int, bool], Any],
    locked: Callable[[], AbstractContextManager[Callable[[memoryview], None]]],
    **how: Any,
) -> None:
    """Requests go into a block and tokens come out of it, by copies."""
    engine = Answerer(1, **how)
    with locked() as lock:
        lock(engine.control.segment.bytes)
        _serve(engine, block, copy)


def _serve(
    engine: Answerer, block: DeviceRings, copy: Callable[[int, int, int, bool], Any]
) -> None:
    block.attach_to(engine.server)
    ours = FrontEndMemory.create(0, block.capacities)  # type: ignore[arg-type]
    card: Any = EngineCard(ours.segment.address, block.memory.address, copy)
    front_end = PullingFrontEnd(ours, card)
    found: dict[int, list[int]] = defaultdict(list)
    num_ends = 0
    for n in range(12):
        front_end.submit(submission(n, n % 2 * 10, 5, 4))
    for _ in range(200):
        engine.step()
        for record in front_end.receive():
            if isinstance(record, TokenAt):
                found[record.sampled.request_id].append(record.sampled.token_id)
            else:
                num_ends += 1
    assert num_ends == 12
    assert dict(found) == {n: tokens_of(n, 4) for n in range(12)}
    block.close()
    ours.segment.close()


def test_copies_of_a_card_serve_as_well() -> None:
    def copy(to: int, at: int, size: int, is_theirs: bool) -> None:
        ctypes.memmove(to, at, size)

    _served(block_of(0, 1 << 14), copy, lambda: nullcontext(lambda _: None))


@pytest.mark.gpu
def test_kernels_read_requests_and_write_tokens_in_the_devices_memory() -> None:
    """The server's calls as kernel launches."""
    from cuda.bindings import runtime

    def copy(to: int, at: int, size: int, is_theirs: bool) -> None:
        kinds = runtime.cudaMemcpyKind
        kind = kinds.cudaMemcpyHostToDevice if is_theirs else kinds.cudaMemcpyDeviceToHost
        assert int(runtime.cudaMemcpy(to, at, size, kind)[0]) == 0

    block = DeviceRings(0, (1 << 14,) * 4, VRAM, torch.device("cuda", 0))
    _served(block, copy, locked_pages, calls=device_calls, zeros=pinned_zeros)
