"""A check of a policy before it serves: `check_policy` runs it in random worlds.

In each `World` random requests arrive, are cancelled, fail, and run out of KV and seats. Some
prompts grow and change. At every decision the policy must be deterministic, must not change its
input, and must keep the invariants. At the end every request must have its tokens.
"""

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, NamedTuple

from qllm.errors import PolicyError
from qllm.plan import NO_CUTS, Plan
from qllm.policy import RankPolicy, StepReport, View
from qllm.scheduler.decision import Decision, Limits, Parked
from qllm.scheduler.program import Index, OpKind
from qllm.scheduler.ranking import rank_all
from qllm.scheduler.request import Request
from qllm.scheduler.scheduler import Scheduler
from qllm.sim.held_gaps import HeldGaps
from qllm.sim.runner import SimCosts
from qllm.sim.world import LIMITS, World
from qllm.types import (
    NS_PER_MS,
    Cap,
    FinishReason,
    Grain,
    Priority,
    Slo,
)

STEPS_PER_TOKEN = 60
"""Most steps per output token. A world that needs more counts as one that does not end."""


class Report(NamedTuple):
    """Counts and stalls that `check_policy` saw."""

    policy: str
    num_states: int
    """Number of decisions that the policy made."""
    num_requests: int
    preemptions: int
    evictions: int
    longest_stall_ms: float
    """Longest time in ms that an admitted request of a class other than LS made no progress."""


class Watched(Scheduler):
    """A scheduler that calls its policy twice, and compares the policy's input before and after."""

    num_states = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        bound_ms = getattr(self.policy, "max_prompt_gap_ms", None)
        self.gaps = None if bound_ms is None else HeldGaps(self)

    def decide(self, now_ns: int) -> Decision:
        """See `Scheduler`."""
        decision = super().decide(now_ns)
        if self.gaps is not None:
            self.gaps.decided(decision, now_ns)
        return decision

    def _progress(self, parked: Parked, end: Index, start_ns: int, end_ns: int) -> None:
        wrong = None if self.gaps is None else self.gaps.ran(end_ns - start_ns, start_ns)
        super()._progress(parked, end, start_ns, end_ns)
        if wrong is not None:
            raise self._broken(wrong)

    def _ask(self, view: View) -> Plan:
        twin = copy.deepcopy(self.policy)
        with self._unchanged("plan"):
            plan = super()._ask(view)
        mine, self.policy = self.policy, twin
        try:
            again = super()._ask(view)
        finally:
            self.policy = mine
        if again != plan:
            raise self._broken(f"is not deterministic: for one state it planned {plan}, {again}")
        if isinstance(mine, RankPolicy):
            for ranked in rank_all(view.requests, view.now_ns, mine):
                if not (isinstance(ranked.tier, int) and isinstance(ranked.key, int)):
                    pair = (ranked.tier, ranked.key)
                    raise self._broken(f"ranks request {ranked.request_id} {pair}, not two ints")
        self.num_states += 1
        return plan

    def stopped(self, end: Index, start_ns: int, end_ns: int, *, preempted: bool) -> bool:
        """Stop a frame as `Scheduler` does, and check the policy's own bound on preemptions."""
        parked, most = self.running, getattr(self.policy, "max_preemptions", None)
        alarm_ns = None if parked is None else parked.alarm_ns
        found = super().stopped(end, start_ns, end_ns, preempted=preempted)
        if found and most is not None and parked is not None:
            wait_ns = self.policy.max_preemption_wait_ms * NS_PER_MS
            if alarm_ns is not None and end_ns >= alarm_ns + wait_ns:
                return found
            for row in parked.held_rows():
                request = self.requests[row.request_id]
                if request.priority > Priority.LS and request.preemptions > most:
                    raise self._broken(
                        f"lets request {row.request_id} be preempted {request.preemptions} times "
                        f"by who has not waited for it; max_preemptions={most}"
                    )
        return found

    def _hook(self, name: str, now_ns: int, subject: Request | StepReport) -> None:
        with self._unchanged(name):
            super()._hook(name, now_ns, subject)

    @contextmanager
    def _unchanged(self, where: str) -> Iterator[None]:
        before = self._state()
        yield
        if self._state() != before:
            raise self._broken(f"changes requests or frames in {where}; a view is read-only")

    def _state(self) -> list[Any]:
        state: list[Any] = [self.pool.num_free, *self.riding, *self.suspects]
        for request in self.requests.values():
            state += [getattr(request, name) for name in _FIELDS]
            state.append(tuple(request.block_table))
        for frame_id, parked in self.frames.items():
            state += [frame_id, parked.index, frozenset(parked.dead)]
        return state


