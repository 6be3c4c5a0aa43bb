"""Commands whose `--help` lists every setting with its default."""

import ast
import inspect
import textwrap
from dataclasses import MISSING, fields
from typing import Any

import typer
from typer.core import TyperCommand

from qllm.cli.app import print_table
from qllm.hints import hint_of


class WithSettings(TyperCommand):
    """A command whose help ends with the engine's settings, and that explains unknown flags."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Parse the command line. An unknown flag raises an error with the known flags."""
        words = list(args)  # parsing removes the words
        try:
            rest: list[str] = super().parse_args(ctx, args)
            return rest
        except Exception as error:
            if not hasattr(error, "possibilities"):  # typer has no public name for the error
                raise
            name = str(error.option_name)  # type: ignore[attr-defined]
            flag = next((x.partition("=")[0] for x in words if x.startswith(name)), name)
            if not (hint := self._hint(flag)):
                raise
        ctx.fail(f"No such option: {flag}{hint}")

    def _hint(self, flag: str) -> str:
        from qllm.config import KINDS

        name = flag.lstrip("-").replace("-", "_")
        if name in KINDS:
            return f" (give it as --set {name}=VALUE)"
        return hint_of(flag, ())

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help."""
        from qllm.config import EngineConfig

        super().format_help(ctx, formatter)
        typer.echo("Settings of the engine, --set NAME=VALUE:")
        print_table(("name", "default", ""), rows(EngineConfig))


FLAGS = "qllm.server.flags"
"""Key in a context's `meta` of the server's settings that were given as flags."""
NO_FLAGS = ("model", "engine", "policy_settings", "objectives", "api_keys", "engine_address", "ray")
"""Settings for which the command has other arguments."""


class WithServerSettings(WithSettings):
    """A command that takes every setting of the server as a flag. Its help shows the defaults."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Remove flags that are settings of the server from the command line."""
        names = self._names()
        found, rest, items = ctx.meta.setdefault(FLAGS, {}), [], iter(args)
        for item in items:
            flag, equals, value = item.partition("=")
            if item == "--":
                rest += [item, *items]
            elif flag in names and names[flag].startswith("no_"):
                found[names[flag].removeprefix("no_")] = False
            elif flag in names:
                given = value if equals else next(items, None)
                if given is None:
                    ctx.fail(f"Option {flag!r} requires an argument.")
                found[names[flag]] = given
            else:
                rest.append(item)
        return super().parse_args(ctx, rest)

    def _names(self) -> dict[str, str]:
        """Return settings by flag, without those that are parameters of the command."""
        try:
            from qllm.server.config import ServerConfig
        except ModuleNotFoundError:  # the command reports the error when it runs
            return {}
        taken = {flag for param in self.params for flag in param.opts}
        fields = {
            name: field for name, field in ServerConfig.model_fields.items() if name not in NO_FLAGS
        }
        names = {f"--{name.replace('_', '-')}": name for name in fields}
        switches = {
            f"--no-{name.replace('_', '-')}": f"no_{name}"
            for name, field in fields.items()
            if field.default is True
        }
        return {flag: name for flag, name in (names | switches).items() if flag not in taken}

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help."""
        super().format_help(ctx, formatter)
        try:
            from qllm.server.config import ServerConfig
        except ModuleNotFoundError as error:
            typer.echo(f"The settings of the server need {error.name}: its extra [server].")
            return
        typer.echo(
            "Settings of the server: --name VALUE, QLLM_NAME in the environment, name in the file:"
        )
        print_table(("name", "default", ""), rows(ServerConfig))


def rows(settings: type[Any]) -> list[tuple[str, str, str]]:
    """Return name, default and meaning of every field of a class of settings.

    The meaning is the string below the field.
    """
    said = meanings(settings)
    found = getattr(settings, "model_fields", None)  # a pydantic model; else a dataclass
    if found is None:
        found = {field.name: field for field in fields(settings)}
    return [(name, _shown(field.default), said.get(name, "")) for name, field in found.items()]


def _shown(default: Any) -> str:
    """Return a default as a user can type it."""
    if default in (None, "", (), {}) or default is MISSING:
        return "-"
    return str(default).lower() if isinstance(default, bool) else str(default)


def meanings(settings: type[Any]) -> dict[str, str]:
    """Return the string below each field of a class, by the name of the field."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(settings))).body
    assert isinstance(tree, ast.ClassDef)
    found: dict[str, str] = {}
    for field, said in zip(tree.body, tree.body[1:], strict=False):
        match field, said:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=text)):
                found[name] = " ".join(str(text).split())
    return found
