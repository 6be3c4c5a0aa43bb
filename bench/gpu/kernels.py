"""Kernels over their floor: bytes that must be read at the measured copy bandwidth, or FLOPs."""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from qllm.kernels.routing import Activation, ExpertWeights
from qllm.kernels.select import Kernels
from qllm.kernels.select import kernels as kernels_named
from qllm.kernels.tiles import Query, tiles_of

PAGE = 16


def seconds(run: Callable[[], object], device: str, rounds: int = 20) -> float:
    """Median device time of a call: replays of its graph on CUDA, wall time on a CPU."""
    for _ in range(3):
        run()
    if device == "cpu":
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    found = []
    for _ in range(rounds):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        a.record()
        graph.replay()
        b.record()
        torch.cuda.synchronize()
        found.append(a.elapsed_time(b) / 1e3)
    return sorted(found)[rounds // 2]


@functools.cache
def _ceilings(device: str, dry: bool) -> tuple[float, float]:
    num, width = (1 << 16, 128) if dry else (1 << 30, 8192)
    x = torch.randn(num, device=device, dtype=torch.bfloat16)
    y = torch.empty_like(x)
    rate = 2 * x.numel() * 2 / seconds(lambda: y.copy_(x), device) / 1e9
    a, b = (torch.randn(width, width, device=device, dtype=torch.bfloat16) for _ in "ab")
    return rate, 2 * width**3 / seconds(lambda: a @ b, device) / 1e12


def ceilings(device: str, dry: bool) -> dict[str, Any]:
    """Measured copy bandwidth (bytes read and written) and bf16 matrix rate on random data."""
    copy, flops = _ceilings(device, dry)
    return {"copy_gb_s": copy, "bf16_tflops": flops}


def _attention(k: Kernels, device: str, dry: bool, batch: int, new: int) -> dict[str, Any]:
    """Queries [length - new, length) of every sequence, the shape of Qwen3-30B-A3B."""
    heads, groups, width, length = (4, 2, 16, 40) if dry else (32, 4, 128, 4096)
    pages = -(-length // PAGE)
    dtype = torch.bfloat16
    keys, values = (
        torch.randn(batch * pages * PAGE, groups, width, device=device, dtype=dtype) for _ in "kv"
    )
    tables = torch.randperm(batch * pages, device=device).view(batch, pages).to(torch.int64)
    queries = [Query(r, r * new, length - new, new) for r in range(batch)]
    tiles = tiles_of(queries, batch * new, 16, torch.device(device))
    q = torch.randn(batch * new, heads, width, device=device, dtype=dtype)
    out = torch.empty_like(q)
    took = seconds(
        lambda: k.attend(
            q, keys, values, tables, tiles, page_size=PAGE, scale=width**-0.5, out_TNE=out
        ),
        device,
    )
    copy, flops = _ceilings(device, dry)
    num_bytes = 2 * batch * length * groups * width * 2
    work = 4 * batch * heads * width * sum(range(length - new + 1, length + 1))
    return _over(took, num_bytes / copy / 1e9, work / flops / 1e12)


def _experts(k: Kernels, device: str, dry: bool, shape: str, tokens: int) -> dict[str, Any]:
    experts, top_k, width, inner = {
        "qwen3": (128, 8, 2048, 768), "mixtral": (8, 2, 4096, 14336),
    }[shape]  # fmt: skip
    if dry:
        width, inner = 32, 16
    dtype = torch.bfloat16
    up = torch.randn(experts, 2 * inner, width, device=device, dtype=dtype)
    down = torch.randn(experts, width, inner, device=device, dtype=dtype)
    weights = ExpertWeights(up, down, None, None, False, Activation.SILU)
    x = torch.randn(tokens, width, device=device, dtype=dtype)
    gates = torch.rand(tokens, top_k, device=device)
    ids = torch.rand(tokens, experts, device=device).topk(top_k).indices
    num, hits = (torch.tensor([n], dtype=torch.int32, device=device) for n in (tokens, 0))
    slots = torch.empty(tokens, top_k, width, device=device, dtype=dtype)
    out = torch.empty_like(x)

    def run() -> None:
        routing = k.route(ids, num, experts, hits)
        k.run_experts(x, weights, routing, 0, experts, slots)
        k.combine(slots, gates, num, out)

    took = seconds(run, device)
    copy, flops = _ceilings(device, dry)
    hit = int(ids.unique().numel())
    num_bytes = hit * weights.bytes_per_expert
    work = 2 * tokens * top_k * 3 * width * inner
    return _over(took, num_bytes / copy / 1e9, work / flops / 1e12) | {"experts_hit": hit}


def _sample(k: Kernels, device: str, dry: bool, top_p: float) -> dict[str, Any]:
    rows, vocab = (2, 64) if dry else (32, 151936)
    logits = torch.randn(rows, vocab, device=device, dtype=torch.bfloat16)
    real = torch.ones(rows, dtype=torch.float64, device=device)
    whole = torch.zeros(rows, dtype=torch.int64, device=device)
    peaks = torch.zeros(rows, device=device)
    tokens = whole.clone()
    took = seconds(
        lambda: k.sample(logits, real, whole, real * top_p, real * 0, whole, whole, tokens, peaks),
        device,
    )
    copy, _ = _ceilings(device, dry)
    return _over(took, logits.numel() * 2 / copy / 1e9, 0.0)


def _over(took: float, byte_s: float, flop_s: float) -> dict[str, Any]:
    floor = max(byte_s, flop_s)
    return {
        "us": took * 1e6, "floor_us": floor * 1e6, "times_floor": took / floor,
        "bound": "bytes" if byte_s >= flop_s else "flops",
    }  # fmt: skip


def kernel_rows(device: str, dry: bool) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Every row by name."""
    k = kernels_named("torch" if dry else "triton")
    for batch, new in ((1, 1), (2, 1), (1, 8)) if dry else ((1, 1), (32, 1), (1, 2048)):
        name = f"attention_{batch}x{new}"
        yield name, functools.partial(_attention, k, device, dry, batch, new)
    for shape in ("qwen3", "mixtral"):
        for tokens in (1, 4) if dry else (1, 32, 512, 2048):
            name = f"experts_{shape}_{tokens}"
            yield name, functools.partial(_experts, k, device, dry, shape, tokens)
    for top_p in (1.0, 0.9):
        yield f"sample_top_p_{top_p}", functools.partial(_sample, k, device, dry, top_p)
