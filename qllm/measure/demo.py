"""A demo: one model, one mix of requests, several policies, one table.

A BE flood of long prompts and Poisson LS prompts run in the engine under each policy. Runs of LS
alone and BE alone show the best possible numbers. All numbers are computed from the traces.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from qllm.config import engine_config
from qllm.engine.build import torch_threads
from qllm.errors import ConfigError, ModelError
from qllm.llm import QLLMEngine
from qllm.measure.bench import corpus_of
from qllm.measure.plots import ttft_figure
from qllm.measure.random_moe import SIZES, make_random_moe
from qllm.measure.variants import KV_SIZES
from qllm.models.folders import best_local
from qllm.models.loader import LoadedModel, load
from qllm.plugins import load_policy
from qllm.record import perfetto
from qllm.record.summary import ClassMetrics, Summary, request_metrics
from qllm.record.trace import Parked
from qllm.types import Priority
from qllm.workloads.mix import (
    Equality,
    Mix,
    Sent,
    Tally,
    compare,
    ls_capacity,
    make_workload,
    only,
    send,
    solo_tokens,
)
from qllm.workloads.spec import Arrival

REFERENCE_POLICY = "qllm2"
"""Policy of the reference runs. If this policy also has a run of its own, that run is drawn and
exported."""
LS_LOAD = 0.5
"""Fraction of the time for which LS requests, one after the other, would keep the engine busy."""
MIN_LS_RATE = 0.5
"""Fewest LS requests per second. A lower rate would show nothing."""
MAX_NUM_SEQS, MAX_STEP_TOKENS = 16, 1024
"""Limits of every policy. There are few seats, so that BE fills all seats and decodes in a short
run."""
LS_ALONE, BE_ALONE = "LS alone", "BE alone"
LOCAL_PROMPTS, LOCAL_TOKENS = ("What does json.dumps do?", "Explain os.path.join."), 48


MOST_RATE = 1000
"""Most LS requests per second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """Settings of the demo."""

    seconds: float = 25.0
    """Seconds of every run."""
    seed: int = 0
    policies: tuple[str, ...] = ("fcfs", "priority", "qllm2")
    out: Path = Path("qllm-demo")
    """Folder of the figure and the traces."""
    size: str = "300m"
    """Key of `random_moe.SIZES`."""
    ls_rate: float | None = None
    """LS requests per second; None measures the capacity first and uses `LS_LOAD` of it."""
    threads: int | None = 1
    exactness: str = "batch-invariant"
    solo_seconds: float = 20.0
    """Seconds of the runs with one class, if less than `seconds`."""
    tiny: bool = True
    """True lets a local model write at the end: `talk` if it is installed, else `tiny`."""

    def __post_init__(self) -> None:
        if not self.policies:
            raise ConfigError("the demo needs at least one policy; see `qllm policies`")
        if not 0 < self.seconds <= 3600:
            raise ConfigError(f"seconds={self.seconds!r} must be in (0, 3600]")
        if self.size not in SIZES:
            raise ConfigError(f"size={self.size!r} is unknown; use one of {', '.join(SIZES)}")
        if self.ls_rate is not None and not 0 < self.ls_rate <= MOST_RATE:
            raise ConfigError(f"ls_rate={self.ls_rate!r} must be in (0, {MOST_RATE}] per second")
        engine_config({"exactness": self.exactness})
        for name in self.policies:
            load_policy(name)


@dataclass(slots=True)
class DemoResult:
    """Results of the demo."""

    mix: Mix
    ls_alone: Sent
    be_alone: Sent
    runs: dict[str, Sent]
    equality: dict[str, Equality] = field(default_factory=dict)


