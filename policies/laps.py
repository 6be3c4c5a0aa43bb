"""LAPS (PLA-Serve): short and long prompts wait in separate queues and never share a step.

Short prompts are gathered for `window_ms`, and then run together. They run earlier if they fill a
batch, or if one of them would miss its target. Long prompts run one at a time, in chunks. Decodes,
in an engine that has both phases, alternate with the long prompts.

Source: LAPS, first PLA-Serve, arXiv:2601.11589, and its released code (a fixed window and
boundary). Differences: no padding to captured graphs, which gave most of the measured gain there (a
CPU has no captured graphs); after a short batch, a decode step or a long chunk goes before the next
short batch (the released code starves long prompts behind a stream of short prompts); the length of
a whole prompt counts, with tokens in the prefix cache; classes come first in each queue.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from qllm.plan import Plan
from qllm.policy import RequestView, StepReport, View
from qllm.types import NS_PER_MS, Cap

from .parts import age, check_at_least, fill


class Kind(enum.Enum):
    """The kind of rows in a step."""

    SHORT = "short"
    LONG = "long"
    DECODE = "decode"


@dataclass(kw_only=True)
class Laps:
    """Short prompts wait together for a time window, and long ones are cut into chunks."""

    needs = Cap.NONE

    short_tokens: int = 256
    """Most tokens of a short prompt."""
    window_ms: int = 7
    """Longest time in ms that the first short prompt waits for others."""
    max_batch: int = 64
    """Most short prompts per step."""
    margin_ms: int = 4
    """Milliseconds by which a batch starts before a target would be missed."""
    chunk_tokens: int = 512
    """Most tokens of a long prompt per step."""

    def __post_init__(self) -> None:
        check_at_least(self, short_tokens=1, window_ms=0, max_batch=1, margin_ms=0, chunk_tokens=1)
        self._last = self._last_other = Kind.LONG

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
        for r in sorted(view.requests, key=age):
            queues[Kind.DECODE if r.is_decoding else self._prompt_kind(r)].append(r)
        longs = sorted(queues[Kind.LONG], key=lambda r: (r.priority, not r.is_admitted))
        return {**queues, Kind.LONG: longs[:1]}

    def _prompt_kind(self, request: RequestView) -> Kind:
        return Kind.SHORT if request.num_prompt_tokens <= self.short_tokens else Kind.LONG

    def _turns(self) -> tuple[Kind, ...]:
        """Return short prompts first, unless they had the last step. The other kinds alternate."""
        others = (Kind.DECODE, Kind.LONG)
        if self._last_other is Kind.DECODE:
            others = (Kind.LONG, Kind.DECODE)
        return (*others, Kind.SHORT) if self._last is Kind.SHORT else (Kind.SHORT, *others)

    def _due_ns(self, view: View, short: Sequence[RequestView]) -> int:
        """Return the start of the short batch: the end of the window, or earlier for a target."""
        lead_ns = view.costs.step(0, sum(r.num_uncomputed_tokens for r in short))
        lead_ns += self.margin_ms * NS_PER_MS
        ends = [r.arrival_ns + self.window_ms * NS_PER_MS for r in short]
        ends += [r.deadline_ns - lead_ns for r in short if r.deadline_ns is not None]
        return min(ends, default=view.now_ns)

    def on_step_done(self, view: View, report: StepReport) -> None:
        """Record the kind of the last step."""
        request = view.by_id.get(report.rows[0].request_id)
        if request is None:
            return
        is_decode = report.rows[0].lo >= request.num_prompt_tokens
        self._last = Kind.DECODE if is_decode else self._prompt_kind(request)
        if self._last is not Kind.SHORT:
            self._last_other = self._last
