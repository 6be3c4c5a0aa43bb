"""The command `qllm new-drafter`."""

from pathlib import Path
from typing import Annotated

import typer

from qllm.cli.app import app, clean


@app.command()
@clean
def new_drafter(
    name: Annotated[str, typer.Argument(help="Of the module, like my_drafter.")],
    out: Annotated[Path, typer.Option(help="Folder to make the package in.")] = Path(),
) -> None:
    """Write a package with a drafter of your own, its tests and its entry point."""
    from qllm.cli.new_drafter import new_drafter as write_package

    folder = write_package(name, out)
    typer.echo(f"{folder}: a drafter, its tests and README. Next:")
    typer.echo(f"  cd {folder}\n  python -m pip install -e .\n  python -m pytest")
