"""A request as the scheduler sees it: counters, no token ids, no tensors.

    tokens   [0 ........ num_computed_tokens) [ ....... num_tokens) ... max_total_tokens
                         KV exists             known, to be computed

A request is open while its prompt streams. It computes the known tokens, and gets no new token.

A request is decoding if it has output, and only its last known token is not computed. All other
work is prefill, including recomputation after an eviction and the first step after a swap.

A decoding request may have drafted tokens after its known tokens. Its next row verifies the drafted
tokens: the model samples a token at each position, up to the first that differs from the draft.

The model may draft by itself (`exit_layer`). Draft rows take one token each through the first
layers, and the head chooses the next token there. Then one row takes all of these tokens through
the other layers, and verifies the drafts. With n known tokens, E layers, and two drafts:

    draft rows    [n - 1, n) to layer E    [n, n + 1) to layer E      [n + 1, n + 2) to layer E
    frontier      [n - 1, n), layer E      [n - 1, n + 1), layer E    [n - 1, n + 2), layer E
    then          the row [n - 1, n + 2) from layer E on
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from qllm.errors import InvariantError
from qllm.plan import Row
from qllm.types import NS_PER_MS, FrameId, Frontier, RequestId, RequestStatus, Slo


@dataclass(slots=True, kw_only=True)
class Request:
    """Mutable state of one request. The scheduler owns the state; policies only read it."""

    request_id: RequestId
    priority: int
    arrival_ns: int
    num_prompt_tokens: int
    max_tokens: int
    slo: Slo = field(default_factory=Slo)
    num_tokens: int = 0
    """Number of known tokens: the prompt and the output so far."""
    num_drafts: int = 0
    """Number of drafted tokens that the next row verifies. They are no known tokens."""
    exit_layer: int = 0
    """Number of layers of the draft rows; 0 if the request has none."""
    most_drafts: int = 0
    """Most tokens that the draft rows choose."""
    num_computed_tokens: int = 0
    """Tokens whose KV exists in every layer. Only a row that ends its last layer adds tokens
    (I3)."""
    num_found_tokens: int = 0
    """Tokens whose KV the prefix cache has: all computed tokens while the request has no blocks."""
    found_pages: Sequence[bytes] = ()
    """Names of the KV pages of the found tokens, if blocks can be shared."""
    num_shared_tokens: int = 0
    """Found tokens whose blocks the request shares: the first blocks of its table."""
    num_swapped_tokens: int = 0
    """Tokens whose KV is swapped out: all written tokens, or 0 while the request holds blocks."""
    block_table: list[int] = field(default_factory=list)
    """Blocks that the request holds, in token order."""
    frontier: Frontier | None = None
    """Range and layer of a row that is part-way through the layers; None without such a row."""
    frame_id: FrameId | None = None
    """The parked frame that contains the request's row; None without a row."""
    is_draft_parked: bool = False
    """True if the row that is part-way is a draft row in a parked frame."""
    experts_since_ns: int | None = None
    """Time up to which the wait of the request's frame for experts is counted; None if the frame,
    or the last frame, did not wait."""
    served_ns: int = 0
    """Total time of runs with a row of this request."""
    last_progress_ns: int = 0
    """End of the last run with a row of this request. Admission counts as progress too."""
    admitted_ns: int = 0
    """Time when the request last got its first KV blocks."""
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    evictions: int = 0
    preemptions: int = 0
    failures: int = 0
    """Number of runs with a row of this request that raised."""
    owes_prompt: bool = False
    """True until requested log-probabilities of the prompt are returned, with the first token."""
    finished: bool = False
    is_paused: bool = False
    """True while the client has paused the request. It is not planned then."""
    paused_ns: int = 0
    """Time when the last pause began."""
    is_open: bool = False
    """True while the request's prompt streams, so that more pieces may come."""
    gave_way: bool = False
    """True if the request lost its KV while it waited for a piece. KV is computed again later."""
    revised_ns: int = 0
    """Time of the last piece of the prompt; the time of arrival if the prompt came whole."""

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
        """Number of tokens whose KV exists in some layer, including those of an unfinished row."""
        return self.num_computed_tokens if self.frontier is None else self.frontier.hi

    @property
    def max_total_tokens(self) -> int:
        """Most tokens that the request can ever have. The last token needs no KV."""
        return self.num_prompt_tokens + self.max_tokens

    @property
    def is_decoding(self) -> bool:
        """True if it has output, only its last token is not computed, and it is not swapped out."""
        return (
            self.num_tokens - self.num_computed_tokens == 1
            and self.num_tokens > self.num_prompt_tokens
            and not self.num_swapped_tokens
        )

    @property
    def draft_row(self) -> Frontier | None:
        """Range and first layer of the next row if it is a draft row; None if it is not.

        A known or drafted token that has not passed the draft rows' layers has a draft row.
        """
        front, layer = self.frontier, self.exit_layer
        if not layer:
            return None
        if front is None:
            return Frontier(self.num_computed_tokens, self.num_tokens, 0)
        if front.layer < layer or self.is_draft_parked:
            return front
        if front.layer == layer and front.hi < self.num_tokens + self.num_drafts:
            return Frontier(front.hi, front.hi + 1, 0)
        return None

    @property
    def is_admitted(self) -> bool:
        """True if the request holds KV blocks."""
        return bool(self.block_table)

    @property
    def is_idle(self) -> bool:
        """True if the request has nothing to compute before the next piece of its prompt comes."""
        is_done = self.num_computed_tokens == self.num_tokens
        return self.is_open and (is_done or self.gave_way)

    @property
    def lacks_experts(self) -> bool:
        """True if the request's parked frame waits for experts."""
        return self.frame_id is not None and self.experts_since_ns is not None

    @property
    def is_hidden(self) -> bool:
        """True if the scheduler does not plan the request now."""
        return self.is_paused or self.is_idle or self.lacks_experts

    @property
    def deadline_ns(self) -> int | None:
        """Time when the next token is due by the request's own targets; None without a target.

        For a streaming prompt, the time to the first token counts from the prompt's last piece.
        """
        if self.last_token_ns is None:
            ttft = None if self.is_open else self.slo.ttft_ms
            return None if ttft is None else self.revised_ns + int(ttft * NS_PER_MS)
        tpot = self.slo.tpot_ms
        return None if tpot is None else self.last_token_ns + int(tpot * NS_PER_MS)

    @property
    def status(self) -> RequestStatus:
        """State of the request, as callers see it."""
        if self.finished:
            return RequestStatus.FINISHED
        if self.is_paused:
            return RequestStatus.PAUSED
        if self.is_idle:
            return RequestStatus.OPEN
        if self.frame_id is not None:
            return RequestStatus.PARKED
        return RequestStatus.RUNNING if self.block_table else RequestStatus.WAITING

    def samples_at(self, hi: int) -> int:
        """Return the number of last positions at which a row that ends at `hi` samples a token.

        It is 0 if the row does not reach the last known token, and 1 without drafted tokens.
        """
        if hi < self.num_tokens or self.is_open:
            return 0
        return hi - self.num_tokens + 1

    def is_draft(self, row: Row) -> bool:
        """Return True if a row of the request is a draft row."""
        return 0 < self.exit_layer == row.end_layer

    def samples_of(self, row: Row) -> int:
        """Return the number of last positions at which a row samples (see `Program.samples`)."""
        if self.is_draft(row):
            return int(self.num_drafts < self.most_drafts)
        return self.samples_at(row.hi)

    def park(self, frame_id: FrameId, frontier: Frontier, *, is_draft: bool = False) -> None:
        """Record that the request's row stopped at a boundary and stays in the frame."""
        self.frame_id, self.is_draft_parked = frame_id, is_draft
        self.frontier, self.experts_since_ns = frontier, None

    def count_wait(self, now_ns: int, *, is_own: bool) -> None:
        """Count the wait for experts until now.

        Args:
            now_ns: The engine's clock.
            is_own: True if the request's own experts are being read. Such a wait is no stall.
        """
        assert self.experts_since_ns is not None
        if is_own:
            # move both times, so that "has run since the request got KV" does not change
            self.last_progress_ns += now_ns - self.experts_since_ns
            self.admitted_ns += now_ns - self.experts_since_ns
        self.experts_since_ns = now_ns

    def leave_frame(self, frontier: Frontier) -> None:
        """Record that the request's row left its frame between layers. Hidden states stay.

        The hidden states of a finished draft row are added to those of the draft rows before it.
        """
        self.frame_id, self.is_draft_parked = None, False
        if frontier.layer == self.exit_layer:
            frontier = frontier._replace(lo=self.num_computed_tokens)
        self.frontier = frontier

    def add_draft(self) -> bool:
        """Count a token that a draft row chose; return False if no more are asked for."""
        self.num_drafts += (has_room := self.num_drafts < self.most_drafts)
        return has_room

    def end_drafting(self) -> None:
        """Verify the drafted tokens that have passed the draft rows' layers, and draft no more."""
        if self.frontier is None:
            self.exit_layer = self.most_drafts = 0
        elif self.exit_layer:
            reached = self.frontier.hi - self.num_tokens
            self.num_drafts = self.most_drafts = min(self.num_drafts, reached)

    def commit(self, hi: int, now_ns: int, num_sampled: int) -> None:
        """Commit the row [num_computed_tokens, hi), which finished the last layer.

        Args:
            hi: End of the row, drafted tokens included.
            now_ns: The engine's clock.
            num_sampled: Number of tokens that the row sampled: accepted drafts, and one more.

        Raises:
            InvariantError: The row or the number of its tokens is not possible.
        """
        most = self.num_tokens + self.num_drafts
        if not self.num_computed_tokens < hi <= most:
            raise InvariantError(
                f"request {self.request_id}: commit to {hi} outside "
                f"({self.num_computed_tokens}, {most}]"
            )
        asked = self.samples_at(hi)
        if num_sampled > asked or (asked > 1 and not num_sampled):
            raise InvariantError(
                f"request {self.request_id}: {num_sampled} tokens sampled at {asked} positions"
            )
        self._drop_row()
        self.num_computed_tokens = hi - asked + num_sampled if asked > 1 else hi
        if num_sampled:
            self.num_tokens += num_sampled
            self.owes_prompt = False
            self.last_token_ns = now_ns
            if self.first_token_ns is None:
                self.first_token_ns = now_ns

    def find(self, num_tokens: int, pages: Sequence[bytes] = ()) -> None:
        """Record that the prefix cache has the request's first tokens.

        The request has no KV of its own.
        """
        self.num_found_tokens = self.num_computed_tokens = num_tokens
        self.found_pages, self.num_swapped_tokens = pages, 0

    def swap_out(self) -> None:
        """Record that all KV is swapped out, including that of the unfinished row, which stays.

        The request gets no blocks for further drafts when it comes back, so it drafts no more.
        """
        self.frame_id = self.experts_since_ns = None
        if self.frontier is None:
            self._drop_row()
        self.end_drafting()
        self.found_pages, self.num_shared_tokens = (), 0
        self.num_swapped_tokens = self.num_written_tokens

    def reset(self) -> None:
        """Drop everything computed, so that the request starts again from its first token."""
        self._drop_row()
        self.num_computed_tokens = self.num_found_tokens = self.num_swapped_tokens = 0
        self.found_pages, self.num_shared_tokens = (), 0

    def cut_back(self, num_tokens: int) -> None:
        """Drop the KV after the first `num_tokens` tokens, because the prompt changed there.

        An unfinished row that ends after `num_tokens` is dropped. The caller removes the row from
        its frame.
        """
        if self.frontier is not None and self.frontier.hi > num_tokens:
            self.frame_id = self.frontier = None
        self.num_computed_tokens = min(self.num_computed_tokens, num_tokens)
        self.num_found_tokens = min(self.num_found_tokens, self.num_computed_tokens)
        self.num_shared_tokens = min(self.num_shared_tokens, self.num_computed_tokens)
        if self.num_swapped_tokens:
            self.num_swapped_tokens = self.num_written_tokens

    def abort_row(self) -> None:
        """Drop the unfinished row. Committed tokens stay."""
        self._drop_row()

    def _drop_row(self) -> None:
        self.frame_id = self.frontier = None
        self.num_drafts = self.exit_layer = self.most_drafts = 0
