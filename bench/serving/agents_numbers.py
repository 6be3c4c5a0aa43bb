"""Numbers of agents next to a batch: latencies, prefixes found, rate of the batch, equality."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from bench.energy import Run as EnergyRun
from qllm.types import Priority
from qllm.workloads.measure import Served
from qllm.workloads.spec import Arrival, Turn

Answers = Mapping[str, Sequence[int]]
"""Token ids of answers by name."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a trace against one server."""

    agents: Sequence[Served]
    """Turns of agents and subagents."""
    batch: Sequence[Served] = ()
    took_s: float = 0.0
    other_cores: float = 0.0
    """Cores that processes of others used meanwhile."""
    server: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the server at the end."""
    energy: Sequence[EnergyRun] = ()
    """Energy of the run."""

    @property
    def ls(self) -> list[Served]:
        """The turns that people wait for, with an answer."""
        return [s for s in self.agents if s.spec.priority <= Priority.LS and s.token_s]

    @property
    def ttft_ms(self) -> list[float]:
        """Times to first token of the LS turns."""
        return [s.ttft_ms(0.0) for s in self.ls]

    @property
    def tpot_ms(self) -> list[float]:
        """Mean gaps between the tokens of each LS turn."""
        return [tpot for s in self.ls if (tpot := s.tpot_ms) is not None]

    @property
    def errors(self) -> list[str]:
        """Different errors of requests, at most three."""
        return sorted({s.error for s in (*self.agents, *self.batch) if s.error})[:3]

    @property
    def answers(self) -> dict[str, Sequence[int]]:
        """Answers, whole or cut off at the end of the run."""
        return {s.spec.name: s.token_ids for s in (*self.agents, *self.batch) if s.token_ids}

    def lost(self, asked: int) -> int:
        """Return how many answers of agents and batch ended in an error or never came.

        Args:
            asked: Number of turns in the trace; a turn behind a lost one is lost too.
        """
        failed = sum(s.error is not None for s in self.batch)
        return asked - sum(s.done for s in self.agents) + failed


def prefix_share(turns: Iterable[Served]) -> float:
    """Return the part of the prompts' tokens that the server had in its cache."""
    turns = list(turns)
    cached = sum(s.num_cached or 0 for s in turns)
    return cached / sum(s.spec.num_prompt_tokens for s in turns)


def batch_rate(batch: Iterable[Served]) -> float | None:
    """Return the tokens per second of a batch, prompts and answers.

    It is measured from its first first token to its last one: then no prompt is half done. It is
    None if fewer than two prompts had a first token.
    """
    batch = [s for s in batch if s.token_s]
    firsts = sorted((s.token_s[0], s.spec.num_prompt_tokens) for s in batch)
    if len(firsts) < 2:
        return None
    begin, end = firsts[0][0], firsts[-1][0]
    tokens = sum(begin < at <= end for s in batch for at in s.token_s)
    return (sum(num for _, num in firsts[1:]) + tokens) / (end - begin)


def mean_rate(runs: Iterable[Run]) -> float | None:
    """Return the mean of the batch's rates over rounds; None if a round has no rate."""
    rates = [batch_rate(run.batch) for run in runs]
    known = [rate for rate in rates if rate is not None]
    return sum(known) / len(known) if known and len(known) == len(rates) else None


def in_turn(arrivals: Iterable[Arrival]) -> list[Arrival]:
    """Return the same requests one after the other, each alone on its server."""
    out: list[Arrival] = []
    for arrival in arrivals:
        follows = None
        if out:
            extends = "" if arrival.follows is None else arrival.follows.extends
            follows = Turn(out[-1].name, 0.0, extends)
        out.append(replace(arrival, at_s=0.0, follows=follows))
    return out


def different(answers: Answers, solo: Answers) -> list[str]:
    """Return the names of answers, whole or cut off, that do not begin as the solo run's.

    Raises:
        KeyError: An answer has no solo run.
    """
    return [name for name, ids in answers.items() if list(solo[name][: len(ids)]) != list(ids)]
