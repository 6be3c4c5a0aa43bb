"""A simulated or real run in one line: latencies of LS, and work done for BE."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from qllm.errors import ConfigError
from qllm.measure.plots import ttft_figure
from qllm.record.metrics import RequestMetrics
from qllm.record.perfetto import write_perfetto
from qllm.record.summary import percentiles, request_metrics
from qllm.record.trace import Event, Planned, Ran
from qllm.sim.costs import CostFile
from qllm.sim.run import Simulated
from qllm.types import NS_PER_MS, NS_PER_S, FinishReason, Priority, Slo
from qllm.workloads.mix import Sent, Waits

_WHOLE = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of one run under one policy, times in ms. None is a missing measurement."""

    ls_arrived: int
    ls_ttft_p50: float | None
    """Median TTFT. A request without a token counts with the time that it waited."""
    ls_ttft_p99: float | None
    ls_tpot_p50: float | None
    ls_tpot_p99: float | None
    attainment: float | None
    """Part of the LS requests that met both targets. Requests that were undecided at the end of the
    window do not count."""
    be_prompt_per_s: float
    """Prompt tokens of BE requests computed per second of the window."""
    be_output_per_s: float
    preemptions: int
    be_stall_ms: float
    """Longest time that an admitted BE request made no progress."""
    shared: float
    """Part of the window in which passes had rows of both classes."""

    @property
    def be_per_s(self) -> float:
        """Return the BE tokens per second, prompt and output."""
        return self.be_prompt_per_s + self.be_output_per_s

    @classmethod
    def of(cls, run: Sent, slo: Slo | None = None) -> "Outcome":
        """Return the outcome of a run, simulated or real."""
        return cls.of_requests(run, slo, request_metrics(run.events))

    @classmethod
    def of_requests(
        cls, run: Sent, slo: Slo | None, requests: Sequence[RequestMetrics]
    ) -> "Outcome":
        """Return the outcome of a run with known request metrics."""
        ls = [r for r in requests if r.priority <= Priority.LS]
        be = [r for r in requests if r.priority > Priority.LS]
        ttft = percentiles(Waits.of(ls, run.end_ns).all)
        tpot = percentiles(r.tpot_ms for r in ls if r.tpot_ms is not None)
        verdicts = [_verdict(r, slo, run.end_ns) for r in ls] if slo is not None else []
        judged = [v for v in verdicts if v is not None]
        return cls(
            ls_arrived=len(ls),
            ls_ttft_p50=ttft.get("p50"),
            ls_ttft_p99=ttft.get("p99"),
            ls_tpot_p50=tpot.get("p50"),
            ls_tpot_p99=tpot.get("p99"),
            attainment=sum(judged) / len(judged) if judged else None,
            be_prompt_per_s=sum(r.num_prefilled_tokens for r in be) / run.window_s,
            be_output_per_s=sum(r.num_output_tokens for r in be) / run.window_s,
            preemptions=sum(r.preemptions for r in requests),
            be_stall_ms=max((r.max_stall_ms for r in be), default=0.0),
            shared=_shared_s(run.events, {r.request_id: r.priority for r in requests})
            / run.window_s,
        )


def _shared_s(events: Iterable[Event], priorities: Mapping[int, int]) -> float:
    """Return the seconds in which passes had rows of both classes."""
    shared: set[int] = set()
    total_ns = 0
    for event in events:
        if isinstance(event, Planned):
            kinds = {priorities[row.request_id] > Priority.LS for row in event.rows}
            if len(kinds) > 1:
                shared.add(event.frame_id)
        elif isinstance(event, Ran) and event.frame_id in shared:
            total_ns += event.at_ns - event.start_ns
    return total_ns / NS_PER_S


def _verdict(request: RequestMetrics, slo: Slo, end_ns: int) -> bool | None:
    """Return True if a request met its targets; None if the answer is not known yet."""
    if request.reason in _WHOLE:
        return request.meets(slo)
    if request.reason not in (None, FinishReason.CANCELLED):
        return False
    ttft_ms = request.ttft_ms
    if ttft_ms is None:
        ttft_ms = (end_ns - request.arrival_ns) / NS_PER_MS
    missed_first = slo.ttft_ms is not None and ttft_ms > slo.ttft_ms
    slow = slo.tpot_ms is not None and (request.tpot_ms or 0.0) > slo.tpot_ms
    return False if missed_first or slow else None


HEAD = (
    "policy",
    "LS TTFT p50 / p99, ms",
    "LS TPOT p50 / p99, ms",
    "SLO met",
    "BE tokens/s, in + out",
    "preemptions",
    "expert GB per request",
)


def rows(
    runs: Mapping[str, Simulated], costs: CostFile, slo: Slo | None = None
) -> list[tuple[str, ...]]:
    """Return a row per policy, under `HEAD`."""
    table: list[tuple[str, ...]] = []
    for name, run in runs.items():
        requests = request_metrics(run.events)
        found = Outcome.of_requests(run, slo, requests)
        done = sum(r.reason in _WHOLE for r in requests)
        read_gb = run.expert_loads * costs.expert_bytes / 1e9
        table.append(
            (
                name,
                pair(found.ls_ttft_p50, found.ls_ttft_p99),
                pair(found.ls_tpot_p50, found.ls_tpot_p99),
                "-" if found.attainment is None else f"{found.attainment:.1%}",
                f"{found.be_prompt_per_s:,.0f} + {found.be_output_per_s:,.1f}",
                f"{found.preemptions:,}",
                f"{read_gb / done:,.2f}" if done else "-",
            )
        )
    return table


def pair(a: float | None, b: float | None) -> str:
    """Return the text of a table cell with two numbers."""
    return "-" if a is None or b is None else f"{a:,.1f} / {b:,.1f}"


def write_files(out: Path, runs: Mapping[str, Simulated]) -> dict[str, str]:
    """Write the figure, and per policy its trace and the file for Perfetto.

    Returns:
        Names of the written files, or the reason why there are none, by kind.
    """
    out.mkdir(parents=True, exist_ok=True)
    for name, run in runs.items():
        stem = name.replace(":", "_")
        run.trace.write_jsonl(out / f"{stem}.jsonl")
        write_perfetto(run.events, out / f"{stem}.perfetto.json")
    files = {"traces": str(out / "*.jsonl"), "perfetto": str(out / "*.perfetto.json")}
    waits = {name: run.waits(Priority.LS).all for name, run in runs.items()}
    last = list(runs)[-1]
    try:
        ttft_figure(waits, runs[last].events, out / "sim.png", policy=last, alone=None)
        files["figure"] = str(out / "sim.png")
    except ConfigError as error:  # without matplotlib, write the other files
        files["figure"] = f"left out: {error}"
    return files
