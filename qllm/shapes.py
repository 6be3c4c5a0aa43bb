"""From ranks to plans: the closed set of shapes around a `RankPolicy`.

The best tier runs: a parked frame of it first, else its decodes and prefills in one program.
While it only decodes, worse tiers get slices paid from the ride credit. Whoever is admitted
and has not progressed for nearly `max_be_stall_ms` gets a guaranteed slice before anyone else.
Everything is integer arithmetic on the view, so that a device scheduler can do the same.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from qllm.plan import ANY_ARRIVAL, NO_STOP, Plan, Row
from qllm.policy import CostTable, FrameView, RankPolicy, RequestView, View, next_row
from qllm.types import NS_PER_MS, Grain, Priority, RequestId

NO_DEADLINE = 1 << 62
MIN_SLICE_NS = NS_PER_MS
"""A slice shorter than this is not worth a switch."""
MIN_CHUNK = 32
"""Tokens of the smallest prefill step made to fit a slice."""
RIDE_CAP = 8
"""Most allowances that are saved up; one decode step of the best tier earns one."""


class Ranked(NamedTuple):
    """A request that owes work, with its policy's verdict; sorts best first."""

    tier: int
    key: int
    request_id: RequestId
    request: RequestView


def rank_all(requests: Iterable[RequestView], now_ns: int, policy: RankPolicy) -> list[Ranked]:
    """Rank every request that owes work; ties go to the older request."""
    ranked = []
    for r in requests:
        deadline = r.deadline_ns
        tier, key = policy.rank(
            r.arrival_ns,
            r.priority,
            NO_DEADLINE if deadline is None else deadline,
            r.num_prompt_tokens,
            r.num_computed_tokens,
            r.served_ns,
            now_ns,
        )
        if not (isinstance(tier, int) and isinstance(key, int)):
            raise TypeError(f"rank returned {(tier, key)!r}; it must return two ints")
        ranked.append(Ranked(tier, key, r.request_id, r))
    ranked.sort(key=lambda x: x[:3])
    return ranked


def ride_allowance_ns(policy: RankPolicy, costs: CostTable, decoding: Sequence[RequestView]) -> int:
    """Time that worse tiers may take per step of these decoding requests."""
    predicted = costs.decode(len(decoding))
    targets = [int(r.slo.tpot_ms * NS_PER_MS) for r in decoding if r.slo.tpot_ms is not None]
    if targets:
        return max(0, min(targets) - predicted)
    return int(predicted * policy.ride.frac)


def _is_new_decode(request: RequestView) -> bool:
    return request.is_decoding and request.frontier is None


