"""Plans from ranks: the possible shapes of a plan for a `RankPolicy`.

Either all tiers share every step (`Ride(unbounded=True)`), or the best tier runs alone. The best
tier first continues a parked frame, else it runs its decodes and prefills in one program. While the
best tier only decodes, worse tiers get slices paid from the ride credit, or their decodes join its
steps. A step that worse rows joined also stops once for an arrival of the best tier, and the
newcomer's prefill goes first. With `max_prompt_gap_ms`, prompts and decodes of a tier alternate
(`qllm.scheduler.gaps`). Prefill is whole, a chunk, or layered. A chunk is as large as the policy,
the step or the slack of its decodes allows. In layered prefill, a cohort of prompts advances by
groups of layers.

A request that is admitted or swapped out, and has made no progress for nearly `max_be_stall_ms`,
gets a guaranteed slice before all other requests. All computation is integer arithmetic on the
view, and no state is kept between two plans. So a scheduler on a device can do the same.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property
from heapq import merge

from qllm.plan import ANY_ARRIVAL, NO_STOP, Plan, Row
from qllm.policy import (
    NO_DEADLINE,
    FrameView,
    Groups,
    RankPolicy,
    RequestView,
    View,
    decode_tokens,
    next_row,
)
from qllm.scheduler.batch import Batch, fitting_tokens, may_wait, runs_whole
from qllm.scheduler.cohorts import advance, is_under_way, next_cut
from qllm.scheduler.gaps import Turns, fitting
from qllm.scheduler.ranking import Ranked, Ranking
from qllm.scheduler.ride import (
    JOIN_CAP,
    RIDE_CAP,
    ahead_ns,
    first_due_ns,
    joining_rows,
    ride_allowance_ns,
    tpot_target_ns,
    wait_longer,
)
from qllm.scheduler.scoring import scores
from qllm.scheduler.victims import make_way
from qllm.types import NS_PER_MS, Grain, Priority, RequestId

MIN_SLICE_NS = NS_PER_MS
"""Shortest slice that is worth a switch."""
GOOD_SLICE_NS = 10 * NS_PER_MS
"""Credit that is saved before a slice is paid from it. A switch to the slice and back takes about 1
ms."""


class _Shaper:
    """One call of `shape_plan`. It keeps values that several shapes of a plan use."""

    def __init__(self, view: View, policy: RankPolicy, ranking: Ranking) -> None:
        self.view = view
        self.policy = policy
        self.ranking = ranking
        self.tiers = ranking.tiers
        self.tier_of = {x.request_id: x.tier for x in ranking.admitted}
        """Tiers of requests that hold KV, and of other requests once these are planned."""
        self.min_slice_ns = min(view.max_segment_ns, 5 * NS_PER_MS)
        self.decodes: dict[int, list[Ranked]] = {tier: [] for tier in self.tiers}
        self.prefills: dict[int, list[Ranked]] = {tier: [] for tier in self.tiers}
        """Decodes and prefills per tier, of requests that hold KV and are in no frame."""
        for x in ranking.admitted:
            r = x.request
            if r.frame_id is None and not r.is_idle:
                (self.decodes if r.is_decoding else self.prefills)[x.tier].append(x)

    def frame_tier(self, frame: FrameView) -> int:
        return min(self.tier_of[row.request_id] for row in frame.rows)

    def resume(self, frame: FrameView) -> Plan:
        return self.finish_plan(frame.rows)

    def goes_before(self, frame: FrameView, tier: int) -> bool:
        """Return True if newcomers of this tier run before a parked step of the tier.

        A step stops for its own tier only if rows of worse tiers joined the step, or if it prefills
        streaming prompts. Newcomers that came before the step was parked, with a whole prompt, get
        one step. Then the parked step resumes, and runs to its end.
        """
        joined = any(self.tier_of[row.request_id] > tier for row in frame.rows)
        newcomers = self.ranking.waiting_of(tier)
        if may_wait(self.view, frame.rows):
            joined, newcomers = True, [*newcomers, *self.prefills[tier]]
        since = (x.request.revised_ns for x in newcomers if not x.is_open)
        return joined and any(since_ns <= frame.parked_ns for since_ns in since)

    def finish_plan(self, rows: Sequence[Row], slice_ns: int | None = None) -> Plan:
        """Add grain, stop threshold and slice to rows."""
        grain = min(self.policy.grain, self.view.finest_grain)
        stop = NO_STOP
        if grain > Grain.STEP:
            stop = self.stop_below(rows)
            due = self.next_due_ns({row.request_id for row in rows})
            if due is not None:
                left = max(self.min_slice_ns, due - self.view.now_ns)
                slice_ns = left if slice_ns is None else min(slice_ns, left)
            best = min(self.tiers[0], Priority.LS)
            if stop <= best and runs_whole(self.view, rows, self.tier_of, best, slice_ns):
                grain, stop, slice_ns = Grain.STEP, NO_STOP, None
        return Plan(rows=tuple(rows), grain=grain, stop_below=stop, slice_ns=slice_ns)

    def stop_below(self, rows: Sequence[Row]) -> int:
        """Return the priority below which an arrival stops these rows.

        The stop word contains priorities. If tiers differ from priorities, any arrival stops the
        rows. The rows resume if the arrival does not go first.
        """
        if self.ranking.num_own_tiers:
            return ANY_ARRIVAL
        # whole prompts of the same class stop streaming prompts
        return min([self.tier_of[row.request_id] for row in rows]) + may_wait(self.view, rows)

    # -- the stall bound (I14)

    def margin_ns(self, bound_ns: int) -> int:
        """Return the time that is left for a request between its due time and its stall bound.

        It is the time of the slices of all requests that may be due, at least an eighth of the
        bound (a machine pauses sometimes) and at most half. In layered prefill it is half of the
        bound, because no slice ends a group of layers.
        """
        if self.policy.groups is not None:
            return bound_ns // 2
        turns = len(self.view.frames) + 2
        slices = turns * (self.min_slice_ns + 2 * min(self.view.max_segment_ns, 50 * NS_PER_MS))
        return min(bound_ns - bound_ns // 2, max(slices, bound_ns // 8))

    @cached_property
    def bounded(self) -> list[tuple[int, Ranked]]:
        """Due time and request, for admitted and swapped-out requests under the stall bound."""
        if self.policy.max_be_stall_ms is None:
            return []
        best = self.tiers[0]
        bound_ns = self.policy.max_be_stall_ms * NS_PER_MS
        left_ns = bound_ns - self.margin_ns(bound_ns)
        return [
            (x.request.last_progress_ns + left_ns, x)
            for x in (*self.ranking.admitted, *self.ranking.swapped.values())
            if (x.tier > best or x.request.priority > Priority.LS)
            and not (x.request.is_idle or x.request.lacks_experts)
        ]

    def next_due_ns(self, running: set[RequestId]) -> int | None:
        others = [due for due, x in self.bounded if x.request_id not in running]
        return min(others, default=None)

    def stalled(self) -> Plan | None:
        """Return a guaranteed slice for a due request.

        The slice needs no seat; no arrival stops it.
        """
        due = [x for due_ns, x in self.bounded if due_ns <= self.view.now_ns]
        for x in sorted(due, key=lambda x: (x.request.last_progress_ns, x.request_id)):
            if x.request.is_admitted:
                return self.guaranteed(x.request, [y.request for y in due])
            plan = self.come_back(x)
            if plan is not None:
                return plan
        return None

    def come_back(self, x: Ranked) -> Plan | None:
        """Return a slice for a swapped-out request.

        The result is None if not enough KV can be swapped out for it.
        """
        row = next_row(x.request, self.view, self.slice_tokens(self.min_slice_ns))
        if self.policy.groups is not None:
            row = row._replace(end_layer=next_cut(self.view, self.policy.groups, [row]))
        out = make_way(self.view, self.ranking, row)
        if out is None:
            return None
        self.tier_of[x.request_id] = x.tier
        plan = self.finish_plan([row])
        return replace(plan, stop_below=NO_STOP, slice_ns=self.min_slice_ns, swap_out=out)

    def guaranteed(self, first: RequestView, waiting: Sequence[RequestView]) -> Plan:
        """Return a slice for `first`, and for requests of `waiting` that can share the slice."""
        frame = next((f for f in self.view.frames if f.frame_id == first.frame_id), None)
        if frame is not None:
            rows: list[Row] = list(frame.rows)
        elif first.is_decoding:
            batch = Batch(self.view, 0)
            for r in waiting:
                if batch.seats and r.is_admitted and r.is_decoding and r.frame_id is None:
                    row = next_row(r, self.view)
                    if not batch.rows or batch.need(r, row) <= batch.free_blocks:
                        batch.take(r, row)
            rows = batch.rows
        elif self.policy.groups is not None and is_under_way(first):
            under_way = [r for r in waiting if r.is_admitted and is_under_way(r)]
            due = {self.tier_of[r.request_id] for r in under_way}
            order = sorted(self.tiers, key=lambda tier: tier not in due)
            return self.finish_plan(self.batch(order, cohorts=due).rows)
        else:
            rows = [next_row(first, self.view, self.slice_tokens(self.min_slice_ns))]
        plan = self.finish_plan(rows)
        return replace(plan, stop_below=NO_STOP, slice_ns=self.min_slice_ns)

    def slice_tokens(self, slice_ns: int) -> int:
        """Return the number of prefill tokens that fit a slice."""
        grain = min(self.policy.grain, self.view.finest_grain)
        return fitting_tokens(self.view, grain, slice_ns)

    # -- one step

    def evictable(self, tier: int, is_open: bool) -> int:
        """Return the number of blocks that requests behind (tier, `is_open`) would free."""
        # if `idle` is empty, the blocks of idle prompts already count as free
        me, idle = (tier, is_open), self.view.idle
        order = (x.request for x in self.ranking.admitted if x[:2] > me)
        return self.view.blocks_freed(r for r in order if idle or not r.is_idle)

    def prefill_tokens(self, tiers: Collection[int]) -> int:
        """Return the number of prefill tokens of a step with the decodes of these tiers."""
        view, policy = self.view, self.policy
        tokens = view.max_step_tokens
        if policy.step_tokens is None and policy.slack is None:
            return tokens
        decoding = [x.request for tier in tiers for x in self.decodes[tier]][: view.max_num_seqs]
        num = decode_tokens(decoding)
        if policy.step_tokens is not None:
            tokens = min(tokens, policy.step_tokens - num)
        if policy.slack is not None and decoding:
            slack_ns = first_due_ns(decoding, policy.slack.tpot_ms) - view.now_ns
            spare = (slack_ns - view.costs.decode(num)) // view.costs.prefill_token_ns
            tokens = min(tokens, max(spare, policy.slack.min_tokens))
        return tokens

    def batch(
        self,
        tiers: Sequence[int],
        *,
        max_tokens: int | None = None,
        cohorts: Collection[int] | None = None,
        force: bool = False,
        num_others: int = 0,
    ) -> Batch:
        """Return decodes, then prefills, tier by tier. Decodes do not use the prefill token budget.

        Args:
            tiers: Tiers of the rows, in the order in which they get seats.
            max_tokens: Number of prefill tokens; None takes the number of the plan's shape.
            cohorts: Tiers whose prefills advance; None is all tiers. If prefill is layered and such
                a tier has a started cohort, the cohort continues and no request joins the cohort.
            force: True lets requests with blocks prefill although a better request lacks blocks.
            num_others: Number of seats that other rows take.
        """
        groups = self.policy.groups
        batch = Batch(self.view, self.prefill_tokens(tiers) if max_tokens is None else max_tokens)
        batch.seats = max(0, batch.seats - num_others)
        for tier in tiers:
            advances = cohorts is None or tier in cohorts
            under_way = advances and groups is not None and self.go_on(batch, groups, tier)
            for x in self.decodes[tier]:
                if not batch.seats:
                    return batch
                batch.take(x.request, next_row(x.request, self.view))
            if advances and not under_way and batch.seats and batch.tokens > 0:
                self.prefill(batch, tier, force)
        return batch

    def prefill(self, batch: Batch, tier: int, force: bool) -> None:
        """Fill a batch with prefills of a tier.

        The order is strict. A prefill without room is the last, because the next prefill would take
        the blocks that the former waits for. But if nothing else runs, requests with blocks
        continue.
        """
        view, chunk = self.view, self.policy.chunk_tokens or self.view.max_step_tokens
        begin = len(batch.rows)
        blocked = False
        for x in merge(self.prefills[tier], self.ranking.waiting_of(tier)):
            if not batch.seats or batch.tokens <= 0:
                break
            r = x.request
            if x.is_open and batch.rows[begin:] and not self.mixes(batch.rows[begin]):
                break
            if blocked and not r.is_admitted:
                continue
            row = next_row(r, view, min(batch.tokens, chunk))
            if batch.need(r, row) > batch.free_blocks + self.evictable(tier, x.is_open):
                if batch.rows:
                    batch.tokens = 0
                    break
                if not r.is_admitted or not (force or self.is_first(x)):
                    blocked = True
                    continue
            batch.take_prefill(r, row)
            self.tier_of[x.request_id] = tier
        if self.policy.groups is not None:
            new = batch.rows[begin:]
            cut = next_cut(view, self.policy.groups, new)
            ends = [
                cut if row.start_layer < cut else next_cut(view, self.policy.groups, [row])
                for row in new
            ]
            cuts = zip(new, ends, strict=True)
            batch.rows[begin:] = [row._replace(end_layer=end) for row, end in cuts]

    def mixes(self, first: Row) -> bool:
        """Return True if streaming prompts may join the prefill of a row.

        Streaming prompts join a whole prompt only under a token budget, because then the step is
        not longer.
        """
        return self.policy.step_tokens is not None or self.view.by_id[first.request_id].is_open

    def is_first(self, x: Ranked) -> bool:
        """Return True if no request ranks before this request."""
        return x == min(*self.ranking.admitted[:1], *self.ranking.waiting[:1], x)

    # -- layered prefill

    def go_on(self, batch: Batch, groups: Groups, tier: int) -> bool:
        """Add the next group of layers of a started cohort.

        Return True if there is a started cohort.
        """
        members = [x.request for x in self.prefills[tier] if x.request.frontier is not None]
        advance(batch, groups, members)
        return bool(members)

    def layered(self) -> Plan:
        """Return decodes of every tier, and the next group of the first cohort that can advance."""
        prefilling = [tier for tier in self.tiers if self.has_prefill(tier)]
        for force in (False, True):
            for tier in prefilling:
                batch = self.batch(self.tiers, cohorts=(tier,), force=force)
                if batch.num_prefills:
                    return self.finish_plan(batch.rows)
            decodes = self.batch(self.tiers, cohorts=()).rows
            if decodes:
                return self.finish_plan(decodes)
        return Plan()

    # -- the bound on preemptions

    def spared(self) -> Plan | None:
        """Return a plan that continues a pass stopped too often, while an arrival waits."""
        ends_ns = self.policy.max_preemption_wait_ms * NS_PER_MS - self.view.now_ns
        for frame in self.view.frames:
            if frame.alarm_ns is not None and (left_ns := frame.alarm_ns + ends_ns) > 0:
                return replace(self.finish_plan(frame.rows, left_ns), stop_below=NO_STOP)
        return None

    # -- all tiers

    def best(self) -> Plan:
        plan = self.stalled() or self.spared()
        if plan is not None:
            return plan
        if self.policy.groups is not None:
            frames = self.view.frames
            return self.resume(frames[0]) if frames else self.layered()
        shared = self.policy.ride.unbounded
        for position, tier in enumerate(self.tiers):
            if (plan := self.take_turns(tier)) is not None:
                return plan
            plan, decodes_only = self.tiers_plan(self.tiers if shared else (tier,))
            if plan is None:
                continue
            if decodes_only and self.policy.ride.frac and not (shared or self.has_prefill(tier)):
                return self.ride_along(plan, self.tiers[position + 1 :])
            return plan
        rows = self.batch(self.tiers, force=True).rows
        return self.finish_plan(rows) if rows else Plan()

    def tiers_plan(
        self, tiers: Sequence[int], prompts_ns: int | None = None
    ) -> tuple[Plan | None, bool]:
        """Return the plan of one tier or of all tiers, and True if the plan has only decodes.

        Args:
            tiers: Tiers of the plan.
            prompts_ns: Time for prompts; None has no limit. Prompts run alone if steps are cut.
        """
        scoring: list[Row] = []
        most = None
        if prompts_ns is not None:
            most = min(self.prefill_tokens(tiers), self.slice_tokens(prompts_ns))
            if min(self.policy.grain, self.view.finest_grain) == Grain.STEP:
                prompts_ns = None
        alone = prompts_ns is not None
        for frame in self.view.frames:
            tier = self.frame_tier(frame)
            if tier not in tiers or (alone and self.is_stream(frame, tier)):
                continue
            if self.scores(frame):
                scoring += frame.rows
                continue
            if not self.policy.ride.unbounded and self.goes_before(frame, tier):
                batch = self.batch(tiers, max_tokens=most)
                if batch.num_prefills:
                    return self.finish_plan(batch.chosen(alone), prompts_ns), False
            return self.finish_plan(frame.rows, prompts_ns), False
        batch = self.batch(tiers, max_tokens=most, num_others=len(scoring))
        rows = (*batch.chosen(alone), *scoring)
        if not rows:
            return None, False
        return self.finish_plan(rows, prompts_ns), not (batch.num_prefills or scoring)

    def take_turns(self, tier: int) -> Plan | None:
        """Return the plan of a tier whose prompts could delay its streams for too long.

        Returns None if prompts cannot delay the streams (`qllm.scheduler.gaps`). A stream that
        lacks KV does not take part.
        """
        if self.policy.max_prompt_gap_ms is None:
            return None
        frames = [frame for frame in self.view.frames if self.frame_tier(frame) == tier]
        parked = [frame for frame in frames if self.is_stream(frame, tier)]
        if not (len(frames) > len(parked) or self.has_prefill(tier)):
            return None
        loose = fitting(self.view, [x.request for x in self.decodes[tier]])
        streams = [self.view.by_id[row.request_id] for row in loose]
        in_frames = (self.view.by_id[row.request_id] for frame in parked for row in frame.rows)
        streams += [r for r in in_frames if self.tier_of[r.request_id] == tier]
        if not streams:
            return None
        if parked and not self.goes_before(parked[0], tier):
            return self.resume(parked[0])
        newest_ns = max(x.request.last_progress_ns for x in self.ranking.admitted if x.tier == tier)
        turns = Turns(self.view, streams, self.policy.max_prompt_gap_ms)
        if not frames and (batch := self.batch([tier])).num_prefills and turns.share(batch):
            return self.finish_plan(batch.rows)
        slice_ns = turns.slice_ns(newest_ns)
        has_scored = newest_ns > turns.oldest_ns and any(self.scores(frame) for frame in frames)
        # a scoring row has a turn of its own (`qllm.scheduler.scoring`)
        if slice_ns is not None and not has_scored:
            return self.tiers_plan([tier], slice_ns)[0]
        rows = loose if frames else self.batch([tier], cohorts=()).rows
        return self.resume(parked[0]) if parked else self.finish_plan(rows)

    def is_stream(self, frame: FrameView, tier: int) -> bool:
        """Return True if all rows that a frame has of a tier are decodes."""
        own = (row.request_id for row in frame.rows if self.tier_of[row.request_id] == tier)
        return all(self.view.by_id[i].is_decoding for i in own)

    def scores(self, frame: FrameView) -> bool:
        """Return True if the frame alternates with rows of its tier (`qllm.scheduler.scoring`)."""
        get, num_layers = self.view.by_id, self.view.shape.num_layers
        return any(scores(row, get[row.request_id], num_layers) for row in frame.rows)

    def has_prefill(self, tier: int) -> bool:
        """Return True if a request of the tier has prefill left, with or without a seat and KV."""
        return bool(self.prefills[tier] or self.ranking.waiting_of(tier))

    def ride_along(self, best: Plan, worse: Sequence[int]) -> Plan:
        """Let the next worse tier with work use the time that the best tier's decodes can spare.

        The decodes of the worse tier join the step, so that both tiers load the experts once. Other
        work of the worse tier gets a slice of its own. Joined steps and slices alternate, and each
        waits until the credit is large enough.
        """
        decoding = [self.view.by_id[row.request_id] for row in best.rows]
        target_ns, num = tpot_target_ns(decoding), sum([row.num_tokens for row in best.rows])
        allowance = ride_allowance_ns(self.policy, self.view.costs, num, target_ns)
        room_ns = NO_DEADLINE if target_ns is None else self.room_ns(allowance)
        if (ahead := ahead_ns(decoding, self.view.now_ns)) is not None:
            room_ns = min(room_ns, ahead - self.view.costs.decode(num))
        if min(room_ns, self.view.ride_credit_ns) < MIN_SLICE_NS:
            return best
        slice_ns = min(self.view.ride_credit_ns, room_ns)
        for tier in worse:
            waiting = [x.request for x in self.decodes[tier]]
            joining = joining_rows(self.view, best, waiting, room_ns, JOIN_CAP * allowance)
            other = self.other_work(best, tier, len(joining), slice_ns)
            if not joining and other is None:
                continue
            extra = self.view.costs.extra(num, sum([row.num_tokens for row in joining]))
            worth = extra if joining else GOOD_SLICE_NS
            price = max(MIN_SLICE_NS, min(worth, RIDE_CAP * allowance))
            if self.view.ride_credit_ns < price:
                return best
            if other is None or (joining and wait_longer(self.view, joining, other.rows)):
                plan = self.finish_plan((*best.rows, *joining))
                own_too = max(plan.stop_below, self.tier_of[best.rows[0].request_id] + 1)
                return replace(plan, stop_below=own_too if plan.grain > Grain.STEP else NO_STOP)
            return replace(other, slice_ns=min(slice_ns, other.slice_ns or NO_DEADLINE))
        return best

    def room_ns(self, allowance_ns: int) -> int:
        """Return the time left in the present gap under a TPOT target.

        A gap has room for one slice.
        """
        view = self.view
        room = allowance_ns - view.ride_margin_ns - view.ride_used_ns
        return room if view.ride_used_ns else max(MIN_SLICE_NS, room)

    def other_work(self, best: Plan, tier: int, num_joining: int, slice_ns: int) -> Plan | None:
        """Return a parked frame of the tier, or the tier's prefills if seats are left."""
        for frame in self.view.frames:
            if self.frame_tier(frame) == tier:
                return self.resume(frame)
        if len(best.rows) + num_joining >= self.view.max_num_seqs:
            return None
        batch = self.batch([tier], max_tokens=self.slice_tokens(slice_ns))
        rows = [row for row in batch.rows if not self.view.by_id[row.request_id].is_decoding]
        return self.finish_plan(rows) if rows else None


def shape_plan(view: View, policy: RankPolicy, ranking: Ranking | None = None) -> Plan:
    """Return the plan of a `RankPolicy`: rows, their shape, and the limits of their run.

    Args:
        view: State as policies see it.
        policy: Policy with the ranks and the shape.
        ranking: Present order of `view.requests`; None makes the order here.
    """
    if not view.requests:
        return Plan()
    if ranking is None:
        ranking = Ranking(policy, view.requests)
        ranking.update(view.now_ns)
    return _Shaper(view, policy, ranking).best()
