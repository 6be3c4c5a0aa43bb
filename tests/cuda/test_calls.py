"""CUDA's calls through cupy, where cuda-bindings are absent; cupy is a fake without a device."""

import ctypes
import logging
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda.bindings import runtime

from bench.gpu.gathered import THREADS, Arguments, Buffers, DeviceBuild, HostBuild, random_case
from bench.gpu.gathered import expected as wanted_of
from qllm.config import engine_config
from qllm.cuda.calls import BindingsCalls, CupyCalls, Size, cuda_calls
from qllm.cuda.copies import Arena, measured_bytes_per_ms
from qllm.cuda.gathered_norm import KERNEL, compile_norm
from qllm.cuda.graphs import Graphs, TorchGraphApi, raw_node_types
from qllm.cuda.streams import TorchStreams
from qllm.device.ring_memory import Pinned
from qllm.engine.gpu import GpuEngine
from qllm.errors import ConfigError, DeviceError, ModelError
from qllm.ingress.memory import Segment
from qllm.plugins import load_policy
from tests.support.fake_cuda import FakeCuda
from tests.support.fake_cupy import FakeCupy, Kernel

NO_DRIVER = pytest.mark.skipif(torch.cuda.is_available(), reason="a driver: calls would succeed")


def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let neither package be imported."""
    for name in ("cuda.bindings", "cupy"):
        monkeypatch.setitem(sys.modules, name, None)


def test_bindings_make_the_calls_where_both_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    bindings = sys.modules["cuda.bindings"]
    FakeCupy(monkeypatch, {})
    assert isinstance(cuda_calls(), CupyCalls)
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    assert isinstance(cuda_calls(), BindingsCalls)


def test_without_both_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere(monkeypatch)
    with pytest.raises(ConfigError, match=r"neither can be imported .*; pip install .*cupy"):
        cuda_calls()
    with pytest.raises(ConfigError, match="cuda-bindings or cupy"):
        TorchStreams()


def test_a_kernel_compiled_by_either_has_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = compile_norm("Loads", 2, "sm_90")
    fake = FakeCupy(monkeypatch, {})
    assert compile_norm("Loads", 2, "sm_90") == made
    assert fake.open_programs == 0


def test_what_cupy_cannot_compile_is_refused_with_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCupy(monkeypatch, {})
    with pytest.raises(ConfigError, match=r"NVRTC reports NVRTC_ERROR_COMPILATION: .*error"):
        cuda_calls().compile(b"__global__ void f() { nothing; }", "f", [])
    with pytest.raises(ConfigError, match="arch='sm_77': NVRTC reports NVRTC_ERROR_INVALID_OPTION"):
        compile_norm("Loads", 2, "sm_77")
    assert fake.open_programs == 0


def test_a_kernel_launched_by_cupy_gets_its_arguments(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Three arguments by value, two of them structures; the host's build computes with them."""
    host, case = HostBuild(tmp_path), random_case(random.Random(4), 2, 6, 32, 2)
    buffers, sizes = Buffers(case, "cpu", blocks=1), list[tuple[Any, ...]]()

    def kernel(
        blocks: Any, threads: Any, shared: int, net: bytes, zero: bytes, rest: bytes
    ) -> None:
        sizes.append((blocks, threads, shared, zero))
        first, stride = (ctypes.c_int64 * 2).from_buffer_copy(net)
        assert (first, stride) == (buffers.memory.data_ptr(), buffers.memory.stride(0))
        assert bytes(Arguments.from_buffer_copy(rest)) == bytes(buffers.arguments)
        host.run(buffers)

    fake = FakeCupy(monkeypatch, {KERNEL: kernel})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=77))
    DeviceBuild(2).run(buffers)
    assert sizes == [((1, 2, 1), (THREADS, 1, 1), 64, bytes(8))]
    assert fake.launched_on == [77]
    wanted = wanted_of(case)
    for found in buffers.results():
        assert all(map(torch.equal, found, wanted))


