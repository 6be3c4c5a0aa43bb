"""`qllm bench`: a workload against policies, or against any OpenAI-compatible server."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qllm.cli.app import (
    Device,
    Threads,
    app,
    clean,
    engine_settings,
    parse_setting,
    print_table,
    quiet,
)
from qllm.cli.settings import WithSettings
from qllm.errors import ConfigError
from qllm.spelling import read_all

if TYPE_CHECKING:
    from qllm.workloads.capacity import Capacity


@app.command(cls=WithSettings)
@clean
def bench(
    model: Annotated[
        str | None, typer.Argument(help="Alias, folder or hub id; 300m or 1m for random weights.")
    ] = None,
    workload: Annotated[str | None, typer.Option(help="S1 to S15; or give --trace.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Azure or BurstGPT CSV, Mooncake or our own JSON lines.")
    ] = None,
    policy: Annotated[
        str,
        typer.Option(help="With commas between; settings as NAME:KEY=VALUE, swept by KEY=A/B."),
    ] = "qllm2",
    seed: Annotated[int, typer.Option(help="Of the workload.")] = 0,
    seconds: Annotated[float, typer.Option(help="Length of the measured window.")] = 30.0,
    warmup: Annotated[float, typer.Option(help="Seconds before it.")] = 5.0,
    drain: Annotated[float, typer.Option(help="Seconds after it, without arrivals.")] = 0.0,
    scale: Annotated[
        list[str] | None,
        typer.Option(
            "--scale",
            help="NAME=VALUE: load, ls_share, cv, length_scale, ls_scale, max_len, wait_scale or "
            "subagents of a named workload; be_share, be_where, start_s, rate_scale or limit of a "
            "trace.",
        ),
    ] = None,
    slo: Annotated[str, typer.Option(help="What LS is judged by.")] = "ttft=500ms,tpot=100ms",
    capacity: Annotated[
        str | None, typer.Option(help="PREFILL,OUTPUT tokens/s; by default measured.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="A server, instead of an engine here.")] = None,
    served_model: Annotated[
        str | None, typer.Option("--model", help="What the server calls its model.")
    ] = None,
    by: Annotated[
        str, typer.Option(help="How a server is told the class: priority, service_tier or none.")
    ] = "priority",
    fixed: Annotated[
        str,
        typer.Option(help="How a server is told to answer in full: ignore_eos, min_tokens."),
    ] = "ignore_eos",
    ls_body: Annotated[str, typer.Option(help="JSON added to LS requests; null removes.")] = "{}",
    be_body: Annotated[str, typer.Option(help="JSON added to BE requests; null removes.")] = "{}",
    text: Annotated[bool, typer.Option("--text", help="Send prompts as text, not ids.")] = False,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Of it.")] = None,
    device: Device = None,
    threads: Threads = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="An engine setting, NAME=VALUE.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write all numbers here, as JSON.")] = None,
) -> None:
    """Send a workload in real time and print the numbers of each class.

    With --url, MODEL is only the tokenizer that makes the prompts.
    """
    quiet()
    from qllm.config import parse_slo
    from qllm.measure.bench import (
        OF_A_TRACE,
        OF_A_WORKLOAD,
        BenchLoad,
        bench_engine,
        bench_server,
        table_rows,
    )
    from qllm.measure.variants import parse_variants

    load = BenchLoad(
        name=workload,
        file=trace,
        scale=read_all(dict(map(parse_setting, scale or ())), OF_A_WORKLOAD | OF_A_TRACE),
        seed=seed,
        warmup_s=warmup,
        window_s=seconds,
        drain_s=drain,
        slo=parse_slo(slo),
    )
    if url is None:
        if model is None:
            raise ConfigError("give MODEL to serve here, or --url of a server")
        document = bench_engine(
            model,
            load,
            parse_variants(policy),
            device=device or "cpu",
            threads=threads,
            capacity=_capacity(capacity),
            settings=engine_settings(setting),
            say=_say,
        )
    else:
        tokenizer = None if model is None else _tokenizer(model)
        document = bench_server(
            _server(
                url=url,
                model=served_model or model,
                bodies=_bodies(by, {"LS": ls_body, "BE": be_body}),
                fixed=tuple(filter(None, fixed.split(","))),
                text_of=tokenizer.decode if text and tokenizer is not None else None,
                api_key=api_key,
            ),
            load,
            capacity=_capacity(capacity),
            tokenizer=tokenizer,
            say=_say,
        )
    if "what" in document:
        typer.echo(f"{document['workload']}: {document['what']}")
    for name in ("nominal_per_s", "offered_per_s"):
        if name in document:
            rates = ", ".join(f"{c} {rate:.3g}" for c, rate in document[name].items())
            typer.echo(f"{name.removesuffix('_per_s')} requests/s: {rates}")
    print_table(*table_rows(document))
    if out is not None:
        out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        typer.echo(f"{out}: all numbers")


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _capacity(text: str | None) -> "Capacity | None":
    from qllm.workloads.capacity import Capacity

    if text is None:
        return None
    try:
        prefill, output = (float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--capacity {text!r} must be PREFILL,OUTPUT in tokens/s") from None
    return Capacity(prefill_tokens_per_s=prefill, output_tokens_per_s=output)


def _tokenizer(model: str) -> Any:
    from qllm.measure.random_moe import SIZES, make_random_moe
    from qllm.models.tokenizer import load_tokenizer

    found = load_tokenizer(str(make_random_moe(size=model)) if model in SIZES else model)
    if found is None:
        raise ConfigError(f"{model} has no tokenizer; leave MODEL out to send random token ids")
    return found


def _server(*, model: str | None, **fields: Any) -> Any:
    from qllm.workloads.client import Server

    if model is None:
        raise ConfigError("give --model, what the server calls its model")
    return Server(model=model, **fields)


def _bodies(by: str, more: dict[str, str]) -> dict[int, dict[str, Any]]:
    """Return the fields added to the requests of each class."""
    from qllm.types import Priority
    from qllm.workloads.client import class_bodies

    bodies = class_bodies(by)
    for priority in Priority:
        try:
            added = json.loads(more[priority.name])
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"the body of {priority.name} is not JSON: {error}") from None
        if not isinstance(added, dict):
            raise ConfigError(f"the body of {priority.name}, {added!r:.80}, must be an object")
        bodies[int(priority)] = {**bodies.get(int(priority), {}), **added}
    return bodies
