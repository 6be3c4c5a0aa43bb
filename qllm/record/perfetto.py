"""A trace as Chrome trace JSON: open it in ui.perfetto.dev or chrome://tracing.

The trace has one process and one thread per track: the device first, then the requests in order of
arrival.

    device   |frame 1 (run)      |frame 2 (run)|        |frame 1 (run)|
    BE batch |frame 1            |parked . . . . . . . .|frame 1      |
    LS chat            |waiting  |frame 2      | token       (and an arrow from park to resume)
"""

import json
import os
from collections.abc import Iterable
from typing import Any

from qllm.private import write_private
from qllm.record.metrics import class_name
from qllm.record.trace import (
    Arrived,
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
    Segment,
    Split,
    SwappedIn,
    SwappedOut,
    Token,
)
from qllm.types import FrameId, RequestId

PID = 1
DEVICE_TID = 1
_FIRST_REQUEST_TID = 2


class _Export:
    def __init__(self) -> None:
        self.out: list[dict[str, Any]] = []
        self.tids: dict[RequestId, int] = {}
        self.priorities: dict[RequestId, int] = {}
        self.rows: dict[FrameId, dict[RequestId, str]] = {}
        """Live rows of a frame, and their names."""
        self.parked: dict[FrameId, dict[RequestId, Parked]] = {}
        """Requests of each parked frame, each with an interval that has no end yet."""
        self.resuming: dict[RequestId, int] = {}
        """Requests whose frame will continue, each with the time when the frame was parked."""
        self.waiting: dict[RequestId, int] = {}
        """Time of the arrival or eviction of each request that has not run since then."""
        self.num_flows = 0

    def add(self, ph: str, name: str, at_ns: int, tid: int, **more: Any) -> None:
        self.out.append(
            {"ph": ph, "name": name, "ts": at_ns / 1000, "pid": PID, "tid": tid, **more}
        )

    def slice(
        self, name: str, start_ns: int, end_ns: int, tid: int, cat: str, args: dict[str, Any]
    ) -> None:
        dur = (end_ns - start_ns) / 1000
        self.add("X", name, start_ns, tid, dur=dur, cat=cat, args=args)

    def name_track(self, tid: int, name: str) -> None:
        common = {"ph": "M", "pid": PID, "tid": tid}
        self.out.append({**common, "name": "thread_name", "args": {"name": name}})
        self.out.append({**common, "name": "thread_sort_index", "args": {"sort_index": tid}})

    def track(self, request_id: RequestId, name: str | None = None) -> int:
        tid = self.tids.get(request_id)
        if tid is None:
            tid = self.tids[request_id] = len(self.tids) + _FIRST_REQUEST_TID
            self.name_track(tid, name or f"request {request_id}")
        return tid

    def frame_class(self, frame_id: FrameId) -> str:
        known = [self.priorities.get(r) for r in self.rows.get(frame_id, ())]
        best = min((p for p in known if p is not None), default=None)
        return "frame" if best is None else class_name(best)

    def unpark(self, frame_id: FrameId, at_ns: int, only: RequestId | None = None) -> None:
        """Close the intervals of a parked frame, or of one of its requests."""
        held = self.parked.get(frame_id, {})
        for request_id in [r for r in held if only in (None, r)]:
            parked = held.pop(request_id)
            args = {
                "frame": frame_id,
                "layer": parked.layer,
                "inside_layer": parked.inside_layer,
                "for_request": parked.for_request,
            }
            tid = self.track(request_id)
            self.slice("parked", parked.at_ns, at_ns, tid, "parked", args)

    def resume(self, frame_id: FrameId, at_ns: int) -> None:
        """Continue a frame, as the same or another frame. The arrow ends where the frame runs."""
        held = self.parked.get(frame_id, {})
        # otherwise the frame is parked only now
        if all(parked.at_ns <= at_ns for parked in held.values()):
            self.resuming.update((r, parked.at_ns) for r, parked in held.items())
            self.unpark(frame_id, at_ns)

    def ran_row(self, event: Ran, request_id: RequestId, text: str) -> None:
        tid = self.track(request_id)
        waiting_ns = self.waiting.pop(request_id, event.start_ns)
        if waiting_ns < event.start_ns:
            self.slice("waiting", waiting_ns, event.start_ns, tid, "waiting", {})
        parked_ns = self.resuming.pop(request_id, None)
        if parked_ns is not None:
            self.num_flows += 1
            for ph, at_ns in (("s", parked_ns), ("f", event.start_ns)):
                self.add(ph, "parked to resumed", at_ns, tid, id=self.num_flows, cat="resume")
            self.out[-1]["bp"] = "e"  # bind the arrow to the slice around it, not to the next slice
        args = {"frame": event.frame_id, "row": text}
        self.slice(f"frame {event.frame_id}", event.start_ns, event.at_ns, tid, "row", args)

    def ran(self, event: Ran) -> None:
        self.resume(event.frame_id, event.start_ns)
        rows = self.rows.get(event.frame_id, {})
        args: dict[str, Any] = {
            "frame": event.frame_id,
            "why": event.why,
            "segments": event.segments,
            "start": list(event.start),
            "end": list(event.end),
            "rows": [f"{r}: {text}" for r, text in rows.items()],
        }
        label = f"{self.frame_class(event.frame_id)} frame {event.frame_id}"
        self.slice(label, event.start_ns, event.at_ns, DEVICE_TID, "frame", args)
        for request_id, text in rows.items():
            self.ran_row(event, request_id, text)
        if event.why == "done":
            self.rows.pop(event.frame_id, None)

    def planned(self, event: Planned) -> None:
        for frame_id in event.from_frames:
            self.resume(frame_id, event.at_ns)
        self.rows[event.frame_id] = {
            row.request_id: f"tokens [{row.lo}, {row.hi}) layers [{row.start_layer}, "
            f"{row.end_layer})"
            for row in event.rows
        }

    def drop_row(self, frame_id: FrameId, request_id: RequestId, at_ns: int) -> None:
        self.unpark(frame_id, at_ns, only=request_id)
        self.rows.get(frame_id, {}).pop(request_id, None)

    def instant(self, name: str, at_ns: int, request_id: RequestId, args: dict[str, Any]) -> None:
        self.add("i", name, at_ns, self.track(request_id), s="t", args=args)

    def request_event(self, event: Event) -> None:
        match event:
            case Arrived():
                self.priorities[event.request_id] = event.priority
                self.waiting[event.request_id] = event.at_ns
                self.track(event.request_id, f"{class_name(event.priority)} {event.name}")
                args = {"prompt": event.num_prompt_tokens, "max_tokens": event.max_tokens}
                self.instant("arrived", event.at_ns, event.request_id, args)
            case Token():
                args = {"token_id": event.token_id}
                self.instant("token", event.at_ns, event.request_id, args)
            case Evicted() | SwappedOut() | Finished():
                for frame_id in tuple(self.rows):
                    self.drop_row(frame_id, event.request_id, event.at_ns)
                self.resuming.pop(event.request_id, None)
                self.waiting.pop(event.request_id, None)
                if isinstance(event, Evicted):
                    self.waiting[event.request_id] = event.at_ns
                    lost = {"num_tokens_lost": event.num_tokens_lost, "for": event.for_request}
                    self.instant("evicted", event.at_ns, event.request_id, lost)
                elif isinstance(event, SwappedOut):
                    self.waiting[event.request_id] = event.at_ns
                    out = {"num_tokens": event.num_tokens, "for": event.for_request}
                    self.instant("swapped out", event.at_ns, event.request_id, out)
                else:
                    why = {"reason": str(event.reason), "error": event.error}
                    self.instant("finished", event.at_ns, event.request_id, why)
            case SwappedIn():
                back = {"num_tokens": event.num_tokens}
                self.instant("swapped in", event.at_ns, event.request_id, back)
            case _:
                self.frame_event(event)

    def frame_event(self, event: Event) -> None:
        match event:
            case Ran():
                self.ran(event)
            case Planned():
                self.planned(event)
            case Segment():
                name = f"{event.kind} {event.layer}"
                args = {"frame": event.frame_id}
                self.slice(name, event.start_ns, event.at_ns, DEVICE_TID, "segment", args)
            case Parked():
                live = self.rows.get(event.frame_id, event.request_ids)
                ids = [r for r in event.request_ids if r in live]
                self.parked[event.frame_id] = dict.fromkeys(ids, event)
            case Resumed() | Replaced() | Split():
                self.resume(event.frame_id, event.at_ns)
                if isinstance(event, Replaced):
                    self.rows.pop(event.frame_id, None)
            case Killed() | Left():
                self.drop_row(event.frame_id, event.request_id, event.at_ns)
            case Dropped():
                self.unpark(event.frame_id, event.at_ns)
                self.rows.pop(event.frame_id, None)
            case _:
                pass


