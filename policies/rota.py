"""SuperInfer's RotaSched: who has waited longest beyond what it may wait, runs next.

While everything fits, requests run in the order of arrival. When seats or KV are short, every
step takes those of the largest virtual lag: a newcomer lags by its wait beyond a share of its
TTFT target, one that holds KV and was left out by `lag_weight` times its wait, and one that
runs has a negative lag, the longer it has been running. So requests rotate, and their KV with
them. Classes are not looked at.

Source: SuperInfer, arXiv:2601.20309 (VLT and LVF; its released scheduler has no lag in it).
Differs: KV moves when its blocks are needed, not ahead of time. Where the engine cannot swap
(`swap_kv_tokens=0`) only seats rotate: a newcomer takes free KV, never that of a running request,
and a request that has to grow takes it from the smallest lag, to be recomputed.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

from qllm.errors import ConfigError
from qllm.plan import Plan
from qllm.policy import RequestView, StepReport, View, next_row
from qllm.types import NS_PER_MS, Cap, Evict, RequestId

from .parts import behind_all, check_at_least, fill, rotate


def grace_ns(share: float, target_ms: float | None, default_ms: int) -> float:
    """What may be waited of a target, or of the default where there is none."""
    return share * (default_ms if target_ms is None else target_ms) * NS_PER_MS


@dataclass(kw_only=True)
class Rota:
    """Largest virtual lag first: requests rotate."""

    needs = Cap.NONE

    lag_weight: float = 3.0
    """Weight of the wait of a request that holds KV, against that of a newcomer."""
    tpot_share: float = 0.0
    """Share of the target between tokens that is waited before a request lags."""
    ttft_share: float = 0.5
    """Share of the TTFT target that is waited before a newcomer lags."""
    ttft_ms: int = 5000
    """Target of requests that have none."""
    tpot_ms: int = 100
    """Target of requests that have none."""
    min_stay_ms: int = 50
    """How long KV that came in stays at least, where it can be swapped."""

    def __post_init__(self) -> None:
        check_at_least(self, ttft_ms=1, tpot_ms=1, min_stay_ms=0)
        for name in ("lag_weight", "tpot_share", "ttft_share"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 <= value <= 1000:
                raise ConfigError(f"{name}={value!r} must be a number in [0, 1000]")
        self._since_ns: dict[RequestId, int] = {}

    def lag_ns(self, request: RequestView, now_ns: int) -> float:
        """How much longer than it may a request has waited; negative while it runs."""
        since_ns = self._since_ns.get(request.request_id)
        if since_ns is not None:
            return float(since_ns - now_ns)
        if request.block_table or request.num_swapped_tokens:
            late_ns: float = now_ns - request.last_progress_ns
            if self.tpot_share:
                late_ns -= grace_ns(self.tpot_share, request.slo.tpot_ms, self.tpot_ms)
            return self.lag_weight * late_ns if late_ns > 0 else 0.0
        late_ns = now_ns - request.arrival_ns
        return max(0.0, late_ns - grace_ns(self.ttft_share, request.slo.ttft_ms, self.ttft_ms))

    def plan(self, view: View) -> Plan:
        """Return everyone, or the largest lags, as many as fit."""
        if view.frames:
            return Plan(rows=view.frames[0].rows)
        order = view.requests
        if not self._all_fit(view):
            lag = partial(self.lag_ns, now_ns=view.now_ns)
            order = sorted(order, key=lag, reverse=True)
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
        """Return the smallest lags first."""
        order = sorted(behind_all(view, keep), key=partial(self.lag_ns, now_ns=view.now_ns))
        return [(r.request_id, Evict.SWAP) for r in order]

    def on_step_done(self, view: View, report: StepReport) -> None:
        """Note since when the requests of this step have been running without a break."""
        ids = (row.request_id for row in report.rows)
        self._since_ns = {i: self._since_ns.get(i, report.start_ns) for i in ids}
