"""Where rings lie that a device reads, by what the device says of itself."""

import logging
import re
from typing import Any

import pytest
import torch

from qllm.device.ring_memory import Pinned, attributes_of, choose_ring_memory
from qllm.errors import ConfigError, DeviceError

HOPPER = {"rdma": 1, "ordering": 100, "maps_host": 1, "same_pointer": 1}


@pytest.mark.parametrize(
    ("change", "profile", "asked", "home", "why"),
    [
        ({}, "rdma", None, "vram", "sees writes in order"),
        ({"ordering": 200}, "rdma", "vram", "vram", "sees writes in order"),
        ({}, "rdma", "pinned", "pinned", "asked for"),
        ({"ordering": 0}, "rdma", None, "pinned", "level 0 .* needs 100"),
        ({"ordering": 99}, "rdma", None, "pinned", "level 99"),
        ({"rdma": 0}, "rdma", None, "pinned", "does not support GPUDirect"),
        ({}, "tcp", None, "pinned", "NIXL's profile 'tcp'"),
        ({}, None, None, "pinned", "shared memory"),
        ({"maps_host": 0}, "rdma", None, "vram", "sees writes in order"),
    ],
)
def test_a_home_is_chosen_and_the_reason_logged(
    change: dict[str, int], profile: Any, asked: Any, home: str, why: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    with caplog.at_level(logging.INFO, "qllm"):
        assert choose_ring_memory(HOPPER | change, profile, asked).name == home
    assert caplog.records[-1].getMessage().startswith(f"rings lie in {home} memory")
    assert re.search(why, caplog.records[-1].getMessage())


@pytest.mark.parametrize(
    ("change", "profile", "asked", "why"),
    [
        ({}, "rdma", "dram", "ring_home='dram' is unknown; use vram or pinned"),
        ({}, None, "vram", "ring_home='vram': front ends write through shared memory"),
        ({"ordering": 0}, "rdma", "vram", "level 0 .*; use 'pinned'"),
        ({"maps_host": 0}, None, None, "cannot read registered memory"),
        ({"same_pointer": 0}, "shm", None, "cannot read registered memory"),
        ({"maps_host": 0}, "rdma", "pinned", "the memory of the device was not asked for"),
    ],
)
def test_a_home_that_is_not_possible_is_refused(
    change: dict[str, int], profile: Any, asked: Any, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        choose_ring_memory(HOPPER | change, profile, asked)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver: calls would succeed")
def test_calls_reach_cuda() -> None:
    with pytest.raises(DeviceError, match="InsufficientDriver"):
        attributes_of()
    with pytest.raises(DeviceError, match="4096 bytes of shared memory cannot be page-locked"):
        Pinned(memoryview(bytearray(4096)))


@pytest.mark.gpu
def test_a_gpu_says_what_it_can() -> None:
    device = attributes_of()
    assert device.keys() == HOPPER.keys()
    assert choose_ring_memory(device, None).name == "pinned"
