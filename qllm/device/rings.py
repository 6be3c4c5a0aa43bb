"""The block of a front end whose rings a device reads and writes, and the memory of the block.

The engine's host allocates the block and has its address, but reads and writes no record in the
block. The device's server gets the addresses. A front end on another host WRITEs its requests into
the block, and READs its tokens from the block (`qllm.ingress.remote.pull`). This is the same for
both kinds of memory: the device's, which the host cannot read, and page-locked memory of the host.
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
    """Return the memory of rings that a loop on this device reads (`choose_ring_memory`).

    Raises:
        ConfigError: The requested memory, or any memory, is not possible. The message has the
            reason.
    """
    if device.type == "cuda":
        return choose_ring_memory(attributes_of(device.index or 0), profile, asked)
    if asked == "vram":
        raise ConfigError(f"ring_home='vram' needs a device, and the model lies on {device}")
    return RingMemory("pinned", "the host stands in for the device")


class DeviceRings:
    """A new block of one front end.

    Args:
        number: Number of the front end.
        capacities: Sizes of its rings in bytes, as in `FrontEndMemory.create`.
        home: Kind of memory.
        device: Device that owns the memory, for the kind "vram".

    Raises:
        DeviceError: The device has too little memory for the block.
    """

    is_pulled = True
    """True, because front ends fetch the records that the device writes."""

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
        """Address of the progress word."""
        self.rings = {
            name: RingAt(base + at, base + offset(FRONT_END, f"{name}_tail"), size)
            for (name, at), size in zip(layout.offsets.items(), self.capacities, strict=True)
        }
        assert tuple(self.rings) == RINGS

    def attach_to(self, server: NativeServer) -> None:
        """Let a server serve the front end.

        Raises:
            ConfigError: The server has no room for the front end (see `NativeServer.attach`).
        """
        server.attach(self.number, self.rings, self.progress, rings_bell=False)

    def close(self) -> None:
        """Free the memory, after its link is closed and the loop has ended. Idempotent."""
        self.memory.close()


def check_device(block: DeviceRings, device: torch.device) -> None:
    """Refuse a block that a loop on this device cannot read.

    Raises:
        ConfigError: The block lies in the memory of another device.
    """
    if block.memory.kind != "VRAM":
        return
    if device.type != "cuda" or block.memory.device != (device.index or 0):
        raise ConfigError(
            f"the rings of front end {block.number} lie in the memory of device "
            f"{block.memory.device}, and the model on {device}"
        )
