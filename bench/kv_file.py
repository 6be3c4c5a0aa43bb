"""Rows of `bench.kv` about the file: an engine that is killed, and LS beside a busy mover."""

import os
import shutil
import signal
import statistics
import tempfile
import threading
import time
from typing import Any

import numpy as np

from bench.common import MODEL, SPECIAL
from qllm import QLLMEngine, SamplingParams
from qllm.frontend.request_log import RequestLog

GREEDY = SamplingParams(temperature=0, ignore_eos=True)
MOVE_BYTES = 1 << 30
GIB = 4.0


def _ids(seed: int, count: int) -> list[int]:
    rng = np.random.default_rng(seed)
    return [int(i) for i in rng.integers(SPECIAL, MODEL["vocab_size"], count)]


def _engine(model: str, folder: str | None, **more: Any) -> QLLMEngine:
    place = {} if folder is None else {"kv_dir": folder, "kv_dir_gib": GIB}
    return QLLMEngine.from_pretrained(model, threads=2, conformance=False, **place, **more)


def _until(condition: Any, seconds: float = 600) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.002)


def _killed(model: str, folder: str | None, ids: list[int], num: int, to: str) -> dict[str, Any]:
    """One request whose engine is killed; the next engine's time to its next token."""
    log = RequestLog(3, lambda: None)
    with _engine(model, folder) as first:
        handle = first.submit(ids, to, num, sampling=GREEDY)
        log.keep(handle)
        _until(lambda: len(handle.token_ids) >= num // 2)
        if folder is not None:
            due = (len(ids) + num // 2) // 64 - 1
            _until(lambda: first.stats()["prefix_cache"]["file"]["kept_pages"] >= due)
        os.kill(first._client._process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        _until(lambda: log.holds(handle))
    before = len(handle.token_ids)
    with _engine(model, folder) as second:
        start = time.perf_counter()
        log.go_on(second.replay)
        _until(lambda: len(handle.token_ids) > before)
        seconds = time.perf_counter() - start
        tokens = handle.result(600).token_ids
        hits = second.stats()["prefix_cache"]["hit_tokens"]
    return {"seconds": seconds, "tokens": tokens, "loaded": hits, "known": len(ids) + before}


def restart_row(model: str, rounds: int, context: int) -> dict[str, Any]:
    """Time to the next token after `kill -9`, the file over none; the load of a model is not in it.

    Half of the rounds are LS, the others BE.
    """
    arms: dict[str, list[dict[str, Any]]] = {"file": [], "none": []}
    for i in range(rounds):
        folder = tempfile.mkdtemp(prefix="qllm-kv-")
        try:
            for name in ("file", "none") if i % 2 else ("none", "file"):
                place = folder if name == "file" else None
                to = "BE" if i % 2 else "LS"
                arms[name].append(_killed(model, place, _ids(500 + i, context), 128, to))
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
    """Moves pages of the file of an engine both ways, beside the engine, until stopped."""

    def __init__(self, engine: QLLMEngine) -> None:
        kept = engine._client._core.kept  # type: ignore[attr-defined]
        self._file = kept._file
        self.moved = [0, 0]
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=f) for f in (self._read, self._write)]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        entries = self._file.scan()
        while not self._stop.is_set() and self.moved[0] < MOVE_BYTES:
            for entry in entries:
                self._file.read(entry.slot, entry.name, entry.checksum)
                self.moved[0] += self._file.layout.num_bytes

    def _write(self) -> None:
        """As the mover does with LS requests there: a tenth of a core."""
        entry = self._file.scan()[0]
        page = self._file.read(entry.slot, entry.name, entry.checksum)
        last = self._file.num_slots - 1
        while not self._stop.is_set() and self.moved[1] < MOVE_BYTES:
            start = time.thread_time()
            self._file.write(last, b"b" * 16, page, b"", False)
            self.moved[1] += self._file.layout.num_bytes
            self._stop.wait((time.thread_time() - start) * 9)

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def _chats(
    engine: QLLMEngine, seed: int, num: int, salt: str
) -> tuple[list[float], list[tuple[int, ...]]]:
    found = []
    for i in range(num):
        ids = _ids(seed * 1000 + i, 256)
        handle = engine.submit(ids, "LS", 4, sampling=GREEDY, cache_salt=salt)
        found.append(handle.result(120))
    return [r.metrics.ttft_ms or 0.0 for r in found], [r.token_ids for r in found]


def mover_row(model: str, rounds: int, num: int) -> dict[str, Any]:
    """TTFT p99 of LS chats while the file is read and written, over a file that rests."""
    folder = tempfile.mkdtemp(prefix="qllm-kv-")
    times: dict[str, list[float]] = {"busy": [], "idle": []}
    same, moved = True, [0, 0]
    try:
        with _engine(model, folder, run_in="thread") as engine:
            engine.submit(_ids(1, 2048), "LS", 8, sampling=GREEDY).result(120)
            core = engine._client._core  # type: ignore[attr-defined]
            _until(lambda: not core.kept._tier.is_busy)
            for i in range(rounds):
                tokens = {}
                for name in ("busy", "idle") if i % 2 else ("idle", "busy"):
                    traffic = _Traffic(engine) if name == "busy" else None
                    ttft, tokens[name] = _chats(engine, i, num, name)
                    times[name] += ttft
                    if traffic is not None:
                        traffic.stop()
                        moved = [a + b for a, b in zip(moved, traffic.moved, strict=True)]
                same &= tokens["busy"] == tokens["idle"]
    finally:
        shutil.rmtree(folder)
    p99 = {name: float(np.percentile(ms, 99)) for name, ms in times.items()}
    return {
        "idle_ttft_p99_ms": p99["idle"],
        "busy_ttft_p99_ms": p99["busy"],
        "busy_over_idle": p99["busy"] / p99["idle"],
        "busy_over_idle_p50": float(np.median(times["busy"]) / np.median(times["idle"])),
        "asked": 1.1,
        "read_bytes": moved[0],
        "written_bytes": moved[1],
        "same_tokens": same,
        "hits_due": min(moved) > 0,
    }
