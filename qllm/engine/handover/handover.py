"""Migration: a request continues in another engine, with its KV.

    engine A   takes the request from its frame, keeps its KV under a ticket, ends it (`MOVED`)
    front end  submits prompt and output again at B, with the place of the KV
    engine B   delays the request, fetches and checks the KV, and continues where A stopped

B uses the KV only if model, weights, kernels, settings and tokens are exactly the same, and no byte
is damaged. Otherwise, and if no KV comes in time, B computes the KV as after an eviction. A
migration changes the time of a request, and never a token.
"""

import logging
import mmap
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qllm.config import EngineConfig
from qllm.engine.handover.compatible import Carried, Terms, digest_of, page_parts
from qllm.engine.handover.format import Header, read_header, tensor
from qllm.engine.handover.outbox import Outbox
from qllm.engine.loop import EngineLoop, Live
from qllm.engine.storage.identity import layout_of
from qllm.engine.storage.own_threads import set_own_torch_threads
from qllm.errors import MOVED, CheckpointError
from qllm.ingress import Call, Submission
from qllm.ingress.messages import Source
from qllm.kernels.software import software
from qllm.record import trace
from qllm.runner.frame import SavedRows
from qllm.runner.kv import RequestKV, SlabKV
from qllm.runner.runner import TorchRunner
from qllm.scheduler.prefix import tag_of
from qllm.scheduler.request import Request
from qllm.types import FinishReason, Frontier, RequestId

WORKERS = 2
"""Number of requests whose KV is fetched at the same time."""

Choose = Callable[[memoryview, int], Sequence[tuple[int, int]]]
"""A function of a parcel's header and of its size in bytes. It returns the ranges (offset, length)
to fetch.
"""
Pull = Callable[[Source, Callable[[int], None], Choose, Callable[[], bool]], mmap.mmap]
"""A function that fetches a parcel. It raises any error that occurs. Its arguments: the parcel's
place; a function that raises if a parcel of so many bytes is refused; a function that chooses
ranges; a function that returns False once the fetch should stop."""

_log = logging.getLogger("qllm")


class Brought(NamedTuple):
    """Checked KV of a request that arrived."""

    kv: RequestKV
    kept: SavedRows | None
    hidden: list[Tensor]
    num_found: int
    """Tokens of the request that were already in pages of this engine."""


@dataclass(slots=True)
class Counts:
    """Counts of migrations since the start."""

    given: int = 0
    """Requests that left this engine."""
    given_tokens: int = 0
    """Tokens whose KV left with their requests."""
    taken: int = 0
    """Requests that came from another engine and continued where they had stopped."""
    taken_tokens: int = 0
    found_tokens: int = 0
    """Tokens of requests from other engines that were already in pages of this engine."""
    missed: int = 0
    """Requests from other engines that were computed again, for any reason."""