def _order(event: dict[str, Any]) -> tuple[bool, int, float, float, bool]:
    """Return the sort key: metadata first, then track and time.

    Outer slices come before inner ones.
    """
    inner = event.get("cat") == "segment"
    ts, dur = event.get("ts", 0.0), event.get("dur", 0.0)
    return (event["ph"] != "M", event["tid"], ts, -dur, inner)


def to_perfetto(trace: Iterable[Event]) -> dict[str, Any]:
    """Return a JSON object that Perfetto opens. Open intervals end with the last event."""
    export = _Export()
    process = {"ph": "M", "pid": PID, "tid": 0, "name": "process_name", "args": {"name": "qllm"}}
    export.out.append(process)
    export.name_track(DEVICE_TID, "device")
    last_ns = 0
    for event in trace:
        last_ns = max(last_ns, event.at_ns)
        export.request_event(event)
    for frame_id in tuple(export.parked):
        export.unpark(frame_id, last_ns)
    return {"traceEvents": sorted(export.out, key=_order), "displayTimeUnit": "ms"}


def write_perfetto(trace: Iterable[Event], path: str | os.PathLike[str]) -> None:
    """Write `to_perfetto(trace)` as JSON, for the owner of the file alone."""
    with write_private(path) as file:
        json.dump(to_perfetto(trace), file)
