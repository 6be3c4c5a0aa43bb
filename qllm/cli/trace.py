"""The command `qllm trace`: the metrics of a recorded run."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qllm.cli.app import app, clean, print_table

if TYPE_CHECKING:
    from qllm.record.summary import Distribution, Summary


@app.command()
@clean
def trace(
    file: Annotated[Path, typer.Argument(help="A trace that a run has recorded.")],
    perfetto: Annotated[
        Path | None, typer.Option(help="Write this JSON for ui.perfetto.dev instead.")
    ] = None,
) -> None:
    """Print the metrics of a trace, or convert it for Perfetto."""
    from qllm.record.trace import Trace

    recorded = Trace.read_jsonl(file)
    if perfetto is not None:
        from qllm.record.perfetto import write_perfetto

        write_perfetto(recorded, perfetto)
        typer.echo(f"{perfetto}: open it in ui.perfetto.dev")
        return
    from qllm.record.summary import summarize

    print_summary(summarize(recorded), recorded.meta)


def print_summary(summary: "Summary", meta: Mapping[str, Any]) -> None:
    """Print the metrics of a run, class by class."""
    from qllm.record.metrics import class_name

    for key, value in meta.items():
        typer.echo(f"{key}: {value}")
    classes = list(summary.classes.values())
    latency = summary.preempt_latency_ms
    typer.echo(
        f"{summary.duration_s:.2f} s, {len(summary.requests)} requests, {summary.frames} frames, "
        f"{summary.frames_parked} times parked; preempt latency p50 / p99 / max "
        + (f"{latency.p50:.2f} / {latency.p99:.2f} / {latency.max:.2f} ms" if latency else "-")
    )
    rows: list[tuple[str, ...]] = []
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms", "queue_ms"):
        label = name.removesuffix("_ms")
        label = f"{label if label == 'queue' else label.upper()} p50 / p99, ms"
        rows.append((label, *(_p50_p99(getattr(c, name)) for c in classes)))
    rows.append(("arrived", *(str(c.arrived) for c in classes)))
    rows += [
        (reason, *(str(c.finished.get(reason, 0)) for c in classes))
        for reason in sorted({reason for c in classes for reason in c.finished})
    ]
    for label, field in (
        ("prompt tokens/s", "prefill_tokens_per_s"),
        ("output tokens/s", "output_tokens_per_s"),
        ("times preempted", "preemptions"),
        ("parked, ms", "parked_ms"),
        ("longest stall, ms", "max_stall_ms"),
        ("evictions", "evictions"),
        ("recomputed, evicted", "evict_recomputed_tokens"),
        ("recomputed, retried", "retry_recomputed_tokens"),
        ("recomputed, preempted", "preempt_recomputed_tokens"),
    ):
        values = (getattr(c, field) for c in classes)
        rows.append((label, *(f"{v:,.1f}" if isinstance(v, float) else f"{v:,}" for v in values)))
    print_table(("", *(class_name(c.priority) for c in classes)), rows)


def _p50_p99(found: "Distribution | None") -> str:
    return "-" if found is None else f"{found.p50:,.1f} / {found.p99:,.1f}"
