"""Runners and engines on a stand-in for a device, with slots for some experts of the host."""

from typing import Any

import pytest

from qllm.cuda.backend import cuda_runner
from qllm.cuda.slots import ExpertRoom, HostLayer
from qllm.engine import build
from qllm.models.discover import discover
from qllm.runner.runner import TorchRunner
from tests.support.fake_streams import FakeStreams, install

PAGE = 4


def expert_streams() -> FakeStreams:
    """Streams of which one copies experts."""
    return FakeStreams(("experts",))


def sizes_of(model: Any) -> tuple[int, int]:
    """Bytes of a slot, and number of all experts."""
    modules = [layer.experts for layer in discover(model).layers]
    layers = [HostLayer("", module) for module in modules if module is not None]
    return max(each.expert_bytes for each in layers), sum(each.num_experts for each in layers)


def in_slots(model: Any, num_slots: int, streams: FakeStreams, **settings: Any) -> TorchRunner:
    """Return a runner with so many slots on the device."""
    room = ExpertRoom(streams, num_slots * sizes_of(model)[0])
    how = {"num_pages": 128, "page_size": PAGE, "graphs": False, "room": room}
    streams.accesses.clear()  # memory of an earlier runner may have been at the same addresses
    return cuda_runner(model, **{**how, **settings})


class SlotDevice:
    """The device of the engines of a test.

    Args:
        patch: Patches, which end with the test.
        num_slots: Slots of each engine; None has all experts on the device.
    """

    def __init__(self, patch: pytest.MonkeyPatch, num_slots: int | None) -> None:
        self.num_slots, self.streams = num_slots, expert_streams()
        self.runners: list[TorchRunner] = []
        install(patch, self.streams, PAGE)
        patch.setattr(build, "make_runner", self._runner)

    def _runner(self, model: Any, config: Any) -> TorchRunner:
        how = {"num_pages": config.num_blocks, "page_size": config.block_size}
        if self.num_slots is None:
            made = cuda_runner(model, graphs=False, **how)
        else:
            made = in_slots(model, self.num_slots, self.streams, **how)
        self.runners.append(made)
        return made
