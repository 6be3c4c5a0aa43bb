"""The simulator against the real engine: LS TTFT p50 and BE tokens/s under several policies.

One run calibrates, serves the same load live and on the virtual clock, and prints a table and
one JSON line. The output names each prediction with an error above 20 %. Run it on an idle machine:

    python -m tests.long.validate_sim --out bench/results/validate_sim.json \\
        --figure validate_sim.png
"""

import argparse
import json
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers.utils import logging

from bench.common import Job, busy_cores, machine, make_jobs, make_prompt, result_file, write_result
from bench.engine.mixed import GREEDY, Flood
from qllm import QLLMEngine
from qllm.config import engine_config
from qllm.measure.random_moe import make_random_moe
from qllm.sim import run as virtual
from qllm.sim.calibrate import LOADS, calibrate
from qllm.sim.costs import CostFile
from qllm.sim.outcome import Outcome
from qllm.types import Priority
from qllm.workloads.mix import Sent
from qllm.workloads.spec import RequestSpec

POLICIES = "fcfs,priority,qllm2,chunked-priority"
MODEL = "300m"
LS_PROMPT, LS_OUTPUT = (64, 128), (4, 12)
BE_PROMPT, BE_OUTPUT = (128, 768), (16, 96)
LS_LOAD = 0.35
"""LS rate over the machine's capacity for LS alone."""
DEPTH = 12
"""Number of unfinished BE requests at any time: more than seats."""
SETTINGS = {"max_num_seqs": 8, "max_step_tokens": 512}
BOUND = 0.2
NUMBERS = {"ls_ttft_p50": "LS TTFT p50, ms", "be_per_s": "BE tokens/s"}
"""Numbers that are compared."""
POLL_S = 0.02


@dataclass(frozen=True)
class Offered:
    """LS requests at their times, and BE jobs, `DEPTH` of them always unfinished."""

    seconds: float
    ls_at_s: list[float]
    ls: list[Job]
    be: list[Job]

    def specs(self) -> list[RequestSpec]:
        """Return the LS requests by their lengths."""
        return [
            _spec(job, Priority.LS, at_s) for at_s, job in zip(self.ls_at_s, self.ls, strict=True)
        ]

    def jobs(self) -> Iterator[RequestSpec]:
        """Yield the BE jobs by their lengths, in order of submission."""
        return (_spec(job, Priority.BE, 0.0) for job in self.be)


def _spec(job: Job, priority: Priority, at_s: float) -> RequestSpec:
    return RequestSpec(
        at_s=at_s,
        priority=priority,
        num_prompt_tokens=len(job.token_ids),
        max_tokens=job.max_tokens,
    )


def offer(seed: int, seconds: float, rate: float) -> Offered:
    """Return Poisson LS arrivals and more BE jobs than the machine can complete."""
    rng = np.random.default_rng([seed, 3])
    times: list[float] = []
    at = float(rng.exponential(1 / rate))
    while at < 0.9 * seconds:  # the last ones can be answered in the window
        times.append(at)
        at += float(rng.exponential(1 / rate))
    ls = [
        Job(
            make_prompt(rng, int(rng.integers(*LS_PROMPT, endpoint=True))),
            int(rng.integers(*LS_OUTPUT, endpoint=True)),
        )
        for _ in times
    ]
    num_jobs = DEPTH + int(20 * seconds)
    return Offered(seconds, times, ls, make_jobs(seed + 7, num_jobs, BE_PROMPT, BE_OUTPUT))


def live(model: Path, policy: str, load: Offered, threads: int) -> Sent:
    """Serve the load with the real engine."""
    engine = QLLMEngine.from_pretrained(
        model, policy=policy, threads=threads, record=True, conformance=False, **SETTINGS
    )
    with engine:
        engine.submit(load.ls[0].token_ids, "LS", 4, sampling=GREEDY).result(120)
        flood = Flood(engine, load.be, DEPTH)
        start_ns, start = engine.now_ns(), time.monotonic()
        late_s = 0.0
        flood.top_up()
        for at_s, job in zip(load.ls_at_s, load.ls, strict=True):
            _wait(flood, start + at_s)
            late_s = max(late_s, time.monotonic() - start - at_s)
            engine.submit(job.token_ids, "LS", job.max_tokens, sampling=GREEDY)
        _wait(flood, start + load.seconds)
        end_ns = engine.now_ns()
    engine.trace.events[:] = [e for e in engine.trace if e.at_ns >= start_ns]  # without the warm-up
    return Sent(
        trace=engine.trace,
        start_ns=start_ns,
        end_ns=end_ns,
        max_lag_ms=late_s * 1e3,
        refused=0,
    )


def _wait(flood: Flood, until: float) -> None:
    while (left := until - time.monotonic()) > 0:
        flood.top_up()
        time.sleep(min(POLL_S, left))


def predict(costs: CostFile, policy: str, load: Offered) -> Sent:
    """Serve the load on the virtual clock."""
    return virtual.simulate(
        load.specs(),
        policy,
        costs,
        config=engine_config(SETTINGS),
        seconds=load.seconds,
        flood=virtual.Flood(load.jobs(), DEPTH),
    )


def compared(measured: Outcome, predicted: Outcome) -> dict[str, dict[str, float | None]]:
    """Return both numbers and the relative error of the prediction."""
    out: dict[str, dict[str, float | None]] = {}
    for name in NUMBERS:
        real, sim = getattr(measured, name), getattr(predicted, name)
        error = sim / real - 1 if real and sim is not None else None
        out[name] = {"measured": real, "predicted": sim, "error": error}
    return out