_FIELDS = [f.name for f in fields(Request) if f.name != "block_table"]


def random_costs(rng: random.Random) -> SimCosts:
    """Return random costs of a simulated engine, a quick or a slow one."""
    slow = rng.choice([1, 3])
    return SimCosts(
        op_ns=20_000 * slow,
        attn_token_ns=1_000 * slow,
        expert_ns=300_000 * slow,
        expert_token_ns=500 * slow,
        head_ns=500_000 * slow,
    )


def _random_world(policy: Any, rng: random.Random, *, swaps: bool) -> World:
    longest = rng.choice([40, 200, 700])
    block_size = rng.choice([1, 16])
    fit = -(-(longest + 16) // block_size)
    limits = Limits(
        max_num_seqs=rng.choice([1, 2, 3, 8]),
        max_step_tokens=rng.choice([32, 256, 4096]),
        block_size=block_size,
        num_blocks=rng.choice([fit, fit + fit // 3, 2 * fit, 8 * fit]),
        grain=rng.choice(list(Grain)),
        max_segment_ns=5 * NS_PER_MS,
        batch_invariant=rng.random() < 0.2,
    )
    if swaps:
        limits = replace(
            limits,
            num_swap_blocks=rng.choice([fit // 2, fit, 8 * fit]),
            capabilities=limits.capabilities | Cap.KV_SWAP,
        )
    costs = random_costs(rng)
    cuts = NO_CUTS._replace(max_block=32) if limits.batch_invariant else NO_CUTS
    start_ns = rng.choice([0, rng.randrange(10**12)])
    world = World(policy, limits, costs=costs, cuts=cuts, scheduler=Watched, start_ns=start_ns)
    at_ns = start_ns
    rate = rng.choice([1, 10, 50]) * NS_PER_MS
    classes: list[int] = rng.choice([[0, 10], [10], [-3, 0, 4, 10]])
    for _ in range(rng.randint(2, 9)):
        at_ns += int(rng.expovariate(1) * rate)
        chance = rng.random()
        request_id = world.submit(
            rng.choice(classes),
            rng.randint(1, longest),
            rng.randint(1, 15),
            at_ns=at_ns,
            timeout_ns=int(rng.random() * 200 * NS_PER_MS) if chance < 0.1 else None,
            slo=rng.choice([Slo(), Slo(ttft_ms=50.0, tpot_ms=rng.choice([5.0, 40.0]))]),
        )
        if 0.1 <= chance < 0.2:
            world.cancel(request_id, at_ns + int(rng.random() * 100 * NS_PER_MS))
        elif 0.2 <= chance < 0.3:
            world.runner.poisoned[request_id] = rng.randint(1, 2)
    return world


def _streaming_prompts(world: World, rng: random.Random) -> World:
    """Add prompts that grow and change while other requests are served."""
    longest = min(700, world.scheduler.limits.num_blocks * world.scheduler.limits.block_size - 16)
    at_ns = world.clock.at_ns
    for _ in range(rng.randint(1, 4)):
        at_ns += int(rng.expovariate(1) * 20 * NS_PER_MS)
        number = world.submit(rng.choice([0, 10]), 0, rng.randint(1, 8), at_ns=at_ns, is_open=True)
        then_ns, known = at_ns, 0
        pieces = rng.randint(1, 6)
        for i in range(pieces):
            then_ns += int(rng.expovariate(1) * rng.choice([1, 30]) * NS_PER_MS)
            keep = known if rng.random() < 0.6 else rng.randint(0, known)
            more = rng.randint(keep == 0, max(1, min(longest - keep, 200)))
            known = min(keep + more, longest)
            world.revise(number, keep, known - keep, then_ns, is_open=i + 1 < pieces)
        if rng.random() < 0.2:
            world.cancel(number, at_ns + int(rng.random() * 100 * NS_PER_MS))
    return world


def overload(policy: Any, bound_ms: int, *, swaps: bool = False) -> World:
    """Return a world with too many LS requests for three times the bound, and a few BE requests.

    Args:
        policy: Policy of the world.
        bound_ms: Stall bound in ms that the policy declares.
        swaps: True if LS requests take all KV, so that BE is swapped out.
    """
    costs = SimCosts(expert_ns=1_000_000, head_ns=2 * NS_PER_MS)
    limits = LIMITS
    if swaps:
        caps = limits.capabilities | Cap.KV_SWAP
        limits = replace(limits, num_blocks=28, num_swap_blocks=280, capabilities=caps)
    world = World(policy, limits, costs=costs, scheduler=Watched)
    for size in (200, 400, 30):
        world.submit(Priority.BE, size, 30 if swaps else 3)
    at_ns, end_ns = 5 * NS_PER_MS, 3 * bound_ms * NS_PER_MS
    while at_ns < end_ns:
        world.submit(Priority.LS, 60, 12 if swaps else 2, at_ns=at_ns)
        at_ns += 15 * NS_PER_MS
    return world


def flood(policy: Any, rng: random.Random) -> World:
    """Return a world of streams with and without targets, and too many prompts of their class."""
    limits = replace(
        LIMITS,
        max_num_seqs=rng.choice([3, 8, 32]),
        max_step_tokens=rng.choice([512, 4096]),
        num_blocks=rng.choice([300, 4096]),
        grain=rng.choice(list(Grain)),
        max_segment_ns=rng.choice([1, 5]) * NS_PER_MS,
    )
    world = World(policy, limits, costs=random_costs(rng), scheduler=Watched)
    classes = rng.choice([[0], [10], [0, 0, 10]])
    for _ in range(rng.randint(1, 4)):
        slo = rng.choice([Slo(), Slo(tpot_ms=rng.choice([4.0, 10.0, 40.0]))])
        world.submit(rng.choice(classes), rng.randint(1, 40), rng.randint(5, 30), slo=slo)
    longest = rng.choice([20, 400, 3000])
    for _ in range(rng.randint(4, 12)):
        at_ns = rng.randint(0, 60) * NS_PER_MS
        world.submit(rng.choice(classes), rng.randint(1, longest), rng.randint(1, 3), at_ns=at_ns)
    return world


def longest_gap_ns(world: World, longest_run_ns: int) -> int:
    """Return the longest time in ns between two boundaries that the policy may use."""
    grain = min(
        world.scheduler.limits.grain, getattr(world.scheduler.policy, "grain", Grain.EXPERT)
    )
    if grain is Grain.STEP:
        return longest_run_ns
    segment_ns = world.runner.segments.longest_ns
    ops = max(len(OpKind), world.runner.shape.num_experts + len(OpKind))
    return segment_ns if grain is Grain.EXPERT else segment_ns * ops


class _StallWatch:
    """A check of a world against the stall bound that its policy declares (I14)."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.longest_run_ns = 0
        self.longest_stall_ns = 0

    def _counts(self, request: Request) -> bool:
        """Return True if the request holds KV, or was swapped out to make room for others."""
        if request.is_admitted or not request.num_swapped_tokens:
            return request.is_admitted
        scheduler = self.world.scheduler
        return bool(scheduler.swap.num_free >= scheduler.limits.num_blocks)

    def look(self, began_ns: int) -> None:
        now = self.world.clock.at_ns
        self.longest_run_ns = max(self.longest_run_ns, now - began_ns)
        policy = self.world.scheduler.policy
        for request in self.world.scheduler.requests.values():
            if request.priority <= Priority.LS or request.is_idle or not self._counts(request):
                continue
            stall = now - request.last_progress_ns
            self.longest_stall_ns = max(self.longest_stall_ns, stall)
            bound_ms = getattr(policy, "max_be_stall_ms", None)
            if bound_ms is None:
                continue
            allowed = bound_ms * NS_PER_MS + longest_gap_ns(self.world, self.longest_run_ns)
            if stall > allowed:
                raise PolicyError(
                    f"policy {type(policy).__name__} lets request {request.request_id} stand "
                    f"still for {stall / NS_PER_MS:.0f} ms; max_be_stall_ms={bound_ms} (I14)"
                )


def watch(world: World) -> int:
    """Serve a world to its end under every check; return the longest BE stall in ns.

    Raises:
        PolicyError: The policy broke a rule; the message names both.
    """
    stalls = _StallWatch(world)
    budget = STEPS_PER_TOKEN * (50 + sum(s.max_tokens for s in world.submitted.values()))
    while not world.idle:
        began_ns = world.clock.at_ns
        world.step()
        if world.loop.policy_errors:
            raise PolicyError(world.loop.policy_errors[0])
        stalls.look(began_ns)
        budget -= 1
        if budget < 0:
            world.run(max_steps=0)
    _check_ends(world)
    return stalls.longest_stall_ns


def _check_ends(world: World) -> None:
    name = type(world.scheduler.policy).__name__
    for request_id, item in world.submitted.items():
        reason = world.finished.get(request_id)
        if reason is None:
            raise PolicyError(f"policy {name}: request {request_id} never finished (I13)")
        if reason is FinishReason.LENGTH and world.tokens[request_id] != item.max_tokens:
            raise PolicyError(f"policy {name}: request {request_id} lost tokens (I1)")
    if world.scheduler.pool.num_free != world.scheduler.limits.num_blocks:
        raise PolicyError(f"policy {name}: blocks are left over when nothing is live")


def check_policy(policy: Any, *, num_states: int = 2000, seed: int = 0) -> Report:
    """Run a policy in random worlds and look for broken rules.

    The policy must be deterministic (an equal copy gives an equal plan for the same state). The
    policy must not change its input, and must plan nothing that an invariant forbids. It must let
    every request finish, and must keep the bounds on stalls and gaps that it declares.

    Args:
        policy: A `RankPolicy` or a `Policy`; every world gets a copy of it.
        num_states: Least number of decisions.
        seed: Seed of the random worlds.

    Raises:
        PolicyError: The policy broke a rule; the message names the policy, the rule and the world.
        ConfigError: The policy needs a capability that this engine does not have.
    """
    states = requests = preemptions = evictions = stall_ns = number = 0
    bound_ms = getattr(policy, "max_be_stall_ms", None)
    has_gap = getattr(policy, "max_prompt_gap_ms", None) is not None
    while states < num_states:
        rng, own = random.Random(f"{seed}-{number}"), copy.deepcopy(policy)
        if has_gap and number % 3 == 0:
            world = flood(own, rng)
        elif number - has_gap < 2 and bound_ms is not None:
            world = overload(own, bound_ms, swaps=number - has_gap == 1)
        else:
            world = _random_world(own, rng, swaps=number % 4 == 3)
        if number % 3 == 2:
            _streaming_prompts(world, random.Random(f"{seed}-{number} open"))
        try:
            stall_ns = max(stall_ns, watch(world))
        except PolicyError as error:
            raise PolicyError(f"{error} [world {number} of seed {seed}]") from error
        scheduler = world.scheduler
        assert isinstance(scheduler, Watched)
        states += scheduler.num_states
        requests += len(world.submitted)
        done = [m for m in world.metrics.values() if m is not None]
        preemptions += sum(m.preemptions for m in done)
        evictions += sum(m.evictions for m in done)
        number += 1
    return Report(
        policy=type(policy).__name__,
        num_states=states,
        num_requests=requests,
        preemptions=preemptions,
        evictions=evictions,
        longest_stall_ms=stall_ns / NS_PER_MS,
    )
