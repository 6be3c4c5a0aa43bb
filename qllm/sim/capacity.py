"""How much BE work fits beside LS under its targets, per policy.

Attainment is the part of the LS requests that met both targets; a load is carried if it is at
least 99 %. First BE keeps a backlog that never runs dry: if that is carried, it is the answer.
Otherwise the largest rate of BE requests that is carried is searched by bisection.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

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
"""In a window of default length: fewer would not tell 99 % from 98 %."""
_BACKLOG_PER_SEAT = 2
_BISECTIONS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked.

    Raises:
        ConfigError: A value is out of its range.
    """

    slo: Slo
    """Targets of LS requests."""
    ls_rate: float
    """LS requests per second."""
    workload: str = "S2"
    """The workload that gives lengths and LS arrival pattern."""
    seconds: float | None = None
    """Length of every run; None is long enough for `MIN_LS_REQUESTS`."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.ls_rate < 1e6:
            raise ConfigError(f"ls_rate={self.ls_rate!r} must be a number > 0, per second")
        if self.seconds is not None and not self.seconds > 0:
            raise ConfigError(f"seconds={self.seconds!r} must be > 0")

    @property
    def window_s(self) -> float:
        """Length of every run."""
        return self.seconds or max(60.0, MIN_LS_REQUESTS / self.ls_rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """One load under one policy."""

    be_rate: float | None
    """BE requests per second; None is a backlog that is always full."""
    outcome: Outcome

    @property
    def carried(self) -> bool:
        """Whether LS kept its targets."""
        attainment = self.outcome.attainment
        return attainment is not None and attainment >= ATTAINMENT


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one policy can harvest."""

    label: str
    tried: tuple[Tried, ...]
    """Every load that was tried, lightest first."""

    @property
    def best(self) -> Tried | None:
        """The carried load with the most BE tokens; None if LS misses its targets even alone."""
        carried = [t for t in self.tried if t.carried]
        return max(carried, key=lambda t: t.outcome.be_per_s, default=None)


class _Loads:
    """The requests of a question, the same for every policy."""

    def __init__(self, question: Question, costs: CostFile, config: EngineConfig) -> None:
        found = Workload(
            name=question.workload,
            seconds=question.window_s,
            capacity=costs.capacity(config),
            max_len=min(costs.shape.max_position, config.max_kv_tokens),
        ).scenario
        self._question = question
        self._be: Flow = found.be
        rng = random.Random(f"{question.seed} plan LS")
        times = found.ls.arrivals.times(rng, question.ls_rate, question.window_s)
        self.ls = [_spec(found.ls, rng, Priority.LS, at_s, question.slo) for at_s in times]
        if not self.ls:
            raise ConfigError(
                f"no LS request arrives in {question.window_s:g} s at {question.ls_rate:g}/s; "
                "raise --seconds"
            )

    def jobs(self) -> Iterator[RequestSpec]:
        """BE jobs without end."""
        rng = random.Random(f"{self._question.seed} plan BE")
        while True:
            yield _spec(self._be, rng, Priority.BE, 0.0, Slo())

    def be(self, rate: float) -> list[RequestSpec]:
        """BE jobs at equal distances."""
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

    @property
    def be_tokens(self) -> float:
        """Tokens of a mean BE job."""
        return self._be.prompt.mean + self._be.output.mean


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
        on_try: Called after every run.

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
