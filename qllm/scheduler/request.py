"""A request as the scheduler sees it: counters, no token ids, no tensors.

    tokens   [0 ........ num_computed_tokens) [ ....... num_tokens) ... max_total_tokens
                         KV exists             known, still owed

A request is open while more of its prompt may come: it computes what is known and samples nothing.

A request is decoding when exactly its last known token is owed and it has produced output;
everything else is prefill (also the recompute after an eviction, and the first step after its KV
was swapped out).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from qllm.errors import InvariantError
from qllm.types import NS_PER_MS, FrameId, Frontier, RequestId, RequestStatus, Slo


@dataclass(slots=True, kw_only=True)
class Request:
    """Mutable state of one request. Owned by the scheduler; policies only read it."""

    request_id: RequestId
    priority: int
    arrival_ns: int
    num_prompt_tokens: int
    max_tokens: int
    slo: Slo = field(default_factory=Slo)
    num_tokens: int = 0
    """Known tokens: the prompt and the output so far."""
    num_computed_tokens: int = 0
    """Tokens whose KV exists in every layer. Moves only when the last layer is reached (I3)."""
    num_found_tokens: int = 0
    """Tokens whose KV the prefix cache has; while it holds no blocks, all its computed ones."""
    found_pages: Sequence[bytes] = ()
    """Names of the KV pages of those tokens, where blocks are shared."""
    num_shared_tokens: int = 0
    """Tokens of those whose blocks, the first of its table, it took by reference."""
    num_swapped_tokens: int = 0
    """Tokens whose KV is swapped out: all its written ones; 0 while it holds blocks."""
    block_table: list[int] = field(default_factory=list)
    """Blocks held, in token order."""
    frontier: Frontier | None = None
    """Set while a row is part-way through the layers."""
    frame_id: FrameId | None = None
    """The parked frame that holds the row, if any."""
    served_ns: int = 0
    """Time of all runs that contained a row of it."""
    last_progress_ns: int = 0
    """End of the last run that contained a row of it; admission counts as progress."""
    admitted_ns: int = 0
    """When it was last given KV blocks, holding none."""
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    evictions: int = 0
    preemptions: int = 0
    failures: int = 0
    """Runs of it that raised."""
    owes_prompt: bool = False
    """Log-probabilities of the prompt are asked for; they come with the first token."""
    finished: bool = False
    is_paused: bool = False
    """Its caller has paused it: nobody plans it."""
    paused_ns: int = 0
    """When it was paused last."""
    is_open: bool = False
    """More of its prompt may come."""
    gave_way: bool = False
    """It lost its KV while it waited for more of its prompt; it computes when that comes."""
    revised_ns: int = 0
    """When the last piece of its prompt came; its arrival if it came whole."""

    def __post_init__(self) -> None:
        self.num_tokens = self.num_tokens or self.num_prompt_tokens
        self.revised_ns = self.revised_ns or self.arrival_ns

    @property
    def num_output_tokens(self) -> int:
        """Tokens produced so far."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens whose KV does not exist."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_written_tokens(self) -> int:
        """Tokens whose KV exists in some layer: those of the row under way count."""
        return self.num_computed_tokens if self.frontier is None else self.frontier.hi

    @property
    def max_total_tokens(self) -> int:
        """Most tokens it can ever have; the last one needs no KV."""
        return self.num_prompt_tokens + self.max_tokens

    @property
    def is_decoding(self) -> bool:
        """Owes exactly its last token, has produced output, and its KV is not swapped out."""
        return (
            self.num_tokens - self.num_computed_tokens == 1
            and self.num_tokens > self.num_prompt_tokens
            and not self.num_swapped_tokens
        )

    @property
    def is_admitted(self) -> bool:
        """Holds KV."""
        return bool(self.block_table)

    @property
    def is_idle(self) -> bool:
        """Waits for the next piece of its prompt, with nothing to compute before it comes."""
        is_done = self.num_computed_tokens == self.num_tokens
        return self.is_open and (is_done or self.gave_way)

    @property
    def is_hidden(self) -> bool:
        """Nobody plans it now."""
        return self.is_paused or self.is_idle

    @property
    def deadline_ns(self) -> int | None:
        """When its next token is due by its own targets; None without a target.

        The time to the first token of a prompt that was open counts from its last piece.
        """
        if self.last_token_ns is None:
            ttft = None if self.is_open else self.slo.ttft_ms
            return None if ttft is None else self.revised_ns + int(ttft * NS_PER_MS)
        tpot = self.slo.tpot_ms
        return None if tpot is None else self.last_token_ns + int(tpot * NS_PER_MS)

    @property
    def status(self) -> RequestStatus:
        """Where it is."""
        if self.finished:
            return RequestStatus.FINISHED
        if self.is_paused:
            return RequestStatus.PAUSED
        if self.is_idle:
            return RequestStatus.OPEN
        if self.frame_id is not None:
            return RequestStatus.PARKED
        return RequestStatus.RUNNING if self.block_table else RequestStatus.WAITING

    def samples_at(self, hi: int) -> bool:
        """Whether a row of its tokens up to `hi` chooses its next token."""
        return hi == self.num_tokens and not self.is_open

    def park(self, frame_id: FrameId, frontier: Frontier) -> None:
        """Its row stopped at a boundary and stays in the frame."""
        self.frame_id = frame_id
        self.frontier = frontier

    def leave_frame(self, frontier: Frontier) -> None:
        """Its row left the frame between two layers and keeps its hidden states."""
        self.frame_id = None
        self.frontier = frontier

    def commit(self, hi: int, now_ns: int, sampled: bool) -> None:
        """Its row [num_computed_tokens, hi) reached the last layer."""
        if not self.num_computed_tokens < hi <= self.num_tokens:
            raise InvariantError(
                f"request {self.request_id}: commit to {hi} outside "
                f"({self.num_computed_tokens}, {self.num_tokens}]"
            )
        self.frame_id = self.frontier = None
        self.num_computed_tokens = hi
        if sampled:
            if hi != self.num_tokens:
                raise InvariantError(f"request {self.request_id}: sampled before its last token")
            self.num_tokens += 1
            self.owes_prompt = False
            self.last_token_ns = now_ns
            if self.first_token_ns is None:
                self.first_token_ns = now_ns

    def find(self, num_tokens: int, pages: Sequence[bytes] = ()) -> None:
        """The prefix cache has its first tokens; it has no KV, in blocks or swapped out."""
        self.num_found_tokens = self.num_computed_tokens = num_tokens
        self.found_pages, self.num_swapped_tokens = pages, 0

    def swap_out(self) -> None:
        """Its KV moved out, that of the row under way too, which it keeps."""
        self.frame_id = None
        self.found_pages, self.num_shared_tokens = (), 0
        self.num_swapped_tokens = self.num_written_tokens

    def reset(self) -> None:
        """Everything computed is lost: it starts again from its first token."""
        self.frame_id = self.frontier = None
        self.num_computed_tokens = self.num_found_tokens = self.num_swapped_tokens = 0
        self.found_pages, self.num_shared_tokens = (), 0

    def cut_back(self, num_tokens: int) -> None:
        """Its prompt changed after `num_tokens` tokens: no more than those stay computed.

        A row under way that goes further is lost; the caller has it die.
        """
        if self.frontier is not None and self.frontier.hi > num_tokens:
            self.frame_id = self.frontier = None
        self.num_computed_tokens = min(self.num_computed_tokens, num_tokens)
        self.num_found_tokens = min(self.num_found_tokens, self.num_computed_tokens)
        self.num_shared_tokens = min(self.num_shared_tokens, self.num_computed_tokens)
        if self.num_swapped_tokens:
            self.num_swapped_tokens = self.num_written_tokens

    def abort_row(self) -> None:
        """The row under way is lost; committed tokens stay."""
        self.frame_id = self.frontier = None
