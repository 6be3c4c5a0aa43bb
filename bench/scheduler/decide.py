"""CPU time of a decision: ranks, plan, rules, KV and the compiled program. No model runs.

    python -m bench.scheduler.decide [--policies chunked,qllm2] [--layers 12,48] [--decisions 4000]
    python -m bench.scheduler.decide --scheduler native

A backlog of long BE prompts keeps the number of live requests constant; LS requests arrive among
them. The engine loop, scheduler and policies are the real ones, the runner counts instead of
computing (`qllm.sim.check.World`). Time is CPU time of this process, measured around `decide`
alone, the garbage collector included. The world is deterministic, so each run is repeated and the
smallest time of each decision counts. That leaves out most effects of other processes on the
caches; the `yardstick`, a fixed loop timed between decisions, shows their size.
With `--scheduler native` the decision is made in C++ (rank policies only): `core_p50_us` and
`core_p99_us` are that call alone, as a GPU would make it; the rest of `p99_us` makes the program
in Python. The last line of stdout is one JSON document.
"""

import argparse
import random
import time
from dataclasses import replace
from typing import Any

from bench.common import Line, at_most, machine, print_result, result_file, with_lines
from qllm.plan import CutRule, ModelShape
from qllm.plugins import installed_policies, load_policy
from qllm.policy import RankPolicy
from qllm.scheduler.scheduler import Scheduler
from qllm.sim.world import LIMITS, World
from qllm.types import Priority, Slo
from tests.support.native_scheduler import NativeScheduler

CUTS = CutRule(
    max_cost=92.75,
    attn_cost_per_kv=0.003836,
    glue_block=256,
    dense_block=1024,
    expert_block=128,
)
"""Cut rule of the torch runner for the model of `common` at `max_segment_ms=5`."""
BE_PROMPT, BE_OUTPUT = (1000, 2000), (32, 256)
LS_PROMPT, LS_OUTPUT, LS_SHARE = (64, 128), (16, 48), 0.1
WARM_UP = 400
"""Number of decisions before the seats are full of decodes and costs are fitted."""


YARDSTICK_EVERY = 20
"""Number of decisions between two measurements of the yardstick."""
DECISION_US, CORE_US = 300.0, 5.0
"""Targets of the p99: a decision with its program, and the decision in C++."""


def yardstick_ns() -> int:
    """Return CPU time of 1,000 additions: about 10,000 ns on a quiet core of a Zen 4 server."""
    begin = time.process_time_ns()
    sum(range(1000))
    return time.process_time_ns() - begin


class Stopwatch:
    """The functions of the native scheduler, with a measurement of `decide`'s CPU time."""

    def __init__(self, native: Any, times: list[int]) -> None:
        self.native = native
        self.times = times

    def __getattr__(self, name: str) -> Any:
        return getattr(self.native, name)

    def decide(self, *numbers: int) -> int:
        """Decide, and record the CPU time."""
        begin = time.process_time_ns()
        answer: int = self.native.decide(*numbers)
        self.times.append(time.process_time_ns() - begin)
        return answer


def decisions_ns(
    policy: Any, layers: int, live: int, seats: int, count: int, seed: int, scheduler: Any
) -> tuple[list[int], list[int], list[int]]:
    """Return CPU times of each decision after warm-up, of its part in C++, and the yardstick."""
    rng = random.Random(seed)
    limits = replace(LIMITS, max_num_seqs=seats, max_step_tokens=2048, num_blocks=live * 160)
    shape = ModelShape(layers, 1, 1, (True,) * layers, 16384, 8192)  # experts cost no decision
    world = World(policy, limits, shape=shape, cuts=CUTS, scheduler=scheduler)
    world.loop.record, world.loop.listeners = None, ()
    decide, times, sticks, cores = world.scheduler.decide, list[int](), list[int](), list[int]()
    if scheduler is NativeScheduler:
        world.scheduler.native = Stopwatch(world.scheduler.native, cores)

    def timed(now_ns: int) -> Any:
        begin = time.process_time_ns()
        decision = decide(now_ns)
        times.append(time.process_time_ns() - begin)
        return decision

    world.scheduler.decide = timed
    num_live = 0
    while len(times) < WARM_UP + count:
        for _ in range(live - num_live):
            if rng.random() < LS_SHARE:
                slo = Slo(ttft_ms=500.0, tpot_ms=100.0)
                world.submit(Priority.LS, rng.randint(*LS_PROMPT), rng.randint(*LS_OUTPUT), slo=slo)
            else:
                world.submit(Priority.BE, rng.randint(*BE_PROMPT), rng.randint(*BE_OUTPUT))
        world.loop.step()
        num_live = len(world.loop.live)
        if len(times) % YARDSTICK_EVERY == 0:
            sticks.append(yardstick_ns())
    if world.loop.policy_errors:
        raise SystemExit(f"the policy broke: {world.loop.policy_errors[0]}")
    return times[WARM_UP:], cores[WARM_UP:], sticks


