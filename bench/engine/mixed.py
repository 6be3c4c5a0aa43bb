"""Open-loop LS next to a BE flood: one window of one policy, and the numbers of its trace."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from bench.common import Job, make_jobs, make_prompt
from bench.energy import Meter, Run, computed_tokens
from qllm import QLLMEngine, SamplingParams
from qllm.measure.variants import KV_SIZES
from qllm.record.metrics import RequestMetrics
from qllm.record.summary import request_metrics
from qllm.record.trace import Arrived, Event, Parked, Planned, Ran, Token, Trace
from qllm.types import NS_PER_MS, NS_PER_S, Priority

LS_PROMPT = (64, 128)
LS_OUTPUT = (16, 48)
BE_PROMPT = (256, 2048)
BE_OUTPUT = (32, 256)
BACKLOG = 40
"""Number of unfinished BE requests: more than seats, so that some always wait."""
POLL_S = 0.02
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


class Arrival(NamedTuple):
    """An LS request and its arrival, in seconds after the warm-up."""

    at_s: float
    job: Job


@dataclass(frozen=True, slots=True)
class Load:
    """The load of one seed, the same for every policy."""

    seed: int
    ls: list[Arrival]
    be: list[Job]


def make_load(seed: int, rate: float, seconds: float) -> Load:
    """Return Poisson LS arrivals and enough BE jobs."""
    rng = np.random.default_rng([seed, 1])
    ls, at = [], float(rng.exponential(1 / rate))
    while at < seconds:
        num, out = rng.integers(*LS_PROMPT, endpoint=True), rng.integers(*LS_OUTPUT, endpoint=True)
        ls.append(Arrival(at, Job(make_prompt(rng, int(num)), int(out))))
        at += float(rng.exponential(1 / rate))
    return Load(seed, ls, make_jobs(seed * 1000 + 7, 512, BE_PROMPT, BE_OUTPUT))


@dataclass(slots=True)
class Window:
    """Measured numbers of one window; times in milliseconds."""

    policy: str
    seed: int
    tpot_target_ms: float | None = None
    ttft: list[float] = field(default_factory=list)
    """TTFTs; a request without a first token counts with its wait so far (a lower bound)."""
    tpot: list[float] = field(default_factory=list)
    num_ls: int = 0
    num_censored: int = 0
    late_ms: float = 0.0
    """Worst lateness of the client against the schedule."""
    be_prefill_per_s: float = 0.0
    be_output_per_s: float = 0.0
    be_finished: int = 0
    be_waiting_min: int | None = None
    """Fewest unfinished BE requests seen at any poll."""
    preempt_latency: list[float] = field(default_factory=list)
    longest_segment: tuple[float, str | None] = (0.0, None)
    preemptions: int = 0
    recomputed: int = 0
    evictions: int = 0
    max_stall: float = 0.0
    policy_errors: list[str] = field(default_factory=list)
    energy: list[Run] = field(default_factory=list)
    """Energy and computed tokens, warm-up included."""
    trace: Trace | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the fields without the trace and the samples."""
        drop = {"trace", "ttft", "tpot", "preempt_latency"}
        return {f: getattr(self, f) for f in self.__dataclass_fields__ if f not in drop}


