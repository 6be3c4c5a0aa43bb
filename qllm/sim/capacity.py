"""The BE work that fits next to LS requests under their targets, per policy.

Attainment is the part of the LS requests that met both targets. A load is carried if attainment is
at least 99 %. The first load is a BE backlog that never ends. If this load is carried, its BE work
is the answer. Otherwise bisection searches the largest rate of BE requests that is carried.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from qllm.config import EngineConfig
from qllm.errors import ConfigError
from qllm.measure.variants import Variant
from qllm.sim.costs import CostFile
from qllm.sim.outcome import Outcome
from qllm.sim.run import Flood, simulate
from qllm.types import Priority, Slo
from qllm.workloads.generators import Flow, Workload
from qllm.workloads.spec import RequestSpec

ATTAINMENT = 0.99
MIN_LS_REQUESTS = 300
"""Least number of LS requests in a window of default length. Fewer requests cannot separate 99 %
from 98 %."""
_BACKLOG_PER_SEAT = 2
_BISECTIONS = 6
_SAME = 1.05
"""Ratio below which two numbers are reported as equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question to the planner.

    Raises:
        ConfigError: A value is out of its range.
    """

    slo: Slo
    """Targets of LS requests."""
    ls_rate: float | None = None
    """LS requests per second; None takes the rate of `requests`."""
    workload: str = "S2"
    """Name of the workload that gives lengths and the LS arrival pattern."""
    requests: tuple[RequestSpec, ...] = ()
    """A trace, used instead of `workload`. Its LS requests keep their arrivals, and its BE requests
    are the backlog."""
    seconds: float | None = None
    """Seconds of every run. None is the trace's length, or enough for `MIN_LS_REQUESTS`."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.ls_rate is None and not self.requests:
            raise ConfigError("give ls_rate, LS requests per second, or requests, a trace")
        if self.ls_rate is not None and not 0 < self.ls_rate < 1e6:
            raise ConfigError(f"ls_rate={self.ls_rate!r} must be a number > 0, per second")
        if self.seconds is not None and not self.seconds > 0:
            raise ConfigError(f"seconds={self.seconds!r} must be > 0")
        for name, count in (("LS", len(self.trace_ls)), ("BE", len(self.trace_be))):
            if self.requests and not count:
                raise ConfigError(
                    f"the trace has no {name} requests; say which of its requests are BE "
                    "(be_share, a part in (0, 1))"
                )

    @property
    def trace_ls(self) -> list[RequestSpec]:
        """Return the LS requests of the trace, with their rate scaled to `ls_rate`."""
        found = [r for r in self.requests if r.priority <= Priority.LS]
        if self.ls_rate is None or not found:
            return found
        scale = len(found) / (self.ls_rate * max(1e-9, found[-1].at_s))
        return [replace(r, at_s=r.at_s * scale) for r in found]

    @property
    def trace_be(self) -> list[RequestSpec]:
        """Return the BE requests of the trace."""
        return [r for r in self.requests if r.priority > Priority.LS]

    @property
    def window_s(self) -> float:
        """Return the seconds of every run."""
        if self.seconds is not None:
            return self.seconds
        if self.requests:
            return max(1.0, self.trace_ls[-1].at_s)
        assert self.ls_rate is not None
        return max(60.0, MIN_LS_REQUESTS / self.ls_rate)

    @property
    def title(self) -> str:
        """Return the question in words."""
        if not self.requests:
            return f"{self.workload} lengths, LS {self.ls_rate:g}/s"
        ls = self.trace_ls
        rate = len(ls) / max(1e-9, ls[-1].at_s)
        return f"a trace of {len(ls)} LS and {len(self.trace_be)} BE requests, LS {rate:.3g}/s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """Result of one load under one policy."""

    be_rate: float | None
    """BE requests per second; None is a backlog that is always full."""
    outcome: Outcome

    @property
    def carried(self) -> bool:
        """Return True if LS met its targets."""
        attainment = self.outcome.attainment
        return attainment is not None and attainment >= ATTAINMENT


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The BE work that one policy can serve."""

    label: str
    tried: tuple[Tried, ...]
    """Loads that were tried, lightest first."""

    @property
    def best(self) -> Tried | None:
        """Return the carried load with the most BE tokens; None if LS alone misses its targets."""
        carried = [t for t in self.tried if t.carried]
        return max(carried, key=lambda t: t.outcome.be_per_s, default=None)

    @property
    def be_per_s(self) -> float:
        """Return the BE tokens per second of the best load; 0 if none is carried."""
        return 0.0 if self.best is None else self.best.outcome.be_per_s


