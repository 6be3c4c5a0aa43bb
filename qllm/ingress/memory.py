"""Shared memory without a name: every holder of the descriptor may map it.

No file is made in /dev/shm. The memory is freed when the last process that maps it ends, in any
way.
"""

import fcntl
import mmap
import os
import select
import struct
from collections.abc import Sequence
from typing import NamedTuple, Protocol, Self

import numpy as np

from qllm.errors import ConfigError
from qllm.ingress.ends import ring_ends
from qllm.ingress.layout import (
    CONTROL_MEMORY,
    FRONT_END,
    MAGIC,
    MAX_ERROR_BYTES,
    VERSION,
    cell,
    offset,
)
from qllm.ingress.words import Words

_PAGE = 4096
_ERROR_AT = offset(CONTROL_MEMORY, "error")


def available() -> bool:
    """Return True if this system supports an engine in another process, as Linux does."""
    return hasattr(os, "memfd_create") and hasattr(os, "eventfd") and hasattr(select, "poll")


class Memory(Protocol):
    """Bytes that a network card may read and write, of this host or of a device."""

    @property
    def kind(self) -> str:
        """NIXL's name of the memory's kind: "DRAM" or "VRAM"."""
        ...

    @property
    def device(self) -> int:
        """Number of the device; 0 for the host."""
        ...

    @property
    def address(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    def write(self, at: int, data: bytes) -> None:
        """Write bytes into the memory. The host does so at set-up."""
        ...

    def close(self) -> None:
        """Free the memory, as far as possible. Idempotent."""
        ...


class Segment:
    """Bytes that several processes map."""

    kind, device = "DRAM", 0

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.bytes = memoryview(mmap.mmap(fd, os.fstat(fd).st_size))
        self.words = ring_ends().words(self.bytes[: len(self.bytes) // 8 * 8].cast("Q"))

    @property
    def address(self) -> int:
        """Address of the first byte in this process."""
        return int(np.frombuffer(self.bytes, np.uint8).ctypes.data)

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return len(self.bytes)

    def write(self, at: int, data: bytes) -> None:
        """Write bytes."""
        self.bytes[at : at + len(data)] = data

    @classmethod
    def create(cls, name: str, size: int) -> Self:
        """Make `size` zero bytes. A page costs no memory before its first write."""
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return cls(fd)

    def close_fd(self) -> None:
        """Close the descriptor. The mapping stays until the object is collected."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def close(self) -> None:
        """Close the descriptor."""
        self.close_fd()


def _check(segment: Segment, what: str) -> None:
    magic, version = segment.words[0], segment.words[1] & 0xFFFF_FFFF
    if (magic, version) != (MAGIC, VERSION):
        raise ConfigError(
            f"{what} has magic {magic:#x} and version {version}, this is version {VERSION}; run "
            "the same release of qllm on both sides"
        )


class EngineStats(NamedTuple):
    """Statistics that the engine publishes after every decision."""

    num_steps: int
    num_live: int
    num_waiting: int


class ControlMemory:
    """CONTROL_MEMORY of `layout`. An engine has one, which all its front ends map."""

    BELL = cell(CONTROL_MEMORY, "bell")
    _ZERO, _DRAIN, _STOP, _BEAT, _VERSION, _STEPS, _LIVE, _WAITING, _ERROR = (
        cell(CONTROL_MEMORY, name)
        for name in (
            "zero_ns",
            "drain",
            "stop",
            "heartbeat_ns",
            "stats_version",
            "num_steps",
            "num_live",
            "num_waiting",
            "num_error_bytes",
        )
    )

    def __init__(self, segment: Segment) -> None:
        _check(segment, "the control block")
        self.segment = segment
        self.words = segment.words

    @classmethod
    def create(cls, zero_ns: int) -> Self:
        """Make a control block; `zero_ns` is CLOCK_MONOTONIC at engine time 0."""
        segment = Segment.create("qllm-control", -(-CONTROL_MEMORY.itemsize // _PAGE) * _PAGE)
        segment.words[0], segment.words[1] = MAGIC, VERSION | os.getpid() << 32
        segment.words[cls._ZERO] = zero_ns
        return cls(segment)

    @property
    def pid(self) -> int:
        """Id of the engine's process."""
        return self.words[1] >> 32

    @property
    def zero_ns(self) -> int:
        """CLOCK_MONOTONIC at engine time 0."""
        return self.words[self._ZERO]

    @property
    def draining(self) -> bool:
        """True if front ends take no new requests."""
        return bool(self.words[self._DRAIN])

    @draining.setter
    def draining(self, value: bool) -> None:
        self.words[self._DRAIN] = value

    @property
    def stop(self) -> bool:
        """Ask the engine to end when it next reads this word."""
        return bool(self.words[self._STOP])

    @stop.setter
    def stop(self, value: bool) -> None:
        self.words[self._STOP] = value

    @property
    def heartbeat_ns(self) -> int:
        """Engine time of the loop's last look at its rings. An idle loop looks every second."""
        return self.words[self._BEAT]

    @heartbeat_ns.setter
    def heartbeat_ns(self, value: int) -> None:
        self.words[self._BEAT] = value

    @property
    def num_live(self) -> int:
        """Number of requests in the engine. Use `read_stats` for numbers of one moment."""
        return self.words[self._LIVE]

    @property
    def error(self) -> str | None:
        """The reason why the engine ended by itself; None if it did not."""
        size = self.words[self._ERROR]
        if not size:
            return None
        return bytes(self.segment.bytes[_ERROR_AT : _ERROR_AT + size]).decode("utf-8", "replace")

    @error.setter
    def error(self, text: str) -> None:
        data = text.encode("utf-8", "replace")[:MAX_ERROR_BYTES]
        self.segment.bytes[_ERROR_AT : _ERROR_AT + len(data)] = data
        self.words[self._ERROR] = len(data)

    def write_stats(self, stats: EngineStats) -> None:
        """Publish statistics. Only the engine's loop calls this."""
        words = self.words
        words[self._VERSION] += 1
        words[self._STEPS], words[self._LIVE], words[self._WAITING] = stats
        words[self._VERSION] += 1

    def read_stats(self) -> EngineStats:
        """Return a consistent copy."""
        words = self.words
        while True:
            version = words[self._VERSION]
            stats = EngineStats(words[self._STEPS], words[self._LIVE], words[self._WAITING])
            if not version & 1 and version == words[self._VERSION]:
                return stats


RINGS = ("ls", "be", "cancel", "token")
"""Rings of a front end, in the order in which they follow FRONT_END."""


class FrontEndLayout(NamedTuple):
    """Offsets of the parts of a front end's block."""

    number: int
    capacities: tuple[int, ...]
    """Bytes of each ring, in whole pages."""

    @classmethod
    def of(cls, number: int, capacities: Sequence[int]) -> Self:
        """Return the layout with capacities rounded up to pages."""
        return cls(number, tuple(-(-size // _PAGE) * _PAGE for size in capacities))

    @property
    def num_bytes(self) -> int:
        """Size of the block."""
        return _PAGE + sum(self.capacities)

    @property
    def offsets(self) -> dict[str, int]:
        """Offset of each ring's first byte."""
        starts = (_PAGE + sum(self.capacities[:i]) for i in range(len(RINGS)))
        return dict(zip(RINGS, starts, strict=True))

    @property
    def header(self) -> bytes:
        """The first bytes of a new block. All other bytes are zeros."""
        return struct.pack("<QQ4Q", MAGIC, VERSION | self.number << 32, *self.capacities)


class FrontEndMemory:
    """FRONT_END of `layout` and the four rings after it."""

    PROGRESS = cell(FRONT_END, "progress")
    RINGS = RINGS
    _CAPACITY = 2
    """Index of the word at which `capacity` starts."""
    is_pulled = False
    """False, because the engine's host pushes the data that it writes."""

    def __init__(self, segment: Segment) -> None:
        _check(segment, "a front end's segment")
        self.segment = self.memory = segment
        self.number = segment.words[1] >> 32
        self.capacities = tuple(segment.words[self._CAPACITY : self._CAPACITY + len(RINGS)])
        self.offsets = FrontEndLayout(self.number, self.capacities).offsets
        """Offset of each ring in the segment, by name."""
        self.rings: dict[str, tuple[memoryview, Words]] = {}
        """Bytes of each ring and the word of the ring's reader, by name."""
        for name, size in zip(RINGS, self.capacities, strict=True):
            at, tail = self.offsets[name], cell(FRONT_END, f"{name}_tail")
            self.rings[name] = segment.bytes[at : at + size], segment.words[tail : tail + 1]

    @classmethod
    def create(cls, number: int, capacities: tuple[int, int, int, int]) -> Self:
        """Make a block; capacities are bytes in the order of `RINGS`, rounded up to pages."""
        layout = FrontEndLayout.of(number, capacities)
        segment = Segment.create(f"qllm-front-end-{number}", layout.num_bytes)
        segment.write(0, layout.header)
        return cls(segment)
