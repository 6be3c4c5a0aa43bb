"""Experts of 4 bits: their speed over that of reading their bytes, and over bf16.

One layer of experts of a shape, in bf16 and in formats of 4 bits, is measured in turns. Every call
draws new experts, so that their weights come from memory.

    share       one row: time to read the weights, over the measured time
    decode      one row: time in bf16 over time in 4 bits
    prefill     2,048 rows, routed evenly: the same

Attention, router and head are not included: docs/design/kernels.md. The output is a table,
then one JSON line.
"""

import argparse
import os
import time
from statistics import median
from typing import Any

import torch

from bench.common import Table, machine, result_file
from bench.kernels.cpu_kernels import SHAPES, Memory, rand
from qllm.kernels import cpu
from qllm.kernels.cpu.experts import BF16, Experts, Formats
from qllm.kernels.quantised import Quantised

PREFILL = 2048
UNIT_ROWS = 128
REACH = {"share": 0.7, "decode": 2.5, "prefill": 0.9}
"""Targets of formats of 4 bits."""


def weight(name: str, n: int, k: int) -> Quantised:
    """Return noise in one format."""
    codes = torch.randint(0, 256, (n, k // 2)).to(torch.uint8)
    if name == "mxfp4":
        scale_NG = (2.0 ** torch.randint(-9, -5, (n, k // 32))).bfloat16()
        return Quantised("e2m1", codes, scale_NG, None, 32)
    code, _, group = name.partition("-g")
    scale_NG = (torch.rand((n, k // int(group))) / 100).half()
    if code == "i4":
        return Quantised("i4", codes, scale_NG, None, int(group))
    return Quantised("u4", codes, scale_NG, -7 * scale_NG, int(group))


FORMATS = ("mxfp4", "i4-g128", "i4-g32", "u4-g128", "u4-g32")


class Layer:
    """Experts of one shape in one format, and calls of them."""

    def __init__(self, shape: tuple[int, int, int, int], name: str) -> None:
        self._hidden, width, self._num, self._top_k = shape
        up, down = (2 * width, self._hidden), (self._hidden, width)
        formats = BF16 if name == "bf16" else Formats(weight(name, *up), weight(name, *down))
        self._experts = Experts(self._num, width, self._hidden, formats=formats)
        for expert in range(self._num):  # the same weights for each, in its own memory
            given = (rand(*up), rand(*down)) if name == "bf16" else formats
            self._experts.pack(expert, *given)
        self.read = self._experts.num_bytes * self._top_k
        """Bytes of a row's experts."""

    def ms(self, tokens: int) -> float:
        """Time one call."""
        ids = torch.stack([torch.randperm(self._num)[: self._top_k] for _ in range(tokens)])
        order = ids.flatten().argsort(stable=True)
        units: list[tuple[int, int, int]] = []
        lo = 0
        for expert, rows in enumerate(ids.flatten().bincount().tolist()):
            for at in range(0, rows, UNIT_ROWS):
                units.append((expert, lo + at, lo + min(rows, at + UNIT_ROWS)))
            lo += rows
        flat, token = torch.tensor(units), order // self._top_k
        x = rand(tokens, self._hidden)
        slots = torch.empty((len(order), self._hidden), dtype=torch.bfloat16)
        start = time.perf_counter()
        self._experts.run(x, token, flat.data_ptr(), len(units), slots)
        return (time.perf_counter() - start) * 1e3


def rows_of(
    shape: tuple[int, int, int, int], memory: Memory, rounds: int, prefill: int
) -> list[dict[str, Any]]:
    """Measure one shape in every format."""
    layers = {name: Layer(shape, name) for name in ("bf16", *FORMATS)}
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in layers}
    for layer in layers.values():  # memory and threads exist
        layer.ms(prefill)
    for _ in range(rounds):
        read = memory.gb_s()
        one = {name: median(layer.ms(1) for _ in range(9)) for name, layer in layers.items()}
        many = {name: layer.ms(prefill) for name, layer in layers.items()}
        for name, layer in layers.items():
            share = layer.read / read / 1e6 / one[name]
            ratios = one["bf16"] / one[name], many["bf16"] / many[name]
            found[name].append((share, *ratios, one[name], many[name]))
    rows = []
    for name, values in found.items():
        share, decode, ratio, one_ms, many_ms = (median(v) for v in zip(*values, strict=True))
        row = {"shape": "/".join(map(str, shape)), "format": name, "share": round(share, 3)}
        row |= {"decode": round(decode, 2), "prefill": round(ratio, 3)}
        rows.append(row | {"one_ms": round(one_ms, 3), "prefill_ms": round(many_ms, 1)})
    return rows


def main() -> None:
    """Run the shapes, print the table, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--quick", action="store_true", help="only shows that it runs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=result_file)
    args = parser.parse_args()
    torch.manual_seed(1)
    torch.set_num_threads(args.threads)
    cpu.set_threads(args.threads)
    memory = Memory(args.threads)
    rounds, prefill = (1, 64) if args.quick else (args.rounds, PREFILL)
    shapes = SHAPES[:1] if args.quick else SHAPES
    rows = [row for shape in shapes for row in rows_of(shape, memory, rounds, prefill)]
    table = Table()
    for row in rows:
        for what, least in REACH.items() if row["format"] != "bf16" else ():
            name = f"{row['shape']} {row['format']} {what}"
            table.add(name, f"{row[what]:.3f}", f">= {least}", row[what] >= least)
    config = {"kernels": cpu.kind(), "threads": args.threads, "rounds": rounds, "prefill": prefill}
    result = {"bench": "weights", "machine": machine(), "config": config | {"seed": 1}}
    result |= {"rows": rows}
    table.finish(result, args.out)


if __name__ == "__main__":
    main()