class _Loads:
    """The requests of a question, the same for every policy."""

    def __init__(self, question: Question, costs: CostFile, config: EngineConfig) -> None:
        self._question = question
        if question.requests:
            self._take_trace(question)
        else:
            self._generate(question, costs, config)
        if not self.ls:
            raise ConfigError(
                f"no LS request arrives in {question.window_s:g} s ({question.title}); raise "
                "--seconds"
            )

    def _take_trace(self, question: Question) -> None:
        ls, be = question.trace_ls, question.trace_be
        self.ls = [replace(r, slo=question.slo) for r in ls if r.at_s <= question.window_s]
        jobs = [replace(r, at_s=0.0, slo=Slo()) for r in be]
        self.jobs: Callable[[], Iterator[RequestSpec]] = lambda: itertools.cycle(jobs)
        total = sum(job.num_prompt_tokens + job.max_tokens for job in jobs)
        self.be_tokens = total / len(jobs)

    def _generate(self, question: Question, costs: CostFile, config: EngineConfig) -> None:
        assert question.ls_rate is not None
        found = Workload(
            name=question.workload,
            seconds=question.window_s,
            capacity=costs.capacity(config),
            max_len=costs.model_shape().longest(config.pool_tokens),
        ).scenario
        if found.sessions is not None:
            raise ConfigError(
                f"{question.workload} has sessions, whose turns wait for answers, and a plan is "
                "made for a rate; use `qllm sim`, or a workload without sessions"
            )
        be: Flow = found.be

        def jobs() -> Iterator[RequestSpec]:
            rng = random.Random(f"{question.seed} plan BE")
            while True:
                yield _spec(be, rng, Priority.BE, 0.0, Slo())

        self.jobs = jobs
        """Endless generator of BE jobs."""
        self.be_tokens = be.prompt.mean + be.output.mean
        """Mean number of tokens of a BE job."""
        rng = random.Random(f"{question.seed} plan LS")
        times = found.ls.arrivals.times(rng, question.ls_rate, question.window_s)
        self.ls = [_spec(found.ls, rng, Priority.LS, at_s, question.slo) for at_s in times]

    def be(self, rate: float) -> list[RequestSpec]:
        """Return BE jobs that arrive at equal distances."""
        num = int(rate * self._question.window_s)
        return [
            RequestSpec(
                at_s=(i + 0.5) / rate,
                priority=job.priority,
                num_prompt_tokens=job.num_prompt_tokens,
                max_tokens=job.max_tokens,
            )
            for i, job in enumerate(itertools.islice(self.jobs(), num))
        ]


def _spec(flow: Flow, rng: random.Random, priority: int, at_s: float, slo: Slo) -> RequestSpec:
    return RequestSpec(
        at_s=at_s,
        priority=priority,
        num_prompt_tokens=flow.prompt.at(rng.uniform(0, 100)),
        max_tokens=flow.output.at(rng.uniform(0, 100)),
        slo=slo,
    )


def harvest(
    question: Question,
    costs: CostFile,
    variants: Sequence[Variant],
    config: EngineConfig,
    on_try: Callable[[str, Tried], None] | None = None,
) -> list[Answer]:
    """Answer the question for each policy.

    Args:
        question: Targets and LS load.
        costs: The model and the machine.
        variants: Policies with their settings.
        config: Settings of the engine.
        on_try: Callback after every run.

    Raises:
        ConfigError: The workload is unknown, or nothing would arrive.
    """
    loads = _Loads(question, costs, config)

    def run(variant: Variant, be_rate: float | None) -> Tried:
        flood = None
        if be_rate is None:
            flood = Flood(loads.jobs(), _BACKLOG_PER_SEAT * config.max_num_seqs)
        found = simulate(
            [*loads.ls, *(loads.be(be_rate) if be_rate else ())],
            variant.make(),
            costs,
            config=config,
            seconds=question.window_s,
            flood=flood,
        )
        tried = Tried(be_rate=be_rate, outcome=Outcome.of(found, question.slo))
        if on_try is not None:
            on_try(variant.label, tried)
        return tried

    return [_answer(variant, run, loads.be_tokens) for variant in variants]


