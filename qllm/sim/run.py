"""Requests served on a virtual clock by the real loop, scheduler, policy and block accounting.

Only the runner (`qllm.sim.runner`) and the ingress are simulated. The same arguments give the same
events. No code here draws a random number or reads a clock, except for the reported CPU time.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from qllm.config import EngineConfig
from qllm.cores import no_collections
from qllm.engine.costs import StepCosts
from qllm.engine.kv.prefix import PrefixCache
from qllm.engine.limits import limits_of
from qllm.engine.loop import EngineLoop
from qllm.engine.sizes import with_usual_sizes
from qllm.engine.storage.reads import DiskOrder
from qllm.engine.storage.waits import ExpertWaits, parks_for_experts
from qllm.errors import ConfigError, PolicyError
from qllm.ingress import LOOK, Revision, Submission
from qllm.plugins import load_policy
from qllm.record.metrics import RequestMetrics
from qllm.record.trace import Arrived, Event, Trace
from qllm.scheduler.prefix import PageStore
from qllm.scheduler.scheduler import Scheduler
from qllm.sim.costs import CostFile
from qllm.sim.experts import ExpertsOnDisk, ReadingIngress, ReadingRunner, VirtualReads
from qllm.sim.ingress import VirtualIngress
from qllm.sim.ranks import SHARED_MEMORY, Link
from qllm.sim.runner import SimRunner, VirtualClock
from qllm.sim.timeline import Gathers
from qllm.types import NS_PER_S, FinishReason, RequestId, Sampled, SamplingParams
from qllm.workloads.mix import Sent
from qllm.workloads.sessions import Conversations
from qllm.workloads.spec import Arrival, RequestSpec
from qllm.workloads.tokens import with_tokens

_SAMPLING = SamplingParams(temperature=0.0, seed=0, ignore_eos=True)
_IDLE_TURNS = 10_000
"""Most idle decisions in a row while work waits and no request will arrive. More count as a
stall."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated(Sent):
    """A workload served on a virtual clock. All times are virtual, except `cpu_s`."""

    expert_loads: int
    """Number of expert reads: one per distinct expert of each EXPERTS op."""
    gathers: Gathers
    """Times at which ranks waited for each other, and the bytes that all of them wrote."""
    decisions: int
    """Number of iterations of the engine loop."""
    cpu_s: float
    """CPU seconds of the simulation."""
    experts: dict[str, Any] = field(default_factory=dict)
    """Uses, loads, bytes and waits of "LS" and "BE", as `engine.stats()` has them; {} without a
    disk."""


@dataclass(slots=True)
class Flood:
    """Requests of which a constant number is unfinished. One arrives when one ends.

    The `at_s` of the requests is not used.
    """

    specs: Iterator[RequestSpec]
    depth: int
    """Number of unfinished requests at any time."""


class _LeanTrace(Trace):
    """A trace of events without prompts, which have no meaning here."""

    def append(self, event: Event) -> None:
        if isinstance(event, Arrived):
            event = replace(event, token_ids=None, sampling=None)
        self.events.append(event)


