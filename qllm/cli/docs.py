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
        str | None, typer.Argument(help="Its name, as guides/serving; all are listed without it.")
    ] = None,
) -> None:
    """Print a page of the documentation, a Grafana dashboard or its alerts."""
    pages = find_pages()
    if page is None:
        print_table(("page", ""), ((name, _title(path)) for name, path in sorted(pages.items())))
        return
    name = page.removesuffix(".md").removeprefix("docs/")
    named = [name] if name in pages else [full for full in pages if full.endswith(f"/{name}")]
    if len(named) != 1:
        problem = f"{page!r:.80} is several pages" if named else f"there is no page {page!r:.80}"
        raise ConfigError(f"{problem}; use one of {', '.join(sorted(named or pages))}")
    typer.echo(pages[named[0]].read_text(encoding="utf-8"), nl=False)


def find_pages() -> dict[str, Path]:
    """Return the files by path in `docs/`, without the suffix `.md`.

    A wheel has the files in the package, a checkout has them next to the package.

    Raises:
        ConfigError: The files are in neither place.
    """
    package = Path(str(files("qllm")))
    for folder in (package / "docs", package.parent / "docs"):
        if (folder / "architecture.md").is_file():
            return {
                path.relative_to(folder).as_posix().removesuffix(".md"): path
                for path in folder.rglob("*")
                if path.suffix in SHOWN
            }
    raise ConfigError(f"the pages are missing from {package}: install qllm again")


def _title(path: Path) -> str:
    if path.suffix != ".md":
        return "for Grafana and Prometheus: save it with `>`"
    with open(path, encoding="utf-8") as lines:
        return next((line.strip("# \n") for line in lines if line.strip()), "")
