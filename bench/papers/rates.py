"""The claims on latency and throughput against rate: windows of one mix at several loads."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import Estimate, estimate, median, paired, quantile
from bench.energy import per_ktok
from bench.papers.rows import PRINTED, QLLM, Claim, Row, Scale, World
from bench.papers.servers import home_of, rows_of_server
from bench.policies.live import Setting, Timing, run_requests
from bench.serving.servers import PEERS, InstallError
from qllm.plugins import installed_policies
from qllm.sim.presets import preset
from qllm.types import Priority, Slo
from qllm.workloads.generators import Workload
from qllm.workloads.spec import RequestSpec

BASE, OURS, ALONE = "fcfs", ("qllm2", "qllm"), "LS alone"
RIVAL = "chunked-priority:step_tokens=512"
POINT = (BASE, RIVAL, *OURS)
FRONTIER: Mapping[str, Mapping[str, Any]] = {
    "qllm2:ride_frac=0": {},
    "qllm2:ride_frac=2": {},
    "qllm2, min_be_share=0.3": {"min_be_share": 0.3},
    "qllm2, min_be_share=0.5": {"min_be_share": 0.5},
    "qllm2, targets": {},
}
"""Settings of the frontier at the highest load, with the settings of the engine."""
MOST_MET = 0.99
PAPER_SLO_MS = 3000.0
A100 = Path(__file__).with_name("a100.toml")
LENGTH_SCALE = 0.125


@dataclass(slots=True)
class Point:
    """One policy at one load, over all seeds."""

    ttft_ms: list[list[float]] = field(default_factory=list)
    e2e_ms: list[list[float]] = field(default_factory=list)
    met: int = 0
    counted: int = 0
    open: int = 0
    """LS requests unfinished at the end of the run: latencies are lower bounds."""
    tokens_per_s: list[float] = field(default_factory=list)
    be_per_s: list[float] = field(default_factory=list)
    energy: list[dict[str, float | None]] = field(default_factory=list)
    """Joules and computed tokens of each run; empty for other servers."""

    def add(self, run: Mapping[str, Any]) -> None:
        """Add a seed's run."""
        ls, samples = run["classes"].get("LS", {"arrived": 0, "finished": 0}), run["samples"]
        self.ttft_ms.append(samples["ttft_ms"])
        self.e2e_ms.append(list(samples["e2e_ms"].values()))
        self.met += samples["met"]
        self.counted += ls["arrived"]
        self.open += ls["arrived"] - ls["finished"]
        rates = {
            name: c["prefill_tokens_per_s"] + c["output_tokens_per_s"]
            for name, c in run["classes"].items()
        }
        self.tokens_per_s.append(sum(rates.values()))
        self.be_per_s.append(rates.get("BE", 0.0))
        if engine := run.get("engine"):
            self.energy.append({n: engine[n] for n in ("joules", "computed_tokens")})

    @property
    def attainment(self) -> float | None:
        """Return the part of the LS requests that met the target; None without requests."""
        return self.met / self.counted if self.counted else None


Points = Mapping[float, Mapping[str, Point]]
"""Points by load and by policy, or another arm."""


def mean(values: np.ndarray) -> float:
    """Return the mean, as a statistic."""
    return float(np.mean(values))


def largest(values: np.ndarray) -> float:
    """Return the maximum, as a statistic."""
    return float(np.max(values))


def ratio(
    top: Sequence[Sequence[float]], over: Sequence[Sequence[float]], statistic: Any
) -> Estimate:
    """Return the ratio of two statistics, with its interval."""
    found = estimate(top, statistic, over=over)
    assert found is not None, "no request on one side"
    return found


def decode_step_ns(world: World) -> float:
    """Return our time of a decode step of eight rows."""
    return 8e9 / world.capacity.output_tokens_per_s


def slo_of(world: World) -> Slo:
    """Return the paper's target of three seconds, times our decode step over the paper's.

    The paper's step is computed from the data sheet of its GPU, for eight rows and 512 tokens.
    """
    theirs = preset(str(A100), "mixtral", "int4").step_ns(8, 0, 512)
    return Slo(ttft_ms=PAPER_SLO_MS * decode_step_ns(world) / theirs)


def workload_of(world: World, load: float) -> tuple[Workload, Timing]:
    """Return the mix at a load, and windows with enough LS requests."""
    scale = world.scale
    mix = Workload(
        name="S1", capacity=world.capacity, load=load, length_scale=LENGTH_SCALE, max_len=2048
    )
    per_seed = scale.ls_requests / len(scale.seeds)
    timing = replace(scale.timing, window_s=per_seed / mix.nominal_rates()[Priority.LS])
    # no request arrives during the drain
    return replace(mix, seconds=timing.window.end_s), timing


