"""Checkpoints: the unfinished requests of one engine, finished in another process.

A snapshot lives in the runner, next to the KV that the snapshot needs. A checkpoint has everything
in one file: parked frames with their programs and activations, KV, sampling positions and counters.
`save` and `load` run on the engine's thread, between two programs.
"""

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any, Protocol, TypeVar

from qllm.engine import archive
from qllm.engine.delayed import Held, HoldingIngress
from qllm.engine.loop import EngineLoop, Live
from qllm.errors import CheckpointError
from qllm.ingress import Submission, Update
from qllm.ingress.admission import refusal
from qllm.plan import Row
from qllm.record import trace
from qllm.runner.runner import TorchRunner
from qllm.scheduler.decision import Parked
from qllm.scheduler.program import Index, Op, OpKind, Program
from qllm.scheduler.request import Request
from qllm.types import Frontier, Grain, RequestId, Sampled, SamplingParams, Slo

COUNTERS = ("num_tokens", "num_computed_tokens", "served_ns", "evictions", "preemptions")
T = TypeVar("T")


class Adopted(Protocol):
    """A handle of a restored request, or an object that replaces the handle."""

    @property
    def number(self) -> RequestId:
        """Id of the request in this engine."""
        ...

    def on_token(self, sampled: Sampled) -> bool:
        """Take a token that the request had before the checkpoint."""
        ...


H = TypeVar("H", bound=Adopted)
Adopt = Callable[[str, tuple[int, ...], SamplingParams, int], H]
"""A function of the name, prompt, sampling and class of a request, which returns the handle."""


def save(loop: EngineLoop, runner: TorchRunner, path: str | os.PathLike[str]) -> int:
    """Write every unfinished request to `path`. The requests also continue in this engine.

    Requests that are held back (`HoldingIngress`) are written as requests that have not begun. The
    engine that restores such a request makes its grammar and its KV again. Streaming prompts are
    left out, because only clients of this engine can complete the prompts. So are unfinished rows
    that verify drafted tokens: the engine that restores such a request decodes without the drafts.

    Raises:
        CheckpointError: The file cannot be written.
    """
    loop.take()  # includes requests that arrived before the checkpoint was requested
    tensors: dict[str, Any] = {}
    requests, frames = [], []
    unfinished = {n: live for n, live in loop.live.items() if not live.request.is_open}
    for number, live in unfinished.items():
        state, meta = runner.export_request(number)
        told = {**_request_meta(live, loop.now_ns()), "runner": meta}
        # KV found in the prefix cache and not copied yet is not saved
        told["counters"]["num_computed_tokens"] = meta["committed"]
        requests.append(told)
        tensors.update(_prefixed(f"request.{number}.", state))
    scheduler = loop.scheduler
    left_out = scheduler.open | {n for n, live in unfinished.items() if _drafts(live)}
    held = [held for held in _transport(loop).held if not held.submission.is_open]
    for parked in (*scheduler.frames.values(), *scheduler.away.values()):
        frame_id = parked.program.frame_id
        if not (unfinished.keys() - left_out) & {row.request_id for row in parked.held_rows()}:
            continue
        frames.append(_frame_meta(parked, left_out))
        state = runner.export_frame(parked.program, parked.index)
        tensors.update(_prefixed(f"frame.{frame_id}.", state))
    document = {
        "model": runner.fingerprint(),
        "settings": _settings(loop, runner),
        "requests": requests + [_held_meta(x, loop.now_ns()) for x in held],
        "frames": frames,
    }
    archive.write(os.fspath(path), document, tensors)
    return len(document["requests"])


def load(
    loop: EngineLoop,
    runner: TorchRunner,
    path: str | os.PathLike[str],
    adopt: Adopt[H],
    now_ns: int,
) -> list[H]:
    """Restore the requests of a checkpoint.

    Raises:
        CheckpointError: The file is truncated, foreign, of another version or model, or the KV in
            it does not fit.
    """
    document, tensors = archive.read(os.fspath(path))
    try:
        return _load(loop, runner, document, tensors, adopt, now_ns)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path} is not a whole checkpoint: {error!r}") from error


