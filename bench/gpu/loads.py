"""Loads of an engine with a big model: decode, mixed classes, open loops, and its peers."""

import copy
import dataclasses
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bench.energy import nvml_joules
from bench.gpu.kernels import ceilings
from bench.gpu.part import Part
from qllm import QLLMEngine, SamplingParams

GREEDY = SamplingParams(temperature=0, ignore_eos=True)
LOADS, LS_SHARE, BATCH = (0.7, 1.0, 1.3), 0.2, 32
"""Loads of the paper's set-up over the capacity: a fifth is LS, batches of 32."""
PEER_S = 30.0
"""Longest wait for the peer, in seconds."""


def device_allocs() -> int:
    """Return the number of torch's memory requests to the driver."""
    return int(torch.cuda.memory_stats().get("num_device_alloc", 0))


def prompt(rng: random.Random, num: int, vocab: int) -> list[int]:
    """Return random ids."""
    return [rng.randrange(8, vocab) for _ in range(num)]


def engine_of(part: Part, model: Any, policy: str) -> QLLMEngine:
    """Return an engine with the settings of the benchmark."""
    return QLLMEngine.from_model(
        model,
        policy=policy,
        max_kv_tokens=2048 if part.dry else 131072,
        max_num_seqs=BATCH,
        max_step_tokens=2048,
        conformance=False,
    )


