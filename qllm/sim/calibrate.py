"""A measurement of a model's costs: a short run of the real engine, and a fit of the cost model.

The loop, scheduler and runner are those that serve, on the caller's thread. Every op is timed at
the places where the runner polls for arrivals. The remaining time between two runs is the cost of a
step. Each kind of op is fitted separately, by least squares of relative errors without negative
costs.
"""

import gc
import itertools
import os
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from qllm.config import EngineConfig
from qllm.engine.build import torch_threads
from qllm.engine.limits import limits_of
from qllm.engine.loop import EngineLoop
from qllm.engine.sizes import with_usual_sizes
from qllm.errors import ConfigError
from qllm.ingress import InprocIngress, Submission
from qllm.measure.random_moe import SIZES, make_random_moe
from qllm.models.loader import load
from qllm.plan import NO_CUTS, ModelShape
from qllm.plugins import load_policy
from qllm.record.metrics import RequestMetrics
from qllm.record.trace import Ran, Trace
from qllm.runner.cpu import cpu_runner
from qllm.runner.runner import TorchRunner
from qllm.scheduler.program import Index, OpKind, Program
from qllm.scheduler.scheduler import Scheduler
from qllm.sim.costs import CostFile, FileShape, FitError
from qllm.sim.rank_sizes import rank_sizes
from qllm.sim.timeline import SimCosts, Work, expert_coverage, work_of
from qllm.types import FinishReason, Priority, RequestId, Sampled, SamplingParams, Slo

_SKEWS = tuple(x / 10 for x in range(16))
"""Exponents of expert popularity that the fit tries."""
_KEPT_PART = 0.9
"""Part of an op's samples that counts. These are the shortest ones, because other processes may
delay the rest."""

TASK_NS = 300_000
"""Longest time of a task in ops that poll inside. A task of 96 rows, 2,048 inputs and 64 outputs
takes 0.2 ms on a core with AVX-512."""
MOST_BUSY = 0.1
"""Most cores that other processes may use while costs are measured."""
LOOK_S = 1.0


def cpu_seconds() -> tuple[float, float]:
    """Return the CPU seconds used so far by the machine, and by this process and its children."""
    line = Path("/proc/stat").read_text().partition("\n")[0]
    ticks = [int(field) for field in line.split()[1:9]]  # user ... idle, iowait ... steal
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK"), own


class Others:
    """A meter of the cores that other processes have used since its creation."""

    def __init__(self) -> None:
        self._start_s, self._used = time.monotonic(), cpu_seconds()

    @property
    def cores(self) -> float:
        """Return the mean number of cores since creation. Time taken by a hypervisor counts too."""
        passed_s = max(1e-9, time.monotonic() - self._start_s)
        (all_s, own_s), (all_before, own_before) = cpu_seconds(), self._used
        return max(0.0, (all_s - all_before) - (own_s - own_before)) / passed_s


def refuse_busy() -> None:
    """Measure the machine's load for a moment.

    Raises:
        ConfigError: Other processes use the machine, and would be measured with the model.
    """
    others = Others()
    time.sleep(LOOK_S)
    if (cores := others.cores) > MOST_BUSY:
        raise ConfigError(
            f"other processes use {cores:.1f} of this machine's cores, and costs that are measured "
            f"meanwhile are too high: wait until they use less than {MOST_BUSY:g}, or measure all "
            "the same with --busy"
        )


class SimLoad(NamedTuple):
    """Requests that arrive together. Their prefills run first, then their decodes in one batch."""

    num_requests: int
    prompt_tokens: int
    max_tokens: int
    chunk_tokens: int | None = None


LOADS = (
    SimLoad(1, 16, 12),
    SimLoad(1, 1024, 12),
    SimLoad(2, 256, 12),
    SimLoad(4, 512, 12),
    SimLoad(8, 128, 12),
    SimLoad(16, 64, 12),
    SimLoad(16, 256, 12),
    SimLoad(1, 48, 1),
    SimLoad(1, 96, 1),
    SimLoad(1, 160, 1),
    SimLoad(1, 384, 1),
    SimLoad(1, 2048, 1),
    SimLoad(1, 2048, 1, chunk_tokens=256),
    SimLoad(1, 640, 1, chunk_tokens=64),
)
"""Loads with decode batches of 1 to 16, contexts up to 2,048, prefills whole and in chunks."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The mean time of one op of one program, over the layers that have the op."""

    kind: OpKind
    is_moe: bool
    work: Work
    ns: float