class Flood:
    """A flood of BE requests that keeps a number of them unfinished."""

    def __init__(self, engine: QLLMEngine, jobs: Sequence[Job], backlog: int) -> None:
        self._engine = engine
        self._jobs = iter(jobs)
        self._backlog = backlog
        self._open: list[Any] = []
        self._num_done = 0
        self.fewest: int | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the flood has got so far."""
        return self._num_done + sum(len(h.token_ids) for h in self._open)

    def cancel(self) -> None:
        """Cancel the requests that are open, and wait for their ends."""
        for handle in self._open:
            handle.cancel()
        for handle in self._open:
            handle.result(600)

    def top_up(self) -> None:
        """Submit as many requests as have finished."""
        self._num_done += sum(len(h.token_ids) for h in self._open if h.finish_reason is not None)
        self._open = [h for h in self._open if h.finish_reason is None]
        if self._open:
            self.fewest = min(len(self._open), self.fewest or self._backlog)
        while len(self._open) < self._backlog:
            job = next(self._jobs)
            self._open.append(
                self._engine.submit(job.token_ids, "BE", job.max_tokens, sampling=GREEDY)
            )


def run_window(
    model: Any,
    policy: str,
    load: Load,
    *,
    seconds: float,
    warmup_s: float,
    flood: bool,
    backlog: int = BACKLOG,
    policy_settings: dict[str, Any] | None = None,
    grace_s: float = 3.0,
    tpot_target_ms: float | None = None,
    threads: int = 1,
    **settings: Any,
) -> Window:
    """Serve one load under one policy in its own engine."""
    if tpot_target_ms is not None:
        settings["ls_slo"] = f"tpot={tpot_target_ms:.3f}ms"
    engine = QLLMEngine.from_model(
        model,
        policy=policy,
        policy_settings=policy_settings,
        threads=threads,
        record=True,
        conformance=False,
        **KV_SIZES,
        **settings,
    )
    window = Window(policy, load.seed, tpot_target_ms=tpot_target_ms)
    handles: list[Any] = []
    meter = Meter()
    with engine:
        be = Flood(engine, load.be, backlog) if flood else None
        if be is not None:
            be.top_up()
            _wait(engine, be, time.monotonic() + warmup_s)
        else:
            engine.submit(load.ls[0].job.token_ids, "LS", 4, sampling=GREEDY).result(60)
        start, start_ns = time.monotonic(), engine.now_ns()
        for arrival in load.ls:
            _wait(engine, be, start + arrival.at_s)
            window.late_ms = max(window.late_ms, (time.monotonic() - start - arrival.at_s) * 1e3)
            job = arrival.job
            handles.append(engine.submit(job.token_ids, "LS", job.max_tokens, sampling=GREEDY))
        _wait(engine, be, start + seconds)
        end_ns = engine.now_ns()
        until = time.monotonic() + grace_s
        while time.monotonic() < until and any(h.finish_reason is None for h in handles):
            _wait(engine, be, time.monotonic() + POLL_S)
        now_ns = engine.now_ns()
        stats = engine.stats()
        joules = meter.joules()
    window.energy.append({"joules": joules, "computed_tokens": computed_tokens(engine.trace)})
    window.preempt_latency = stats["preempt_latencies_ms"]
    window.longest_segment = (stats["longest_segment_ms"], stats["longest_segment_kind"])
    window.policy_errors = stats["policy_errors"]
    if be is not None:
        window.be_waiting_min = be.fewest
    _read(window, engine.trace, {h.number for h in handles}, start_ns, end_ns, now_ns)
    return window


def _wait(engine: QLLMEngine, be: Flood | None, until: float) -> None:
    """Sleep until a time, and refill the flood."""
    while (left := until - time.monotonic()) > 0:
        if be is None:
            time.sleep(left)
        else:
            be.top_up()
            time.sleep(max(0.0, min(POLL_S, until - time.monotonic())))


def _read(
    window: Window, trace: Trace, ls: set[int], start_ns: int, end_ns: int, now_ns: int
) -> None:
    events = list(trace)
    done = request_metrics(events)
    window.num_ls = len(ls)
    for r in done:
        if r.request_id not in ls:
            continue
        if r.ttft_ms is None:
            window.num_censored += 1
            window.ttft.append((now_ns - r.arrival_ns) / NS_PER_MS)
        else:
            window.ttft.append(r.ttft_ms)
        if r.tpot_ms is not None and r.num_output_tokens > 4:
            window.tpot.append(r.tpot_ms)
    be = [r for r in done if r.priority > Priority.LS]
    window.recomputed = sum(r.preempt_recomputed_tokens for r in done)
    window.evictions = sum(r.evictions for r in done)
    window.preemptions = sum(isinstance(e, Parked) and e.preempted for e in events)
    if be:
        window.max_stall = max(r.max_stall_ms for r in be)
        window.be_finished = sum(r.reason in ("length", "stop") for r in be)
        prefill, output, elapsed_s = _be_work(events, start_ns, end_ns)
        window.be_prefill_per_s = prefill / elapsed_s
        window.be_output_per_s = output / elapsed_s
    window.trace = trace


def _be_work(events: Sequence[Event], start_ns: int, end_ns: int) -> tuple[int, int, float]:
    """Return the BE tokens between two ends of work on BE programs, near the edges of the window.

    A running program has not counted its tokens yet, so the edges are moved to times without one.
    """
    a, b = _edge(events, start_ns), _edge(events, end_ns)
    first, last = _be_tokens(events[: a + 1]), _be_tokens(events[: b + 1])
    elapsed_s = (events[b].at_ns - events[a].at_ns) / NS_PER_S
    return last[0] - first[0], last[1] - first[1], max(elapsed_s, 1e-9)


def _edge(events: Sequence[Event], at_ns: int) -> int:
    """Return the last event of the last BE run that ended by then: its tokens, or its park."""
    be, frames, found, end_ns, frame = _be_ids(events), set[int](), 0, -1, -1
    for i, event in enumerate(events):
        if isinstance(event, Planned) and any(row.request_id in be for row in event.rows):
            frames.add(event.frame_id)
        elif isinstance(event, Ran) and event.frame_id in frames and event.at_ns <= at_ns:
            found, end_ns, frame = i, event.at_ns, event.frame_id
        elif isinstance(event, Token) and event.at_ns == end_ns:
            found = i
        elif isinstance(event, Parked) and event.frame_id == frame and event.at_ns >= end_ns >= 0:
            found, frame = i, -1
    return found


def _be_ids(events: Sequence[Event]) -> set[int]:
    return {e.request_id for e in events if isinstance(e, Arrived) and e.priority > Priority.LS}


def _be_tokens(events: Sequence[Event]) -> tuple[int, int]:
    found: list[RequestMetrics] = [r for r in request_metrics(events) if r.priority > Priority.LS]
    return sum(r.num_prefilled_tokens for r in found), sum(r.num_output_tokens for r in found)


def ls_capacity(model: Any, count: int, seed: int) -> float:
    """Return the LS requests per second when `count` arrive at once."""
    jobs = make_jobs(seed * 77 + 5, count, LS_PROMPT, LS_OUTPUT)
    with QLLMEngine.from_model(model, threads=1, conformance=False, **KV_SIZES) as engine:
        engine.submit(jobs[0].token_ids, "LS", 4, sampling=GREEDY).result(120)
        begin = time.monotonic()
        handles = [engine.submit(j.token_ids, "LS", j.max_tokens, sampling=GREEDY) for j in jobs]
        for handle in handles:
            handle.result(600)
        return count / (time.monotonic() - begin)
