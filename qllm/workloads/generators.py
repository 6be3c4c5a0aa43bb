"""Named workloads S1 to S15: seeded, scaled to the machine, the same for every policy.

A name fixes the kind of requests and the pattern of arrivals. `Capacity` fixes the amount. A load
of 0.4 is 40 % of the requests that the machine could complete without other work. A rate is
nominal: the draw of one seed has another rate. So results print `offered_rates` next to
`nominal_rates`.
"""

import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

from qllm.errors import ConfigError
from qllm.types import Priority, Slo
from qllm.workloads import lengths as tables
from qllm.workloads.arrivals import Arrivals, Bursts, Even, Gamma, Modulated
from qllm.workloads.capacity import REFERENCE, Capacity
from qllm.workloads.lengths import Lengths, between
from qllm.workloads.retrieval import ANNS, CRAWLER, Retrieval
from qllm.workloads.sessions import AGENTS, Sessions
from qllm.workloads.spec import RequestSpec, Turn

POISSON = Gamma()
CLASSES = tuple(Priority.__members__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """The requests of one class: lengths, and pattern of arrivals."""

    prompt: Lengths
    output: Lengths
    arrivals: Arrivals = POISSON

    def fitted(self, scale: float, max_len: int | None) -> "Flow":
        """Return the flow with lengths times `scale`.

        If the longest exceed `max_len`, all shrink by one more factor.
        """
        longest = scale * (self.prompt.longest + self.output.longest)
        if max_len is not None and longest > max_len - 2:  # both lengths are rounded
            scale *= (max_len - 2) / longest
        if scale == 1:
            return self
        return replace(self, prompt=self.prompt.scaled(scale), output=self.output.scaled(scale))

    def per_s(self, capacity: Capacity) -> float:
        """Return the number of requests of this class that the machine completes per second."""
        return capacity.requests_per_s(self.prompt.mean, self.output.mean)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """BE jobs that wait from the start, and a flow that adds more."""

    jobs: int = 0
    seats: float = 0.0
    """Further jobs per seat of the machine."""
    kv: float = 0.0
    """Further jobs, until all jobs together need this multiple of the KV pool."""
    flow: float = 0.0
    """Rate of later jobs, divided by the machine's capacity. Above 1 the backlog never becomes
    empty.
    """

    def burst(self, be: Flow, capacity: Capacity) -> int:
        """Return the number of jobs at time zero."""
        by_kv = self.kv * capacity.max_kv_tokens / (be.prompt.mean + be.output.mean)
        return self.jobs + ceil(self.seats * capacity.max_num_seqs) + ceil(by_kv)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The requests of a named workload, without a scale."""

    what: str
    ls: Flow
    be: Flow
    load: float
    """LS rate divided by LS capacity. With `ls_share`, the load of both classes together."""
    ls_share: float | None = None
    """Part of the requests that is LS, if both classes have one pattern; None if BE is a backlog.
    """
    backlog: Backlog = field(default_factory=Backlog)
    retrieval: Retrieval | None = None
    """Pieces of LS prompts; None if LS prompts arrive whole."""
    sessions: Sessions | None = None
    """LS requests as turns of sessions, or None.

    Then `ls` has the lengths of a turn: the tokens that it adds to a cached prompt, and the answer.
    A constant number of agents have sessions one after the other.
    """


_SHAREGPT = Flow(prompt=tables.SHAREGPT_PROMPT, output=tables.SHAREGPT_OUTPUT)
_CONV = Flow(prompt=tables.AZURE_CONV_PROMPT, output=tables.AZURE_CONV_OUTPUT)
_CODE = Flow(prompt=tables.AZURE_CODE_PROMPT, output=tables.AZURE_CODE_OUTPUT)
_BATCH = Flow(prompt=between(2048, 8192), output=between(256, 1024), arrivals=Even())
_SUMMARIES = Flow(prompt=between(8192, 32768), output=between(128, 128), arrivals=Even())
_WRITERS = Flow(prompt=between(32, 128), output=between(256, 1024), arrivals=Even())
_CHAT = Flow(prompt=between(64, 256), output=between(32, 64))
_FULL = Backlog(seats=1.0, flow=1.1)

SCENARIOS: dict[str, Scenario] = {
    "S1": Scenario(
        what="QLLM's own mix: ShareGPT lengths, Poisson, 20 % LS",
        ls=_SHAREGPT,
        be=_SHAREGPT,
        load=0.9,
        ls_share=0.2,
    ),
    "S2": Scenario(
        what="chat over an endless batch of long documents",
        ls=replace(_CONV, arrivals=Gamma(cv=2.0)),
        be=_BATCH,
        load=0.4,
        backlog=_FULL,
    ),
    "S3": Scenario(
        what="code completion over summaries of very long documents, the rate changes by minutes",
        ls=replace(_CODE, arrivals=Modulated()),
        be=_SUMMARIES,
        load=0.4,
        backlog=_FULL,
    ),
    "S4": Scenario(
        what="one LS request at a time over a full batch of BE decodes",
        ls=replace(_CHAT, arrivals=Even()),
        be=_WRITERS,
        load=0.1,
        backlog=Backlog(seats=1.0, flow=1.1),
    ),
    "S5": Scenario(
        what="BE holds every seat, KV is free",
        ls=_CHAT,
        be=_WRITERS,
        load=0.3,
        backlog=Backlog(seats=2.0, flow=1.1),
    ),
    "S6": Scenario(
        what="BE fills the KV pool and outgrows it, so that requests are evicted",
        ls=_CHAT,
        be=Flow(prompt=between(512, 2048), output=between(512, 2048), arrivals=Even()),
        load=0.3,
        backlog=Backlog(kv=1.5, flow=1.1),
    ),
    "S7": Scenario(
        what="more LS than the machine can serve, 64 BE jobs must not starve",
        ls=_SHAREGPT,
        be=replace(_SHAREGPT, arrivals=Even()),
        load=1.2,
        backlog=Backlog(jobs=64),
    ),
    "S8": Scenario(
        what="the LS share swept, both classes alike",
        ls=_SHAREGPT,
        be=_SHAREGPT,
        load=0.9,
        ls_share=0.4,
    ),
    "S9": Scenario(
        what="one class alone: set ls_share to 0 or 1",
        ls=_SHAREGPT,
        be=_SHAREGPT,
        load=0.9,
        ls_share=0.0,
    ),
    "S10": Scenario(
        what="S2's arrivals for an engine whose routing is forced (bench/policies/routing.py)",
        ls=replace(_CONV, arrivals=Gamma(cv=2.0)),
        be=_BATCH,
        load=0.4,
        backlog=_FULL,
    ),
    "S11": Scenario(
        what="every minute ten seconds of five times the LS rate, over a batch",
        ls=replace(_CONV, arrivals=Bursts()),
        be=_BATCH,
        load=0.4,
        backlog=_FULL,
    ),
    "S12": Scenario(
        what="a short mix whose answers are compared with solo runs",
        ls=_CHAT,
        be=Flow(prompt=between(256, 1024), output=between(32, 128), arrivals=Even()),
        load=0.4,
        backlog=Backlog(jobs=8, flow=0.5),
    ),
    "S13": Scenario(
        what="answers from pages that a crawler fetches meanwhile, each appended (Stream2LLM)",
        ls=Flow(prompt=tables.lognormal(9100, 0.5), output=between(16, 64)),
        be=_BATCH,
        load=0.5,
        retrieval=CRAWLER,
    ),
    "S14": Scenario(
        what="answers from nearest neighbours, replaced as better ones are found (Stream2LLM)",
        ls=Flow(prompt=tables.lognormal(13_000, 0.3), output=between(16, 64)),
        be=_BATCH,
        load=0.5,
        retrieval=ANNS,
    ),
    "S15": Scenario(
        what="agents with tools and subagents, over an endless batch of long prompts",
        ls=Flow(prompt=AGENTS.result, output=AGENTS.answer),
        be=Flow(prompt=between(8000, 30_000), output=between(128, 512), arrivals=Even()),
        load=0.4,
        backlog=Backlog(jobs=4, flow=0.7),
        sessions=AGENTS,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A named workload with a scale. `requests(seed)` draws one instance.

    Raises:
        ConfigError: The name is unknown (the message lists the known names), or a value is out of
            range or has no meaning in this workload.
    """

    name: str
    seconds: float = 60.0
    capacity: Capacity = REFERENCE
    load: float | None = None
    """Load instead of the scenario's load. It may exceed 1."""
    ls_share: float | None = None
    """Part of LS requests instead of the scenario's `ls_share`, if the scenario has one."""
    cv: float | None = None
    """Coefficient of variation of the gaps between LS arrivals, if these are a Gamma process."""
    length_scale: float = 1.0
    """Factor on all lengths."""
    ls_scale: float = 1.0
    """Further factor on LS lengths. A slow machine completes enough LS requests only if they are
    short.
    """
    max_len: int | None = None
    """Most tokens of prompt and output together. A class with longer requests shrinks.

    All lengths shrink in proportion. No length is clipped.
    """
    ls_slo: Slo = field(default_factory=Slo)
    retrieval_scale: float = 1.0
    """Factor on the time in which streaming prompts arrive."""
    wait_scale: float = 1.0
    """Factor on the time that tools of agents take."""
    subagents: str = "BE"
    """Class of the subagents' turns, "BE" or "LS", if there are agents."""

    def __post_init__(self) -> None:
        if self.name not in SCENARIOS:
            raise ConfigError(f"unknown workload {self.name!r}; known: {', '.join(SCENARIOS)}")
        base = SCENARIOS[self.name]
        share = self.ls_share
        if share is not None and (base.ls_share is None or not 0 <= share <= 1):
            raise ConfigError(f"ls_share={share!r} must be in [0, 1], and only S1, S8, S9 take it")
        if self.cv is not None:
            Gamma(cv=self.cv)
            if not isinstance(base.ls.arrivals, Gamma):
                raise ConfigError(f"cv={self.cv!r}: the LS arrivals of {self.name} are not Gamma")
        if self.subagents not in CLASSES:
            raise ConfigError(f"subagents={self.subagents!r} must be one of {', '.join(CLASSES)}")
        if base.sessions is None and (self.subagents, self.wait_scale) != ("BE", 1.0):
            raise ConfigError(
                f"subagents={self.subagents!r} and wait_scale={self.wait_scale!r} are for agents, "
                "and only S15 has some"
            )
        for name in (
            "seconds",
            "load",
            "length_scale",
            "ls_scale",
            "retrieval_scale",
            "wait_scale",
        ):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name}={value!r} must be > 0")
        if self.max_len is not None and self.max_len < 16:
            raise ConfigError(f"max_len={self.max_len!r} must be at least 16")

    @property
    def what(self) -> str:
        """Return the workload in words.

        With agents, this includes the factor on published lengths.
        """
        found = self.scenario
        if found.sessions is None:
            return found.what
        shrunk = f"their published lengths times {self.session_scale:.3g}"
        return f"{found.what}; {self.num_agents()} agents, {shrunk}"

    @property
    def scenario(self) -> Scenario:
        """Return the scenario with this workload's changes."""
        base = SCENARIOS[self.name]
        ls = base.ls.fitted(self.length_scale * self.ls_scale, self.max_len)
        sessions = base.sessions
        if sessions is not None:
            sessions = sessions.scaled(self.session_scale, self.wait_scale)
            ls = Flow(prompt=sessions.result, output=sessions.answer)
        return replace(
            base,
            ls=ls if self.cv is None else replace(ls, arrivals=Gamma(cv=self.cv)),
            sessions=sessions,
            be=base.be.fitted(self.length_scale, self.max_len),
            load=base.load if self.load is None else self.load,
            ls_share=base.ls_share if self.ls_share is None else self.ls_share,
        )

    @property
    def session_scale(self) -> float:
        """Factor on the published lengths of sessions. `max_len` bounds the longest context."""
        scale = self.length_scale * self.ls_scale
        return scale if self.max_len is None else min(scale, self.max_len / AGENTS.context)

    def num_agents(self) -> int:
        """Return the number of agents that together cause the load of a scenario with sessions."""
        found = self.scenario
        assert found.sessions is not None
        per_s = found.ls.per_s(self.capacity)
        turn_s = found.sessions.wait_ms.mean / 1000 + 1 / per_s
        return max(1, round(found.load * per_s * turn_s))

    def nominal_rates(self) -> dict[Priority, float]:
        """Return the nominal requests per second by class, without a burst at the start."""
        found = self.scenario
        ls_per_s, be_per_s = found.ls.per_s(self.capacity), found.be.per_s(self.capacity)
        share = found.ls_share
        if share is None:
            return {
                Priority.LS: found.load * ls_per_s,
                Priority.BE: found.backlog.flow * be_per_s,
            }
        both = found.load / (share / ls_per_s + (1 - share) / be_per_s)
        return {Priority.LS: share * both, Priority.BE: (1 - share) * both}

    def requests(self, seed: int) -> list[RequestSpec]:
        """Return the requests of one seed, in order of arrival.

        Each class has its own random numbers. So LS is the same with and without BE. In the list,
        the turns of a session follow each other.
        """
        found, rates = self.scenario, self.nominal_rates()
        out: list[RequestSpec] = []
        burst = 0 if found.ls_share is not None else found.backlog.burst(found.be, self.capacity)
        for priority, flow, num in ((Priority.LS, found.ls, 0), (Priority.BE, found.be, burst)):
            if priority is Priority.LS and found.sessions is not None:
                out += self._turns(found.sessions, seed)
                continue
            times = random.Random(f"{seed} {self.name} {priority.name} times")
            sizes = random.Random(f"{seed} {self.name} {priority.name} sizes")
            at = [0.0] * num + flow.arrivals.times(times, rates[priority], self.seconds)
            out += [
                RequestSpec(
                    at_s=at_s,
                    priority=priority,
                    num_prompt_tokens=flow.prompt.at(sizes.uniform(0, 100)),
                    max_tokens=flow.output.at(sizes.uniform(0, 100)),
                    name=f"{priority.name.lower()}-{i}",
                    slo=self.ls_slo if priority is Priority.LS else Slo(),
                )
                for i, at_s in enumerate(at)
            ]
        if found.retrieval is not None:
            rng = random.Random(f"{seed} {self.name} pieces")
            come = found.retrieval.scaled(self.retrieval_scale)
            out = [come.cut(r, rng) if r.priority == Priority.LS else r for r in out]
        return sorted(out, key=lambda r: r.at_s)

    def _turns(self, sessions: Sessions, seed: int) -> Iterator[RequestSpec]:
        """Yield the turns of every agent.

        An agent has one session after the other, for `seconds` or more.
        """
        for agent in range(self.num_agents()):
            rng = random.Random(f"{seed} {self.name} agent {agent}")
            at_s, first = rng.uniform(0, 2 * sessions.wait_ms.mean / 1000), None
            for number in itertools.count():
                session = sessions.session(
                    f"ls-{agent}.{number}",
                    rng,
                    at_s=at_s,
                    first=first,
                    subagents=Priority[self.subagents],
                )
                yield from (replace(r, slo=self._slo(r)) for r in session)
                wait_s = sessions.wait_ms.at(rng.uniform(0, 100)) / 1000
                first = Turn(session[-1].name, wait_s)
                at_s += wait_s + sum(r.follows.wait_s for r in session[1:] if r.follows)
                if at_s >= self.seconds:
                    break

    def _slo(self, request: RequestSpec) -> Slo:
        return self.ls_slo if request.priority <= Priority.LS else Slo()


def named_workload(
    name: str,
    *,
    seed: int = 0,
    seconds: float = 60.0,
    capacity: Capacity | None = None,
    **scale: Any,
) -> list[RequestSpec]:
    """Return the requests of a named workload.

    Args:
        name: Key of `SCENARIOS`.
        seed: Seed of every draw.
        seconds: Length of the workload.
        capacity: Capacity of the machine; None takes `REFERENCE`.
        **scale: Further fields of `Workload`.

    Raises:
        ConfigError: The name or a value is refused, as in `Workload`.
    """
    workload = Workload(name=name, seconds=seconds, capacity=capacity or REFERENCE, **scale)
    return workload.requests(seed)


def offered_rates(requests: Iterable[RequestSpec], seconds: float) -> dict[int, float]:
    """Return the arrivals per second in (0, seconds), by class.

    Bursts at 0 do not count. Requests whose arrival depends on the end of another do not count.
    """
    counts: dict[int, int] = {}

    def is_counted(r: RequestSpec) -> bool:
        return 0 < r.at_s < seconds and r.follows is None

    for r in requests:
        counts[r.priority] = counts.get(r.priority, 0) + is_counted(r)
    return {priority: count / seconds for priority, count in sorted(counts.items())}
