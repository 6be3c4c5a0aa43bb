"""Every setting with its default behind the flags of `--help`."""

import ast
import inspect
import textwrap
from typing import Any

import typer
from typer.core import TyperCommand

from .app import print_table


class WithSettings(TyperCommand):
    """A command whose help ends with the settings of the engine."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help."""
        from qllm.config import EngineConfig

        super().format_help(ctx, formatter)
        typer.echo("Settings of the engine, --set NAME=VALUE:")
        print_table(("name", "default", ""), rows(EngineConfig))


class WithServerSettings(WithSettings):
    """A command whose help ends with the settings of the engine and of the server."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help."""
        super().format_help(ctx, formatter)
        try:
            from qllm.server.config import ServerConfig
        except ModuleNotFoundError as error:
            typer.echo(f"The settings of the server need {error.name}: its extra [server].")
            return
        typer.echo("Settings of the server, --server NAME=VALUE, or QLLM_NAME in the environment:")
        print_table(("name", "default", ""), rows(ServerConfig))


def rows(settings: type[Any]) -> list[tuple[str, str, str]]:
    """Name, default and meaning of every field of a class of settings.

    The meaning is the string below the field.
    """
    said = _meanings(settings)
    found = inspect.signature(settings).parameters.values()
    return [(p.name, _shown(p.default), said.get(p.name, "")) for p in found]


def _shown(default: Any) -> str:
    if default in (None, "", (), {}) or default is inspect.Parameter.empty:
        return "-"
    return str(default)


def _meanings(settings: type[Any]) -> dict[str, str]:
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(settings))).body
    assert isinstance(tree, ast.ClassDef)
    found: dict[str, str] = {}
    for field, said in zip(tree.body, tree.body[1:], strict=False):
        match field, said:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=text)):
                found[name] = " ".join(str(text).split())
    return found
