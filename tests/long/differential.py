"""The native scheduler against the Python one on random traces: every decision, and all state.

    python -m tests.long.differential [--traces 10000] [--policies any,qllm2]
        [--extension FILE]

A policy `any` is a random rank and a random shape of the closed set; the others are installed
ones with their defaults. Half of the traces are `any`. The last line of stdout is one JSON
document; a difference ends the run with the trace's name.
"""

import argparse
import importlib.util
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bench.common import Line, print_result, with_lines

SHIPPED = "fcfs,ls-first,priority,qllm2,chunked,chunked-priority,edf,layered,priority-layered"
TRACES = 10_000
"""Target of the number of traces without a difference."""


def use_extension(file: str, name: str = "qllm.device._scheduler") -> None:
    """Replace an extension by another build, such as one with sanitizers."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def trace_of(number: int, names: list[str], seed: int) -> tuple[str, str]:
    """Return the policy and the seed of a trace."""
    name = "any" if number % 2 else names[number // 2 % len(names)]
    return name, f"{seed}-{name}-{number}"


def lines_of(document: dict[str, Any]) -> list[Line]:
    """Return the rows of a result."""
    num, differences = sum(document["traces"].values()), document["differences"]
    found = f"{num:,} traces, {document['agreed_on']['decisions']:,} decisions, {differences}"
    ok = num >= TRACES and not differences
    target = f"0 in >= {TRACES:,}"
    return [Line("differences between the native scheduler and the Python one", found, target, ok)]


def main() -> None:
    """Compare the traces and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=int, default=10_000)
    parser.add_argument("--policies", default=SHIPPED)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--extension", help="another build of qllm.device._scheduler")
    args = parser.parse_args()
    if args.extension:
        use_extension(str(Path(args.extension).resolve()))
    from qllm.plugins import load_policy
    from tests.support.differential import random_shape, run_trace  # after the extension is chosen

    names = args.policies.split(",")
    seen: Counter[str] = Counter()
    traces: Counter[str] = Counter()
    num_events, begin = 0, time.process_time()
    for number in range(args.traces):
        name, seed = trace_of(number, names, args.seed)
        policy: Any = random_shape(random.Random(seed)) if name == "any" else load_policy(name)
        try:
            outcome = run_trace(policy, seed)
        except Exception as error:
            raise SystemExit(
                f"trace {seed} of {policy}: {type(error).__name__}: {error}"
            ) from error
        traces[name] += 1
        seen += outcome.seen
        num_events += outcome.num_events
        if number % 500 == 499:
            print(f"{number + 1} traces, {seen['decisions']} decisions, no difference", flush=True)
    document = {
        "bench": "differential",
        "args": vars(args),
        "differences": 0,
        "traces": dict(traces),
        "agreed_on": dict(seen),
        "events": num_events,
        "cpu_s": round(time.process_time() - begin, 1),
    }
    print_result(with_lines(document, lines_of(document)), None)


if __name__ == "__main__":
    main()
