"""Bits of a GPU's results, and what they depend on. A minute on an H100 or H200.

    make gpu-check ARGS="--parts bits"    # with its log and results.json
    python3 -m bench.gpu.bits             # the sections alone, a line each
    python -m bench bits --dry-run        # on a CPU: tiny, interpreted, by the published rule

    table       200 products: do they have the published bits of `tests/kernels/fused_sums.json`?
    dots        one product by `mma.sync` and `wgmma` in 17 tiles: are all accumulators the same?
    model       is a product of 1,024 inputs a chain of fused sums, and in which order?
    cublas      rows of torch's product alone and in batches: default, and without split-K
    skinny      a product with weights as the first operand: bits, and time next to cuBLAS
    experts     qllm's experts: a token alone and in batches whose tiles have 16, 64, 128 rows
    choose      qllm's weights of experts: a token alone and in batches
    attention   qllm's attention of the last tokens: decode and prefill, and prefill cut elsewhere
    pdl         kernels with programmatic edges in a plain graph, and in a body of a SWITCH
    l2          bytes per second out of the L2 cache and out of memory
    copies      bytes per second to the device, from it, and both ways at once

`found` has the answers of a section, and `surprises` those that differ from `PREDICTED`. Sections
that need a GPU are skipped in a dry run. `tests/support/hopper.py` has the rule.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.gpu.part import Part

PREDICTED: dict[str, dict[str, bool]] = {
    "table": {"mma": True, "wgmma": True},
    "dots": {"all_equal": True},
    "model": {"ascending": True, "k_width_8": False},
    "cublas": {"default": False, "no_split": True, "no_split_is_chain": True},
    "experts": {"bf16": True, "int4": True, "mxfp4": True},
    "choose": dict.fromkeys(("softmax", "renormalised", "sparse_mixer", "sigmoid"), True),
    "attention": {"decode_is_prefill": False, "cut_elsewhere": True},
    "pdl": {"body_runs": True},
}
"""Expected answers. Split-K in cuBLAS depends on the number of rows. Decode divides its keys into
ranges, and prefill does not."""
SHAPES = {"qkv": (5120, 2048), "output": (2048, 4096), "router": (128, 2048),
          "head": (151936, 2048), "mixtral_o": (4096, 4096)}  # fmt: skip
"""Products, as outputs and inputs: of Qwen3-30B-A3B, and one of Mixtral-8x7B."""
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 2080)
TILES = (
    (64, 8, 64, 4, 3), (64, 16, 64, 4, 3), (64, 32, 64, 4, 3), (64, 64, 64, 4, 3),
    (64, 128, 64, 4, 3), (64, 256, 64, 4, 3), (128, 128, 64, 8, 3), (128, 256, 64, 8, 3),
    (128, 64, 32, 4, 4), (16, 16, 256, 1, 3), (16, 128, 128, 4, 4), (32, 64, 64, 4, 3),
    (64, 64, 16, 4, 5), (64, 64, 128, 4, 2), (64, 64, 64, 4, 1), (64, 64, 64, 4, 3, True),
    (64, 128, 64, 4, 3, True),
)  # fmt: skip
"""Tiles of `dots`, see `bench.gpu.products.Tile`."""
DRY_TILES = ((16, 32, 32, 4, 2), (32, 16, 64, 4, 2, True))
SKINNY_TILES = ((16, 8, 256, 1, 5), (16, 16, 512, 2, 3), (32, 16, 256, 2, 4), (64, 8, 128, 4, 6),
                (64, 16, 128, 4, 6), (64, 64, 128, 4, 4))  # fmt: skip


def arithmetic(dry: bool) -> AbstractContextManager[Any]:
    """Return a context in which interpreted kernels have the published arithmetic of sm_90."""
    if not dry:
        return nullcontext()
    from tests.support.hopper import matrix_unit

    return matrix_unit(90)


def answers(part: Part, section: str, found: dict[str, bool], **details: Any) -> dict[str, Any]:
    """Return the answers of a section with those that were not expected of a GPU."""
    expected = {} if part.dry else PREDICTED[section]
    surprises = [name for name, answer in found.items() if expected.get(name, answer) != answer]
    return {"found": found, "surprises": surprises, **details}


def drawn(part: Part, *shape: int, scale: float = 1.0) -> Tensor:
    """Return bf16 numbers of many sizes, so that sums have to cut something off."""
    x = torch.randn(*shape, device=part.device)
    return (x * torch.exp2(torch.randint_like(x, -6, 3)) * scale).bfloat16()


def differing(a: Tensor, b: Tensor) -> int:
    """Return the number of numbers that differ; a NaN differs from none."""
    return int(((a != b) & ~(a.isnan() & b.isnan())).sum())


def microseconds(runs: Sequence[Callable[[], Any]]) -> float:
    """Return the microseconds of one call."""
    from bench.gpu.kernels import seconds

    return round(seconds(runs, "cuda") * 1e6, 2)


def table(part: Part) -> dict[str, Any]:
    """Compute the products of the table, and return their bits where they are not the published."""
    from bench.gpu.products import Tile, product
    from tests.support import fused_sums

    held, found, others = fused_sums.read(), {}, {}
    a, b, c = (torch.from_numpy(x.copy()).to(part.device) for x in held[:3])
    wanted = torch.from_numpy(held.bits["90"].view(np.float32).copy())
    tiles = {"mma": (16, 16, 16, 1, 1), "wgmma": (64, 64, 16, 4, 1)}
    for name, tile in tiles.items():
        with arithmetic(part.dry):
            out, how = product(a.bfloat16(), b.bfloat16(), Tile(*tile), c)
        bits = out.diagonal().cpu()
        found[name] = not differing(bits, wanted)
        whole = bits.contiguous().view(torch.int32).tolist()
        others[name] = {
            i: f"{whole[i] & 0xFFFFFFFF:08x}"
            for i in range(len(whole)) if differing(bits[i], wanted[i])
        } | {"by": how}  # fmt: skip
    return answers(part, "table", found, of=fused_sums.NUM, others=others)


def dots(part: Part) -> dict[str, Any]:
    """Compare the accumulators of a product in all tiles, both operands first in turn."""
    from bench.gpu.products import Tile, product

    k, rows, columns = (64, 64, 64) if part.dry else (4096, 256, 512)
    a, b = drawn(part, rows, k), drawn(part, columns, k, scale=k**-0.5)
    first = Tile(16, 64, 16 if part.dry else 64, 4, 3)
    found, num = {}, []
    with arithmetic(part.dry):
        wanted, how = product(a, b, first)
        for given in DRY_TILES if part.dry else TILES:
            try:
                tile = Tile(*given)
                out, made_by = product(a, b, tile)
                each = {"different": differing(out, wanted)}
                each["turned"] = differing(product(b, a, tile)[0].T, wanted)
                found[str(given)] = {"by": made_by, **each}
                num += each.values()
            except Exception as error:  # noqa: BLE001 - a tile that does not compile says so
                found[str(given)] = {"error": f"{type(error).__name__}: {error}"[:160]}
        alone = [differing(product(a[:n], b, first)[0], wanted[:n]) for n in (1, 3, 17)]
    all_equal = bool(num) and not any(num) and not any(alone)
    return answers(
        part,
        "dots",
        {"all_equal": all_equal},
        first=how,
        of=wanted.numel(),
        tiles=found,
        alone=alone,
    )


def model(part: Part) -> dict[str, Any]:
    """Compare a product with chains of fused sums in several orders and with several bits."""
    from bench.gpu.products import Tile, product
    from tests.support.hopper import HOPPER, chain

    k = 128 if part.dry else 1024
    a, b = drawn(part, 8, k), drawn(part, 24, k, scale=0.03)
    here, there = a.float().cpu().numpy(), b.float().cpu().numpy().T
    start, counts = np.zeros((8, 24), np.float32), {}
    chains = {"ascending": (HOPPER, 2), "k_width_4": (HOPPER, 4), "k_width_8": (HOPPER, 8)}
    chains["eights"] = HOPPER._replace(products=8), 2
    chains |= {f"{bits}_bits": (HOPPER._replace(bits=bits), 2) for bits in (23, 24, 26)}
    for name, tile in (("mma", Tile(16, 16, 64, 1, 2)), ("wgmma", Tile(64, 64, 64, 4, 3))):
        with arithmetic(part.dry):
            made = product(a, b, tile)[0].cpu().numpy()
        counts[name] = {
            order: int((chain(here, there, start, *rule) != made).sum())
            for order, rule in chains.items()
        }
    found = {
        order: not any(each[order] for each in counts.values())
        for order in ("ascending", "k_width_8")
    }
    return answers(part, "model", found, different=counts, of=start.size)


def cublas(part: Part) -> dict[str, Any]:
    """Compare rows of torch's product alone and in batches, with and without split-K."""
    from bench.gpu.products import Tile, product

    rows: dict[str, Any] = {}
    equal, is_chain = {True: True, False: True}, True
    for name, (n, k) in SHAPES.items():
        copies = 1 if n * k > 1 << 27 else 6
        weights = [drawn(part, n, k, scale=k**-0.5) for _ in range(copies)]
        x = drawn(part, max(BATCHES), k)
        wanted = product(x[:16], weights[0][:4096], Tile(64, 128, 64, 4, 3))[0].bfloat16()
        rows[name] = {}
        for splits in (True, False):
            _let_cublas_split(splits)
            alone = torch.nn.functional.linear(x[:1], weights[0])
            different, took = {}, {}
            for num in (num for num in BATCHES if num * n <= 1 << 28):
                out = torch.nn.functional.linear(x[:num], weights[0])
                different[num] = differing(out[:1], alone)
                if not splits and num >= 16:
                    is_chain &= not differing(out[:16, : wanted.shape[1]], wanted)
                if num in (1, 8, 32, 64, 2080):
                    runs = [partial(torch.nn.functional.linear, x[:num], w) for w in weights]
                    took[num] = microseconds(runs)
            equal[splits] &= not any(different.values())
            setting = "default" if splits else "no_split"
            rows[name][setting] = {"different_from_alone": different, "us": took}
        del weights
        torch.cuda.empty_cache()
    _let_cublas_split(True)
    found = {"default": equal[True], "no_split": equal[False], "no_split_is_chain": is_chain}
    return answers(part, "cublas", found, shapes=rows)


