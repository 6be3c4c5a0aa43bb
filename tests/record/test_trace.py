# Events, metrics and exports are read from the same few traces.
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qllm.measure.plots import choose_window, ttft_figure
from qllm.plan import NO_STOP, Row
from qllm.record.metrics import MetricsBuilder, RequestMetrics
from qllm.record.perfetto import DEVICE_TID, to_perfetto, write_perfetto
from qllm.record.summary import Distribution, percentile, request_metrics
from qllm.record.summary import summarize as summarize_trace
from qllm.record.trace import (
    EVENT_TYPES,
    Arrived,
    CostsUpdated,
    Drafted,
    Dropped,
    EngineClosed,
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
    Segment,
    Split,
    SwappedIn,
    SwappedOut,
    Token,
    Trace,
    TraceError,
    Updated,
    Verified,
    sampling_from_dict,
    sampling_to_dict,
)
from qllm.scheduler.program import START, Index
from qllm.types import NS_PER_MS, FinishReason, Grain, Priority, SamplingParams, Slo

MS = NS_PER_MS
LAYERS = 4
PARAMS = SamplingParams(seed=3, stop=("a", "b"), logit_bias={5: -1.5, 2: 1.0})
PREFILL_MS = {Priority.LS: 12, Priority.BE: 40}


def ns(at_ms: float) -> int:
    return round(at_ms * MS)


def arrived(at_ms: float, request_id: int, priority: int = Priority.BE, prompt: int = 8) -> Arrived:
    sizes = {"priority": priority, "num_prompt_tokens": prompt, "max_tokens": 4}
    return Arrived(at_ns=ns(at_ms), request_id=request_id, name=f"räk {request_id}", **sizes)


def planned(at_ms: float, frame_id: int, *rows: Row, from_frames: tuple[int, ...] = ()) -> Planned:
    stop = {"grain": Grain.EXPERT, "stop_below": NO_STOP, "from_frames": from_frames}
    return Planned(at_ns=ns(at_ms), frame_id=frame_id, rows=rows, **stop)


def ran(start_ms: float, end_ms: float, frame_id: int, why: str = "done") -> Ran:
    what = {"start": START, "end": Index(3, 1), "why": why, "segments": 5}
    return Ran(start_ns=ns(start_ms), at_ns=ns(end_ms), frame_id=frame_id, **what)


def parked(at_ms: float, frame_id: int, *ids: int, layer: int = 2, by: int | None = 9) -> Parked:
    arrival_ns = None if by is None else ns(at_ms - 1)
    where = {"request_ids": ids, "layer": layer, "inside_layer": False, "for_request": by}
    return Parked(at_ns=ns(at_ms), frame_id=frame_id, arrival_ns=arrival_ns, **where)


def token(at_ms: float, request_id: int) -> Token:
    return Token(at_ns=ns(at_ms), request_id=request_id, token_id=7)


def finished(at_ms: float, request_id: int, reason: str = "length") -> Finished:
    return Finished(at_ns=ns(at_ms), request_id=request_id, reason=FinishReason(reason))


def evicted(at_ms: float, request_id: int, num_tokens: int) -> Evicted:
    return Evicted(at_ns=ns(at_ms), request_id=request_id, num_tokens_lost=num_tokens)


def row(request_id: int, lo: int, hi: int, start: int = 0, end: int = LAYERS) -> Row:
    return Row(request_id, lo, hi, start, end)


def a_preemption() -> list[Event]:
    """BE request 1 prefills [0, 8), is parked at layer 2 for LS request 9, and goes on."""
    return [
        arrived(0, 1),
        planned(2, 1, row(1, 0, 8)),
        arrived(9, 9, Priority.LS, prompt=4),
        ran(2, 10, 1, "stopped"),
        parked(10, 1, 1),
        planned(10, 2, row(9, 0, 4)),
        ran(11, 20, 2),
        token(20, 9),
        finished(20, 9, "stop"),
        Resumed(at_ns=22 * MS, frame_id=1),
        ran(23, 30, 1),
        token(30, 1),
        planned(30, 3, row(1, 8, 9)),
        ran(30, 34, 3),
        token(34, 1),
        planned(34, 4, row(1, 9, 10)),
        ran(34, 40, 4),
        token(40, 1),
        finished(40, 1),
        EngineClosed(at_ns=50 * MS),
    ]


