"""Open requests as a front end stores them: a handle, and the data to submit it again."""

from dataclasses import replace

from qllm.frontend.handle import Handle
from qllm.ingress import Revision, Submission
from qllm.ingress.codec import EngineMetrics
from qllm.ingress.messages import Source
from qllm.types import FinishReason, RequestId

End = tuple[FinishReason, str | None]


class SavedRequest:
    """An open request: its handle, and the data to submit it again.

    Args:
        handle: Handle of the caller, with the output so far.
        arrival_ns: Arrival time of the request.
        priority: Class of the request.
        submission: First submission; None for a request of a checkpoint.
    """

    def __init__(
        self, handle: Handle, arrival_ns: int, priority: int, submission: Submission | None = None
    ) -> None:
        self.handle = handle
        self.submission = submission
        self.unknown = EngineMetrics.unknown(arrival_ns, priority, len(handle.prompt_token_ids))
        self.token_ns: list[int] = []
        self.ended: End | None = None
        """End that the request's text caused, before the engine reported an end. None without such
        an end."""
        self.num_replays = self.num_trials = 0
        self.has_moved = False
        """True after an engine has migrated the request."""
        self.source: Source | None = None
        """The place of the KV of a migrated request, for the next engine."""
        self.sent_priority = priority
        """Class at submission. Pieces of the prompt go into the ring of that class."""
        self.num_had = self.num_cached = 0
        """Number of tokens at submission to the present engine, and number of cached prompt tokens.
        Only the first engine's report of cached tokens counts."""
        self.number: RequestId | None = None
        """Id at the engine that got the request last. The handle's own id follows a moment later.
        """
        self.put_ns = arrival_ns
        """Time of submission to the present engine, on that engine's clock."""

    def revise(self, item: Revision) -> None:
        """Apply a change of the prompt, also to the data for another submission."""
        if (before := self.submission) is not None:
            ids = (*before.token_ids[: item.keep], *item.rest.token_ids)
            self.submission = replace(
                item.rest,
                name=before.name,
                priority=before.priority,
                token_ids=ids,
                arrival_ns=before.arrival_ns,
                cache_salt=before.cache_salt,
            )

    @property
    def is_open(self) -> bool:
        """True while the request's prompt is streaming."""
        return self.submission is not None and self.submission.is_open

    @property
    def rank(self) -> tuple[int, int]:
        """Sort key. The request with the smallest key is replayed first."""
        return self.priority, self.unknown.arrival_ns

    @property
    def priority(self) -> int:
        """Present class of the request."""
        asked = self.handle.asked.priority
        return self.unknown.priority if asked is None else asked

    @property
    def is_paused(self) -> bool:
        """True if the caller has paused the request."""
        return bool(self.handle.asked.paused)

    def shift(self, by_ns: int) -> None:
        """Add a difference to all times of the request, which converts them to another clock."""
        self.unknown = replace(self.unknown, arrival_ns=self.unknown.arrival_ns + by_ns)
        self.token_ns[:] = [at_ns + by_ns for at_ns in self.token_ns]
        if (item := self.submission) is not None:
            deadline_ns = None if item.deadline_ns is None else item.deadline_ns + by_ns
            arrival_ns = item.arrival_ns + by_ns
            self.submission = replace(item, arrival_ns=arrival_ns, deadline_ns=deadline_ns)

    def rest(self, number: RequestId) -> Submission:
        """Return the remaining work as a submission."""
        assert self.submission is not None
        done = self.handle.token_ids
        token_ids = (*self.submission.token_ids, *done)
        return replace(
            self.submission,
            request_id=number,
            priority=self.priority,
            token_ids=token_ids,
            num_output_tokens=len(done),
        )

    def is_late(self, now_ns: int) -> bool:
        """Return True if the request's deadline has passed."""
        deadline_ns = None if self.submission is None else self.submission.deadline_ns
        return deadline_ns is not None and deadline_ns <= now_ns

    def end(self) -> End | None:
        """Return the end, if the request ended before an engine could report an end."""
        item, done = self.submission, self.handle.token_ids
        if self.ended is not None or item is None:
            return self.ended
        if self.handle.finish_reason is not None:
            return self.handle.finish_reason, None
        if done and done[-1] in item.stop_ids:
            return FinishReason.STOP, None
        return (FinishReason.LENGTH, None) if len(done) >= item.max_tokens else None

    def finish(self, number: RequestId, end: End, known: EngineMetrics | None = None) -> None:
        """Finish the handle, with the engine's report if there is one."""
        known = known or replace(self.unknown, priority=self.priority)
        # only the first engine knows when the request was first planned
        if self.num_replays or self.has_moved:
            known = replace(known, queue_ms=None)
        if self.num_had:
            known = replace(known, num_cached_tokens=self.num_cached)
        metrics = known.complete(number, self.handle.request_id, end[0], self.token_ns)
        self.handle.on_finish(*end, metrics)
