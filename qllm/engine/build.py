"""Assembly of an engine: a model, its runner, a scheduler and the loop over them."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from qllm.config import EngineConfig
from qllm.cores import usable_cores
from qllm.cuda.copies import measured_bytes_per_ms
from qllm.cuda.pages import Spare
from qllm.cuda.slots import ExpertRoom
from qllm.cuda.streams import StreamApi
from qllm.drafters.model import DraftModel, Terms
from qllm.drafters.mtp import MtpLayer
from qllm.engine.costs import StepCosts
from qllm.engine.delayed import Inbox
from qllm.engine.draft_model import OwnModel, draft_model_of
from qllm.engine.grammars import GrammarIngress
from qllm.engine.handover.arrivals import HandedIngress
from qllm.engine.handover.handover import HandOver, Pull, handover_of
from qllm.engine.kv.loading import LoadingIngress
from qllm.engine.limits import limits_of
from qllm.engine.loop import EngineLoop
from qllm.engine.memory import Claim, choose_sizes
from qllm.engine.needs import cpu_costs, device_costs, drafter_of, refuse_sizes
from qllm.engine.neighbours import Neighbours
from qllm.engine.protocol import Sink
from qllm.engine.sizes import SIZES
from qllm.engine.storage.build import KeptPages
from qllm.engine.storage.expert_stats import expert_stats
from qllm.engine.storage.identity import weights_digest
from qllm.engine.storage.own_threads import set_own_torch_threads
from qllm.engine.storage.pages import why_not
from qllm.engine.storage.reads import DiskOrder
from qllm.engine.storage.waits import ExpertWaits, parks_for_experts
from qllm.engine.watch import Watch
from qllm.errors import CRASHED, ConfigError, DeviceError, EngineClosedError, ModelError
from qllm.grammar import Vocabulary
from qllm.ingress import LOOK, Call, Submission
from qllm.ingress.messages import ModelInfo
from qllm.ingress.remote.meeting import parse_address, read_secret
from qllm.models.depth import num_layers, whole_layers
from qllm.models.loader import LoadedModel
from qllm.models.tokenizer import vocabulary_of
from qllm.models.weights.formats.rounding import ROUNDINGS
from qllm.models.weights.on_host import bytes_in_slots
from qllm.models.weights.quantised_experts import all_quantised
from qllm.models.weights.quantised_linears import weight_bytes
from qllm.plugins import load_policy
from qllm.record.trace import Trace
from qllm.runner.conformance import check as check_conformance
from qllm.runner.cpu import cpu_runner
from qllm.runner.runner import TorchRunner
from qllm.scheduler.decision import Parked
from qllm.scheduler.scheduler import Scheduler
from qllm.types import NS_PER_MS, NS_PER_S, FinishReason, RequestId

_log = logging.getLogger(__name__)

MOST_TURN_MS = 5.0
"""Longest time between two programs in which a draft model catches up. A smaller `max_segment_ms`
makes it shorter."""


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Let torch compute with `count` threads. None keeps torch's own count."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def make_runner(model: Any, config: EngineConfig) -> TorchRunner:
    """Return the runner for the device that a model is on.

    Raises:
        ConfigError: A setting that CUDA does not support.
        ModelError: The model cannot be run safely.
    """
    if model.device.type != "cuda" and config.tp > 1:
        return _on_ranks(model, config)
    if model.device.type != "cuda":
        return cpu_runner(
            model,
            max_segment_ms=config.max_segment_ms,
            batch_invariant=config.batch_invariant,
            kernels=config.kernels,
            expert_weights=config.expert_weights,
            activations=config.activations,
        )
    from qllm.cuda.backend import CudaBackend, cuda_runner
    from qllm.cuda.streams import TorchStreams

    if config.batch_invariant:
        raise ConfigError("exactness='batch-invariant' is not there on CUDA; use 'order'")
    refuse_rounding(model, config.expert_weights)
    if config.activations != "bf16":
        raise ConfigError(f"activations={config.activations!r} is for the CPU; use 'bf16'")
    if config.tp_hosts:
        raise ConfigError(
            f"tp_hosts={config.tp_hosts!r} is for ranks on the CPU: one process has all ranks of "
            "GPUs; leave it out"
        )
    if config.kv_dir is not None:
        raise ConfigError(
            f"kv_dir={config.kv_dir!r} needs an exact prefix cache, and there is none on CUDA: "
            f"{CudaBackend.why_inexact}; leave it out"
        )

    return cuda_runner(
        model,
        tp=config.tp,
        num_pages=config.num_blocks,
        page_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_step_tokens=config.max_step_tokens,
        max_total_tokens=config.pool_tokens,
        graphs=None if config.kernels == "fast" else False,
        spare=spare_of(config, CudaBackend.why_inexact, TorchStreams, model.device),
        room=room_of(config, TorchStreams),
    )


def _on_ranks(model: Any, config: EngineConfig) -> TorchRunner:
    """Return the runner of a model that is split over ranks.

    Ranks of this machine share the engine's threads. Other hosts have threads of their own.
    """
    from qllm.sharded.runner import sharded_runner

    cores, here = usable_cores(), 1 if config.tp_hosts else config.tp
    if here > cores:
        raise ConfigError(
            f"tp={config.tp} is too many ranks: this process may use {cores} cores, and each rank "
            f"needs one; use tp={cores} or less"
        )
    return sharded_runner(
        model,
        config.tp,
        max_segment_ms=config.max_segment_ms,
        batch_invariant=config.batch_invariant,
        expert_weights=config.expert_weights,
        activations=config.activations,
        threads=max(1, torch.get_num_threads() // here),
        deadline_s=config.rank_deadline_s,
        hosts=config.tp_hosts,
        secret=secret_of(config),
    )


def secret_of(config: EngineConfig) -> bytes:
    """Return the secret of the hosts of ranks.

    Raises:
        ConfigError: A host's address has another form, or needs a secret that is missing or short.
    """
    file = None if config.tp_secret_file is None else Path(config.tp_secret_file)
    secrets = [read_secret(file, parse_address(host), "tp_secret_file") for host in config.tp_hosts]
    return max(secrets, default=b"")


def refuse_rounding(model: Any, expert_weights: str) -> None:
    """Raise ConfigError unless the experts on the device have the rounding of the setting."""
    if expert_weights == "auto":
        return
    held = all_quantised(model).values()
    if held and all(h.rounding == expert_weights for h in held):
        return
    raise ConfigError(
        f"expert_weights={expert_weights!r}: on CUDA experts are rounded while a checkpoint in "
        f"bfloat16 is loaded, to {' or '.join(ROUNDINGS)}, and these were not; use 'auto', or load "
        "such a checkpoint"
    )


def spare_of(
    config: EngineConfig, why_inexact: str, streams: Callable[[], StreamApi], device: torch.device
) -> Spare | None:
    """Return spare room for KV outside the pages of a device; None if no setting needs it.

    Args:
        config: Settings.
        why_inexact: Reason why results are not exact, see `Backend`.
        streams: Factory of the API that makes copies.
        device: Device of the pages. The copy speed of the device is measured.
    """
    num_kept = 0
    if config.prefix_cache == "approximate" or (config.prefix_cache and not why_inexact):
        num_kept = config.kept_tokens // config.page_size
    if not (num_kept or config.num_swap_blocks):
        return None
    api = streams()
    rate = measured_bytes_per_ms(api, device)
    return Spare(api, rate, num_kept, config.page_size, config.num_swap_blocks)


def room_of(config: EngineConfig, streams: Callable[[], StreamApi]) -> ExpertRoom | None:
    """Return the room on a device for experts that come and go; None if all stay there.

    Args:
        config: Settings.
        streams: Factory of the API that makes copies.
    """
    if config.max_expert_bytes is None:
        return None
    return ExpertRoom(streams(), int(config.max_expert_bytes))


def with_depth(config: EngineConfig, loaded: LoadedModel) -> EngineConfig:
    """Return settings whose depth is that of a loaded model: None if the model is whole.

    Raises:
        ConfigError: The settings have another depth.
    """
    found, whole = num_layers(loaded.model), whole_layers(loaded.model)
    if config.depth not in (None, found):
        raise ConfigError(
            f"depth={config.depth} needs a model that is loaded so: this one was loaded before, "
            f"with {found} layers; use from_pretrained(..., depth={config.depth})"
        )
    return replace(config, depth=None if found == whole else found)


@contextmanager
def naming_family(model: Any, what: str) -> Iterator[None]:
    """Turn any error that an unknown model causes into a ModelError that names its family.

    Args:
        model: A transformers model.
        what: Activity with the model, for the message.

    Raises:
        ModelError: Any error, except errors of settings, device or memory.
    """
    config = getattr(model, "config", None)
    family = getattr(config, "model_type", None) or type(model).__name__
    start = f"model {family!r}"
    try:
        yield
    except (ConfigError, DeviceError, MemoryError, torch.OutOfMemoryError):
        raise
    except ModelError as error:
        if str(error).startswith(start):
            raise
        raise ModelError(f"{start} cannot be driven: {error}") from error
    except Exception as error:
        raise ModelError(
            f"{start} cannot be driven: {what} raised {type(error).__name__}: {error}. "
            "Report the family"
        ) from error


class LoadedRunner:
    """Loader of a model's runner, used by every kind of loop.

    It also describes the model to front ends.

    Args:
        loaded: The model.
        policy: A policy object.
        config: Settings; sizes may be open.
        threads: Threads of torch; None leaves torch's choice.
        claim: Claim on memory from before the model was loaded; None makes one.
        drafting: The draft model, if the settings name one.

    Raises:
        ConfigError: A setting that the device does not support, or too little memory.
        ModelError: The model cannot be run safely.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        policy: Any,
        config: EngineConfig,
        threads: int | None,
        claim: Claim | None = None,
        drafting: OwnModel | None = None,
    ) -> None:
        self.threads = threads
        self.drafting = drafting
        self.weight_bytes = weight_bytes(loaded.model)
        on_cuda = loaded.model.device.type == "cuda"
        self.claim = claim or Claim("cuda" if on_cuda else "cpu")
        try:
            with torch_threads(threads):
                self._start(loaded, config, on_cuda=on_cuda)
        except BaseException:
            self.claim.close()
            raise
        asked, config = config, self.config
        self.limits = limits_of(config, self.runner.capabilities, whole_steps=on_cuda)
        self.trace = Trace(meta={"model": loaded.name, "policy": repr(policy)})
        self.info = ModelInfo(
            name=loaded.name,
            shape=self.runner.shape,
            eos_token_ids=loaded.eos_token_ids,
            sampling_defaults=loaded.generation_defaults,
            drivers=tuple(str(driver) for driver in self.runner.drivers),
            kernels={**self.runner.names, "weights": loaded.weights or _said(config)},
            vocabulary=vocabulary_of(loaded.tokenizer),
            chosen=tuple(name for name in SIZES if getattr(asked, name) is None),
            whole_layers=whole_layers(loaded.model),
        )

    def _start(self, loaded: LoadedModel, config: EngineConfig, *, on_cuda: bool) -> None:
        """Make the runner, choose the sizes that are open, and check the model."""
        model = loaded.model
        weights = self.weight_bytes + (self.drafting.weight_bytes if self.drafting else 0)
        choose = partial(
            choose_sizes, self.claim, weights, on_cuda=on_cuda, slot_bytes=bytes_in_slots(model)
        )
        with naming_family(model, "finding its parts"):
            config = with_depth(config, loaded)
            if on_cuda:  # the runner takes the memory of all its KV at once
                config, self.memory = choose(config, device_costs(model, config))
            self.runner = make_runner(model, config)
        try:
            if not on_cuda:
                ranks = self.runner.backend.ranks
                pids = [rank["pid"] for rank in ranks[1:] if "host" not in rank]
                costs = cpu_costs(config, self.runner, self.drafting)
                config, self.memory = choose(config, costs, ranks=pids)
            self.config = config
            if config.conformance:
                drivers = ", ".join(sorted(set(map(str, self.runner.drivers))))
                with naming_family(model, f"the start-up check (drivers: {drivers})"):
                    check_conformance(model, self.runner)
        except BaseException:
            self.runner.close()  # give the caller the model back as it was
            raise
        if on_cuda and config.conformance:  # which has written the first KV
            with self.claim.others():
                self.claim.tell(0)

    @property
    def max_total_tokens(self) -> int:
        """Return the token limit of a request: prompt and answer together."""
        return self.info.shape.longest(self.config.pool_tokens)

    def run(self, serve: Callable[[], object]) -> BaseException | None:
        """Serve on this thread until the loop is closed; return the error of a crash."""
        count = 1 if self.runner.backend.is_native else self.threads
        if count is not None:
            set_own_torch_threads(count)
        try:
            with torch.inference_mode():
                serve()
        except BaseException as error:  # noqa: BLE001 - every request ends, then the engine is dead
            return error
        return None

    def stats_of(self, loop: Any, decider: Any) -> dict[str, Any]:
        """Return the statistics that every loop on the host has. Callable from any thread.

        Args:
            loop: An `EngineLoop`. The loop's thread keeps counting during the call.
            decider: The scheduler, which has the running frame and the parked frames.
        """
        segments = self.runner.segments
        kind = segments.longest_op
        running = decider.running
        frames = [] if running is None else [self._frame(running, "running")]
        frames += [self._frame(frame, "parked") for frame in list(decider.frames.values())]
        return {
            "longest_segment_ms": segments.longest_ns / NS_PER_MS,
            "longest_segment_kind": None if kind is None else kind.name,
            "max_segment_ms": self.config.max_segment_ms,
            "depth": self.info.shape.num_layers,
            "whole_depth": self.info.whole_layers,
            "expert_bytes": self.runner.expert_bytes,
            "weight_bytes": self.weight_bytes,
            "memory": self.memory,
            "pid": os.getpid(),
            "ranks": list(self.runner.backend.ranks),
            "kv_blocks": self.config.num_blocks,
            "frames": frames,
            "preempt_latencies_ms": [ns / NS_PER_MS for ns in list(loop.preempt_latencies_ns)],
            "num_preemptions": loop.num_preemptions,
            "policy_errors": list(loop.policy_errors),
            "longest_plan_ms": loop.longest_plan_ns / NS_PER_MS,
        }

    def _frame(self, parked: Parked, state: str) -> dict[str, Any]:
        """Return a frame for statistics.

        A running frame has the position where its last run began.
        """
        program, index = parked.program, parked.index
        held = self.runner.frames.get(program.frame_id)
        op = program.ops[min(index.op, len(program.ops) - 1)]
        return {
            "state": state,
            "layer": op.layer,
            "num_layers": program.num_layers,
            "op": op.kind.name,
            "units_done": index.pos,
            "rows": len(program.rows),
            "tokens": program.num_tokens,
            "bytes": 0 if held is None else held.num_bytes(),
        }


