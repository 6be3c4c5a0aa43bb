"""What a runner computes with: `runner.cpu.CpuBackend`, or `qllm.cuda.backend.CudaBackend`.

The runner knows requests, frames and the ops of a program; a backend knows where KV lies, who
attends, multiplies and samples, and which ops of a program it can run in one go.
"""

from collections.abc import Callable, Sequence
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
from qllm.runner.sampling.sampler import Sampler, Unread
from qllm.runner.sweep import Swept
from qllm.scheduler.blocks import BlockTables
from qllm.scheduler.program import Index, Program
from qllm.types import Grain, RequestId

OnSegment = Callable[[Program, Index, int, int], None]
OnLogits = Callable[[RequestId, int, Tensor], None]


class Asking(Protocol):
    """The part of a runner that its backend may read and call."""

    requests: dict[RequestId, RequestState]
    sampler: Sampler
    on_segment: OnSegment | None
    """If set, the runner calls it after every segment, and a backend stops after each one."""
    on_logits: OnLogits | None
    """If set, the runner shows it all logits, and rows are sampled on the host."""

    def new_step(self, frame: Frame, group: int, lo: int, hi: int) -> Step:
        """What the ATTN op over tokens [lo, hi) of a group attends."""
        ...


class Backend(Protocol):
    """Everything that depends on the device; it has many methods because nothing else does."""

    compute: Compute
    """Products and the head; replaced while transformers' own modules compute."""
    cuts: CutRule
    """Where programs are cut."""
    costs: CutCosts
    """Nominal nanoseconds; they say how much of an op runs at once."""

    @property
    def drivers(self) -> tuple[LayerDriver, ...]:
        """The drivers of all layers, as they compute now."""
        ...

    @property
    def is_native(self) -> bool:
        """Whether our CPU kernels run every layer."""
        ...

    @property
    def why_inexact(self) -> str:
        """Why the bits of a token's KV depend on more than the tokens up to it; "" if not."""
        ...

    @property
    def shares_blocks(self) -> bool:
        """Whether KV lies in blocks that several requests may hold."""
        ...

    @property
    def copy_bytes_per_ms(self) -> int:
        """Bytes of kept KV that are copied in a millisecond."""
        ...

    @property
    def move_token_ns(self) -> int:
        """Predicted time to swap the KV of one token out, or back in."""
        ...

    @property
    def names(self) -> dict[str, str]:
        """What computes what, for results."""
        ...

    @property
    def bytes_read(self) -> int:
        """Bytes of expert weights that the device counted as read; 0 where the runner counts."""
        ...

    def enter(self) -> None:
        """Make the model's modules compute our way."""
        ...

    def close(self) -> None:
        """Give the model's modules back what they had."""
        ...

    def as_reference(self) -> AbstractContextManager[None]:
        """Compute with transformers' own modules for a while, with no frame open."""
        ...

    def new_kv(self, capacity: int) -> RequestKV:
        """The KV of a request of at most so many tokens."""
        ...

    def copy_ahead(self, kvs: Sequence[RequestKV]) -> None:
        """Copy some KV out already that may have to be swapped out, a bounded share per step."""
        ...

    def new_tables(self) -> BlockTables:
        """Return tables over all KV blocks; no request may hold one."""
        ...

    def new_step(self, spans: Sequence[Span], num_tokens: int) -> Step:
        """What an ATTN op over so many tokens attends."""
        ...

    def new_work(self, layer: int, ids_TK: Tensor, grain: Grain) -> Work:
        """The EXPERTS op of a layer whose router chose these experts."""
        ...

    def run_some(
        self, runner: Asking, frame: Frame, program: Program, at: Index, stop: Stop
    ) -> Swept | None:
        """Run ops from `at` until a stop may be due; None if the first must run by itself.

        Args:
            runner: Who asks.
            frame: The program's frame.
            program: The frame's, or one with the first of its ops.
            at: The first op.
            stop: Who may ask to stop.
        """
        ...

    def pace(self) -> None:
        """Wait until the device is not far behind; called after every op."""
        ...

    @property
    def samples(self) -> bool:
        """True if the device can choose tokens itself, with `sample`."""
        ...

    def sample(self, runner: Asking, logits_RV: Tensor, rows: Sequence[Row]) -> Unread | None:
        """Sample on the device; None where the host has to."""
        ...

    def forget(self, frame: Frame) -> None:
        """Drop what is kept of a frame, because it ended or one of its rows died."""
        ...

    def fault(self, error: Exception) -> DeviceError | None:
        """See `Runner.fault`."""
        ...
