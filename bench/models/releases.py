"""Tokens per second with the lowest and the newest transformers, over those with the tested one.

    python -m bench.models.releases [--rounds 15] [--out FILE]

The environments are those of `make test-releases`. A process per release holds the same tiny bf16
model. In every round each process answers the same prompts, one after the other, in another order
every time. Seconds are CPU time on one thread, so that other work on the machine counts little. A
ratio is the median over the rounds. Models are tiny, so that the time of Python and torch around
the kernels shows: a release changes only that.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from bench.common import ROOT, machine, result_file, write_result
from scripts import releases

TARGET = 0.97
NUM_PROMPTS = 4
NUM_TOKENS = 64
"""Tokens of a prompt, and of an answer."""


class Release:
    """The process of a release."""

    def __init__(self, name: str, python: Path) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [python, "-m", "bench.models.releases", "--answer"],
            env={**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, question: str) -> Any:
        """Send a line, and read the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(question + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def end(self) -> None:
        """Close the process's input, which ends it."""
        self._process.communicate()


def answer() -> None:
    """Answer in the process of a release: a path loads a model, an empty line times it."""
    from qllm import QLLMEngine

    prompts = [[(i * 7 + j * 13) % 240 + 8 for j in range(NUM_TOKENS)] for i in range(NUM_PROMPTS)]
    engine: Any = None
    answers, sys.stdout = sys.stdout, sys.stderr  # an engine shows its progress on stdout
    for line in sys.stdin:
        if line.strip():
            if engine is not None:
                engine.close()
            engine = QLLMEngine.from_pretrained(
                line.strip(), max_kv_tokens=4096, run_in="thread", prefix_cache=False
            )
        start = time.process_time()
        engine.generate(prompts, temperature=0, max_tokens=NUM_TOKENS)
        print(json.dumps(time.process_time() - start), file=answers, flush=True)
    if engine is not None:
        engine.close()


def measure(asked: list[Release], model: Path, rounds: int) -> dict[str, list[float]]:
    """Return tokens per second of every release, by round."""
    found: dict[str, list[float]] = {release.name: [] for release in asked}
    for release in asked:
        release.ask(str(model))
    for number in range(rounds):
        first = number % len(asked)
        for release in asked[first:] + asked[:first]:
            found[release.name].append(NUM_PROMPTS * NUM_TOKENS / release.ask(""))
    return found


def main() -> int:
    """Measure every model with each release; print one JSON document; return 1 below the target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=result_file)
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.answer:
        answer()
        return 0
    tested = str(releases.tested())
    pythons = {
        str(release): releases.environment(release)
        for release in releases.chosen(releases.published(), every=False)
    }
    ratios: dict[str, dict[str, float]] = {}
    rates: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        releases.call(pythons[tested], "--write", folder)
        asked = [Release(name, python) for name, python in pythons.items()]
        for model in sorted(Path(folder).iterdir()):
            found = measure(asked, model, given.rounds)
            usual = found.pop(tested)
            rates[model.name] = round(median(usual), 1)
            ratios[model.name] = {
                name: round(median(a / b for a, b in zip(own, usual, strict=True)), 3)
                for name, own in found.items()
            }
            print(model.name, rates[model.name], ratios[model.name], file=sys.stderr, flush=True)
        for release in asked:
            release.end()
    worst = min(ratio for of_model in ratios.values() for ratio in of_model.values())
    document = {
        "bench": "releases",
        "machine": machine(),
        "tested": tested,
        "tokens_per_s": rates,
        "ratios": ratios,
        "worst_ratio": worst,
        "target": f">= {TARGET}",
        "reached": worst >= TARGET,
    }
    if given.out is not None:
        write_result(given.out, json.dumps(document, indent=1))
    print(json.dumps(document))
    return int(worst < TARGET)


if __name__ == "__main__":
    sys.exit(main())
