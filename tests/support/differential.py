"""Two schedulers side by side: the native one must decide what the Python one decides.

A `Twin` is the Python scheduler of a `World` which hands every call to a native one as well, and
after each compares what both said and all of both states. `run_trace` puts a random policy shape
into a random world: arrivals, cancels, timeouts, failures, little KV, few seats.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, NamedTuple

from qllm.errors import InvariantError, PolicyError
from qllm.floor import Floor
from qllm.plan import NO_CUTS, CutRule, ModelShape
from qllm.policy import Groups, RankPolicy, Reads, Ride, Slack
from qllm.scheduler.decision import Decision, Effect, Limits
from qllm.scheduler.program import Index, Program
from qllm.scheduler.request import Request
from qllm.scheduler.scheduler import Scheduler
from qllm.sim.check import random_costs
from qllm.sim.world import World
from qllm.types import NS_PER_MS, Evict, FrameId, Grain, RequestId, Slo
from tests.support.native_scheduler import NativeScheduler

_FIELDS = [f.name for f in fields(Request)]


class DifferenceError(InvariantError):
    """The two schedulers do not agree."""


class Twin(Scheduler):
    """The Python scheduler, with a native one that has to say and to be the same."""

    def __init__(
        self,
        policy: Any,
        shape: ModelShape,
        cuts: CutRule,
        limits: Limits,
        native: Callable[..., NativeScheduler] = NativeScheduler,
    ) -> None:
        self.native = native(policy, shape, cuts, limits, capacity=2)
        self.seen: Counter[str] = Counter()
        self._deciding = False
        super().__init__(policy, shape, cuts, limits)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in ("policy", "costs"):
            setattr(self.native, name, value)

    def add(self, request: Request, now_ns: int) -> None:
        """See `Scheduler`."""
        self.native.add(replace(request, block_table=list(request.block_table)), now_ns)
        super().add(request, now_ns)
        self._compare("add")

    def remove(self, request_id: RequestId, now_ns: int) -> list[Effect]:
        """See `Scheduler`."""
        theirs = self.native.remove(request_id, now_ns)
        mine = super().remove(request_id, now_ns)
        self._compare("remove", mine, theirs)
        self._count(mine)
        return mine

    def evict(
        self, request_id: RequestId, for_request: RequestId, how: Evict = Evict.RECOMPUTE
    ) -> list[Effect]:
        """See `Scheduler`; it evicts in `decide` as well, when the native one has done so."""
        mine = super().evict(request_id, for_request, how)
        if not self._deciding:
            self._compare("evict", mine, self.native.evict(request_id, for_request))
            self._count(mine)
        return mine

    def adopt(self, request: Request) -> None:
        """See `Scheduler`."""
        self.native.adopt(replace(request, block_table=[]))
        super().adopt(request)
        self._compare("adopt")

    def adopt_frame(
        self, program: Program, index: Index, dead: set[RequestId], now_ns: int
    ) -> None:
        """See `Scheduler`."""
        self.native.adopt_frame(program, index, dead, now_ns)
        super().adopt_frame(program, index, dead, now_ns)
        self._compare("adopt_frame")

    def new_frame_id(self) -> FrameId:
        """See `Scheduler`."""
        if not self._deciding:
            self.native.new_frame_id()
        return super().new_frame_id()

    def decide(self, now_ns: int) -> Decision:
        """See `Scheduler`."""
        self._deciding = True
        mine, my_error = _tried(super().decide, now_ns)
        theirs, their_error = _tried(self.native.decide, now_ns)
        self._deciding = False
        self._compare("decide", (mine, my_error), (theirs, their_error))
        self.seen["decisions"] += 1
        self.seen["refused"] += my_error is not None
        if my_error is not None:
            raise PolicyError(my_error)
        assert mine is not None
        self._count(mine.effects)
        self.seen["resume"] += mine.resumed
        self.seen["turn"] += self.be_share.now.pays
        self.seen["turn resumes"] += self.be_share.now.pays and mine.resumed
        self.seen["slice"] += mine.slice_ns is not None
        self.seen["replaced"] += mine.limit is not None
        return mine

    def done(self, end: Index, sampled: Sequence[RequestId], start_ns: int, end_ns: int) -> None:
        """See `Scheduler`."""
        super().done(end, sampled, start_ns, end_ns)
        self.native.done(end, sampled, start_ns, end_ns)
        self._compare("done")

    def stopped(self, end: Index, start_ns: int, end_ns: int, *, preempted: bool) -> bool:
        """See `Scheduler`."""
        mine = super().stopped(end, start_ns, end_ns, preempted=preempted)
        native = self.native.stopped(end, start_ns, end_ns, preempted=preempted)
        self._compare("stopped", mine, native)
        return mine

    def failed(self) -> tuple[list[Effect], list[Request]]:
        """See `Scheduler`."""
        mine = super().failed()
        self._compare("failed", mine, self.native.failed())
        return mine

    def check(self) -> None:
        """See `Scheduler`."""
        super().check()
        self.native.check()

    def _count(self, effects: Sequence[Effect]) -> None:
        self.seen.update(type(effect).__name__.lower() for effect in effects)

    def _compare(self, where: str, mine: Any = None, theirs: Any = None) -> None:
        ours = {"answer": mine, **_state(self)}
        others = {"answer": theirs, **_state(self.native)}
        for name, value in ours.items():
            if value != others[name]:
                raise DifferenceError(
                    f"after {where}: {name} is {value}, the native one's {others[name]}"
                )


def _tried(call: Callable[..., Any], *args: Any) -> tuple[Decision | None, str | None]:
    try:
        return call(*args), None
    except PolicyError as error:
        return None, str(error)


def _state(scheduler: Scheduler | NativeScheduler) -> dict[str, Any]:
    """Everything that a later decision may depend on."""
    requests = {
        i: [getattr(request, name) for name in _FIELDS] for i, request in scheduler.requests.items()
    }
    return {
        "requests": requests,
        "frames": list(scheduler.frames.items()),
        "running": scheduler.running,
        "riding": scheduler.riding,
        "owed": scheduler.be_share.now if isinstance(scheduler, Scheduler) else scheduler.owed,
        "suspects": scheduler.suspects,
        "num_free": scheduler.pool.num_free,
    }


# -- random shapes and worlds


@dataclass(frozen=True, kw_only=True)
class AnyShape(RankPolicy):
    """A rank policy with every parameter of the closed set of shapes, and one of five ranks."""

    grain: Grain = field(default=Grain.STEP)
    step_tokens: int | None = field(default=None)
    slack: Slack | None = field(default=None)
    groups: Groups | None = field(default=None)
    ride: Ride = field(default=Ride())
    kind: int = 0

    @property
    def reads(self) -> Reads:  # type: ignore[override]
        """What the chosen rank reads."""
        return (Reads.FIXED, Reads.FIXED, Reads.FIXED, Reads.PROGRESS, Reads.TIME)[self.kind]

    def rank(
        self,
        arrival_ns: int,
        priority: int,
        deadline_ns: int,
        prompt_tokens: int,
        done_tokens: int,
        served_ns: int,
        now_ns: int,
    ) -> tuple[int, int]:
        """First come; by class; short first in two tiers; by service; by deadline and age."""
        if self.kind == 0:
            return 0, arrival_ns
        if self.kind == 1:
            return priority, arrival_ns
        if self.kind == 2:
            return priority // 5, prompt_tokens
        if self.kind == 3:
            return priority, served_ns - done_tokens * 1000
        age_ms = (now_ns - arrival_ns) // NS_PER_MS
        return max(0, priority - age_ms // 40), min(deadline_ns, arrival_ns)


def random_shape(rng: random.Random) -> AnyShape:
    """A policy with random parameters."""
    prefill = rng.choice(["whole", "chunk", "step", "both", "slack", "layered", "layered"])
    steps = rng.choice([8, 24, 100]) if prefill in ("step", "both") else None
    shape = AnyShape(
        grain=rng.choice(list(Grain)),
        chunk_tokens=rng.choice([1, 16, 60]) if prefill in ("chunk", "both") else None,
        step_tokens=steps,
        slack=Slack(rng.choice([1, 10, 64]), rng.choice([20, 100])) if prefill == "slack" else None,
        groups=Groups(rng.choice([1, 30, 200]), rng.choice([1, 3, 16]))
        if prefill == "layered"
        else None,
        ride=rng.choice([Ride(), Ride(unbounded=True), Ride(frac=0.1), Ride(frac=2.0)]),
        max_be_stall_ms=rng.choice([None, 100, 300]),
        kind=rng.randrange(5),
    )
    if shape.ride.unbounded or shape.groups is not None:
        return shape
    gap_ms = random.Random(repr(shape)).choice([None, 1, 20, 100])  # seeds keep their worlds
    return replace(shape, max_prompt_gap_ms=gap_ms)


def random_floor(rng: random.Random, limits: Limits) -> Floor:
    """A floor of a random share, or none."""
    share = rng.choice([0.0, 0.01, 0.2, 0.6])
    return Floor.of(share, rng.choice([100, 1000]), limits.max_segment_ns / NS_PER_MS)


class Outcome(NamedTuple):
    """What a trace was made of."""

    seen: Counter[str]
    """Decisions, effects, resumes and slices that both schedulers agreed on."""
    num_events: int


def random_world(policy: Any, rng: random.Random, scheduler: Callable[..., Any] = Twin) -> World:
    """A world with a random load, in which nothing is plenty."""
    longest = rng.choice([20, 60, 200, 700])
    block_size = rng.choice([1, 16])
    fit = -(-(longest + 16) // block_size)
    exact = rng.random() < 0.2
    limits = Limits(
        max_num_seqs=rng.choice([1, 2, 3, 8]),
        max_step_tokens=rng.choice([32, 256, 4096]),
        block_size=block_size,
        num_blocks=rng.choice([fit, fit + fit // 3, 2 * fit, 8 * fit]),
        grain=rng.choice([Grain.STEP, Grain.LAYER, Grain.EXPERT, Grain.EXPERT]),
        max_segment_ns=rng.choice([NS_PER_MS // 2, 5 * NS_PER_MS]),
        batch_invariant=exact,
        whole_steps=longest in (20, 700),  # no draw of its own: seeds keep their worlds
    )
    limits = replace(limits, floor=random_floor(random.Random(repr(limits)), limits))
    costs = random_costs(rng)
    layers = rng.choice([3, 7])
    shape = ModelShape(layers, 4, 2, (False, *[True] * (layers - 1)), 97, 4096)
    cuts = (
        NO_CUTS._replace(max_cost=70.0, attn_cost_per_kv=0.01, max_block=64) if exact else NO_CUTS
    )
    world = World(policy, limits, shape=shape, costs=costs, cuts=cuts, scheduler=scheduler)
    at_ns = 0
    rate = rng.choice([1, 10, 50]) * NS_PER_MS
    classes: list[int] = rng.choice([[0, 10], [10], [-3, 0, 4, 10]])
    for _ in range(rng.choice([3, 6, 12, 20])):
        at_ns += int(rng.expovariate(1) * rate)
        chance = rng.random()
        request_id = world.submit(
            rng.choice(classes),
            rng.randint(1, longest),
            rng.choice([1, 3, 10]),
            at_ns=at_ns,
            timeout_ns=int(rng.random() * 200 * NS_PER_MS) if chance < 0.1 else None,
            slo=rng.choice([Slo(), Slo(), Slo(50.0, 5.0), Slo(None, 40.5), Slo(900.0, None)]),
        )
        if 0.1 <= chance < 0.3:
            world.cancel(request_id, at_ns + int(rng.random() * 60 * NS_PER_MS))
        elif 0.3 <= chance < 0.4:
            world.runner.poisoned[request_id] = rng.randint(1, 2)
    return world


def _disturb(world: World, rng: random.Random) -> None:
    """Now and then stop the next program, cancel somebody, or take somebody's KV."""
    world.on_boundary = None
    chance, live = rng.random(), sorted(world.loop.live)
    if chance < 0.15:
        left = [rng.randint(1, 12)]

        def look() -> None:
            left[0] -= 1
            if left[0] == 0:
                world.ingress.stop.lower(-5)

        world.on_boundary = look
    elif chance < 0.18 and live:
        parked = [i for i in live if world.scheduler.requests[i].frame_id is not None]
        world.cancel(rng.choice(parked or live))
    elif chance < 0.21:
        held = [i for i, r in world.scheduler.requests.items() if r.is_admitted]
        for effect in world.scheduler.evict(rng.choice(held), 0) if held else ():
            world.loop.effects.apply(effect)


def run_trace(
    policy: Any, seed: str, native: Callable[..., NativeScheduler] = NativeScheduler
) -> Outcome:
    """Serve a random world with both schedulers.

    Raises:
        DifferenceError: They did not agree.
    """
    rng = random.Random(seed)
    world = random_world(policy, rng, partial(Twin, native=native))
    for _ in range(20_000):
        if world.idle:
            break
        _disturb(world, rng)
        world.step()
    else:
        raise DifferenceError(f"trace {seed} does not end")
    twin = world.scheduler
    assert isinstance(twin, Twin)
    return Outcome(twin.seen, len(world.record))
