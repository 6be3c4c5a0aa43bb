"""The commands `qllm policies` and `qllm new-policy`."""

import enum
from pathlib import Path
from typing import Annotated, Any

import typer

from qllm.cli.app import app, clean, print_table
from qllm.errors import ConfigError


@app.command()
@clean
def policies(
    compile_name: Annotated[
        str | None,
        typer.Option(
            "--compile", help="Compile the rank of this policy instead, and say for what."
        ),
    ] = None,
) -> None:
    """List the installed policies, their parameters and the settings that they need."""
    from qllm.plugins import installed_policies

    if compile_name is not None:
        _compile(compile_name)
        return
    print_table(
        ("policy", "what it does", "parameters", "needs"),
        ((name, *_describe(point)) for name, point in sorted(installed_policies().items())),
    )


def _compile(name: str) -> None:
    from qllm.device.rank import ARCHITECTURES, compile_device, compile_host
    from qllm.plugins import load_policy

    policy = load_policy(name)
    compile_host(policy)
    typer.echo(f"{name}: rank compiles for this machine")
    for capability in ARCHITECTURES:
        code = compile_device(policy, capability)
        arch = "sm_{}{}".format(*capability)
        typer.echo(f"{name}: rank compiles for {arch}, {len(code)} bytes of LTO-IR")


def _describe(point: Any) -> tuple[str, str, str]:
    import inspect

    from qllm.plugins import cap_names, load_factory

    try:
        factory = load_factory(point)
        needs = factory.needs  # a value of the class, or a property that needs an object
        needs = factory().needs if isinstance(needs, property) else needs
    except ConfigError as error:  # the other policies are still listed
        return str(error), "", ""
    except Exception as error:  # noqa: BLE001 - code of a plug-in, and only a list
        return f"broken: {type(error).__name__}: {error}", "", ""
    doc = (inspect.getdoc(factory) or "").splitlines() or [""]
    return (
        doc[0].rstrip("."),
        _parameters(factory),
        cap_names(needs) or "-",
    )


def _parameters(factory: Any) -> str:
    from dataclasses import fields, is_dataclass

    return "\n".join(
        f"{f.name}={_value(getattr(factory, f.name, '...'))}"
        for f in (fields(factory) if is_dataclass(factory) else ())
        if f.init and not f.metadata.get("fixed")
    )


def _value(value: object) -> str:
    return value.name.lower() if isinstance(value, enum.Enum) else str(value)


@app.command()
@clean
def new_policy(
    name: Annotated[str, typer.Argument(help="Of the module, like my_policy.")],
    kind: Annotated[
        str, typer.Option(help="rank: one function of integers. plan: chooses every step itself.")
    ] = "rank",
    out: Annotated[Path, typer.Option(help="Folder to make the package in.")] = Path(),
) -> None:
    """Write a package with a policy of your own, its tests and its entry point."""
    from qllm.cli.new_policy import new_policy as write_package

    folder = write_package(name, kind, out)
    typer.echo(f"{folder}: a {kind} policy, its tests and README. Next:")
    typer.echo(f"  cd {folder}\n  python -m pip install -e .\n  python -m pytest")
