"""The command `qllm docs`: the pages of this release, also without a checkout."""

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from qllm.cli.app import app, clean, print_table
from qllm.errors import ConfigError

SHOWN = (".md", ".json", ".yaml")


@app.command()
@clean
def docs(
    page: Annotated[
        str | None, typer.Argument(help="Which one; all are listed without it.")
    ] = None,
) -> None:
    """Print a page of the documentation, a Grafana dashboard or its alerts."""
    pages = find_pages()
    if page is None:
        print_table(("page", ""), ((name, _title(path)) for name, path in sorted(pages.items())))
        return
    found = pages.get(page.removesuffix(".md").removeprefix("docs/"))
    if found is None:
        raise ConfigError(f"there is no page {page!r:.80}; use one of {', '.join(sorted(pages))}")
    typer.echo(found.read_text(encoding="utf-8"), nl=False)


def find_pages() -> dict[str, Path]:
    """Return the files by name, without the suffix of Markdown.

    A wheel has them in the package, a checkout next to it.

    Raises:
        ConfigError: Neither place has them.
    """
    package = Path(str(files("qllm")))
    for folder in (package / "docs", package.parent / "docs"):
        if (folder / "serving.md").is_file():
            return {
                path.name.removesuffix(".md"): path
                for path in folder.iterdir()
                if path.suffix in SHOWN
            }
    raise ConfigError(f"the pages are missing from {package}: install qllm again")


def _title(path: Path) -> str:
    if path.suffix != ".md":
        return "for Grafana and Prometheus: save it with `>`"
    with open(path, encoding="utf-8") as lines:
        return next((line.strip("# \n") for line in lines if line.strip()), "")