def test_a_loaded_kernel_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """cupy would read the file at the first launch, when it is gone."""
    launches: list[bytes] = []

    def kernel(*given: Any) -> None:
        launches.append(given[-1])

    kernels: dict[str, Kernel] = {KERNEL: kernel}
    FakeCupy(monkeypatch, kernels)
    calls = cuda_calls()
    loaded = [calls.load(compile_norm("Loads", n, "sm_90").cubin, KERNEL) for n in (2, 4)]
    for number, one in enumerate(loaded):
        calls.launch(one, Size((1, 1, 1), 1), [bytes([number])], 0)
    assert launches == [b"\0", b"\1"]


def test_copies_of_kv_through_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are rows, with other pitches at both ends."""
    fake, streams = FakeCupy(monkeypatch, {}), TorchStreams()
    whole = torch.arange(3 * 8 * 2 * 4, dtype=torch.float32).view(3, 8, 2, 4)
    source, to = whole[:, 2:5], torch.zeros(3, 3, 2, 4)
    streams.copy(to, source, SimpleNamespace(cuda_stream=5))
    assert torch.equal(to, source)
    assert fake.launched_on == [5]
    memory = streams.lock(4096)
    assert list(fake.locked.values()) == [4096]
    streams.unlock(memory)
    assert not fake.locked
    with pytest.raises(DeviceError, match=r"cannot be page-locked .*cudaErrorMemoryAllocation"):
        streams.lock(2 << 20)
    streams.lock_in_place(whole)
    assert list(fake.locked.values()) == [whole.nbytes]
    streams.unlock(whole)
    assert not fake.locked
    with pytest.raises(DeviceError, match=r"RAM for experts cannot be page-locked .*; free RAM"):
        streams.lock_in_place(torch.empty(2 << 20, dtype=torch.uint8))
    monkeypatch.setattr("qllm.cuda.calls.DEFAULT", 0)
    with pytest.raises(DeviceError, match="cudaErrorInvalidMemcpyDirection to a copy between"):
        streams.copy(to, source, SimpleNamespace(cuda_stream=5))


def is_mapped(address: int) -> bool:
    """Return True if the process has memory at the address."""
    spans = (
        line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()
    )
    return any(int(start, 16) <= address < int(end, 16) for start, end in spans)


class Registered:
    """Memory that CUDA has page-locked; a mapping may not go before its lock."""

    def __init__(self) -> None:
        self.num_bytes: dict[int, int] = {}
        self.unlocked_late: list[int] = []
        """Addresses that were no memory of the process any more."""

    def register(self, address: int, num_bytes: int, flags: int) -> tuple[Any]:
        assert address not in self.num_bytes, "memory is page-locked twice"
        self.num_bytes[address] = num_bytes
        return (runtime.cudaError_t.cudaSuccess,)

    def unregister(self, address: int) -> tuple[Any]:
        if not is_mapped(address):
            self.unlocked_late.append(address)
        del self.num_bytes[address]
        return (runtime.cudaError_t.cudaSuccess,)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Registered:
    """Page-locks of a runtime without a device."""
    found = Registered()
    monkeypatch.setattr(runtime, "cudaHostRegister", found.register)
    monkeypatch.setattr(runtime, "cudaHostUnregister", found.unregister)
    return found


def arena_of(pages: tuple[torch.Tensor, torch.Tensor]) -> Arena:
    return Arena(TorchStreams(), 3, 16, pages)


def test_an_arena_that_is_dropped_is_unlocked_while_it_is_mapped(registered: Registered) -> None:
    """Memory that is mapped there later would not be what the device sees."""
    pages = torch.zeros(2, 32, 2, 4), torch.zeros(2, 32, 2, 4)
    arena = arena_of(pages)
    slot = arena.take()
    assert list(registered.num_bytes.values()) == [3 * 2 * 2 * 16 * 2 * 4 * 4]
    del arena
    assert registered.num_bytes, "a slot still refers to the arena"
    del slot
    assert not registered.num_bytes
    assert not registered.unlocked_late


def test_an_arena_that_is_closed_is_unlocked_once(registered: Registered) -> None:
    arena = arena_of((torch.zeros(1, 32, 2, 4), torch.zeros(1, 32, 2, 4)))
    arena.close()
    assert not registered.num_bytes
    arena.close()
    del arena
    assert not registered.unlocked_late


def test_rings_that_are_dropped_are_unlocked_while_they_are_mapped(registered: Registered) -> None:
    segment = Segment.create("rings", 8192)
    address = segment.address
    pinned = Pinned(segment.bytes)
    assert registered.num_bytes == {address: 8192}
    segment.close()
    del segment
    assert is_mapped(address), "the page-locked memory is gone"
    del pinned
    assert not registered.num_bytes
    assert not registered.unlocked_late


def test_a_trial_copy_that_fails_leaves_nothing_locked(
    registered: Registered, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = TorchStreams()

    def lost(*_: Any) -> None:
        raise DeviceError("the device is gone")

    monkeypatch.setattr(streams, "record", lost)
    with pytest.raises(DeviceError, match="the device is gone"):
        measured_bytes_per_ms(streams, torch.device("cpu"))
    assert not registered.num_bytes


def test_nodes_that_no_call_lists_are_not_checked_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    api = FakeCuda()
    api.extra_node = "Host"
    with pytest.raises(ModelError, match="of stage sum is of type Host"):
        Graphs(api).capture("sum", lambda: torch.ones(2) + 1)
    FakeCupy(monkeypatch, {})
    monkeypatch.setattr(torch.cuda, "Stream", object)
    graph = SimpleNamespace(raw_cuda_graph=lambda: 1)
    assert raw_node_types(graph, cuda_calls()) is None
    assert TorchGraphApi().node_types(graph) is None
    monkeypatch.setattr(api, "node_types", lambda graph: None)
    with caplog.at_level(logging.WARNING):
        Graphs(api).capture("sum", lambda: torch.ones(2) + 1)
    assert "the nodes of stage sum are not checked" in caplog.text


def test_the_loop_on_the_device_needs_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, config = load_policy("qllm2"), engine_config({})
    GpuEngine.check(policy, config)
    FakeCupy(monkeypatch, {})
    with pytest.raises(ConfigError, match="loop='conditional' needs cuda-bindings, and only cupy"):
        GpuEngine.check(policy, config)
    nowhere(monkeypatch)
    with pytest.raises(ConfigError, match="neither can be imported"):
        GpuEngine.check(policy, config)


def test_doctor_says_which_package_makes_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    from qllm.cli.doctor import _cuda_calls

    assert _cuda_calls() == "by cuda-bindings"
    FakeCupy(monkeypatch, {})
    assert _cuda_calls().startswith("by cupy: stages are not checked")
    nowhere(monkeypatch)
    assert "pip install" in _cuda_calls()


@NO_DRIVER
def test_calls_of_bindings_reach_cuda_with_the_arguments_it_takes() -> None:
    """Without a driver every call answers so: a wrong argument would be a TypeError instead."""
    calls = BindingsCalls()
    for call in (
        lambda: calls.copy_rows((4096, 8), (8192, 8), (2, 8), 0),
        lambda: calls.lock(4096, 4096),
        lambda: calls.unlock(4096),
        lambda: calls.node_types(0),
    ):
        with pytest.raises(RuntimeError, match="InsufficientDriver"):
            call()
    from cuda.bindings import driver

    function = driver.CUfunction(init_value=1)
    for use in (
        lambda: calls.load(b"\x7fELF", "f"),
        lambda: calls.launch(function, Size((1, 1, 1), 1), [bytes(8)], 0),
    ):
        with pytest.raises(RuntimeError, match="NVIDIA driver library"):
            use()