class HandOver:
    """Sender and receiver of requests with KV. `fetch` works on another thread than the engine's.

    Args:
        loop: Owner of the requests.
        runner: Owner of their KV.
        terms: Conditions that KV must meet.
        most_bytes: Limit in bytes for KV that waits to be fetched, and for KV that is being
            fetched.
        put: Function that lets the loop make a call between two programs.
        pull: Function that fetches a parcel, on a thread; None where no KV can be fetched.
    """

    def __init__(
        self,
        loop: EngineLoop,
        runner: TorchRunner,
        terms: Terms,
        most_bytes: int,
        put: Callable[[Call], None],
        pull: Pull | None = None,
    ) -> None:
        self._loop, self._runner, self._put = loop, runner, put
        self._terms, self._most_bytes, self._pull = terms, most_bytes, pull
        self.outbox = Outbox(most_bytes)
        self.counts = Counts()
        self.brought: dict[RequestId, Brought] = {}
        """KV of requests that arrive in this iteration of the loop."""
        self._workers = ThreadPoolExecutor(
            WORKERS, "qllm-fetch", initializer=set_own_torch_threads, initargs=(1,)
        )
        self._lock = threading.Lock()
        self._num_coming = 0
        """Bytes of the parcels that are being fetched."""

    # -- a request leaves

    def give(self, request_id: RequestId) -> str | None:
        """End a request that continues in another engine; return the ticket of its KV.

        Returns:
            Ticket; empty if the request leaves without KV, because it has none or there is no room.
            None if the request stays, because it is unknown or its prompt is still streaming.
        """
        live = self._loop.live.get(request_id)
        if live is None or live.request.is_open:
            return None
        ticket = self._pack(live)
        self.counts.given += 1
        self._loop.finish(request_id, FinishReason.ERROR, MOVED + ticket)
        return ticket

    def heard(self, event: trace.Event) -> None:
        """Migrate each request at its first token in this engine.

        Called as a listener of the loop.
        """
        if not isinstance(event, trace.Token):
            return
        live = self._loop.live.get(event.request_id)
        if live is None or live.submission.num_output_tokens or live.request.num_output_tokens > 1:
            return
        self._put(Call(partial(self.give, event.request_id)))

    def _pack(self, live: Live) -> str:
        """Take a row out of its frame, at the start of its layer; return the ticket of its KV."""
        submission, request = live
        request_id, scheduler = request.request_id, self._loop.scheduler
        parked = scheduler.away.get(request_id)
        if parked is None and request.frame_id is not None:
            parked = scheduler.frames[request.frame_id]
        if parked is not None:
            at = parked.program.layer_start(parked.index)
            self._runner.leave(parked.program, request_id, at)
        state = self._runner.requests[request_id]
        state.without_drafts()
        kv, kept = state.kv, state.kept
        if not isinstance(kv, SlabKV) or not (kv.committed or kept is not None):
            return ""
        names: Sequence[bytes] = ()
        if self._loop.prefix is not None:
            names = self._loop.prefix.chain(submission, state.ids).upto(kv.committed)
        says = {
            "identity": dict(self._terms.identity),
            "tokens": digest_of(state.ids),
            "committed": kv.committed,
            "kept": None if kept is None else [kept.lo, kept.hi, kept.layer],
            "pages": [name.hex() for name in names],
        }
        tensors = self._tensors(kv, len(names), kv.committed if kept is None else kept.hi)
        if kept is not None:
            tensors["hidden"] = [kept.x_TD]
        if state.owes_prompt and state.hidden:
            tensors["last_hidden"] = state.hidden
        ticket = self.outbox.put(says, tensors, tag_of(submission.cache_salt))
        self.counts.given_tokens += kv.committed if ticket else 0
        return ticket

    def _tensors(self, kv: SlabKV, num_pages: int, hi: int) -> dict[str, Sequence[Tensor]]:
        """Return views of the KV below `hi`: whole pages, the rest of each layer, and states."""
        size, found = self._terms.page_size, dict[str, Sequence[Tensor]]()
        slabs = [i for i, slab in enumerate(kv.slabs) if slab and i not in kv.states.layers]
        for page in range(num_pages):
            parts = [kv.read(layer, page * size, (page + 1) * size) for layer in slabs]
            found |= zip(page_parts(page), zip(*parts, strict=True), strict=True)
        for layer in slabs:
            for name, piece in zip("kv", kv.read(layer, num_pages * size, hi), strict=True):
                found[f"{name}.{layer}"] = [piece]
        for name, state in kv.states.export().items():
            if int(name.split(".")[2]) >= kv.committed:  # KV of earlier layers will be overwritten
                found[name] = [state]
        return found

    # -- a request comes

    @property
    def can_fetch(self) -> bool:
        """True if requests can come with KV."""
        return self._pull is not None

    def now_ns(self) -> int:
        """Return the engine's time in nanoseconds."""
        return self._loop.now_ns()

    def fetch(
        self, item: Submission, source: Source, wanted: Callable[[], bool]
    ) -> Future[Brought]:
        """Start to fetch the KV of a request, on another thread.

        Args:
            item: The request.
            source: Place of its KV.
            wanted: Function that returns False once the request no longer waits for the KV. It is
                polled.
        """
        return self._workers.submit(self._fetch, item, source, wanted)

    def _fetch(self, item: Submission, source: Source, wanted: Callable[[], bool]) -> Brought:
        assert self._pull is not None
        taken, found, pages = 0, list[tuple[Header, Carried]](), dict[int, Any]()

        def allow(num_bytes: int) -> None:
            nonlocal taken
            with self._lock:
                if self._num_coming + num_bytes > self._most_bytes:
                    raise CheckpointError(
                        f"{num_bytes} bytes of KV come, and there is room for "
                        f"{self._most_bytes - self._num_coming} (handover_gib)"
                    )
                self._num_coming += num_bytes
                taken += num_bytes

        def choose(memory: memoryview, num_bytes: int) -> list[tuple[int, int]]:
            header = read_header(memory, num_bytes)
            found.append((header, self._terms.check(header, item)))
            pages.update(self._pages_here(found[0][1], item))
            here = {name for page in pages for name in page_parts(page)}
            parts = [part for name, part in header.parts.items() if name not in here]
            return [(part.at, part.end - part.at) for part in parts]

        try:
            memory = self._pull(source, allow, choose, wanted)
            with torch.inference_mode():
                return self._prepare(memory, *found[0], item, pages)
        finally:
            with self._lock:
                self._num_coming -= taken

    def _pages_here(self, carried: Carried, item: Submission) -> dict[int, Any]:
        """Return the request's pages that the prefix cache has. Called from another thread."""
        prefix, found = self._loop.prefix, dict[int, Any]()
        if prefix is None:
            return found
        ours = prefix.chain(item, item.token_ids).upto(carried.committed)
        for page, (name, theirs) in enumerate(zip(ours, carried.pages, strict=False)):
            if name.hex() != theirs:
                break
            with suppress(KeyError):
                found[page] = prefix.store.read(name)
        return found

    def _prepare(
        self,
        memory: mmap.mmap,
        header: Header,
        carried: Carried,
        item: Submission,
        pages: Mapping[int, Any],
    ) -> Brought:
        """Copy the fetched KV into a new `RequestKV`. An admitted request gets the `RequestKV`."""
        size, parts = self._terms.page_size, header.parts
        rest = {n: tensor(memory, part) for n, part in parts.items() if not n.startswith("page.")}
        kv = self._runner.backend.new_kv(item.num_prompt_tokens + item.max_tokens)
        for page in range(len(carried.pages)):
            here = pages.get(page)
            if here is None:
                here = tuple(tensor(memory, parts[name]) for name in page_parts(page))
            kv.copy_in(page * size, here)
        for name, k in rest.items():
            if name.startswith("k."):
                layer = int(name[2:])
                kv.write(layer, k, rest[f"v.{layer}"], len(carried.pages) * size)
        kv.states.restore({n: t.clone() for n, t in rest.items() if n.startswith("state.")})
        kv.committed = carried.committed
        kept = carried.kept and SavedRows(*carried.kept, rest["hidden"].clone())
        hidden = [rest[name].clone() for name in ("last_hidden",) if name in rest]
        return Brought(kv, kept, hidden, len(pages) * size)

    def enter(self, item: Submission, request: Request) -> bool:
        """Admit a request with its KV.

        The KV gets blocks, or is swapped out if blocks are short.
        """
        brought = self.brought.pop(item.request_id, None)
        if brought is None:
            return False
        kv, kept = brought.kv, brought.kept
        scheduler, now = self._loop.scheduler, self._loop.now_ns()
        if kept is not None and kept.hi - kept.lo > scheduler.limits.max_step_tokens:
            kept = None
        if not (kv.committed or kept):
            self.missed("its row is longer than a step here (max_step_tokens)")
            return False
        request.num_computed_tokens = kv.committed
        if kept is not None:
            request.frontier = Frontier(kept.lo, kept.hi, kept.layer)
        request.admitted_ns = request.last_progress_ns = now
        if item.num_output_tokens:
            request.first_token_ns = request.last_token_ns = now
        need = scheduler.pool.blocks_for(request.num_written_tokens)
        try:
            scheduler.adopt(request, swapped=need > scheduler.pool.num_free)
        except CheckpointError as error:
            request.reset()
            self.missed(str(error))
            return False
        kv.written = request.num_written_tokens
        state = self._runner.requests[item.request_id]
        state.kv, state.kept, state.hidden = kv, kept, brought.hidden
        self.counts.taken += 1
        self.counts.taken_tokens += kv.committed
        self.counts.found_tokens += brought.num_found
        return True

    def missed(self, why: str) -> None:
        """Count a request that should have come with KV and is computed again."""
        self.counts.missed += 1
        _log.info("a request is computed, as its KV was not handed over: %s", why)

    def stats(self) -> dict[str, int]:
        """Return counts for statistics. Callable from any thread."""
        return {**asdict(self.counts), "waiting_bytes": self.outbox.num_bytes}

    def close(self) -> None:
        """Stop fetching, without waiting."""
        self._workers.shutdown(wait=False, cancel_futures=True)


