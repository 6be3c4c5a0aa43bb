"""The metrics of `/metrics`, per class: the usual names of LLM servers, with the prefix `qllm:`.

Latencies are measured by the engine (`RequestMetrics`), and counted when a request has ended.
"""

import threading
from collections import deque
from collections.abc import Mapping
from typing import Any, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from qllm.frontend.handle import Result
from qllm.types import Priority

disable_created_metrics()  # type: ignore[no-untyped-call] # a useless series per counter
SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
SHORT = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.05, 0.1, 1)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5)
RECENT = 512
"""Number of recent TTFTs per class from which the live page computes percentiles."""
STATES = ("waiting", "running", "parked", "paused")


def class_name(priority: int) -> str:
    """Return LS or BE. The server has no other classes."""
    return Priority(priority).name


Count = TypeVar("Count", int, float)


def new_since(before: Count, now: Count) -> Count:
    """Return the growth of an engine's count. A new engine counts from 0 again."""
    return now - before if now >= before else now


class _OfClass:
    """The series of one class, looked up once, because a lookup costs more than an increment.

    Args:
        metrics: Owner of the series.
        class_name: LS or BE.
    """

    def __init__(self, metrics: "Metrics", class_name: str) -> None:
        def of(collector: Any, *more: str) -> Any:
            return collector.labels(metrics._model, class_name, *more)

        self.prompt, self.output = of(metrics._prompt), of(metrics._output)
        self.preemptions = of(metrics._request_preemptions)
        drafts = metrics._drafted, metrics._accepted
        self.drafted, self.accepted = (of(made, metrics._drafter) for made in drafts)
        self.revisions, self.revise_lost = of(metrics._revisions), of(metrics._revise_lost)
        causes = ("evict", "retry", "preempt")
        self.recomputed = {cause: of(metrics._recomputed, cause) for cause in causes}
        self.prompt_size, self.output_size = of(metrics._prompt_size), of(metrics._output_size)
        self.itl = of(metrics._itl)
        self.times_ms = {
            "ttft_ms": of(metrics._ttft),
            "tpot_ms": of(metrics._tpot),
            "e2e_ms": of(metrics._e2e),
            "queue_ms": of(metrics._queue),
            "parked_ms": of(metrics._parked),
            "max_stall_ms": of(metrics._stall),
        }