@dataclass(frozen=True, slots=True)
class Measured:
    """Result of running some loads."""

    ops: list[Sample]
    gaps: list[tuple[int, int]]
    """Rows of each program, and the time until the next program starts, without the program's
    ops."""


class _Probe:
    """An engine without a client and with a watched runner."""

    def __init__(self, runner: TorchRunner, config: EngineConfig) -> None:
        self.runner = runner
        self.config = config
        self._numbers = itertools.count()
        self._rng = np.random.default_rng(0)
        self._ingress = InprocIngress(time.perf_counter_ns)
        self._spent: dict[int, dict[int, int]] = {}
        self._programs: dict[int, Program] = {}
        runner.on_segment = self._segment

    def _segment(self, program: Program, index: Index, begin_ns: int, end_ns: int) -> None:
        self._programs[program.frame_id] = program
        spent = self._spent.setdefault(program.frame_id, defaultdict(int))
        spent[index.op] += end_ns - begin_ns

    def on_token(self, sampled: Sampled, at_ns: int) -> bool:
        return False

    def on_finish(
        self,
        request_id: RequestId,
        reason: FinishReason,
        error: str | None,
        metrics: RequestMetrics | None,
    ) -> None:
        if error is not None:
            raise RuntimeError(f"calibration request {request_id} failed: {error}")

    def serve(self, load: SimLoad) -> Measured:
        """Run a load to its end."""
        policy = load_policy("fcfs", {"chunk_tokens": load.chunk_tokens})
        record = Trace()
        scheduler = Scheduler(policy, self.runner.shape, self.runner.cuts, limits_of(self.config))
        loop = EngineLoop(self._ingress, scheduler, self.runner, self, time.perf_counter_ns, record)
        self._spent.clear()
        for _ in range(load.num_requests):
            self._ingress.put(self._submission(load))
        loop.step()
        while loop.live:
            loop.step()
        return Measured(self._samples(), self._gaps([e for e in record if isinstance(e, Ran)]))

    def _submission(self, load: SimLoad) -> Submission:
        ids = self._rng.integers(0, self.runner.shape.vocab_size, load.prompt_tokens)
        return Submission(
            request_id=next(self._numbers),
            name="calibration",
            priority=Priority.BE,
            token_ids=tuple(int(i) for i in ids),
            sampling=SamplingParams(temperature=0.0, seed=0, ignore_eos=True),
            stop_ids=frozenset(),
            max_tokens=load.max_tokens,
            slo=Slo(),
            arrival_ns=time.perf_counter_ns(),
            deadline_ns=None,
        )

    def _samples(self) -> list[Sample]:
        out = []
        for frame_id, spent in self._spent.items():
            program = self._programs[frame_id]
            alike: dict[tuple[Any, ...], list[int]] = defaultdict(list)
            for number, ns in spent.items():
                kind, layer, group, lo, hi = program.ops[number]
                is_moe = kind is not OpKind.HEAD and self.runner.shape.is_moe[layer]
                alike[kind, is_moe, group, lo, hi].append(ns)
            for (kind, is_moe, group, lo, hi), times in alike.items():
                work = work_of(program, group, lo, hi, kind)
                out.append(Sample(kind, is_moe, work, _kept_mean(times)))
        return out

    def _gaps(self, ran: Sequence[Ran]) -> list[tuple[int, int]]:
        out = []
        for this, following in itertools.pairwise(ran):
            inside = sum(self._spent[this.frame_id].values())
            rows = len(self._programs[this.frame_id].rows)
            out.append((rows, following.start_ns - this.start_ns - inside))
        return out


def _kept_mean(values: Sequence[float]) -> float:
    kept = sorted(values)[: max(1, round(_KEPT_PART * len(values)))]
    return sum(kept) / len(kept)


