"""The CPU kernels against the limits of the machine: a table, then one JSON line.

    experts     ranges of expert units against max(bytes / read bandwidth, FLOPs / rate of torch)
    gemm        the products of a prefill of 2,048 tokens against torch's on the same shapes
    attention   one layer's against torch's scaled_dot_product_attention, prefill and decode
    invariant   a step at level L2 against one without
    stop        boundaries at the end of a prefill of 32k tokens: wait until a stop

Times are wall times in ms. The limits change from second to second if other machines share the
memory, so both sides of a comparison run in turns, and shares are medians over the rounds.
`--quick` only shows that everything runs. Expert weights are rotated, so that they come from
memory.
"""

import argparse
import gc
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from bench.common import MODEL, Table, cpu_ticks, machine, result_file
from qllm.kernels import cpu
from qllm.kernels.cpu.attention import Attention
from qllm.kernels.cpu.norms import Norm
from qllm.plan import Plan, Row
from qllm.runner.cpu import cpu_runner
from qllm.runner.kv import SlabKV
from qllm.runner.layers.attention import Span, Step
from qllm.runner.layers.native_experts import NativeBank
from qllm.runner.layers.work import Work
from qllm.runner.runner import TorchRunner
from qllm.scheduler.compile import compile_program
from qllm.scheduler.program import START, Program
from qllm.types import Grain, SamplingParams

SHAPES = ((768, 384, 24, 4), (1024, 3584, 8, 2), (2048, 768, 128, 8))
"""Hidden size, width of an expert, experts, experts per token."""
TOKENS = (1, 8, 64, 512)
COLD_BYTES = 512 << 20
"""Bytes of rotated weights, so that no cache keeps them."""
LONG = 32768
REACH = {"experts": 0.75, "gemm": 0.7, "invariant": 1.05, "stop_ms": 5.0}
"""Targets: shares of the roofline and of torch's rate; a step at level L2 over one without, which
is noise; and the longest wait until a stop."""
GREEDY = SamplingParams(temperature=0)


class Never:
    """A stop word that is never lowered."""

    word = 1 << 30
    stop_at_ns: int | None = None

    def now_ns(self) -> int:
        """Return 0; the time is unused."""
        return 0


def best_ms(run: Callable[[], object], rounds: int) -> float:
    """Return the fastest of some rounds after a first one: wall time, which counts every thread."""
    run()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def rand(*shape: int) -> torch.Tensor:
    """Return noise that keeps its size through a product."""
    return (torch.randn(shape) * shape[-1] ** -0.5).bfloat16()


