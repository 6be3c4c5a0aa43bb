"""Rows of `bench.kv` about the file: a killed engine, and LS during loads and stores."""

import os
import shutil
import signal
import statistics
import tempfile
import threading
import time
from typing import Any

import numpy as np

from bench.kv.parts import GREEDY, PAGE, make_engine, make_ids, wait_until
from qllm import QLLMEngine
from qllm.engine.kv.tier import FileTier
from qllm.frontend.request_log import RequestLog
from qllm.scheduler.prefix import PageStore

MOVE_BYTES = 1 << 30
GIB = 4.0
MOST_ROUNDS = 40


def _engine(model: str, folder: str | None, **more: Any) -> QLLMEngine:
    place = {} if folder is None else {"kv_dir": folder, "kv_dir_gib": GIB}
    return make_engine(model, **place, **more)


def _killed(model: str, folder: str | None, ids: list[int], num: int, to: str) -> dict[str, Any]:
    """Kill the engine of one request; return the next engine's time to its next token."""
    log = RequestLog(3, lambda: None)
    with _engine(model, folder) as first:
        handle = first.submit(ids, to, num, sampling=GREEDY)
        log.keep(handle)
        wait_until(lambda: len(handle.token_ids) >= num // 2)
        handle.update(paused=True)  # it stays open during slow writes
        if folder is not None:
            due = (len(ids) + num // 2) // 64 - 1
            wait_until(lambda: first.stats()["prefix_cache"]["file"]["kept_pages"] >= due)
        os.kill(first._client._process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        wait_until(lambda: log.holds(handle))
        handle.update(paused=False)
    before = len(handle.token_ids)
    with _engine(model, folder) as second:
        start = time.perf_counter()
        log.go_on(second.replay)
        wait_until(lambda: len(handle.token_ids) > before)
        seconds = time.perf_counter() - start
        tokens = handle.result(600).token_ids
        hits = second.stats()["prefix_cache"]["hit_tokens"]
    return {"seconds": seconds, "tokens": tokens, "loaded": hits, "known": len(ids) + before}


def restart_row(model: str, rounds: int, context: int) -> dict[str, Any]:
    """Measure the time to the next token after `kill -9`, with the file over without.

    The load of a model is not included. Half of the rounds are LS, the others BE.
    """
    arms: dict[str, list[dict[str, Any]]] = {"file": [], "none": []}
    for i in range(rounds):
        folder = tempfile.mkdtemp(prefix="qllm-kv-")
        try:
            for name in ("file", "none") if i % 2 else ("none", "file"):
                place = folder if name == "file" else None
                to = "BE" if i % 2 else "LS"
                arms[name].append(_killed(model, place, make_ids(500 + i, context), 128, to))
        finally:
            shutil.rmtree(folder)
    pairs = list(zip(arms["file"], arms["none"], strict=True))
    return {
        "context": context,
        "file_s": statistics.median(a["seconds"] for a in arms["file"]),
        "none_s": statistics.median(a["seconds"] for a in arms["none"]),
        "file_over_none": statistics.median(a["seconds"] / b["seconds"] for a, b in pairs),
        "pairs": [a["seconds"] / b["seconds"] for a, b in pairs],
        "asked": 0.2,
        "loaded_of": [(a["loaded"], a["known"]) for a in arms["file"]],
        "same_tokens": all(a["tokens"] == b["tokens"] for a, b in pairs),
        "hits_due": all(a["loaded"] >= a["known"] - 2 * 64 for a in arms["file"]),
    }


class _Traffic:
    """Constant loads and stores of an engine's mover, as the engine itself does them.

    Half of the pages in the file are loaded for best effort again and again, beyond RAM; the other
    half is displaced and stored again.

    Args:
        engine: Engine with a file of KV.
        loads: True to load.
        stores: True to store.
    """

    def __init__(self, engine: QLLMEngine, loads: bool = True, stores: bool = True) -> None:
        self._engine = engine
        self._loads, self._stores = loads, stores
        self._prefix = engine._client._core.loop.prefix  # type: ignore[attr-defined]
        self._tier: FileTier = self._prefix.tier
        names = self._prefix.store.names()
        self._loaded, self._stored = names[: len(names) // 2], names[len(names) // 2 :]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._move)
        self._before = self._moved()
        self._thread.start()

    def _moved(self) -> list[int]:
        counts, size = self._tier.counts, self._tier.page_bytes
        return [counts.loaded * size, counts.stored * size]

    def _move(self) -> None:
        while not self._stop.wait(0.005):
            tier = self._tier
            if self._loads and not tier._loads:
                self._engine.call(self._load)
            if self._stores and not tier._writing and not tier.has_unsaved:
                self._engine.call(self._store)

    def _load(self) -> None:
        tier, ram, now_ns = self._tier, PageStore[Any](0), self._prefix.now_ns()
        target = self._prefix._runner.load_target(len(self._loaded) * PAGE)
        tier.load(self._loaded, ram, target.put, False, b"", now_ns)

    def _store(self) -> None:
        for name in self._stored:
            if name in self._tier.index:
                self._tier.index.drop(name)  # displaced, not erased
            self._tier.offer(name, False)

    def stop(self) -> list[int]:
        """Stop, and return the bytes loaded and stored."""
        self._stop.set()
        self._thread.join()
        wait_until(lambda: not self._tier.is_busy)
        return [now - before for now, before in zip(self._moved(), self._before, strict=True)]


class _Batch:
    """Best effort under the chats: one request after the other, so that every chat preempts."""

    def __init__(self, engine: QLLMEngine) -> None:
        self._engine, self._stop = engine, threading.Event()
        self.stalls_ms: list[float] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        ids = make_ids(9, 64)
        while not self._stop.is_set():
            done = self._engine.submit(ids, "BE", 48, sampling=GREEDY, cache_salt="b").result(120)
            self.stalls_ms.append(done.metrics.max_stall_ms)

    def stop(self) -> list[float]:
        """Stop, and return the longest stall of each request."""
        self._stop.set()
        self._thread.join()
        return self.stalls_ms


def _chats(
    engine: QLLMEngine, seed: int, num: int, salt: str
) -> tuple[list[float], list[tuple[int, ...]]]:
    found = []
    for i in range(num):
        ids = make_ids(seed * 1000 + i, 256)
        handle = engine.submit(ids, "LS", 4, sampling=GREEDY, cache_salt=salt)
        found.append(handle.result(120))
    return [r.metrics.ttft_ms or 0.0 for r in found], [r.token_ids for r in found]


RATE_S = 3.0
"""Seconds of each measurement of the mover's rate."""
DIRECTIONS = {"loads": (True, False), "stores": (False, True), "both": (True, True)}


def _rates(engine: QLLMEngine) -> dict[str, float]:
    """Return GB per second of loads alone, stores alone, and both at once, without requests."""
    found = {}
    for name, (loads, stores) in DIRECTIONS.items():
        begin, traffic = time.monotonic(), _Traffic(engine, loads, stores)
        time.sleep(RATE_S)
        moved = sum(traffic.stop())
        found[name] = moved / (time.monotonic() - begin) / 1e9
    return found


def mover_row(model: str, num: int) -> dict[str, Any]:
    """Measure LS chats over best effort, in turns with a busy mover and an idle one.

    The row ends when 1 GB was loaded and 1 GB stored. It has TTFT, duration of preemption, stalls
    of BE, and the rates of loads alone, stores alone and both at once.
    """
    folder = tempfile.mkdtemp(prefix="qllm-kv-")
    found: dict[str, dict[str, list[float]]] = {
        name: {"ttft_ms": [], "preempt_ms": [], "stall_ms": []} for name in ("busy", "idle")
    }
    same, moved, rounds = True, [0, 0], 0
    try:
        with _engine(model, folder, run_in="thread") as engine:
            engine.submit(make_ids(1, 4096), "LS", 8, sampling=GREEDY).result(120)
            core = engine._client._core  # type: ignore[attr-defined]
            wait_until(lambda: not core.kept._tier.is_busy)
            while min(moved) < MOVE_BYTES and rounds < MOST_ROUNDS:
                tokens = {}
                for name in ("busy", "idle") if rounds % 2 else ("idle", "busy"):
                    core.loop.preempt_latencies_ns.clear()
                    traffic = _Traffic(engine) if name == "busy" else None
                    batch = _Batch(engine)
                    ttft, tokens[name] = _chats(engine, rounds, num, name)
                    preempts = list(core.loop.preempt_latencies_ns)
                    if traffic is not None:
                        moved = [a + b for a, b in zip(moved, traffic.stop(), strict=True)]
                    found[name]["ttft_ms"] += ttft
                    found[name]["stall_ms"] += batch.stop()
                    found[name]["preempt_ms"] += [ns / 1e6 for ns in preempts]
                same &= tokens["busy"] == tokens["idle"]
                rounds += 1
            late = core.kept._tier.counts.late
            rates = _rates(engine)
    finally:
        shutil.rmtree(folder)
    busy, idle = found["busy"], found["idle"]
    p99 = {name: float(np.percentile(arm["ttft_ms"], 99)) for name, arm in found.items()}
    return {
        "chats": len(busy["ttft_ms"]),
        "ttft_p99_ms": p99,
        "busy_over_idle": p99["busy"] / p99["idle"],
        "busy_over_idle_p50": float(np.median(busy["ttft_ms"]) / np.median(idle["ttft_ms"])),
        "asked": 1.1,
        "preempt_p99_ms": {n: float(np.percentile(a["preempt_ms"], 99)) for n, a in found.items()},
        "preemptions": {name: len(arm["preempt_ms"]) for name, arm in found.items()},
        "be_stall_max_ms": {name: max(arm["stall_ms"]) for name, arm in found.items()},
        "be_stall_bound_ms": 1000,
        "gb_per_s": rates,
        "both_asked": 1.6,
        "preempt_asked": 1.3,
        "read_bytes": moved[0],
        "written_bytes": moved[1],
        "late": late,
        "same_tokens": same,
        "hits_due": min(moved) >= MOVE_BYTES,
    }