class _Shaper:
    """One call of `shape_plan`."""

    def __init__(self, view: View, policy: RankPolicy) -> None:
        self.view = view
        self.policy = policy
        self.ranked = rank_all(view.requests, view.now_ns, policy)
        self.tier_of = {x.request_id: x.tier for x in self.ranked}
        self.min_slice_ns = min(view.max_segment_ns, 5 * NS_PER_MS)

    def frame_tier(self, frame: FrameView) -> int:
        return min(self.tier_of[row.request_id] for row in frame.rows)

    def resume(self, frame: FrameView) -> Plan:
        return self.finish_plan(frame.rows)

    def finish_plan(self, rows: Sequence[Row], slice_ns: int | None = None) -> Plan:
        """Add grain, stop threshold and slice to rows."""
        grain = min(self.policy.grain, self.view.finest_grain)
        stop = NO_STOP
        if grain > Grain.STEP:
            stop = self.stop_below(rows)
        due = self.next_due_ns({row.request_id for row in rows})
        if grain > Grain.STEP and due is not None:
            left = max(self.min_slice_ns, due - self.view.now_ns)
            slice_ns = left if slice_ns is None else min(slice_ns, left)
        return Plan(rows=tuple(rows), grain=grain, stop_below=stop, slice_ns=slice_ns)

    def stop_below(self, rows: Sequence[Row]) -> int:
        """Whose arrival stops these rows.

        The stop word carries priorities: where tiers are not priorities, any arrival stops
        them, and a false alarm resumes them.
        """
        best = min(self.tier_of[row.request_id] for row in rows)
        if all(x.tier == x.request.priority for x in self.ranked):
            return best
        return ANY_ARRIVAL

    # -- the stall bound (I14)

    def margin_ns(self) -> int:
        """What may pass between falling due and running: the slices of all who fall due."""
        turns = len(self.view.frames) + 2
        return turns * (self.min_slice_ns + 2 * min(self.view.max_segment_ns, 50 * NS_PER_MS))

    @cached_property
    def bounded(self) -> list[tuple[int, RequestView]]:
        """When the admitted requests that the stall bound protects fall due."""
        if self.policy.max_be_stall_ms is None:
            return []
        best = self.ranked[0].tier
        bound_ns = self.policy.max_be_stall_ms * NS_PER_MS
        left_ns = max(bound_ns // 2, bound_ns - self.margin_ns())
        return [
            (x.request.last_progress_ns + left_ns, x.request)
            for x in self.ranked
            if x.request.is_admitted and (x.tier > best or x.request.priority > Priority.LS)
        ]

    def next_due_ns(self, running: set[RequestId]) -> int | None:
        others = (due for due, request in self.bounded if request.request_id not in running)
        return min(others, default=None)

    def stalled(self) -> Plan | None:
        """A guaranteed slice for whoever is due; it needs no seat and nobody stops it."""
        waiting = [request for due, request in self.bounded if due <= self.view.now_ns]
        if not waiting:
            return None
        first = min(waiting, key=lambda r: (r.last_progress_ns, r.request_id))
        frame = next((f for f in self.view.frames if f.frame_id == first.frame_id), None)
        if frame is not None:
            rows: list[Row] = list(frame.rows)
        elif first.is_decoding:
            alike = [r for r in waiting if r.is_decoding and r.frame_id is None]
            free = self.view.num_free_blocks
            rows = []
            for request in alike[: self.view.max_num_seqs]:
                row = next_row(request, self.view)
                free -= self.need(request, row)
                if free >= 0 or not rows:
                    rows.append(row)
        else:
            rows = [next_row(first, self.view, self.slice_tokens(self.min_slice_ns))]
        plan = self.finish_plan(rows)
        return Plan(rows=plan.rows, grain=plan.grain, slice_ns=self.min_slice_ns)

    def slice_tokens(self, slice_ns: int) -> int:
        """Prefill tokens for a slice: where time cannot stop a step, its size has to."""
        most = self.view.max_step_tokens
        if min(self.policy.grain, self.view.finest_grain) > Grain.STEP:
            return most
        return min(most, max(MIN_CHUNK, slice_ns // self.view.costs.prefill_token_ns))

    # -- one tier

    def need(self, request: RequestView, row: Row) -> int:
        held = len(request.block_table)
        return max(0, -(-row.hi // self.view.block_size) - held)

    def evictable(self, tier: int) -> int:
        """Blocks that requests of worse tiers hold."""
        return sum(len(x.request.block_table) for x in self.ranked if x.tier > tier)

    def batch(
        self, members: Sequence[Ranked], force: bool = False, max_tokens: int | None = None
    ) -> tuple[list[Row], int]:
        """Decodes, then prefills, tier by tier; returns the rows and how many are decodes.

        Order is strict: a prefill without room ends the walk, because whoever came next would
        take the blocks it is waiting for; but if nothing else runs, those who hold blocks go
        on. Decodes are outside the prefill token budget.
        """
        view = self.view
        free = [x for x in members if x.request.frame_id is None]
        rows: list[Row] = []
        num_decodes = used = 0
        tokens = view.max_step_tokens if max_tokens is None else max_tokens
        blocked = False
        for x in sorted(free, key=lambda x: (x.tier, not _is_new_decode(x.request))):
            if len(rows) >= view.max_num_seqs:
                break
            r = x.request
            is_decode = _is_new_decode(r)
            row = next_row(r, view, min(tokens, self.policy.chunk_tokens or tokens) or 1)
            need = self.need(r, row)
            if not is_decode:
                if row.num_tokens > tokens or (blocked and not r.is_admitted):
                    continue
                if need > view.num_free_blocks + self.evictable(x.tier) - used:
                    if rows:
                        break
                    if not r.is_admitted or not (force or x is self.ranked[0]):
                        blocked = True
                        continue
                tokens -= row.num_tokens
            rows.append(row)
            used += need
            num_decodes += is_decode
        return rows, num_decodes

    def best(self) -> Plan:
        plan = self.stalled()
        if plan is not None:
            return plan
        if self.policy.ride.unbounded:
            if self.view.frames:
                return self.resume(self.view.frames[0])
            rows = self.batch(self.ranked)[0] or self.batch(self.ranked, force=True)[0]
            return self.finish_plan(rows) if rows else Plan()
        tiers = sorted(set(self.tier_of.values()))
        for position, tier in enumerate(tiers):
            plan, decodes_only = self.tier_plan(tier)
            if plan is None:
                continue
            if decodes_only and self.policy.ride.frac and position + 1 < len(tiers):
                return self.ride_along(plan, tiers[position + 1 :])
            return plan
        rows, _ = self.batch(self.ranked, force=True)
        return self.finish_plan(rows) if rows else Plan()

    def tier_plan(self, tier: int) -> tuple[Plan | None, bool]:
        """The plan of one tier alone, and whether it is decodes only."""
        for frame in self.view.frames:
            if self.frame_tier(frame) == tier:
                return self.resume(frame), False
        rows, num_decodes = self.batch([x for x in self.ranked if x.tier == tier])
        if not rows:
            return None, False
        return self.finish_plan(rows), num_decodes == len(rows)

    def ride_along(self, best: Plan, worse: Sequence[int]) -> Plan:
        """Let the next worse tier with work use what the best tier's decodes can spare.

        Its decodes join the step: the experts are loaded once for both. Everything else of it
        gets a slice of its own. The two take turns, and each waits until the credit is worth it.
        """
        for tier in worse:
            members = [x for x in self.ranked if x.tier == tier]
            joining = self.joining(best, members)
            other = self.other_work(best, members, tier, len(joining))
            if not joining and other is None:
                continue
            allowance = ride_allowance_ns(
                self.policy, self.view.costs, [self.view.by_id[r.request_id] for r in best.rows]
            )
            extra = self.extra_ns(len(best.rows), len(joining))
            price = max(MIN_SLICE_NS, min(extra, RIDE_CAP * allowance)) if joining else MIN_SLICE_NS
            if self.view.ride_credit_ns < price:
                return best
            if other is None or (joining and self.waits_longer(joining, other)):
                return self.finish_plan((*best.rows, *joining))
            slice_ns = min(self.view.ride_credit_ns, other.slice_ns or NO_DEADLINE)
            return replace(other, slice_ns=slice_ns)
        return best

    def joining(self, best: Plan, members: Sequence[Ranked]) -> list[Row]:
        """Decode rows of a worse tier for which the best tier leaves seats and KV."""
        rows: list[Row] = []
        room = self.view.num_free_blocks
        for x in members:
            r = x.request
            if not r.is_decoding or r.frame_id is not None or r.frontier is not None:
                continue
            row = next_row(r, self.view)
            room -= self.need(r, row)
            if room < 0 or len(best.rows) + len(rows) >= self.view.max_num_seqs:
                break
            rows.append(row)
        return rows

    def other_work(
        self, best: Plan, members: Sequence[Ranked], tier: int, num_joining: int
    ) -> Plan | None:
        """A parked frame of the tier, or a prefill for which seats are left."""
        for frame in self.view.frames:
            if self.frame_tier(frame) == tier:
                return self.resume(frame)
        if len(best.rows) + num_joining >= self.view.max_num_seqs:
            return None
        tokens = self.slice_tokens(self.view.ride_credit_ns)
        rows, num_decodes = self.batch(members, max_tokens=tokens)
        rows = rows[num_decodes:]
        return self.finish_plan(rows) if rows else None

    def extra_ns(self, num_rows: int, num_more: int) -> int:
        """What more decode rows add to a step."""
        costs = self.view.costs
        return max(0, costs.decode(num_rows + num_more) - costs.decode(num_rows))

    def waits_longer(self, joining: Sequence[Row], other: Plan) -> bool:
        """Whose turn it is: whoever made progress longer ago; work that never ran goes first."""
        last = [
            min(self.view.by_id[row.request_id].last_progress_ns for row in rows)
            for rows in (joining, other.rows)
        ]
        return last[0] < last[1]


def shape_plan(view: View, policy: RankPolicy) -> Plan:
    """Make the plan of a `RankPolicy`: who runs, in which shape, until when."""
    if not view.requests:
        return Plan()
    return _Shaper(view, policy).best()
