"""Each law of the scheduler turns red when the code it holds is broken by hand.

A mutant is a patch of the decision code, the engine loop or the simulator; its law is the test
that the suite runs anyway. Mutants of the tensors are in `test_mutants_torch.py`.
"""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from qllm.engine.delivery import Delivery
from qllm.errors import PolicyError
from qllm.ingress import Cancel, InprocIngress
from qllm.plan import Plan
from qllm.scheduler.blocks import BlockPool
from qllm.scheduler.decision import Decision, Drop, Parked
from qllm.scheduler.program import Index
from qllm.scheduler.rank_plan import _Shaper
from qllm.scheduler.request import Request
from qllm.scheduler.scheduler import Scheduler
from qllm.sim.runner import SimRunner
from qllm.types import FinishReason, Frontier
from qllm_policies.chunked import Chunked
from qllm_policies.fcfs import Fcfs
from tests.support import scheduling as laws
from tests.support import shape_laws as shapes

Patch = Callable[[pytest.MonkeyPatch], None]


class Mutant(NamedTuple):
    """A broken line and the law that must notice."""

    patch: Patch
    law: Callable[[], None]


def evict_an_equal_rank(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("qllm.scheduler.victims._behind", lambda victim, request: victim is not request)


def evict_for_nothing(patch: pytest.MonkeyPatch) -> None:
    from qllm.scheduler import scheduler

    victims_for = scheduler.victims_for

    def too_few(*asked: Any) -> Any:
        return victims_for(*asked[:5], 1, *asked[6:])

    patch.setattr(scheduler, "victims_for", too_few)


def commit_kv_early(patch: pytest.MonkeyPatch) -> None:
    def park(self: Request, frame_id: int, frontier: Frontier, **_: Any) -> None:
        self.frame_id, self.frontier = frame_id, frontier
        if frontier.layer > 0:
            self.num_computed_tokens = frontier.hi

    patch.setattr(Request, "park", park)


def resume_one_unit_late(patch: pytest.MonkeyPatch) -> None:
    resume = Scheduler._resume

    def late(self: Scheduler, plan: Plan, parked: Parked, *rest: Any) -> Decision:
        decision = resume(self, plan, parked, *rest)
        start = decision.start
        return replace(decision, start=Index(start.op, start.pos + 1 if start.pos else 0))

    patch.setattr(Scheduler, "_resume", late)


def resume_one_op_late(patch: pytest.MonkeyPatch) -> None:
    resume = Scheduler._resume

    def late(self: Scheduler, plan: Plan, parked: Parked, *rest: Any) -> Decision:
        decision = resume(self, plan, parked, *rest)
        return replace(decision, start=Index(decision.start.op + 1, 0))

    patch.setattr(Scheduler, "_resume", late)


def redo_the_op_after_a_stop(patch: pytest.MonkeyPatch) -> None:
    resume = Scheduler._resume

    def early(self: Scheduler, plan: Plan, parked: Parked, *rest: Any) -> Decision:
        decision = resume(self, plan, parked, *rest)
        return replace(decision, start=Index(max(0, decision.start.op - 1), 0))

    patch.setattr(Scheduler, "_resume", early)


def drop_a_cancel(patch: pytest.MonkeyPatch) -> None:
    drain = InprocIngress.drain
    patch.setattr(
        InprocIngress,
        "drain",
        lambda self: [item for item in drain(self) if not isinstance(item, Cancel)],
    )


def lose_the_stop_word(patch: pytest.MonkeyPatch) -> None:
    def drain(self: InprocIngress) -> list[Any]:
        items = []
        while self._items:
            items.append(self._items.popleft())
        self.stop.reset()
        return items

    patch.setattr(InprocIngress, "drain", drain)


def ignore_the_stop_word(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimRunner, "_asked", lambda self, program, stop: False)


def one_seat_too_many(patch: pytest.MonkeyPatch) -> None:
    from qllm.scheduler import rules

    budget = rules._broken_budget

    def lax(plan: Any, requests: Any, view: Any) -> Any:
        return budget(plan, requests, replace(view, max_num_seqs=view.max_num_seqs + 1))

    patch.setattr(rules, "_broken_budget", lax)


def ignore_the_stall_bound(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_Shaper, "stalled", lambda self: None)


def keep_the_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "give_back", lambda *_, **__: None)