def _let_cublas_split(splits: bool) -> None:
    """Set torch's products to the default, or to cuBLASLt without split-K."""
    cuda: Any = torch.backends.cuda
    cuda.matmul.allow_bf16_reduced_precision_reduction = (splits, splits)
    cuda.preferred_blas_library("default" if splits else "cublaslt")


def skinny(part: Part) -> dict[str, Any]:
    """Compare a product with weights as the first operand with the chain, and with cuBLAS."""
    from bench.gpu.products import Tile, product, turned

    rows: dict[str, Any] = {}
    shapes = {"tiny": (64, 128)} if part.dry else {n: SHAPES[n] for n in SHAPES if n != "head"}
    tiles = [(32, 8, 64, 1, 2)] if part.dry else SKINNY_TILES
    for name, (n, k) in shapes.items():
        weights = [drawn(part, n, k, scale=k**-0.5) for _ in range(1 if part.dry else 6)]
        rows[name] = {}
        for num in (1, 3) if part.dry else (1, 8, 32, 64):
            x, out = drawn(part, num, k), torch.empty(num, n, device=part.device).bfloat16()
            found: dict[str, Any] = {}
            with arithmetic(part.dry):
                wanted = product(x, weights[0][:2048], Tile(64, 64, 64, 4, 3))[0].bfloat16()
                for given in tiles:
                    if n % given[0] or k % given[2] or num > 4 * given[1]:
                        continue
                    try:
                        runs = [turned(x, w, out, Tile(*given)) for w in weights]
                        took = None if part.dry else microseconds(runs)
                        runs[0]()
                        num_other = differing(out[:, : wanted.shape[1]], wanted)
                        found[str(given)] = {"us": took, "different": num_other}
                    except Exception as error:  # noqa: BLE001 - too much shared memory, say
                        found[str(given)] = {"error": f"{type(error).__name__}: {error}"[:160]}
            if not part.dry:
                linears = [partial(torch.nn.functional.linear, x, w) for w in weights]
                found["cublas"] = {"us": microseconds(linears)}
            rows[name][num] = found
        del weights
    return {"shapes": rows}


