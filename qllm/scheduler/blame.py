"""Search for the request that makes a policy raise or break a rule, so that only this request ends.

No content of one request may end another request. If the policy was called for one request (`rank`,
`on_arrival`), that request is to blame. Otherwise trials find the request. A trial copies the
scheduler's state, ends some requests in the copy, calls the hooks of a copied policy for them, and
decides with that policy. If two requests break the policy only together, the newer request ends. If
the policy breaks on every request in turn, the policy is broken: all requests end, or the fallback
policy continues.
"""

import copy
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from qllm.errors import PolicyError, contained, told
from qllm.plan import Plan
from qllm.policy import RankPolicy, StepReport, View, next_row
from qllm.scheduler.compile import align_rows
from qllm.scheduler.request import Request
from qllm.types import RequestId

if TYPE_CHECKING:
    from qllm.scheduler.scheduler import Scheduler

Works = Callable[[Collection[RequestId]], bool]
"""Function of the ids of ended requests. It returns True if the policy works without these
requests."""


class Blame(NamedTuple):
    """Verdict on the requests after an error of the policy."""

    request_ids: tuple[RequestId, ...]
    """Requests to end; empty if the error was about a request that has ended already."""
    others_go_on: bool
    """True if a trial showed that the policy works without these requests."""


class HookError(PolicyError):
    """Error of a policy's hook.

    Args:
        message: Text with the policy, the hook and the error that the hook raised.
        hook: Name of the hook.
        request_ids: Requests for which the hook raised.
        others_go_on: True if the hook is known not to raise for other requests.
    """

    def __init__(
        self, message: str, hook: str, request_ids: tuple[RequestId, ...], others_go_on: bool
    ) -> None:
        super().__init__(message)
        self.hook, self.request_ids, self.others_go_on = hook, request_ids, others_go_on


@dataclass(frozen=True, slots=True)
class Trial:
    """A state of the scheduler in which a policy is tried. Trials run on copies of the state.

    Args:
        scheduler: State to copy.
        now_ns: The engine's clock.
        report: Step to pass to `on_step_done`; None calls for a decision.
    """

    scheduler: "Scheduler"
    now_ns: int
    report: StepReport | None = None

    def without(self, gone: Collection[RequestId]) -> "Trial":
        """Return the trial after these requests have ended, without the requests' rows."""
        report = self.report
        if report is not None:
            report = report._replace(
                rows=tuple(row for row in report.rows if row.request_id not in gone),
                sampled=tuple(i for i in report.sampled if i not in gone),
            )
        return Trial(without(self.scheduler, gone, self.now_ns), self.now_ns, report)

    def works(self, gone: Collection[RequestId]) -> bool:
        """Return True if the policy works once these requests have ended."""
        trial = self.without(gone)
        twin = trial.scheduler
        if trial.report is None:
            try:
                twin.decide(self.now_ns)
            except PolicyError:
                return False
            return True
        try:
            with contained():
                twin.policy.on_step_done(twin.view(self.now_ns), trial.report)
        except Exception:  # noqa: BLE001 - the policy does not work then
            return False
        return True


def blame(scheduler: "Scheduler", error: PolicyError, now_ns: int) -> Blame:
    """Find the requests that a policy has raised on. No state changes.

    Args:
        scheduler: State after the error.
        error: Error that `decide` raised.
        now_ns: The engine's clock.
    """
    trial = Trial(scheduler, now_ns)
    if isinstance(error, HookError):
        return _blame_of_hook(trial, error)
    if error.request_id is None:
        order = list(reversed(scheduler.requests))
        if isinstance(scheduler.policy, RankPolicy):
            # The error is not from a rank, but from the shape of the plan. The scheduler in C++
            # does the same.
            return Blame(tuple(order), False)
        return _blame_of(trial, order)
    if error.request_id not in scheduler.requests:
        return Blame((), True)
    ended = (error.request_id,)
    return Blame(ended, len(scheduler.requests) > 1 and trial.works(ended))


def _blame_of_hook(trial: Trial, error: HookError) -> Blame:
    requests = trial.scheduler.requests
    ended = tuple(i for i in error.request_ids if i in requests)
    if not ended:
        return Blame((), error.others_go_on)
    goes_on = error.others_go_on and len(requests) > len(ended) and trial.works(ended)
    if goes_on and error.hook == "on_arrival":
        goes_on = _accepts_another(trial, ended)
    return Blame(ended, goes_on)


def _accepts_another(trial: Trial, ended: tuple[RequestId, ...]) -> bool:
    """Return True if `on_arrival` accepts the newest request for which it has not raised."""
    raised_on = {i for _, e in trial.scheduler.hook_errors for i in getattr(e, "request_ids", ())}
    twin = trial.without(ended).scheduler
    others = [request for i, request in twin.requests.items() if i not in raised_on]
    if not others:
        return False
    if twin.policy is trial.scheduler.policy:
        return True  # the policy could not be copied, so a trial would change the policy's state
    view = twin.view(trial.now_ns)
    # the request ends first, so that it does not arrive twice
    with suppress(Exception), contained():
        if hook := getattr(twin.policy, "on_finish", None):
            hook(view, others[-1])
    try:
        with contained():
            twin.policy.on_arrival(view, others[-1])
    except Exception:  # noqa: BLE001 - the hook does not accept it then
        return False
    return True