def decode(part: Part, model: Any, sizes: dict[str, int]) -> dict[str, Any]:
    """Measure time per token at batch 1 and 32 after 512 tokens, over the bytes to read."""
    rng, new, out = random.Random(1), 8 if part.dry else 64, {}
    bandwidth = ceilings(part.device, part.dry)["read_gb_s"]
    with engine_of(part, model, "fcfs") as engine:
        kernels = engine.kernels
        for batch in (1, 2) if part.dry else (1, 32):
            prompts = [prompt(rng, 16 if part.dry else 512, sizes["vocab"]) for _ in range(batch)]
            for _ in range(2):  # the first warms up
                before = engine.stats()["expert_bytes"]
                handles = [engine.submit(p, "LS", new, sampling=GREEDY) for p in prompts]
                results = [handle.result(120) for handle in handles]
                read = engine.stats()["expert_bytes"] - before
            tpot = sorted(r.metrics.tpot_ms for r in results)[len(results) // 2]
            step_bytes = sizes["dense_bytes"] + read / (new + 1)
            floor_ms = step_bytes / bandwidth / 1e6
            out[f"batch_{batch}"] = {
                "tpot_ms": tpot, "floor_ms": floor_ms, "times_floor": tpot / floor_ms,
                "tokens_per_s": 1e3 * batch / tpot,
            }  # fmt: skip
    return out | {"read_gb_s": bandwidth, "kernels": kernels}


def mixed(
    part: Part, model: Any, policy: str, seconds: float, rate: float, *, alone: bool = False
) -> dict[str, Any]:
    """Measure a BE backlog of long prompts (or LS `alone`), and LS requests at a rate."""
    rng, vocab = random.Random(2), model.config.vocab_size
    long, short, backlog = (40, 12, 2) if part.dry else (1500, 200, 12)
    backlog = 0 if alone else backlog
    new = 6 if part.dry else 40
    with engine_of(part, model, policy) as engine:
        engine.submit(prompt(rng, short, vocab), "LS", new, sampling=GREEDY).result(120)
        before, joules, allocs = engine.stats(), nvml_joules(), device_allocs()
        flood: list[Any] = []
        done_be, ls, begin = 0, [], time.monotonic()
        due = begin + rng.expovariate(rate)
        while (now := time.monotonic()) < begin + seconds:
            still = [handle for handle in flood if handle.finish_reason is None]
            done_be += len(flood) - len(still)
            flood = still
            while len(flood) < backlog:
                flood.append(engine.submit(prompt(rng, long, vocab), "BE", new, sampling=GREEDY))
            if now >= due:
                ls.append(engine.submit(prompt(rng, short, vocab), "LS", new, sampling=GREEDY))
                due += rng.expovariate(rate)
            time.sleep(0.002)
        results = [handle.result(120).metrics for handle in ls]
        after, spent, allocs = engine.stats(), nvml_joules(), device_allocs() - allocs
        be_tokens = done_be * (long + new)
        for handle in flood:
            handle.cancel()
    ttft = sorted(m.ttft_ms for m in results)
    tpot = sorted(m.tpot_ms for m in results)
    if not ttft:
        return {"error": "no LS request arrived"}
    return {
        "ls_requests": len(ttft), "ls_ttft_mean_ms": sum(ttft) / len(ttft),
        "ls_ttft_p99_ms": ttft[int(0.99 * (len(ttft) - 1))],
        "ls_tpot_p99_ms": tpot[int(0.99 * (len(tpot) - 1))],
        "be_tokens_per_s": be_tokens / seconds,
        "expert_gb": (after["expert_bytes"] - before["expert_bytes"]) / 1e9,
        "joules": None if joules is None or spent is None else spent - joules,
        "preemptions": after["num_preemptions"] - before["num_preemptions"],
        "device_allocs": allocs,
    }  # fmt: skip


def capacity(part: Part, model: Any) -> dict[str, Any]:
    """Return requests per second with a full queue."""
    rng, num = random.Random(3), 4 if part.dry else 3 * BATCH
    with engine_of(part, model, "fcfs") as engine:
        for _ in range(2):  # the first warms up
            begin = time.monotonic()
            handles = [engine.submit(*job(part, rng, model)) for _ in range(num)]
            for handle in handles:
                handle.result(120)
            took = time.monotonic() - begin
    return {"requests": num, "requests_per_s": num / took}


def job(part: Part, rng: random.Random, model: Any) -> tuple[list[int], str, int]:
    """Return prompt, class and output tokens of one request of the paper's mix."""
    low, high, new = (8, 24, 4) if part.dry else (64, 512, 32)
    ids = prompt(rng, rng.randint(low, high), model.config.vocab_size)
    return ids, "LS" if rng.random() < LS_SHARE else "BE", new


def loaded(part: Part, model: Any, policy: str, full_rate: float) -> dict[str, Any]:
    """Measure an open loop at parts of the capacity; TTFTs without a token are waits."""
    seconds, out = 1.0 if part.dry else 5.0, {}
    with engine_of(part, model, policy) as engine:
        engine.submit(*job(part, random.Random(4), model)).result(120)
        for load in LOADS[:1] if part.dry else LOADS:
            rng, handles = random.Random(5), []
            begin = due = time.monotonic()
            while (due := due + rng.expovariate(load * full_rate)) < begin + seconds:
                time.sleep(max(0.0, due - time.monotonic()))
                handles.append((due, engine.submit(*job(part, rng, model))))
            end = begin + seconds
            time.sleep(max(0.0, end - time.monotonic()))
            for _, handle in handles:
                handle.cancel()
            found = [(due, handle.result(60).metrics) for due, handle in handles]
            ttft = [
                1e3 * (end - due) if m.ttft_ms is None else m.ttft_ms
                for due, m in found
                if m.priority == 0
            ]
            tokens = sum(m.num_prefilled_tokens + m.num_output_tokens for _, m in found)
            out[str(load)] = {
                "requests": len(found), "ls_requests": len(ttft),
                "ls_ttft_mean_ms": sum(ttft) / len(ttft) if ttft else None,
                "tokens_per_s": tokens / seconds,
            }  # fmt: skip
    return out


def interference(part: Part, model: Any) -> dict[str, Any]:
    """Measure the mix again, with every host core busy."""
    seconds, rate = (1.5, 4.0) if part.dry else (6.0, 8.0)
    with hogs(part, seconds + 25) as cores:
        return mixed(part, model, "qllm2", seconds, rate) | {"busy_cores": cores}


@contextmanager
def hogs(part: Part, seconds: float) -> Iterator[int]:
    """Keep every host core busy inside the block, for some seconds at most."""
    cores = 1 if part.dry else os.cpu_count() or 1
    spin = f"import time; end = time.time() + {seconds}\nwhile time.time() < end: pass"
    spinners = [subprocess.Popen([sys.executable, "-S", "-c", spin]) for _ in range(cores)]
    try:
        yield cores
    finally:
        for process in spinners:
            process.kill()
            process.wait()


def eager(part: Part, model: Any, prompts: list[list[int]], new: int) -> float:
    """Return the seconds of `generate` on one batch."""
    from transformers import GenerationConfig

    config = GenerationConfig(max_new_tokens=new, do_sample=False)
    ids = torch.tensor(prompts, device=part.device)
    begin = time.monotonic()
    with torch.inference_mode():
        model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return time.monotonic() - begin


def continuous(part: Part, model: Any, prompts: list[list[int]], new: int) -> float:
    """Return the seconds of transformers' continuous batching, without its start."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model.set_attn_implementation("sdpa")
    wanted = {
        "page_size": 64, "block_size": 64, "num_blocks": 320, "max_batch_tokens": 2048,
        "max_requests_per_batch": len(prompts), "allow_block_sharing": False,
    }  # fmt: skip
    known = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=new),
        continuous_batching_config=ContinuousBatchingConfig(
            **{name: value for name, value in wanted.items() if name in known}
        ),
    )
    manager.start()
    try:
        manager.add_request(prompts[0][:4], request_id="warm", max_new_tokens=2)
        _collect(manager, 1)
        begin = time.monotonic()
        for i, ids in enumerate(prompts):
            manager.add_request(ids, request_id=f"r{i}", max_new_tokens=new)
        _collect(manager, len(prompts))
        return time.monotonic() - begin
    finally:
        manager.stop(block=True)


def _collect(manager: Any, num: int) -> None:
    """Wait for a number of requests, for a limited time."""
    limit, done = time.monotonic() + PEER_S, 0
    while done < num:
        if time.monotonic() > limit:
            raise TimeoutError(f"{done} of {num} requests came back in {PEER_S} s")
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            if result.error is not None:
                raise RuntimeError(result.error)
            done += 1


def peer(part: Part, model: Any, run: Callable[..., float]) -> dict[str, Any]:
    """Return decode tokens per second of transformers on the same weights, from two runs."""
    rng, batch, new = random.Random(1), 2 if part.dry else 32, 8 if part.dry else 16
    length = 16 if part.dry else 512
    prompts = [prompt(rng, length, model.config.vocab_size) for _ in range(batch)]
    run(part, model, prompts, 2)
    times = {num: run(part, model, prompts, num) for num in (1, new)}
    return {"tokens_per_s": batch * (new - 1) / (times[new] - times[1]), "seconds_by_new": times}


def on_device(part: Part, model: Any) -> dict[str, Any]:
    """Measure decode by the loop on the device, quiet and with busy cores, against host tokens."""
    from bench.gpu.loop import measure

    rng, num, new = random.Random(1), *((2, 8) if part.dry else (BATCH, 64))
    prompts = [prompt(rng, 16 if part.dry else 512, model.config.vocab_size) for _ in range(num)]
    if part.dry:
        model = copy.deepcopy(model).float()  # the fake of graphs can record fp32
    # Under the loop's own policy: bits of bf16 may differ with other batches and buckets.
    with engine_of(part, model, "qllm2") as engine:
        handles = [engine.submit(ids, "LS", new, sampling=GREEDY) for ids in prompts]
        wanted = [list(handle.result(120).token_ids) for handle in handles]
    return measure(model, prompts, wanted, lambda: hogs(part, 15), part.dry)
