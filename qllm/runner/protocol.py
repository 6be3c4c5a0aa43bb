"""The interface of a runner for the engine, and the way to stop a runner."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from qllm.errors import DeviceError
from qllm.plan import CutRule, ModelShape
from qllm.scheduler.program import Index, OpKind, Program
from qllm.types import RequestId, Sampled, SamplingParams

NEVER = 1 << 62
"""`kNever` in course.h: more tasks, or nanoseconds, than there ever are."""


class Watch(NamedTuple):
    """A 64-bit word that changes when a stop word may have decreased."""

    address: int
    seen: int
    """Value of the watched word at which the stop word equals the one read after `watch()`."""
    num_tasks: int = NEVER
    """Most tasks inside ops before the code returns in any case; set by checks to stop in ops."""
    look_ns: int = NEVER
    """Nanoseconds after which it returns in any case, because only `word` sees some arrivals."""


class Stop(Protocol):
    """A stop that a runner polls at a boundary. Reading `word` is one load.

    A stop on the monotonic clock may have a method `watch() -> Watch`, for code that polls without
    Python. The code reads `watch()`, then `word`, and reads both again when the watched word
    changes.
    """

    stop_at_ns: int | None
    """Engine time in nanoseconds at which a slice ends; None without a slice."""

    @property
    def word(self) -> int:
        """Smallest priority among arrived requests that the scheduler has not seen yet."""
        ...

    def now_ns(self) -> int:
        """Return the engine's time in nanoseconds; called only if there is a slice."""
        ...


class Segments(Protocol):
    """The lengths of the work between boundaries, as the runner measured them."""

    longest_ns: int
    longest_op: OpKind | None


@dataclass(slots=True)
class Longest:
    """The longest segment so far; most runners keep it as `Segments`."""

    longest_ns: int = 0
    longest_op: OpKind | None = None


class Runner(Protocol):
    """The executor of programs. It holds all tensors; the engine keeps (program, index) pairs.

    The runner mirrors, per request, the token ids and the number of committed KV tokens. It is
    called from one thread.
    """

    shape: ModelShape
    segments: Segments

    @property
    def cuts(self) -> CutRule:
        """Rule by which programs are cut."""
        ...

    def add(
        self,
        request_id: RequestId,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        num_prompt_tokens: int,
        max_total_tokens: int,
    ) -> None:
        """Register a request. `token_ids` may already contain output (a restored request)."""
        ...

    def keepable(self, request_id: RequestId, num_tokens: int, num_prompt_tokens: int) -> int:
        """Return the number of leading prompt tokens that keep their KV if the rest changes.

        Args:
            request_id: Id of the request, which has no output.
            num_tokens: Number of leading tokens that do not change.
            num_prompt_tokens: Length of the new prompt, in tokens.

        Returns:
            `num_tokens`, or 0 if KV depends on more than the tokens before it, or cannot be cut.
        """
        ...

    def revise(
        self,
        request_id: RequestId,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        num_kept: int,
        table: Sequence[int],
    ) -> None:
        """Replace the prompt of a request without output.

        Args:
            request_id: Id of the request.
            token_ids: New prompt.
            sampling: New sampling parameters.
            num_kept: Number of leading tokens whose KV stays, including those of its row in
                progress.
            table: KV blocks that it keeps, the first of its blocks.
        """
        ...

    def remove(self, request_id: RequestId) -> None:
        """Remove a request that is in no frame; its KV is not read or written after that."""
        ...

    def evict(self, request_id: RequestId) -> None:
        """Drop the KV of a request that is in no frame; its tokens stay."""
        ...

    def swap_out(self, request_id: RequestId) -> None:
        """Move the KV of a request out of its blocks, committed or not.

        If a frame has a row of the request, it is the only row; the frame runs when the KV is back.
        """
        ...

    def swap_in(self, request_id: RequestId, table: Sequence[int]) -> None:
        """Move KV that was swapped out into these blocks."""
        ...

    def copy_ahead(self, request_ids: Sequence[RequestId]) -> None:
        """Copy finished KV of requests while others compute, so that a later swap copies less."""
        ...

    def accept(self, program: Program, tables: Sequence[Sequence[int]]) -> None:
        """Make the frame of a program.

        Args:
            program: Program to run.
            tables: KV blocks of each row's request, with room up to `row.hi`. The scheduler assigns
                the blocks; a runner only addresses them.

        Rows that start above layer 0 continue from the hidden states that `split` or `finish` saved
        for their request.
        """
        ...

    def run(self, program: Program, start: Index, stop: Stop) -> Index:
        """Execute ops from `start` until done or stopped; return the first op not done.

        It polls at the boundaries that `program.grain` allows, *after* doing at least one op or
        unit, and stops if `stop.word < program.stop_below` or `stop.stop_at_ns` has passed. After
        an exception the frame is unusable: `drop` it.
        """
        ...

    def finish(self, program: Program) -> list[Sampled]:
        """Commit a program that ran to its end and free its frame.

        Rows that reached the last layer commit their KV up to `hi`, and sampled tokens are appended
        to the request's ids. For rows that left earlier, their hidden states are saved.
        """
        ...

    def split(self, program: Program, index: Index) -> None:
        """Free a frame parked between layers; the hidden states of each live row are saved."""
        ...

    def leave(self, program: Program, request_id: RequestId, at: Index) -> None:
        """Remove a row from a parked frame and save its hidden states for its request.

        Args:
            program: Program of the frame.
            request_id: Id of the row's request; the row is dead in the frame from now on.
            at: Start of the layer that the frame is in.
        """
        ...

    def kill(self, program: Program, request_id: RequestId) -> None:
        """Mark a row of a parked frame as dead: it is skipped from now on and samples no token."""
        ...

    def drop(self, program: Program) -> None:
        """Free a frame without committing anything. Unknown frames are ignored."""
        ...

    def fault(self, error: Exception) -> DeviceError | None:
        """Return the device fault behind an error; None if the next program can run."""
        ...