def _blame_of(trial: Trial, order: Sequence[RequestId]) -> Blame:
    """Find by trials the requests to end so that a policy works again.

    Args:
        trial: State in which the policy raised or broke a rule.
        order: Candidates, newest first.
    """
    first = newest_needed(order, trial.works)
    rest = [i for i in order if i != first]
    if not rest:
        return Blame((first,), trial.report is not None and trial.works((first,)))
    if trial.works((first,)):
        return Blame((first,), True)
    ended = (first, *breaking(trial.without((first,)), rest))
    return Blame(ended, len(ended) < len(order) and trial.works(ended))


def breaking(trial: Trial, group: Sequence[RequestId]) -> list[RequestId]:
    """Find the requests of a group on which a policy breaks even without the rest of the group.

    The group is halved until the policy works. Each half starts from the state in which the other
    half has ended already, so the policy is called for O(n log n) ends in all, not O(n^2).

    Args:
        trial: State with the group, and without other requests to blame.
        group: n requests with which the policy does not work.
    """
    if len(group) == 1:
        return list(group)
    middle = len(group) // 2
    found: list[RequestId] = []
    for half, other in ((group[:middle], group[middle:]), (group[middle:], group[:middle])):
        if not trial.works(other):
            found += breaking(trial.without(other), half)
    return found


def newest_needed(order: Sequence[RequestId], works: Works) -> RequestId:
    """Return the newest request that must end, after all newer requests, so that a policy works.

    Args:
        order: Requests, newest first, with which the policy does not work.
        works: Test of the policy without some requests. It is assumed to be True without all
            requests.
    """
    low, high = 0, len(order)
    while high - low > 1:
        middle = (low + high) // 2
        if works(order[:middle]):
            high = middle
        else:
            low = middle
    return order[high - 1]


def plan_suspect(suspects: Sequence[Request], view: View) -> Plan | None:
    """Plan one suspect alone, as far as KV is free, to see whether the suspect fails alone.

    Args:
        suspects: Requests of a frame that raised.
        view: State as policies see it.

    Returns:
        None if no suspect has enough free KV.
    """
    for request in suspects:
        row = next_row(request, view, view.max_step_tokens)
        room = (len(request.block_table) + view.num_free_blocks) * view.block_size
        room -= view.shape.state_tokens
        if request.frame_id is None and row.lo < room:
            if request.frontier is None:
                row = row._replace(hi=min(row.hi, room))
            (row,) = align_rows([row], {request.request_id: request}, view.cuts)
            if row.hi <= room:
                return Plan(rows=(row,))
    return None


def call_hook(
    scheduler: "Scheduler", name: str, subject: Request | StepReport, now_ns: int
) -> PolicyError | None:
    """Call a policy's hook, if the policy has the hook.

    Return the error, with the requests to blame.

    Args:
        scheduler: State with the policy.
        name: Name of the hook.
        subject: Request or report to pass to the hook.
        now_ns: The engine's clock.
    """
    try:
        with contained():
            if (hook := getattr(scheduler.policy, name, None)) is not None:
                hook(scheduler.view(now_ns), subject)
    except Exception as error:  # noqa: BLE001 - the next decision raises the error
        kind = type(scheduler.policy).__name__
        text = f"policy {kind} raised in {name}: {told(error)}"
        if isinstance(subject, Request):
            return HookError(text, name, (subject.request_id,), True)
        order = sorted({row.request_id for row in subject.rows}, reverse=True)
        found = _blame_of(Trial(scheduler, now_ns, subject), order)
        return HookError(text, name, *found)
    return None


def without(scheduler: "Scheduler", gone: Collection[RequestId], now_ns: int) -> "Scheduler":
    """Return a copy of a scheduler's state in which some requests have ended.

    The policy is copied too, and the hook `on_finish` of the copy is called for each ended request.
    If the policy cannot be copied, the original is used, and its hook is not called. The copy of
    the scheduler has no suspects. The scheduler plans suspects without the policy, but a trial must
    call the policy.
    """
    ended = set(gone)
    policy, is_copy = scheduler.policy, True
    try:
        with contained():
            policy = copy.deepcopy(policy)
    except Exception:  # noqa: BLE001 - a lock or file in it; `plan` changes no state
        is_copy = False
    twin = scheduler.empty(policy)
    for request_id, request in scheduler.requests.items():
        if request_id not in ended:
            mine = copy.copy(request)
            mine.block_table = list(request.block_table)
            if mine.num_swapped_tokens:
                twin.swap.put(request_id, twin.pool.blocks_for(mine.num_swapped_tokens))
            twin.requests[request_id] = mine
    twin.pool = scheduler.pool.only({i: r.block_table for i, r in twin.requests.items()})
    twin.paused |= scheduler.paused - ended
    twin.open |= scheduler.open - ended
    for frame_id, parked in scheduler.frames.items():
        mine_parked = replace(parked, dead=parked.dead | ended)
        if mine_parked.held_rows():
            twin.frames[frame_id] = mine_parked
    twin.away = {i: replace(p) for i, p in scheduler.away.items() if i not in ended}
    for request_id in gone if is_copy else ():
        if request_id in scheduler.requests:
            with suppress(Exception), contained():  # the request to blame has ended anyway
                if hook := getattr(policy, "on_finish", None):
                    hook(twin.view(now_ns), scheduler.requests[request_id])
    return twin
