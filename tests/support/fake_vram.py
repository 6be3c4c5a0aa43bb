"""CUDA's calls for memory of a device, without one."""

import ctypes
import mmap
from typing import Any

import pytest


class FakeCuda:
    """CUDA's calls for memory that this process cannot touch: who does dies."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fail: str = "") -> None:
        from cuda.bindings import driver, runtime

        self.calls: list[tuple[Any, ...]] = []
        self.written: dict[int, bytes] = {}
        self.device, self.fail = 0, fail
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [
            ctypes.c_void_p,
            ctypes.c_size_t,
            *([ctypes.c_int] * 3),
            ctypes.c_long,
        ]
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._untouchable = lambda size: int(libc.mmap(None, size, 0, private, -1, 0))
        for name in ("GetDevice", "SetDevice", "Malloc", "Memset", "Memcpy", "Free"):
            call = getattr(self, name.lower())
            monkeypatch.setattr(runtime, f"cuda{name}", self._answered(name, call))
        monkeypatch.setattr(
            driver, "cuPointerSetAttribute", self._answered("attribute", self.attribute)
        )

    def _answered(self, name: str, call: Any) -> Any:
        def answer(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, *arguments))
            if name == self.fail:
                return (2, None) if name == "Malloc" else (2,)
            return call(*arguments)

        return answer

    def getdevice(self) -> tuple[int, int]:
        return 0, self.device

    def setdevice(self, device: int) -> tuple[int]:
        self.device = device
        return (0,)

    def malloc(self, size: int) -> tuple[int, int]:
        assert self.device == 1, "the memory of another device"
        return 0, self._untouchable(size)

    def memset(self, address: int, value: int, size: int) -> tuple[int]:
        assert value == 0
        return (0,)

    def memcpy(self, address: int, source: int, size: int, kind: Any) -> tuple[int]:
        self.written[address] = ctypes.string_at(source, size)
        assert int(kind) == 1, "not from the host to the device"
        return (0,)

    def free(self, address: int) -> tuple[int]:
        return (0,)

    def attribute(self, value: Any, attribute: Any, address: int) -> tuple[int]:
        assert value
        assert attribute.name == "CU_POINTER_ATTRIBUTE_SYNC_MEMOPS"
        return (0,)