def experts(part: Part, kind: str) -> dict[str, Any]:
    """Compare the experts of tokens in batches with those of the whole, weights of one kind."""
    from qllm.kernels.routing import Activation, ExpertWeights
    from qllm.kernels.triton import moe

    num_experts, width, inner = (2, 128, 64) if part.dry else (8, 2048, 768)
    plain = ExpertWeights(
        drawn(part, num_experts, 2 * inner, width, scale=0.02),
        drawn(part, num_experts, width, inner, scale=0.03), None, None, False, Activation.SILU,
    )  # fmt: skip
    weights = plain if kind == "bf16" else _rounded(plain, kind)
    batches = (1, 40, 150) if part.dry else (1, 16, 128, 400, 2080)
    x = drawn(part, max(batches), width, scale=0.1)
    hits = torch.zeros(1, dtype=torch.int64, device=part.device)
    outs, tiles = {}, {}
    for num in batches:
        ids = torch.arange(num, device=part.device).remainder(num_experts)[:, None]
        count = torch.tensor([num], dtype=torch.int32, device=part.device)
        slots = torch.empty(num, 1, width, device=part.device, dtype=torch.bfloat16)
        with arithmetic(part.dry):
            routing = moe.route(ids, count, num_experts, hits)
            moe.run_experts(x[:num], weights, routing, 0, num_experts, slots)
        outs[num], tiles[num] = slots[:, 0], moe.tile_rows(num, num_experts)
    whole = outs[max(batches)]
    different = {f"{n} (tiles of {tiles[n]})": differing(outs[n], whole[:n]) for n in batches}
    return answers(part, "experts", {kind: not any(different.values())}, different=different)


