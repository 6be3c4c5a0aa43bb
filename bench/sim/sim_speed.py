"""CPU time of the simulator: Azure-like requests in a 48-layer model, per grain.

Lengths are those of the conversation trace of 2023, half of the requests are LS, arrivals are
Poisson at 0.7 of the machine's capacity. The last line of stdout is one JSON document.
"""

import argparse
import random
import time
from typing import Any

from bench.common import Line, at_most, machine, print_result, result_file, with_lines
from qllm.config import engine_config
from qllm.sim.presets import preset
from qllm.sim.run import simulate
from qllm.types import Priority
from qllm.workloads.lengths import AZURE_CONV_OUTPUT, AZURE_CONV_PROMPT
from qllm.workloads.spec import RequestSpec

LOAD = 0.7
SETTINGS = {"max_kv_tokens": 100_000, "max_num_seqs": 64, "max_step_tokens": 2048}
LIMITS_S = {"step": 60.0, "layer": 60.0, "expert": 180.0}
"""Most CPU seconds for 10,000 requests."""


def offer(count: int, rate: float, seed: int) -> list[RequestSpec]:
    """Return requests by their lengths."""
    rng = random.Random(seed)
    at_s = 0.0
    out = []
    for _ in range(count):
        at_s += rng.expovariate(rate)
        out.append(
            RequestSpec(
                at_s=at_s,
                priority=rng.choice([Priority.LS, Priority.BE]),
                num_prompt_tokens=AZURE_CONV_PROMPT.at(rng.uniform(0, 100)),
                max_tokens=AZURE_CONV_OUTPUT.at(rng.uniform(0, 100)),
            )
        )
    return out


def lines_of(document: dict[str, Any]) -> list[Line]:
    """Return the rows of a result."""
    what = f"{document['config']['requests']:,} Azure-like requests through 48 layers, CPU s"
    grains = document["grains"].items()
    return [at_most(f"{what}, grain {name}", g["cpu_s"], g["limit_s"]) for name, g in grains]


def main() -> None:
    """Simulate under every grain and report CPU seconds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--policy", default="qllm2")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=result_file)
    args = parser.parse_args()
    costs = preset("h100", "qwen3-moe")
    found = {}
    for grain, limit_s in LIMITS_S.items():
        config = engine_config({**SETTINGS, "preempt_at": grain})
        capacity = costs.capacity(config)
        mean = AZURE_CONV_PROMPT.mean, AZURE_CONV_OUTPUT.mean
        load = offer(args.requests, LOAD * capacity.requests_per_s(*mean), args.seed)
        run = simulate(load, args.policy, costs, config=config)
        begin = time.process_time()
        run.summary()
        found[grain] = {
            "cpu_s": round(run.cpu_s, 2),
            "limit_s": limit_s,
            "summary_cpu_s": round(time.process_time() - begin, 2),
            "decisions": run.decisions,
            "us_per_decision": round(run.cpu_s / run.decisions * 1e6),
            "virtual_s": round(run.window_s, 1),
        }
        print(grain, found[grain])
    config_line = {"requests": args.requests, "policy": args.policy, "seed": args.seed, **SETTINGS}
    document = {"bench": "sim_speed", "machine": machine(), "config": config_line, "grains": found}
    print_result(with_lines(document, lines_of(document)), args.out)


if __name__ == "__main__":
    main()
