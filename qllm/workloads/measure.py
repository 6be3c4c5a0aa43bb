"""The report of a mixed run, the same for a live engine, a server and the simulator.

Only requests that arrive inside the window count, and only throughput inside the window. (Of
classes behind LS, earlier requests also count, because a backlog is no warm-up.) A request that is
unserved at the end is censored. The wait so far counts as the latency (a lower bound), and the
request meets no target. So a system cannot look better by not answering.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from qllm.record.metrics import class_name
from qllm.record.summary import percentiles
from qllm.types import Priority, Slo
from qllm.workloads.spec import RequestSpec

SLO = Slo(ttft_ms=500.0, tpot_ms=100.0)
"""Default targets of LS: half a second to the first token, then ten tokens per second.

Requests of other classes only have to be answered in full.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The measured part of a run, in seconds since the start of the run."""

    start_s: float
    """End of the warm-up."""
    end_s: float
    """End of the arrivals that count, and of the throughput that counts."""
    stop_s: float
    """Time at which all unserved requests were cancelled."""

    @property
    def seconds(self) -> float:
        """Return the seconds of the window, the denominator of rates."""
        return self.end_s - self.start_s

    def counts(self, request: RequestSpec) -> bool:
        """Return True if a request counts in the window's results."""
        start_s = self.start_s if request.priority <= Priority.LS else 0.0
        return start_s <= request.at_s < self.end_s

    def part(self, start_s: float, end_s: float) -> float:
        """Return the part of an interval that lies in the window, in [0, 1]."""
        inside = min(end_s, self.end_s) - max(start_s, self.start_s)
        return max(0.0, inside) / (end_s - start_s) if end_s > start_s else 0.0


@dataclass(slots=True, kw_only=True)
class Served:
    """The result of one request. Times are in seconds since the start of the run."""

    spec: RequestSpec
    token_s: list[float] = field(default_factory=list)
    """Time of each token, or of each chunk of a stream."""
    num_tokens: int | None = None
    """Number of output tokens, if a chunk may hold several; None if each chunk is one token."""
    done: bool = False
    """True if the request produced all of its tokens."""
    error: str | None = None
    sent_s: float | None = None
    token_ids: list[int] = field(default_factory=list)
    """Ids of the output tokens, if the client asked for them."""
    num_cached: int | None = None
    """Number of prompt tokens that the server had in its cache; None if the server did not report
    it.
    """

    @property
    def num_output_tokens(self) -> int:
        """Return the number of output tokens so far."""
        return len(self.token_s) if self.num_tokens is None else self.num_tokens

    def ttft_ms(self, stop_s: float) -> float:
        """Return the time from due to the first token; without a token, the wait until `stop_s`."""
        first = self.token_s[0] if self.token_s else stop_s
        return (first - self.spec.at_s) * 1000

    def e2e_ms(self, stop_s: float) -> float:
        """Return the time from due to the last token; for an unfinished request, until `stop_s`."""
        last = self.token_s[-1] if self.done and self.token_s else stop_s
        return (last - self.spec.at_s) * 1000

    @property
    def tpot_ms(self) -> float | None:
        """Return the mean gap between tokens; None if there is only one token."""
        if self.num_output_tokens < 2 or len(self.token_s) < 2:
            return None
        return (self.token_s[-1] - self.token_s[0]) * 1000 / (self.num_output_tokens - 1)

    def meets(self, slo: Slo) -> bool:
        """Return True if the request was answered in full and on time."""
        if not self.done or not self.token_s:
            return False
        tpot = self.tpot_ms
        in_time = slo.ttft_ms is None or self.ttft_ms(0.0) <= slo.ttft_ms
        return in_time and (slo.tpot_ms is None or tpot is None or tpot <= slo.tpot_ms)


def distribution(values: Sequence[float]) -> dict[str, float] | None:
    """Return mean, p50, p90, p99 and max; None without values."""
    if not values:
        return None
    out = {"n": float(len(values)), "mean": sum(values) / len(values)}
    return out | percentiles(values) | {"max": max(values)}


def class_report(served: Sequence[Served], window: Window, slo: Slo) -> dict[str, Any]:
    """Return the numbers of one class."""
    counted = [s for s in served if window.counts(s.spec)]
    stop_s = window.stop_s
    gaps = [(b - a) * 1000 for s in counted for a, b in pairwise(s.token_s)]
    met = sum(s.meets(slo) for s in counted)
    tokens = 0.0
    for s in served:
        inside = sum(window.start_s <= t < window.end_s for t in s.token_s)
        tokens += inside * (s.num_output_tokens / len(s.token_s) if s.token_s else 0)
    return {
        "arrived": len(counted),
        "finished": sum(s.done for s in counted),
        "no_first_token": sum(not s.token_s for s in counted),
        "errors": sum(s.error is not None for s in counted),
        "ttft_ms": distribution([s.ttft_ms(stop_s) for s in counted]),
        "tbt_ms": distribution(gaps),
        "tpot_ms": distribution([t for s in counted if (t := s.tpot_ms) is not None]),
        "e2e_ms": distribution([s.e2e_ms(stop_s) for s in counted]),
        "slo": slo._asdict(),
        "slo_attainment": met / len(counted) if counted else None,
        "goodput_per_s": met / window.seconds,
        "output_tokens_per_s": tokens / window.seconds,
        "prefill_tokens_per_s": sum(
            s.spec.num_prompt_tokens
            for s in served
            if s.token_s and window.start_s <= s.token_s[0] < window.end_s
        )
        / window.seconds,
        "late_ms": distribution([(s.sent_s - s.spec.at_s) * 1000 for s in counted if s.sent_s]),
    }


def report(
    served: Iterable[Served], window: Window, slos: Mapping[int, Slo] | None = None
) -> dict[str, Any]:
    """Return the numbers of every class, by name. `prefill` counts prompts with a first token."""
    by_class: dict[int, list[Served]] = {}
    for s in served:
        by_class.setdefault(s.spec.priority, []).append(s)
    slos = {Priority.LS: SLO} if slos is None else slos
    return {
        class_name(p): class_report(of_class, window, slos.get(p, Slo()))
        for p, of_class in sorted(by_class.items())
    }
