"""A request as the scheduler sees it: counters, no token ids, no tensors.

    tokens   [0 ........ num_computed_tokens) [ ....... num_tokens) ... max_total_tokens
                         KV exists             known, still owed

A request is open while its prompt streams: it computes the known tokens and samples nothing.

A request is decoding if it has produced output and owes exactly its last known token. All other
work is prefill, including the recompute after an eviction and the first step after a swap.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from qllm.errors import InvariantError
from qllm.types import NS_PER_MS, FrameId, Frontier, RequestId, RequestStatus, Slo


@dataclass(slots=True, kw_only=True)
class Request:
    """Mutable state of one request. The scheduler owns it; policies only read it."""

    request_id: RequestId
    priority: int
    arrival_ns: int
    num_prompt_tokens: int
    max_tokens: int
    slo: Slo = field(default_factory=Slo)
    num_tokens: int = 0
    """Number of known tokens: the prompt and the output so far."""
    num_computed_tokens: int = 0
    """Tokens whose KV exists in every layer. It grows only when a row ends its last layer (I3)."""
    num_found_tokens: int = 0
    """Tokens whose KV the prefix cache has: all computed ones while the request holds no blocks."""
    found_pages: Sequence[bytes] = ()
    """Names of the KV pages of these tokens, where blocks are shared."""
    num_shared_tokens: int = 0
    """Found tokens whose blocks, the first of its table, the request shares."""
    num_swapped_tokens: int = 0
    """Tokens whose KV is swapped out: all written ones, or 0 while the request holds blocks."""
    block_table: list[int] = field(default_factory=list)
    """Blocks held, in token order."""
    frontier: Frontier | None = None
    """Range and layer of a row that is part-way through the layers; None without one."""
    frame_id: FrameId | None = None
    """The parked frame that holds the row, if any."""
    served_ns: int = 0
    """Total time of runs with a row of this request."""
    last_progress_ns: int = 0
    """End of the last run with a row of this request; admission counts as progress."""
    admitted_ns: int = 0
    """Time when it last took KV blocks while it held none."""
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    evictions: int = 0
    preemptions: int = 0
    failures: int = 0
    """Number of its runs that raised."""
    owes_prompt: bool = False
    """True while requested log-probabilities of the prompt are due; they come with token one."""
    finished: bool = False
    is_paused: bool = False
    """True while its caller has paused it: it is not planned."""
    paused_ns: int = 0
    """Time of the last pause."""
    is_open: bool = False
    """True while its prompt streams: more pieces may come."""
    gave_way: bool = False
    """True if it lost its KV while it waited for a piece; it computes again with the next piece."""
    revised_ns: int = 0
    """Time of the last piece of its prompt; the arrival if the prompt came whole."""

    def __post_init__(self) -> None:
        self.num_tokens = self.num_tokens or self.num_prompt_tokens
        self.revised_ns = self.revised_ns or self.arrival_ns

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens produced so far."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Number of known tokens without KV."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_written_tokens(self) -> int:
        """Number of tokens whose KV exists in some layer, including those of the row under way."""
        return self.num_computed_tokens if self.frontier is None else self.frontier.hi

    @property
    def max_total_tokens(self) -> int:
        """Most tokens it can ever have. The last one needs no KV."""
        return self.num_prompt_tokens + self.max_tokens

    @property
    def is_decoding(self) -> bool:
        """True if it has output, owes exactly its last token, and is not swapped out."""
        return (
            self.num_tokens - self.num_computed_tokens == 1
            and self.num_tokens > self.num_prompt_tokens
            and not self.num_swapped_tokens
        )

    @property
    def is_admitted(self) -> bool:
        """True if it holds KV blocks."""
        return bool(self.block_table)

    @property
    def is_idle(self) -> bool:
        """True if it has nothing to compute before the next piece of its prompt comes."""
        is_done = self.num_computed_tokens == self.num_tokens
        return self.is_open and (is_done or self.gave_way)

    @property
    def is_hidden(self) -> bool:
        """True if the scheduler does not plan it now."""
        return self.is_paused or self.is_idle

    @property
    def deadline_ns(self) -> int | None:
        """Time when its next token is due by its own targets; None without a target.

        The time to the first token of a streaming prompt counts from its last piece.
        """
        if self.last_token_ns is None:
            ttft = None if self.is_open else self.slo.ttft_ms
            return None if ttft is None else self.revised_ns + int(ttft * NS_PER_MS)
        tpot = self.slo.tpot_ms
        return None if tpot is None else self.last_token_ns + int(tpot * NS_PER_MS)

    @property
    def status(self) -> RequestStatus:
        """Its state, as callers see it."""
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
        """Return True if a row of its tokens up to `hi` samples its next token."""
        return hi == self.num_tokens and not self.is_open

    def park(self, frame_id: FrameId, frontier: Frontier) -> None:
        """Note that its row stopped at a boundary and stays in the frame."""
        self.frame_id = frame_id
        self.frontier = frontier

    def leave_frame(self, frontier: Frontier) -> None:
        """Note that its row left the frame between two layers and keeps its hidden states."""
        self.frame_id = None
        self.frontier = frontier

    def commit(self, hi: int, now_ns: int, sampled: bool) -> None:
        """Commit its row [num_computed_tokens, hi), which finished the last layer."""
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
        """Note that the prefix cache has its first tokens. It holds no KV, in blocks or swapped."""
        self.num_found_tokens = self.num_computed_tokens = num_tokens
        self.found_pages, self.num_swapped_tokens = pages, 0

    def swap_out(self) -> None:
        """Note that its KV is swapped out, including that of the row under way, which stays."""
        self.frame_id = None
        self.found_pages, self.num_shared_tokens = (), 0
        self.num_swapped_tokens = self.num_written_tokens

    def reset(self) -> None:
        """Drop everything computed: it starts again from its first token."""
        self.frame_id = self.frontier = None
        self.num_computed_tokens = self.num_found_tokens = self.num_swapped_tokens = 0
        self.found_pages, self.num_shared_tokens = (), 0

    def cut_back(self, num_tokens: int) -> None:
        """Drop what was computed after the first `num_tokens` tokens, where its prompt changed.

        A row under way that goes further is dropped; the caller removes it from its frame.
        """
        if self.frontier is not None and self.frontier.hi > num_tokens:
            self.frame_id = self.frontier = None
        self.num_computed_tokens = min(self.num_computed_tokens, num_tokens)
        self.num_found_tokens = min(self.num_found_tokens, self.num_computed_tokens)
        self.num_shared_tokens = min(self.num_shared_tokens, self.num_computed_tokens)
        if self.num_swapped_tokens:
            self.num_swapped_tokens = self.num_written_tokens

    def abort_row(self) -> None:
        """Drop the row under way; committed tokens stay."""
        self.frame_id = self.frontier = None
