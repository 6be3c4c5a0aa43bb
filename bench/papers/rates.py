"""The claims on latency and throughput against rate: windows of one mix at several loads."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import numpy as np

from bench.common import estimate, median, quantile
from bench.papers.rows import QLLM, Claim, Row, Scale, World
from bench.policies.live import Setting, run_requests
from qllm.plugins import installed_policies
from qllm.workloads.generators import Workload
from qllm.workloads.measure import SLO

POINT = ("fcfs", "chunked-priority:step_tokens=512", "qllm2")
BASE, OURS = "fcfs", ("qllm2", "qllm")
MOST_MET = 0.99


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

    def add(self, run: dict[str, Any]) -> None:
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

    @property
    def attainment(self) -> float | None:
        """Return the part of the LS requests that met both targets; None without requests."""
        return self.met / self.counted if self.counted else None


def mean(values: np.ndarray) -> float:
    """Return the mean, as a statistic."""
    return float(np.mean(values))


def ratio(top: Sequence[Sequence[float]], over: Sequence[Sequence[float]], p: float | None) -> str:
    """Return the ratio of two means (`p` None) or percentiles, with its interval."""
    found = estimate(top, mean if p is None else quantile(p), over=over)
    assert found is not None, "no request on one side"
    return found.text(1)


def measure_points(world: World) -> dict[float, dict[str, Point]]:
    """Measure every load under its policies; the requests are the same for all."""
    scale = world.scale
    out: dict[float, dict[str, Point]] = {load: {} for load in scale.loads}
    for seed in scale.seeds:
        for i, load in enumerate(scale.loads):
            workload = Workload(
                name="S1",
                seconds=scale.timing.window.end_s,  # no request arrives during the drain
                capacity=world.capacity,
                load=load,
                length_scale=0.25,
                max_len=2048,
            )
            for name in _policies(scale) if i == 0 else (*POINT, "qllm"):
                requests = workload.requests(seed)
                run = run_requests(world.bench, Setting.parse(name), requests, scale.timing)
                out[load].setdefault(name, Point()).add(run)
    return out


def _policies(scale: Scale) -> list[str]:
    """Return the policies of the lowest load, at which all have the same work to do."""
    others = sorted(set(installed_policies()) - {"chunked-priority", "qllm", *POINT})
    return [*POINT, "qllm", *(others if scale.all_policies else ())]


def rate_rows(world: World) -> list[Row]:
    """Return TTFT, turnaround, SLO attainment and total throughput."""
    points = measure_points(world)
    world.found["rates"] = {
        str(load): {n: _point_json(p) for n, p in of.items()} for load, of in points.items()
    }
    timing, size = world.scale.timing, world.scale.size
    how = (
        f"live, {size} model, 1 thread, S1 (ShareGPT lengths / 4, Poisson, 20 % LS), windows of "
        f"{timing.window_s:g} s, {len(world.scale.seeds)} seeds"
    )
    return [
        *_latency_rows(points, how),
        *_attainment_rows(points, how),
        _throughput_row(points, how),
    ]


def _point_json(point: Point) -> dict[str, Any]:
    return {
        "ls_ttft_mean_ms": _mean_of(point.ttft_ms),
        "ls_e2e_mean_ms": _mean_of(point.e2e_ms),
        "ls_attainment": point.attainment,
        "ls_requests": point.counted,
        "ls_open_at_the_end": point.open,
        "tokens_per_s": median(np.array(point.tokens_per_s)),
        "be_tokens_per_s": median(np.array(point.be_per_s)),
    }


def _mean_of(groups: Sequence[Sequence[float]]) -> float | None:
    pooled = [x for group in groups for x in group]
    return sum(pooled) / len(pooled) if pooled else None


def _latency_rows(points: Mapping[float, dict[str, Point]], how: str) -> Iterator[Row]:
    claims = {
        "ttft_ms": Claim("LS TTFT, fcfs / {ours}, mean", QLLM, "65.2x mean, 101.6x at most"),
        "e2e_ms": Claim("LS turnaround (end to end), fcfs / {ours}, mean; p99", QLLM, "<= 12.8x"),
    }
    finished = [load for load in points if not points[load][BASE].open]
    for kind, claim in claims.items():
        for where, load in (
            ("highest load at which fcfs ends every request", max(finished, default=None)),
            ("saturated", max(points)),
        ):
            for ours in OURS:
                named = claim._replace(what=f"{claim.what.format(ours=ours)}, {where}")
                if load is None:
                    yield Row.of(named, None, how, "fcfs left requests open at every load")
                    continue
                base, mine = points[load][BASE], points[load][ours]
                top, over = getattr(base, kind), getattr(mine, kind)
                if not base.counted:
                    yield Row.of(named, None, how, f"no LS request arrived at load {load:g}")
                    continue
                here = ratio(top, over, None)
                here += f"; {ratio(top, over, 99)}" if kind == "e2e_ms" else ""
                bound = f", {base.open} fcfs and {mine.open} {ours} requests open (lower bounds)"
                at = f"; load {load:g}{bound if base.open or mine.open else ', none open'}"
                yield Row.of(named, here, how + at)


def _attainment_rows(points: Mapping[float, dict[str, Point]], how: str) -> Iterator[Row]:
    claim = Claim(
        "highest load up to which >= 99 % of LS meet the SLO", QLLM, "7 req/s in a 3 s SLO"
    )
    for name in POINT:
        met = {load: of[name].attainment for load, of in sorted(points.items())}
        held = [load for load, _ in takewhile(lambda e: (e[1] or 0.0) >= MOST_MET, met.items())]
        curve = ", ".join(
            f"{load:g}x " + ("no request" if part is None else f"{part:.0%}")
            for load, part in met.items()
        )
        best = f"{held[-1]:g}x of capacity" if held else "none of the loads"
        slo = f"; TTFT {SLO.ttft_ms:g} ms and TPOT {SLO.tpot_ms:g} ms"
        named = claim._replace(what=f"{claim.what}, {name}")
        yield Row.of(named, f"{best} ({curve})", how + slo)


def _throughput_row(points: Mapping[float, dict[str, Point]], how: str) -> Row:
    load = min(points)
    base = points[load][BASE].tokens_per_s
    found = {
        name: float(np.median([a / b for a, b in zip(p.tokens_per_s, base, strict=True)]))
        for name, p in points[load].items()
        if name != BASE
    }
    worst = min(found, key=found.__getitem__)
    return Row.of(
        Claim(
            "LS + BE tokens/s at equal offered load below capacity, policy / fcfs",
            QLLM,
            "latency without impacting throughput; BE 1.38x, 2.04x at most",
        ),
        f"qllm2 {found['qllm2']:.2f}; worst of {len(found)} {found[worst]:.2f} ({worst})",
        f"{how}; load {load:g}, prompts + outputs inside the window",
    )