def _load(
    loop: EngineLoop,
    runner: TorchRunner,
    document: Mapping[str, Any],
    tensors: Mapping[str, Any],
    adopt: Adopt[H],
    now_ns: int,
) -> list[H]:
    if document["model"] != runner.fingerprint():
        raise CheckpointError(
            "the checkpoint belongs to another model, other weights or another depth"
        )
    pool = loop.scheduler.pool
    settings = _settings(loop, runner)
    if document["settings"] != settings:
        raise CheckpointError(
            f"the checkpoint was made with settings {document['settings']}, this engine has "
            f"{settings}; use the same exactness and max_segment_ms"
        )
    held = [meta for meta in document["requests"] if "held" in meta]
    begun = [meta for meta in document["requests"] if "held" not in meta]
    need = sum(pool.blocks_for(_reach(meta)) for meta in begun)
    if need > pool.num_free + loop.scheduler.swap.num_free:
        raise CheckpointError(
            f"the checkpoint needs {need} KV blocks, {pool.num_free} are free; raise "
            "max_kv_tokens or let other requests finish"
        )
    handles: list[H] = []
    number_of: dict[RequestId, RequestId] = {}

    def adopt_and_keep(
        name: str, prompt: tuple[int, ...], sampling: SamplingParams, priority: int
    ) -> H:
        handles.append(adopt(name, prompt, sampling, priority))
        return handles[-1]

    try:
        waiting = [_load_held(loop, runner, meta, adopt_and_keep, now_ns) for meta in held]
        for meta in begun:
            handle = _load_request(loop, runner, meta, tensors, adopt_and_keep, now_ns)
            number_of[meta["number"]] = handle.number
        for meta in document["frames"]:
            _load_frame(loop, runner, meta, tensors, number_of, now_ns)
    except Exception:
        for handle in handles:
            loop.disown(handle.number)
        raise
    for item in chain.from_iterable(waiting):
        _transport(loop).put(item)
    return handles


def _transport(loop: EngineLoop) -> HoldingIngress[Any]:
    assert isinstance(loop.ingress, HoldingIngress)
    return loop.ingress


def _settings(loop: EngineLoop, runner: TorchRunner) -> dict[str, Any]:
    """Return the settings that a program's ops and bits depend on, in addition to the model."""
    return {
        "batch_invariant": loop.scheduler.limits.batch_invariant,
        "max_segment_ns": loop.scheduler.limits.max_segment_ns,
        "cuts": [repr(x) for x in runner.cuts],
    }


def _prefixed(prefix: str, tensors: Mapping[str, T]) -> dict[str, T]:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def _unprefixed(prefix: str, tensors: Mapping[str, T]) -> dict[str, T]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def _drafts(live: Live) -> bool:
    """Return True if the unfinished row of a request verifies or drafts tokens."""
    front = live.request.frontier
    is_begun = front is not None and front.hi > live.request.num_tokens
    return is_begun or live.request.exit_layer > 0


def _request_meta(live: Live, now_ns: int) -> dict[str, Any]:
    submission, request = live
    return {
        **_submission_meta(submission, now_ns),
        "priority": request.priority,
        "is_paused": request.is_paused,
        "counters": {name: getattr(request, name) for name in COUNTERS},
        "frontier": None if _drafts(live) else request.frontier,
        "swapped": bool(request.num_swapped_tokens),
    }


def _held_meta(held: Held, now_ns: int) -> dict[str, Any]:
    item = held.submission
    return {
        **_submission_meta(item, now_ns),
        "held": {
            "token_ids": item.token_ids,
            "num_output_tokens": item.num_output_tokens,
            "cache_salt": item.cache_salt.hex(),
            "cache_ttl_s": item.cache_ttl_s,
            "updates": [update[1:] for update in held.updates if isinstance(update, Update)],
        },
    }


def _submission_meta(item: Submission, now_ns: int) -> dict[str, Any]:
    deadline_ns = item.deadline_ns
    return {
        "number": item.request_id,
        "name": item.name,
        "priority": item.priority,
        "sampling": trace.sampling_to_dict(item.sampling),
        "stop_ids": sorted(item.stop_ids),
        "max_tokens": item.max_tokens,
        "slo": list(item.slo),
        "time_left_ns": None if deadline_ns is None else max(1, deadline_ns - now_ns),
    }


def _reach(meta: Mapping[str, Any]) -> int:
    front = meta["frontier"]
    return int(meta["counters"]["num_computed_tokens"] if front is None else front[1])


def _frame_meta(parked: Parked, left_out: Collection[RequestId]) -> dict[str, Any]:
    program = parked.program
    return {
        "frame_id": program.frame_id,
        "rows": program.rows,
        "groups": program.groups,
        "ops": tuple(program.ops),
        "grain": program.grain,
        "stop_below": program.stop_below,
        "samples": program.samples,
        "num_layers": program.num_layers,
        "row_blocks": program.row_blocks,
        "index": parked.index,
        "dead": sorted(parked.dead | {*program.request_ids}.intersection(left_out)),
    }