class Metrics:
    """The collectors of one server. The class is large because it makes all metrics.

    Args:
        model_name: Label of every metric.
        is_local: True if the engine's process is on this host and can be observed.
        drafter: Label of the metrics of drafts: the engine's setting `draft`, of several engines
            that of the first.
        beside: Metrics of another model of the server. Both models then share all collectors, and
            `render` of either has the series of both. None makes new collectors.
    """

    def __init__(
        self,
        model_name: str,
        is_local: bool = True,
        drafter: str = "none",
        beside: "Metrics | None" = None,
    ) -> None:
        self._is_local, self._engine_pid = is_local and beside is None, "none"
        self.registry: CollectorRegistry = (
            CollectorRegistry() if beside is None else beside.registry
        )
        self._collectors: dict[str, Any] = {} if beside is None else beside._collectors
        """All collectors with labels, by name."""
        self._model, self._drafter = model_name, drafter
        self._lock = threading.Lock()
        self._num_preemptions = self._num_expert_bytes = 0
        self.recent_ttft_ms: dict[str, deque[float]] = {
            p.name: deque(maxlen=RECENT) for p in Priority
        }
        self._ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token")
        self._itl = self._histogram("inter_token_latency_seconds", "Gaps between tokens")
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds", "Mean gap of a request"
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "Arrival to last token")
        self._queue = self._histogram(
            "request_queue_time_seconds", "Arrival to the first program with the request"
        )
        self._parked = self._histogram("request_parked_time_seconds", "Time in stopped passes")
        self._stall = self._histogram(
            "request_max_stall_seconds", "Longest time of an admitted request without progress"
        )
        self._make_sizes_and_keys(sees_processes=beside is None)
        self._preempt = self.made(
            Histogram,
            "preempt_latency_seconds",
            "Time from the arrival of a request that preempts until the pass has stopped",
            buckets=SHORT,
        ).labels(model_name)
        self._preemptions = self._counter("preemptions", "Passes stopped for another request")
        self._request_preemptions = self._counter(
            "request_preemptions", "Times that a request was stopped", "class"
        )
        self._finished = self._counter(
            "request_success", "Requests that ended, by reason", "class", "finished_reason"
        )
        self._prompt = self._counter("prompt_tokens", "Prompt tokens computed", "class")
        self._output = self._counter("generation_tokens", "Tokens produced", "class")
        self._recomputed = self._counter(
            "recomputed_tokens", "Tokens computed again", "class", "cause"
        )
        self.refused = self._counter(
            "requests_refused", "Refused requests, by HTTP status", "status"
        )
        self.demoted = self._counter(
            "requests_demoted", "LS requests served as BE (max_ls)"
        ).labels(model_name)
        self.restarts = self._counter(
            "engine_restarts", "Engines started after another one had ended"
        ).labels(model_name)
        self.replayed = self._counter(
            "requests_replayed", "Times that an open request continued with a new engine"
        ).labels(model_name)
        self._make_prompts()
        self.up = self._gauge("engine_up", "1 while the engine serves").labels(model_name)
        self._batch_lines = self._counter("batch_lines", "Batch lines answered", "status")
        self._requests = {
            state: self._gauge(f"num_requests_{state}", f"Requests {state} now", "class")
            for state in STATES
        }
        self._kv = self._gauge("kv_cache_usage_perc", "Part of the KV blocks in use, 0 to 1")
        self._rings = self._gauge(
            "request_ring_usage_perc",
            "Part of a request ring that the engine has not read, 0 to 1",
            "class",
        )
        self._make_passes()
        self._make_kept()
        self._make_time()
        self._make_losses()
        self._of_class = {p.name: _OfClass(self, p.name) for p in Priority}

    def _make_passes(self) -> None:
        """Make the metrics of passes."""
        self._frames = self._gauge(
            "num_frames_parked", "Passes that are stopped and continue later"
        )
        self._frame_bytes = self._gauge(
            "frames_parked_bytes",
            "Bytes of activations of stopped passes; their KV is in kv_cache_usage_perc",
        )
        self._expert_bytes = self._counter(
            "expert_bytes_read",
            "Bytes of expert weights that passes read: each expert once per layer",
        )
        self._spared = self._counter(
            "preemptions_spared", "Passes that continued although an arrival had stopped them"
        )
        self._num_spared = 0
        self._segment = self._gauge(
            "max_segment_seconds", "Longest work between two boundaries so far"
        )

    def _make_prompts(self) -> None:
        """Make the metrics of streaming prompts and of drafts."""
        self._drafted = self._counter(
            "spec_decode_num_draft_tokens",
            "Drafted tokens that steps verified, by the setting `draft`",
            *("class", "drafter"),
        )
        self._accepted = self._counter(
            "spec_decode_num_accepted_tokens",
            "Drafted tokens that the model chose too",
            *("class", "drafter"),
        )
        self.streaming_prompts = self._gauge(
            "num_open_prompts", "Prompts whose pieces still arrive"
        ).labels(self._model)
        self.abandoned = self._counter(
            "prompts_abandoned", "Prompts that ended because no piece came for `prompt_idle_s`"
        ).labels(self._model)
        self._revisions = self._counter(
            "prompt_revisions", "Pieces and changes of streaming prompts", "class"
        )
        self._revise_lost = self._counter(
            "prompt_revision_lost_tokens",
            "Computed tokens that a change of a prompt replaced",
            "class",
        )

    def _make_sizes_and_keys(self, *, sees_processes: bool) -> None:
        if sees_processes:  # those of the server and of its first engine
            ProcessCollector(registry=self.registry)
            ProcessCollector("qllm_engine", pid=lambda: self._engine_pid, registry=self.registry)
        self._prompt_size = self._histogram("request_prompt_tokens", "Tokens of a prompt", TOKENS)
        self._output_size = self._histogram(
            "request_generation_tokens", "Tokens of an answer", TOKENS
        )
        self._key_requests = self._counter(
            "key_requests", "HTTP requests per API key, named by its digest", "key", "status"
        )
        self._key_info = self._gauge(
            "key_info", "1 for each API key of keys_file, with its name", "key", "name"
        )
        self._key_prompt = self._counter(
            "key_prompt_tokens", "Tokens of prompts per API key", "key", "class"
        )
        self._key_output = self._counter(
            "key_generation_tokens", "Tokens of answers per API key", "key", "class"
        )

    def _make_experts(self) -> None:
        """Make the metrics of experts that come and go."""
        self._experts = {
            name: self._counter(f"expert_{name}", text, "class")
            for name, text in (
                (
                    "loads",
                    "Experts read, or copied to the GPU, for passes of a class (max_expert_bytes)",
                ),
                ("loaded_bytes", "Bytes of these experts"),
                ("wait_seconds", "Time in which passes waited for experts"),
            )
        }
        self._experts_before = {(name, p.name): 0.0 for name in self._experts for p in Priority}
        self._blocking = {
            name: self._counter(f"expert_blocking_{name}", text)
            for name, text in (
                ("loads", "Experts that the engine read while all passes waited"),
                ("bytes", "Bytes of these experts"),
            )
        }
        self._blocking_before: dict[str, float] = dict.fromkeys(self._blocking, 0)
        self._ahead = {
            name: self._counter(f"expert_ahead_{name}", text)
            for name, text in (
                ("loads", "Experts read before a pass asked for them; expert_loads has them too"),
                ("bytes", "Bytes of these experts"),
                ("unused_bytes", "Bytes read ahead that left memory without a use"),
            )
        }
        self._ahead_before: dict[str, float] = dict.fromkeys(self._ahead, 0)
        self._resident = self._gauge(
            "experts_resident_perc", "Part of the experts in memory, or on the GPU, 0 to 1"
        )
        self._frames_wait = self._gauge(
            "num_frames_waiting_for_experts", "Passes that wait for experts"
        )

    def _make_time(self) -> None:
        """Make the metrics of the engine's time per class, and of BE's minimum share."""
        self._time = {
            name: self._counter(f"{name.removesuffix('_s')}_time_seconds", text)
            for name, text in (
                ("ls_s", "Time of LS. A pass that both classes share is divided by tokens"),
                ("be_s", "Time of BE"),
                ("floor_s", "Time that BE got only because of min_be_share"),
            )
        }
        self._time_before: dict[str, float] = dict.fromkeys(self._time, 0)
        self._min_be_share = self._gauge(
            "min_be_share", "The setting min_be_share: least part of the time for BE, 0 to 1"
        )

    def _make_losses(self) -> None:
        """Make the metrics of lossy answers, of the candidate that is this model."""
        made = {
            name: self._counter(f"lossy_{name}", text)
            for name, text in (
                ("requests", "Lossy answers whose last token this model chose"),
                ("tokens", "Tokens of lossy answers that this model chose"),
                ("switches", "Open lossy answers that moved to this model"),
                ("audits", "Lossy answers in which this model's tokens were audited"),
                ("audited_tokens", "Tokens of this model in audits"),
                ("differing_tokens", "Tokens in audits that the whole model would not choose"),
            )
        } | {
            name: self._gauge(f"lossy_{name}", text)
            for name, text in (
                ("open", "1 if this model may give lossy answers, else 0"),
                ("disagreement_bound", "Upper bound (95 %) of its tokens that differ, 0 to 1"),
            )
        }
        self.losses: dict[str, Any] = {
            name: each.labels(self._model) for name, each in made.items()
        }
        """Collectors of lossy answers, by name."""

    def _make_kept(self) -> None:
        """Make the metrics of what comes and goes: experts, cached and swapped KV."""
        self._make_experts()
        self._prefix = {
            name: self._counter(f"prefix_cache_{name}", text)
            for name, text in (
                ("queried_tokens", "Tokens that requests looked for in the prefix cache"),
                ("hit_tokens", "Tokens whose KV was in the prefix cache"),
                ("evicted_pages", "Cached pages that other pages displaced"),
                ("refused_pages", "Pages not cached because there was no room"),
            )
        }
        self._prefix_before = dict.fromkeys(self._prefix, 0)
        self._prefix_kept = {
            name: self._gauge(f"prefix_cache_{name}", text)
            for name, text in (
                ("kept_tokens", "Tokens of cached KV"),
                ("kept_bytes", "Bytes of cached KV"),
                ("kept_state_bytes", "Bytes of cached recurrent states"),
            )
        }
        self._sizes = {
            name: self._gauge(metric, text)
            for name, metric, text in (
                ("kv_tokens", "kv_max_tokens", "Most tokens of KV of all requests"),
                ("kv_bytes", "kv_max_bytes", "Most bytes of KV of all requests"),
                ("kept_tokens", "prefix_cache_max_tokens", "Most tokens of cached KV"),
                ("kept_bytes", "prefix_cache_max_bytes", "Most bytes of cached KV and states"),
            )
        }
        self._state_bytes = self._gauge(
            "state_bytes", "Bytes of recurrent states that requests hold"
        )
        self._swapped = {
            name: self._counter(f"kv_swapped_{name}_tokens", text)
            for name, text in (
                ("out", "Tokens whose KV was swapped out"),
                ("in", "Tokens whose KV was swapped in again"),
            )
        }
        self._swapped_before = dict.fromkeys(self._swapped, 0)
        self._file = {
            name: self._counter(f"kv_file_{name}", text)
            for name, text in (
                ("stored_bytes", "Bytes of KV written to the file"),
                ("loaded_bytes", "Bytes of KV read from the file for requests"),
                ("damaged_pages", "Damaged pages found in the file"),
                ("late_requests", "Requests that computed because the file was too slow"),
            )
        }
        self._file_before = dict.fromkeys(self._file, 0)
        self._file_kept = self._gauge("kv_file_kept_bytes", "Bytes of KV in the file")
        self._file_up = self._gauge("kv_file_up", "1 while a file of KV is in use, else 0")

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
        made: Histogram = self.made(Histogram, name, text, "class", buckets=buckets)
        for priority in Priority:  # a rate needs a series from the start
            made.labels(self._model, priority.name)
        return made

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        made: Counter = self.made(Counter, name, text, *labels)
        return made

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        made: Gauge = self.made(Gauge, name, text, *labels)
        return made

    def made(self, kind: Any, name: str, text: str, *labels: str, **more: Any) -> Any:
        """Return the collector of a name, which all models of the server share."""
        if name not in self._collectors:
            names = ["model_name", *labels]
            made = kind(f"qllm:{name}", text, names, registry=self.registry, **more)
            self._collectors[name] = made
        return self._collectors[name]

    def finished(self, result: Result) -> None:
        """Count a request that ended without an error."""
        m = result.metrics
        label = class_name(m.priority)
        self._finished.labels(self._model, label, result.finish_reason.value).inc()
        of = self._of_class[label]
        of.prompt.inc(m.num_prefilled_tokens)
        of.output.inc(m.num_output_tokens)
        if m.preemptions:
            of.preemptions.inc(m.preemptions)
        if num_drafts := m.num_accepted_drafts + m.num_rejected_drafts:
            of.drafted.inc(num_drafts)
            of.accepted.inc(m.num_accepted_drafts)
        if m.num_revisions:
            of.revisions.inc(m.num_revisions)
            of.revise_lost.inc(m.revise_lost_tokens)
        for cause, counter in of.recomputed.items():
            if count := getattr(m, f"{cause}_recomputed_tokens"):
                counter.inc(count)
        for name, histogram in of.times_ms.items():
            if (value := getattr(m, name)) is not None:
                histogram.observe(value / 1e3)
        of.prompt_size.observe(m.num_prompt_tokens)
        of.output_size.observe(m.num_output_tokens)
        for gap in m.itl_ms:
            of.itl.observe(gap / 1e3)
        if m.ttft_ms is not None:
            self.recent_ttft_ms[label].append(m.ttft_ms)

    def name_key(self, key: str, name: str) -> None:
        """Record the name of an API key, given as a digest."""
        self._key_info.labels(self._model, key, name).set(1)

    def of_key(self, key: str, status: int) -> None:
        """Count an HTTP request of an API key, given as a digest."""
        self._key_requests.labels(self._model, key, str(status)).inc()

    def tokens_of_key(self, key: str, result: Result, *, is_first: bool = True) -> None:
        """Count the tokens of a choice for an API key.

        Args:
            key: Digest of the key.
            result: The choice.
            is_first: True for the first choice of a prompt. The prompt's tokens are counted only
                then.
        """
        m = result.metrics
        label = class_name(m.priority)
        self._key_prompt.labels(self._model, key, label).inc(m.num_prompt_tokens * is_first)
        self._key_output.labels(self._model, key, label).inc(m.num_output_tokens)

    def failed(self, priority: Priority) -> None:
        """Count a request that ended in an error."""
        self._finished.labels(self._model, priority.name, "error").inc()

    def batch_line(self, status: int) -> None:
        """Count an answered batch line."""
        self._batch_lines.labels(self._model, str(status)).inc()

    def refuse(self, status: int) -> None:
        """Count an HTTP request that got an error."""
        self.refused.labels(self._model, str(status)).inc()

    def observe(self, stats: Mapping[str, Any], counts: Mapping[tuple[str, str], int]) -> None:
        """Update the metrics with the engine's numbers and the requests per (class, state)."""
        with self._lock:  # so that two scrapes at once do not count a preemption twice
            new = new_since(self._num_preemptions, stats["num_preemptions"])
            self._num_preemptions = stats["num_preemptions"]
            spared = stats.get("num_spared", 0)
            self._spared.labels(self._model).inc(new_since(self._num_spared, spared))
            self._num_spared = spared
            more = new_since(self._num_expert_bytes, stats["expert_bytes"])
            self._num_expert_bytes = stats["expert_bytes"]
        self._expert_bytes.labels(self._model).inc(more)
        if self._is_local:
            self._engine_pid = str(stats.get("pid", "none"))
        self._observe_prefix(stats.get("prefix_cache", {}))
        for name, gauge in self._sizes.items():
            gauge.labels(self._model).set(stats.get("memory", {}).get(name, 0))
        self._observe_swap(stats.get("swap", {}))
        self._observe_experts(stats.get("experts", {}))
        self._count_up(self._time, self._time_before, stats.get("time", {}))
        self._min_be_share.labels(self._model).set(stats.get("time", {}).get("min_be_share", 0))
        self._state_bytes.labels(self._model).set(stats.get("states", {}).get("held_bytes", 0))
        self._frames.labels(self._model).set(
            sum(frame["state"] == "parked" for frame in stats["frames"])
        )
        self._frame_bytes.labels(self._model).set(
            sum(frame["bytes"] for frame in stats["frames"] if frame["state"] == "parked")
        )
        for name, use in stats.get("ring_use", {}).items():
            self._rings.labels(self._model, name).set(use)
        self._preemptions.labels(self._model).inc(new)
        for latency_ms in stats["preempt_latencies_ms"][-new:] if new else ():
            self._preempt.observe(latency_ms / 1e3)
        self._kv.labels(self._model).set(stats["kv_blocks_used"] / stats["kv_blocks"])
        self._segment.labels(self._model).set(stats["longest_segment_ms"] / 1e3)
        for state, gauge in self._requests.items():
            for priority in Priority:
                gauge.labels(self._model, priority.name).set(counts.get((priority.name, state), 0))

    def _observe_prefix(self, stats: Mapping[str, Any]) -> None:
        self._count_up(self._prefix, self._prefix_before, stats)
        for name, gauge in self._prefix_kept.items():
            gauge.labels(self._model).set(stats.get(name, 0))
        file = stats.get("file", {"off": "there is none"})
        self._count_up(self._file, self._file_before, file)
        self._file_kept.labels(self._model).set(file.get("kept_bytes", 0))
        self._file_up.labels(self._model).set(file["off"] is None)

    def _observe_experts(self, stats: Mapping[str, Any]) -> None:
        """Update the metrics of experts; {} is an engine with all experts in memory."""
        part = stats["resident"] / stats["experts"] if stats.get("experts") else 1
        self._resident.labels(self._model).set(part)
        self._frames_wait.labels(self._model).set(stats.get("waiting", 0))
        self._count_up(self._blocking, self._blocking_before, stats.get("blocking", {}))
        self._count_up(self._ahead, self._ahead_before, stats.get("ahead", {}))
        with self._lock:
            for p in Priority:
                told = stats.get(p.name, {"loads": 0, "bytes": 0, "waits_ms": 0})
                now = told["loads"], told["bytes"], told["waits_ms"] / 1e3
                for (name, counter), value in zip(self._experts.items(), now, strict=True):
                    before = self._experts_before[name, p.name]
                    counter.labels(self._model, p.name).inc(new_since(before, value))
                    self._experts_before[name, p.name] = value

    def _count_up(
        self, counters: Mapping[str, Counter], before: dict[str, Any], stats: Mapping[str, Any]
    ) -> None:
        """Add the growth of the engine's counts, which restart from 0 with a new engine."""
        with self._lock:
            for name, counter in counters.items():
                now = stats.get(name, 0)
                counter.labels(self._model).inc(new_since(before[name], now))
                before[name] = now

    def _observe_swap(self, stats: Mapping[str, Any]) -> None:
        with self._lock:
            for name, counter in self._swapped.items():
                now = stats.get(f"{name}_tokens", 0)
                counter.labels(self._model).inc(new_since(self._swapped_before[name], now))
                self._swapped_before[name] = now

    def render(self) -> bytes:
        """Return the text that Prometheus reads."""
        return generate_latest(self.registry)
