"""The command `qllm top`: a running server in the terminal, from its /metrics."""

import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from qllm.cli.app import app, clean
from qllm.errors import ConfigError, pip_install

if TYPE_CHECKING:
    from rich.table import Table

CLASSES = ("LS", "BE")
TIMEOUT_S = 10
DRAFTED = "spec_decode_num_draft_tokens_total"
ACCEPTED = "spec_decode_num_accepted_tokens_total"


class Sample(NamedTuple):
    """A line of /metrics."""

    name: str
    labels: dict[str, str]
    value: float


class Scrape:
    """The whole of /metrics at one time."""

    def __init__(self, samples: Iterable[Sample], at_s: float) -> None:
        self.samples = [s for s in samples if s.name.startswith("qllm:")]
        self.at_s = at_s

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of the samples with this name and these labels."""
        return sum(
            s.value
            for s in self.samples
            if s.name == f"qllm:{name}" and labels.items() <= s.labels.items()
        )

    def buckets(self, name: str, **labels: str) -> dict[float, float]:
        """Return cumulative counts of a histogram by upper bound."""
        found: dict[float, float] = {}
        for s in self.samples:
            if s.name == f"qllm:{name}_bucket" and labels.items() <= s.labels.items():
                bound = float(s.labels["le"])
                found[bound] = found.get(bound, 0.0) + s.value
        return found


def quantile(buckets: dict[float, float], p: float) -> float | None:
    """Return the upper bound of the bucket with the p-quantile; None for an empty histogram."""
    bounds = sorted(buckets)
    count = buckets[bounds[-1]] if bounds else 0.0
    if not count:
        return None
    return next(bound for bound in bounds if buckets[bound] >= p * count)


def scrape(url: str) -> Scrape:
    """Read /metrics of a server.

    Raises:
        ConfigError: There is no qllm server at this address.
    """
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ModuleNotFoundError as error:
        raise ConfigError(f"top needs {error.name}: {pip_install('server')}") from error
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=TIMEOUT_S) as answer:
            text = answer.read().decode()
        families = list(text_string_to_metric_families(text))
    except (OSError, ValueError) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        raise ConfigError(f"no qllm server answers at {url}: {error}") from error
    samples = (Sample(s.name, dict(s.labels), s.value) for f in families for s in f.samples)
    found = Scrape(samples, time.monotonic())
    if not found.samples:
        raise ConfigError(f"{url}/metrics has no metric of qllm; is it another server?")
    return found


def table(before: Scrape, now: Scrape) -> "Table":
    """Return the table of a screen, with rates and percentiles between two scrapes."""
    from rich import box
    from rich.table import Table

    made = Table("", *CLASSES, box=box.SIMPLE_HEAD, pad_edge=False)
    seconds = max(now.at_s - before.at_s, 1e-9)
    for state in ("running", "parked", "waiting"):
        values = (now.total(f"num_requests_{state}", **{"class": c}) for c in CLASSES)
        made.add_row(state, *(f"{value:.0f}" for value in values))
    for label, name in (
        ("output tokens/s", "generation_tokens_total"),
        ("prompt tokens/s", "prompt_tokens_total"),
        ("ended/s", "request_success_total"),
        ("preempted/s", "request_preemptions_total"),
    ):
        made.add_row(label, *(f"{_rate(before, now, name, c) / seconds:,.1f}" for c in CLASSES))
    if drafters(now):
        made.add_row(
            "drafted tokens/s",
            *(f"{_rate(before, now, DRAFTED, c) / seconds:,.1f}" for c in CLASSES),
        )
        made.add_row("of these accepted", *(_accepted(before, now, c) for c in CLASSES))
    for label, name in (
        ("TTFT", "time_to_first_token_seconds"),
        ("ITL", "inter_token_latency_seconds"),
        ("longest stall", "request_max_stall_seconds"),
    ):
        made.add_row(f"{label} p50 / p99, ms", *(_p50_p99(before, now, name, c) for c in CLASSES))
    return made


def drafters(now: Scrape) -> list[str]:
    """Return the drafters of the server's engine; none if it drafts nothing."""
    found = {s.labels.get("drafter", "none") for s in now.samples if s.name == f"qllm:{DRAFTED}"}
    return sorted(found - {"none"})


def head(now: Scrape) -> str:
    """Return the line above the table."""
    model = now.samples[0].labels["model_name"]
    drafts = f", drafts by {' and '.join(names)}" if (names := drafters(now)) else ""
    return (
        f"{model}: KV {now.total('kv_cache_usage_perc'):.0%}, "
        f"{now.total('preemptions_total'):.0f} preemptions, longest segment "
        f"{1e3 * now.total('max_segment_seconds'):.1f} ms, "
        f"{now.total('requests_refused_total'):.0f} refused, "
        f"{now.total('requests_demoted_total'):.0f} demoted{drafts}"
    )


def _rate(before: Scrape, now: Scrape, name: str, label: str) -> float:
    return now.total(name, **{"class": label}) - before.total(name, **{"class": label})


def _accepted(before: Scrape, now: Scrape, label: str) -> str:
    """Return the part of the newly drafted tokens that were accepted."""
    drafted, accepted = (_rate(before, now, name, label) for name in (DRAFTED, ACCEPTED))
    return f"{accepted / drafted:.0%}" if drafted else "-"


def _p50_p99(before: Scrape, now: Scrape, name: str, label: str) -> str:
    new = now.buckets(name, **{"class": label})
    for bound, count in before.buckets(name, **{"class": label}).items():
        new[bound] -= count
    values = (quantile(new, p) for p in (0.5, 0.99))
    return " / ".join("-" if v is None else f"<= {1e3 * v:,.1f}" for v in values)


@app.command()
@clean
def top(
    url: Annotated[str, typer.Argument(help="Of the server.")] = "http://127.0.0.1:8000",
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one look and end.")] = False,
) -> None:
    """Watch a running server: queues, rates and latencies per class. Ctrl-C ends it."""
    from rich.console import Console, Group
    from rich.live import Live

    url = url.rstrip("/")
    before = scrape(url)
    if once:
        time.sleep(every)
        now = scrape(url)
        Console().print(head(now), table(before, now))
        return
    with Live(Group(head(before), table(before, before)), screen=True) as live:
        while True:
            time.sleep(every)
            now = scrape(url)
            live.update(Group(head(now), table(before, now)))
            before = now
