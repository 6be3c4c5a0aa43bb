"""Metrics of a whole trace: distributions and totals per class."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from qllm.record.metrics import MetricsBuilder, RequestMetrics
from qllm.record.trace import (
    Arrived,
    Event,
    Parked,
    Planned,
    Segment,
)
from qllm.types import NS_PER_MS, NS_PER_S, FinishReason, RequestId, Slo


def percentile(values: Iterable[float], p: float) -> float:
    """Return the p-th percentile, linear between the two closest ranks (numpy's default).

    Raises:
        ValueError: No values, or `p` is not in [0, 100].
    """
    ordered = sorted(values)
    if not ordered or not 0 <= p <= 100:
        raise ValueError(f"p={p} of {len(ordered)} values: p must be in [0, 100], of at least one")
    at = (len(ordered) - 1) * p / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def percentiles(values: Iterable[float]) -> dict[str, float]:
    """Return `p50`, `p90` and `p99`; an empty dict without values."""
    ordered = sorted(values)
    return {f"p{p}": percentile(ordered, p) for p in (50, 90, 99)} if ordered else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Summary of one quantity's samples, in milliseconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Distribution | None":
        """Return the summary of samples in milliseconds; None without samples."""
        if not values:
            return None
        ordered = sorted(values)
        return cls(
            count=len(values),
            mean=sum(values) / len(values),
            **percentiles(ordered),
            max=ordered[-1],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassMetrics:
    """Metrics of the requests of one priority class."""

    priority: int
    arrived: int
    finished: dict[str, int]
    """Number of requests per `FinishReason` value. Unfinished requests are not counted."""
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_ms: Distribution | None
    e2e_ms: Distribution | None
    queue_ms: Distribution | None
    prefill_tokens_per_s: float
    output_tokens_per_s: float
    slo: Slo | None
    slo_attainment: float | None
    """Requests that met all targets, divided by requests that arrived and were not cancelled."""
    goodput_per_s: float | None
    """Requests that met all targets, per second."""
    preemptions: int
    parked_ms: float
    max_stall_ms: float
    evictions: int
    evict_recomputed_tokens: int
    retry_recomputed_tokens: int
    preempt_recomputed_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Metrics of a whole trace."""

    duration_s: float
    """Seconds from the first arrival to the last event: the divisor of every rate."""
    classes: dict[int, ClassMetrics]
    """Metrics by priority."""
    preempt_latency_ms: Distribution | None
    """Time from the change of the stop word until the frame is parked."""
    frames: int
    frames_parked: int
    """Number of times that a frame was parked, for any reason."""
    longest_segment_ms: float | None
    """Longest time between two boundaries; None if segments were not recorded."""
    longest_segment_kind: str | None
    requests: tuple[RequestMetrics, ...] = field(repr=False)
    """Metrics of all requests in order of arrival, including live requests."""


def request_metrics(events: Iterable[Event]) -> list[RequestMetrics]:
    """Return the metrics of every request in order of arrival.

    Live requests have present values.
    """
    builder = MetricsBuilder()
    order: dict[RequestId, RequestMetrics | None] = {}
    for event in events:
        if isinstance(event, Arrived):
            order[event.request_id] = None
        if done := builder.feed(event):
            order[done.request_id] = done
    order.update((m.request_id, m) for m in builder.live())
    return [metrics for metrics in order.values() if metrics is not None]


def _class_metrics(
    priority: int, requests: Sequence[RequestMetrics], slo: Slo | None, duration_s: float
) -> ClassMetrics:
    reasons = [str(r.reason) for r in requests if r.reason is not None]
    met = None if slo is None else sum(r.meets(slo) for r in requests)
    judged = sum(r.reason is not FinishReason.CANCELLED for r in requests)

    def rate(count: int) -> float:
        return count / duration_s if duration_s else 0.0

    return ClassMetrics(
        priority=priority,
        arrived=len(requests),
        finished={reason: reasons.count(reason) for reason in sorted(set(reasons))},
        ttft_ms=Distribution.of([r.ttft_ms for r in requests if r.ttft_ms is not None]),
        tpot_ms=Distribution.of([r.tpot_ms for r in requests if r.tpot_ms is not None]),
        itl_ms=Distribution.of([gap for r in requests for gap in r.itl_ms]),
        e2e_ms=Distribution.of([r.e2e_ms for r in requests if r.e2e_ms is not None]),
        queue_ms=Distribution.of([r.queue_ms for r in requests if r.queue_ms is not None]),
        prefill_tokens_per_s=rate(sum(r.num_prefilled_tokens for r in requests)),
        output_tokens_per_s=rate(sum(r.num_output_tokens for r in requests)),
        slo=slo,
        slo_attainment=None if met is None or not judged else met / judged,
        goodput_per_s=None if met is None else rate(met),
        preemptions=sum(r.preemptions for r in requests),
        parked_ms=sum(r.parked_ms for r in requests),
        max_stall_ms=max((r.max_stall_ms for r in requests), default=0.0),
        evictions=sum(r.evictions for r in requests),
        evict_recomputed_tokens=sum(r.evict_recomputed_tokens for r in requests),
        retry_recomputed_tokens=sum(r.retry_recomputed_tokens for r in requests),
        preempt_recomputed_tokens=sum(r.preempt_recomputed_tokens for r in requests),
    )


def summarize(events: Iterable[Event], slos: Mapping[int, Slo] | None = None) -> Summary:
    """Return the metrics of a trace, per class.

    Args:
        events: All events of a run, in order, or a `Trace`.
        slos: Targets by priority. A class without an entry has no attainment.
    """
    events = tuple(events)
    requests = request_metrics(events)
    first = min((r.arrival_ns for r in requests), default=0)
    duration_s = max(0, max((e.at_ns for e in events), default=0) - first) / NS_PER_S
    by_class: dict[int, list[RequestMetrics]] = {}
    for r in requests:
        by_class.setdefault(r.priority, []).append(r)
    parked = [e for e in events if isinstance(e, Parked)]
    segments = [e for e in events if isinstance(e, Segment)]
    longest = max(segments, key=lambda s: s.at_ns - s.start_ns, default=None)
    return Summary(
        duration_s=duration_s,
        classes={
            p: _class_metrics(p, rs, (slos or {}).get(p), duration_s)
            for p, rs in sorted(by_class.items())
        },
        preempt_latency_ms=Distribution.of(
            [(e.at_ns - e.arrival_ns) / NS_PER_MS for e in parked if e.arrival_ns is not None]
        ),
        frames=sum(isinstance(e, Planned) for e in events),
        frames_parked=len(parked),
        longest_segment_ms=(longest.at_ns - longest.start_ns) / NS_PER_MS if longest else None,
        longest_segment_kind=longest.kind if longest else None,
        requests=tuple(requests),
    )
