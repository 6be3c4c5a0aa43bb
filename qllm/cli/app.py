"""The application, errors and tables that all commands share."""

import os
import sys
import warnings
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Annotated, Any, ParamSpec, TypeVar

import typer

from qllm.cores import parse_threads
from qllm.errors import ConfigError, QllmError

_P = ParamSpec("_P")
_T = TypeVar("_T")

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from qllm import __version__

        typer.echo(f"qllm {__version__}")
        raise typer.Exit


@app.callback()
def main(
    _: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the release."
        ),
    ] = False,
) -> None:
    """Serve Mixture-of-Experts models to people who wait and to jobs that don't."""


FAILED, INTERRUPTED = 2, 130
"""Exit codes."""


def clean(command: Callable[_P, _T]) -> Callable[_P, _T]:
    """Turn our errors and broken input into one line on stderr and exit code 2."""

    @wraps(command)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return command(*args, **kwargs)
        except (QllmError, OSError) as error:
            typer.echo(f"qllm: {one_line(error)}", err=True)
            raise typer.Exit(FAILED) from None
        except KeyboardInterrupt:
            typer.echo("", err=True)
            raise typer.Exit(INTERRUPTED) from None

    return run


def one_line(error: Exception) -> str:
    """Return the message of an error as one line."""
    return " ".join(str(error).split()) or type(error).__name__


def quiet() -> None:
    """Turn off the progress bars and advice of libraries, because stdout and stderr are ours."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.simplefilter("ignore")
    # a module that is imported later reads the variable
    bars = sys.modules.get("transformers.utils.logging")
    if bars is not None:
        bars.disable_progress_bar()


OWN_FLAGS = ("policy", "dtype", "device", "threads", "trust_remote_code")
"""Arguments of `QLLMEngine.from_pretrained` other than settings, each with its own flag."""
OF_POLICY = "policy."


def parse_setting(text: str) -> tuple[str, str]:
    """Split `name=value`."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"{text!r} must be NAME=VALUE")
    return name, value


def engine_settings(texts: Iterable[str] | None) -> dict[str, Any]:
    """Return settings of the engine from `--set NAME=VALUE`.

    Raises:
        ConfigError: A name is not a setting of the engine (the message names its place), or the
            value is not allowed.
    """
    from qllm.config import spelled

    return spelled(_of_engine(texts))


def _of_engine(texts: Iterable[str] | None) -> dict[str, str]:
    """Return the texts of the engine's settings by name."""
    found = dict(parse_setting(text) for text in texts or ())
    for name in found:
        if name in OWN_FLAGS:
            flag = name.replace("_", "-")
            raise ConfigError(f"{name} is no setting for --set; give it as --{flag}")
        if name == "policy_settings" or name.startswith(OF_POLICY):
            raise ConfigError(
                f"{name} is no setting of the engine; `qllm run` and `qllm serve` take --set "
                "policy.NAME=VALUE, the others --policy NAME:KEY=VALUE"
            )
    return found


def split_settings(
    texts: Iterable[str] | None, **flags: str | None
) -> tuple[dict[str, str], dict[str, str]]:
    """Return texts of the engine's settings, and of the policy's settings (`policy.NAME`).

    Args:
        texts: Each `NAME=VALUE`.
        flags: Settings of the engine that have a flag of their own; None is a flag that is not
            given.

    Raises:
        ConfigError: A name belongs neither to the engine nor to the policy; the message names its
            place.
    """
    given = list(texts or ())
    of_policy = [text for text in given if text.startswith(OF_POLICY)]
    engine = _of_engine(text for text in given if not text.startswith(OF_POLICY))
    engine |= {name: value for name, value in flags.items() if value is not None}
    return engine, dict(parse_setting(text.removeprefix(OF_POLICY)) for text in of_policy)


Policies = Annotated[
    str, typer.Option(help="Which ones to compare, with commas between; see `qllm policies`.")
]
Memory = Annotated[
    str | None,
    typer.Option(
        metavar="BYTES",
        help="Memory of the whole engine, like 10GiB: weights, KV, cached KV and buffers.",
    ),
]
Ranks = Annotated[
    str | None,
    typer.Option(
        "--tp",
        metavar="NUMBER",
        help="Ranks that share the model's weights and compute each step together.",
    ),
]
RankHosts = Annotated[
    str | None,
    typer.Option(
        "--tp-hosts",
        metavar="HOST:PORT,...",
        help="Hosts of the other ranks, where `qllm rank` listens.",
    ),
]
ExpertBytes = Annotated[
    str | None,
    typer.Option(
        "--max-expert-bytes",
        metavar="BYTES",
        help="Most bytes of experts in memory, like 8GiB, for a model that is larger than memory.",
    ),
]
ExpertDir = Annotated[
    str | None,
    typer.Option("--expert-dir", metavar="FOLDER", help="Folder for the file of all experts."),
]
Depth = Annotated[
    str | None,
    typer.Option(
        metavar="LAYERS",
        help="Load this many of the model's layers, from the first. This can change answers.",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        parser=parse_threads,
        metavar="NUMBER|auto",
        help="Threads to compute with; auto takes the cores that this process may use.",
    ),
]


Device = Annotated[
    str | None, typer.Option(help="cpu, the default, or cuda where torch sees a GPU.")
]


def print_table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    """Print a table as wide as the terminal, or 110 columns wide without one."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(*head, box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    (console if console.is_terminal else Console(width=110)).print(table)
