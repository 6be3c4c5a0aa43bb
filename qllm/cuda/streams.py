"""Streams, events and copies: the CUDA calls for copies of KV and experts. Only `finish` waits.

In all arguments, the stream `None` is the one that computes.
"""

import mmap
from typing import Any, Protocol

import torch
from torch import Tensor

from qllm.cuda.calls import cuda_calls
from qllm.errors import DeviceError


class StreamApi(Protocol):
    """CUDA calls that `qllm.cuda.copies` and `qllm.cuda.slots` need. Callable from any thread."""

    def new_stream(self) -> Any:
        """Return a stream that runs parallel to the computing stream."""
        ...

    def record(self, stream: Any, *, sleeps: bool = False) -> Any:
        """Return an event that completes after all work launched on a stream so far.

        Args:
            stream: A stream. From other threads than that of the runner, not None.
            sleeps: True if a thread that waits in `finish` sleeps, False if it spins.
        """
        ...

    def wait(self, stream: Any, event: Any) -> None:
        """Let work launched on a stream from now on run after an event."""
        ...

    def finish(self, event: Any) -> None:
        """Wait for an event.

        The thread of the runner does so for checkpoints, at the end of the engine, and for experts
        where frames may not wait.
        """
        ...

    def copy(self, to: Tensor, source: Tensor, stream: Any) -> None:
        """Copy on a stream between the device and page-locked memory.

        Args:
            to: [L, ...], each of L contiguous: keys or values of L layers, or one expert's bytes.
            source: Tensor of the same shape, each of L contiguous.
            stream: A stream of `new_stream`.
        """
        ...

    def lock(self, num_bytes: int) -> Tensor:
        """Return page-locked memory of the host. Call it at the start: the device may delay it.

        Raises:
            DeviceError: There is too little memory.
        """
        ...

    def lock_in_place(self, memory: Tensor) -> None:
        """Page-lock memory of the host that is there already, in pages of its own.

        Raises:
            DeviceError: It cannot be page-locked.
        """
        ...

    def unlock(self, memory: Tensor) -> None:
        """End a page-lock. No copy may use the memory any more."""
        ...


class TorchStreams:
    """An API of torch's streams and events, and of `cuda_calls` where torch has no call.

    Raises:
        ConfigError: No package makes these calls.
    """

    def __init__(self) -> None:
        self._calls = cuda_calls()

    def new_stream(self) -> Any:
        cuda: Any = torch.cuda
        return cuda.Stream()

    def record(self, stream: Any, *, sleeps: bool = False) -> Any:
        cuda: Any = torch.cuda
        event = cuda.Event(blocking=sleeps)
        event.record(cuda.current_stream() if stream is None else stream)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        cuda: Any = torch.cuda
        (cuda.current_stream() if stream is None else stream).wait_event(event)

    def finish(self, event: Any) -> None:
        event.synchronize()

    def copy(self, to: Tensor, source: Tensor, stream: Any) -> None:
        # one call of a copy engine for all layers: a row is a layer's tokens, a pitch its stride
        to_pitch, pitch = (x.stride(0) * x.itemsize for x in (to, source))
        rows = len(source), source[0].nbytes
        target, origin = (to.data_ptr(), to_pitch), (source.data_ptr(), pitch)
        try:
            self._calls.copy_rows(target, origin, rows, stream.cuda_stream)
        except RuntimeError as error:
            raise DeviceError(
                f"CUDA answered {error} to a copy between the host and the device"
            ) from error

    def lock(self, num_bytes: int) -> Tensor:
        # registered, not allocated by torch, which rounds up to a power of two
        memory = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
        self._lock(memory, "KV", "lower swap_kv_tokens or prefix_cache_tokens")
        return memory

    def lock_in_place(self, memory: Tensor) -> None:
        self._lock(memory, "experts", "free RAM, or raise the limit of locked memory")

    def _lock(self, memory: Tensor, what: str, cure: str) -> None:
        try:
            self._calls.lock(memory.data_ptr(), memory.nbytes)
        except RuntimeError as error:
            raise DeviceError(
                f"{memory.nbytes} bytes of RAM for {what} cannot be page-locked (CUDA answered "
                f"{error}); {cure}"
            ) from error

    def unlock(self, memory: Tensor) -> None:
        self._calls.unlock(memory.data_ptr())
