"""`qllm bench`: a workload against engines of this process, or against a server."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qllm.errors import ConfigError
from qllm.measure.random_moe import SIZES, make_random_moe, source_text
from qllm.measure.variants import KV_SIZES, Variant
from qllm.types import Priority, Slo
from qllm.workloads.capacity import Capacity, measure_capacity
from qllm.workloads.client import Server, send_http
from qllm.workloads.files import read_requests
from qllm.workloads.generators import Workload, offered_rates
from qllm.workloads.measure import SLO, Window, report
from qllm.workloads.mix import send
from qllm.workloads.spec import RequestSpec
from qllm.workloads.tokens import with_tokens
from qllm.workloads.traced import engine_report

CORPUS_BYTES = 400_000
ANY_VOCABULARY = 1000
"""Limit of the random ids in prompts that are made without a tokenizer."""
Say = Callable[[str], None]


OF_A_WORKLOAD = dict.fromkeys(
    ("load", "ls_share", "cv", "length_scale", "ls_scale", "wait_scale"), float
) | {"max_len": int, "subagents": str}
"""Names of the scales of a named workload, with their types."""
OF_A_TRACE = {
    "be_share": float,
    "be_where": str,
    "start_s": float,
    "rate_scale": float,
    "limit": int,
}
"""Names of the scales of a trace file, with their types."""


@dataclass(frozen=True, kw_only=True)
class BenchLoad:
    """A load, and the time for which it is measured."""

    name: str | None = None
    """Name of a workload; None uses `file`."""
    file: Path | None = None
    scale: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of `Workload`, or keywords of `read_requests`."""
    seed: int = 0
    warmup_s: float = 5.0
    window_s: float = 30.0
    drain_s: float = 0.0
    slo: Slo = SLO

    def __post_init__(self) -> None:
        if (self.name is None) == (self.file is None):
            raise ConfigError("give either a named workload or a trace file")
        self._check_scale()
        if self.name is not None:
            Workload(name=self.name, **self.scale)
        if not (self.warmup_s >= 0 and self.window_s > 0 and self.drain_s >= 0):
            raise ConfigError(
                f"warm-up {self.warmup_s!r} and drain {self.drain_s!r} must be >= 0 seconds, the "
                f"window {self.window_s!r} > 0"
            )

    def _check_scale(self) -> None:
        known = OF_A_TRACE if self.name is None else OF_A_WORKLOAD
        what = "a trace" if self.name is None else f"workload {self.name}"
        for name, value in self.scale.items():
            if name not in known:
                raise ConfigError(f"{name} is no scale of {what}; known: {', '.join(known)}")
            kind = known[name]
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if kind is int and not (isinstance(value, int) and is_number and value >= 1):
                raise ConfigError(f"{name}={value!r} must be an integer >= 1")
            if kind is float and not (is_number and math.isfinite(value)):
                raise ConfigError(f"{name}={value!r} must be a number")
            if kind is str and not isinstance(value, str):
                what = "COLUMN=VALUE" if name == "be_where" else "text"
                raise ConfigError(f"{name}={value!r} must be {what}")

    @property
    def total_s(self) -> float:
        """Return the seconds of warm-up, window and drain together.

        Requests arrive until the drain.
        """
        return self.warmup_s + self.window_s + self.drain_s

    @property
    def window(self) -> Window:
        """Return the measured window."""
        return Window(
            start_s=self.warmup_s, end_s=self.warmup_s + self.window_s, stop_s=self.total_s
        )

    def requests(self, capacity: Capacity | None) -> tuple[list[RequestSpec], dict[str, Any]]:
        """Return the requests before the drain, and their nominal and offered rates by class.

        Raises:
            ConfigError: A named workload has no capacity, or a value is wrong.
        """
        until_s = self.window.end_s
        if self.file is not None:
            found = read_requests(self.file, seed=self.seed, **self.scale)
            about: dict[str, Any] = {"file": str(self.file)}
        else:
            assert self.name is not None
            if capacity is None:
                raise ConfigError(
                    f"workload {self.name} is scaled by the machine's capacity: give --capacity "
                    "PREFILL,OUTPUT in tokens per second, or a trace file"
                )
            workload = Workload(name=self.name, seconds=until_s, capacity=capacity, **self.scale)
            found = workload.requests(self.seed)
            nominal = workload.nominal_rates()
            about = {
                "workload": self.name,
                "what": workload.what,
                "nominal_per_s": {p.name: rate for p, rate in nominal.items()},
            }
        found = [r for r in found if r.at_s < until_s]
        if any(r.pieces for r in found):
            raise ConfigError(
                f"the prompts of {self.name} come in pieces, which this client does not send; use "
                "`qllm sim`"
            )
        if not found:
            raise ConfigError(f"nothing arrives in the first {until_s:g} s; raise the rate")
        rates = offered_rates(found, until_s)
        known = {p.value: p.name for p in Priority}
        about["offered_per_s"] = {known.get(p, str(p)): rate for p, rate in rates.items()}
        return found, about | {"seed": self.seed}