def handover_of(
    loop: EngineLoop,
    runner: TorchRunner,
    config: EngineConfig,
    weights: str,
    put: Callable[[Call], None],
    pull: Pull | None,
) -> HandOver:
    """Return the hand-over of an engine.

    Args:
        loop: Owner of the requests.
        runner: Owner of their KV.
        config: Settings.
        weights: Digest of the weights.
        put: Function that queues calls, see `HandOver`.
        pull: Function that fetches parcels, see `HandOver`.
    """
    identity = {
        "model": runner.fingerprint(),
        "weights": weights,
        "software": software(),
        "kernels": repr(sorted(runner.names.items())),
        "dtype": str(runner.parts.like.dtype),
        "exactness": config.exactness,
        "page size": str(config.page_size),
    }
    has_layout = runner.parts.attentions and not runner.backend.why_inexact
    layout = layout_of(runner, config.page_size) if has_layout else None
    most_bytes = int(config.handover_gib * (1 << 30))
    terms = Terms(
        identity, layout, config.page_size, runner.shape.num_layers, runner.parts.num_kv_layers,
        runner.parts.lm_head.in_features,
    )  # fmt: skip
    made = HandOver(loop, runner, terms, most_bytes, put, pull)
    if config.role == "prefill":
        loop.listeners += (made.heard,)
    return made