class SimulatedEngine:
    """The parts of a simulated engine, and the sink of its loop.

    Args:
        policy: Policy object.
        costs: Costs of the model on the machine.
        config: Settings of the engine.
        move_token_ns: Nanoseconds, see `simulate`.
        ingress: Factory of the ingress.
        has_tokens: True if prompts have tokens, so that their KV is cached.
        link: Time of a gather of ranks, if `config` has several.
        disk: Experts in a file; None has all in memory. Its ingress is a `ReadingIngress`.
    """

    def __init__(
        self,
        policy: Any,
        costs: CostFile,
        config: EngineConfig,
        move_token_ns: int | None = None,
        ingress: Callable[[VirtualClock], VirtualIngress] = VirtualIngress,
        has_tokens: bool = False,
        link: Link = SHARED_MEMORY,
        disk: ExpertsOnDisk | None = None,
    ) -> None:
        if config.prefix_cache not in ("auto", False):
            raise ConfigError(
                f"prefix_cache={config.prefix_cache!r} cannot be simulated: only the prompts of "
                "sessions have tokens, and 'auto' caches those; leave it at 'auto'"
            )
        if config.kv_dir is not None:
            raise ConfigError(f"kv_dir={config.kv_dir!r} cannot be simulated; leave it out")
        config.refuse_apart("a simulation without a disk", on_ranks=disk is None)
        self.clock = VirtualClock()
        self.ingress = ingress(self.clock)
        self.record = _LeanTrace()
        self.refused = 0
        self._config = config
        self._count = 0
        self._turns = self._idle = 0
        self._flood: Flood | None = None
        self._of_flood: set[RequestId] = set()
        self._talks = Conversations(())
        self._talking: dict[RequestId, tuple[Arrival, list[int]]] = {}
        """Open requests that others follow, with their answers so far."""
        shape = costs.model_shape()
        self.runner = (SimRunner if disk is None else ReadingRunner)(
            shape,
            self.clock,
            costs.sim_costs(),
            costs.cut_rule(),
            self.ingress,
            config.block_size,
            costs.prices(config.tp, link),
        )
        simulated = round(self.runner.costs.swap_token_ns)
        move_ns = simulated if move_token_ns is None else move_token_ns
        scheduler = Scheduler(policy, shape, self.runner.cuts, limits_of(config))
        caches = has_tokens and config.prefix_cache is not False
        self.loop = EngineLoop(
            self.ingress,
            scheduler,
            self.runner,
            self,
            self.clock,
            self.record,
            fallback=load_policy("fcfs") if config.on_policy_error == "fcfs" else None,
            prefix=self._prefix_cache(scheduler) if caches else None,
            costs=StepCosts(lambda: move_ns),
        )
        self._waits: ExpertWaits | None = None
        if disk is not None:
            self.loop.waits = self._waits = self._read_from(disk, scheduler)

    def _read_from(self, disk: ExpertsOnDisk, scheduler: Scheduler) -> ExpertWaits:
        """Return the waits for experts of a disk."""
        runner, ingress, policy = self.runner, self.ingress, scheduler.policy
        assert isinstance(runner, ReadingRunner)
        assert isinstance(ingress, ReadingIngress)
        if not parks_for_experts(policy):
            raise ConfigError(
                f"policy {type(policy).__name__} stops inside no pass, so its experts are read "
                "while all requests wait, and that is not simulated; take another policy, or leave "
                "max_expert_bytes out"
            )
        places = disk.placement(runner.shape)
        runner.use_disk(places, disk.routing)
        made: list[VirtualReads] = []

        def reads(*args: Any) -> VirtualReads:
            made.append(VirtualReads(*args, disk=disk))
            return made[0]

        waits = ExpertWaits(
            scheduler, places, runner.missing,
            lambda: ingress.put_at(made[0].at_ns, LOOK), self.clock, DiskOrder(), threads=reads,
        )  # fmt: skip
        ingress.reads = made[0]
        return waits

    @property
    def experts(self) -> dict[str, Any]:
        """Return uses, loads, bytes and waits of experts by class; {} without a disk."""
        if self._waits is None:
            return {}
        stats = self._waits.stats()
        return {name: stats[name] for name in ("LS", "BE")}

    def _prefix_cache(self, scheduler: Scheduler) -> PrefixCache:
        config = self._config
        pages = config.kept_tokens // config.page_size
        store = PageStore[Any](pages, int(config.keep_ls_s * NS_PER_S))
        keeper: Any = self.runner  # without the methods for files and states, which nothing calls
        return PrefixCache(
            keeper, "", store, config.page_size, scheduler.found, self.clock,
            scheduler.pool, named=scheduler.name_pages,
        )  # fmt: skip

    def fits(self, spec: RequestSpec) -> bool:
        """Return True if the engine can hold a request. `submit` refuses others."""
        total = spec.longest_prompt + spec.max_tokens
        return total <= self.runner.shape.longest(self._config.pool_tokens)

    def submit(
        self,
        spec: RequestSpec,
        at_ns: int,
        request_id: RequestId | None = None,
        token_ids: tuple[int, ...] | None = None,
    ) -> RequestId | None:
        """Let a request arrive, with the next or a given id; return None if it does not fit."""
        if not self.fits(spec):
            self.refused += 1
            return None
        if request_id is None:
            request_id = self._count
            self._count += 1
        item = Submission(
            request_id=request_id,
            name=spec.name or f"request-{request_id}",
            priority=spec.priority,
            token_ids=() if spec.pieces else token_ids or blank(spec.num_prompt_tokens),
            sampling=_SAMPLING,
            stop_ids=frozenset(),
            max_tokens=spec.max_tokens,
            slo=spec.slo,
            arrival_ns=at_ns,
            deadline_ns=None,
            is_open=bool(spec.pieces),
        )
        self.ingress.put_at(at_ns, item)
        for i, (after_s, keep, num_tokens) in enumerate(spec.pieces, 1):
            is_open, then_ns = i < len(spec.pieces), at_ns + round(after_s * NS_PER_S)
            rest = replace(item, token_ids=blank(num_tokens), is_open=is_open)
            self.ingress.put_at(then_ns, Revision(keep, rest).put_at(request_id, then_ns))
        return request_id

    def talk(self, specs: Sequence[RequestSpec]) -> None:
        """Let the requests of a workload with sessions arrive, each prompt with its own tokens."""
        self._talks = Conversations(with_tokens(specs, range(self.runner.shape.vocab_size)))
        for arrival in self._talks.first:
            self._ask(arrival)

    def _ask(self, arrival: Arrival) -> None:
        at_ns = round(arrival.at_s * NS_PER_S)
        request_id = self.submit(arrival.spec, at_ns, token_ids=arrival.token_ids)
        if request_id is not None and self._talks.holds(arrival.name):
            self._talking[request_id] = arrival, []

    def start(self, flood: Flood) -> None:
        """Let the first requests of a flood arrive."""
        self._flood = flood
        for _ in range(flood.depth):
            self._top_up()

    def _top_up(self) -> None:
        """Let one more request of the flood arrive, the first that fits."""
        assert self._flood is not None
        for spec in self._flood.specs:
            request_id = self.submit(spec, self.clock.at_ns)
            if request_id is not None:
                self._of_flood.add(request_id)
                return

    def on_token(self, sampled: Sampled, at_ns: int) -> bool:
        if talking := self._talking.get(sampled.request_id):
            talking[1].append(sampled.token_id)
        return False

    def on_finish(
        self,
        request_id: RequestId,
        reason: FinishReason,
        error: str | None,
        metrics: RequestMetrics | None,
    ) -> None:
        if request_id in self._of_flood:
            self._of_flood.remove(request_id)
            if not self.loop.closing:
                self._top_up()
        arrival, answer = self._talking.pop(request_id, (None, []))
        if arrival is not None and reason is FinishReason.LENGTH:
            for after in self._talks.ended(arrival, answer, self.clock.at_ns / NS_PER_S):
                self._ask(after)

    @property
    def has_work(self) -> bool:
        """Return True if a request is unfinished, or will arrive."""
        return bool(self.loop.live or self.loop.pending or not self.ingress.is_empty)

    def step(self) -> None:
        """Do one iteration of the loop.

        Raises:
            PolicyError: The policy raised, broke an invariant, or stalls.
        """
        ran = self.loop.step()
        self._turns += 1
        self._idle = 0 if ran or not self.ingress.is_empty else self._idle + 1
        if self.loop.policy_errors and self.loop.fallback is None:
            raise PolicyError(self.loop.policy_errors[0])
        if self._idle > _IDLE_TURNS:
            name = type(self.loop.scheduler.policy).__name__
            raise PolicyError(f"policy {name} stalls with {len(self.loop.live)} requests live")

    def serve(self, end_ns: int | None, on_step: Callable[[int], None] | None) -> None:
        """Run to the end, or until all requests are finished."""
        while self.has_work and (end_ns is None or self.clock.at_ns < end_ns):
            self.step()
            if on_step is not None:
                on_step(self.clock.at_ns)

    @property
    def num_turns(self) -> int:
        """Return the number of iterations of the loop so far."""
        return self._turns

    def close(self) -> None:
        """End unfinished requests, and those that arrived while the last program ran."""
        self.loop.close()
        for item in self.ingress.drain():
            if isinstance(item, Submission):
                self.loop.meet(item)
                self.loop.end(item.request_id, FinishReason.CANCELLED, None)


