"""The simulator against queueing theory: waits of one class, and of two with preemption.

    python -m tests.long.queueing            three loads, about four minutes of one core
    python -m tests.long.queueing --quick    the same with few requests

One request runs at a time (`max_num_seqs=1`), its service time is exponential (a prompt of
geometric length at a fixed time per token, one token out), arrivals are Poisson, and no other work
takes time. So `fcfs` is an M/M/1 queue, whose waits Erlang's C formula gives, and `qllm2` without
its bounds for BE is M/M/1 with preemption and resumption, as far as the time between two
boundaries is short.

    Erlang C: A. K. Erlang, "Solution of some problems in the theory of probabilities of
      significance in automatic telephone exchanges" (1917); L. Kleinrock, "Queueing Systems",
      volume 1 (1975), chapter 3.
    Preemptive resume: D. Bertsekas and R. Gallager, "Data Networks" (2nd edition, 1992),
      section 3.5.3; L. Kleinrock, "Queueing Systems", volume 2 (1976), chapter 3.

`Sample.waits` computes the waits of a given sample by a recursion that shares no code with the
simulator: request by request both must agree. Its mean over millions of requests costs seconds, so
a short simulation is compared with theory through it (a control variate).

The very last line of stdout is one JSON document.
"""

import argparse
import math
import sys
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.common import RESULTS, Table, machine, plain, result_file
from qllm.config import EngineConfig
from qllm.record.trace import Arrived, Finished
from qllm.sim.costs import CostFile, FileShape
from qllm.sim.run import simulate
from qllm.types import FinishReason, Priority
from qllm.workloads.spec import RequestSpec

FILE = RESULTS / "queueing.json"
LOADS = (0.3, 0.6, 0.8)
BOUND = 0.05
MEAN_TOKENS = 100
LAYERS, EXPERTS, TOP_K = 16, 64, 8
TOKEN_S = 1e-4
"""Service time per prompt token."""
ROOM = 100_000
"""Number of tokens that no request needs."""
NO_WAIT_S = 1e-6
"""Shortest wait that counts: each op lasts at least one nanosecond."""
Floats = NDArray[np.float64]


# theory


def erlang_c(servers: int, offered: float) -> float:
    """Return the probability of waiting in M/M/c; `offered` = arrival rate * service time."""
    if not 0 < offered < servers:
        raise ValueError(f"offered={offered!r} must lie between 0 and the {servers} servers")
    last = offered**servers / math.factorial(servers) / (1 - offered / servers)
    return last / (sum(offered**k / math.factorial(k) for k in range(servers)) + last)


def wait_of_one_class(rate: float, service_s: float, servers: int = 1) -> float:
    """Return the mean wait in an M/M/c queue, in seconds."""
    offered = rate * service_s
    return erlang_c(servers, offered) * service_s / (servers - offered)


def waits_of_two_classes(rates: tuple[float, float], service_s: float) -> tuple[float, float]:
    """Return mean waits (response - service) of M/M/1 preemptive resume, better class first, in s.

    T_k = S / (1 - load_<k) + R_k / ((1 - load_<k) (1 - load_<=k)), with R_k = sum over i <= k of
    rate_i E[S^2] / 2; the second moment of an exponential time is 2 S^2.
    """
    waits = []
    above = 0.0
    for k, rate in enumerate(rates):
        upto = above + rate * service_s
        residual_s = sum(rates[: k + 1]) * service_s**2
        response_s = service_s / (1 - above) + residual_s / ((1 - above) * (1 - upto))
        waits.append(response_s - service_s)
        above = upto
    return waits[0], waits[1]


# samples


class Sample(NamedTuple):
    """Requests in order of arrival."""

    at_s: Floats
    tokens: NDArray[np.int64]
    is_be: NDArray[np.bool_]

    @classmethod
    def draw(cls, load: float, count: int, seed: int, be_share: float) -> "Sample":
        """Return Poisson arrivals at a load; lengths and classes are independent of them."""
        rng = np.random.default_rng([seed, round(1000 * load), round(1000 * be_share)])
        gaps = rng.exponential(MEAN_TOKENS * TOKEN_S / load, count)
        at_s = np.rint(np.cumsum(gaps) * 1e9) / 1e9  # the resolution of the clock
        tokens = rng.geometric(1 / MEAN_TOKENS, count)
        return cls(at_s, tokens, rng.random(count) < be_share)

    @property
    def services_s(self) -> Floats:
        """Return the service times."""
        return self.tokens * TOKEN_S

    def waits(self) -> Floats:
        """Return responses minus services of one server; LS preempts BE, which resumes.

        The work before an arrival follows Lindley's recursion. A BE request leaves when the passed
        time covers the work before it, its own, and all LS work that arrives until then.
        """
        ls, be, service = ~self.is_be, self.is_be, self.services_s
        waits = np.empty(len(self.at_s))
        waits[ls] = _work_found(self.at_s[ls], service[ls])
        if be.any():
            level = _work_found(self.at_s, service)[be] + service[be]
            waits[be] = _when_done(level, self, be) - self.at_s[be] - service[be]
        return waits


