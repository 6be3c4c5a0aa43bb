"""LAPS (PLA-Serve): short and long prompts wait in separate queues and never share a step.

The length of a prompt is what is left to compute. So a later round of a chat is short if the prefix
cache has the earlier rounds. A prompt is short if reading weights takes longer than computing its
tokens (`boundary`). A long prompt stays long to its end.

Short prompts are gathered for a time window, and then run together. The window ends early if the
batch is full, if a prompt would miss its target, or if the next short prompt is not worth the wait
(`_window_end_ns`). Long prompts run one at a time, in chunks. Decodes, in an engine that has both
phases, alternate with the long prompts.

Source: LAPS, first PLA-Serve, arXiv:2601.11589, and its released code (a fixed window and
boundary). Differences: no padding to captured graphs. In the authors' own measurement of a 32B
model, the captured prefills alone gave 40,975 tokens/s, and all of LAPS 40,938; a CPU captures no
graphs. The window adapts to the time between arrivals, not to the depth of captured graphs. After a
short batch, a decode step or a long chunk goes before the next short batch (the released code
starves long prompts behind a stream of short prompts). Classes come first in each queue.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from qllm.plan import Plan
from qllm.policy import NO_DEADLINE, CostTable, RequestView, StepReport, View
from qllm.types import NS_PER_MS, Cap, RequestId

from .parts import age, check_at_least, fill


class Kind(enum.Enum):
    """The kind of rows in a step."""

    SHORT = "short"
    LONG = "long"
    DECODE = "decode"


def boundary(costs: CostTable) -> int:
    """Return the most tokens of a prompt that takes more time to read weights than to compute.

    A step of n tokens takes `costs.decode(n)`. Of this, computing takes n times the time of a
    prefill token, and reading weights takes the rest. The result is at least 1.
    """
    found = 1
    for exponent, step_ns in enumerate(costs.decode_ns):
        tokens = step_ns // max(1, 2 * costs.prefill_token_ns)
        if tokens < 1 << exponent:
            break
        found = tokens if exponent + 1 == len(costs.decode_ns) else min(tokens, 2 << exponent)
    return found


@dataclass(kw_only=True)
class Laps:
    """Short prompts wait together for a time window, and long ones are cut into chunks."""

    needs = Cap.NONE

    short_tokens: int | None = None
    """Most tokens of a short prompt that are left to compute; None follows the engine's costs."""
    window_ms: int = 7
    """Longest time in ms that the first short prompt waits for others."""
    max_batch: int = 64
    """Most short prompts per step."""
    margin_ms: int = 4
    """Milliseconds by which a batch starts before a target would be missed."""
    chunk_tokens: int = 512
    """Most tokens of a long prompt per step."""

    def __post_init__(self) -> None:
        check_at_least(self, window_ms=0, max_batch=1, margin_ms=0, chunk_tokens=1)
        if self.short_tokens is not None:
            check_at_least(self, short_tokens=1)
        self._last = self._last_other = Kind.LONG
        self._begun: set[RequestId] = set()  # long prompts, from their first chunk on
        self._short_ns: int | None = None  # start of the last step of short prompts

    def plan(self, view: View) -> Plan:
        """Return a step of one kind, or wait for more short prompts."""
        if view.frames:
            return Plan(rows=view.frames[0].rows)
        queues = self._queues(view)
        short = queues[Kind.SHORT]
        due_ns = self._due_ns(view, short)
        for kind in self._turns():
            if kind is not Kind.SHORT:
                rows = fill(view, queues[kind], self.chunk_tokens)
            elif due_ns <= view.now_ns or len(short) >= self.max_batch:
                rows = fill(view, short[: self.max_batch])
            else:
                continue
            if rows:
                return Plan(rows=rows)
        if short and due_ns > view.now_ns and len(short) == len(view.requests):
            return Plan(wait_until_ns=due_ns)
        return Plan(rows=fill(view, sorted(view.requests, key=age))[:1])

    def _queues(self, view: View) -> dict[Kind, Sequence[RequestView]]:
        queues: dict[Kind, list[RequestView]] = {kind: [] for kind in Kind}
        most = self._most_short(view)
        for r in sorted(view.requests, key=age):
            is_short = r.num_uncomputed_tokens <= most and r.request_id not in self._begun
            kind = Kind.SHORT if is_short else Kind.LONG
            queues[Kind.DECODE if r.is_decoding else kind].append(r)
        longs = sorted(queues[Kind.LONG], key=lambda r: (r.priority, not r.is_admitted))
        return {**queues, Kind.LONG: longs[:1]}

    def _most_short(self, view: View) -> int:
        return self.short_tokens or boundary(view.costs)

    def _turns(self) -> tuple[Kind, ...]:
        """Return short prompts first, unless they had the last step. The other kinds alternate."""
        others = (Kind.DECODE, Kind.LONG)
        if self._last_other is Kind.DECODE:
            others = (Kind.LONG, Kind.DECODE)
        return (*others, Kind.SHORT) if self._last is Kind.SHORT else (Kind.SHORT, *others)

    def _due_ns(self, view: View, short: Sequence[RequestView]) -> int:
        """Return the start of the short batch: the end of the window, or earlier."""
        if not short:
            return view.now_ns
        lead_ns = view.costs.step(0, sum(r.num_uncomputed_tokens for r in short))
        lead_ns += self.margin_ms * NS_PER_MS
        ends = [r.deadline_ns - lead_ns for r in short if r.deadline_ns is not None]
        return min(self._window_end_ns(view, [r.arrival_ns for r in short]), *ends, NO_DEADLINE)

    def _window_end_ns(self, view: View, arrivals_ns: Sequence[int]) -> int:
        """Return the time until which the next short prompt is worth the wait.

        The prompts of the queue arrived since the last step of short prompts began, or since the
        first of them. The next one is expected after the mean time between them. All wait for it,
        and it then shares one reading of the weights.
        """
        first_ns, newest_ns, num = min(arrivals_ns), max(arrivals_ns), len(arrivals_ns) - 1
        end_ns = first_ns + self.window_ms * NS_PER_MS
        if self._short_ns is not None and self._short_ns <= first_ns:
            first_ns, num = self._short_ns, num + 1
        if num == 0:
            return end_ns  # no time between arrivals is known
        gap_ns = (newest_ns - first_ns) // num
        saved_ns = boundary(view.costs) * view.costs.prefill_token_ns
        is_worth = newest_ns + gap_ns <= end_ns and len(arrivals_ns) * gap_ns <= saved_ns
        return newest_ns + gap_ns if is_worth else newest_ns

    def on_step_done(self, view: View, report: StepReport) -> None:
        """Record the kind of the last step."""
        row = report.rows[0]
        self._begun &= view.by_id.keys()
        request = view.by_id.get(row.request_id)
        if request is None:
            return
        num_left = max(request.num_prompt_tokens, row.hi) - row.lo
        if row.lo >= request.num_prompt_tokens:
            self._last = Kind.DECODE
        elif num_left <= self._most_short(view) and request.request_id not in self._begun:
            self._last, self._short_ns = Kind.SHORT, report.start_ns
        else:
            self._last = Kind.LONG
            self._begun.add(request.request_id)
        if self._last is not Kind.SHORT:
            self._last_other = self._last
