"""Metrics of a request, computed from events while the request lives.

`MetricsBuilder` takes events one by one. The engine feeds each event that it emits, and gets the
`RequestMetrics` of a request at the request's `Finished`. `qllm.record.summary` feeds the events of
a trace. A front end calls `token_latencies` with the times of its tokens. No other code computes a
metric.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from qllm.plan import Row
from qllm.record.trace import (
    Arrived,
    Drafted,
    Dropped,
    Event,
    Evicted,
    Finished,
    Killed,
    Left,
    Parked,
    Planned,
    Ran,
    Replaced,
    Resumed,
    Reused,
    Revised,
    Split,
    Token,
    Updated,
    Verified,
)
from qllm.types import NS_PER_MS, FinishReason, FrameId, Priority, RequestId, Slo


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """Metrics of one request, with times in milliseconds. None means "has not happened (yet)"."""

    request_id: RequestId
    name: str
    priority: int
    arrival_ns: int
    num_prompt_tokens: int
    num_prefilled_tokens: int
    """Prompt tokens that the engine computed. Tokens computed in some layers count as a
    fraction."""
    num_output_tokens: int
    queue_ms: float | None
    """Time from arrival to the first program that contains the request."""
    ttft_ms: float | None
    """Time from arrival to the first token, queueing included. A streaming prompt counts from its
    last piece."""
    tpot_ms: float | None
    """Mean time per token: (last token - first token) / (tokens - 1); None for one token."""
    itl_ms: tuple[float, ...]
    """Every gap between consecutive tokens."""
    e2e_ms: float | None
    """Time from arrival to the last token. A streaming prompt counts from its last piece."""
    preemptions: int
    """Number of times that the frame was stopped for another request. Ends of slices are not
    counted."""
    parked_ms: float
    """Time in parked frames, for any reason."""
    max_stall_ms: float
    """Longest time, while admitted, in which the runner worked on no frame of the request."""
    evictions: int
    evict_recomputed_tokens: int
    """Tokens that were planned again because an eviction dropped their KV."""
    retry_recomputed_tokens: int
    """Tokens that were planned again because their frame was dropped after an error."""
    preempt_recomputed_tokens: int
    """Tokens that were planned again for other reasons. Always 0, because preemption keeps work."""
    reason: FinishReason | None
    num_cached_tokens: int = 0
    """Prompt tokens whose KV the prefix cache had when the request was first planned."""
    open_ms: float | None = None
    """Time from arrival until the prompt was whole; None if the prompt came whole."""
    num_revisions: int = 0
    """Number of pieces and changes of the prompt that the engine received."""
    revise_lost_tokens: int = 0
    """Tokens that were computed, and that a revision then changed."""
    num_accepted_drafts: int = 0
    """Drafted tokens that the model chose too."""
    num_rejected_drafts: int = 0
    """Drafted tokens that a step verified in vain."""

    def __str__(self) -> str:
        """Return five readable lines. `repr` has every field."""
        reason = "unfinished" if self.reason is None else self.reason.value
        computed = f"{self.num_prefilled_tokens} computed, {self.num_cached_tokens} cached"
        return (
            f"{self.name}: {reason}, {class_name(self.priority)}\n"
            f"tokens    {self.num_prompt_tokens} in ({computed}), {self.num_output_tokens} out\n"
            f"latency   queue {_ms(self.queue_ms)}, TTFT {_ms(self.ttft_ms)}, "
            f"TPOT {_ms(self.tpot_ms)}, all {_ms(self.e2e_ms)}\n"
            f"preempted {self.preemptions} times, parked {_ms(self.parked_ms)}, "
            f"longest stall {_ms(self.max_stall_ms)}\n"
            f"evicted   {self.evictions} times, {self._num_recomputed} tokens computed again"
        )

    @property
    def _num_recomputed(self) -> int:
        evicted, retried = self.evict_recomputed_tokens, self.retry_recomputed_tokens
        return evicted + retried + self.preempt_recomputed_tokens

    def meets(self, slo: Slo) -> bool:
        """Return True if the request completed and met all targets. A single token has no TPOT."""
        if self.reason not in (FinishReason.STOP, FinishReason.LENGTH) or self.ttft_ms is None:
            return False
        if slo.ttft_ms is not None and self.ttft_ms > slo.ttft_ms:
            return False
        return slo.tpot_ms is None or self.tpot_ms is None or self.tpot_ms <= slo.tpot_ms


def class_name(priority: int) -> str:
    """Return the name of a class if it has one (LS, BE), else its number."""
    return Priority(priority).name if priority in list(Priority) else f"class {priority}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} ms"


def token_latencies(arrival_ns: int, token_ns: Sequence[int]) -> dict[str, Any]:
    """Return the fields of RequestMetrics that arrival and times of tokens determine."""
    at = token_ns
    return {
        "num_output_tokens": len(at),
        "ttft_ms": (at[0] - arrival_ns) / NS_PER_MS if at else None,
        "tpot_ms": (at[-1] - at[0]) / (len(at) - 1) / NS_PER_MS if len(at) > 1 else None,
        "itl_ms": tuple((b - a) / NS_PER_MS for a, b in pairwise(at)),
        "e2e_ms": (at[-1] - arrival_ns) / NS_PER_MS if at else None,
    }


@dataclass(slots=True)
class _Frame:
    """A live frame: its live rows, and the time when it was parked."""

    rows: dict[RequestId, Row]
    parked_ns: int | None = None
    ran: bool = False


class _Cause(enum.IntEnum):
    """A reason why tokens are computed again."""

    EVICTED = 0
    RETRIED = 1
    PREEMPTED = 2


class _Meter:
    """The values of one request so far."""

    def __init__(self, arrived: Arrived) -> None:
        self.arrived = arrived
        self.priority = arrived.priority
        self.finished: Finished | None = None
        self.frames: set[FrameId] = set()
        self.token_ns: list[int] = []
        self.planned_ns: int | None = None
        self.last_ran_ns: int | None = None
        """End of the last work on the request. The result is None while the request is not
        admitted, or paused."""
        self.is_held = False
        """True if the request is paused and admitted."""
        self.stall_ns = 0
        self.parked_ns = 0
        self.preemptions = 0
        self.evictions = 0
        self.lo = self.hi = self.depth = 0
        """Progress: tokens [0, lo) are computed, tokens [lo, hi) only in layers [0, depth)."""
        self.num_layers = 0
        """Number of layers of the model, as far as a row has shown it."""
        self.may_verify = False
        """True if the next row of more than one token verifies drafted tokens."""
        self.lost: dict[_Cause, tuple[int, int]] = {}
        """Tokens [a, b) per cause that were computed and are not planned again yet."""
        self.num_recomputed = [0] * len(_Cause)
        self.num_cached = 0
        """Prompt tokens that the prefix cache had when the request was first planned."""
        self.num_reused = 0
        """Tokens that came from the prefix cache since the last eviction."""
        self.whole_ns: int | None = None
        """Time when a streaming prompt was whole; None while it streams, and for other prompts."""
        self.num_revisions = self.num_revised_away = 0
        self.num_accepted = self.num_rejected = 0

    def planned(self, row: Row, at_ns: int) -> None:
        if self.planned_ns is None:
            self.planned_ns = at_ns
        if self.last_ran_ns is None:
            self.last_ran_ns = at_ns
        if row.lo < (self.hi if row.start_layer < self.depth else self.lo):
            self.lose(_Cause.PREEMPTED, row.lo, self.hi)
        for cause, (a, b) in self.lost.items():
            num_again = min(row.hi, b) - max(row.lo, a)
            if num_again > 0:
                self.num_recomputed[cause] += num_again
                self.lost[cause] = (row.hi, b)

    def reached(self, row: Row, layer: int) -> None:
        """Record that the row finished the layers below `layer`."""
        if layer > row.start_layer and not self.has_draft(row):
            self.lo, self.hi, self.depth = row.lo, self.known_end(row), layer

    def has_draft(self, row: Row) -> bool:
        """Return True if the row's token is a draft, after a token that is not through all layers.

        Such a token is counted if a later row accepts it.
        """
        is_partial = self.lo < self.hi and self.depth < self.num_layers
        return self.may_verify and is_partial and row.lo >= self.hi

    def known_end(self, row: Row) -> int:
        """Return the end of the row's known tokens. Drafted tokens follow them."""
        return row.lo + 1 if self.may_verify else row.hi

    def verified(self, event: Verified) -> None:
        """Record verified drafts. Accepted ones are computed; rejected ones were never tokens."""
        self.may_verify = False
        self.hi += event.num_accepted
        self.num_accepted += event.num_accepted
        self.num_rejected += event.num_drafts - event.num_accepted

    def lose(self, cause: _Cause, lo: int, hi: int) -> None:
        """Record that the KV of tokens [lo, hi) is lost; KV of all later tokens is lost too."""
        self.may_verify = False
        hi = max(hi, self.hi)
        a, b = self.lost.get(cause, (0, 0))
        self.lost[cause] = (min(a, lo), max(b, hi)) if a < b else (lo, hi)
        self.lo = self.hi = min(lo, self.hi)
        self.depth = 0

    def evict(self, at_ns: int) -> None:
        self.left(at_ns)
        self.evictions += 1
        self.num_reused = 0
        ends = [b for a, b in self.lost.values() if a < b]
        self.lost = {}
        self.lose(_Cause.EVICTED, 0, max(ends, default=0))

    def reused(self, num_tokens: int) -> None:
        if not self.evictions:
            self.num_cached = min(num_tokens, self.arrived.num_prompt_tokens)
        self.num_reused = self.lo = self.hi = num_tokens
        self.lost = {cause: (max(a, num_tokens), b) for cause, (a, b) in self.lost.items()}

    def worked(self, start_ns: int, at_ns: int) -> None:
        if self.last_ran_ns is not None:
            self.stall_ns = max(self.stall_ns, start_ns - self.last_ran_ns)
            self.last_ran_ns = at_ns

    def left(self, at_ns: int) -> None:
        """Record that the request is not admitted any more."""
        if self.last_ran_ns is not None:
            self.stall_ns = max(self.stall_ns, at_ns - self.last_ran_ns)
            self.last_ran_ns = None
        self.is_held = False

    def updated(self, event: Updated) -> None:
        """Record a pause or the end of a pause. The time of a pause is not a stall."""
        self.priority = event.priority
        if event.is_paused and self.last_ran_ns is not None:
            self.left(event.at_ns)
            self.is_held = True
        elif not event.is_paused and self.is_held:
            self.last_ran_ns, self.is_held = event.at_ns, False

    def revised(self, event: Revised, num_layers: int) -> None:
        """Record a change of the prompt. Time without prompt tokens to compute is not a stall."""
        done = self.hi if self.depth >= num_layers else self.lo
        if done >= self.arrived.num_prompt_tokens and self.last_ran_ns is not None:
            self.last_ran_ns = event.at_ns
        count = event.num_prompt_tokens
        self.arrived = replace(self.arrived, num_prompt_tokens=count, max_tokens=event.max_tokens)
        self.num_revisions += 1
        self.num_revised_away += event.num_lost
        if self.hi > event.num_kept:
            self.lo = self.hi = min(done, event.num_kept)
            self.depth = 0
        self.num_reused = min(self.num_reused, event.num_kept)
        self.lost = {cause: (a, min(b, event.num_same)) for cause, (a, b) in self.lost.items()}
        if not event.is_open:
            self.whole_ns = event.at_ns

    def metrics(self, num_layers: int) -> RequestMetrics:
        arrived, finished, at = self.arrived, self.finished, self.token_ns
        start, whole_ns = arrived.at_ns, self.whole_ns
        prompt = arrived.num_prompt_tokens
        whole, part = min(prompt, self.lo), min(prompt, self.hi) - min(prompt, self.lo)
        return RequestMetrics(
            request_id=arrived.request_id,
            name=arrived.name,
            priority=self.priority,
            arrival_ns=start,
            num_prompt_tokens=prompt,
            num_prefilled_tokens=max(0, whole - min(prompt, self.num_reused))
            + part * self.depth // max(1, num_layers),
            queue_ms=None if self.planned_ns is None else (self.planned_ns - start) / NS_PER_MS,
            **token_latencies(start if whole_ns is None else whole_ns, at),
            preemptions=self.preemptions,
            parked_ms=self.parked_ns / NS_PER_MS,
            max_stall_ms=self.stall_ns / NS_PER_MS,
            evictions=self.evictions,
            evict_recomputed_tokens=self.num_recomputed[_Cause.EVICTED],
            retry_recomputed_tokens=self.num_recomputed[_Cause.RETRIED],
            preempt_recomputed_tokens=self.num_recomputed[_Cause.PREEMPTED],
            reason=None if finished is None else finished.reason,
            num_cached_tokens=self.num_cached,
            open_ms=None if whole_ns is None else (whole_ns - start) / NS_PER_MS,
            num_revisions=self.num_revisions,
            revise_lost_tokens=self.num_revised_away,
            num_accepted_drafts=self.num_accepted,
            num_rejected_drafts=self.num_rejected,
        )


