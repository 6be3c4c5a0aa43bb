"""The live page's view of a loop: its latest events, recorded only while a client polls.

The loop's thread appends references of events to a bounded queue. All other work is done by the
thread that polls. A poll renews a lease. When the lease ends, the loop stops appending.

A poll (`QLLMEngine.watch(since, whole)`) returns `entries` of the timeline (`qllm.record.timeline`)
after number `since`. It also returns `seq` (the `since` of the next poll), `now_ms` of the engine's
clock, `parked` and `running` programs, and counts of tokens, KV blocks, preemptions and drafts.
`whole` adds `experts`, as in the statistics, and the open requests: `counts` per track and status,
and the first 200. A poll returns no text and no token ids. With `loop="conditional"` nothing is
recorded and the answer is empty.
"""

import threading
from collections import Counter, deque
from math import isinf
from typing import Any

from qllm.config import EngineConfig
from qllm.engine.loop import EngineLoop, Live
from qllm.engine.storage.expert_stats import expert_stats
from qllm.engine.storage.waits import ExpertWaits
from qllm.record.metrics import class_name
from qllm.record.timeline import Timeline, track_of
from qllm.record.trace import Event
from qllm.runner.runner import TorchRunner
from qllm.types import NS_PER_MS, NS_PER_S

LEASE_NS = 5 * NS_PER_S
"""Time for which the loop records events after a poll."""
MAX_EVENTS = 50_000
"""Maximum number of events buffered between two polls. Older events are dropped."""
MAX_LISTED = 200
"""Maximum number of requests that one poll lists."""


class Watch:
    """The events of one loop, for clients that poll."""

    def __init__(
        self,
        loop: EngineLoop,
        config: EngineConfig,
        runner: TorchRunner,
        waits: ExpertWaits | None,
    ) -> None:
        self._loop, self._config, self._runner, self._waits = loop, config, runner, waits
        self._lock = threading.Lock()
        """Lock that the polling thread holds."""
        self._changing = threading.Lock()
        """Lock for short changes of the lease or the loop's listeners."""
        self._new: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._until_ns = 0
        self._timeline = Timeline()

    # -- on the loop's thread

    def _listen(self, event: Event) -> None:
        self._new.append(event)
        if event.at_ns > self._until_ns:
            self._leave(event.at_ns)

    def _leave(self, at_ns: int) -> None:
        """Stop listening, unless a poll has renewed the lease meanwhile."""
        with self._changing:
            if at_ns > self._until_ns:
                listeners = self._loop.listeners
                self._loop.listeners = tuple(x for x in listeners if x != self._listen)

    # -- on any thread

    @property
    def is_on(self) -> bool:
        """True if the loop records events."""
        return self._listen in self._loop.listeners

    def look(self, since: int, whole: bool) -> dict[str, Any]:
        """Return the new events, see `QLLMEngine.watch`."""
        with self._lock:
            now_ns = self._loop.now_ns()
            with self._changing:
                self._until_ns = now_ns + LEASE_NS
                is_on = self.is_on  # the lease keeps recording on
            if is_on:
                self._read()
            else:
                self._begin()
            timeline = self._timeline
            entries, num_lost = timeline.since(since)
            found = {
                "now_ms": now_ns / NS_PER_MS,
                "seq": timeline.seq,
                "entries": entries,
                "num_lost": num_lost,
                "output_tokens": dict(timeline.num_output_tokens),
                "pass_tokens": dict(timeline.num_pass_tokens),
                **timeline.now(),
                **self._numbers(),
            }
        return {**found, **self._requests(now_ns)} if whole else found

    def _begin(self) -> None:
        """Start listening. The timeline starts with the current requests and frames."""
        loop, timeline = self._loop, self._timeline
        self._new.clear()
        timeline.forget()
        with self._changing:
            loop.listeners = (*loop.listeners, self._listen)
        for number, live in list(loop.live.items()):
            item, request = live
            has_token = request.first_token_ns is not None
            timeline.know(number, item.name, request.priority, request.arrival_ns, has_token)
        for frame_id, frame in list(getattr(loop.scheduler, "frames", {}).items()):
            program = frame.program
            layer = program.layer_at(frame.index) + 0.5 * program.inside_layer(frame.index)
            timeline.know_parked(frame_id, program.rows, layer, frame.parked_ns)

    def _read(self) -> None:
        if len(self._new) == MAX_EVENTS:
            self._timeline.forget()  # events were dropped: intervals that look open may have ended
        for _ in range(len(self._new)):
            self._timeline.feed(self._new.popleft())

    def _numbers(self) -> dict[str, Any]:
        loop, config = self._loop, self._config
        return {
            "kv_blocks": config.num_blocks,
            "kv_blocks_used": config.num_blocks - loop.scheduler.pool.num_free,
            "num_preemptions": loop.num_preemptions,
            "ls_ns": loop.scheduler.be_share.now.ls_ns,
            "be_ns": loop.scheduler.be_share.now.be_ns,
            "min_be_share": config.min_be_share,
            "longest_segment_ms": self._runner.segments.longest_ns / NS_PER_MS,
            "max_segment_ms": None if isinf(config.max_segment_ms) else config.max_segment_ms,
            "num_layers": self._runner.shape.num_layers,
            **self._drafts(),
        }

    def _drafts(self) -> dict[str, Any]:
        """Return the drafter, and the accepted and rejected drafts by class; {} without drafts."""
        if (drafts := self._loop.drafts) is None:
            return {}
        return {"drafter": self._config.draft, "drafts": drafts.by_class()}

    def _requests(self, now_ns: int) -> dict[str, Any]:
        """Return counts of the open requests, and the first requests: LS first, then by arrival."""
        live = list(self._loop.live.values())
        counts = Counter((track_of(x.request.priority), x.request.status.value) for x in live)
        live.sort(key=lambda x: (x.request.priority, x.request.arrival_ns))
        return {
            "expert_bytes": self._runner.expert_bytes,
            "experts": expert_stats(self._runner.residency, self._waits),
            "counts": [[*key, count] for key, count in counts.items()],
            "requests": [_row(x, now_ns) for x in live[:MAX_LISTED]],
        }


def _row(live: Live, now_ns: int) -> dict[str, Any]:
    item, request = live
    first_ns = request.first_token_ns
    last_ns, outputs = request.last_token_ns, request.num_output_tokens
    between_ns = 0 if first_ns is None or last_ns is None else last_ns - first_ns
    return {
        "number": item.request_id,
        "name": item.name,
        "class": class_name(request.priority),
        "status": request.status.value,
        "age_ms": (now_ns - request.arrival_ns) / NS_PER_MS,
        "ttft_ms": None if first_ns is None else (first_ns - request.arrival_ns) / NS_PER_MS,
        "tpot_ms": between_ns / (outputs - 1) / NS_PER_MS if outputs > 1 else None,
        "ttft_target_ms": request.slo.ttft_ms,
        "tpot_target_ms": request.slo.tpot_ms,
        "prompt_tokens": request.num_prompt_tokens,
        "computed_tokens": request.num_computed_tokens,
        "output_tokens": outputs,
        "preemptions": request.preemptions,
        "evictions": request.evictions,
    }
