"""What `make test` leaves to `make test-all`."""

import subprocess
import sys

from tests.support.files import ROOT

FILE = "tests/device/test_rank_compile.py"
SAMPLED = f"{FILE}::test_every_architecture_gets_its_kernel"


def collected(*arguments: str) -> list[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:xdist", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return [line for line in done.stdout.splitlines() if line.startswith(SAMPLED)]


def test_a_sample_is_part_of_all_and_always_the_same() -> None:
    few, every = collected(FILE), collected("--all", FILE)
    assert len(few) == 1 < len(every) == 3
    assert set(few) < set(every)
    assert collected(FILE) == few
    assert collected(SAMPLED) == every, "what is named runs"
