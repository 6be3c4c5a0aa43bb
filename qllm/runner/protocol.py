"""The interface of a runner for the engine, and the way to stop a runner."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from qllm.errors import DeviceError
from qllm.plan import CutRule, ModelShape
from qllm.scheduler.program import Index, OpKind, Program
from qllm.types import RequestId, Sampled, SamplingParams

NEVER = 1 << 62
"""`kNever` in course.h, a number of tasks or nanoseconds that no run reaches."""


class Watch(NamedTuple):
    """A 64-bit word that changes whenever the stop word may have decreased."""

    address: int
    seen: int
    """Value of the watched word for which the stop word read after `watch()` is current."""
    num_tasks: int = NEVER
    """Most tasks inside ops before the native code returns in any case. Checks set it to stop in
    ops."""
    look_ns: int = NEVER
    """Nanoseconds after which the native code returns in any case. Some arrivals change only
    `word`, which native code cannot read."""


class Stop(Protocol):
    """A stop that a runner polls at a boundary. Reading `word` is one load.

    A stop on the monotonic clock may have a method `watch() -> Watch`, for native code that polls
    without Python. The runner reads `watch()`, then `word`, and reads both again when the watched
    word changes.
    """

    stop_at_ns: int | None
    """Engine time in nanoseconds at which the program's time slice ends; None without a slice."""

    @property
    def word(self) -> int:
        """Smallest priority among arrived requests that the scheduler has not seen yet."""
        ...

    def now_ns(self) -> int:
        """Return the engine's time in nanoseconds. Called only if the program has a time slice."""
        ...


class Segments(Protocol):
    """The measured lengths of a runner's segments, which are the work between boundaries."""

    longest_ns: int
    longest_op: OpKind | None


@dataclass(slots=True)
class Longest:
    """The longest segment so far. Most runners use this class as `Segments`."""

    longest_ns: int = 0
    longest_op: OpKind | None = None


class Runner(Protocol):
    """The executor of programs.

    The runner holds all tensors. The engine keeps (program, index) pairs.

    The runner has a copy of the token ids and of the number of committed KV tokens of each request.
    One thread calls the runner.
    """

    shape: ModelShape
    segments: Segments

    @property
    def cuts(self) -> CutRule:
        """Rule that cuts the ops of a program by rows."""
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
        """Return the number of first prompt tokens that keep their KV if the later tokens change.

        Args:
            request_id: Id of a request without output.
            num_tokens: Number of first tokens that do not change.
            num_prompt_tokens: Length of the new prompt, in tokens.

        Returns:
            `num_tokens`, or 0 if KV depends on more than earlier tokens, or cannot be cut.
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
            num_kept: Number of first tokens whose KV stays, including tokens of the request's
                running row.
            table: KV blocks that the request keeps: its first blocks.
        """
        ...

    def token_ids(self, request_id: RequestId) -> list[int]:
        """Return the prompt and output tokens of a request."""
        ...

    def forced(self, request_id: RequestId, outputs: Sequence[int], most: int) -> Sequence[int]:
        """Return the tokens that a request's grammar forces after the tokens of its answer."""
        ...

    def draft(self, request_id: RequestId, token_ids: Sequence[int]) -> None:
        """Set the drafted tokens after a request's known tokens.

        The request's next row verifies the first of them, as far as the row reaches.
        """
        ...

    def guess(self, request_id: RequestId) -> int | None:
        """Return the token that a request's last draft row chose; None if it chose none."""
        ...

    def remove(self, request_id: RequestId) -> None:
        """Remove a request that is in no frame. Its KV is not read or written any more."""
        ...

    def evict(self, request_id: RequestId) -> None:
        """Drop the KV of a request that is in no frame. The token ids stay."""
        ...

    def swap_out(self, request_id: RequestId) -> None:
        """Move the KV of a request, committed or not, out of its blocks.

        If a frame has a row of the request, the frame has no other row. The frame runs again after
        the KV is swapped in.
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
                the blocks. A runner only reads and writes in them.

        Rows that start above layer 0 continue from hidden states that `split` or `finish` saved for
        the row's request.
        """
        ...

    def run(self, program: Program, start: Index, stop: Stop) -> Index:
        """Execute ops from `start` until the end or a stop; return the first op that is not done.

        The runner polls at the boundaries that `program.grain` allows, *after* at least one op or
        work unit. It stops if `stop.word < program.stop_below` or `stop.stop_at_ns` has passed.
        After an exception the frame is unusable. The caller calls `drop` then.
        """
        ...

    def finish(self, program: Program) -> list[Sampled]:
        """Commit a program that ran to its end and free its frame.

        Rows that reached the last layer commit their KV up to `hi`, without the KV of drafted
        tokens that the model did not choose. Sampled tokens are appended to the request's ids. The
        hidden states of rows that stopped at an earlier layer are saved. Those of a draft row are
        added to those of the draft rows before it. Its token is no token of the answer (`guess`).

        Returns:
            The sampled tokens, row by row. A row that verifies drafted tokens has several: those
            that the model chose too, and one more.
        """
        ...

    def split(self, program: Program, index: Index) -> None:
        """Free a frame parked between layers, and save the hidden states of each live row."""
        ...

    def leave(self, program: Program, request_id: RequestId, at: Index) -> None:
        """Remove a row from a parked frame and save its hidden states for its request.

        Args:
            program: Program of the frame.
            request_id: Id of the row's request. The row is dead in the frame from now on.
            at: Start of the layer that the frame is in.
        """
        ...

    def kill(self, program: Program, request_id: RequestId) -> None:
        """Mark a row of a parked frame as dead.

        The row is skipped from now on and gets no token.
        """
        ...

    def drop(self, program: Program) -> None:
        """Free a frame without committing anything. Unknown frames are ignored."""
        ...

    def fault(self, error: Exception) -> DeviceError | None:
        """Return the device fault behind an error; None if the next program can run."""
        ...