def one_of_each() -> list[Event]:
    return [
        replace(arrived(0, 1, priority=10), token_ids=(1, 2), sampling=sampling_to_dict(PARAMS)),
        Revised(
            at_ns=MS,
            request_id=1,
            num_same=1,
            num_kept=1,
            num_lost=0,
            num_prompt_tokens=2,
            is_open=False,
            max_tokens=4,
            token_ids=(1, 3),
            sampling=sampling_to_dict(PARAMS),
        ),
        Drafted(at_ns=MS, request_id=1, token_ids=(4, 5)),
        planned(1, 1, row(1, 0, 2), from_frames=(0,)),
        Verified(at_ns=2 * MS, request_id=1, num_drafts=2, num_accepted=1),
        ran(1, 2, 1, "slice"),
        Segment(start_ns=MS, at_ns=2 * MS, frame_id=1, kind="ATTN", layer=0),
        parked(2, 1, 1),
        Resumed(at_ns=3 * MS, frame_id=1),
        Replaced(at_ns=3 * MS, frame_id=1, by_frame_id=2),
        Split(at_ns=3 * MS, frame_id=1, index=Index(4, 2)),
        Killed(at_ns=3 * MS, frame_id=2, request_id=1),
        Left(at_ns=3 * MS, frame_id=2, request_id=1, index=Index(3, 0)),
        Dropped(at_ns=3 * MS, frame_id=2, reason="error"),
        Token(at_ns=4 * MS, request_id=1, token_id=8, logprob=float("-inf")),
        Reused(at_ns=7, request_id=1, num_tokens=64),
        evicted(4, 1, 2),
        SwappedOut(at_ns=4 * MS, request_id=1, num_tokens=2, for_request=0),
        SwappedIn(at_ns=5 * MS, request_id=1, num_tokens=2),
        Finished(at_ns=5 * MS, request_id=1, reason=FinishReason.ERROR, error="boom"),
        Updated(at_ns=5 * MS, request_id=1, priority=0, is_paused=True),
        CostsUpdated(at_ns=5 * MS, table={"attn": [1, 2]}),
        EngineClosed(at_ns=6 * MS),
    ]