def _rounded(bank: Any, kind: str) -> Any:
    """Round weights on the CPU, which is where a loader rounds them."""
    from qllm.models.weights.formats.rounding import ROUNDINGS
    from qllm.models.weights.quantised_weights import DeviceWeights

    packed = []
    for weights in bank[:2]:
        ones = [ROUNDINGS[kind](one.cpu()) for one in weights]
        held = DeviceWeights(len(ones), ones[0], weights.device)
        held.take(0, [[one] for one in ones])
        packed.append(held.whole)
    return bank._replace(up_EFD=packed[0].codes, down_EDI=packed[1].codes, packed=tuple(packed))


def choose(part: Part) -> dict[str, Any]:
    """Compare a token's weights alone and in batches, for every rule."""
    from qllm.kernels.routing import Groups, Rule, RuleKind
    from qllm.kernels.triton.choose import choose as chosen

    num_experts, batches = (16, (1, 7, 65)) if part.dry else (128, (1, 2, 7, 16, 32, 64, 65, 2080))
    hits = torch.zeros(1, dtype=torch.int64, device=part.device)
    logits = torch.randn(max(batches), num_experts, device=part.device)
    groups = Groups(torch.zeros(num_experts, device=part.device), 1, 1, True, 2.5)
    found, different = {}, {}
    for kind in RuleKind:
        rule = Rule(kind, 0.02, groups if kind is RuleKind.SIGMOID else None)
        outs = {}
        for num in batches:
            count = torch.tensor([num], dtype=torch.int64, device=part.device)
            with arithmetic(part.dry):
                outs[num] = chosen(logits[:num], rule, 8, count, hits, torch.float32)[1]
        whole = outs[max(batches)]
        name = kind.name.lower()
        different[name] = {num: differing(out, whole[:num]) for num, out in outs.items()}
        found[name] = not any(different[name].values())
    return answers(part, "choose", found, different=different)


