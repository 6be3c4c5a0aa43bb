"""Rows about speed alone: against continuous batching of transformers, and against memory."""

import mmap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import active_bytes, make_jobs, median, paired
from bench.energy import Run, answered_tokens, metered
from bench.engine.exactness import ReferenceProcess
from bench.engine.mixed import GREEDY
from qllm import QLLMEngine
from qllm.measure.variants import KV_SIZES

WORKLOADS = {
    "16 x (64-256 in, 32 out)": (16, (64, 256), 512, 1.3),
    "12 x (512-1024 in, 32 out)": (12, (512, 1024), 1024, 1.8),
}
"""Requests, prompt lengths, batch tokens of the peer, and the target ratio."""
STREAM_BYTES = 2 << 30


def peer_row(model: Any, folder: Path, rounds: int, seed: int) -> dict[str, Any]:
    """Measure output tokens per CPU-second of both processes, alternated."""
    out: dict[str, Any] = {}
    with (
        ReferenceProcess(folder) as process,
        QLLMEngine.from_model(model, threads=1, conformance=False, **KV_SIZES) as engine,
    ):
        for name, (count, prompt, batch_tokens, target) in WORKLOADS.items():
            jobs = make_jobs(seed, count, prompt, (32, 32))
            ours, theirs, walls, same, energy = [], [], [], 0, list[Run]()
            for i in range(rounds + 1):
                answer = process.ask(
                    "cb", jobs=jobs, max_batch_tokens=batch_tokens, max_requests=count
                )
                with metered(energy) as tokens:
                    begin, cpu = time.monotonic(), time.process_time()
                    handles = [
                        engine.submit(j.token_ids, "BE", j.max_tokens, sampling=GREEDY)
                        for j in jobs
                    ]
                    results = [h.result(600) for h in handles]
                    cpu, wall = time.process_time() - cpu, time.monotonic() - begin
                    tokens.append(answered_tokens(results))
                num = sum(len(r.token_ids) for r in results)
                if i == 0:  # warm-up
                    same = sum(
                        list(r.token_ids) == t
                        for r, t in zip(results, answer["tokens"], strict=True)
                    )
                    continue
                ours.append(num / cpu)
                theirs.append(num / answer["cpu_s"])
                walls.append((wall, answer["wall_s"]))
            out[name] = {
                "ratio": paired([a / b for a, b in zip(ours, theirs, strict=True)]),
                "target": target,
                "ours_tokens_per_cpu_s": median(np.array(ours)),
                "peer_tokens_per_cpu_s": median(np.array(theirs)),
                "wall_s": [float(x) for x in np.median(np.array(walls), axis=0)],
                "energy": energy[1:],
                "peer_max_batch_tokens": batch_tokens,
                "token_equal_streams": f"{same}/{count}",
            }
    return out


def bandwidth_reads() -> dict[str, Callable[[], Any]]:
    """Return ways to read 2 GiB once; the fastest one counts."""
    import torch

    memory = mmap.mmap(-1, STREAM_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # huge pages: the floor is the fastest read
        memory.madvise(mmap.MADV_HUGEPAGE)
    base = torch.frombuffer(memory, dtype=torch.float32)
    base.fill_(1.0)
    half = base.view(torch.bfloat16).view(-1, 1024)
    vector = torch.ones(1024, dtype=torch.bfloat16)
    wide = base.view(-1, 1024)
    wide_vector = torch.ones(1024)
    return {
        "fp32 sum": base.sum,
        "fp32 dot": lambda: torch.dot(base, base),
        "bf16 mv": lambda: torch.mv(half, vector),
        "fp32 mv": lambda: torch.mv(wide, wide_vector),
    }


def decode_row(model: Any, rounds: int, seed: int) -> dict[str, Any]:
    """Measure a decode step at batch 1 over one read of the active weights, alternated."""
    reads = bandwidth_reads()
    num_bytes = active_bytes(model)
    cpu_step: list[float] = []
    wall_step: list[float] = []
    speed: dict[str, list[float]] = {name: [] for name in reads}
    with QLLMEngine.from_model(model, threads=1, conformance=False, **KV_SIZES) as engine:
        for i in range(rounds + 1):
            job = make_jobs(seed + i, 1, (64, 64), (48, 48))[0]
            short = _timed(engine, job.token_ids, 8)
            long = _timed(engine, job.token_ids, 48)
            rates = {}
            for name, read in reads.items():
                begin = time.thread_time()
                read()
                rates[name] = STREAM_BYTES / (time.thread_time() - begin) / 1e9
            if i:
                cpu_step.append((long[0] - short[0]) / 40 * 1e3)
                wall_step.append(long[1])
                for name, rate in rates.items():
                    speed[name].append(rate)
    medians = {name: median(np.array(v)) for name, v in speed.items()}
    best = max(medians, key=medians.__getitem__)
    floors = [num_bytes / 1e6 / rate for rate in speed[best]]
    return {
        "ratio_cpu": paired([a / b for a, b in zip(cpu_step, floors, strict=True)]),
        "ratio_wall": paired([a / b for a, b in zip(wall_step, floors, strict=True)]),
        "step_cpu_ms": median(np.array(cpu_step)),
        "step_wall_ms": median(np.array(wall_step)),
        "active_mb": num_bytes / 1e6,
        "floor_ms": median(np.array(floors)),
        "read_gb_per_s": medians,
        "read_by": best,
    }


def _timed(engine: QLLMEngine, token_ids: list[int], num: int) -> tuple[float, float]:
    """Return CPU seconds of the engine's thread, and the median gap between tokens in ms."""
    begin = engine.call(time.thread_time)
    result = engine.submit(token_ids, "LS", num, sampling=GREEDY).result(120)
    cpu_s = float(engine.call(time.thread_time) - begin)
    return cpu_s, float(np.median(result.metrics.itl_ms))