def nonnegative_fit(features: Any, times: Any) -> Any:
    """Return the coefficients >= 0 with the least squares of relative errors.

    The function tries every set of columns that may be non-zero. So the result is exact, but only a
    few columns are possible.

    Args:
        features: [samples, columns].
        times: [samples], all > 0.
    """
    scaled = np.asarray(features, dtype=float) / np.asarray(times, dtype=float)[:, None]
    size = np.maximum(np.abs(scaled).max(axis=0), 1e-300)
    best, least = np.zeros(scaled.shape[1]), float(len(scaled))
    for chosen in itertools.product([False, True], repeat=scaled.shape[1]):
        columns = np.flatnonzero(chosen)
        if not len(columns):
            continue
        part = scaled[:, columns] / size[columns]
        found = np.linalg.lstsq(part, np.ones(len(part)), rcond=None)[0]
        error = float(((part @ found - 1) ** 2).sum())
        if (found >= 0).all() and error < least:
            best, least = np.zeros(scaled.shape[1]), error
            best[columns] = found / size[columns]
    return best


def _centred_fit(features: Any, times: Any) -> Any:
    """Return the fit, scaled so that half of the times are longer than fitted.

    Relative errors alone make a fit of noisy times too short, because they punish times that are
    too long more.
    """
    found = nonnegative_fit(features, times)
    return found * float(np.median(np.asarray(times) / (np.asarray(features) @ found)))


Features = Callable[[Work], tuple[float, ...]]
_LINEAR: dict[tuple[OpKind, bool], tuple[tuple[str, ...], Features]] = {
    (OpKind.EMBED, True): (("embed_ns", "embed_token_ns"), lambda w: (1.0, w.tokens)),
    (OpKind.ATTN, True): (
        ("attn_ns", "attn_token_ns", "attn_row_ns", "kv_token_ns", "pair_ns"),
        lambda w: (1.0, w.tokens, w.rows, w.kv_tokens, w.pairs),
    ),
    (OpKind.ROUTE, True): (("route_ns", "route_token_ns"), lambda w: (1.0, w.tokens)),
    (OpKind.COMBINE, True): (("combine_ns", "combine_token_ns"), lambda w: (1.0, w.tokens)),
    (OpKind.COMBINE, False): (("dense_ns", "dense_token_ns"), lambda w: (1.0, w.tokens)),
    (OpKind.HEAD, True): (("head_ns", "head_row_ns"), lambda w: (1.0, w.rows)),
}
"""Names of the costs of an op, each with the feature by which it is multiplied."""


def fit(samples: Sequence[Sample], shape: ModelShape) -> tuple[SimCosts, dict[str, FitError]]:
    """Fit the costs of ops. A kind of ops without samples costs nothing."""
    values: dict[str, Any] = dict.fromkeys(asdict(SimCosts()), 0.0)
    for (kind, is_moe), (names, features) in _LINEAR.items():
        chosen = [s for s in samples if s.kind is kind and (s.is_moe == is_moe or kind in _SAME)]
        if chosen:
            found = _centred_fit([features(s.work) for s in chosen], [s.ns for s in chosen])
            values.update(zip(names, found.tolist(), strict=True))
    experts = [s for s in samples if s.kind is OpKind.EXPERTS]
    if experts:
        values.update(_fit_experts(experts, shape))
    costs = SimCosts(**{**values, "overlap": False})
    return costs, {
        kind.name: _error([s for s in samples if s.kind is kind], costs, shape)
        for kind in OpKind
        if any(s.kind is kind for s in samples)
    }


_SAME = (OpKind.EMBED, OpKind.ATTN, OpKind.HEAD)
"""Kinds that cost the same in layers with and without experts."""


def _fit_experts(samples: Sequence[Sample], shape: ModelShape) -> dict[str, float]:
    times = np.array([s.ns for s in samples])
    top_k = shape.experts_per_token
    best, least = {}, float("inf")
    for skew in _SKEWS:
        features = np.array(
            [
                (
                    1.0,
                    expert_coverage(s.work.tokens, shape.num_experts, top_k, skew),
                    s.work.tokens * top_k,
                )
                for s in samples
            ]
        )
        found = _centred_fit(features, times)
        error = float(((features @ found / times - 1) ** 2).sum())
        if error < least:
            names = ("experts_ns", "expert_ns", "expert_token_ns")
            best, least = dict(zip(names, found.tolist(), strict=True)), error
            best["skew"] = skew
    return best


