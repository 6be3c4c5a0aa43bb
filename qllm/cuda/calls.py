"""CUDA's calls that torch does not have: by cuda-bindings, or by cupy where these are absent.

`cuda_calls` chooses. cupy loads a kernel with `cupy.RawModule`. It has no calls that list or make
the nodes of a graph: captured stages are not checked then, and the loop on the device needs
cuda-bindings (`needs_bindings`).
"""

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Protocol

import numpy as np

from qllm.errors import ConfigError, pip_install

DEFAULT = 4
"""Value of cudaMemcpyDefault: the addresses say where a copy goes."""


class Compiled(NamedTuple):
    """A kernel for one architecture."""

    ptx: str
    cubin: bytes


class Size(NamedTuple):
    """Size of a launch."""

    blocks: tuple[int, int, int]
    threads: int
    shared_bytes: int = 0
    """Bytes of shared memory per block, in addition to those in the kernel."""


class CudaCalls(Protocol):
    """CUDA calls. Each raises RuntimeError with CUDA's answer if this is an error."""

    name: str
    """Package that makes the calls."""

    def compile(self, source: bytes, name: str, options: Sequence[str]) -> Compiled:
        """Compile a source with NVRTC. No device is needed.

        Raises:
            ConfigError: NVRTC refuses the source or an option. The text contains its log.
            RuntimeError: NVRTC itself is missing.
        """
        ...

    def load(self, cubin: bytes, name: str) -> Any:
        """Return a kernel of a cubin. It stays loaded."""
        ...

    def launch(self, kernel: Any, size: Size, arguments: Sequence[bytes], stream: int) -> None:
        """Launch a kernel of `load`.

        Args:
            kernel: The kernel.
            size: Size of the launch.
            arguments: Bytes of each argument, which are passed by value.
            stream: Handle of the stream.
        """
        ...

    def copy_rows(
        self, to: tuple[int, int], source: tuple[int, int], shape: tuple[int, int], stream: int
    ) -> None:
        """Copy rows of bytes without waiting.

        Args:
            to: Address, and bytes from one row to the next.
            source: The same of the source.
            shape: Number of rows, and bytes of a row.
            stream: Handle of the stream.
        """
        ...

    def lock(self, address: int, num_bytes: int) -> None:
        """Page-lock memory of the host."""
        ...

    def unlock(self, address: int) -> None:
        """End a page-lock."""
        ...

    def node_types(self, graph: int) -> list[str] | None:
        """Return the type of each node of a graph by its handle; None if no call tells it."""
        ...


