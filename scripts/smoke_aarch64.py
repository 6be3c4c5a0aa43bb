"""Run a front end for another kind of machine, with its Python, against an engine of this machine.

python scripts/smoke_aarch64.py qemu-aarch64 -L ROOT -E PYTHONPATH=PACKAGES ROOT/usr/bin/python3

Two processes send records through the ends of rings of such a machine. Then its front end serves
HTTP for an engine of this machine, with the same answers as this machine's front end.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RINGS = """
import os, platform
from qllm.ingress.ends import PYTHON_ENDS, ring_ends
from qllm.ingress.memory import FrontEndMemory
ends = ring_ends()
assert ends is not PYTHON_ENDS, "plain stores on a machine that reorders them"
block = FrontEndMemory.create(0, (4096,) * 4)
count, child = 5000, os.fork()
if child == 0:
    writer = ends.writer(*block.rings["ls"])
    for number in range(count):
        while not writer.write(number % 5, number, number.to_bytes(4, "little") * (number % 90)):
            os.sched_yield()
    os._exit(0)
reader = ends.reader(*block.rings["ls"])
for number in range(count):
    while (record := reader.read()) is None:
        os.sched_yield()
    body = number.to_bytes(4, "little") * (number % 90)
    assert record[:2] == (number % 5, number) and record.body[: len(body)] == body, number
assert os.waitpid(child, 0)[1] == 0
print(f"{platform.machine()}: {count} records between two processes")
"""
SERVE = "from qllm.cli import main; main()"
ASKED: tuple[dict[str, Any], ...] = (
    {"prompt": "def f(", "max_tokens": 16, "temperature": 0},
    {"prompt": "import json", "max_tokens": 16, "temperature": 0.7, "seed": 3},
    {"prompt": "class A:", "max_tokens": 16, "temperature": 1, "stop": ["self"], "logprobs": 2},
)
"""No grammar: its check runs in its own process, which qemu-user cannot start unless the kernel
hands it aarch64 programs."""


@contextmanager
def served(command: list[str], log: Path, mark: str) -> Iterator[str]:
    """Start a server, and return the last word of the line of its log that has a mark."""
    with log.open("wb") as stderr, subprocess.Popen(command, stderr=stderr, cwd=ROOT) as process:
        try:
            while not (said := [s for s in log.read_text().splitlines() if mark in s]):
                if process.poll() is not None:
                    raise SystemExit(log.read_text())
                time.sleep(0.2)
            yield said[-1].split()[-1]
        finally:
            process.terminate()


def answers(url: str) -> list[Any]:
    """Return the answers of a front end to ASKED."""
    found = []
    for asked in ASKED:
        body = json.dumps({**asked, "seed": 3}).encode()
        how = {"content-type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/completions", body, how)
        with urllib.request.urlopen(request, timeout=300) as answer:
            found.append(json.load(answer)["choices"])
    return found


def main() -> None:
    """Run the parts one after the other."""
    theirs, ours = [*sys.argv[1:], "-P"], [sys.executable]  # -P: not the qllm of this folder
    subprocess.run([*theirs, "-c", RINGS], check=True)
    small = ["--threads", "1", "--set", "conformance=false", "--set", "max_kv_tokens=4096"]
    engine = ["serve", "tiny", "--role", "engine", "--listen", "127.0.0.1:0", *small]
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder)
        with served([*ours, "-c", SERVE, *engine], logs / "engine", "meet the engine at") as at:
            there = ["-c", SERVE, "serve", "--role", "frontend", "--engine", at, "--port", "0"]
            found = []
            for name, python in (("ours", ours), ("theirs", theirs)):
                with served([*python, *there], logs / name, " at http://") as url:
                    found.append(answers(url))
    if found[0] != found[1]:
        raise SystemExit(f"other answers there: {found}")
    print(f"a front end there: {len(ASKED)} answers over NIXL, those of this machine's front end")


if __name__ == "__main__":
    main()