def _answer(
    variant: Variant, run: Callable[[Variant, float | None], Tried], be_tokens: float
) -> Answer:
    full = run(variant, None)
    if full.carried:
        return Answer(label=variant.label, tried=(full,))
    alone = run(variant, 0.0)
    tried = [alone]
    if alone.carried:
        low, high = 0.0, full.outcome.be_per_s / be_tokens
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            tried.append(run(variant, middle))
            low, high = (middle, high) if tried[-1].carried else (low, middle)
    tried.sort(key=lambda t: t.be_rate or 0.0)
    return Answer(label=variant.label, tried=(*tried, full))


def why(answers: Sequence[Answer], slo: Slo) -> str:
    """Return a sentence that names the best policy, and what limits the next one."""
    ranked = sorted(answers, key=lambda a: a.be_per_s, reverse=True)
    first, rest = ranked[0], ranked[1:]
    if first.best is None:
        alone = first.tried[0]
        return f"No policy keeps the targets, even without BE: under {first.label} " + _missed(
            alone.outcome, slo
        )
    said = f"{first.label} carries most, {first.be_per_s:,.0f} BE tokens/s"
    if not rest:
        return f"{said}."
    second = rest[0]
    if second.be_per_s >= 0.99 * first.be_per_s:
        return f"{said}, and {second.label} as much: the targets do not tell them apart."
    times = f"{first.be_per_s / second.be_per_s:.2g} times" if second.be_per_s else "more than"
    heavier = next((t for t in second.tried if not t.carried), None)
    if heavier is None:  # this policy meets the targets with a full backlog, and does less work
        less, more = second.tried[-1].outcome, first.best.outcome
        return (
            f"{said}, {times} those of {second.label}, which keeps the targets too. "
            f"{_paid(more, less)} {_pace(first.label, more, second.label, less)}"
        )
    return f"{said}, {times} those of {second.label}: with more BE under that " + _missed(
        heavier.outcome, slo
    )


def _missed(found: Outcome, slo: Slo) -> str:
    """Return a text with the targets that a load missed, and by how much."""
    parts = [
        f"the LS {name} p99 is {at:,.0f} ms (target {target:g})"
        for name, at, target in (
            ("TTFT", found.ls_ttft_p99, slo.ttft_ms),
            ("TPOT", found.ls_tpot_p99, slo.tpot_ms),
        )
        if at is not None and target is not None and at > target
    ]
    met = f"{found.attainment or 0:.1%} of the LS requests meet both targets"
    return f"{' and '.join(parts)}, and {met}." if parts else f"only {met}."


def _paid(more: Outcome, less: Outcome) -> str:
    """Return a text with the price that LS pays, inside its targets, for more BE tokens."""
    parts = [
        f"its {name} is {here:,.0f} ms instead of {there:,.0f}"
        for name, here, there in (
            ("TTFT p50", more.ls_ttft_p50, less.ls_ttft_p50),
            ("TTFT p99", more.ls_ttft_p99, less.ls_ttft_p99),
            ("TPOT p50", more.ls_tpot_p50, less.ls_tpot_p50),
            ("TPOT p99", more.ls_tpot_p99, less.ls_tpot_p99),
        )
        if here is not None and there is not None and here > _SAME * there
    ]
    return f"LS pays for it: {', '.join(parts)}." if parts else "LS pays nothing for it."


def _pace(first: str, more: Outcome, second: str, less: Outcome) -> str:
    """Return a text with the reason why a carried backlog does less work."""
    if more.shared > _SAME * less.shared:
        return (
            f"Under {first} LS and BE share a pass in {more.shared:.0%} of the time, and the "
            f"experts are read once for both; under {second} in {less.shared:.0%}: there prompts "
            f"run in passes of their own, so that LS stops them ({less.preemptions:,} times)."
        )
    if less.preemptions > 2 * more.preemptions:
        return (
            f"Under {second} BE is preempted {less.preemptions:,} times instead of "
            f"{more.preemptions:,}."
        )
    return (
        f"Under {second} BE stands still for up to {less.be_stall_ms:,.0f} ms while LS is served."
    )