@lru_cache(maxsize=4096)
def blank(num_tokens: int) -> tuple[int, ...]:
    """Return a prompt of this length; its tokens have no meaning."""
    return (0,) * num_tokens


def simulate(
    requests: Iterable[RequestSpec],
    policy: str | Any,
    costs: CostFile,
    *,
    policy_settings: Mapping[str, Any] | None = None,
    config: EngineConfig | None = None,
    seconds: float | None = None,
    flood: Flood | None = None,
    on_step: Callable[[int], None] | None = None,
    move_token_ns: int | None = None,
    link: Link = SHARED_MEMORY,
    disk: ExpertsOnDisk | None = None,
) -> Simulated:
    """Serve requests on a virtual clock.

    Args:
        requests: Requests with their arrival times. `max_waiting` is not simulated. Requests that
            are longer than the engine could hold count as refused. If some requests
            follow others, all prompts have tokens, and the KV of their prefixes is cached.
        policy: A policy's name or object.
        costs: The model and the machine.
        policy_settings: Parameters of a policy given by name.
        config: Settings of the engine; None takes the defaults, with the machine's KV.
        seconds: Length of the window. Requests that are unfinished at its end are cancelled. None
            serves all.
        flood: Further requests, of which a constant number is unfinished. They need `seconds`.
        on_step: Callback with the virtual time after every iteration of the loop.
        move_token_ns: Nanoseconds that the scheduler expects for moving the KV of a token; None is
            the real cost (`SimCosts.move_token_ns`).
        link: Time of a gather, if `config` has several ranks. Each rank has the costs of the file.
        disk: The experts, if they are in a file; None has all in memory.

    Raises:
        ConfigError: The policy or one of its settings is unknown, the model cannot be split over so
            many ranks, or the disk cannot be simulated.
        PolicyError: The policy raised, broke an invariant, or stalls.
    """
    config = with_usual_sizes(config or EngineConfig(max_kv_tokens=costs.max_kv_tokens))
    if flood is not None and seconds is None:
        raise ConfigError("a flood never ends: give the simulation its length (seconds)")
    if seconds is not None and not seconds > 0:
        raise ConfigError(f"seconds={seconds!r} must be > 0")
    specs = sorted(requests, key=lambda r: r.at_s)
    has_sessions = any(spec.follows is not None for spec in specs)
    if has_sessions and flood is not None:
        raise ConfigError("the prompts of a flood have no tokens: simulate sessions without one")
    made = load_policy(policy, policy_settings)
    ingress = VirtualIngress if disk is None else ReadingIngress
    world = SimulatedEngine(
        made, costs, config, move_token_ns, ingress, has_tokens=has_sessions, link=link, disk=disk
    )
    world.record.meta.update(model=costs.title, policy=repr(made), simulated=True)
    begun = time.process_time()
    if has_sessions:
        world.talk(specs)
    else:
        for spec in specs:
            world.submit(spec, round(spec.at_s * NS_PER_S))
    if flood is not None:
        world.start(flood)
    end_ns = None if seconds is None else round(seconds * NS_PER_S)
    with no_collections():
        world.serve(end_ns, on_step)
        end_ns = world.clock.at_ns if end_ns is None else end_ns
        world.close()
    return Simulated(
        trace=world.record,
        start_ns=0,
        end_ns=end_ns,
        max_lag_ms=0.0,
        refused=world.refused,
        expert_loads=world.runner.expert_loads,
        gathers=world.runner.gathers,
        decisions=world.num_turns,
        cpu_s=time.process_time() - begun,
        experts=world.experts,
    )
