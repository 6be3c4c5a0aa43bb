"""`qllm policies`: what is installed."""

import enum
from typing import Any

from .app import app, clean, print_table


@app.command()
@clean
def policies() -> None:
    """List the installed policies, their parameters and what they need of an engine."""
    from qllm.plugins import installed_policies

    print_table(
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