def measure_points(world: World, slo: Slo) -> dict[float, dict[str, Point]]:
    """Measure every load under its policies; the requests are the same for all."""
    scale = world.scale
    out: dict[float, dict[str, Point]] = {load: {} for load in scale.loads}
    for seed in scale.seeds:
        for i, load in enumerate(scale.loads):
            mix, timing = workload_of(world, load)
            requests = mix.requests(seed)
            for name in policies_of(scale) if i == 0 else POINT:
                run = run_requests(
                    world.bench, Setting.parse(name), requests, timing, slo=slo, until_answered=True
                )
                out[load].setdefault(name, Point()).add(run)
            alone = [r for r in requests if r.priority == Priority.LS]
            run = run_requests(
                world.bench, Setting("qllm2"), alone, timing, slo=slo, until_answered=True
            )
            out[load].setdefault(ALONE, Point()).add(run)
            for arm in scale.arms:
                run = rows_of_server(world, arm, requests, timing, slo)
                out[load].setdefault(arm, Point()).add(run)
    return out


def measure_frontier(world: World, slo: Slo) -> dict[str, Point]:
    """Measure the settings that buy back throughput, at the highest load."""
    load = max(world.scale.loads)
    out: dict[str, Point] = {name: Point() for name in FRONTIER}
    for seed in world.scale.seeds:
        mix, timing = workload_of(world, load)
        for name, settings in FRONTIER.items():
            requests: list[RequestSpec] = mix.requests(seed)
            if "targets" in name:
                requests = [
                    replace(r, slo=replace(slo, tpot_ms=100.0)) if r.priority == Priority.LS else r
                    for r in requests
                ]
            setting = Setting.parse(name.partition(",")[0])
            out[name].add(
                run_requests(
                    world.bench, setting, requests, timing, slo=slo, until_answered=True, **settings
                )
            )
    return out


def policies_of(scale: Scale) -> list[str]:
    """Return the policies of the lowest load, at which all have the same work to do."""
    others = sorted(set(installed_policies()) - {"chunked-priority", *POINT})
    return [*POINT, *(others if scale.all_policies else ())]


def rate_rows(world: World) -> list[Row]:
    """Return TTFT, turnaround, SLO attainment, throughput, and what throughput costs."""
    slo = slo_of(world)
    failed = {}
    for arm in world.scale.arms:
        try:
            home_of(world, PEERS[arm])
        except InstallError as error:
            failed[arm] = str(error)
    arms = [arm for arm in world.scale.arms if arm not in failed]
    limited = replace(world, scale=replace(world.scale, arms=arms))
    points = measure_points(limited, slo)
    frontier = measure_frontier(limited, slo)
    world.found["rates"] = {
        str(load): {n: point_json(p) for n, p in of.items()} for load, of in points.items()
    }
    world.found["frontier"] = {n: point_json(p) for n, p in frontier.items()}
    world.found["slo"] = {"ttft_ms": slo.ttft_ms, "decode_step_ns": decode_step_ns(world)}
    rates = {load: sum(workload_of(world, load)[0].nominal_rates().values()) for load in points}
    how = (
        f"{world.scale.size} model, 1 thread, S1 (ShareGPT lengths * {LENGTH_SCALE:g}, Poisson, "
        f"20 % LS), {len(world.scale.seeds)} seeds, {world.scale.ls_requests} LS requests a point"
    )
    rows = [
        *latency_rows(points, rates, how),
        *attainment_rows(points, rates, f"{how}; {slo_text(world, slo)}", failed),
        *throughput_rows(points, rates, how),
    ]
    highest = max(points)
    return [*rows, *frontier_rows(frontier, points[highest], rates[highest], how)]


def slo_text(world: World, slo: Slo) -> str:
    """Return the sentence that states how the paper's target was scaled."""
    theirs = PAPER_SLO_MS * decode_step_ns(world) / (slo.ttft_ms or PAPER_SLO_MS)
    return (
        f"TTFT within {slo.ttft_ms:,.0f} ms: the paper's 3 s times our decode step of eight rows "
        f"({decode_step_ns(world) / 1e6:.1f} ms) over the paper's ({theirs / 1e6:.1f} ms, computed "
        "from the GPU's data sheet)"
    )


def point_json(point: Point) -> dict[str, Any]:
    """Return the numbers of a point for the result."""
    return {
        "ls_ttft_mean_ms": _of(point.ttft_ms, mean),
        "ls_ttft_p99_ms": _of(point.ttft_ms, quantile(99)),
        "ls_e2e_mean_ms": _of(point.e2e_ms, mean),
        "ls_attainment": point.attainment,
        "ls_requests": point.counted,
        "ls_open_at_the_end": point.open,
        "tokens_per_s": median(np.array(point.tokens_per_s)),
        "be_tokens_per_s": median(np.array(point.be_per_s)),
        "energy": per_ktok(point.energy),
    }


def _of(groups: Sequence[Sequence[float]], statistic: Any) -> float | None:
    pooled = [x for group in groups for x in group]
    return statistic(np.array(pooled)) if pooled else None


def at(load: float, rates: Mapping[float, float]) -> str:
    """Return the text of a load: requests per second, and the part of capacity."""
    return f"{rates[load]:.2f} req/s ({load:g} of capacity)"


