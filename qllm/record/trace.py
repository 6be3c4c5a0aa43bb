"""Events and their sequence, the trace. Metrics are computed from a trace, and schedules repeated.

An event is one fact with `at_ns`, the engine's clock. The engine emits events.
`qllm.record.metrics` and `qllm.record.perfetto` are functions of the emitted events. A trace file
has JSON lines. The first line is a header:

    {"qllm_trace": 2, "num_events": 2, "meta": {}}
    {"event": "Arrived", "at_ns": 0, "request_id": 1, ...}
    {"event": "Finished", "at_ns": 0, "request_id": 1, ...}
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from qllm.errors import QllmError
from qllm.plan import Row
from qllm.private import write_private
from qllm.scheduler.program import Index, Program
from qllm.types import FinishReason, FrameId, Grain, RequestId, SamplingParams

if TYPE_CHECKING:  # pydantic reads files; it is slow to import, and an engine only appends events
    from pydantic import TypeAdapter

VERSION = 2
"""Version of the file format. A file of another version is refused."""


class TraceError(QllmError, ValueError):
    """A trace file is truncated, foreign or of another version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """A request was admitted to the waiting queue."""

    at_ns: int
    """Time when the user submitted the request, not when the loop received it."""
    request_id: RequestId
    priority: int
    num_prompt_tokens: int
    max_tokens: int
    name: str
    """Request id that the user gave or received."""
    token_ids: tuple[int, ...] | None = None
    """The prompt, if prompts are recorded."""
    sampling: dict[str, Any] | None = None
    """Result of `sampling_to_dict`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Updated:
    """A request got another class, was paused, or continues."""

    at_ns: int
    request_id: RequestId
    priority: int
    is_paused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Revised:
    """The prompt of a request changed, or is whole now."""

    at_ns: int
    """Time when the user sent the piece, not when the loop received it."""
    request_id: RequestId
    num_same: int
    """Number of first tokens that did not change."""
    num_kept: int
    """Number of these tokens whose KV still exists."""
    num_lost: int
    """Number of tokens that were computed in every layer and whose KV is lost."""
    num_prompt_tokens: int
    is_open: bool
    max_tokens: int
    token_ids: tuple[int, ...] | None = None
    """The prompt once it is whole, if prompts are recorded."""
    sampling: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafted:
    """A drafter proposed the next tokens of a request. The request's next row verifies them."""

    at_ns: int
    request_id: RequestId
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """A row has verified drafted tokens."""

    at_ns: int
    request_id: RequestId
    num_drafts: int
    num_accepted: int
    """Number of first drafts that are the tokens that the model chose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A new program was accepted."""

    at_ns: int
    frame_id: FrameId
    rows: tuple[Row, ...]
    grain: Grain
    stop_below: int
    from_frames: tuple[FrameId, ...] = ()
    """Parked frames that this one replaces."""
    exits: tuple[int, ...] = ()
    """Numbers of the draft rows."""
    samples: tuple[int, ...] = ()
    """`Program.samples` of a program with draft rows; else empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """The runner worked on a frame from `start_ns` to `at_ns`."""

    start_ns: int
    at_ns: int
    """End of the work."""
    frame_id: FrameId
    start: Index
    end: Index
    why: Literal["done", "stopped", "slice", "experts", "error"]
    """Reason of the end. "done" is the end of the whole program, not of a layer. With "experts" the
    frame waits until experts are read."""
    segments: int
    """Number of segments, each the work between two boundaries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Optional detail of a `Ran`: the work between two boundaries, from `start_ns` to `at_ns`."""

    start_ns: int
    at_ns: int
    """End of the work."""
    frame_id: FrameId
    kind: str
    """Name of the `OpKind`."""
    layer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parked:
    """A frame stopped at a boundary. It keeps the data that it needs to continue."""

    at_ns: int
    frame_id: FrameId
    request_ids: tuple[RequestId, ...]
    layer: int
    """First layer not finished."""
    inside_layer: bool
    for_request: RequestId | None = None
    """Request that stopped the frame; None if it is unknown."""
    arrival_ns: int | None = None
    """Time when the stopping request lowered the stop word. Preempt latency is `at_ns -
    arrival_ns`."""

    @property
    def preempted(self) -> bool:
        """Return True if a request stopped the frame. The end of a slice is not a preemption."""
        return self.for_request is not None or self.arrival_ns is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """A parked frame is about to continue, unchanged."""

    at_ns: int
    frame_id: FrameId


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaced:
    """The rows of a parked frame continue in another frame.

    This is the last event of the old frame.
    """

    at_ns: int
    frame_id: FrameId
    by_frame_id: FrameId


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A parked frame was released. Its rows kept their hidden states."""

    at_ns: int
    frame_id: FrameId
    index: Index


