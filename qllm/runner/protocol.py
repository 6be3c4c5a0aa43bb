"""What the engine asks of a runner, and how a runner is stopped."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from qllm.errors import DeviceError
from qllm.plan import CutRule, ModelShape
from qllm.scheduler.program import Index, OpKind, Program
from qllm.types import RequestId, Sampled, SamplingParams

NEVER = 1 << 62
"""`kNever` of course.h: more tasks, or nanoseconds, than there are."""


class Watch(NamedTuple):
    """A 64-bit word that changes when a stop word may have gone down."""

    address: int
    seen: int
    """While the watched word has this value, the stop word is as it was read after `watch()`."""
    num_tasks: int = NEVER
    """Most tasks inside ops before the code returns anyhow: how checks stop it inside ops."""
    look_ns: int = NEVER
    """Time after which it returns anyhow, because only `word` itself sees some of the arrivals."""


class Stop(Protocol):
    """What a runner polls at a boundary. Reading `word` is one load.

    A stop on the monotonic clock may have a method `watch() -> Watch`, for code that polls without
    Python: it reads `watch()`, then `word`, and looks again when the watched word has changed.
    """

    stop_at_ns: int | None
    """Engine time at which a slice ends."""

    @property
    def word(self) -> int:
        """Smallest priority among requests that arrived and were not yet seen by the scheduler."""
        ...

    def now_ns(self) -> int:
        """The engine's clock, read only when a slice was given."""
        ...


class Segments(Protocol):
    """Lengths of the work between boundaries, as the runner saw them."""

    longest_ns: int
    longest_op: OpKind | None


@dataclass(slots=True)
class Longest:
    """The longest segment so far: what most runners keep as `Segments`."""

    longest_ns: int = 0
    longest_op: OpKind | None = None


class Runner(Protocol):
    """Executes programs. All tensors live here; the engine keeps (program, index) pairs.

    The runner mirrors, per request, the token ids and how far KV is committed. It is called
    from one thread.
    """

    shape: ModelShape
    segments: Segments

    @property
    def cuts(self) -> CutRule:
        """Where programs are cut."""
        ...

    def add(
        self,
        request_id: RequestId,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        num_prompt_tokens: int,
        max_total_tokens: int,
    ) -> None:
        """Register a request. `token_ids` may hold output already (a restored request)."""
        ...

    def keepable(self, request_id: RequestId, num_tokens: int, num_prompt_tokens: int) -> int:
        """How many of the first tokens of a prompt keep their KV if it goes on in another way.

        Args:
            request_id: Whose; it has no output.
            num_tokens: Tokens, of the first, that stay as they are.
            num_prompt_tokens: Of the new prompt.

        Returns:
            `num_tokens`, or 0 where KV depends on more than the tokens before it, or cannot be cut.
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
        """Give a request without output another prompt.

        Args:
            request_id: Whose.
            token_ids: The prompt.
            sampling: In place of what it had.
            num_kept: Tokens, of the first, whose KV stays: those of its row under way too.
            table: KV blocks that it keeps, the first of those it has.
        """
        ...

    def remove(self, request_id: RequestId) -> None:
        """Forget a request that is in no frame; its KV is not read or written any more."""
        ...

    def evict(self, request_id: RequestId) -> None:
        """Forget the KV of a request that is in no frame; its tokens stay."""
        ...

    def swap_out(self, request_id: RequestId) -> None:
        """Move the KV of a request out of its blocks, committed or not.

        If a frame has a row of it, it is the only row; the frame runs when the KV is back.
        """
        ...

    def swap_in(self, request_id: RequestId, table: Sequence[int]) -> None:
        """Take up KV that was moved out, in these blocks."""
        ...

    def copy_ahead(self, request_ids: Sequence[RequestId]) -> None:
        """Copy finished KV of requests out while others compute, so that less moves in a swap."""
        ...

    def accept(self, program: Program, tables: Sequence[Sequence[int]]) -> None:
        """Make the frame of a program.

        Args:
            program: The program.
            tables: Per row all KV blocks of its request, which have room up to `row.hi`. Whose
                block is whose is the scheduler's word; a runner addresses them, and hands out
                none.

        Rows that start above layer 0 continue from the hidden states that `split` or `finish`
        kept for their request.
        """
        ...

    def run(self, program: Program, start: Index, stop: Stop) -> Index:
        """Execute ops from `start` until done or stopped; return the first op not done.

        It polls at the boundaries that `program.grain` allows, *after* doing at least one op or
        unit, and stops if `stop.word < program.stop_below` or `stop.stop_at_ns` has passed.
        An exception leaves the frame unusable: `drop` it.
        """
        ...

    def finish(self, program: Program) -> list[Sampled]:
        """Commit a program that ran to its end and let go of its frame.

        Rows that reached the last layer commit their KV up to `hi`, and sampled tokens are
        appended to the request's ids; rows that left earlier keep their hidden states.
        """
        ...

    def split(self, program: Program, index: Index) -> None:
        """Let go of a frame parked between layers; each live row keeps its hidden states."""
        ...

    def leave(self, program: Program, request_id: RequestId, at: Index) -> None:
        """Take a row out of a parked frame: its request keeps its hidden states.

        Args:
            program: The program of the frame.
            request_id: Whose row; it is dead in the frame from now on.
            at: The start of the layer that the frame is in.
        """
        ...

    def kill(self, program: Program, request_id: RequestId) -> None:
        """Mark a row of a parked frame dead: it is skipped from now on and samples nothing."""
        ...

    def drop(self, program: Program) -> None:
        """Let go of a frame without committing anything. Unknown frames are ignored."""
        ...

    def fault(self, error: Exception) -> DeviceError | None:
        """The fault of the device behind an error; None where the next program can run."""
        ...