class Memory:
    """A reader of memory with a number of threads, over huge pages as the weights have them.

    The threads are not OpenMP's, which spin for a while after their work, next to ours.
    """

    def __init__(self, threads: int) -> None:
        words = cpu.huge_empty(COLD_BYTES // 2).fill_(0).view(torch.float32)
        self._parts = words.chunk(threads)
        self._pool = ThreadPoolExecutor(threads)

    def gb_s(self) -> float:
        """Return the rate of one read of all memory."""
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        start = time.perf_counter()
        list(self._pool.map(lambda part: torch.dot(part, part), self._parts))
        seconds = time.perf_counter() - start
        torch.set_num_threads(before)
        return COLD_BYTES / seconds / 1e9


def torch_gflops(num_out: int, num_in: int, rows: int, rounds: int) -> float:
    """Return torch's rate on one product, with a weight that stays in the cache if it fits."""
    x, weight = rand(rows, num_in), rand(num_out, num_in)
    return 2 * rows * num_in * num_out / best_ms(lambda: F.linear(x, weight), rounds) / 1e6


def expert_rows(
    shape: tuple[int, int, int, int], memory: Memory, quick: bool
) -> Iterator[dict[str, Any]]:
    """Yield rows of one shape at every number of tokens, routed evenly."""
    hidden, width, num, top_k = shape
    one = 3 * hidden * width * 2
    banks = _banks(shape, 1 if quick else max(2, -(-COLD_BYTES // (one * num))))
    rounds = 2 if quick else 15
    for tokens in TOKENS:
        x = rand(tokens, hidden)
        ids = torch.stack([torch.randperm(num)[:top_k] for _ in range(tokens)])
        works = [Work(bank, ids, 128) for bank in banks]
        hit = ids.unique().numel()
        flops = 2 * tokens * top_k * hidden * width
        found = []
        for _ in range(rounds):
            up, down = torch_gflops(2 * width, hidden, 512, 3), torch_gflops(hidden, width, 512, 3)
            time.sleep(0.01)  # OpenMP's threads stop spinning
            read_ms = hit * one / memory.gb_s() / 1e6
            compute_ms = (2 * flops / up + flops / down) / 1e6
            ms = median(_work_ms(work, x) for work in works)
            found.append((max(read_ms, compute_ms) / ms, ms, read_ms, compute_ms))
        share, ms, read_ms, compute_ms = (median(values) for values in zip(*found, strict=True))
        yield {
            "shape": "/".join(map(str, shape)),
            "tokens": tokens,
            "experts_hit": hit,
            "ms": round(ms, 3),
            "read_ms": round(read_ms, 3),
            "compute_ms": round(compute_ms, 3),
            "share": round(share, 3),
        }


def _banks(shape: tuple[int, int, int, int], layers: int) -> list[NativeBank]:
    hidden, width, num, _ = shape
    banks = []
    for _ in range(layers):
        experts: Any = torch.nn.Module()
        experts.is_transposed, experts.is_concatenated, experts.has_bias = False, True, False
        for name, shape_ in (("gate_up", (2 * width, hidden)), ("down", (hidden, width))):
            weight = torch.nn.Parameter(rand(num, *shape_), requires_grad=False)
            experts.register_parameter(f"{name}_proj", weight)
        banks.append(NativeBank(experts))
        banks[-1].pack()
    return banks


def _work_ms(work: Work, x: torch.Tensor) -> float:
    work.done[:] = bytes(len(work.done))
    start = time.perf_counter()
    work.run(x, 0, len(work.units))
    return (time.perf_counter() - start) * 1e3


def gemm_row(quick: bool) -> dict[str, Any]:
    """Measure the products of one layer for 2,048 tokens, experts loaded evenly."""
    tokens, rounds = 256 if quick else 2048, 2 if quick else 10
    hidden, heads = MODEL["hidden_size"], MODEL["num_attention_heads"]
    head, groups = MODEL["head_dim"], MODEL["num_key_value_heads"]
    num, width = MODEL["num_experts"], MODEL["moe_intermediate_size"]
    rows = tokens * MODEL["num_experts_per_tok"] // num
    ours = theirs = flops = 0.0
    for num_out, num_in, count, of in (
        ((heads + 2 * groups) * head, hidden, tokens, 1),
        (hidden, heads * head, tokens, 1),
        (2 * width, hidden, rows, num),
        (hidden, width, rows, num),
    ):
        weights = [rand(num_out, num_in) for _ in range(of)]
        packed, x = [cpu.Matrix([w]) for w in weights], rand(count, num_in)

        def native(packed: list[cpu.Matrix] = packed, x: torch.Tensor = x) -> None:
            for matrix in packed:
                matrix.linear(x)

        def plain(weights: list[torch.Tensor] = weights, x: torch.Tensor = x) -> None:
            for weight in weights:
                F.linear(x, weight)

        ours += best_ms(native, rounds)
        theirs += best_ms(plain, rounds)
        flops += 2.0 * num_out * num_in * count * of
    return {
        "tokens": tokens,
        "gflops": round(flops / ours / 1e6, 1),
        "torch_gflops": round(flops / theirs / 1e6, 1),
        "share": round(theirs / ours, 3),
    }


def attention_rows(quick: bool) -> Iterator[dict[str, Any]]:
    """Yield rows of a prefill of 256 tokens and a decode of one, at some numbers of keys."""
    n, g, h = MODEL["num_attention_heads"], MODEL["num_key_value_heads"], MODEL["head_dim"]
    shape = {"num_heads": n, "num_kv_heads": g, "head_dim": h}
    qkv = cpu.Matrix([torch.zeros((n + 2 * g) * h, 2).bfloat16()])
    norm = Norm(torch.ones(2).bfloat16(), 1e-6)
    kernel = Attention(qkv, norm, **shape, scale=h**-0.5)
    for keys in (512,) if quick else (512, 2048, 8192):
        kv = SlabKV(1, keys)
        kv.write(0, torch.randn(1, g, keys, h).bfloat16(), torch.randn(1, g, keys, h).bfloat16(), 0)
        for queries in (256, 1):
            q = torch.randn(queries, n * h).bfloat16()
            step = Step([Span(kv, 0, keys - queries, keys)], queries, latent=False)
            at = step.addresses(kernel.slab, q).address
            q_1NTH = q.view(1, queries, n, h).transpose(1, 2)
            mask = step.mask(q, 0, keys - queries, keys, None)
            k, v = kv.read(0, 0, keys)

            def native(q: torch.Tensor = q, at: int = at) -> None:
                kernel.attend(q, 0, None, at, 1, True)

            def plain(q: torch.Tensor = q_1NTH, of: Any = (k, v, mask)) -> None:
                F.scaled_dot_product_attention(q, *of, enable_gqa=True)

            ms, theirs = best_ms(native, 10), best_ms(plain, 10)
            yield {
                "queries": queries,
                "keys": keys,
                "ms": round(ms, 3),
                "torch_ms": round(theirs, 3),
                "speedup": round(theirs / ms, 2),
            }


def two_layers(**settings: Any) -> TorchRunner:
    """Return the bench model with two layers, random weights and long positions."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    more = {"num_hidden_layers": 2, "max_position_embeddings": LONG, "vocab_size": 2048}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**MODEL, **more}))
    return cpu_runner(model.bfloat16().eval(), **settings)


def program_of(runner: TorchRunner, rows: tuple[Row, ...], frame: int) -> Program:
    """Return a program of rows through all layers, which stops only when asked."""
    return compile_program(
        Plan(rows=rows, grain=Grain.EXPERT, stop_below=1),
        frame_id=frame,
        samples=[False] * len(rows),
        shape=runner.shape,
        cuts=runner.cuts,
    )


def hold(runner: TorchRunner, request: int, tokens: int) -> None:
    """Add a request whose first `tokens` tokens have KV, of noise."""
    runner.add(request, [5] * LONG, GREEDY, LONG, LONG)
    kv = runner.requests[request].kv
    shape = (1, MODEL["num_key_value_heads"], tokens, MODEL["head_dim"])
    for layer in range(2):
        kv.write(layer, torch.randn(shape).bfloat16(), torch.randn(shape).bfloat16(), 0)
    kv.committed = tokens


def step_ms(runner: TorchRunner, rows: tuple[Row, ...]) -> float:
    """Time one step without a commit. Torch uses one thread, as in an engine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    program = program_of(runner, rows, 0)
    runner.accept(program)
    start = time.perf_counter()
    runner.run(program, START, Never())
    ms = (time.perf_counter() - start) * 1e3
    runner.drop(program)
    torch.set_num_threads(before)
    return ms


def invariant_row(quick: bool) -> dict[str, Any]:
    """Measure a prefill of 512 tokens and a decode batch of 8, with and without level L2."""
    runners = {
        "plain": two_layers(batch_invariant=False),
        "invariant": two_layers(batch_invariant=True),
    }
    steps = {
        "decode": tuple(Row(r, 512, 513, 0, 2) for r in range(8)),
        "prefill": (Row(8, 512, 1024, 0, 2),),
    }
    for runner in runners.values():
        for request in range(9):
            hold(runner, request, 512)
    found: dict[str, Any] = {}
    for kind, rows in steps.items():
        times: dict[str, list[float]] = {name: [] for name in runners}
        for i in range(3 if quick else 40):
            for name in list(runners)[:: -1 if i % 2 else 1]:
                times[name].append(step_ms(runners[name], rows))
        plain, invariant = times["plain"][1:], times["invariant"][1:]
        found[f"{kind}_plain_ms"] = round(median(plain), 3)
        found[f"{kind}_invariant_ms"] = round(median(invariant), 3)
        ratios = [b / a for a, b in zip(plain, invariant, strict=True)]
        found[f"{kind}_ratio"] = round(median(ratios), 3)
    for runner in runners.values():
        runner.close()
    return found


def stolen_ticks() -> int:
    """Return the time that a hypervisor gave this machine's cores to others."""
    return cpu_ticks()[7]


def stop_row(quick: bool) -> dict[str, Any]:
    """Measure segments of the last tokens of a prefill: a stop waits for the end of its segment.

    `stop_p99_ms` is over random moments, which hit a long segment more often. It leaves out rounds
    in which the hypervisor took a core; `stop_p99_all_ms` counts them.
    """
    runner = two_layers()
    tokens = 32 if quick else 512
    hold(runner, 0, LONG - tokens)
    lengths: list[int] = []
    runner.on_segment = lambda program, index, begin, end: lengths.append(end - begin)
    rows = (Row(0, LONG - tokens, LONG, 0, 2),)
    step_ms(runner, rows)  # warms up
    gc.collect()
    gc.freeze()  # as an engine's process does when it is ready
    own: list[int] = []
    every: list[int] = []
    rounds, disturbed = 1 if quick else 30, 0
    for _ in range(rounds):
        lengths.clear()
        stolen = stolen_ticks()
        step_ms(runner, rows)
        every += lengths
        if stolen_ticks() == stolen:
            own += lengths
        else:
            disturbed += 1
    return {
        "position": LONG - tokens,
        "tokens": tokens,
        "segments": len(own),
        "rounds": rounds,
        "disturbed_rounds": disturbed,
        "segment_max_ms": round(max(own, default=0) / 1e6, 3),
        "stop_p99_ms": _wait_ms(own or every),
        "stop_p99_all_ms": _wait_ms(every),
    }


def _wait_ms(lengths: list[int]) -> float:
    """Return the 99th percentile of a segment's remaining time, at random moments."""
    ns = torch.tensor(lengths, dtype=torch.float64)
    hit = ns[torch.multinomial(ns, 100_000, replacement=True)]
    wait = (hit * torch.rand(len(hit), dtype=torch.float64)).quantile(0.99)
    return round(float(wait) / 1e6, 3)


def tabulate(table: Table, found: dict[str, Any]) -> None:
    """Add the lines of a result."""
    for row in found["experts"]:
        share = row["share"]
        table.add(
            f"experts {row['shape']}, {row['tokens']} tokens: of the roofline",
            f"{share:.2f} ({row['ms']:.2f} ms; read {row['read_ms']:.2f}, compute "
            f"{row['compute_ms']:.2f})",
            f">= {REACH['experts']}",
            share >= REACH["experts"],
        )
    gemm = found["gemm"]
    table.add(
        f"products of a layer, {gemm['tokens']} tokens: of torch's rate",
        f"{gemm['share']:.2f} ({gemm['gflops']:.0f} / {gemm['torch_gflops']:.0f} GFLOP/s)",
        f">= {REACH['gemm']}",
        gemm["share"] >= REACH["gemm"],
    )
    for row in found["attention"]:
        table.add(
            f"attention of one layer, {row['queries']} queries, {row['keys']:,} keys: over torch",
            f"{row['speedup']:.1f} ({row['ms']:.2f} / {row['torch_ms']:.2f} ms)",
        )
    for kind in ("decode", "prefill"):
        ratio, of = found["invariant"][f"{kind}_ratio"], found["invariant"]
        table.add(
            f"{kind} at level L2 / without",
            f"{ratio:.2f} ({of[f'{kind}_invariant_ms']:.1f} / {of[f'{kind}_plain_ms']:.1f} ms)",
            f"<= {REACH['invariant']}",
            ratio <= REACH["invariant"],
        )
    stop = found["stop"]
    table.add(
        f"stopping a prefill at token {stop['position']:,}, p99 ms",
        f"{stop['stop_p99_ms']:.1f} (longest segment {stop['segment_max_ms']:.1f}; with the "
        f"{stop['disturbed_rounds']} of {stop['rounds']} rounds that lost a core "
        f"{stop['stop_p99_all_ms']:.1f})",
        f"<= {REACH['stop_ms']:.0f}",
        stop["stop_p99_ms"] <= REACH["stop_ms"],
    )


def main() -> None:
    """Run the rows, print the table, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--out", type=result_file, help="also write it; committed: cpu_kernels.json"
    )
    args = parser.parse_args()
    if cpu.MISSING is not None:
        raise SystemExit(cpu.MISSING)
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    cpu.set_threads(args.threads)
    shapes, memory = SHAPES[:1] if args.quick else SHAPES, Memory(args.threads)
    with torch.inference_mode():
        document: dict[str, Any] = {
            "bench": "cpu_kernels",
            "machine": machine(),
            "config": {
                "kernels": cpu.kind(),
                **{k: v for k, v in vars(args).items() if not isinstance(v, Path)},
            },
            "read_gb_s": round(median(memory.gb_s() for _ in range(5)), 1),
            "experts": [r for shape in shapes for r in expert_rows(shape, memory, args.quick)],
            "gemm": gemm_row(args.quick),
            "attention": list(attention_rows(args.quick)),
            "invariant": invariant_row(args.quick),
            "stop": stop_row(args.quick),
        }
    table = Table()
    tabulate(table, document)
    table.finish(document, args.out)


if __name__ == "__main__":
    main()