@dataclass(frozen=True, slots=True, kw_only=True)
class Killed:
    """One row of a parked frame is dead."""

    at_ns: int
    frame_id: FrameId
    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """One row left a parked frame.

    The row's request kept the hidden states at the layer of `index`.
    """

    at_ns: int
    frame_id: FrameId
    request_id: RequestId
    index: Index


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """A frame was released, and nothing was committed."""

    at_ns: int
    frame_id: FrameId
    reason: str
    """"error" (its live rows are retried), "dead" (no live row), "evicted" or "closed"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A request produced a token."""

    at_ns: int
    request_id: RequestId
    token_id: int
    logprob: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evicted:
    """A request lost its KV. The KV will be computed again."""

    at_ns: int
    request_id: RequestId
    num_tokens_lost: int
    for_request: RequestId | None = None
    """Request that needed the blocks; None if the policy evicted without a need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwappedOut:
    """The KV of a request was swapped out of its blocks. Computed tokens stay computed."""

    at_ns: int
    request_id: RequestId
    num_tokens: int
    for_request: RequestId | None = None
    """Request that needed the blocks; None if the policy swapped out without a need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwappedIn:
    """The KV of a request was swapped in."""

    at_ns: int
    request_id: RequestId
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reused:
    """The first tokens of a request were copied from the prefix cache."""

    at_ns: int
    request_id: RequestId
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A request ended. Every request has exactly one such event (I13)."""

    at_ns: int
    request_id: RequestId
    reason: FinishReason
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CostsUpdated:
    """The engine refitted the cost table that policies see."""

    at_ns: int
    table: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineClosed:
    """The engine loop ended."""

    at_ns: int


Event = (
    Arrived
    | Updated
    | Revised
    | Drafted
    | Verified
    | Planned
    | Ran
    | Segment
    | Parked
    | Resumed
    | Replaced
    | Split
    | Killed
    | Left
    | Dropped
    | Token
    | Evicted
    | SwappedOut
    | SwappedIn
    | Reused
    | Finished
    | CostsUpdated
    | EngineClosed
)
"""Union of all event classes."""

EVENT_TYPES: dict[str, type[Any]] = {cls.__name__: cls for cls in get_args(Event)}
"""Event classes by the names that trace files contain."""
_FIELDS = {name: tuple(f.name for f in fields(cls)) for name, cls in EVENT_TYPES.items()}


def sampling_to_dict(params: SamplingParams) -> dict[str, Any]:
    """Return `params` as values that JSON keeps unchanged, for `Arrived.sampling`."""
    out = asdict(params)
    del out["max_tokens"], out["n"]  # a request has a max_tokens of its own, and one answer
    out["stop"] = list(params.stop)
    out["stop_token_ids"] = list(params.stop_token_ids)
    out["bad_words"] = list(params.bad_words)
    if not isinstance(params.prediction, str):
        out["prediction"] = list(params.prediction)
    if params.allowed_token_ids is not None:
        out["allowed_token_ids"] = list(params.allowed_token_ids)
    if (form := params.structured_outputs) is not None:
        out["structured_outputs"] = {form.kind: list(form.choice) if form.choice else form.text()}
    out["logit_bias"] = [[k, v] for k, v in sorted(params.logit_bias.items())]
    return out


def sampling_from_dict(values: Mapping[str, Any]) -> SamplingParams:
    """Return the sampling parameters of `sampling_to_dict`'s result."""
    return SamplingParams(**{**values, "logit_bias": dict(values.get("logit_bias", ()))})


def event_to_dict(event: Event) -> dict[str, Any]:
    """Return the fields of an event as a trace file contains them, before the step to JSON."""
    name = type(event).__name__
    out: dict[str, Any] = {"event": name}
    for f in _FIELDS[name]:
        out[f] = getattr(event, f)
    return out


@cache
def _adapter(name: str) -> "TypeAdapter[Any]":
    from pydantic import TypeAdapter

    return TypeAdapter(EVENT_TYPES[name])


