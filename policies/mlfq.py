"""FastServe: a multi-level feedback queue that a request joins at the level of its first step.

The quantum doubles from level to level. A request joins the first level whose quantum covers its
predicted prefill. It falls one level when it has used its quantum, and returns to the top when it
has waited for `starve_ms`. Every step takes the best levels first, in the order in which requests
reached their level. Classes are ignored.

Source: FastServe, arXiv:2305.05920. Difference: KV is swapped out when its blocks are needed, not
in advance. If the engine cannot swap (`swap_kv_tokens=0`), requests keep their KV when they fall. A
newcomer then waits for free KV, whatever its level. A request that needs more KV takes it from the
worst level, whose requests compute it again.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from qllm.plan import Plan
from qllm.policy import RequestView, StepReport, View
from qllm.types import NS_PER_MS, Cap, Evict, RequestId

from .parts import behind_all, check_at_least, fill, rotate


class Entry(NamedTuple):
    """A request's place in the queue."""

    level: int
    joined_ns: int
    used_ns: int = 0


@dataclass(kw_only=True)
class Mlfq:
    """Skip-join feedback queue: short and new requests before long and old ones."""

    needs = Cap.NONE

    quantum_ms: int = 20
    """Quantum in ms of the top level; each level has twice the quantum of the one above."""
    levels: int = 8
    """Number of levels."""
    starve_ms: int = 300
    """Wait in ms after which a request returns to the top."""
    min_stay_ms: int = 50
    """Least time in ms that KV stays after it was swapped in."""

    def __post_init__(self) -> None:
        check_at_least(self, quantum_ms=1, levels=1, starve_ms=1, min_stay_ms=0)
        self._entries: dict[RequestId, Entry] = {}

    def _quantum_ns(self, level: int) -> int:
        return self.quantum_ms * NS_PER_MS << level

    def _entry(self, view: View, request: RequestView) -> Entry:
        known = self._entries.get(request.request_id)
        if known is not None:
            return known
        predicted_ns = view.costs.step(0, request.num_prompt_tokens)
        fitting = (i for i in range(self.levels) if self._quantum_ns(i) >= predicted_ns)
        return Entry(next(fitting, self.levels - 1), request.arrival_ns)

    def plan(self, view: View) -> Plan:
        """Return requests of the best levels, as many as fit."""
        if view.frames:
            return Plan(rows=view.frames[0].rows)
        known = self._entries
        order = sorted(view.requests, key=lambda r: known.get(r.request_id) or self._entry(view, r))
        if Cap.KV_SWAP in view.capabilities:
            plan = rotate(view, order, self.min_stay_ms * NS_PER_MS)
            if plan.rows:
                return plan
        return Plan(rows=fill(view, order))

    def victims(
        self, view: View, need_blocks: int, keep: Collection[RequestId]
    ) -> list[tuple[RequestId, Evict]]:
        """Return requests of the worst levels first."""
        worst = sorted(behind_all(view, keep), key=lambda r: self._entry(view, r), reverse=True)
        return [(r.request_id, Evict.SWAP) for r in worst]

    def on_arrival(self, view: View, request: RequestView) -> None:
        """Skip the levels whose quantum is shorter than the request's prefill."""
        self._entries[request.request_id] = self._entry(view, request)

    def on_step_done(self, view: View, report: StepReport) -> None:
        """Charge the requests that ran, and move starving requests to the top."""
        ran = {row.request_id for row in report.rows}
        for r in view.requests:
            entry = self._entry(view, r)
            if r.request_id in ran:
                entry = self._charged(entry, report)
            elif entry.level and self._starves(entry, r, view.now_ns):
                entry = Entry(0, view.now_ns)
            self._entries[r.request_id] = entry

    def _charged(self, entry: Entry, report: StepReport) -> Entry:
        used_ns = entry.used_ns + report.end_ns - report.start_ns
        if used_ns < self._quantum_ns(entry.level) or entry.level == self.levels - 1:
            return entry._replace(used_ns=used_ns)
        return Entry(entry.level + 1, report.end_ns)

    def _starves(self, entry: Entry, request: RequestView, now_ns: int) -> bool:
        since_ns = max(entry.joined_ns, request.last_progress_ns)
        return now_ns - since_ns >= self.starve_ms * NS_PER_MS

    def on_finish(self, view: View, request: RequestView) -> None:
        """Forget the request."""
        self._entries.pop(request.request_id, None)
