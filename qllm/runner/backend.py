"""The device side of a runner: `runner.cpu.CpuBackend`, or `qllm.cuda.backend.CudaBackend`.

The runner has the requests, the frames and the ops of programs. A backend places KV, computes
attention, products and samples, and decides which ops of a program run in one call.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from qllm.errors import DeviceError
from qllm.plan import CutRule, Row
from qllm.runner.compute import Compute
from qllm.runner.cuts import CutCosts
from qllm.runner.frame import Frame, RequestState
from qllm.runner.kv import RequestKV
from qllm.runner.layers.attention import Span, Step
from qllm.runner.layers.drivers import LayerDriver
from qllm.runner.layers.work import Work
from qllm.runner.protocol import Stop
from qllm.runner.residency import Residency
from qllm.runner.sampling.sampler import Sampler, Unread
from qllm.runner.sweep import Swept
from qllm.scheduler.blocks import BlockTables
from qllm.scheduler.program import Index, Program
from qllm.types import Grain, RequestId

OnSegment = Callable[[Program, Index, int, int], None]
OnLogits = Callable[[RequestId, int, Tensor], None]
OnHidden = Callable[[RequestId, int, Tensor], None]
"""Receiver of last hidden states [T, D], before the last norm: the request, and the index of the
first of the T tokens. Their memory may change later."""


class Asking(Protocol):
    """The part of a runner that its backend may read and call."""

    requests: dict[RequestId, RequestState]
    sampler: Sampler
    on_segment: OnSegment | None
    """Callback after every segment. If it is set, a backend stops after each segment."""
    on_logits: OnLogits | None
    """Callback that receives all logits. If it is set, rows are sampled on the host."""

    def new_step(self, frame: Frame, group: int, lo: int, hi: int) -> Step:
        """Return the inputs of the ATTN op over tokens [lo, hi) of a group of rows."""
        ...


class Backend(Protocol):
    """The device side of a runner.

    It has many methods because no other class depends on the device.
    """

    compute: Compute
    """Products and the output head. It is replaced while transformers' modules compute."""
    cuts: CutRule
    """Rule that cuts the ops of a program by rows."""
    costs: CutCosts
    """Nominal costs in nanoseconds, which set how much of an op runs at once."""

    @property
    def drivers(self) -> tuple[LayerDriver, ...]:
        """Drivers of all layers that compute at the moment."""
        ...

    @property
    def ranks(self) -> Sequence[Mapping[str, int]]:
        """`pid` and `weight_bytes` of each rank; empty without ranks."""
        ...

    @property
    def residency(self) -> Residency | None:
        """Slots for experts that come and go; None if all experts stay where they compute."""
        ...

    @property
    def is_native(self) -> bool:
        """True if this project's CPU kernels run every layer."""
        ...

    @property
    def why_inexact(self) -> str:
        """Reason that the bits of a token's KV depend on more than earlier tokens; "" if none."""
        ...

    @property
    def shares_blocks(self) -> bool:
        """True if KV lies in blocks that several requests may share."""
        ...

    @property
    def copy_bytes_per_ms(self) -> int:
        """Bytes of cached KV that are copied in a millisecond."""
        ...

    @property
    def move_token_ns(self) -> int:
        """Predicted nanoseconds to swap the KV of one token out, or back in."""
        ...

    @property
    def names(self) -> dict[str, str]:
        """Name of the implementation of each kind of work, for benchmark results."""
        ...

    @property
    def bytes_read(self) -> int:
        """Bytes of expert weights that the device counted as read; 0 if the runner counts them."""
        ...

    def enter(self) -> None:
        """Make the model's modules compute through this backend."""
        ...

    def close(self) -> None:
        """Restore the model's modules."""
        ...

    def as_reference(self) -> AbstractContextManager[None]:
        """Compute with transformers' modules inside the `with` block. No frame may be open."""
        ...

    def new_kv(self, capacity: int) -> RequestKV:
        """Return the KV of a request of at most `capacity` tokens."""
        ...

    def copy_ahead(self, kvs: Sequence[RequestKV]) -> None:
        """Copy some KV that may be swapped out later, a limited amount per step."""
        ...

    def new_tables(self) -> BlockTables:
        """Return tables over all KV blocks. No request may hold a block."""
        ...

    def new_step(self, spans: Sequence[Span], num_tokens: int) -> Step:
        """Return the inputs of an ATTN op over `num_tokens` tokens."""
        ...

    def new_work(self, layer: int, ids_TK: Tensor, grain: Grain) -> Work:
        """Return the work of the EXPERTS op of a layer whose router chose these experts."""
        ...

    def run_some(
        self, runner: Asking, frame: Frame, program: Program, at: Index, stop: Stop
    ) -> Swept | None:
        """Run ops from `at` until a stop may be due; return None if the first op must run alone.

        Args:
            runner: Calling runner.
            frame: Frame of the program.
            program: Program of the frame, or a shorter program with its first ops.
            at: First op.
            stop: Stop to poll.
        """
        ...

    def pace(self) -> None:
        """Wait until the device has nearly finished its queue. Called after every op."""
        ...

    @property
    def samples(self) -> bool:
        """True if the device can choose tokens with `sample`."""
        ...

    def sample(self, runner: Asking, logits_RV: Tensor, rows: Sequence[Row]) -> Unread | None:
        """Sample tokens on the device; return None if the host must sample them."""
        ...

    def forget(self, frame: Frame) -> None:
        """Drop the backend's data of a frame that ended or in which a row died."""
        ...

    def fault(self, error: Exception) -> DeviceError | None:
        """See `Runner.fault`."""
        ...