def _work_found(at_s: Floats, service_s: Floats) -> Floats:
    """Return the work that each arrival finds: V_n = max(0, V_{n-1} + S_{n-1} - gap_n)."""
    steps = np.concatenate([[0.0], service_s[:-1] - np.diff(at_s)])
    walk = np.cumsum(steps)
    return walk - np.minimum.accumulate(walk)


def _when_done(level_s: Floats, sample: Sample, be: NDArray[np.bool_]) -> Floats:
    """Return when the time left by LS has covered `level_s` after each BE arrival."""
    ls = ~sample.is_be
    jump_s, size_s = sample.at_s[ls], sample.services_s[ls]
    before_s = np.concatenate([[0.0], np.cumsum(size_s)])
    peaks_s = np.maximum.accumulate(jump_s - before_s[:-1])  # of time minus LS work, at arrivals
    at_s = sample.at_s[be]
    goal_s = at_s - before_s[np.searchsorted(jump_s, at_s, side="right")] + level_s
    done: Floats = goal_s + before_s[np.searchsorted(peaks_s, goal_s, side="left")]
    return done


# the simulator


def costs() -> CostFile:
    """Return a machine on which a prompt token takes `TOKEN_S` and other work takes no time."""
    names = (
        "op_ns embed_ns embed_token_ns attn_ns attn_token_ns attn_row_ns kv_token_ns pair_ns "
        "route_ns route_token_ns experts_ns expert_ns combine_ns combine_token_ns dense_ns "
        "dense_token_ns head_ns head_row_ns step_ns step_row_ns skew overlap"
    )
    return CostFile(
        model="a server",
        machine="a queue",
        dtype="none",
        origin="computed",
        shape=FileShape(
            num_layers=LAYERS,
            num_experts=EXPERTS,
            experts_per_token=TOP_K,
            is_moe=(True,) * LAYERS,
            vocab_size=100,
            max_position=ROOM,
        ),
        costs=dict.fromkeys(names.split(), 0.0)
        | {"expert_token_ns": TOKEN_S * 1e9 / (LAYERS * TOP_K)},
        max_kv_tokens=ROOM,
        expert_bytes=0,
    )


CONFIG = EngineConfig(max_kv_tokens=ROOM, max_num_seqs=1, max_step_tokens=ROOM)
POLICIES: dict[bool, tuple[str, dict[str, Any]]] = {
    False: ("fcfs", {}),
    True: ("qllm2", {"ride_frac": 0.0, "max_be_stall_ms": None}),
}
"""Policy and settings, by True if there are two classes."""


class Served(NamedTuple):
    """Result of a sample in the simulator."""

    waits_s: Floats
    decisions: int
    cpu_s: float


def served(sample: Sample) -> Served:
    """Return responses minus services of a sample in the simulator, in order of arrival."""
    policy, settings = POLICIES[bool(sample.is_be.any())]
    requests = [
        RequestSpec(
            at_s=float(at_s),
            priority=Priority.BE if be else Priority.LS,
            num_prompt_tokens=int(tokens),
            max_tokens=1,
        )
        for at_s, tokens, be in zip(*sample, strict=True)
    ]
    run = simulate(requests, policy, costs(), policy_settings=settings, config=CONFIG)
    arrived = {e.request_id: e.at_ns for e in run.trace if isinstance(e, Arrived)}
    ends = {e.request_id: e for e in run.trace if isinstance(e, Finished)}
    assert len(ends) == len(requests), f"{len(ends)} of {len(requests)} requests ended"
    assert all(e.reason is FinishReason.LENGTH for e in ends.values())
    took_ns = np.array([ends[i].at_ns - arrived[i] for i in range(len(requests))])
    return Served(took_ns / 1e9 - sample.services_s, run.decisions, run.cpu_s)