def start_anywhere(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("qllm.scheduler.rules._broken_row", lambda row, request, num_layers: None)


def tear_frames(patch: pytest.MonkeyPatch) -> None:
    broken_rule = Scheduler.decide.__globals__["broken_rule"]
    patch.setitem(
        Scheduler.decide.__globals__,
        "broken_rule",
        lambda plan, requests, frames, num_layers, view: broken_rule(
            plan, requests, {}, num_layers, view
        ),
    )


def forget_suspects(patch: pytest.MonkeyPatch) -> None:
    failed = Scheduler.failed

    def forgetful(self: Scheduler) -> Any:
        result = failed(self)
        self.suspects.clear()
        return result

    patch.setattr(Scheduler, "failed", forgetful)


def count_a_dead_row(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimRunner, "kill", lambda self, program, request_id: None)


def finish_twice(patch: pytest.MonkeyPatch) -> None:
    token = Delivery._token

    def twice(self: Delivery, sampled: Any, num_later: int, at_ns: int) -> None:
        live = self._live.get(sampled.request_id)
        token(self, sampled, num_later, at_ns)
        if live is not None and sampled.request_id not in self._live:
            self._sink.on_finish(sampled.request_id, FinishReason.LENGTH, None, None)

    patch.setattr(Delivery, "_token", twice)


def with_drafts() -> None:
    """Check the law of drafts with drafts of which some are right."""
    laws.test_drafts_give_every_request_its_tokens(1, 0.6, 0)


def with_draft_rows() -> None:
    """Check the law of drafts with draft rows through one layer."""
    laws.test_drafts_give_every_request_its_tokens(1, 0.6, 1)


def run_draft_layers_twice(patch: pytest.MonkeyPatch) -> None:
    """The row that verifies begins at the first layer again."""
    leave_frame = Request.leave_frame

    def forget(self: Request, frontier: Frontier) -> None:
        leave_frame(self, frontier)
        if self.exit_layer == frontier.layer:
            self.frontier, self.exit_layer = None, 0

    patch.setattr(Request, "leave_frame", forget)


def commit_a_rejected_draft(patch: pytest.MonkeyPatch) -> None:
    commit = Request.commit

    def all_of_it(self: Request, hi: int, now_ns: int, num_sampled: int) -> None:
        commit(self, hi, now_ns, num_sampled)
        self.num_computed_tokens = hi

    patch.setattr(Request, "commit", all_of_it)


def count_drafts_as_tokens(patch: pytest.MonkeyPatch) -> None:
    commit = Request.commit

    def all_of_it(self: Request, hi: int, now_ns: int, num_sampled: int) -> None:
        commit(self, hi, now_ns, self.samples_at(hi) if num_sampled else 0)

    patch.setattr(Request, "commit", all_of_it)


def ride_for_free(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("qllm.scheduler.rank_plan.MIN_SLICE_NS", -(10**12))
    patch.setattr(Scheduler, "_settle_ride", lambda *args: None)


def chunk_anywhere(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("qllm.scheduler.scheduler.align_rows", lambda rows, *_: list(rows))


def evict_a_cohort_for_its_equal(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("qllm.scheduler.victims._is_between_groups", lambda request: False)


def join_a_cohort_under_way(patch: pytest.MonkeyPatch) -> None:
    go_on = _Shaper.go_on

    def and_more(self: _Shaper, *args: Any) -> bool:
        go_on(self, *args)
        return False

    patch.setattr(_Shaper, "go_on", and_more)


def fill_the_step(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_Shaper, "prefill_tokens", lambda self, tiers: self.view.max_step_tokens)


def wait_for_the_whole_bound(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_Shaper, "margin_ns", lambda self, bound_ns: -2 * bound_ns)


def keep_ranks_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("qllm.scheduler.ranking.Reads", SimpleNamespace(PROGRESS=3, TIME=3))


def lose_who_waits_in_a_frame(patch: pytest.MonkeyPatch) -> None:
    def abort(state: Scheduler) -> list[Drop]:
        found = []
        for parked in [p for p in state.frames.values() if not p.live_rows()]:
            for row in parked.held_rows():
                state.requests[row.request_id].abort_row()
            found.append(Drop(parked.program))
            del state.frames[parked.program.frame_id]
        return found

    patch.setattr("qllm.scheduler.scheduler.let_go", abort)


def poisoned_alone() -> None:
    laws.test_who_fails_twice_fails_alone(Fcfs(), 400)


def any_plan() -> None:
    laws.test_any_plan_within_the_rules_gives_every_request_its_tokens(1)


def budget_of_a_step() -> None:
    shapes.test_a_step_has_no_more_tokens_than_its_budget(Chunked(step_tokens=24))


def bound_of_a_cohort() -> None:
    shapes.test_a_parked_cohort_never_stands_still_longer_than_its_bound(8)


def kept_ranks() -> None:
    shapes.test_a_kept_ranking_is_the_ranking("edf", 0)


MUTANTS = [
    Mutant(evict_an_equal_rank, laws.test_equal_ranks_never_evict_each_other),
    Mutant(evict_for_nothing, laws.test_no_request_is_evicted_for_one_that_cannot_start),
    Mutant(commit_kv_early, laws.test_kv_counts_only_when_the_last_layer_is_reached),
    Mutant(commit_kv_early, any_plan),
    Mutant(resume_one_unit_late, laws.test_a_parked_program_does_every_unit_once),
    Mutant(resume_one_op_late, laws.test_a_parked_program_does_every_unit_once),
    Mutant(redo_the_op_after_a_stop, laws.test_a_parked_program_does_every_unit_once),
    Mutant(drop_a_cancel, laws.test_a_cancelled_request_ends_at_once_and_gives_back_its_blocks),
    Mutant(lose_the_stop_word, laws.test_the_stop_word_survives_the_race_with_drain),
    Mutant(ignore_the_stop_word, laws.test_an_ls_arrival_stops_be_inside_the_layer),
    Mutant(one_seat_too_many, laws.test_more_rows_than_seats_are_refused),
    Mutant(
        ignore_the_stall_bound, laws.test_an_admitted_be_request_never_stalls_longer_than_its_bound
    ),
    Mutant(keep_the_blocks, laws.test_all_blocks_come_back),
    Mutant(start_anywhere, laws.test_bad_plans_are_refused_with_the_rule),
    Mutant(tear_frames, laws.test_half_a_frame_is_refused),
    Mutant(forget_suspects, poisoned_alone),
    Mutant(count_a_dead_row, laws.test_a_cancelled_request_ends_at_once_and_gives_back_its_blocks),
    Mutant(finish_twice, laws.test_all_blocks_come_back),
    Mutant(commit_a_rejected_draft, with_drafts),
    Mutant(count_drafts_as_tokens, with_drafts),
    Mutant(run_draft_layers_twice, with_draft_rows),
    Mutant(ride_for_free, laws.test_be_rides_along_no_longer_than_its_share),
    Mutant(evict_a_cohort_for_its_equal, shapes.test_a_cohort_is_not_evicted_for_its_equals),
    Mutant(
        join_a_cohort_under_way,
        shapes.test_a_layered_prefill_is_one_pass_with_all_decodes_in_every_step,
    ),
    Mutant(fill_the_step, budget_of_a_step),
    Mutant(fill_the_step, shapes.test_the_chunk_of_edf_is_what_the_tightest_decode_can_wait_for),
    Mutant(wait_for_the_whole_bound, bound_of_a_cohort),
    Mutant(keep_ranks_for_ever, kept_ranks),
    Mutant(
        lose_who_waits_in_a_frame,
        shapes.test_rows_that_wait_in_a_frame_keep_their_layers_when_it_dies_inside_one,
    ),
    Mutant(chunk_anywhere, laws.test_chunks_end_on_cuts_in_the_batch_invariant_mode),
]


@pytest.mark.parametrize(
    "mutant", MUTANTS, ids=lambda m: f"{m.patch.__name__}-{m.law.__name__.removeprefix('test_')}"
)
def test_a_mutant_turns_its_law_red(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        mutant.patch(patch)
        with pytest.raises((AssertionError, PolicyError)):
            mutant.law()
    mutant.law()
