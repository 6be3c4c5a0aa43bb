"""Memory of rings that a device reads: its own memory, or page-locked memory of the host.

A network card may write into the device's memory while a kernel runs. The kernel sees these writes
in order only if the device reports so. CUDA's documentation promises the order only after calls of
the host. A record contains a check (`qllm.ingress.ring`: a number at both ends and a checksum). So
a wrong order would cost time, and no data. Still, the memory of a device without the promise is not
used.
"""

import logging
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from qllm.errors import ConfigError, DeviceError

_log = logging.getLogger("qllm")
ATTRIBUTES = {
    "rdma": "cudaDevAttrGPUDirectRDMASupported",
    "ordering": "cudaDevAttrGPUDirectRDMAWritesOrdering",
    "maps_host": "cudaDevAttrCanMapHostMemory",
    "same_pointer": "cudaDevAttrCanUseHostPointerForRegisteredMem",
}
"""Queried attributes of a device, and their names in CUDA."""
IN_ORDER = 100
"""Value of cudaGPUDirectRDMAWritesOrderingOwner: the owner of the memory sees writes in order."""
MAPPED = 2
"""Value of cudaHostRegisterMapped."""
_GPU_PAGE = 64 << 10
"""Bytes of a page of GPUDirect RDMA."""


class RingMemory(NamedTuple):
    """The chosen kind of memory of rings, and the reason for the choice."""

    name: str
    """Kind: "vram" or "pinned"."""
    why: str


def attributes_of(device: int = 0) -> dict[str, int]:
    """Return the ATTRIBUTES of a device.

    Raises:
        DeviceError: The device does not exist.
    """
    from cuda.bindings import runtime

    out = {}
    for name, attribute in ATTRIBUTES.items():
        kind = getattr(runtime.cudaDeviceAttr, attribute)
        error, value = runtime.cudaDeviceGetAttribute(kind, device)
        if int(error):
            raise DeviceError(f"CUDA answered {error!r} when asked for {attribute}")
        out[name] = int(value)
    return out


def choose_ring_memory(
    device: Mapping[str, int], profile: str | None, asked: str | None = None
) -> RingMemory:
    """Choose the memory of rings, and log the reason.

    Args:
        device: ATTRIBUTES of the device.
        profile: Profile of `qllm.ingress.remote.nixl` with which front ends write; None is shared
            memory of this machine.
        asked: Setting `ring_home`, "vram" or "pinned"; None prefers the device's memory.

    Raises:
        ConfigError: The requested memory, or any memory, is not possible here. The message has the
            reason.
    """
    if asked not in (None, "vram", "pinned"):
        raise ConfigError(f"ring_home={asked!r} is unknown; use vram or pinned")
    no_vram = _why_not_vram(device, profile)
    if asked == "vram" and no_vram:
        raise ConfigError(f"ring_home='vram': {no_vram}; use 'pinned'")
    if not no_vram and asked != "pinned":
        home = RingMemory("vram", "the network card writes it, and the device sees writes in order")
    elif device["maps_host"] and device["same_pointer"]:
        home = RingMemory("pinned", no_vram or "asked for")
    else:
        raise ConfigError(
            "this device cannot read registered memory of the host at its own address, and "
            f"{no_vram or 'the memory of the device was not asked for'}: no ring can be read there"
        )
    _log.info("rings lie in %s memory: %s", home.name, home.why)
    return home


def _why_not_vram(device: Mapping[str, int], profile: str | None) -> str:
    if profile != "rdma":
        how = "shared memory" if profile is None else f"NIXL's profile {profile!r}"
        return f"front ends write through {how}, which is memory of the host"
    if not device["rdma"]:
        return "the device does not support GPUDirect RDMA"
    if device["ordering"] < IN_ORDER:
        return (
            f"the device orders RDMA writes at level {device['ordering']} and a kernel that runs "
            f"needs {IN_ORDER} (owner) or more"
        )
    return ""


class Pinned:
    """Memory of the host that the device reads and writes at the same address.

    The memory stays mapped until it is unpinned, by `close` or when this object is dropped.

    Args:
        memory: Whole pages.

    Raises:
        DeviceError: The memory cannot be page-locked.
    """

    def __init__(self, memory: memoryview) -> None:
        from cuda.bindings import runtime

        address = int(np.frombuffer(memory, np.uint8).ctypes.data)
        (error,) = runtime.cudaHostRegister(address, memory.nbytes, MAPPED)
        if int(error):
            raise DeviceError(
                f"{memory.nbytes} bytes of shared memory cannot be page-locked for the device: "
                f"CUDA answered {error!r}"
            )
        self._unpin = weakref.finalize(self, _unpin, runtime, address, memory)
        self._unpin.atexit = False  # a loop that runs would delay the exit

    def close(self) -> None:
        """Unpin the memory. Idempotent."""
        self._unpin()


def _unpin(runtime: Any, address: int, _memory: memoryview) -> None:
    """Unpin memory, which the last argument keeps mapped until then."""
    runtime.cudaHostUnregister(address)


class Vram:
    """Memory of a device that a network card reads and writes. The host does neither.

    The memory is a separate allocation (`cudaMalloc`, whole pages of GPUDirect) of zeros.

    Args:
        num_bytes: Least number of bytes.
        device: Number of the device.

    Raises:
        DeviceError: The device does not exist, or has no memory left.
    """

    kind = "VRAM"

    def __init__(self, num_bytes: int, device: int = 0) -> None:
        from cuda.bindings import driver, runtime

        self.device = device
        self.num_bytes = -(-num_bytes // _GPU_PAGE) * _GPU_PAGE
        self.address = 0
        self._runtime: Any = runtime
        before = self._call("cudaGetDevice")
        self._call("cudaSetDevice", device)
        try:
            self.address = int(self._call("cudaMalloc", self.num_bytes))
            # Make copies by the host synchronous, so that the card sees them.
            sync = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
            (error,) = driver.cuPointerSetAttribute(1, sync, self.address)
            if int(error):
                raise DeviceError(f"CUDA answered {error!r} to cuPointerSetAttribute")
            self._call("cudaMemset", self.address, 0, self.num_bytes)
        except BaseException:
            self.close()
            raise
        finally:
            self._call("cudaSetDevice", before)

    def write(self, at: int, data: bytes) -> None:
        """Write bytes from the host. This is used only at set-up."""
        how = self._runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        source = np.frombuffer(data, np.uint8)
        self._call("cudaMemcpy", self.address + at, int(source.ctypes.data), len(data), how)

    def _call(self, name: str, *arguments: Any) -> Any:
        error, *found = getattr(self._runtime, name)(*arguments)
        if int(error):
            raise DeviceError(
                f"CUDA answered {error!r} to {name}, for {self.num_bytes} bytes of rings in the "
                f"memory of device {self.device}"
            )
        return found[0] if found else None

    def close(self) -> None:
        """Free the memory. No kernel may run, as CUDA waits for it. Idempotent."""
        if self.address:
            self._runtime.cudaFree(self.address)
        self.address = 0