def time_stats(config: EngineConfig, counts: Mapping[str, int]) -> dict[str, float]:
    """Return the seconds of each class, the seconds given by the BE floor, and the floor itself.

    Args:
        config: Settings.
        counts: `ls_ns`, `be_ns` and `paid_ns`, as in `qllm.scheduler.be_share.Owed`.
    """
    return {
        "ls_s": counts["ls_ns"] / NS_PER_S,
        "be_s": counts["be_ns"] / NS_PER_S,
        "floor_s": counts["paid_ns"] / NS_PER_S,
        "min_be_share": config.min_be_share,
    }


class EngineCore(LoadedRunner):
    """One engine with the loop of the host, ready to serve.

    Args:
        loaded: The model.
        policy: A policy object.
        config: Settings.
        ingress: Source of requests.
        sink: Receiver of tokens.
        now_ns: The engine's clock.
        threads: Threads of torch; None leaves torch's choice.
        decided: Callback after each decision, see `EngineLoop`.
        pull: Function that fetches KV of other engines.
        weights: Digest of the model's weights; None computes the digest where it is needed.
        claim: Claim on memory from before the model was loaded; None makes one.

    Raises:
        ConfigError: A setting that the device does not support.
        ModelError: The model cannot be run safely.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        policy: Any,
        config: EngineConfig,
        *,
        ingress: Inbox,
        sink: Sink,
        now_ns: Callable[[], int],
        threads: int | None,
        decided: Callable[[int, int], None] | None = None,
        pull: Pull | None = None,
        weights: str | None = None,
        claim: Claim | None = None,
    ) -> None:
        self.handover: HandOver | None = None
        self.waits = self.neighbours = None
        if weights is None and (config.kv_dir is not None or config.handover_gib):
            with torch_threads(threads):  # must happen before the runner packs the weights
                weights = weights_digest(loaded.model)
        weights = weights or ""
        with torch_threads(threads):
            drafting = draft_model_of(config, loaded)
        super().__init__(loaded, policy, config, threads, claim, drafting)
        config = self.config
        try:
            shape, sampler = self.runner.shape, self.runner.sampler
            sampler.vocabulary = Vocabulary(
                loaded.tokenizer, shape.vocab_size, loaded.eos_token_ids
            )
            sampler.vocabulary.prepare()
            self.grammars = GrammarIngress(ingress, sampler.vocabulary, sampler.built)
            refuse_sizes(config, self.runner, drafting)
            decider = Scheduler(policy, shape, self.runner.cuts, self.limits)
            costs = StepCosts(lambda: self.runner.backend.move_token_ns)
            order = DiskOrder()
            self.kept = KeptPages(config, self.runner, weights, ingress, now_ns, costs, order)
            prefix = self.kept.prefix_cache(decider)
            self.handed = HandedIngress(self.grammars, costs)
            self.loading = LoadingIngress(self.handed, prefix, self.handed.has_kv)
            self.loop = EngineLoop(
                self.loading,
                decider,
                self.runner,
                sink,
                now_ns,
                record=self.trace if config.record else None,
                fallback=load_policy("fcfs") if config.on_policy_error == "fcfs" else None,
                decided=decided,
                prefix=prefix,
                costs=costs,
            )
            wake = partial(ingress.put, LOOK)
            self.waits = self.loop.waits = waits_of(self.runner, decider, wake, now_ns, order)
            self.neighbours = self.loop.neighbours = neighbours_of(config, decider, wake)
            own = self._draft_model(now_ns)
            if (make := drafter_of(config, self.runner, own)) is not None:
                self.loop.draft_with(make, config.draft_tokens, _log.warning)
            if config.handover_gib:
                self.handover = handover_of(
                    self.loop, self.runner, config, weights, ingress.put, pull
                )
                self.handed.handover = self.loop.newcomers = self.handover
        except BaseException:
            for part in (getattr(self, "kept", None), self.waits, self.neighbours):
                if part is not None:
                    part.close()
            self.runner.close()  # give the caller the model back as it was
            self.claim.close()
            raise
        self._watch = Watch(self.loop, config, self.runner, self.waits)

    def _draft_model(self, now_ns: Callable[[], int]) -> DraftModel | None:
        """Return the draft model with this engine's stop and requests; None without one."""
        if self.drafting is None:
            return None
        runner, embedding = self.drafting.runner, self.drafting.embedding
        terms = Terms(
            lambda: self.loop.ingress.stop,
            self.loop.scheduler.requests,
            self.config.pool_tokens,
            int(min(self.config.max_segment_ms, MOST_TURN_MS) * NS_PER_MS),
            now_ns,
        )
        if embedding is None:
            return DraftModel(runner, terms)
        return MtpLayer(runner, embedding, self.runner, terms)

    def serve(self) -> BaseException | None:
        """Serve on this thread until the loop is closed; return the error of a crash."""
        return self.run(self.loop.serve)

    def end_all(self, open_requests: Iterable[RequestId], crash: BaseException | None) -> None:
        """End every request that is still open. Called when the loop will not run again."""
        reason = FinishReason.CANCELLED if crash is None else FinishReason.ERROR
        text = None if crash is None else crash_text(crash)
        open_ids = dict.fromkeys(open_requests)
        self.grammars.close()
        if self.handover is not None:
            self.handover.close()
        left = (*self.loop.pending, *self.loop.ingress.drain(), *self.held)
        for item in left:
            if isinstance(item, Call):
                item.answer(None, EngineClosedError("the engine was closed; make a new one"))
            elif isinstance(item, Submission):
                self.loop.meet(item)
                open_ids[item.request_id] = None
        for request_id in open_ids:
            self.loop.end(request_id, reason, text)
        self.kept.close()
        for part in (self.waits, self.neighbours):
            if part is not None:
                part.close()
        self.claim.close()

    @property
    def held(self) -> tuple[Submission, ...]:
        """Requests that wait for their grammar or KV, before the loop gets them."""
        return tuple(held.submission for held in self.loading.held)

    def stats(self) -> dict[str, Any]:
        """Return the statistics of the run so far. Callable from any thread."""
        loop = self.loop
        return {
            **self.stats_of(loop, loop.scheduler),
            "kv_blocks_used": self.config.num_blocks - loop.scheduler.pool.num_free,
            "num_live": len(loop.live),
            "num_spared": loop.scheduler.num_spared,
            "pressure": self._pressure_stats(),
            "time": time_stats(self.config, loop.scheduler.be_share.now._asdict()),
            "open_prompts": {
                "now": len(loop.scheduler.open),
                "revisions": loop.prompt_updates.num_revisions,
                "lost_tokens": loop.prompt_updates.lost_tokens,
                "restarts": loop.prompt_updates.num_restarts,
            },
            "prefix_cache": self._prefix_stats(),
            "states": self._state_stats(),
            "swap": {
                "out_tokens": loop.effects.tokens_out,
                "in_tokens": loop.effects.tokens_in,
                "blocks_used": loop.scheduler.swap.num_used,
            },
            "drafts": self._draft_stats(),
            "handover": {} if self.handover is None else self.handover.stats(),
            "experts": expert_stats(self.runner.residency, self.waits),
        }

    def watch(self, since: int, whole: bool) -> dict[str, Any]:
        """Return timeline entries after number `since` (`Watch.look`). Callable from any thread."""
        return self._watch.look(since, whole)

    def _state_stats(self) -> dict[str, int]:
        """Return the bytes of layer states.

        A model without such layers has only `bytes_per_token`.
        """
        requests, charge = list(self.runner.requests.values()), self.runner.charge
        return {
            "bytes_per_request": charge.request_bytes,
            "bytes_per_token": charge.token_bytes,
            "tokens_per_request": self.runner.shape.state_tokens,
            "held_bytes": sum(request.kv.states.num_bytes for request in requests),
        }

    def _pressure_stats(self) -> dict[str, Any]:
        """Return whether other engines on these cores have LS work, and the number of holds."""
        if self.neighbours is None:
            return {}
        found = self.neighbours.pressure
        return {"is_on": found.is_on, "holds": found.num_holds, "met": self.neighbours.num_met}

    def _draft_stats(self) -> dict[str, Any]:
        found = {} if self.loop.drafts is None else self.loop.drafts.stats()
        if self.drafting is not None and "model" in found:
            found["model"] |= {
                "weight_bytes": self.drafting.weight_bytes,
                "token_bytes": self.drafting.token_bytes,
            }
        return found

    def _prefix_stats(self) -> dict[str, Any]:
        prefix = self.loop.prefix
        if prefix is None:
            return {"off": why_not(self.config, self.runner)}
        return prefix.stats() | self.kept.stats()

    def reset_prefix_cache(self) -> None:
        """Delete all cached KV. Called on the loop's thread."""
        if self.loop.prefix is not None:
            self.loop.prefix.reset()

    def delete_kv(self, tag: bytes) -> int:
        """Delete the cached KV of an owner or a salt. Called on the loop's thread."""
        if self.handover is not None:
            self.handover.outbox.delete(tag)
        return 0 if self.loop.prefix is None else self.loop.prefix.delete(tag, self.held)

    def settle_file(self) -> None:
        """Wait until deleted KV is erased from the file. Callable from other threads.

        Raises:
            QllmError: The KV cannot be erased, or was not erased in time.
        """
        self.kept.settle()