def attention(part: Part) -> dict[str, Any]:
    """Compare attention of 64 queries at once, cut elsewhere, and decoded one by one."""
    from qllm.kernels.tiles import Query, query_block, tiles_of
    from qllm.kernels.triton import attention as paged

    heads, groups, width, page, num = 32, 4, 128, 16, 64
    rows, found = {}, {"decode_is_prefill": True, "cut_elsewhere": True}
    for length in (77, 512, 4096):
        pages = -(-length // page)
        k, v = (torch.randn(pages * page, groups, width, device=part.device) for _ in "kv")
        k, v = k.bfloat16(), v.bfloat16()
        tables = torch.randperm(pages, device=part.device)[None].to(torch.int64)
        q = torch.randn(num, heads, width, device=part.device).bfloat16()
        outs = {}
        for name, cuts in (("whole", [64]), ("cut", [13, 2, 49]), ("decoded", [1] * 64)):
            outs[name], at, queries = torch.full_like(q, float("nan")), 0, []
            for count in cuts:
                queries.append(Query(0, at, length - num + at, count))
                at += count
            tiles = tiles_of(queries, num, query_block(heads // groups), torch.device(part.device))
            paged.attend(
                q, k, v, tables, tiles, page_size=page, scale=width**-0.5, out_TNE=outs[name]
            )
        rows[length] = {
            "decode_is_prefill": differing(outs["decoded"], outs["whole"]),
            "cut_elsewhere": differing(outs["cut"], outs["whole"]),
        }
        found = {name: answer and not rows[length][name] for name, answer in found.items()}
    return answers(part, "attention", found, different=rows, of=num * heads * width)


def pdl(part: Part) -> dict[str, Any]:
    """Time nodes of a graph with plain and programmatic edges, and run them in a SWITCH's body."""
    from bench.gpu.probe import loop
    from bench.gpu.products import step

    num, rows = 400, {}
    for programmatic in (False, True):
        word = torch.zeros(64, dtype=torch.int64, device=part.device)
        run = step(word, programmatic)
        run()
        torch.cuda.synchronize()
        graph, stream = torch.cuda.CUDAGraph(keep_graph=True), torch.cuda.Stream()
        with torch.cuda.graph(graph, pool=torch.cuda.graph_pool_handle(), stream=stream):
            for _ in range(num):
                run()
        row: dict[str, Any] = {"nodes": num}
        rows["programmatic" if programmatic else "plain"] = row
        try:
            word.zero_()
            torch.cuda.synchronize()
            took = loop(1, 20, [graph])["us_per_iteration"]  # launched four times
            row |= {"body_us": round(took / num, 3), "body_counts": int(word[0]) == 4 * 20 * num}
        except Exception as error:  # noqa: BLE001 - that it is refused is an answer
            row["body"] = f"{type(error).__name__}: {error}"[:300]
        graph.instantiate()
        times = []
        for _ in range(5):
            a, b = (torch.cuda.Event(enable_timing=True) for _ in "ab")
            a.record()
            graph.replay()
            b.record()
            torch.cuda.synchronize()
            times.append(a.elapsed_time(b) * 1e3 / num)
        row["graph_us"] = round(min(times), 3)
    found = {"body_runs": bool(rows["programmatic"].get("body_counts"))}
    return answers(part, "pdl", found, rows=rows)


def l2(part: Part) -> dict[str, Any]:
    """Measure reads out of the L2 cache and out of memory, and a product of matrices."""
    from bench.gpu.products import read

    rows = {}
    for name, megabytes, turns in (("l2", 24, 40), ("memory", 2048, 1)):
        x = torch.ones(megabytes << 19, dtype=torch.bfloat16, device=part.device)
        run, num_bytes = read(x, turns)
        rows[f"{name}_tb_s"] = round(num_bytes / microseconds([run]) / 1e6, 3)
    a, b = (torch.randn(8192, 8192, device=part.device).bfloat16() for _ in "ab")
    rows["product_tflops"] = round(2 * 8192**3 / microseconds([lambda: a @ b]) / 1e6, 1)
    return rows


def copies(part: Part) -> dict[str, Any]:
    """Measure copies to the device, from it, and both ways at once."""
    num_bytes = 256 << 20
    here = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in "ab"]
    there = [torch.empty(num_bytes, dtype=torch.uint8, device=part.device) for _ in "ab"]
    streams = [torch.cuda.Stream() for _ in "ab"]

    def gb_s(*ways: int) -> float:
        best = 0.0
        for _ in range(4):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for way in ways:
                to, source = (there[0], here[0]) if way else (here[1], there[1])
                with torch.cuda.stream(streams[way]):
                    to.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            best = max(best, len(ways) * num_bytes / 1e9 / (time.perf_counter() - begin))
        return round(best, 2)

    return {"to_device_gb_s": gb_s(1), "from_device_gb_s": gb_s(0), "both_gb_s": gb_s(0, 1)}


ON_ANY: dict[str, Callable[[Part], dict[str, Any]]] = {
    "table": table, "dots": dots, "model": model, "skinny": skinny, "choose": choose,
    **{f"experts_{kind}": partial(experts, kind=kind) for kind in ("bf16", "int4", "mxfp4")},
}  # fmt: skip
ON_GPU: dict[str, Callable[[Part], dict[str, Any]]] = {
    "cublas": cublas, "attention": attention, "pdl": pdl, "l2": l2, "copies": copies,
}  # fmt: skip
ORDER = ("table", "dots", "model", "cublas", "skinny", "experts_bf16", "experts_int4",
         "experts_mxfp4", "choose", "attention", "pdl", "l2", "copies")  # fmt: skip
"""Sections, most wanted first."""


def sections(part: Part, only: Sequence[str] = ORDER) -> None:
    """Run sections of a part; a failure of one does not lose the others."""
    torch.manual_seed(0)
    with torch.inference_mode():
        for name in only:
            if part.dry and name in ON_GPU:
                part.section(name, lambda: {"skipped": "it needs a GPU"})
            else:
                part.section(name, partial((ON_ANY | ON_GPU)[name], part))


def main() -> int:
    """Run the sections; fail if one did, or without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="tiny and interpreted, on a CPU")
    parser.add_argument("--skip", default="", help="sections, with commas between")
    parser.add_argument("--only", nargs="+", choices=ORDER, default=list(ORDER))
    asked = parser.parse_args()
    if not asked.dry_run and not torch.cuda.is_available():
        print("there is no CUDA device; use --dry-run to walk the sections on a CPU")
        return 1
    if asked.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton's library is imported
        torch.set_num_threads(1)
    part = Part(asked.dry_run, asked.skip.split(","))
    sections(part, asked.only)
    return int(part.failed)


if __name__ == "__main__":
    sys.exit(main())