def further_off(found: dict[str, dict[str, dict[str, float | None]]]) -> list[str]:
    """Return the predictions that miss the bound, in words."""
    out = []
    for policy, numbers in found.items():
        for name, n in numbers.items():
            error = n["error"]
            if error is None:
                out.append(f"{policy}: {NUMBERS[name]} was not measured")
            elif abs(error) > BOUND:
                out.append(f"{policy}: {NUMBERS[name]} off by {error:+.0%}")
    return out


def draw(found: dict[str, dict[str, dict[str, float | None]]], path: str) -> None:
    """Draw predicted over measured, with the band of 20 %."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter

    figure, axes = plt.subplots(1, len(NUMBERS), figsize=(10, 4.6), layout="constrained")
    for ax, (name, title) in zip(axes, NUMBERS.items(), strict=True):
        points = [
            (n[name]["measured"], n[name]["predicted"], policy)
            for policy, n in found.items()
            if n[name]["error"] is not None
        ]
        low = min((min(x, y) for x, y, _ in points), default=1.0) * 0.7
        high = max((max(x, y) for x, y, _ in points), default=10.0) * 1.4
        line = np.array([low, high])
        ax.fill_between(line, line * (1 - BOUND), line * (1 + BOUND), color="#e8eef5")
        ax.plot(line, line, color="#8a8a8a", linewidth=1)
        for i, (x, y, policy) in enumerate(points):
            ax.plot(x, y, "o", color="#d1495b")
            place: dict[str, Any] = {"xytext": (6, -3)}
            if i % 2 == 0:  # labels of neighbours do not overlap
                place = {"xytext": (0, 7), "ha": "center"}
            ax.annotate(policy, (x, y), textcoords="offset points", fontsize=9, **place)
        ax.set(
            xscale="log",
            yscale="log",
            xlim=(low, high),
            ylim=(low, high),
            xlabel=f"measured {title}",
            ylabel="predicted",
            title=f"{title} (band: {BOUND:.0%})",
        )
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.set_minor_formatter(NullFormatter())
    figure.savefig(path, dpi=160)


def show(found: dict[str, dict[str, dict[str, float | None]]]) -> None:
    """Print the table."""
    print(f"{'policy':<20}{'number':<20}{'measured':>12}{'predicted':>12}{'error':>9}")
    for policy, numbers in found.items():
        for name, n in numbers.items():
            cells = [f"{n[k]:,.1f}" if n[k] is not None else "-" for k in ("measured", "predicted")]
            error = "-" if n["error"] is None else f"{n['error']:+.1%}"
            print(f"{policy:<20}{NUMBERS[name]:<20}{cells[0]:>12}{cells[1]:>12}{error:>9}")


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policies", default=POLICIES)
    parser.add_argument("--seconds", type=float, default=45.0, help="of every live run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2, help="of the calibration")
    parser.add_argument("--costs", help="take these costs instead of calibrating")
    parser.add_argument("--figure", help="write the plot here")
    parser.add_argument("--out", type=result_file, help="also write the JSON line here")
    return parser.parse_args(argv)


def main() -> None:
    """Calibrate, serve, predict, compare."""
    warnings.simplefilter("ignore")
    logging.disable_progress_bar()
    args = arguments()
    begin, before = time.monotonic(), busy_cores()
    if args.costs:
        costs = CostFile.read(args.costs)
    else:
        costs = calibrate(
            MODEL, threads=args.threads, rounds=args.rounds, config=engine_config(SETTINGS)
        )
    capacity = costs.capacity(engine_config(SETTINGS))
    alone = capacity.requests_per_s(sum(LS_PROMPT) / 2, sum(LS_OUTPUT) / 2)
    load = offer(args.seed, args.seconds, LS_LOAD * alone)
    folder = make_random_moe(size=MODEL)
    found, late = {}, {}
    for policy in args.policies.split(","):
        real = live(folder, policy, load, args.threads)
        late[policy] = real.max_lag_ms
        found[policy] = compared(Outcome.of(real), Outcome.of(predict(costs, policy, load)))
    took, after = time.monotonic() - begin, busy_cores()
    show(found)
    worse = further_off(found)
    print("\n".join(worse) or f"every prediction is within {BOUND:.0%}")
    if args.figure:
        draw(found, args.figure)
    document: dict[str, Any] = {
        "bench": "validate_sim",
        "machine": machine(),
        "took_s": round(took, 1),
        "foreign_cores": round((after[0] - before[0] - (after[1] - before[1])) / took, 3),
        "config": {
            "model": MODEL,
            "threads": args.threads,
            "seed": args.seed,
            "seconds": args.seconds,
            "ls_per_s": round(LS_LOAD * alone, 3),
            "ls_requests": len(load.ls),
            "be_depth": DEPTH,
            "lengths": [LS_PROMPT, LS_OUTPUT, BE_PROMPT, BE_OUTPUT],
            **SETTINGS,
        },
        "calibration": {
            "loads": len(LOADS),
            "rounds": args.rounds,
            "file": args.costs and Path(args.costs).name,
        },
        "fit": {kind: error.model_dump() for kind, error in costs.fit.items()},
        "policies": found,
        "late_ms": late,
        "worse_than_bound": worse,
    }
    line = json.dumps(document, separators=(",", ":"))
    if args.out:
        write_result(args.out, line)
    print(line)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