class _Progress:
    """A progress display: a bar on a terminal, a line per step elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description:<22}"),
            BarColumn(bar_width=20),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[note]}"),
            console=console,
            disable=not console.is_terminal,
            refresh_per_second=4,
        )

    def __enter__(self) -> "_Progress":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    @contextmanager
    def step(
        self, name: str, total_s: float | None = None
    ) -> Iterator[Callable[[float, str], None]]:
        """Show a step. The yielded function takes the seconds that are done, and a note."""
        start = time.monotonic()
        task = self._progress.add_task(name, total=total_s, note="")
        last = ""

        def show(done_s: float, note: str = "") -> None:
            nonlocal last
            last = note
            self._progress.update(task, completed=done_s, note=note)

        yield show
        self._progress.update(task, total=1, completed=1)
        if not self._console.is_terminal:
            self._console.print(f"{name:<22} {time.monotonic() - start:5.1f} s  {last}".rstrip())


def run_demo(settings: DemoSettings, console: Console | None = None) -> DemoResult:
    """Run the demo, print the table, and write the files.

    Raises:
        ConfigError: A policy is unknown.
    """
    settings.out.mkdir(parents=True, exist_ok=True)  # an error is raised now, not after the runs
    console = console or _console()
    start = time.monotonic()
    with torch_threads(settings.threads), _Progress(console) as progress:
        with progress.step("model"):
            folder = make_random_moe(size=settings.size, seed=0)
            loaded = load(folder)
            corpus = tuple(corpus_of(loaded.tokenizer))
        set_up_s = time.monotonic() - start
        result = _measure(settings, loaded, corpus, progress)
        with progress.step("figure and traces"):
            files = _write(settings, result)
    console.print("\n" + _intro(settings, result, loaded), highlight=False)
    console.print(table(result))
    console.print(_notes(result), style="dim", highlight=False)
    for what, path in files.items():
        console.print(f"{what:<10} {path}", highlight=False, markup=False, soft_wrap=True)
    if settings.tiny:
        _write_lines(console, settings.threads)
    console.print(
        f"\n{time.monotonic() - start:.0f} s, of which {set_up_s:.0f} s to set up the model",
        style="dim",
    )
    return result


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=100)


def _measure(
    settings: DemoSettings, loaded: LoadedModel, corpus: Sequence[int], progress: _Progress
) -> DemoResult:
    mix = Mix(seconds=settings.seconds, seed=settings.seed, ls_rate=settings.ls_rate or 1.0)
    if settings.ls_rate is None:
        with progress.step("LS capacity") as show, _engine(settings, loaded, first=True) as engine:
            sample = only(make_workload(dataclasses.replace(mix, ls_rate=4.0), corpus), Priority.LS)
            capacity = ls_capacity(engine, sample)
            rate = max(MIN_LS_RATE, round(LS_LOAD * capacity, 1))
            show(0, f"{capacity:.1f}/s one by one; LS arrives at {rate}/s")
        mix = dataclasses.replace(mix, ls_rate=rate)
    arrivals = make_workload(mix, corpus)

    def serve(name: str, policy: str, chosen: Sequence[Arrival]) -> Sent:
        with (
            progress.step(name, settings.seconds) as show,
            _engine(settings, loaded, policy) as engine,
        ):
            live = Tally(engine.trace)
            return send(engine, chosen, settings.seconds, lambda s: show(s, live.text()))

    result = DemoResult(
        mix=mix,
        ls_alone=serve(LS_ALONE, REFERENCE_POLICY, only(arrivals, Priority.LS)),
        be_alone=serve(BE_ALONE, REFERENCE_POLICY, only(arrivals, Priority.BE)),
        runs={name: serve(name, name, arrivals) for name in settings.policies},
    )
    budget = min(settings.seconds, settings.solo_seconds)
    with progress.step("solo runs", budget) as show, _engine(settings, loaded) as engine:
        answers = {name: run.tokens() for name, run in result.runs.items()}
        counts = {
            a.name: max(len(tokens.get(a.name, ())) for tokens in answers.values())
            for a in arrivals
        }
        order = _interesting(arrivals, result.runs)
        solo = solo_tokens(engine, order, counts, budget, lambda s: show(s, ""))
    result.equality = {name: compare(tokens, solo) for name, tokens in answers.items()}
    return result


def _engine(
    settings: DemoSettings,
    loaded: LoadedModel,
    policy: str = REFERENCE_POLICY,
    *,
    first: bool = False,
) -> QLLMEngine:
    return QLLMEngine.from_model(
        loaded.model,
        loaded.tokenizer,
        policy=policy,
        threads=settings.threads,
        exactness=settings.exactness,
        max_num_seqs=MAX_NUM_SEQS,
        max_step_tokens=MAX_STEP_TOKENS,
        conformance=first,
        record=True,
        **KV_SIZES,
    )


def _interesting(arrivals: Sequence[Arrival], runs: Mapping[str, Sent]) -> list[Arrival]:
    """Return the arrivals, most preempted first, then by arrival. The classes alternate."""
    preempted: dict[str, int] = {}
    for run in runs.values():
        for request in request_metrics(run.trace):
            preempted[request.name] = preempted.get(request.name, 0) + request.preemptions
    ordered = sorted(arrivals, key=lambda a: (-preempted.get(a.name, 0), a.at_s))
    queues = [list(only(ordered, Priority.LS)), list(only(ordered, Priority.BE))]
    mixed: list[Arrival] = []
    while any(queues):
        for queue, num in zip(queues, (3, 1), strict=True):
            mixed += queue[:num]
            del queue[:num]
    return mixed


# -- the table


@dataclass(frozen=True, slots=True)
class _Column:
    run: Sent
    summary: Summary
    be_alone: "_Column | None"
    equality: Equality | None

    def of(self, priority: Priority) -> ClassMetrics | None:
        return self.summary.classes.get(priority)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _ttft(p: float) -> Callable[[_Column], str | None]:
    def cell(column: _Column) -> str | None:
        found = column.run.waits(Priority.LS).percentile(p)
        return None if found is None else f"{'> ' if found[1] else ''}{_number(found[0])}"

    return cell


def _tpot(which: str) -> Callable[[_Column], str | None]:
    def cell(column: _Column) -> str | None:
        ls = column.of(Priority.LS)
        found = None if ls is None else ls.tpot_ms
        return None if found is None else _number(getattr(found, which))

    return cell


def _answered(column: _Column) -> str | None:
    waits = column.run.waits(Priority.LS)
    return f"{len(waits.served)} of {len(waits.all)}" if waits.all else None


def _be_rate(column: _Column, names: Sequence[str]) -> float | None:
    be = column.of(Priority.BE)
    if be is None:
        return None
    total = sum(float(getattr(be, name)) for name in names)
    return total * column.summary.duration_s / column.run.window_s


def _be(*names: str) -> Callable[[_Column], str | None]:
    def cell(column: _Column) -> str | None:
        rate = _be_rate(column, names)
        return None if rate is None else _number(rate)

    return cell


def _be_share(*names: str) -> Callable[[_Column], str | None]:
    def cell(column: _Column) -> str | None:
        rate = _be_rate(column, names)
        best = None if column.be_alone is None else _be_rate(column.be_alone, names)
        return f"{rate / best:.0%}" if rate is not None and best else None

    return cell


def _sum(*names: str) -> Callable[[_Column], str | None]:
    def cell(column: _Column) -> str | None:
        if column.be_alone is None:
            return None
        classes = column.summary.classes.values()
        return f"{sum(getattr(c, name) for c in classes for name in names):,}"

    return cell


def _preemptions(column: _Column) -> str | None:
    if column.be_alone is None:
        return None
    return f"{sum(isinstance(e, Parked) and e.preempted for e in column.run.events):,}"


def _latency(which: str) -> Callable[[_Column], str | None]:
    def cell(column: _Column) -> str | None:
        found = column.summary.preempt_latency_ms
        return None if found is None else f"{getattr(found, which):.1f}"

    return cell


def _equal(column: _Column) -> str | None:
    found = column.equality
    if found is None or not found.checked:
        return None
    return f"{found.equal / found.checked:.0%} of {found.checked}"


OUTPUT, PROMPT = "output_tokens_per_s", "prefill_tokens_per_s"
ROWS: tuple[tuple[str, Callable[[_Column], str | None]], ...] = (
    ("LS TTFT p50, ms", _ttft(50)),
    ("LS TTFT p99, ms", _ttft(99)),
    ("LS TPOT p50, ms", _tpot("p50")),
    ("LS TPOT p99, ms", _tpot("p99")),
    ("LS answered", _answered),
    ("BE tokens/s, in + out", _be(PROMPT, OUTPUT)),
    ("  of BE alone", _be_share(PROMPT, OUTPUT)),
    ("BE tokens/s, out", _be(OUTPUT)),
    ("  of BE alone", _be_share(OUTPUT)),
    ("preemptions", _preemptions),
    ("preempt latency p50, ms", _latency("p50")),
    ("preempt latency p99, ms", _latency("p99")),
    ("preempt latency max, ms", _latency("max")),
    ("recomputed, preempted", _sum("preempt_recomputed_tokens")),
    ("recomputed, evicted", _sum("evict_recomputed_tokens")),
    ("equal to solo run", _equal),
)


def table(result: DemoResult) -> Table:
    """Return the table of the results."""
    runs = {LS_ALONE: result.ls_alone, BE_ALONE: result.be_alone, **result.runs}
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    grid.add_column("", no_wrap=True)
    columns: list[_Column] = []
    best = _Column(result.be_alone, result.be_alone.summary(), None, None)
    for name, run in runs.items():
        alone = name in (LS_ALONE, BE_ALONE)
        grid.add_column(name, justify="right", style="dim" if alone else "", no_wrap=True)
        columns.append(
            _Column(run, run.summary(), None if alone else best, result.equality.get(name))
        )
    for label, cell in ROWS:
        grid.add_row(label, *(cell(column) or "" for column in columns))
    return grid


def _intro(settings: DemoSettings, result: DemoResult, loaded: LoadedModel) -> str:
    size = sum(p.numel() for p in loaded.model.parameters()) / 1e6
    mix = result.mix
    return (
        f"{type(loaded.model).__name__}, {size:.0f}M random weights, "
        f"{settings.threads or 'default'} thread(s), exactness {settings.exactness}; every run "
        f"{mix.seconds:g} s, seed {mix.seed}: LS {mix.ls_rate:g}/s ({_span(mix.ls_prompt)} tokens "
        f"in, {_span(mix.ls_output)} out), BE {mix.be_burst} at once and {mix.be_rate:g}/s "
        f"({_span(mix.be_prompt)} in, {_span(mix.be_output)} out); at most {MAX_NUM_SEQS} requests "
        f"and {MAX_STEP_TOKENS} prompt tokens per step"
    )


def _span(bounds: tuple[int, int]) -> str:
    return f"{bounds[0]}-{bounds[1]}"


def _notes(result: DemoResult) -> str:
    lag = max(run.max_lag_ms for run in (result.ls_alone, result.be_alone, *result.runs.values()))
    lines = [
        "TTFT counts from arrival; > is a lower bound: LS requests without a token when the run "
        "ended. A preemption stops a step inside; its latency counts from the arrival. Recomputed "
        f"is in tokens. The client was late by at most {lag:.1f} ms.",
    ]
    for name, found in result.equality.items():
        if found.different:
            shown = ", ".join(found.different[:5])
            lines.append(f"{name}: other tokens than alone in {shown}.")
    return "\n".join(lines)


# -- files, and a model that answers


def _write(settings: DemoSettings, result: DemoResult) -> dict[str, Path | str]:
    out = settings.out
    shown = REFERENCE_POLICY if REFERENCE_POLICY in result.runs else settings.policies[-1]
    ttft: dict[str, tuple[float, ...]] = {}
    for name, run in {**result.runs, LS_ALONE: result.ls_alone}.items():
        waits = run.waits(Priority.LS)
        ttft[f"{name} (at least)" if waits.censored and name != LS_ALONE else name] = waits.all
    image, perfetto_json = out / "demo.png", out / f"{shown}.perfetto.json"
    files: dict[str, Path | str] = {"figure": image, "perfetto": perfetto_json}
    try:
        ttft_figure(ttft, result.runs[shown].events, image, policy=shown, alone=LS_ALONE)
    except ConfigError as error:  # without matplotlib, the other files are written
        files["figure"] = f"left out: {error}"
    perfetto.write_perfetto(result.runs[shown].events, perfetto_json)
    for name, run in result.runs.items():
        run.trace.write_jsonl(out / f"{name}.jsonl")
    files["traces"] = out / "*.jsonl"
    return files


def _write_lines(console: Console, threads: int | None) -> None:
    """Print answers of a trained model, because random weights give none: `talk` if installed."""
    name = best_local()
    hint = "" if name == "talk" else "; `make talk` gets one that answers"
    console.print(f"\nThe local model `{name}` (qllm run {name}{hint}):", highlight=False)
    try:
        engine = QLLMEngine.from_pretrained(name, threads=threads)
    except ModelError as error:
        console.print(f"left out: {error}", style="dim", highlight=False)
        return
    with engine:
        for prompt in LOCAL_PROMPTS:
            handle = engine.submit([{"role": "user", "content": prompt}], max_tokens=LOCAL_TOKENS)
            console.print(f"> {prompt}", style="bold", highlight=False, markup=False)
            for piece in handle:
                console.print(piece.text, end="", highlight=False, markup=False, soft_wrap=True)
            console.print()