def _error(samples: Sequence[Sample], costs: SimCosts, shape: ModelShape) -> FitError:
    fitted = np.array([costs.of(s.kind, s.work, shape, is_moe=s.is_moe) for s in samples])
    times = np.array([s.ns for s in samples])
    wrong = np.abs(fitted / times - 1) * 100
    return FitError(
        samples=len(samples),
        p50_percent=round(float(np.percentile(wrong, 50)), 1),
        p90_percent=round(float(np.percentile(wrong, 90)), 1),
        total_percent=round(float((fitted.sum() / times.sum() - 1) * 100), 1),
    )


def _fit_gaps(gaps: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Fit the time between runs: a constant, and a part per row."""
    by_rows: dict[int, list[int]] = defaultdict(list)
    for rows, ns in gaps:
        by_rows[rows].append(max(1, ns))
    medians = [(rows, float(np.median(times))) for rows, times in sorted(by_rows.items())]
    found = nonnegative_fit([(1.0, rows) for rows, _ in medians], [ns for _, ns in medians])
    return float(found[0]), float(found[1])


def machine_name() -> str:
    """Return the processor's name and the number of cores that this process sees."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text(encoding="utf-8").splitlines()
        named = (x.split(":", 1)[1].strip() for x in lines if x.startswith("model name"))
        name = next(named, name)
    return f"{name}, {os.cpu_count()} core(s)"


def calibrate(
    model: str,
    *,
    threads: int | None = 1,
    rounds: int = 2,
    loads: Sequence[SimLoad] = LOADS,
    config: EngineConfig | None = None,
    on_load: Callable[[SimLoad], None] | None = None,
) -> CostFile:
    """Run the loads on this machine and fit the costs.

    Args:
        model: "300m" or "1m" of random weights, an alias, a folder or a hub id.
        threads: Number of torch's threads; None leaves torch's choice.
        rounds: Number of counted runs of every load. One more run before them warms up.
        loads: Loads to run.
        config: Settings of the engine that will serve.
        on_load: Callback before every load.

    Raises:
        ConfigError: An alias is unknown.
        ModelError: The model cannot be found, loaded or driven.
    """
    config = with_usual_sizes(config or EngineConfig())
    config.refuse_apart("a calibration")
    where = make_random_moe(size=model) if model in SIZES else model
    loaded = load(where, depth=config.depth)
    measured: list[Measured] = []
    ranks = rank_sizes(loaded.model)  # the runner takes the weights
    with torch_threads(threads):
        runner = cpu_runner(
            loaded.model,
            max_segment_ms=config.max_segment_ms,
            batch_invariant=config.batch_invariant,
            kernels=config.kernels,
            expert_weights=config.expert_weights,
            activations=config.activations,
        )
        probe, others = _Probe(runner, config), Others()
        gc.collect()
        gc.freeze()  # as in an engine's process
        try:
            probe.serve(loads[0])
            for chosen in [*loads] * rounds:
                if on_load is not None:
                    on_load(chosen)
                measured.append(probe.serve(chosen))
        finally:
            gc.unfreeze()
            runner.close()
    found = _cost_file(model, threads, runner, config, measured, others.cores)
    return found.model_copy(update={"ranks": ranks})


def _cost_file(
    model: str,
    threads: int | None,
    runner: TorchRunner,
    config: EngineConfig,
    measured: Sequence[Measured],
    busy_cores: float,
) -> CostFile:
    shape = runner.shape
    costs, errors = fit([s for m in measured for s in m.ops], shape)
    step_ns, step_row_ns = _fit_gaps([gap for m in measured for gap in m.gaps])
    bank = next((bank for bank in runner.backend.compute.banks if bank is not None), None)
    return CostFile(
        model=model,
        machine=machine_name(),
        threads=threads,
        dtype=str(runner.parts.like.dtype).removeprefix("torch."),
        origin="measured",
        note=f"max_segment_ms={config.max_segment_ms:g}, exactness={config.exactness}; other "
        f"processes used {busy_cores:.1f} cores meanwhile",
        shape=FileShape(**shape._asdict()),
        cuts=None if runner.cuts == NO_CUTS else dict(runner.cuts._asdict()),
        costs={
            **asdict(costs),
            "task_ns": TASK_NS if getattr(runner.backend, "polls_inside", False) else 0,
            "step_ns": step_ns,
            "step_row_ns": step_row_ns,
        },
        max_kv_tokens=config.pool_tokens,
        expert_bytes=0 if bank is None else bank.unit_bytes,
        fit=errors,
    )