def row(name: str, layers: int, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one policy on one depth."""
    sizes = (layers, args.live, args.seats, args.decisions, args.seed)
    scheduler = NativeScheduler if args.scheduler == "native" else Scheduler
    runs = [decisions_ns(load_policy(name), *sizes, scheduler) for _ in range(args.repeats)]
    times = sorted(map(min, zip(*(times for times, _, _ in runs), strict=False)))
    cores = sorted(map(min, zip(*(cores for _, cores, _ in runs), strict=False)))
    sticks = sorted(stick for _, _, sticks in runs for stick in sticks)
    return {
        "scheduler": args.scheduler,
        "policy": name,
        "layers": layers,
        "rank_policy": isinstance(load_policy(name), RankPolicy),
        "decisions": len(times),
        "yardstick_p50_us": sticks[len(sticks) // 2] / 1000,
        "p50_us": times[len(times) // 2] / 1000,
        "p99_us": times[len(times) * 99 // 100] / 1000,
        "max_us": times[-1] / 1000,
        "core_p50_us": cores[len(cores) // 2] / 1000 if cores else None,
        "core_p99_us": cores[len(cores) * 99 // 100] / 1000 if cores else None,
    }


def lines_of(document: dict[str, Any]) -> list[Line]:
    """Return the rows of the results page: the slowest policy."""
    args, rows = document["args"], document["rows"]
    slowest = max(rows, key=lambda row: row["p99_us"])
    what = f"decision and program, {args['scheduler']} scheduler, {args['live']} live requests"
    policies = f"worst of {len({row['policy'] for row in rows})} policies ({slowest['policy']})"
    lines = [at_most(f"{what}, p99 us, {policies}", slowest["p99_us"], DECISION_US, 0)]
    cores = [row["core_p99_us"] for row in rows if row["core_p99_us"]]
    if cores:
        lines.append(at_most("  of it the decision in C++, p99 us", max(cores), CORE_US))
    fixed = max(row["yardstick_p50_us"] for row in rows)
    return [
        *lines,
        Line("  the machine: a fixed loop of 10 us on a quiet Zen 4", f"{fixed:.1f}"),
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policies", help="names, by commas; all installed ones by default")
    parser.add_argument("--scheduler", choices=["python", "native"], default="python")
    parser.add_argument("--layers", default="12,48")
    parser.add_argument("--decisions", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--live", type=int, default=256)
    parser.add_argument("--seats", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=result_file)
    args = parser.parse_args()
    names = args.policies.split(",") if args.policies else sorted(installed_policies())
    if args.scheduler == "native":
        names = [name for name in names if isinstance(load_policy(name), RankPolicy)]
    rows = []
    for name in names:
        for layers in map(int, args.layers.split(",")):
            rows.append(row(name, layers, args))
            r = rows[-1]
            core = f"core p99 {r['core_p99_us']:.1f} us   " if r["core_p99_us"] else ""
            print(
                f"{name:18} {layers:3} layers   p50 {r['p50_us']:7.0f}   p99 {r['p99_us']:7.0f}   "
                f"max {r['max_us']:7.0f} us   {core}yardstick {r['yardstick_p50_us']:.1f} us",
                flush=True,
            )
    asked = {name: value for name, value in vars(args).items() if name != "out"}
    document = {"bench": "decide", "args": asked, "machine": machine(), "rows": rows}
    print_result(with_lines(document, lines_of(document)), args.out)


if __name__ == "__main__":
    main()
