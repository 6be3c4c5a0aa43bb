"""SuperInfer's RotaSched: requests that lag behind their targets run next, others keep their place.

While all requests fit, they run in the order of arrival. If seats or KV are short, lagging requests
go first, the largest lag first. A newcomer lags after it waited for a share of its TTFT target. A
running request lags if its tokens took longer than its TPOT target allows. Other requests run in
the order of arrival. A newcomer whose first token would be late even if it ran first also runs in
the order of arrival, because rotation cannot help it. A lagging newcomer takes KV for its first
token from the youngest request that is ahead of its targets, releases the KV, and returns when it
lags again. KV rotates as targets demand. Classes are ignored.

With `tpot_share=0` every waiting request lags, and a running request has a lower rank the longer it
has run. So requests and their KV take turns.

Source: SuperInfer, arXiv:2601.20309 (VLT and LVF; the released scheduler has no lag). Differences:
KV is swapped out when its blocks are needed, not in advance; the lag of a request counts all its
tokens, not the last token. If the engine cannot swap (`swap_kv_tokens=0`), only seats rotate. A
newcomer then takes only free KV. A request that needs more KV takes it from the request with the
smallest lag, which is computed again.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from qllm.errors import ConfigError
from qllm.plan import Plan
from qllm.policy import RequestView, StepReport, View, next_row
from qllm.types import NS_PER_MS, Cap, Evict, RequestId

from .parts import behind_all, check_at_least, fill, rotate


def grace_ns(share: float, target_ms: float | None, default_ms: int) -> float:
    """Return a share of the target, or of the default if there is no target, in nanoseconds."""
    return share * (default_ms if target_ms is None else target_ms) * NS_PER_MS


@dataclass(kw_only=True)
class Rota:
    """Largest lag first: requests rotate as far as their targets demand."""

    needs = Cap.NONE

    lag_weight: float = 3.0
    """Weight of the lag of a request that has run, relative to that of a newcomer."""
    tpot_share: float = 1.0
    """Share of the TPOT target that a request may use; 0 lets requests take turns."""
    ttft_share: float = 0.8
    """Share of the TTFT target after which a newcomer lags."""
    ttft_ms: int = 5000
    """TTFT target in ms of requests without one."""
    tpot_ms: int = 100
    """TPOT target in ms of requests without one."""
    min_stay_ms: int = 50
    """Least time in ms that KV stays after it was swapped in."""

    def __post_init__(self) -> None:
        check_at_least(self, ttft_ms=1, tpot_ms=1, min_stay_ms=0)
        for name in ("lag_weight", "tpot_share", "ttft_share"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 <= value <= 1000:
                raise ConfigError(f"{name}={value!r} must be a number in [0, 1000]")
        self._since_ns: dict[RequestId, int] = {}

    def lag_ns(self, request: RequestView, now_ns: int) -> float:
        """Return the nanoseconds by which a request is late.

        The result is negative if the request is ahead of its target.
        """
        if request.first_token_ns is not None and self.tpot_share:
            may_take_ns = grace_ns(self.tpot_share, request.slo.tpot_ms, self.tpot_ms)
            due_ns = request.first_token_ns + request.num_output_tokens * may_take_ns
            return self.lag_weight * (now_ns - due_ns)
        since_ns = self._since_ns.get(request.request_id)
        if since_ns is not None:
            return float(since_ns - now_ns)
        if request.block_table or request.num_swapped_tokens:
            return self.lag_weight * max(0, now_ns - request.last_progress_ns)
        grace = grace_ns(self.ttft_share, request.slo.ttft_ms, self.ttft_ms)
        return max(0.0, now_ns - request.arrival_ns - grace)

    def _in_time(self, view: View) -> Collection[RequestId]:
        """Return newcomers whose first token can be in time, if their prompts run in turn."""
        found, at_ns = set(), view.now_ns
        newcomers = (r for r in view.requests if r.first_token_ns is None)
        for r in sorted(newcomers, key=lambda r: r.arrival_ns):
            end_ns = at_ns + r.num_uncomputed_tokens * view.costs.prefill_token_ns
            if end_ns <= r.arrival_ns + grace_ns(1, r.slo.ttft_ms, self.ttft_ms):
                found.add(r.request_id)
                at_ns = end_ns
        return found

    def _places(self, view: View) -> Callable[[RequestView], tuple[float, int]]:
        """Return the sort key: lagging requests, then by arrival, unless requests take turns."""
        in_time = self._in_time(view) if self.tpot_share else ()

        def place(request: RequestView) -> tuple[float, int]:
            lag_ns = self.lag_ns(request, view.now_ns)
            if not self.tpot_share:
                return -lag_ns, request.arrival_ns
            helps = request.first_token_ns is not None or request.request_id in in_time
            return -max(0.0, lag_ns) * helps, request.arrival_ns

        return place

    def plan(self, view: View) -> Plan:
        """Return all requests, or as many with the largest lags as fit."""
        if view.frames:
            return Plan(rows=view.frames[0].rows)
        order = view.requests
        if not self._all_fit(view):
            order = sorted(order, key=self._places(view))
            if Cap.KV_SWAP in view.capabilities:
                plan = rotate(view, order, self.min_stay_ms * NS_PER_MS)
                if plan.rows:
                    return plan
        return Plan(rows=fill(view, order))

    def _all_fit(self, view: View) -> bool:
        if len(view.requests) > view.max_num_seqs:
            return False
        need = sum(view.blocks_needed(next_row(r, view)) for r in view.requests)
        return need <= view.num_free_blocks

    def victims(
        self, view: View, need_blocks: int, keep: Collection[RequestId]
    ) -> list[tuple[RequestId, Evict]]:
        """Return the requests with the smallest lags first."""
        order = sorted(behind_all(view, keep), key=self._places(view), reverse=True)
        return [(r.request_id, Evict.SWAP) for r in order]

    def on_step_done(self, view: View, report: StepReport) -> None:
        """Record the time since when the requests of this step have run without a break."""
        ids = (row.request_id for row in report.rows)
        self._since_ns = {i: self._since_ns.get(i, report.start_ns) for i in ids}