# the comparison


class Mean(NamedTuple):
    """A mean wait and its value in theory."""

    what: str
    theory_s: float
    simulated_s: float
    exact_s: float
    """Mean of the recursion on the same sample."""
    long_s: float
    """Mean of the recursion on a long sample."""

    @property
    def error(self) -> float:
        """Return the relative error of the simulated mean against theory."""
        return self.simulated_s / self.theory_s - 1

    @property
    def controlled_error(self) -> float:
        """Return the same with the recursion as control variate."""
        return self.simulated_s / self.exact_s * self.long_s / self.theory_s - 1


class Compared(NamedTuple):
    """Comparison of one load."""

    means: list[Mean]
    apart_s: float
    """99th percentile of the difference to the recursion's wait. If BE ends within a boundary of an
    LS arrival, only one of the two may see one more preemption."""
    waited: float
    """Part of the requests that waited; Erlang's C for one class."""
    cpu_s: float


def compare(load: float, count: int, seed: int, be_share: float, long: int) -> Compared:
    """Simulate a load and compare it.

    Args:
        load: Load of the server, both classes together.
        count: Number of requests to simulate.
        seed: Seed of the sample; the long one has another.
        be_share: Part of the requests that is BE; 0 is one class.
        long: Number of requests of the sample that only the recursion runs.
    """
    sample = Sample.draw(load, count, seed, be_share)
    found, exact = served(sample), sample.waits()
    far = Sample.draw(load, long, seed + 10_000, be_share)
    far_waits = far.waits()
    service_s = MEAN_TOKENS * TOKEN_S
    rate = load / service_s
    if be_share:
        expected = waits_of_two_classes((rate * (1 - be_share), rate * be_share), service_s)
    else:
        expected = (wait_of_one_class(rate, service_s),)
    means = []
    for name, is_be, theory_s in zip(("LS", "BE"), (False, True), expected, strict=False):
        mine, theirs = sample.is_be == is_be, far.is_be == is_be
        means.append(
            Mean(
                name if be_share else "one class",
                theory_s,
                float(found.waits_s[mine].mean()),
                float(exact[mine].mean()),
                float(far_waits[theirs].mean()),
            )
        )
    return Compared(
        means,
        float(np.percentile(np.abs(found.waits_s - exact), 99)),
        float((found.waits_s > NO_WAIT_S).mean()),
        found.cpu_s,
    )


COUNTS = {0.3: 20_000, 0.6: 40_000, 0.8: 80_000}
"""Requests per load. The mean at the highest load has a standard error of about 4 %."""


def main() -> None:
    """Compare every load, print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--long", type=int, default=20_000_000, help="requests of the recursion")
    parser.add_argument("--out", type=result_file, default=FILE, help="where the JSON goes too")
    parser.add_argument("--quick", action="store_true", help="2,000 requests each: to debug")
    args = parser.parse_args()
    out = None if args.quick else result_file(args.out)
    table, rows = Table(), []
    for be_share in (0.0, 0.5):
        for load in LOADS:
            count = 2000 if args.quick else COUNTS[load]
            long = 200_000 if args.quick else args.long
            found = compare(load, count, args.seed, be_share, long)
            for mean in found.means:
                error = mean.controlled_error
                table.add(
                    f"load {load}, {mean.what}: mean wait / theory; as drawn ({count:,} requests)",
                    f"{1 + error:.3f}; {1 + mean.error:.3f}",
                    f"1 +- {BOUND}",
                    abs(error) <= BOUND,
                )
                rows.append(
                    mean._asdict()
                    | {"load": load, "requests": count, "be_share": be_share}
                    | {"error": mean.error, "controlled_error": mean.controlled_error}
                )
            rows[-1] |= {"apart_s": found.apart_s, "cpu_s": found.cpu_s, "waited": found.waited}
            if not be_share:
                table.add(
                    "  part that waited / Erlang C", f"{found.waited / erlang_c(1, load):.3f}"
                )
            table.add(
                "  one request's wait beside the recursion's, p99, ms", f"{found.apart_s * 1e3:.3f}"
            )
    config = {"seed": args.seed, "long": args.long, "quick": args.quick, "mean_s": 0.01}
    document = plain({"bench": "queueing", "machine": machine(), "config": config})
    table.finish(document | {"rows": rows}, out)
    sys.exit(table.missed)


if __name__ == "__main__":
    main()