class MetricsBuilder:
    """A builder of metrics from events. It holds only live requests and frames.

    Progress is counted in whole layers. A layer that is partly computed again gives no recomputed
    tokens.
    """

    def __init__(self) -> None:
        self._meters: dict[RequestId, _Meter] = {}
        self._frames: dict[FrameId, _Frame] = {}
        self._num_layers = 0

    def feed(self, event: Event) -> RequestMetrics | None:
        """Take one event; return the metrics of the request that the event finished, if any."""
        match event:
            case Token():
                if meter := self._meters.get(event.request_id):
                    meter.token_ns.append(event.at_ns)
            case Ran():
                self._ran(event)
            case Planned():
                self._planned(event)
            case Updated() | Revised() | Drafted() | Verified():
                self._request_event(event)
            case Arrived():
                self._meters[event.request_id] = _Meter(event)
            case Finished():
                return self._finished(event)
            case Evicted() | Reused():
                self._kv_event(event)
            case _:
                self._frame_event(event)
        return None

    def live(self) -> list[RequestMetrics]:
        """Return the present metrics of unfinished requests, in order of arrival."""
        return [meter.metrics(self._num_layers) for meter in self._meters.values()]

    def live_request(self, request_id: RequestId) -> RequestMetrics | None:
        """Return the present metrics of a request; None if the request is unknown or finished."""
        meter = self._meters.get(request_id)
        return meter.metrics(self._num_layers) if meter else None

    def _request_event(self, event: Updated | Revised | Drafted | Verified) -> None:
        meter = self._meters.get(event.request_id)
        if meter is None:
            return
        if isinstance(event, Updated):
            meter.updated(event)
        elif isinstance(event, Revised):
            meter.revised(event, self._num_layers)
        elif isinstance(event, Drafted):
            meter.may_verify = True
        else:
            meter.verified(event)

    def _kv_event(self, event: Evicted | Reused) -> None:
        meter = self._meters.get(event.request_id)
        if meter is None:
            return
        if isinstance(event, Reused):
            meter.reused(event.num_tokens)
        else:
            self._leave_frames(meter, event.at_ns)
            meter.evict(event.at_ns)

    def _frame_event(self, event: Event) -> None:
        match event:
            case Parked():
                self._parked(event)
            case Resumed():
                if frame := self._frames.get(event.frame_id):
                    self._unpark(frame, event.at_ns)
            case Split() | Replaced():
                self._let_go(event.frame_id, event.at_ns)
            case Killed() | Left():
                meter = self._meters.get(event.request_id)
                frame = self._frames.get(event.frame_id)
                if meter and frame:
                    self._leave(meter, event.frame_id, frame, event.at_ns)
            case Dropped():
                self._dropped(event)
            case _:
                pass

    def _planned(self, event: Planned) -> None:
        rows = {row.request_id: row for row in event.rows}
        self._frames[event.frame_id] = _Frame(rows)
        for row in event.rows:
            self._num_layers = max(self._num_layers, row.end_layer)
            if meter := self._meters.get(row.request_id):
                meter.num_layers = self._num_layers
                meter.planned(row, event.at_ns)
                meter.frames.add(event.frame_id)

    def _ran(self, event: Ran) -> None:
        frame = self._frames.get(event.frame_id)
        if frame is None:
            return
        self._unpark(frame, event.start_ns)
        frame.ran = True
        done = event.why == "done"
        for row in frame.rows.values():
            if meter := self._meters.get(row.request_id):
                meter.worked(event.start_ns, event.at_ns)
                if done:
                    meter.reached(row, row.end_layer)
        if done:
            self._let_go(event.frame_id, event.at_ns)

    def _parked(self, event: Parked) -> None:
        frame = self._frames.get(event.frame_id)
        if frame is None:
            return
        self._unpark(frame, event.at_ns)
        frame.parked_ns = event.at_ns
        for row in frame.rows.values():
            if meter := self._meters.get(row.request_id):
                meter.preemptions += event.preempted
                meter.reached(row, min(event.layer, row.end_layer))

    def _dropped(self, event: Dropped) -> None:
        frame = self._frames.get(event.frame_id)
        if frame and frame.ran and event.reason == "error":
            for row in frame.rows.values():
                if meter := self._meters.get(row.request_id):
                    lo = meter.lo if meter.has_draft(row) else row.lo
                    meter.lose(_Cause.RETRIED, lo, meter.known_end(row))
        self._let_go(event.frame_id, event.at_ns)

    def _finished(self, event: Finished) -> RequestMetrics | None:
        meter = self._meters.pop(event.request_id, None)
        if meter is None:
            return None
        self._leave_frames(meter, event.at_ns)
        meter.left(event.at_ns)
        meter.finished = event
        return meter.metrics(self._num_layers)

    def _unpark(self, frame: _Frame, at_ns: int) -> None:
        if frame.parked_ns is None or frame.parked_ns > at_ns:
            return
        for request_id in frame.rows:
            if meter := self._meters.get(request_id):
                meter.parked_ns += at_ns - frame.parked_ns
        frame.parked_ns = None

    def _leave(self, meter: _Meter, frame_id: FrameId, frame: _Frame, at_ns: int) -> None:
        if frame.rows.pop(meter.arrived.request_id, None) and frame.parked_ns is not None:
            meter.parked_ns += at_ns - frame.parked_ns
        meter.frames.discard(frame_id)

    def _leave_frames(self, meter: _Meter, at_ns: int) -> None:
        for frame_id in tuple(meter.frames):
            self._leave(meter, frame_id, self._frames[frame_id], at_ns)

    def _let_go(self, frame_id: FrameId, at_ns: int) -> None:
        frame = self._frames.pop(frame_id, None)
        if frame is None:
            return
        self._unpark(frame, at_ns)
        for request_id in frame.rows:
            if meter := self._meters.get(request_id):
                meter.frames.discard(frame_id)
