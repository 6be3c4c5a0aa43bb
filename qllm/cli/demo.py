"""The commands `qllm demo` and `qllm models`."""

from pathlib import Path
from typing import Annotated

import typer

from qllm.cli.app import Policies, Threads, app, clean, print_table, quiet


@app.command()
@clean
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
    tiny: Annotated[bool, typer.Option(help="Let a local model write at the end.")] = True,
) -> None:
    """Compare policies on a mixed load: one table, a figure and traces."""
    quiet()
    from qllm.measure.demo import DemoSettings, run_demo

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
@clean
def models() -> None:
    """List the short names of models, and the models that they mean."""
    quiet()
    from qllm.models.aliases import ALIASES

    local = {"tiny": "comes with this package", "talk": "made by `make talk`"}
    print_table(
        ("alias", "model"), ((alias, name or local[alias]) for alias, name in ALIASES.items())
    )
