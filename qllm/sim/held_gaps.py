"""A check of the gap that a policy lets prompts make between two tokens of a stream (I17).

The gap is counted in expected time. This is the slice of a decision, or the cost table's estimate
for a step without a slice. So a segment that ends late, or a first measurement, breaks no rule.
"""

from collections import Counter

from qllm.policy import RequestView, decode_tokens
from qllm.scheduler.batch import MIN_CHUNK
from qllm.scheduler.decision import Decision
from qllm.scheduler.gaps import GAP_STEPS, LEAST_PART, fitting
from qllm.scheduler.scheduler import Scheduler
from qllm.types import NS_PER_MS, Grain, Priority, RequestId


class HeldGaps:
    """Times for which prompts ran since the last token of each stream of their tier.

    A stream without a seat or KV is not checked. No stream is checked while requests of a frame
    that raised run again one by one. In a class larger than LS, slices that the stall bound gives
    to prompts do not count.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._had_ns: Counter[tuple[RequestId, int]] = Counter()
        """Nanoseconds for which prompts ran, by request and its number of tokens."""
        self._expected_ns = 0
        self._prompts: set[int] = set()
        """Tiers of the running prompts."""

    def decided(self, decision: Decision, now_ns: int) -> None:
        """Record the program that runs next."""
        scheduler, program = self._scheduler, decision.program
        ranking = scheduler._ranked(now_ns)
        if program is None or ranking is None or scheduler.suspects:
            self._prompts = set()
            return
        tiers = {x.request_id: x.tier for x in ranking.admitted}
        rows = [
            (row, scheduler.requests[row.request_id])
            for row in program.rows
            if row.request_id in tiers
        ]
        tokens = sum([row.num_tokens for row, r in rows if not r.is_decoding])
        own = sum([row.num_tokens for row, r in rows if r.is_decoding])
        self._prompts = {tiers[r.request_id] for _, r in rows if not r.is_decoding}
        step_ns = scheduler.costs.step(own, tokens)
        self._expected_ns = step_ns if decision.slice_ns is None else decision.slice_ns

    def ran(self, elapsed_ns: int, now_ns: int) -> str | None:
        """Count a run; return the broken rule as the end of a sentence, or None."""
        scheduler = self._scheduler
        gap_ms = scheduler.policy.max_prompt_gap_ms
        for tier in self._prompts:
            streams = self._streams(tier, now_ns)
            step_ns = scheduler.costs.decode(decode_tokens(streams))
            least_ns = max(step_ns // LEAST_PART, scheduler.limits.max_segment_ns)
            if min(scheduler.policy.grain, scheduler.limits.grain) == Grain.STEP:
                least_ns += scheduler.costs.step(0, MIN_CHUNK)
            for r in streams:
                key = r.request_id, r.num_tokens
                self._had_ns[key] += min(elapsed_ns, self._expected_ns)
                tpot_ms = r.slo.tpot_ms
                gap_ns = (
                    max(gap_ms * NS_PER_MS, GAP_STEPS * step_ns)
                    if tpot_ms is None
                    else int(tpot_ms * NS_PER_MS)
                )
                if self._had_ns[key] > gap_ns + least_ns:
                    return (
                        f"lets prompts of its class hold up request {r.request_id} for "
                        f"{self._had_ns[key] / NS_PER_MS:.1f} ms, whose gap is "
                        f"{gap_ns / NS_PER_MS:g} ms (I17)"
                    )
        return None

    def _streams(self, tier: int, now_ns: int) -> list[RequestView]:
        """Return the requests of a tier that could decode and are checked."""
        scheduler = self._scheduler
        ranking = scheduler._ranked(now_ns)
        assert ranking is not None
        own = [x.request for x in ranking.admitted if x.tier == tier and x.request.is_decoding]
        if scheduler.policy.max_be_stall_ms is not None:
            own = [r for r in own if r.priority <= Priority.LS]
        loose = fitting(scheduler.view(now_ns), [r for r in own if r.frame_id is None])
        ids = {row.request_id for row in loose}
        return [r for r in own if r.frame_id is not None or r.request_id in ids]
