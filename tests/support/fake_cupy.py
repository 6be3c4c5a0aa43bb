"""cupy without a device: NVRTC is real, memory is the host's, and a kernel is a Python function."""

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cuda.bindings import nvrtc

Kernel = Callable[..., None]


class FakeCupy:
    """A module `cupy`, in the place of cuda-bindings.

    Args:
        monkeypatch: Ends it with the test.
        kernels: Kernels by name: functions of blocks, threads, bytes of shared memory, and the
            bytes of each argument.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kernels: dict[str, Kernel]) -> None:
        self.kernels, self.locked = kernels, dict[int, int]()
        self.stream: int | None = None
        """Stream of the launches of this `with` block."""
        self.launched_on: list[int | None] = []
        module: Any = ModuleType("cupy")
        module.RawModule = self._raw_module
        calls = ("createProgram", "compileProgram", "getPTX", "getCUBIN", "getProgramLog")
        programs = {name: getattr(self, name) for name in (*calls, "destroyProgram")}
        runtime = SimpleNamespace(
            memcpy2DAsync=self.copy, hostRegister=self.lock, hostUnregister=self.locked.pop
        )
        module.cuda = SimpleNamespace(
            nvrtc=SimpleNamespace(**programs),
            runtime=runtime,
            ExternalStream=lambda stream: _OnStream(self, stream),
        )
        monkeypatch.setitem(sys.modules, "cupy", module)
        monkeypatch.setitem(sys.modules, "cuda.bindings", None)
        self.open_programs = 0

    # modules

    def _raw_module(self, *, path: str) -> Any:
        return SimpleNamespace(get_function=lambda name: _RawKernel(self, Path(path), name))

    # NVRTC, whose errors are RuntimeErrors in cupy

    def createProgram(self, source: str, name: str, headers: Any, names: Any) -> Any:  # noqa: N802
        assert not headers
        assert not names
        self.open_programs += 1
        return nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), 0, [], [])[1]

    def compileProgram(self, program: Any, options: list[str]) -> None:  # noqa: N802
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
        if status.value:
            raise RuntimeError(status.name)

    def getPTX(self, program: Any) -> bytes:  # noqa: N802
        return self._read("PTX", program)

    def getCUBIN(self, program: Any) -> bytes:  # noqa: N802
        return self._read("CUBIN", program)

    def getProgramLog(self, program: Any) -> str:  # noqa: N802
        return self._read("ProgramLog", program).decode()

    @staticmethod
    def _read(what: str, program: Any) -> bytes:
        _, size = getattr(nvrtc, f"nvrtcGet{what}Size")(program)
        data = bytes(size)
        getattr(nvrtc, f"nvrtcGet{what}")(program, data)
        return data

    def destroyProgram(self, program: Any) -> None:  # noqa: N802
        self.open_programs -= 1
        nvrtc.nvrtcDestroyProgram(program)

    # the runtime

    def copy(
        self, to: int, to_pitch: int, source: int, pitch: int, width: int, rows: int, *how: int
    ) -> None:
        kind, stream = how
        if kind != 4:
            raise RuntimeError("cudaErrorInvalidMemcpyDirection")
        self.launched_on.append(stream)
        for row in range(rows):
            ctypes.memmove(to + row * to_pitch, source + row * pitch, width)

    def lock(self, address: int, num_bytes: int, flags: int) -> None:
        if num_bytes > 1 << 20:
            raise RuntimeError("cudaErrorMemoryAllocation")
        assert flags == 0
        self.locked[address] = num_bytes


class _OnStream:
    def __init__(self, cupy: FakeCupy, stream: int) -> None:
        self._cupy, self._stream = cupy, stream

    def __enter__(self) -> None:
        self._cupy.stream = self._stream

    def __exit__(self, *_: object) -> None:
        self._cupy.stream = None


class _RawKernel:
    """Reads its file once: at `compile`, or at the first launch."""

    def __init__(self, cupy: FakeCupy, file: Path, name: str) -> None:
        self._cupy, self._file, self._name = cupy, file, name
        self._cubin = b""

    def compile(self) -> None:
        self._cubin = self._file.read_bytes()
        assert self._cubin.startswith(b"\x7fELF")
        assert self._name.encode() in self._cubin

    def __call__(self, blocks: Any, threads: Any, given: Any, *, shared_mem: int = 0) -> None:
        if not self._cubin:
            self.compile()
        assert all(isinstance(x, np.ndarray) and x.size == 1 for x in given)
        self._cupy.launched_on.append(self._cupy.stream)
        kernel = self._cupy.kernels[self._name]
        kernel(blocks, threads, shared_mem, *(x.tobytes() for x in given))