def event_from_dict(values: Mapping[str, Any]) -> Event:
    """Return the event of `event_to_dict`'s result.

    Raises:
        TraceError: The values are not an event, or fields are missing, unknown or of a wrong type.
    """
    from pydantic import ValidationError

    name = values.get("event")
    if name not in EVENT_TYPES:
        raise TraceError(f"event={name!r} must be one of {', '.join(EVENT_TYPES)}")
    rest = {key: value for key, value in values.items() if key != "event"}
    if unknown := rest.keys() - set(_FIELDS[name]):
        raise TraceError(f"{name} has no field {sorted(unknown)}; it has {list(_FIELDS[name])}")
    try:
        event: Event = _adapter(name).validate_python(rest)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise TraceError(f"{name}.{where}: {first['msg']}") from error
    return event


@dataclass(slots=True)
class Trace:
    """The events of a run, in the order in which the engine emitted them.

    A `Ran` or a `Segment` is emitted at its end, so `at_ns` does not decrease. `Arrived` is an
    exception: its `at_ns` may be earlier than that of the previous event.
    """

    events: list[Event] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)
    """Model, policy and settings of the run, as values that JSON can hold."""

    def append(self, event: Event) -> None:
        """Add one event."""
        self.events.append(event)

    def __len__(self) -> int:
        return len(self.events)

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def write_jsonl(self, path: str | os.PathLike[str]) -> None:
        """Write a header and one line per event. Only the owner may read the file."""
        events = tuple(self.events)  # the engine may still append
        header = {"qllm_trace": VERSION, "num_events": len(events), "meta": self.meta}
        with write_private(path) as file:
            file.write(json.dumps(header) + "\n")
            for event in events:
                file.write(json.dumps(event_to_dict(event), separators=(",", ":")) + "\n")

    @classmethod
    def read_jsonl(cls, path: str | os.PathLike[str]) -> Self:
        """Read a trace file from `write_jsonl`.

        Raises:
            TraceError: The file is truncated, foreign or of another version.
        """
        try:
            with open(path, encoding="utf-8") as file:
                return cls._read(os.fspath(path), file)
        except UnicodeDecodeError as error:
            raise TraceError(f"{os.fspath(path)}: not a qllm trace: {error}") from error

    @classmethod
    def _read(cls, path: str, lines: Iterable[str]) -> Self:
        rows = iter(lines)
        num_events, meta = _read_header(path, next(rows, ""))
        events: list[Event] = []
        for number, line in enumerate(rows, start=2):
            if not line.endswith("\n"):
                break  # the file was cut in the middle of a line, which the count below detects
            try:
                values = json.loads(line)
                if not isinstance(values, dict):
                    raise TraceError(f"expected an object, got {type(values).__name__}")
                events.append(event_from_dict(values))
            except (json.JSONDecodeError, TraceError, RecursionError) as error:
                raise TraceError(f"{path}:{number}: {error}") from error
        if len(events) != num_events:
            raise TraceError(
                f"{path}: its header promises {num_events} events and it has {len(events)} whole "
                "ones; the file is truncated or was edited, record the run again"
            )
        return cls(events, meta)


def _read_header(path: str, line: str) -> tuple[int, dict[str, Any]]:
    try:
        header = json.loads(line)
    except (json.JSONDecodeError, RecursionError):
        header = None
    if not isinstance(header, dict) or "qllm_trace" not in header:
        raise TraceError(f"{path}: not a qllm trace (its first line is no header of one)")
    version = header["qllm_trace"]
    if version != VERSION:
        raise TraceError(f"{path}: version={version!r} must be {VERSION}; record the run again")
    num_events, meta = header.get("num_events"), header.get("meta", {})
    if not isinstance(num_events, int) or not isinstance(meta, dict):
        raise TraceError(f"{path}: its header is damaged: num_events={num_events!r}")
    return num_events, meta


def planned(program: Program, from_frames: tuple[FrameId, ...], at_ns: int) -> Planned:
    """Return the event of a program that got its frame."""
    return Planned(
        at_ns=at_ns,
        frame_id=program.frame_id,
        rows=program.rows,
        grain=program.grain,
        stop_below=program.stop_below,
        from_frames=from_frames,
        exits=program.exits,
        samples=program.samples if program.exits else (),
    )


def parked(program: Program, index: Index, at_ns: int, arrival_ns: int | None) -> Parked:
    """Return the event of a program that stopped at a boundary."""
    return Parked(
        at_ns=at_ns,
        frame_id=program.frame_id,
        request_ids=program.request_ids,
        layer=program.layer_at(index),
        inside_layer=program.inside_layer(index),
        arrival_ns=arrival_ns,
    )
