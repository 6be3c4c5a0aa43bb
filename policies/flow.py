"""FlowPrefill: the prefill that is due first runs. It stops a running prefill at the next layer.

Prefills are ordered by their TTFT deadline, whatever their class. The policy sees an arrival at the
next layer boundary of a running prefill. If the arrival is due earlier, it runs first. The parked
prefill continues later where it stopped. So prefills need no chunks.

Source: FlowPrefill, arXiv:2602.16603. Differences: plain EDF without the weights of slack of S-EDF;
boundaries of layers, not of operators; one engine for both phases. So all decodes run when the
first decode would miss its TPOT target. If targets cannot be met, decodes and prefills alternate.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from qllm.plan import ANY_ARRIVAL, Plan, Row
from qllm.policy import FrameView, RequestView, StepReport, View, decode_tokens
from qllm.types import NS_PER_MS, Cap, Grain, Priority

from .parts import check_at_least, fill


@dataclass(kw_only=True)
class Flow:
    """Earliest deadline first: preempts prefills at any layer."""

    needs = Cap.YIELD_LAYER

    ls_ttft_ms: int = 500
    """TTFT target in ms of LS requests without one."""
    be_ttft_ms: int = 10_000
    """TTFT target in ms of other requests without one."""
    tpot_ms: int = 100
    """TPOT target in ms of requests without one."""
    batch_tokens: int = 512
    """Most tokens of a batch of prompts; a longer prompt runs alone."""

    def __post_init__(self) -> None:
        check_at_least(self, ls_ttft_ms=1, be_ttft_ms=1, tpot_ms=1, batch_tokens=1)
        self._decoded = False

    def deadline_ns(self, request: RequestView) -> int:
        """Return the time when the next token is due, by the request's target or the default."""
        own_ns = request.deadline_ns
        if own_ns is not None:
            return own_ns
        if request.is_decoding:
            return (request.last_token_ns or request.arrival_ns) + self.tpot_ms * NS_PER_MS
        ttft_ms = self.ls_ttft_ms if request.priority <= Priority.LS else self.be_ttft_ms
        return request.arrival_ns + ttft_ms * NS_PER_MS

    def plan(self, view: View) -> Plan:
        """Return the decodes when they are due, else the prefill that is due first."""
        decodes: list[RequestView] = []
        prefills: list[RequestView] = []
        for r in view.requests:
            if r.frame_id is None:
                (decodes if r.is_decoding else prefills).append(r)
        decodes.sort(key=self.deadline_ns)
        prefill = self._first_prefill(view, prefills)
        slice_ns = None
        if decodes:
            start_ns = self.deadline_ns(decodes[0]) - view.costs.decode(decode_tokens(decodes))
            if not prefill or (start_ns <= view.now_ns and not self._decoded):
                rows = fill(view, decodes)
                if rows:
                    return Plan(rows=rows)
            slice_ns = max(view.max_segment_ns, start_ns - view.now_ns)
        return Plan(rows=prefill, grain=Grain.LAYER, stop_below=ANY_ARRIVAL, slice_ns=slice_ns)

    def _first_prefill(self, view: View, prefills: Sequence[RequestView]) -> tuple[Row, ...]:
        first = min(view.frames, key=lambda f: self._due_ns(view, f), default=None)
        if first is not None:
            due_ns = self._due_ns(view, first)
            prefills = [r for r in prefills if self.deadline_ns(r) < due_ns]
        prefills = sorted(prefills, key=self.deadline_ns)
        rows = fill(view, self._batch(prefills)) or fill(view, prefills)
        return rows if rows or first is None else first.rows

    def _batch(self, prefills: Sequence[RequestView]) -> list[RequestView]:
        """Return the first prefill, and following prefills that fit whole in the same batch."""
        batch: list[RequestView] = []
        tokens = 0
        for r in prefills:
            tokens += r.num_uncomputed_tokens
            if batch and tokens > self.batch_tokens:
                break
            batch.append(r)
        return batch

    def _due_ns(self, view: View, frame: FrameView) -> int:
        return min(self.deadline_ns(view.by_id[row.request_id]) for row in frame.rows)

    def on_step_done(self, view: View, report: StepReport) -> None:
        """Record the phase that ran last."""
        rows = [(row, view.by_id.get(row.request_id)) for row in report.rows]
        self._decoded = all(r is None or row.lo >= r.num_prompt_tokens for row, r in rows)
