"""The form of rows on the results pages."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"


def mark(ok: bool | None) -> str:
    """Return the last cell of a row: reached, missed, or nothing."""
    return {True: "reached", False: "**missed**", None: ""}[ok]


def with_mark(target: str, reached: bool | None) -> str:
    """Return a target with its mark behind it."""
    return ", ".join(filter(None, (target, mark(reached))))


def cell(text: str) -> str:
    """Return a text as a cell of a table."""
    return text.strip().replace("|", "\\|")


def table(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the rows of a result as a table: what, measured, target, reached."""
    out = ["", "| what | measured | target | |", "|---|---|---|---|"]
    for line in lines:
        value = "; ".join(filter(None, (line["value"].strip(), line.get("energy"))))
        cells = [cell(text) for text in (line["name"], value, line["target"])]
        out.append("| " + " | ".join([*cells, mark(line["reached"])]) + " |")
    return out


def machine_of(document: dict[str, Any]) -> str:
    """Return the machine, packages and commit of a result."""
    about = document.get("machine") or _machine_of_rows(document)
    names = ("cpu", "cores", "memory", "python", "torch", "transformers", "commit")
    return "; ".join(f"{name} {about.get(name)}" for name in names)


def _machine_of_rows(document: dict[str, Any]) -> dict[str, Any]:
    """Return the machine of rows that were measured one by one, and all their commits."""
    machines = [
        row["machine"] for row in document.get("rows", document).values() if "machine" in row
    ]
    return machines[0] | {"commit": ", ".join(sorted({m["commit"] for m in machines}))}


def number(entry: dict[str, Any], key: str) -> str:
    """Return a number of an entry as a cell."""
    value = entry.get(key)
    if isinstance(value, dict):
        value = value["value"]
    if value is None:
        return "-"
    if key in ("ls_slo_attainment", "be_harvest"):
        return f"{value:.0%}"
    if key == "class_inversions":
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) < 10 else f"{value:,.0f}"