class BindingsCalls:
    """The calls of cuda-bindings.

    Raises:
        ImportError: The package is absent.
    """

    name = "cuda-bindings"

    def __init__(self) -> None:
        from cuda.bindings import driver, nvrtc, runtime

        self._driver: Any = driver
        self._nvrtc: Any = nvrtc
        self._runtime: Any = runtime

    def compile(self, source: bytes, name: str, options: Sequence[str]) -> Compiled:
        nvrtc = self._nvrtc
        program = _result(nvrtc.nvrtcCreateProgram(source, name.encode(), 0, [], []))
        try:
            given = [option.encode() for option in options]
            (status,) = nvrtc.nvrtcCompileProgram(program, len(given), given)
            if status.value:
                log = self._read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
                raise _refused(status.name, log)
            ptx = self._read(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
            cubin = self._read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
        finally:
            nvrtc.nvrtcDestroyProgram(program)
        return Compiled(_text(ptx), cubin)

    @staticmethod
    def _read(size: Callable[[Any], Any], read: Callable[[Any, bytes], Any], program: Any) -> bytes:
        data = bytes(_result(size(program)))
        _result(read(program, data))  # fills it
        return data

    def load(self, cubin: bytes, name: str) -> Any:
        module = _result(self._driver.cuModuleLoadData(cubin))
        return _result(self._driver.cuModuleGetFunction(module, name.encode()))

    def launch(self, kernel: Any, size: Size, arguments: Sequence[bytes], stream: int) -> None:
        held = [ctypes.create_string_buffer(data, len(data)) for data in arguments]
        addresses = (ctypes.c_void_p * len(held))(*map(ctypes.addressof, held))
        _result(
            self._driver.cuLaunchKernel(
                kernel, *size.blocks, size.threads, 1, 1, size.shared_bytes, stream,
                ctypes.addressof(addresses), 0,
            )
        )  # fmt: skip

    def copy_rows(
        self, to: tuple[int, int], source: tuple[int, int], shape: tuple[int, int], stream: int
    ) -> None:
        (rows, width), kind = shape, self._runtime.cudaMemcpyKind.cudaMemcpyDefault
        _result(self._runtime.cudaMemcpy2DAsync(*to, *source, width, rows, kind, stream))

    def lock(self, address: int, num_bytes: int) -> None:
        _result(self._runtime.cudaHostRegister(address, num_bytes, 0))

    def unlock(self, address: int) -> None:
        _result(self._runtime.cudaHostUnregister(address))

    def node_types(self, graph: int) -> list[str] | None:
        runtime = self._runtime
        raw = runtime.cudaGraph_t(init_value=graph)
        num = _result(runtime.cudaGraphGetNodes(raw))[1]
        nodes, _ = _result(runtime.cudaGraphGetNodes(raw, num))
        types = [_result(runtime.cudaGraphNodeGetType(node)) for node in nodes[:num]]
        return [t.name.removeprefix("cudaGraphNodeType") for t in types]


class CupyCalls:
    """The calls of cupy.

    Raises:
        ImportError: The package is absent.
    """

    name = "cupy"

    def __init__(self) -> None:
        import cupy

        self._cupy: Any = cupy

    def compile(self, source: bytes, name: str, options: Sequence[str]) -> Compiled:
        nvrtc = self._cupy.cuda.nvrtc
        program = nvrtc.createProgram(source.decode(), name, [], [])
        try:
            try:
                nvrtc.compileProgram(program, list(options))
            except RuntimeError as error:
                raise _refused(str(error), nvrtc.getProgramLog(program).encode()) from error
            return Compiled(_text(nvrtc.getPTX(program)), nvrtc.getCUBIN(program))
        finally:
            nvrtc.destroyProgram(program)

    def load(self, cubin: bytes, name: str) -> Any:
        with TemporaryDirectory(prefix="qllm-kernels-") as folder:
            file = Path(folder) / "kernels.cubin"
            file.write_bytes(cubin)
            kernel = self._cupy.RawModule(path=str(file)).get_function(name)
            kernel.compile()  # loads now; else at the first launch, when the file is gone
        return kernel

    def launch(self, kernel: Any, size: Size, arguments: Sequence[bytes], stream: int) -> None:
        # cupy passes an array of one element by value
        given = tuple(np.frombuffer(data, np.dtype((np.void, len(data)))) for data in arguments)
        with self._cupy.cuda.ExternalStream(stream):
            kernel(size.blocks, (size.threads, 1, 1), given, shared_mem=size.shared_bytes)

    def copy_rows(
        self, to: tuple[int, int], source: tuple[int, int], shape: tuple[int, int], stream: int
    ) -> None:
        rows, width = shape
        self._cupy.cuda.runtime.memcpy2DAsync(*to, *source, width, rows, DEFAULT, stream)

    def lock(self, address: int, num_bytes: int) -> None:
        self._cupy.cuda.runtime.hostRegister(address, num_bytes, 0)

    def unlock(self, address: int) -> None:
        self._cupy.cuda.runtime.hostUnregister(address)

    def node_types(self, graph: int) -> list[str] | None:
        return None


def cuda_calls() -> CudaCalls:
    """Return the calls of cuda-bindings, or those of cupy where that package is absent.

    Raises:
        ConfigError: Neither package can be imported.
    """
    try:
        return BindingsCalls()
    except ImportError as error:
        no_bindings = error
    try:
        return CupyCalls()
    except ImportError as no_cupy:
        raise ConfigError(
            "CUDA's calls need cuda-bindings or cupy, and neither can be imported "
            f"({no_bindings}; {no_cupy}); {pip_install('cuda')}"
        ) from no_cupy


def needs_bindings(what: str) -> None:
    """Raise ConfigError unless cuda-bindings make the calls, which `what` needs."""
    name = cuda_calls().name
    if name != BindingsCalls.name:
        raise ConfigError(
            f"{what} needs cuda-bindings, and only {name} is installed, which has no calls for the "
            f"nodes of a graph; use loop='host', or {pip_install('cuda')}"
        )


def _result(answer: Sequence[Any]) -> Any:
    """Return the result of a call without its error code; raise RuntimeError if it is not 0."""
    error, *found = answer
    if int(error):
        raise RuntimeError(repr(error))
    return found[0] if len(found) == 1 else found or None


def _refused(status: str, log: bytes) -> ConfigError:
    return ConfigError(f"NVRTC reports {status}: {_text(log).strip()}")


def _text(data: bytes) -> str:
    return data.decode(errors="replace").rstrip("\0")
