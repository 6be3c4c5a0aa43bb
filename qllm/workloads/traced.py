"""The report of a run of qllm's engine, live or simulated.

A trace contains more than a client sees.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from qllm.record.metrics import RequestMetrics, class_name
from qllm.record.summary import request_metrics
from qllm.record.trace import Arrived, Event, Finished, Parked, Planned, Ran, Token
from qllm.types import (
    NS_PER_MS,
    NS_PER_S,
    FinishReason,
    FrameId,
    Priority,
    RequestId,
    Slo,
)
from qllm.workloads.measure import Served, Window, distribution, report
from qllm.workloads.spec import RequestSpec


def served_of(
    events: Iterable[Event], requests: Iterable[RequestSpec], start_ns: int = 0
) -> list[Served]:
    """Return the results of a workload's requests, by name. A refused request stays unserved.

    A request that follows another arrived at the time in the trace. A request that never arrived
    has no result.
    """
    found = {r.name: Served(spec=r) for r in requests}
    by_id: dict[RequestId, Served] = {}
    for event in events:
        at_s = (event.at_ns - start_ns) / NS_PER_S
        if isinstance(event, Arrived):
            if served := found.get(event.name):
                by_id[event.request_id] = served
                served.sent_s = at_s
                if served.spec.follows is not None:
                    served.spec = replace(served.spec, at_s=at_s)
        elif isinstance(event, Token | Finished) and (served := by_id.get(event.request_id)):
            if isinstance(event, Token):
                served.token_s.append(at_s)
            else:
                served.done = event.reason in (FinishReason.STOP, FinishReason.LENGTH)
                served.error = event.error
    return [s for s in found.values() if s.spec.follows is None or s.sent_s is not None]


def engine_report(
    events: Iterable[Event],
    requests: Sequence[RequestSpec],
    window: Window,
    *,
    slos: Mapping[int, Slo] | None = None,
    start_ns: int = 0,
) -> dict[str, Any]:
    """Return the `report` of a trace by class, with further numbers under "engine".

    Prefill counts when it is computed. A part of the layers counts as this part of a token. Stalls,
    preemptions and recomputed tokens are counted over the whole run, until the run was stopped.

    Args:
        events: All events in order, including events after the stop. So the work of a program that
            still ran counts up to the end of the window.
        requests: Requests of the workload. Their names identify the events.
        window: Measured part of the run.
        slos: Targets by priority.
        start_ns: Start of the run, on the clock of the events.
    """
    everything = tuple(events)
    prefilled = _Prefill(window, start_ns).of(everything)
    stop_ns = start_ns + round(window.stop_s * NS_PER_S)
    events = [e for e in everything if e.at_ns <= stop_ns]
    out = report(served_of(events, requests, start_ns), window, slos)
    for priority, of_class in _by_class(events).items():
        entry = out.get(class_name(priority))
        if entry is None:
            continue
        entry["prefill_tokens_per_s"] = prefilled.get(priority, 0.0) / window.seconds
        entry["preemptions"] = sum(r.preemptions for r in of_class)
        entry["max_stall_ms"] = max(r.max_stall_ms for r in of_class)
        entry["evictions"] = sum(r.evictions for r in of_class)
        for cause in ("preempt", "evict", "retry"):
            name = f"{cause}_recomputed_tokens"
            entry[name] = sum(getattr(r, name) for r in of_class)
    parked = [e for e in events if isinstance(e, Parked)]
    out["engine"] = {
        "programs": sum(isinstance(e, Planned) for e in events),
        "parked": len(parked),
        "preempt_latency_ms": distribution(
            [(e.at_ns - e.arrival_ns) / NS_PER_MS for e in parked if e.arrival_ns is not None]
        ),
        "class_inversions": class_inversions(events),
    }
    return out


def _by_class(events: Sequence[Event]) -> dict[int, list[RequestMetrics]]:
    out: dict[int, list[RequestMetrics]] = {}
    for r in request_metrics(events):
        out.setdefault(r.priority, []).append(r)
    return out


class _Prefill:
    """The prompt tokens computed inside a window, by class.

    The tokens of a program's run are spread evenly over the time of the run. So a long run that
    crosses an edge of the window counts for the part inside.
    """

    def __init__(self, window: Window, start_ns: int) -> None:
        self._window = window
        self._start_ns = start_ns
        self._arrived: dict[RequestId, Arrived] = {}
        self._frames: dict[FrameId, Planned] = {}
        self._done: dict[FrameId, int] = {}
        """Number of a frame's layers that are already counted."""
        self._ran: dict[FrameId, Ran] = {}
        self._tokens: dict[int, float] = {}
        self._num_layers = 1

    def of(self, events: Sequence[Event]) -> dict[int, float]:
        planned = [e for e in events if isinstance(e, Planned)]
        self._num_layers = max((r.end_layer for e in planned for r in e.rows), default=1)
        for event in events:
            match event:
                case Arrived():
                    self._arrived[event.request_id] = event
                case Planned():
                    self._frames[event.frame_id] = event
                case Ran():
                    self._ran[event.frame_id] = event
                    if event.why == "done":
                        self._credit(event.frame_id, self._num_layers)
                case Parked():
                    self._credit(event.frame_id, event.layer)
                case _:
                    pass
        return self._tokens

    def _credit(self, frame_id: FrameId, to_layer: int) -> None:
        run = self._ran.pop(frame_id, None)
        if run is None:
            return
        start_s, end_s = ((t - self._start_ns) / NS_PER_S for t in (run.start_ns, run.at_ns))
        part = self._window.part(start_s, end_s) / self._num_layers
        from_layer = self._done.get(frame_id, 0)
        for row in self._frames[frame_id].rows:
            arrived = self._arrived[row.request_id]
            tokens = min(row.hi, arrived.num_prompt_tokens) - row.lo
            layers = min(to_layer, row.end_layer) - max(from_layer, row.start_layer)
            if tokens > 0 and layers > 0:
                before = self._tokens.get(arrived.priority, 0.0)
                self._tokens[arrived.priority] = before + part * tokens * layers
        self._done[frame_id] = max(from_layer, to_layer)


def class_inversions(events: Iterable[Event]) -> int:
    """Count programs without LS rows that began while an LS request waited for its first token.

    Slices that a bound on stalls guarantees to BE also count.
    """
    waiting: set[RequestId] = set()
    ls: set[RequestId] = set()
    has_ls: dict[FrameId, bool] = {}
    count = 0
    kinds = Arrived | Planned | Ran | Token | Finished
    for event in sorted((e for e in events if isinstance(e, kinds)), key=_begin_ns):
        match event:
            case Arrived() if event.priority <= Priority.LS:
                waiting.add(event.request_id)
                ls.add(event.request_id)
            case Token() | Finished():
                waiting.discard(event.request_id)
            case Planned():
                has_ls[event.frame_id] = any(row.request_id in ls for row in event.rows)
            case Ran():
                count += bool(waiting) and not has_ls.get(event.frame_id, True)
            case _:
                pass
    return count


def _begin_ns(event: Event) -> int:
    return event.start_ns if isinstance(event, Ran) else event.at_ns