LATENCIES = (
    ("Q13", "ttft_ms", "LS TTFT, mean", "65.2x mean", mean, 65.2),
    ("Q13", "ttft_ms", "LS TTFT, maximum", "101.6x at most", largest, 101.6),
    ("Q15", "e2e_ms", "LS turnaround (end to end), mean", "up to 12.8x", mean, 12.8),
    ("Q15", "e2e_ms", "LS turnaround (end to end), p99", "up to 12.8x", quantile(99), 12.8),
)


def latency_rows(points: Points, rates: Mapping[float, float], how: str) -> Iterator[Row]:
    """Return latencies of fcfs over ours, per load.

    The paper's number is the target at the highest load at which fcfs ends every request. Other
    loads are printed. `LS alone` is the floor: the best ratio that a policy could have.
    """
    ended = [load for load in points if points[load][BASE].counted and not points[load][BASE].open]
    for name, kind, what, paper, statistic, number in LATENCIES:
        for load in points:
            judged = load == max(ended, default=None)
            base = points[load][BASE]
            for ours in (*OURS, ALONE):
                mine = points[load][ours]
                target = f">= {number:g}" if judged and ours == OURS[0] else PRINTED
                claim = Claim(
                    name, f"{what}: {BASE} / {ours} at {at(load, rates)}", QLLM, paper, target
                )
                if not base.counted or not mine.counted:
                    yield Row.of(claim, None, how, "no LS request arrived")
                    continue
                bounds = f"{base.open} {BASE} and {mine.open} {ours} requests open"
                more = f"; {bounds} (lower bounds)" if base.open or mine.open else "; none open"
                found = ratio(getattr(base, kind), getattr(mine, kind), statistic)
                yield Row.of(claim, found, how + more)


def attainment_rows(
    points: Points, rates: Mapping[float, float], how: str, failed: Mapping[str, str]
) -> Iterator[Row]:
    """Return the highest load at which nearly all LS requests meet the SLO, per arm."""
    what, paper = "part of capacity up to which 99 % of LS meet the SLO", "7 req/s in a 3 s SLO"
    for name in dict.fromkeys(n for of in points.values() for n in of):
        if any(name not in of for of in points.values()):
            continue
        met = {load: of[name].attainment for load, of in sorted(points.items())}
        held = [load for load, _ in takewhile(lambda e: (e[1] or 0.0) >= MOST_MET, met.items())]
        curve = ", ".join(
            f"{rates[load]:.2f}/s " + ("no request" if part is None else f"{part:.1%}")
            for load, part in met.items()
        )
        target = {"qllm2": ">= 1", ALONE: f">= {max(points):g}"}.get(name, PRINTED)
        claim = Claim("Q14", f"{what}, {name}", QLLM, paper, target)
        yield Row.of(claim, float(held[-1]) if held else 0.0, how, more=f" ({curve})")
    for name, why in failed.items():
        yield Row.of(Claim("Q14", f"{what}, {name}", QLLM, paper, PRINTED), None, how, why)


def throughput_rows(points: Points, rates: Mapping[float, float], how: str) -> Iterator[Row]:
    """Return tokens per second over those of fcfs, of BE and of all, at every load."""
    paper = "latency without impacting throughput; BE 1.38x, 2.04x at most"
    for load, of in points.items():
        base = of[BASE]
        for name, point in of.items():
            if name in (BASE, ALONE):
                continue
            target = ">= 0.95" if name == "qllm2" else PRINTED
            for what, kind in (("BE", "be_per_s"), ("LS + BE", "tokens_per_s")):
                claim = Claim(
                    "Q16", f"{what} tokens/s: {name} / {BASE} at {at(load, rates)}", QLLM, paper,
                    target,
                )  # fmt: skip
                pairs = zip(getattr(point, kind), getattr(base, kind), strict=True)
                ratios = [a / b for a, b in pairs if b]
                if not ratios:
                    yield Row.of(claim, None, how, f"{BASE} computed no such token")
                    continue
                yield Row.of(claim, paired(ratios), f"{how}; {per_ktok(point.energy)}")


def frontier_rows(
    frontier: Mapping[str, Point], points: Mapping[str, Point], rate: float, how: str
) -> Iterator[Row]:
    """Return what other settings of `qllm2` cost LS, and give BE, at the highest load."""
    base = points[BASE]
    for name, point in {"qllm2": points["qllm2"], **frontier}.items():
        claim = Claim(
            "Q16", f"BE tokens/s over {BASE}; LS TTFT p99: {name} at {rate:.2f} req/s", QLLM,
            "latency without impacting throughput", PRINTED,
        )  # fmt: skip
        ratios = [a / b for a, b in zip(point.be_per_s, base.be_per_s, strict=True) if b]
        p99 = _of(point.ttft_ms, quantile(99))
        if not ratios or p99 is None:
            yield Row.of(claim, None, how, "no request of one class")
            continue
        yield Row.of(claim, f"{paired(ratios).text()}; {p99:,.0f} ms", how)
