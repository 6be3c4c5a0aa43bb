"""The support matrix of docs/guides/families.md, from bench/results/families.json.

python -m tests.long.matrix            prints it
python -m tests.long.matrix --write    puts it into the page
"""

import argparse
import json
from pathlib import Path
from typing import Any

from bench.common import RESULTS
from tests.long.families import has_experts

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "guides" / "families.md"
FILE = RESULTS / "families.json"
LEVELS = {"order": "L1", "batch-invariant": "L2"}
MOST = 100
"""Characters of a row."""
BEGIN, END = "<!-- matrix: begin -->\n", "<!-- matrix: end -->"
DRIVERS = {"fast": "fast", "hooked": "hooks", "dense": "whole layers", "around": "as called"}


def _row(name: str, found: dict[str, Any]) -> str:
    if found["result"] != "equal":
        reason = found["reason"].split("cannot be driven: ")[-1].split(". Report")[0]
        said = " ".join(reason.split()).replace("|", "/")
        start = f"| `{name}` | {found['result']} | "
        return f"{start}{said[: MOST - len(start) - len(' | | |')].rstrip()} | | |"
    drivers = ", ".join(DRIVERS[driver] for driver in found["drivers"])
    native = ", ".join(found["native"]) or "none"
    return (
        f"| `{name}` | {drivers} | {found['grain']} | {native} | {LEVELS[found['exactness'][-1]]} |"
    )


def matrix() -> str:
    """Return the table, one row per model type whose file defines experts."""
    families = json.loads(FILE.read_text())["families"]
    rows = {name: found for name, found in families.items() if has_experts(name)}
    num = sum(found["result"] == "equal" for found in rows.values())
    lines = [
        f"{num} of {len(rows)} model types with experts run.",
        "",
        "| model type | driver | stops after an | our kernels (bf16, CPU) | exactness |",
        "|---|---|---|---|---|",
        *(_row(name, found) for name, found in rows.items()),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the matrix, or put it into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    if not parser.parse_args().write:
        print(matrix(), end="")
        return
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(before + BEGIN + matrix() + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
