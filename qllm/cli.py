"""The command line. What needs torch is imported by the command that needs it."""

import enum
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar

import typer

from qllm.errors import ConfigError, QllmError

if TYPE_CHECKING:
    from qllm.llm import QLLMEngine
    from qllm.metrics import Distribution, Summary
    from qllm.types import Message, Prompt

_P = ParamSpec("_P")
_T = TypeVar("_T")

app = typer.Typer(
    help="Serve Mixture-of-Experts models to people who wait and to jobs that don't.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

FAILED, INTERRUPTED = 2, 130
"""Exit codes."""


def main() -> None:
    """The console script `qllm`."""
    app()


def _clean(command: Callable[_P, _T]) -> Callable[_P, _T]:
    """Our errors and broken input become one line on stderr and exit code 2."""

    @wraps(command)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return command(*args, **kwargs)
        except (QllmError, OSError) as error:
            text = " ".join(str(error).split())
            typer.echo(f"qllm: {text or type(error).__name__}", err=True)
            raise typer.Exit(FAILED) from None
        except KeyboardInterrupt:
            typer.echo("", err=True)
            raise typer.Exit(INTERRUPTED) from None

    return run


def _quiet() -> None:
    """No progress bars and advice of the libraries below: stdout and stderr are ours."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.simplefilter("ignore")
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def _setting(text: str) -> tuple[str, Any]:
    """`name=value`, the value as JSON where it is JSON, else as text."""
    import json

    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"{text!r} must be NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


Policies = Annotated[
    str, typer.Option(help="Which ones to compare, with commas between; see `qllm policies`.")
]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads that torch computes with.")]


@app.command()
@_clean
def demo(
    seconds: Annotated[float, typer.Option(help="Length of every run.")] = 25.0,
    seed: Annotated[int, typer.Option(help="Of the arrivals.")] = 0,
    policies: Policies = "fcfs,priority,qllm2",
    out: Annotated[Path, typer.Option(help="Folder for the figure and traces.")] = Path(
        "qllm-demo"
    ),
    ls_rate: Annotated[
        float | None,
        typer.Option(help="LS requests per second; by default it follows the machine."),
    ] = None,
    threads: Threads = 1,
    exactness: Annotated[str, typer.Option(help="order or batch-invariant.")] = ("batch-invariant"),
    size: Annotated[str, typer.Option(help="300m or 1m parameters.")] = "300m",
    tiny: Annotated[bool, typer.Option(help="Let the packaged model write at the end.")] = True,
) -> None:
    """Compare policies on a mixed load: one table, a figure and traces."""
    _quiet()
    from qllm.demo import DemoSettings, run_demo

    run_demo(
        DemoSettings(
            seconds=seconds,
            seed=seed,
            policies=tuple(name.strip() for name in policies.split(",") if name.strip()),
            out=out,
            size=size,
            ls_rate=ls_rate,
            threads=threads,
            exactness=exactness,
            tiny=tiny,
        )
    )


@app.command()
@_clean
def run(
    model: Annotated[str, typer.Argument(help="Alias, folder or hub id; see `qllm models`.")],
    prompt: Annotated[str | None, typer.Argument(help="Without one, chat.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 256,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy; by default what the model asks for.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the random choices.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt instead of answering it.")
    ] = False,
    policy: Annotated[str, typer.Option(help="See `qllm policies`.")] = "qllm2",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code of the checkpoint.")
    ] = False,
    threads: Threads = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="An engine setting, NAME=VALUE.")
    ] = None,
) -> None:
    """Answer one prompt, or chat: Ctrl-C stops an answer, Ctrl-D leaves."""
    settings = dict(_setting(text) for text in setting or ())
    _quiet()
    from qllm.llm import QLLMEngine

    with QLLMEngine.from_pretrained(
        model,
        policy=policy,
        dtype=None if dtype == "auto" else dtype,
        trust_remote_code=trust_remote_code,
        threads=threads,
        **{"default_max_tokens": max_tokens, **settings},
    ) as engine:
        talk = _Talk(engine, temperature, seed, raw)
        if prompt is None:
            talk.chat()
        elif not talk.answer(prompt):
            raise typer.Exit(INTERRUPTED)


class _Talk:
    """A conversation on the terminal."""

    def __init__(
        self,
        engine: "QLLMEngine",
        temperature: float | None,
        seed: int | None,
        raw: bool,
    ) -> None:
        self._engine = engine
        self._sampling: dict[str, Any] = {}
        if temperature is not None:
            self._sampling["temperature"] = temperature
        if seed is not None:
            self._sampling["seed"] = seed
        template = getattr(engine.tokenizer, "chat_template", None)
        self._raw = raw or template is None
        self._history: list[Message] = []

    def answer(self, text: str) -> bool:
        """Stream an answer; False if it was stopped. A refused question leaves no trace."""
        from qllm.types import SamplingParams

        asked: list[Message] = [*self._history, {"role": "user", "content": text}]
        prompt: Prompt = text if self._raw else asked
        sampling = None
        if self._sampling:
            sampling = SamplingParams(
                **{"temperature": 0.0, **self._engine.sampling_defaults, **self._sampling}
            )
        handle = self._engine.submit(prompt, "LS", None, sampling=sampling)
        said: list[str] = []
        stopped = False
        try:
            for piece in handle:
                said.append(piece.text)
                sys.stdout.write(piece.text)
                sys.stdout.flush()
        except KeyboardInterrupt:
            handle.cancel()
            stopped = True
        sys.stdout.write("\n")
        if not self._raw:
            self._history = [*asked, {"role": "assistant", "content": "".join(said)}]
        return not stopped

    def chat(self) -> None:
        """Read questions until the end of input."""
        with suppress(ImportError):
            import readline  # noqa: F401 - gives `input` a line editor
        tty = sys.stdin.isatty()
        if tty:
            typer.echo("Ctrl-C stops an answer, Ctrl-D leaves.", err=True)
        while True:
            try:
                text = input("> " if tty else "").strip()
            except EOFError:
                typer.echo("")
                return
            except KeyboardInterrupt:
                typer.echo("")
                continue
            if not text:
                continue
            try:
                self.answer(text)
            except QllmError as error:
                typer.echo(f"qllm: {error}", err=True)


@app.command()
@_clean
def trace(
    file: Annotated[Path, typer.Argument(help="A trace that a run has recorded.")],
    perfetto: Annotated[
        Path | None, typer.Option(help="Write this JSON for ui.perfetto.dev instead.")
    ] = None,
) -> None:
    """Print the metrics of a trace, or convert it for Perfetto."""
    from qllm.trace import Trace

    recorded = Trace.read_jsonl(file)
    if perfetto is not None:
        from qllm.perfetto import write_perfetto

        write_perfetto(recorded, perfetto)
        typer.echo(f"{perfetto}: open it in ui.perfetto.dev")
        return
    from qllm.metrics import summarize

    _print_summary(summarize(recorded), recorded.meta)


def _print_summary(summary: "Summary", meta: Mapping[str, Any]) -> None:
    from qllm.perfetto import class_name

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
    _rows(("", *(class_name(c.priority) for c in classes)), rows)


def _p50_p99(found: "Distribution | None") -> str:
    return "-" if found is None else f"{found.p50:,.1f} / {found.p99:,.1f}"


@app.command()
@_clean
def policies() -> None:
    """List the installed policies, their parameters and what they need of an engine."""
    from qllm.plugins import installed_policies

    _rows(
        ("policy", "what it does", "parameters", "needs"),
        (
            (name, *_describe(name, point.load()))
            for name, point in sorted(installed_policies().items())
        ),
    )


def _describe(name: str, factory: Any) -> tuple[str, str, str]:
    import inspect
    from dataclasses import fields, is_dataclass

    doc = (inspect.getdoc(factory) or "").splitlines() or [""]
    known = fields(factory) if is_dataclass(factory) else ()
    shown = [
        f"{f.name}={_value(getattr(factory, f.name, '...'))}"
        for f in known
        if not f.metadata.get("fixed")
    ]
    needs = factory.needs  # of a class: a value, or a property that needs an object
    if isinstance(needs, property):
        needs = factory().needs
    caps = ", ".join((cap.name or "").lower() for cap in needs)
    return doc[0].rstrip("."), "\n".join(shown), caps or "-"


def _value(value: object) -> str:
    return value.name.lower() if isinstance(value, enum.Enum) else str(value)


@app.command()
@_clean
def models() -> None:
    """List the short names of models and what they stand for."""
    _quiet()
    from qllm.models.aliases import ALIASES

    _rows(
        ("alias", "model"),
        ((alias, name or "comes with this package") for alias, name in ALIASES.items()),
    )


def _rows(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(*head, box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    (console if console.is_terminal else Console(width=110)).print(table)


if __name__ == "__main__":
    main()
