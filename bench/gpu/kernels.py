"""Kernels over their floor: bytes to read at the measured copy bandwidth, or FLOPs."""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional

from qllm.kernels.routing import Activation, ExpertWeights
from qllm.kernels.select import Kernels
from qllm.kernels.select import kernels as kernels_named
from qllm.kernels.tiles import Query, query_block, tiles_of
from qllm.models.weights.formats.rounding import ROUNDINGS
from qllm.models.weights.quantised_weights import DeviceWeights

PAGE = 16
L2_BYTES = 60 << 20
"""Bytes, more than the L2 cache of an H100 or H200."""
MOST_COPIES, MOST_BANKS, CALLS = 24, 4, 24


def copies(num_bytes: int, dry: bool) -> int:
    """Return the number of buffer sets that alternate, so that none is still in the L2 cache."""
    return 1 if dry else max(1, min(MOST_COPIES, -(-3 * L2_BYTES // max(1, num_bytes))))


def seconds(runs: Sequence[Callable[[], object]], device: str, rounds: int = 10) -> float:
    """Return the median device seconds of one call, over several calls with their own buffers.

    On CUDA a graph of at least `CALLS` calls is replayed, so that its launch, some microseconds,
    does not count. On a CPU the result is the wall time of one call.
    """
    for run in runs:
        run()
    if device == "cpu":
        begin = time.perf_counter()
        runs[0]()
        return time.perf_counter() - begin
    torch.cuda.synchronize()
    graph, num = torch.cuda.CUDAGraph(), -(-CALLS // len(runs)) * len(runs)
    with torch.cuda.graph(graph):
        for i in range(num):
            runs[i % len(runs)]()
    found = []
    for _ in range(rounds):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        a.record()
        graph.replay()
        b.record()
        torch.cuda.synchronize()
        found.append(a.elapsed_time(b) / 1e3 / num)
    return sorted(found)[rounds // 2]


@functools.cache
def _ceilings(device: str, dry: bool) -> dict[str, Any]:
    num, width = (1 << 16, 128) if dry else (1 << 30, 8192)
    x = torch.randn(num, device=device, dtype=torch.bfloat16)
    y = torch.empty_like(x)
    copy = 2 * x.numel() * 2 / seconds([lambda: y.copy_(x)], device) / 1e9
    read = x.numel() * 2 / seconds([lambda: x.sum()], device) / 1e9
    a, b = (torch.randn(width, width, device=device, dtype=torch.bfloat16) for _ in "ab")
    flops = 2 * width**3 / seconds([lambda: a @ b], device) / 1e12
    return {"read_gb_s": read, "copy_gb_s": copy, "bf16_tflops": flops}


def ceilings(device: str, dry: bool) -> dict[str, Any]:
    """Return measured rates, on random data.

    The rates are the bandwidth of a sum, which only reads; the bandwidth of a copy, whose read and
    written bytes count; and FLOPs of a bf16 matrix product. Floors use the first: serving mostly
    reads.
    """
    return dict(_ceilings(device, dry))


def _attention(k: Kernels, device: str, dry: bool, batch: int, new: int) -> dict[str, Any]:
    """Measure queries [length - new, length) of every sequence, in the shape of Qwen3-30B-A3B."""
    heads, groups, width, length = (4, 2, 16, 40) if dry else (32, 4, 128, 4096)
    pages = -(-length // PAGE)
    dtype = torch.bfloat16
    num_bytes = 2 * batch * length * groups * width * 2
    caches = [
        [torch.randn(batch * pages * PAGE, groups, width, device=device, dtype=dtype) for _ in "kv"]
        for _ in range(copies(num_bytes, dry))
    ]
    tables = torch.randperm(batch * pages, device=device).view(batch, pages).to(torch.int64)
    queries = [Query(r, r * new, length - new, new) for r in range(batch)]
    tiles = tiles_of(queries, batch * new, query_block(heads // groups), torch.device(device))
    q = torch.randn(batch * new, heads, width, device=device, dtype=dtype)
    out = torch.empty_like(q)
    scale = width**-0.5
    runs = [
        functools.partial(
            k.attend, q, *cache, tables, tiles, page_size=PAGE, scale=scale, out_TNE=out
        )
        for cache in caches
    ]
    took = seconds(runs, device)
    work = 4 * batch * heads * width * sum(range(length - new + 1, length + 1))
    found = _over(took, num_bytes, work, device, dry)
    found |= _baseline("sdpa", lambda: _sdpa(q, caches, batch, new, length), device)
    if new > 1:
        return found
    return found | _baseline("flashinfer", lambda: _flashinfer(q, caches, tables, length), device)


def _flashinfer(
    q: torch.Tensor, caches: list[list[torch.Tensor]], tables: torch.Tensor, length: int
) -> list[Callable[[], object]]:
    """Return calls of FlashInfer's decode without a plan: lengths and pages are on the device."""
    from flashinfer.decode import trtllm_batch_decode_with_kv_cache

    batch, _, width = q.shape
    space = torch.zeros(128 << 20, dtype=torch.uint8, device=q.device)
    lengths = torch.full((batch,), length, dtype=torch.int32, device=q.device)
    return [
        functools.partial(
            trtllm_batch_decode_with_kv_cache,
            q,
            tuple(t.view(-1, PAGE, *t.shape[1:]) for t in cache),
            space,
            tables.to(torch.int32),
            lengths,
            length,
            bmm1_scale=width**-0.5,
            kv_layout="NHD",
        )
        for cache in caches
    ]


def _sdpa(
    q: torch.Tensor, caches: list[list[torch.Tensor]], batch: int, new: int, length: int
) -> list[Callable[[], object]]:
    """Return the same attention by torch, on contiguous KV."""
    heads, width = q.shape[1:]
    q_BNTH = q.view(batch, new, heads, width).transpose(1, 2)
    sees = torch.ones(new, length, dtype=torch.bool, device=q.device).tril(length - new)
    runs: list[Callable[[], object]] = []
    for cache in caches:
        k_BGTH, v_BGTH = (
            t.view(batch, -1, *t.shape[1:])[:, :length].transpose(1, 2).contiguous() for t in cache
        )
        mask = None if new == 1 else sees
        run = functools.partial(
            functional.scaled_dot_product_attention, q_BNTH, k_BGTH, v_BGTH, mask, enable_gqa=True
        )
        runs.append(run)
    return runs


def _experts(
    k: Kernels, device: str, dry: bool, shape: str, tokens: int, rounding: str | None = None
) -> dict[str, Any]:
    experts, top_k, width, inner = {
        "qwen3": (128, 8, 2048, 768), "mixtral": (8, 2, 4096, 14336),
    }[shape]  # fmt: skip
    if dry:
        width, inner = 32, 16
    dtype = torch.bfloat16
    num_copies = copies(min(tokens * top_k, experts) * 6 * width * inner, dry)
    every = _banks(device, dry, experts, width, inner)
    if rounding is not None:
        every = _rounded_banks(device, dry, experts, width, inner, rounding)
    banks = every[:num_copies]
    x = torch.randn(tokens, width, device=device, dtype=dtype)
    gates = torch.rand(tokens, top_k, device=device)
    ids = torch.rand(tokens, experts, device=device).topk(top_k).indices
    num = torch.tensor([tokens], dtype=torch.int32, device=device)
    hits = torch.zeros(1, dtype=torch.int64, device=device)
    slots = torch.empty(tokens, top_k, width, device=device, dtype=dtype)
    out = torch.empty_like(x)

    def run(weights: ExpertWeights) -> None:
        routing = k.route(ids, num, experts, hits)
        k.run_experts(x, weights, routing, 0, experts, slots)
        k.combine(slots, gates, num, out)

    took = seconds([functools.partial(run, bank) for bank in banks], device)
    hit = int(ids.unique().numel())
    num_bytes = hit * banks[0].bytes_per_expert
    work = 2 * tokens * top_k * 3 * width * inner
    found = _over(took, num_bytes, work, device, dry) | {"experts_hit": hit}
    if rounding is not None:
        return found
    return found | _baseline("grouped_mm", lambda: _grouped(x, ids, banks), device)


@functools.cache
def _banks(
    device: str, dry: bool, experts: int, width: int, inner: int
) -> tuple[ExpertWeights, ...]:
    """Return the weights of the rows of one shape, made once."""
    dtype = torch.bfloat16
    return tuple(
        ExpertWeights(
            torch.randn(experts, 2 * inner, width, device=device, dtype=dtype),
            torch.randn(experts, width, inner, device=device, dtype=dtype),
            None, None, False, Activation.SILU,
        )
        for _ in range(1 if dry else MOST_BANKS)
    )  # fmt: skip


@functools.cache
def _rounded_banks(
    device: str, dry: bool, experts: int, width: int, inner: int, rounding: str
) -> tuple[ExpertWeights, ...]:
    """Return the same weights, rounded once for all rows of one shape."""
    return tuple(rounded(bank, rounding) for bank in _banks(device, dry, experts, width, inner))


def rounded(bank: ExpertWeights, rounding: str) -> ExpertWeights:
    """Return the bank with rounded weights; `rounding` is a key of `ROUNDINGS`."""
    packed = []
    for weights in bank[:2]:
        ones = [ROUNDINGS[rounding](w) for w in weights]
        held = DeviceWeights(len(ones), ones[0], weights.device)
        held.take(0, [[one] for one in ones])
        packed.append(held.whole)
    up, down = packed
    return bank._replace(up_EFD=up.codes, down_EDI=down.codes, packed=(up, down))


def _grouped(
    x: torch.Tensor, ids: torch.Tensor, banks: Sequence[ExpertWeights]
) -> list[Callable[[], object]]:
    """Return the two products of the experts as torch's grouped product, with sorted slots."""
    order = ids.flatten().argsort()
    slots = x[order // ids.shape[1]]
    counts = torch.bincount(ids.flatten(), minlength=banks[0].num_experts)
    ends = counts.cumsum(0).to(torch.int32)

    def run(bank: ExpertWeights) -> torch.Tensor:
        both = functional.grouped_mm(slots, bank.up_EFD.transpose(1, 2), offs=ends)
        gate, up = both.chunk(2, -1)
        inner = functional.silu(gate) * up
        return functional.grouped_mm(inner, bank.down_EDI.transpose(1, 2), offs=ends)

    return [functools.partial(run, bank) for bank in banks]


def _baseline(
    name: str, make: Callable[[], list[Callable[[], object]]], device: str
) -> dict[str, Any]:
    """Return microseconds of the same work by torch, or the reason why there are none."""
    try:
        return {f"{name}_us": seconds(make(), device) * 1e6}
    except Exception as error:  # noqa: BLE001 - a baseline that torch does not have is no failure
        return {f"{name}_us": None, f"{name}_missing": f"{type(error).__name__}: {error}"[:300]}


def _sample(
    k: Kernels, device: str, dry: bool, rows: int, scale: float, **how: float
) -> dict[str, Any]:
    rows, vocab = (2, 64) if dry else (rows, 151936)
    logits = torch.randn(rows, vocab, device=device, dtype=torch.bfloat16) * scale
    asked = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | how

    def column(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device=device)

    whole = column(0, torch.int64)
    given = (
        logits,
        column(asked["temperature"], torch.float64),
        column(asked["top_k"], torch.int64),
        column(asked["top_p"], torch.float64),
        column(asked["min_p"], torch.float64),
        *(whole, whole, whole.clone(), column(0, torch.float32)),
    )
    took = seconds([functools.partial(k.sample, *given)], device)
    return _over(took, logits.numel() * 2, 0, device, dry)


def _over(took: float, num_bytes: float, work: float, device: str, dry: bool) -> dict[str, Any]:
    rates = _ceilings(device, dry)
    byte_s, flop_s = num_bytes / rates["read_gb_s"] / 1e9, work / rates["bf16_tflops"] / 1e12
    floor = max(byte_s, flop_s)
    return {
        "us": took * 1e6, "floor_us": floor * 1e6, "times_floor": took / floor,
        "bound": "bytes" if byte_s >= flop_s else "flops",
    }  # fmt: skip


SAMPLED: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top_k_20_top_p_0.95": {"top_k": 20, "top_p": 0.95},
    "top_p_0.9": {"top_p": 0.9},
    "top_p_0.9_flat": {"top_p": 0.9, "scale": 1.0},
}
"""Settings of sampling, with logits as peaked as a model's, or flat as random weights give."""


def kernel_rows(device: str, dry: bool) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield every row by name."""
    k = kernels_named("torch" if dry else "triton")
    for batch, new in ((1, 1), (2, 1), (1, 8)) if dry else ((1, 1), (32, 1), (1, 2048)):
        name = f"attention_{batch}x{new}"
        yield name, functools.partial(_attention, k, device, dry, batch, new)
    for shape in ("qwen3", "mixtral"):
        for tokens in (1, 4) if dry else (1, 32, 512, 2048):
            name = f"experts_{shape}_{tokens}"
            yield name, functools.partial(_experts, k, device, dry, shape, tokens)
    for name, how in SAMPLED.items():
        for rows in (1, 32):
            run = functools.partial(_sample, k, device, dry, rows, **{"scale": 4.0, **how})
            yield f"sample_{name}_{rows}", run
    for rounding in ROUNDINGS:  # last: rounding takes longest, and the other rows must be there
        for tokens in (1, 4) if dry else (1, 32, 512):
            run = functools.partial(_experts, k, device, dry, "qwen3", tokens, rounding)
            yield f"experts_qwen3_{rounding}_{tokens}", run