class ToyEngine:
    """One device, whole prefills and single decodes; LS parks BE. Emits what an engine would."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.events: list[Event] = []
        self.now = 0
        self.frames = 0
        self.done: dict[int, int] = {}
        self.left: dict[int, int] = {}
        self.parked: tuple[int, int, int] | None = None

    def run(self, num_requests: int) -> list[Event]:
        at, pending = 0, []
        for request_id in range(1, num_requests + 1):
            at += self.random.randrange(1, 60)
            pending.append(arrived(at, request_id, self.random.choice(list(Priority))))
            self.left[request_id] = self.random.randrange(1, 6)
        live: dict[int, Arrived] = {}
        while pending or live:
            if not live:
                self.now = max(self.now, pending[0].at_ns)
            self.admit(pending, live)
            best = min(live.values(), key=lambda a: (a.priority, a.at_ns))
            self.step(best, pending, live)
        self.events.append(EngineClosed(at_ns=self.now))
        return self.events

    def admit(self, pending: list[Arrived], live: dict[int, Arrived]) -> None:
        while pending and pending[0].at_ns <= self.now:
            first = pending.pop(0)
            live[first.request_id] = first
            self.events.append(first)

    def step(self, request: Arrived, pending: list[Arrived], live: dict[int, Arrived]) -> None:
        rid = request.request_id
        if self.parked and self.parked[0] == rid:
            _, frame, owed = self.parked
            self.parked = None
            self.now += 1000
            self.events.append(Resumed(at_ns=self.now, frame_id=frame))
        else:
            self.frames += 1
            frame, lo = self.frames, self.done.get(rid, 0)
            hi = lo + 1 if lo else request.num_prompt_tokens
            self.events.append(planned(self.now / MS, frame, row(rid, lo, hi)))
            owed = (2 if lo else PREFILL_MS[Priority(request.priority)]) * MS
        start, end = self.now, self.now + owed
        stop = [a for a in pending if a.at_ns < end and a.priority < request.priority]
        if stop and self.parked is None and stop[0].at_ns + MS < end:
            self.now = max(stop[0].at_ns, start) + MS
            self.events.append(ran(start / MS, self.now / MS, frame, "stopped"))
            self.parked = (rid, frame, end - self.now)
            layer = 1 + (self.now - start) * (LAYERS - 1) // (owed + 1)
            by = stop[0].request_id
            self.events.append(parked(self.now / MS, frame, rid, layer=layer, by=by))
            return
        self.now = end
        for a, b in ((start, (start + end) // 2), ((start + end) // 2, end)):
            self.events.append(Segment(start_ns=a, at_ns=b, frame_id=frame, kind="ATTN", layer=0))
        self.events += [ran(start / MS, end / MS, frame), token(end / MS, rid)]
        self.done[rid] = max(request.num_prompt_tokens, self.done.get(rid, 0) + 1)
        self.left[rid] -= 1
        if not self.left[rid]:
            self.events.append(finished(end / MS, rid))
            del live[rid]


def of(events: list[Event], request_id: int = 1) -> RequestMetrics:
    return {m.request_id: m for m in request_metrics(events)}[request_id]


def test_every_event_survives_a_file(tmp_path: Path) -> None:
    trace = Trace(one_of_each(), meta={"policy": "qllm2"})
    assert {type(event).__name__ for event in trace} == set(EVENT_TYPES)
    trace.write_jsonl(tmp_path / "run.jsonl")
    again = Trace.read_jsonl(tmp_path / "run.jsonl")
    assert again == trace
    assert [repr(event) for event in again] == [repr(event) for event in trace]
    first = again.events[0]
    assert isinstance(first, Arrived)
    assert sampling_from_dict(first.sampling or {}) == PARAMS


@given(cut=st.integers(0, 10_000))
def test_a_file_cut_anywhere_is_refused(cut: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "cut.jsonl"
    Trace(one_of_each()).write_jsonl(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: cut % len(whole)])
    with pytest.raises(TraceError, match=r"truncated|not a qllm trace"):
        Trace.read_jsonl(path)


HEADER = '{"qllm_trace": 2, "num_events": 1, "meta": {}}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a qllm trace"),
        ("\xff\xfe\x00\n", "not a qllm trace"),
        ("[1, 2]\n", "not a qllm trace"),
        ('{"loss": 0.5}\n', "not a qllm trace"),
        ('{"qllm_trace": 1, "num_events": 0}\n', "version=1 must be 2"),
        ('{"qllm_trace": 2}\n', "damaged"),
        (HEADER + '{"event": "Exploded", "at_ns": 1}\n', ":2: event='Exploded' must be one of"),
        (HEADER + "[]\n", ":2: expected an object"),
        (HEADER + "{]\n", ":2: "),
        (HEADER + '{"event": "Resumed", "at_ns": "soon", "frame_id": 1}\n', "Resumed.at_ns"),
        (HEADER + '{"event": "Resumed", "at_ns": 1}\n', "Resumed.frame_id"),
        (HEADER + '{"event": "Resumed", "at_ns": 1, "frame_id": 1, "x": 2}\n', "no field"),
    ],
)
def test_a_foreign_file_is_refused_with_the_place(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "foreign.jsonl"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(TraceError) as caught:
        Trace.read_jsonl(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_percentile_interpolates_linearly() -> None:
    assert percentile([4, 1, 3, 2], 50) == 2.5
    assert percentile([1, 2, 3, 4], 90) == pytest.approx(3.7)
    assert percentile([5], 99) == 5
    assert [percentile([1, 9], p) for p in (0, 100)] == [1, 9]
    for values, p in (([], 50), ([1], 101), ([1], -1)):
        with pytest.raises(ValueError, match="must be in"):
            percentile(values, p)


def test_a_preemption_counted_by_hand() -> None:
    be, ls = of(a_preemption(), 1), of(a_preemption(), 9)
    assert (be.queue_ms, be.ttft_ms, be.tpot_ms, be.e2e_ms) == (2, 30, 5, 40)
    assert be.itl_ms == (4, 6)
    assert (be.preemptions, be.parked_ms, be.max_stall_ms) == (1, 12, 13)
    assert (be.num_output_tokens, be.num_prefilled_tokens) == (3, 8)
    assert be.reason is FinishReason.LENGTH
    assert (ls.queue_ms, ls.ttft_ms, ls.tpot_ms, ls.e2e_ms) == (1, 11, None, 11)
    assert (ls.itl_ms, ls.preemptions, ls.parked_ms, ls.max_stall_ms) == ((), 0, 0, 1)
    for m in (be, ls):
        assert m.preempt_recomputed_tokens == m.evict_recomputed_tokens == 0


def test_a_summary_counted_by_hand() -> None:
    events = a_preemption()
    segment = Segment(start_ns=2 * MS, at_ns=5 * MS, frame_id=1, kind="EXPERTS", layer=0)
    events.insert(3, segment)
    slos = {0: Slo(ttft_ms=11), 10: Slo(ttft_ms=30, tpot_ms=4.9)}
    out = summarize_trace(events, slos)
    assert out.duration_s == pytest.approx(0.05)
    assert (out.frames, out.frames_parked) == (4, 1)
    assert out.preempt_latency_ms == Distribution(count=1, mean=1, p50=1, p90=1, p99=1, max=1)
    assert (out.longest_segment_ms, out.longest_segment_kind) == (3, "EXPERTS")
    ls, be = out.classes[0], out.classes[10]
    assert (ls.slo_attainment, be.slo_attainment) == (1, 0)
    assert (ls.goodput_per_s, be.goodput_per_s) == (pytest.approx(20), 0)
    assert (ls.prefill_tokens_per_s, be.prefill_tokens_per_s) == (80, 160)
    assert (ls.output_tokens_per_s, be.output_tokens_per_s) == (20, 60)
    assert be.itl_ms == Distribution(count=2, mean=5, p50=5, p90=5.8, p99=5.98, max=6)
    assert (ls.finished, be.finished) == ({"stop": 1}, {"length": 1})
    assert ls.tpot_ms is None
    assert summarize_trace([]).classes == {}


def test_a_request_that_did_not_end_misses_its_slo_and_a_cancelled_one_is_not_judged() -> None:
    events: list[Event] = [*(arrived(0, n) for n in (1, 2, 3, 4)), token(1, 1), token(1, 3)]
    events += [finished(2, 1), finished(2, 2, "cancelled"), EngineClosed(at_ns=4 * MS)]
    be = summarize_trace(events, {10: Slo(ttft_ms=100)}).classes[10]
    assert (be.arrived, be.finished) == (4, {"cancelled": 1, "length": 1})
    assert be.slo_attainment == pytest.approx(1 / 3)
    assert of(events, 3).reason is None
    assert of(events, 2).ttft_ms is None


def test_the_end_of_a_slice_parks_but_does_not_preempt() -> None:
    events = [arrived(0, 1), planned(0, 1, row(1, 0, 8)), ran(0, 5, 1, "slice")]
    events += [parked(5, 1, 1, by=None), ran(9, 12, 1), token(12, 1), finished(12, 1)]
    assert (of(events).preemptions, of(events).parked_ms) == (0, 4)
    assert summarize_trace(events).preempt_latency_ms is None
    events[3] = replace(events[3], arrival_ns=4 * MS)  # type: ignore[call-arg]
    assert of(events).preemptions == 1, "whose arrival it was need not be known"


def test_rows_that_replace_a_parked_frame_recompute_nothing() -> None:
    events = [arrived(0, 1), planned(0, 1, row(1, 0, 8)), ran(0, 5, 1, "stopped")]
    events += [parked(5, 1, 1, layer=2), ran(8, 9, 1, "stopped")]
    events += [Split(at_ns=9 * MS, frame_id=1, index=Index(9, 0))]
    events += [Replaced(at_ns=9 * MS, frame_id=1, by_frame_id=2)]
    events += [planned(9, 2, row(1, 0, 8, start=3), from_frames=(1,)), ran(9, 12, 2)]
    assert of(events).preempt_recomputed_tokens == 0
    assert (of(events).parked_ms, of(events).max_stall_ms) == (3, 3)
    assert of(events).num_prefilled_tokens == 8


def test_starting_a_parked_frame_over_is_counted_as_recomputed() -> None:
    events = [arrived(0, 1), planned(0, 1, row(1, 0, 8)), ran(0, 5, 1, "stopped")]
    events += [parked(5, 1, 1, layer=2), Dropped(at_ns=6 * MS, frame_id=1, reason="dead")]
    events += [planned(6, 2, row(1, 0, 5)), ran(6, 8, 2), planned(8, 3, row(1, 5, 8))]
    assert of(events).preempt_recomputed_tokens == 8
    assert of(events).parked_ms == 1


def test_what_an_eviction_lost_is_counted_once_and_apart() -> None:
    events: list[Event] = [arrived(0, 1), planned(0, 1, row(1, 0, 8)), ran(0, 5, 1), token(5, 1)]
    events += [planned(5, 2, row(1, 8, 9)), ran(5, 6, 2), token(6, 1), evicted(7, 1, 9)]
    events += [planned(50, 3, row(1, 0, 6, end=2)), ran(50, 52, 3)]
    events += [planned(52, 4, row(1, 0, 6, start=2)), ran(52, 54, 4)]
    events += [planned(54, 5, row(1, 6, 10)), ran(54, 55, 5), token(55, 1), finished(55, 1)]
    m = of(events)
    assert (m.evictions, m.evict_recomputed_tokens, m.preempt_recomputed_tokens) == (1, 9, 0)
    assert m.max_stall_ms == 1, "an evicted request is not admitted"
    twice = [*events[:9], ran(50, 51, 3), evicted(51, 1, 6), planned(60, 4, row(1, 0, 10))]
    assert of(twice).evict_recomputed_tokens == 6 + 9


@pytest.mark.parametrize("dropped_first", [True, False])
def test_evicting_a_parked_frame_is_an_eviction(dropped_first: bool) -> None:
    events = [arrived(0, 1), planned(0, 1, row(1, 0, 8)), ran(0, 5, 1, "stopped")]
    events += [parked(5, 1, 1, layer=2)]
    loss = [Dropped(at_ns=7 * MS, frame_id=1, reason="evicted"), evicted(7, 1, 0)]
    events += (loss if dropped_first else loss[::-1]) + [planned(9, 2, row(1, 0, 8))]
    m = of(events)
    assert (m.evict_recomputed_tokens, m.preempt_recomputed_tokens, m.parked_ms) == (8, 0, 2)


def test_a_retry_after_an_error_is_counted_apart() -> None:
    events = [arrived(0, 1), planned(0, 1, row(1, 0, 8)), ran(0, 5, 1), planned(5, 2, row(1, 8, 9))]
    events += [ran(5, 6, 2, "error"), Dropped(at_ns=6 * MS, frame_id=2, reason="error")]
    events += [planned(6, 3, row(1, 8, 9)), ran(6, 7, 3)]
    m = of(events)
    assert (m.retry_recomputed_tokens, m.preempt_recomputed_tokens) == (1, 0)


@pytest.mark.parametrize("loss", ["evicted", "error"])
def test_drafts_that_were_lost_are_no_tokens_to_compute_again(loss: str) -> None:
    """The row [8, 13) has one known token and four drafts, which the model has not verified yet."""
    events: list[Event] = [arrived(0, 1), planned(0, 1, row(1, 0, 8)), ran(0, 5, 1), token(5, 1)]
    events += [Drafted(at_ns=5 * MS, request_id=1, token_ids=(1, 2, 3, 4))]
    events += [planned(5, 2, row(1, 8, 13))]
    if loss == "error":
        events += [ran(5, 6, 2, "error"), Dropped(at_ns=6 * MS, frame_id=2, reason=loss)]
    else:
        events += [ran(5, 6, 2, "stopped"), parked(6, 2, 1, layer=2)]
        events += [Dropped(at_ns=7 * MS, frame_id=2, reason=loss), evicted(7, 1, 8)]
    first = 8 if loss == "error" else 0
    events += [planned(7, 3, row(1, first, 9)), ran(7, 8, 3), token(8, 1)]
    for n in range(9, 14):
        events += [planned(n, n, row(1, n, n + 1)), ran(n, n + 1, n), token(n + 1, 1)]
    m = of(events)
    found = m.evict_recomputed_tokens, m.retry_recomputed_tokens, m.preempt_recomputed_tokens
    assert found == ((0, 1, 0) if loss == "error" else (9, 0, 0))


def test_accepted_drafts_are_computed_and_rejected_ones_are_not() -> None:
    events: list[Event] = [arrived(0, 1), planned(0, 1, row(1, 0, 8)), ran(0, 5, 1), token(5, 1)]
    events += [Drafted(at_ns=5 * MS, request_id=1, token_ids=(1, 2, 3, 4))]
    events += [planned(5, 2, row(1, 8, 13)), ran(5, 6, 2)]
    events += [Verified(at_ns=6 * MS, request_id=1, num_drafts=4, num_accepted=2)]
    events += [token(6, 1), token(6, 1), token(6, 1), evicted(7, 1, 11)]
    events += [planned(8, 3, row(1, 0, 12)), ran(8, 9, 3), token(9, 1)]
    events += [planned(9, 4, row(1, 12, 13)), ran(9, 10, 4), token(10, 1), finished(10, 1)]
    m = of(events)
    assert (m.evict_recomputed_tokens, m.preempt_recomputed_tokens) == (11, 0)
    assert (m.num_accepted_drafts, m.num_rejected_drafts) == (2, 2)
    assert (m.num_output_tokens, m.tpot_ms) == (6, 1)


def test_a_killed_row_is_no_longer_parked() -> None:
    events = [arrived(0, 1), arrived(0, 2), planned(0, 1, row(1, 0, 8), row(2, 0, 8))]
    events += [ran(0, 5, 1, "stopped"), parked(5, 1, 1, 2)]
    events += [Killed(at_ns=6 * MS, frame_id=1, request_id=2), finished(7, 2, "cancelled")]
    events += [Resumed(at_ns=9 * MS, frame_id=1), ran(9, 12, 1), finished(12, 1)]
    assert (of(events, 1).parked_ms, of(events, 2).parked_ms) == (4, 1)


@settings(deadline=None)
@given(seed=st.integers(0, 10**6), num_requests=st.integers(1, 12))
def test_metrics_while_it_runs_are_the_metrics_of_the_file(
    seed: int, num_requests: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    events = ToyEngine(seed).run(num_requests)
    builder = MetricsBuilder()
    online = {}
    for event in events:
        if done := builder.feed(event):
            online[done.request_id] = done
    path = tmp_path_factory.getbasetemp() / "toy.jsonl"
    Trace(events).write_jsonl(path)
    offline = request_metrics(Trace.read_jsonl(path))
    assert {m.request_id: m for m in offline} == online
    assert [m.request_id for m in offline] == list(range(1, num_requests + 1))
    assert not builder.live()
    assert not builder._frames, "a frame outlived its work"
    for m in offline:
        assert m.preempt_recomputed_tokens == 0
        assert m.num_prefilled_tokens == m.num_prompt_tokens
        assert m.e2e_ms is not None
        assert m.ttft_ms is not None
        assert sum(m.itl_ms) == pytest.approx(m.e2e_ms - m.ttft_ms)
        assert m.parked_ms <= m.e2e_ms
        assert (m.parked_ms > 0) == (m.preemptions > 0)


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 10**6), cut=st.integers(0, 200))
def test_a_prefix_of_a_trace_has_the_metrics_so_far(seed: int, cut: int) -> None:
    events = ToyEngine(seed).run(6)[:cut]
    builder = MetricsBuilder()
    ended = [done for event in events if (done := builder.feed(event))]
    metrics = sorted(ended + builder.live(), key=lambda m: m.request_id)
    assert metrics == request_metrics(events)
    assert all(builder.live_request(m.request_id) == m for m in builder.live())


def check_perfetto(events: list[Event]) -> dict[int, list[dict[str, object]]]:
    out = json.loads(json.dumps(to_perfetto(events), allow_nan=False))["traceEvents"]
    tracks: dict[int, list[dict[str, object]]] = {}
    flows: dict[object, list[dict[str, object]]] = {}
    for e in out:
        if e["ph"] != "M":
            tracks.setdefault(e["tid"], []).append(e)
        if e["ph"] in "sf":
            flows.setdefault(e["id"], []).append(e)
    named = {e["tid"] for e in out if e["name"] == "thread_name"}
    assert tracks.keys() <= named
    for track in tracks.values():
        stamps = [e["ts"] for e in track]
        assert stamps == sorted(stamps)
        open_ends: list[int] = []
        for e in track:
            if e["ph"] == "X":
                start, dur = round(e["ts"] * 1000), round(e["dur"] * 1000)
                assert dur >= 0
                while open_ends and open_ends[-1] <= start:
                    open_ends.pop()
                assert not open_ends or start + dur <= open_ends[-1], f"{e} overlaps"
                open_ends.append(start + dur)
    for id_, pair in flows.items():
        start, end = sorted(pair, key=lambda e: e["ph"], reverse=True)
        assert (start["ph"], end["ph"], end["bp"]) == ("s", "f", "e"), id_
        slices = [e for e in tracks[end["tid"]] if e["ph"] == "X"]
        assert any(e["ts"] == start["ts"] and e["name"] == "parked" for e in slices)
        assert any(e["ts"] == end["ts"] and e["cat"] == "row" for e in slices)
    return tracks


def test_perfetto_shows_the_preemption() -> None:
    events = a_preemption()
    events.insert(5, Segment(start_ns=11 * MS, at_ns=20 * MS, frame_id=2, kind="ATTN", layer=0))
    tracks = check_perfetto(events)
    device = [(e["name"], e["ts"], e["dur"]) for e in tracks[DEVICE_TID]]
    assert device[:4] == [
        ("BE frame 1", 2000, 8000),
        ("LS frame 2", 11000, 9000),
        ("ATTN 0", 11000, 9000),
        ("BE frame 1", 23000, 7000),
    ]
    be, ls = tracks[DEVICE_TID + 1], tracks[DEVICE_TID + 2]
    assert [(e["ts"], e["dur"]) for e in be if e["name"] == "parked"] == [(10000, 12000)]
    assert [e["ts"] for e in be if e["ph"] in "sf"] == [10000, 23000]
    assert [e["ts"] for e in be if e["name"] == "token"] == [30000, 34000, 40000]
    assert [(e["name"], e["ts"]) for e in ls if e["ph"] == "X"] == [
        ("waiting", 9000),
        ("frame 2", 11000),
    ]


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6), cut=st.integers(1, 300))
def test_perfetto_slices_nest_and_arrows_pair_up(seed: int, cut: int) -> None:
    check_perfetto(ToyEngine(seed).run(8)[:cut])


def test_perfetto_takes_any_event(tmp_path: Path) -> None:
    check_perfetto([])
    check_perfetto(one_of_each())
    write_perfetto(Trace(a_preemption()), tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["displayTimeUnit"] == "ms"


def test_the_window_shows_a_preemption_from_arrival_to_resumption() -> None:
    begin, end = choose_window(a_preemption())
    assert (begin < 9 * MS, end > 23 * MS) == (True, True)
    assert choose_window([]) == (0, MS)
    replaced = [*a_preemption()[:9], planned(21, 5, row(1, 0, 8, start=2), from_frames=(1,))]
    begin, end = choose_window([*replaced, ran(25, 30, 5)])
    assert (begin < 9 * MS, end > 25 * MS) == (True, True)
    begin, end = choose_window([arrived(0, 1), planned(1, 1, row(1, 0, 8)), ran(3, 5, 1)])
    assert (begin, end) == (3 * MS, 5 * MS)


@pytest.mark.filterwarnings("default")
def test_a_figure_is_written(tmp_path: Path) -> None:
    results = {"LS alone": [1.0, 2.0], "fcfs": [100.0, 250.0, 900.0], "qllm2": []}
    for n, events in enumerate(([], a_preemption())):
        path = tmp_path / f"{n}.png"
        ttft_figure(results, events, path, policy="qllm2")
        assert path.read_bytes().startswith(b"\x89PNG")
