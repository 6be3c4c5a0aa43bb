"""The start-up check over random models: right ones refused, wrong ones accepted; both must be 0.

    OMP_WAIT_POLICY=passive python -m tests.long.startup_check
        [--cases 300] [--first 0] [--wrong 2] [--processes 1]

A case is a random small model of one of the eight families with random settings of its runner
(`tests/support/startup.py`): fp32, bf16 and fp16, 1 and 2 threads of torch, `max_segment_ms`
from 0.1 to no bound, both levels of exactness. Each right model is checked once, and `--wrong`
copies that compute one part another way; the parts take turns. The last line is one JSON
document, which goes to `results/startup_check.json` too.
"""

import argparse
import sys
import time
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from multiprocessing import get_context
from typing import Any

import torch

from bench.common import RESULTS, machine, print_result, result_file
from tests.support import startup
from tests.support.startup import WRONG, Case


def wrong_of(case: Case, model: Any, checked: Counter[str], num: int) -> dict[str, bool]:
    """Return True or False for each wrong copy that was refused; least checked parts first."""
    refused: dict[str, bool] = {}
    for name in sorted(WRONG, key=lambda name: checked[name]):
        runner = startup.wrong_runner(name, case, model) if len(refused) < num else None
        if runner is not None:
            refused[name] = startup.refusal(model, runner) is not None
    return refused


def measure(first: int, num_cases: int, num_wrong: int) -> dict[str, Any]:
    """Run the cases; return counts, and every case with an unexpected result."""
    warnings.filterwarnings("ignore")
    kinds: Counter[str] = Counter()
    checked: Counter[str] = Counter()
    refused, accepted, ms = [], [], []
    for number in range(first, first + num_cases):
        case = startup.case_of(number)
        with startup.threads_of(case):
            model = startup.make(case)
            begin = time.perf_counter()
            why = startup.refusal(model, startup.runner_of(case, model))
            ms.append((time.perf_counter() - begin) * 1e3)
            if why is not None:
                refused.append(f"{case.name}: {why}")
            found = wrong_of(case, model, checked, num_wrong)
        missed = [f"{case.name}: {name}" for name, caught in found.items() if not caught]
        sys.stderr.writelines(f"accepted {text}\n" for text in missed)
        accepted += missed
        checked.update(found.keys())
        kinds.update((case.family, case.dtype, f"{case.threads} threads", case.level))
        kinds.update((f"max_segment_ms={case.max_segment_ms:g}",))
        if number % 20 == 19:
            progress = f"{number + 1}: refused {len(refused)}, accepted {len(accepted)}"
            sys.stderr.write(progress + "\n")
    return {
        "right_models": num_cases,
        "right_models_refused": refused,
        "wrong_models": sum(checked.values()),
        "wrong_models_accepted": accepted,
        "models": kinds,
        "wrong_parts": checked,
        "runner_and_check_ms": ms,
    }


def merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one row of counts from those of several processes."""
    rows = parts[0]
    for part in parts[1:]:
        rows = {name: rows[name] + part[name] for name in rows}
    ms = sorted(rows.pop("runner_and_check_ms"))
    never = [name for name in WRONG if name not in rows["wrong_parts"]]
    sums = {name: dict(sorted(rows[name].items())) for name in ("models", "wrong_parts")}
    return {**rows, **sums, "parts_never_met": never, "runner_and_check_ms_p50": ms[len(ms) // 2]}


def main() -> None:
    """Print the counts, and a JSON document last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--wrong", type=int, default=2)
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    out = result_file(RESULTS / "startup_check.json") if given.cases >= 300 else None
    edges = [given.first + given.cases * i // given.processes for i in range(given.processes + 1)]
    shares = [(lo, hi - lo, given.wrong) for lo, hi in pairwise(edges)]
    with ProcessPoolExecutor(given.processes, get_context("spawn")) as pool:
        rows = merged(list(pool.map(measure, *zip(*shares, strict=True))))
    for name, value in rows.items():
        print(f"{name:24} {value}")
    result = {"bench": "startup_check", "machine": machine(), "torch": torch.__version__, **rows}
    print_result(result, out)


if __name__ == "__main__":
    main()