def _load_request(
    loop: EngineLoop,
    runner: TorchRunner,
    meta: Mapping[str, Any],
    tensors: Mapping[str, Any],
    adopt: Adopt[H],
    now_ns: int,
) -> H:
    # the front end that had the earlier log-probabilities is gone, so later log-probabilities would
    # be misplaced
    asked = trace.sampling_from_dict(meta["sampling"])
    sampling = replace(asked, logprobs=None, confidence=False)
    ids = tuple(meta["runner"]["token_ids"])
    num_prompt = meta["runner"]["num_prompt_tokens"]
    handle = adopt(meta["name"], ids[:num_prompt], sampling, meta["priority"])
    number = handle.number
    request = Request(
        request_id=number,
        priority=meta["priority"],
        arrival_ns=now_ns,
        num_prompt_tokens=num_prompt,
        max_tokens=meta["max_tokens"],
        slo=Slo(*meta["slo"]),
        last_progress_ns=now_ns,
        is_paused=meta.get("is_paused", False),
        paused_ns=now_ns,
        **meta["counters"],
    )
    if meta["frontier"] is not None:
        request.frontier = Frontier(*meta["frontier"])
    submission = _submission(loop, runner, meta, number, ids[:num_prompt], sampling, now_ns)
    state = _unprefixed(f"request.{meta['number']}.", tensors)
    loop.restored(submission, request, swapped=meta.get("swapped", False))
    runner.import_request(number, sampling, state, dict(meta["runner"]), request.block_table)
    for token in ids[num_prompt:]:
        handle.on_token(Sampled(number, token))
    return handle


def _load_held(
    loop: EngineLoop, runner: TorchRunner, meta: Mapping[str, Any], adopt: Adopt[H], now_ns: int
) -> list[Submission | Update]:
    """Return the items by which a request that was held back arrives in this engine."""
    held, ids = meta["held"], tuple(meta["held"]["token_ids"])
    sampling, num_output = trace.sampling_from_dict(meta["sampling"]), held["num_output_tokens"]
    if num_output:
        sampling = replace(sampling, logprobs=None, confidence=False)
    num_prompt = len(ids) - num_output
    handle = adopt(meta["name"], ids[:num_prompt], sampling, meta["priority"])
    item = replace(
        _submission(loop, runner, meta, handle.number, ids, sampling, now_ns, num_output),
        cache_salt=bytes.fromhex(held["cache_salt"]),
        cache_ttl_s=held["cache_ttl_s"],
    )
    for token in ids[num_prompt:]:
        handle.on_token(Sampled(handle.number, token))
    return [item, *(Update(handle.number, *asked) for asked in held["updates"])]


def _submission(
    loop: EngineLoop,
    runner: TorchRunner,
    meta: Mapping[str, Any],
    number: RequestId,
    token_ids: tuple[int, ...],
    sampling: SamplingParams,
    now_ns: int,
    num_output_tokens: int = 0,
) -> Submission:
    time_left_ns = meta.get("time_left_ns")
    item = Submission(
        request_id=number,
        name=meta["name"],
        priority=meta["priority"],
        token_ids=token_ids,
        sampling=sampling,
        stop_ids=frozenset(meta["stop_ids"]),
        max_tokens=meta["max_tokens"],
        slo=Slo(*meta["slo"]),
        arrival_ns=now_ns,
        deadline_ns=None if time_left_ns is None else now_ns + time_left_ns,
        num_output_tokens=num_output_tokens,
    )
    limits = loop.scheduler.limits
    refused = refusal(item, runner.shape, limits.max_kv_tokens)
    if refused is not None:
        raise CheckpointError(f"request {meta['name']!r}: {refused}; raise max_kv_tokens")
    return item


def _load_frame(
    loop: EngineLoop,
    runner: TorchRunner,
    meta: Mapping[str, Any],
    tensors: Mapping[str, Any],
    number_of: Mapping[RequestId, RequestId],
    now_ns: int,
) -> None:
    dead = set(meta["dead"])
    rows = []
    for r, row in enumerate(meta["rows"]):
        number = -1 - r if row[0] in dead else number_of[row[0]]
        rows.append(Row(number, *row[1:]))
    program = Program(
        frame_id=loop.scheduler.new_frame_id(),
        rows=tuple(rows),
        groups=tuple(tuple(group) for group in meta["groups"]),
        ops=tuple(Op(OpKind(kind), *rest) for kind, *rest in meta["ops"]),
        grain=Grain(meta["grain"]),
        stop_below=meta["stop_below"],
        samples=tuple(meta["samples"]),
        num_layers=meta["num_layers"],
        row_blocks=tuple(tuple(marks) for marks in meta["row_blocks"]),
    )
    index = Index(*meta["index"])
    state = _unprefixed(f"frame.{meta['frame_id']}.", tensors)
    runner.import_frame(program, index, state)
    gone = {row.request_id for row in rows if row.request_id < 0}
    for number in gone:
        runner.kill(program, number)
    loop.restored_frame(program, index, gone, now_ns)
