"""Experts' products as compiled for four kinds of GPU: a sum has one order, whatever the weights.

An instruction adds sixteen neighbours of a row's inputs only if a thread holds two neighbours of
them (`kWidth = 2`), or if the inputs are in shared memory. Then a quantised weight gives the bits
of its bf16 value, and a row the bits of any other batch. No GPU is needed to read this.
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.support.compiled import SHARED_BYTES
from tests.support.files import ROOT

MOST_PAIRS = 4
"""Most 2-byte loads of a thread. They are scales of a column, of which no wider load exists."""
LAUNCHES = {
    90: ["bf16:1", "bf16:512", "u4:1", "i4:1", "e2m1:1", "i8:1", "e4m3:1", "e2m1:512"],
    80: ["bf16:1", "e2m1:1"],
    89: ["bf16:1", "e4m3:1"],
    120: ["bf16:1", "u4:1"],
}
"""Codes and tokens that are compiled for each capability."""


def compiled(capability: int, mutant: str, *launches: str) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.compiled", str(capability)]
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [*command, mutant, *launches],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=env | {"PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    assert len(found) == 2 * len(launches)
    return found


def faults(capability: int, found: dict[str, Any]) -> set[str]:
    """Return the kinds of faults of the compiled products."""
    kinds = set()
    for made in found.values():
        assert made["dots"] > 0, found
        if not set(made["k_widths"]) <= {2}:
            kinds.add("order")
        if made["bytes"] or made["pairs"] > MOST_PAIRS or not made["copies"]:
            kinds.add("loads")
        if made["shared"] > SHARED_BYTES[capability]:
            kinds.add("memory")
    return kinds


@pytest.mark.parametrize("capability", sorted(LAUNCHES))
def test_products_add_sixteen_neighbours_at_a_time(capability: int) -> None:
    found = compiled(capability, "none", *LAUNCHES[capability])
    assert not faults(capability, found), found
    assert {made["rows"] for made in found.values()} <= {16, 64}


@pytest.mark.parametrize(
    ("mutant", "capability", "launch", "fault"),
    [("bytes", 90, "u4:1", "order"), ("stages", 89, "bf16:1", "memory")],
)
def test_a_changed_kernel_is_refused(mutant: str, capability: int, launch: str, fault: str) -> None:
    assert fault in faults(capability, compiled(capability, mutant, launch))