def corpus_of(tokenizer: Any) -> Sequence[int]:
    """Return ids for prompts: ids of source text, or random ids without a tokenizer."""
    if tokenizer is None:
        rng = random.Random(0)
        return [rng.randrange(10, ANY_VOCABULARY) for _ in range(20_000)]
    text = "\n".join(source_text(CORPUS_BYTES))[:CORPUS_BYTES]
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def bench_engine(
    model: str,
    load: BenchLoad,
    policies: Sequence[Variant],
    *,
    device: str = "cpu",
    threads: int | None,
    capacity: Capacity | None = None,
    settings: Mapping[str, Any],
    say: Say,
) -> dict[str, Any]:
    """Serve the load in this process, under one policy after the other.

    Args:
        model: Alias, folder, hub id, or a size of `qllm.measure.random_moe`.
        load: Load to serve.
        policies: Policies with their settings.
        device: Device of the model, "cpu" or "cuda".
        threads: Number of torch's threads.
        capacity: Capacity of the machine. None measures the capacity if the load needs it.
        settings: Settings of every engine.
        say: Callback with progress messages.
    """
    from qllm.llm import QLLMEngine
    from qllm.models.loader import check_device
    from qllm.models.loader import load as load_model

    place = check_device(device)
    where = make_random_moe(size=model) if model in SIZES else model
    loaded = load_model(where, device=place, depth=settings.get("depth"))
    corpus = corpus_of(loaded.tokenizer)

    def engine(policy: Any) -> QLLMEngine:
        return QLLMEngine.from_model(
            loaded.model,
            loaded.tokenizer,
            policy=policy,
            threads=threads,
            **{**KV_SIZES, "conformance": False, "record": True, **settings},
        )

    if capacity is None and load.file is None:
        say("measuring the capacity")
        with engine("priority") as probe:
            capacity = measure_capacity(probe, corpus)
    requests, about = load.requests(capacity)
    arrivals = with_tokens(requests, corpus, load.seed)
    reports: dict[str, Any] = {}
    for variant in policies:
        say(f"{variant.label}: {load.total_s:.0f} s, {len(arrivals)} requests")
        with engine(variant.make()) as serving:
            run = send(serving, arrivals, load.total_s)
            shown = repr(serving.policy)
        slos: dict[int, Slo] = {Priority.LS: load.slo}
        found = engine_report(run.trace, requests, load.window, slos=slos, start_ns=run.start_ns)
        reports[variant.label] = found | {"policy": shown, "refused": run.refused}
    return {"model": model, **about, **_capacity(capacity), "runs": reports}


def bench_server(
    server: Server,
    load: BenchLoad,
    *,
    capacity: Capacity | None = None,
    tokenizer: Any = None,
    say: Say,
) -> dict[str, Any]:
    """Send the load to a server.

    Args:
        server: Server to send to.
        load: Load to send.
        capacity: Capacity of the server. A named workload needs it.
        tokenizer: Tokenizer of the server. Without a tokenizer, prompts are random ids below 1,000.
        say: Callback with progress messages.
    """
    requests, about = load.requests(capacity)
    arrivals = with_tokens(requests, corpus_of(tokenizer), load.seed)
    say(f"{server.url}: {load.total_s:.0f} s, {len(arrivals)} requests")
    served = send_http(server, arrivals, load.total_s)
    found = report(served, load.window, {Priority.LS: load.slo})
    for name in sorted({s.error for s in served if s.error}):
        say(f"error: {name}")
    return {"model": server.model, **about, **_capacity(capacity), "runs": {server.url: found}}


def _capacity(capacity: Capacity | None) -> dict[str, Any]:
    if capacity is None:
        return {}
    names = capacity.__dataclass_fields__
    return {"capacity": {name: getattr(capacity, name) for name in names}}


# -- the table


def _dist(key: str) -> Callable[[Mapping[str, Any]], str]:
    def cell(found: Mapping[str, Any]) -> str:
        d = found.get(key)
        return (
            "-" if d is None else " / ".join(f"{d[p]:,.0f}" for p in ("p50", "p90", "p99", "max"))
        )

    return cell


def _number(key: str, form: str = ",.1f") -> Callable[[Mapping[str, Any]], str]:
    def cell(found: Mapping[str, Any]) -> str:
        value = found.get(key)
        return "-" if value is None else format(value, form)

    return cell


def _counts(found: Mapping[str, Any]) -> str:
    errors = f", {found['errors']} errors" if found["errors"] else ""
    return f"{found['finished']} of {found['arrived']}{errors}"


LINES: tuple[tuple[str, Callable[[Mapping[str, Any]], str]], ...] = (
    ("finished", _counts),
    ("TTFT p50 / p90 / p99 / max, ms", _dist("ttft_ms")),
    ("TBT p50 / p90 / p99 / max, ms", _dist("tbt_ms")),
    ("E2E p50 / p90 / p99 / max, ms", _dist("e2e_ms")),
    ("SLO attainment", _number("slo_attainment", ".0%")),
    ("goodput, requests/s", _number("goodput_per_s", ",.2f")),
    ("prompt tokens/s", _number("prefill_tokens_per_s")),
    ("output tokens/s", _number("output_tokens_per_s")),
    ("longest stall, ms", _number("max_stall_ms", ",.0f")),
    ("times preempted", _number("preemptions", ",")),
    ("recomputed, evicted", _number("evict_recomputed_tokens", ",")),
)


def table_rows(document: Mapping[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return head and rows of the table: metrics of every class, one column per run."""
    runs = document["runs"]
    classes = sorted({c for run in runs.values() for c, v in run.items() if _is_class(v)})
    rows: list[tuple[str, ...]] = []
    for name in sorted(classes, key=lambda c: (c != "LS", c)):
        rows.append((name, *("" for _ in runs)))
        for what, cell in LINES:
            found = (run.get(name) for run in runs.values())
            rows.append((f"  {what}", *("-" if f is None else cell(f) for f in found)))
    latency = [run.get("engine", {}).get("preempt_latency_ms") for run in runs.values()]
    if any(latency):
        texts = ("-" if d is None else f"{d['p50']:.1f} / {d['p99']:.1f}" for d in latency)
        rows.append(("preempt latency p50 / p99, ms", *texts))
    return ("", *runs), rows


def _is_class(value: Any) -> bool:
    return isinstance(value, Mapping) and "arrived" in value
