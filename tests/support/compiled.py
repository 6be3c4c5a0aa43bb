"""Launches of Triton kernels that are noted and not run, so that they can be compiled.

As a program, `python -m tests.support.compiled CAPABILITY MUTANT LAUNCH...` compiles the products
of experts in the shape of Qwen3-30B-A3B and prints one JSON object with a line for each. A launch
is "code:tokens", and its code may be "bf16". A mutant is a change of the kernels, or "none".
"""

import json
import linecache
import os
import re
import sys
import types
from pathlib import Path
from typing import Any

import torch

NAMES = {
    torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64", torch.int32: "*i32",
    torch.int64: "*i64", torch.float16: "*fp16", torch.uint8: "*u8", torch.int8: "*i8",
}  # fmt: skip
ASKED: list[tuple[Any, ...]] = []
"""Name, source, options, constants and dtypes of each launch."""
SHARED_BYTES = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 120: 99 * 1024}
"""Most shared memory of one block, by compute capability."""
WORDS = "PER_WORD: tl.constexpr = 4 * PER_BYTE if D % (4 * PER_BYTE) == 0 else PER_BYTE"


class Launcher:
    """A kernel whose launch notes what the launch would run, and runs nothing."""

    def __init__(self, name: str, kernel: Any) -> None:
        self.name, self.kernel = name, kernel

    def __getitem__(self, grid: Any) -> Any:
        return self.note

    def note(
        self, *args: Any, num_warps: int = 4, num_stages: int = 3, enable_fp_fusion: bool = True,
        **constants: Any,
    ) -> None:  # fmt: skip
        from triton.compiler import ASTSource

        names = [p.name for p in self.kernel.params]
        signature: dict[str, str] = {}
        attrs: dict[tuple[int, ...], Any] = {}
        for i, (name, value) in enumerate(zip(names, args, strict=False)):
            if isinstance(value, torch.Tensor):
                signature[name] = NAMES[value.dtype]
                attrs[(i,)] = [["tt.divisibility", 16]]  # as torch's allocator aligns
            elif isinstance(value, int):
                signature[name] = "i32"
                if value == 1:
                    signature[name], constants[name] = "constexpr", 1
                elif value % 16 == 0:
                    attrs[(i,)] = [["tt.divisibility", 16]]
            else:
                signature[name] = "fp32"
        for name in names:
            signature.setdefault(name, "constexpr")
        fixed = {(names.index(n),): v for n, v in constants.items()}
        source = ASTSource(self.kernel, signature, fixed, attrs)
        options = {
            "num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": enable_fp_fusion,
        }  # fmt: skip
        kinds = " ".join(str(a.dtype) for a in args[:2] if isinstance(a, torch.Tensor))
        ASKED.append((self.name, source, options, constants, kinds))


def note_experts(code: str, tokens: int) -> None:
    """Note the launches of the experts' products for a number of tokens."""
    from qllm.kernels.quantised import Quantised
    from qllm.kernels.routing import Activation, ExpertWeights
    from qllm.kernels.triton import moe

    experts, top_k, width, inner = 128, 8, 2048, 768
    kind, per_byte, group, scale = {
        "bf16": (torch.bfloat16, 1, 1, torch.float32),
        "u4": (torch.uint8, 2, 64, torch.bfloat16),
        "i4": (torch.uint8, 2, 128, torch.float16),
        "e2m1": (torch.uint8, 2, 32, torch.bfloat16),
        "i8": (torch.int8, 1, 128, torch.float32),
        "e4m3": (torch.float8_e4m3fn, 1, 128, torch.float32),
    }[code]
    stacks = []
    for n, k in ((2 * inner, width), (width, inner)):
        codes = torch.empty((experts, n, k // per_byte), dtype=kind, device="meta")
        worths = torch.empty((experts, n, k // group), dtype=scale, device="meta")
        name: Any = code
        stacks.append(Quantised(name, codes, worths, worths if code == "u4" else None, group))
    up, down = stacks
    weights = ExpertWeights(
        up.codes, down.codes, None, None, False, Activation.SILU,
        packed=None if code == "bf16" else (up, down),
    )  # fmt: skip
    one, hits = torch.ones(1, dtype=torch.int32), torch.ones(1, dtype=torch.int64)
    x = torch.empty(tokens, width, dtype=torch.bfloat16)
    slots = torch.empty(tokens, top_k, width, dtype=torch.bfloat16)
    routing = moe.route(torch.zeros(tokens, top_k, dtype=torch.int64), one, experts, hits)
    moe.run_experts(x, weights, routing, 0, experts, slots)


def change(mutant: str) -> None:
    """Change the kernels: load codes by bytes, or take a tile's stages whatever the device."""
    from qllm.kernels.triton import codes, moe, tiles

    if mutant == "bytes":
        path = Path(str(codes.__file__))
        text = path.read_text()
        assert WORDS in text
        new = path.parent / "mutated_codes.py"
        changed = types.ModuleType("mutated_codes")
        changed.__file__ = str(new)
        text = text.replace(WORDS, "PER_WORD: tl.constexpr = PER_BYTE")
        linecache.cache[str(new)] = (len(text), None, text.splitlines(keepends=True), str(new))
        sys.modules["mutated_codes"] = changed
        exec(compile(text, str(new), "exec"), vars(changed))  # a copy of our own file
        moe.code_values = changed.code_values
    elif mutant == "stages":
        tiles._bounded = lambda tile, *_: tile
    else:
        assert mutant == "none", mutant


def main() -> None:
    """Compile the launches of the command line."""
    import triton
    from triton.backends.compiler import GPUTarget

    from qllm.kernels.triton import moe, tiles

    capability, mutant, *launches = sys.argv[1:]
    target = int(capability)
    chip = tiles.Chip(SHARED_BYTES[target], target)
    tiles.chip_of = lambda device: chip
    change(mutant)
    for name in ("_count", "_sort", "_up", "_down"):
        setattr(moe, name, Launcher(name, getattr(moe, name)))
    found = {}
    for launch in launches:
        ASKED.clear()
        code, tokens = launch.split(":")
        note_experts(code, int(tokens))
        for name, source, options, constants, _ in ASKED:
            if name not in ("_up", "_down"):
                continue
            made = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
            layouts, ptx = made.asm["ttgir"], made.asm["ptx"]
            found[f"{launch} {name}"] = {
                "rows": constants["BLOCK_M"],
                "stages": options["num_stages"],
                "shared": made.metadata.shared,
                "k_widths": sorted({int(n) for n in re.findall(r"kWidth = (\d+)", layouts)}),
                "dots": layouts.count("tt.dot ") + layouts.count("ttng.warp_group_dot "),
                "bytes": ptx.count("ld.global.b8"),
                "pairs": ptx.count("ld.global.b16"),
                "copies": ptx.count("cp.async.c"),
            }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    main()
