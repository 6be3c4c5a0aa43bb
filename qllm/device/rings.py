"""The block of a front end whose rings a device reads and writes, and where it lies.

The engine's host makes it, knows it by address, and touches no record of it: the device's server
is attached to the addresses, and a front end on another host WRITEs its requests there and READs
its tokens from there (`qllm.ingress.remote.pull`). In the memory of a device the host could not
touch it at all; in page-locked memory of the host it leaves it alone all the same.
"""

from collections.abc import Sequence

import torch

from qllm.device.ring_memory import RingMemory, Vram, attributes_of, choose_ring_memory
from qllm.device.server import NativeServer, RingAt
from qllm.errors import ConfigError
from qllm.ingress.layout import FRONT_END, offset
from qllm.ingress.memory import RINGS, FrontEndLayout, Memory, Segment


def ring_memory_of(
    device: torch.device, profile: str | None, asked: str | None = None
) -> RingMemory:
    """Where rings lie that a loop on this device reads (`choose_ring_memory`).

    Raises:
        ConfigError: Nowhere, or not where it was asked for; says why.
    """
    if device.type == "cuda":
        return choose_ring_memory(attributes_of(device.index or 0), profile, asked)
    if asked == "vram":
        raise ConfigError(f"ring_home='vram' needs a device, and the model lies on {device}")
    return RingMemory("pinned", "the host stands in for the device")


class DeviceRings:
    """One block, fresh.

    Args:
        number: Of the front end.
        capacities: Of its rings in bytes, as `FrontEndMemory.create` takes them.
        home: Where it lies.
        device: Whose memory, for the home "vram".

    Raises:
        DeviceError: The device has no memory for it.
    """

    is_pulled = True
    """Front ends fetch what the device writes."""

    def __init__(
        self, number: int, capacities: Sequence[int], home: RingMemory, device: torch.device
    ) -> None:
        layout = FrontEndLayout.of(number, capacities)
        self.number, self.capacities, self.home = number, layout.capacities, home
        self.memory: Memory
        if home.name == "vram":
            self.memory = Vram(layout.num_bytes, device.index or 0)
        else:
            self.memory = Segment.create(f"qllm-front-end-{number}", layout.num_bytes)
        self.memory.write(0, layout.header)
        base = self.memory.address
        self.progress = base + offset(FRONT_END, "progress")
        """Address of the word."""
        self.rings = {
            name: RingAt(base + at, base + offset(FRONT_END, f"{name}_tail"), size)
            for (name, at), size in zip(layout.offsets.items(), self.capacities, strict=True)
        }
        assert tuple(self.rings) == RINGS

    def attach_to(self, server: NativeServer) -> None:
        """Let a server serve the front end.

        Raises:
            ConfigError: See `NativeServer.attach`.
        """
        server.attach(self.number, self.rings, self.progress, rings_bell=False)

    def close(self) -> None:
        """Give the memory back, after its link and with no loop on the device. Twice is once."""
        self.memory.close()


def check_device(block: DeviceRings, device: torch.device) -> None:
    """Return if a loop on this device can read a block.

    Raises:
        ConfigError: It lies in the memory of another one.
    """
    if block.memory.kind != "VRAM":
        return
    if device.type != "cuda" or block.memory.device != (device.index or 0):
        raise ConfigError(
            f"the rings of front end {block.number} lie in the memory of device "
            f"{block.memory.device}, and the model on {device}"
        )
