"""The passes for the live page: it takes events, and returns new entries.

Small passes in a row become one entry. The size of an answer is bounded, whatever the engine does.
Times are milliseconds of the engine's clock. A track is LS (every class before BE) or BE. A layer
number is the first unfinished layer, plus a half if the pass stopped inside this layer.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from qllm.plan import Row
from qllm.record.metrics import class_name
from qllm.record.trace import (
    Arrived,
    Dropped,
    Event,
    Evicted,
    Finished,
    Parked,
    Planned,
    Ran,
    Replaced,
    Resumed,
    Split,
    SwappedIn,
    SwappedOut,
    Token,
)
from qllm.types import NS_PER_MS, FrameId, Priority, RequestId

MAX_NEW = 400
"""Most entries of one answer. The latest entries are kept."""
MAX_NAMES = 3
"""Most requests of a pass that an entry names."""
SMALL_NS = 4 * NS_PER_MS
"""Shortest pass that is drawn alone. Shorter passes are drawn together with their neighbours."""
TOGETHER_NS = 16 * NS_PER_MS
"""Longest time of passes that are drawn together."""
MAX_REQUESTS = 20_000
"""Most requests whose names are stored. The oldest names are dropped first."""


class _Known(NamedTuple):
    name: str
    priority: int
    arrival_ns: int
    has_token: bool


@dataclass(slots=True)
class _Pass:
    """A frame that is planned, runs or is parked."""

    request_ids: tuple[RequestId, ...]
    priority: int
    """The best class among the rows of the frame."""
    num_tokens: int
    layer: float
    """First unfinished layer, plus a half inside this layer."""
    end_layer: int
    since_ns: int
    """Time when the frame was planned, resumed or parked."""
    is_parked: bool = False
    preempted: bool = False


@dataclass(slots=True)
class _Run:
    """Work on the device from one boundary to another: one pass, or several small passes."""

    start_ns: int
    end_ns: int
    track: str
    start_layer: float
    end_layer: float
    passes: int
    rows: int
    tokens: int

    def takes(self, other: "_Run") -> bool:
        """Return True if both are small whole passes of one track that follow each other."""
        return (
            self.track == other.track
            and self.start_layer == other.start_layer == 0
            and self.end_layer == other.end_layer
            and other.end_ns - other.start_ns < SMALL_NS
            and self.end_ns - self.start_ns < SMALL_NS * self.passes
            and other.start_ns - self.end_ns < SMALL_NS
            and other.end_ns - self.start_ns <= TOGETHER_NS
        )

    def take(self, other: "_Run") -> None:
        """Merge the other run into this one."""
        self.end_ns = other.end_ns
        self.passes += other.passes
        self.rows = max(self.rows, other.rows)
        self.tokens += other.tokens

    def entry(self) -> list[Any]:
        """Return the entry for the page."""
        at = (_ms(self.start_ns), _ms(self.end_ns))
        place = (self.track, self.start_layer, self.end_layer)
        return ["run", *at, *place, self.passes, self.rows, self.tokens]


@dataclass(slots=True)
class Timeline:
    """A builder of the page's entries from events.

    It has many methods because each kind of event has one.

    Entries are lists of JSON values. The first item names the kind:

    - `run`, start, end, track, first layer, end layer, passes, most rows, tokens
    - `held`, start, end, track, layer, preempted: a parked pass that continued or ended
    - `preempted`, at, latency, track, layer, number of requests, their first names, class and
      name of the request that ran instead
    - `arrived`, at, class, name, prompt tokens; `first`, at, class, name, TTFT
    - `ended`, at, class, name, reason
    - `evicted`, `swapped out`, `swapped in`: at, class, name, tokens
    """

    seq: int = 0
    """Number of entries so far."""
    num_output_tokens: dict[str, int] = field(default_factory=lambda: {"LS": 0, "BE": 0})
    num_pass_tokens: dict[str, int] = field(default_factory=lambda: {"LS": 0, "BE": 0})
    """Tokens of finished passes, prompts included."""
    num_preemptions: int = 0
    _entries: deque[list[Any]] = field(default_factory=lambda: deque(maxlen=MAX_NEW))
    _known: dict[RequestId, _Known] = field(default_factory=dict)
    _passes: dict[FrameId, _Pass] = field(default_factory=dict)
    _open: _Run | None = None
    """Run that the next pass may join."""
    _stopped: Ran | None = None
    """Run that stopped. The next event is the run's `Parked`, which has the last layer."""
    _preempted: list[Any] | None = None
    """Preemption entry without the name of the request that caused it."""

    # -- state before the first event

    def know(
        self, request_id: RequestId, name: str, priority: int, arrival_ns: int, has_token: bool
    ) -> None:
        """Add a request that arrived before the first event."""
        while len(self._known) >= MAX_REQUESTS:
            del self._known[next(iter(self._known))]
        self._known[request_id] = _Known(name, priority, arrival_ns, has_token)

    def know_parked(
        self, frame_id: FrameId, rows: Sequence[Row], layer: float, parked_ns: int
    ) -> None:
        """Add a frame that was parked before the first event."""
        self._passes[frame_id] = found = self._pass_of(rows, parked_ns)
        found.layer, found.is_parked = layer, True

    def forget(self) -> None:
        """Drop open entries, because events are missing from here on."""
        self._known.clear()
        self._passes.clear()
        self._open = self._stopped = self._preempted = None

    # -- events

    def feed(self, event: Event) -> None:
        """Take one event."""
        match event:
            case Token():
                self._token(event)
            case Ran():
                self._ran(event)
            case Planned():
                self._planned(event)
            case Parked():
                self._parked(event)
            case Resumed():
                self._resumed(event)
            case Split() | Replaced() | Dropped():
                self._let_go(event.frame_id, event.at_ns)
            case Arrived():
                self._arrived(event)
            case Finished() | Evicted() | SwappedOut() | SwappedIn():
                self._request_event(event)
            case _:
                pass

    def _arrived(self, event: Arrived) -> None:
        at, name = event.at_ns, event.name
        self.know(event.request_id, name, event.priority, at, False)
        self._add("arrived", at, class_name(event.priority), name, event.num_prompt_tokens)

    def _token(self, event: Token) -> None:
        known = self._known.get(event.request_id)
        if known is None:
            return
        self.num_output_tokens[track_of(known.priority)] += 1
        if not known.has_token:
            self._known[event.request_id] = known._replace(has_token=True)
            ttft_ms = _ms(event.at_ns - known.arrival_ns)
            self._add("first", event.at_ns, class_name(known.priority), known.name, ttft_ms)

    def _request_event(self, event: Finished | Evicted | SwappedOut | SwappedIn) -> None:
        known = self._known.get(event.request_id)
        if known is None:
            return
        who = (event.at_ns, class_name(known.priority), known.name)
        match event:
            case Finished():
                del self._known[event.request_id]
                self._add("ended", *who, event.reason.value)
            case Evicted():
                self._add("evicted", *who, event.num_tokens_lost)
            case SwappedOut():
                self._add("swapped out", *who, event.num_tokens)
            case SwappedIn():
                self._add("swapped in", *who, event.num_tokens)

    def _planned(self, event: Planned) -> None:
        for frame_id in event.from_frames:
            self._let_go(frame_id, event.at_ns)
        self._passes[event.frame_id] = self._pass_of(event.rows, event.at_ns)
        self._ran_instead([row.request_id for row in event.rows])

    def _resumed(self, event: Resumed) -> None:
        found = self._passes.get(event.frame_id)
        if found is not None:
            self._unpark(found, event.at_ns)
            self._ran_instead(found.request_ids)

    def _ran(self, event: Ran) -> None:
        found = self._passes.get(event.frame_id)
        if found is None:
            return
        self._unpark(found, event.start_ns)
        if event.why == "done":
            self.num_pass_tokens[track_of(found.priority)] += found.num_tokens
            self._add_run(event, found, found.end_layer)
            del self._passes[event.frame_id]
        elif event.why != "error":
            self._stopped = event

    def _parked(self, event: Parked) -> None:
        found = self._passes.get(event.frame_id)
        if found is None:
            return
        layer = event.layer + 0.5 * event.inside_layer
        ran, self._stopped = self._stopped, None
        if ran is not None and ran.frame_id == event.frame_id:
            self._add_run(ran, found, layer)
        found.layer, found.since_ns = layer, event.at_ns
        found.is_parked, found.preempted = True, event.preempted
        if not event.preempted:
            return
        self.num_preemptions += 1
        self._give_preempted()
        names = [known.name for i in event.request_ids if (known := self._known.get(i))]
        since = event.at_ns if event.arrival_ns is None else event.arrival_ns
        self._preempted = [
            *("preempted", _ms(event.at_ns), _ms(event.at_ns - since), track_of(found.priority)),
            *(layer, len(event.request_ids), names[:MAX_NAMES], None, None),
        ]

    # -- parts

    def _pass_of(self, rows: Sequence[Row], at_ns: int) -> _Pass:
        known = (self._known.get(row.request_id) for row in rows)
        return _Pass(
            request_ids=tuple(row.request_id for row in rows),
            priority=min((k.priority for k in known if k), default=int(Priority.BE)),
            num_tokens=sum(row.num_tokens for row in rows),
            layer=min(row.start_layer for row in rows),
            end_layer=max(row.end_layer for row in rows),
            since_ns=at_ns,
        )

    def _let_go(self, frame_id: FrameId, at_ns: int) -> None:
        found = self._passes.pop(frame_id, None)
        if found is not None:
            self._unpark(found, at_ns)

    def _unpark(self, found: _Pass, at_ns: int) -> None:
        if found.is_parked:
            place = (track_of(found.priority), found.layer, found.preempted)
            self._add("held", found.since_ns, _ms(at_ns), *place)
            found.is_parked, found.since_ns = False, at_ns

    def _ran_instead(self, request_ids: Iterable[RequestId]) -> None:
        """Name the best request of a pass in the last preemption entry, as the cause."""
        if self._preempted is not None:
            known = [k for i in request_ids if (k := self._known.get(i))]
            if known:
                best = min(known, key=lambda k: (k.priority, -k.arrival_ns))
                self._preempted[-2:] = class_name(best.priority), best.name
            self._give_preempted()

    def _give_preempted(self) -> None:
        entry, self._preempted = self._preempted, None
        if entry is not None:
            self._append(entry)

    def _add_run(self, ran: Ran, found: _Pass, end_layer: float) -> None:
        run = _Run(
            ran.start_ns, ran.at_ns, track_of(found.priority), found.layer, end_layer,
            1, len(found.request_ids), found.num_tokens,
        )  # fmt: skip
        if self._open is not None and self._open.takes(run):
            self._open.take(run)
            return
        self._give_open()
        self._open = run

    def _give_open(self) -> None:
        run, self._open = self._open, None
        if run is not None:
            self._append(run.entry())

    def _add(self, what: str, at_ns: int, *rest: Any) -> None:
        self._append([what, _ms(at_ns), *rest])

    def _append(self, entry: list[Any]) -> None:
        self.seq += 1
        self._entries.append(entry)

    # -- output for the page

    def since(self, seq: int) -> tuple[list[list[Any]], int]:
        """Return entries after the first `seq`, at most `MAX_NEW`, and the number of lost entries.

        A `seq` larger than the number of entries is from another engine. Then all entries are new.
        """
        self._give_open()
        num_new = self.seq - seq if 0 <= seq <= self.seq else self.seq
        num_kept = min(num_new, len(self._entries))
        new = list(self._entries)[len(self._entries) - num_kept :]
        return new, num_new - num_kept

    def now(self) -> dict[str, Any]:
        """Return parked and running passes: `[since, track, layer, end layer, rows]`.

        A parked pass has a sixth item: True if it was preempted.
        """
        parked, running = [], None
        for found in self._passes.values():
            place = (track_of(found.priority), found.layer, found.end_layer)
            entry = [_ms(found.since_ns), *place, len(found.request_ids)]
            if found.is_parked:
                parked.append([*entry, found.preempted])
            else:
                running = entry
        return {"parked": parked[-MAX_NEW:], "running": running}


def track_of(priority: int) -> str:
    """Return LS for all classes before BE, else BE."""
    return "LS" if priority < Priority.BE else "BE"


def _ms(ns: int) -> float:
    return round(ns / NS_PER_MS, 2)
