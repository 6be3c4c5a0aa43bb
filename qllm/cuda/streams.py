"""Streams, events and copies: the CUDA calls for copies of KV. None of these calls waits.

In all arguments, the stream `None` is the one that computes.
"""

import mmap
from typing import Any, Protocol

import torch
from torch import Tensor

from qllm.cuda.calls import cuda_calls
from qllm.errors import DeviceError


class StreamApi(Protocol):
    """CUDA calls that `qllm.cuda.copies` needs."""

    def new_stream(self) -> Any:
        """Return a stream that runs parallel to the computing stream."""
        ...

    def record(self, stream: Any) -> Any:
        """Return an event that completes after all work launched on a stream so far."""
        ...

    def wait(self, stream: Any, event: Any) -> None:
        """Let work launched on a stream from now on run after an event."""
        ...

    def finish(self, event: Any) -> None:
        """Wait for an event. Only checkpoints and the end of the engine use this."""
        ...

    def copy(self, to: Tensor, source: Tensor, stream: Any) -> None:
        """Copy on a stream between the device and page-locked memory.

        Args:
            to: [L, T, G, D], each layer contiguous.
            source: Tensor of the same shape, each layer contiguous.
            stream: A stream of `new_stream`.
        """
        ...

    def lock(self, num_bytes: int) -> Tensor:
        """Return page-locked memory of the host. Call it at the start: the device may delay it.

        Raises:
            DeviceError: There is too little memory.
        """
        ...

    def unlock(self, memory: Tensor) -> None:
        """Free page-locked memory, which no copy may use any more."""
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

    def record(self, stream: Any) -> Any:
        cuda: Any = torch.cuda
        event = cuda.Event()
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
            raise DeviceError(f"CUDA answered {error} to a copy of KV") from error

    def lock(self, num_bytes: int) -> Tensor:
        # registered, not allocated by torch, which rounds up to a power of two
        memory = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
        try:
            self._calls.lock(memory.data_ptr(), num_bytes)
        except RuntimeError as error:
            raise DeviceError(
                f"{num_bytes} bytes of RAM for KV cannot be page-locked (CUDA answered {error}); "
                "lower swap_kv_tokens or prefix_cache_tokens"
            ) from error
        return memory

    def unlock(self, memory: Tensor) -> None:
        self._calls.unlock(memory.data_ptr())