def neighbours_of(
    config: EngineConfig, scheduler: Scheduler, wake: Callable[[], None]
) -> Neighbours | None:
    """Return the other engines on the same cores; None if the engine is in no group."""
    if config.shared_cores is None:
        return None
    return Neighbours(config.shared_cores, scheduler.pressure, wake)


def waits_of(
    runner: TorchRunner,
    scheduler: Scheduler,
    wake: Callable[[], None],
    now_ns: Callable[[], int],
    order: DiskOrder,
) -> ExpertWaits | None:
    """Return the waits for experts of a file; None if all experts are in memory.

    It is also None if the policy does not let frames wait: see `parks_for_experts`.

    Args:
        runner: Runner of the model.
        scheduler: Scheduler with the policy.
        wake: Function that wakes the loop. Called from other threads.
        now_ns: The engine's clock.
        order: Order of the threads that use the disk.
    """
    residency = runner.residency
    if residency is None or not parks_for_experts(scheduler.policy):
        return None
    return ExpertWaits(scheduler, residency, runner.missing, wake, now_ns, order)


def crash_text(crash: BaseException) -> str:
    """Return the text that waiting clients receive after a crash of the loop."""
    return f"{CRASHED}: {type(crash).__name__}: {crash}"


def _said(config: EngineConfig) -> str:
    """Return how the weights of an unquantised model were stored."""
    how, stored = config.expert_weights, "as they were stored"
    return stored if how == "auto" else f"{stored}, experts rounded to {how}"
