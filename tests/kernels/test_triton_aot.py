"""Every kernel compiles for an H100 or H200, which needs no GPU: to a cubin, by ptxas."""

import json
import os
import subprocess
import sys

import pytest

from tests.support.files import ROOT

COMPILE = """
import json, math, random, sys
import torch, triton
from tests.support.compiled import ASKED, Launcher
from triton.backends.compiler import GPUTarget

TARGET = GPUTarget("cuda", 90, 32)
DONE = {}


def size(asked):
    '''Return a number that grows with the time that a launch takes to compile.'''
    return math.prod(max(1, value) for value in asked[3].values() if isinstance(value, int))


def sample():
    '''Return the smallest launch of each kernel in each of its forms, and some others.'''
    smallest, others = {}, []
    for asked in sorted(ASKED, key=size):
        forms = [asked[3].get(name) for name in ("CODE", "IEEE", "GPT_OSS", "RULE")]
        kept = smallest.setdefault((asked[0], *forms), asked)
        others += [asked] if kept is not asked else []
    return [*smallest.values(), *random.Random(0).sample(others[: len(others) // 2], 4)]


def compile_all(launches):
    for name, source, options, constants, kinds in launches:
        made = triton.compile(source, target=TARGET, options=options)
        if constants.get("CODE", 0) > 0:  # ptxas may fuse a product that does not say how it rounds
            assert not any(name in made.asm["ptx"] for name in ("fma.rn.f32", "mul.f32"))
        narrow = made.asm["ptx"].count("ld.global.b16")
        copies = made.asm["ptx"].count("cp.async.cg")
        found = [len(made.asm["cubin"]), made.metadata.shared, narrow, copies, kinds]
        DONE.setdefault(name, []).append(found)


from qllm.kernels.quantised import Quantised
from qllm.kernels.routing import (
    Activation, Angles, ExpertWeights, Groups, HeadNorms, Norm, Rule, RuleKind, SharedWeights, Sum,
)
from qllm.kernels.tiles import Query, query_block, tiles_of
from qllm.kernels.triton import attention, choose, latents, moe, norm, rope, sampling

for module in (attention, choose, latents, moe, norm, rope, sampling):
    for name, value in list(vars(module).items()):
        if isinstance(value, triton.JITFunction) and name in sys.argv[1].split(","):
            setattr(module, name, Launcher(name, value))

B, F = torch.bfloat16, torch.float32
new = torch.empty


def attend(heads, groups, width, dtype, sinks, window, ints=torch.int32):
    queries = [Query(0, 0, 20, 40), Query(1, 40, 9, 1)]
    tiles = tiles_of(queries, 41, query_block(heads // groups), torch.device("cpu"))
    parts = [p._replace(seq=p.seq.to(ints), tok=p.tok.to(ints), num=p.num.to(ints),
                        pos=p.pos.to(ints)) for p in tiles.parts]
    tiles = tiles._replace(parts=tuple(parts))
    attention.attend(
        new(41, heads, width, dtype=dtype), new(1024, groups, width, dtype=dtype),
        new(1024, groups, width, dtype=dtype), torch.zeros(2, 8, dtype=ints), tiles,
        page_size=16, scale=0.1, window=window, sinks_N=new(heads, dtype=dtype) if sinks else None,
        out_TNE=new(41, heads, width, dtype=dtype),
    )


attend(32, 4, 128, B, False, None)  # Qwen3-30B-A3B
attend(32, 8, 128, B, False, None)  # Mixtral
attend(64, 8, 64, B, True, 128)  # GPT-OSS
attend(32, 4, 128, B, False, None, torch.int64)  # as lanes hold them
attend(64, 8, 64, B, True, 128, torch.int64)
attend(4, 2, 16, F, False, None)  # the tests' models
for pairs in (None, True, False):  # DeepSeek-V3, latents: rotated before, in pairs, in halves
    angles = None if pairs is None else Angles(new(3, 64, dtype=B), new(3, 64, dtype=B), pairs)
    queries = new(128, 3, 512, dtype=B).transpose(0, 1)
    attention.attend(
        queries, new(1024, 1, 512, dtype=B), new(1024, 1, 512, dtype=B),
        torch.zeros(2, 8, dtype=torch.int32),
        tiles_of([Query(0, 0, 20, 2), Query(1, 2, 9, 1)], 3, query_block(128),
                 torch.device("cpu")),
        page_size=16, scale=0.1, q_rope_TNF=new(3, 128, 192, dtype=B)[:, :, 128:],
        k_rope_SF=new(1024, 64, dtype=B), q_angles=angles, out_TNE=new(3, 128, 512, dtype=B),
    )
    if angles is not None:
        both, slots = new(3, 1536 + 576, dtype=B), torch.zeros(3, dtype=torch.int64)
        for more in ((), (both[:, :1536], Norm(new(1536, dtype=B), 1e-6))):
            latents.write_latents(
                both[:, 1536:], Norm(new(512, dtype=B), 1e-6), angles, new(1024, 512, dtype=B),
                new(1024, 64, dtype=B), slots, new(3, 128, 512, dtype=B), *more,
            )
tiny = Angles(new(3, 32), new(3, 32), True)  # the tests' model
latents.write_latents(new(3, 88)[:, 24:], Norm(new(32), 1e-6), tiny, new(64, 32), new(64, 32),
                      torch.zeros(3, dtype=torch.int64), new(3, 4, 32), new(3, 88)[:, :24],
                      Norm(new(24), 1e-6))
for dtype in (B, F):
    pages = new(1024, 4, 128, dtype=dtype)
    attention.write(new(5, 4, 128, dtype=dtype), new(5, 4, 128, dtype=dtype), pages, pages,
                    torch.zeros(5, dtype=torch.int64))
    weight = new(128, dtype=dtype)
    for heads, norms in ((32, HeadNorms(weight, weight, 1e-6, 1e-6)), (64, None)):
        rope.rotate_and_write(new(5, heads, 128, dtype=dtype), new(5, 4, 128, dtype=dtype),
                              new(5, 4, 128, dtype=dtype), new(5, 128, dtype=dtype),
                              new(5, 128, dtype=dtype), pages, pages,
                              torch.zeros(5, dtype=torch.int64),
                              new(5, heads, 128, dtype=dtype), norms)
one, hits = torch.ones(1, dtype=torch.int32), torch.ones(1, dtype=torch.int64)
SHAPES = [(1, 128, 8, 2048, 768, B), (64, 128, 8, 2048, 768, B), (2048, 128, 8, 2048, 768, B),
          (32, 8, 2, 4096, 14336, B), (600, 8, 2, 4096, 14336, B), (9, 8, 4, 64, 48, F)]
for num, experts, top_k, width, inner, dtype in SHAPES:
    ids = torch.zeros(num, top_k, dtype=torch.int64)
    routing = moe.route(ids, one, experts, hits)
    for oss in (False, True):
        bias = new(experts, 64, dtype=dtype) if oss else None
        up = torch.empty((experts, 2 * inner, width), dtype=dtype, device="meta")
        down = torch.empty((experts, width, inner), dtype=dtype, device="meta")
        if oss:  # as the checkpoint stores them: [E, H, 2I] and [E, I, H]
            up = torch.empty_like(up.mT, memory_format=torch.contiguous_format).mT
            down = torch.empty_like(down.mT, memory_format=torch.contiguous_format).mT
        weights = ExpertWeights(up, down, bias, bias, oss, Activation(int(oss)))
        slots = new(num, top_k, width, dtype=dtype)
        moe.run_experts(new(num, width, dtype=dtype), weights, routing, 0, experts, slots)
    moe.combine(slots, new(num, top_k), one, new(num, width, dtype=dtype))
for code, kind, per_byte, scales in (
    ("i4", torch.uint8, 2, torch.float16), ("u4", torch.uint8, 2, torch.float16),
    ("e2m1", torch.uint8, 2, B), ("i8", torch.int8, 1, F), ("e4m3", torch.float8_e4m3fn, 1, F),
):
    for num, experts, top_k, width, inner, oss in ((1, 128, 8, 2048, 768, 0),
                                                   (600, 32, 4, 2880, 2880, 1)):
        group = 32 if oss else 128
        stacks = []
        for n, k in ((2 * inner, width), (width, inner)):
            codes = torch.empty((experts, n, k // per_byte), dtype=kind, device="meta")
            worths = torch.empty((experts, n, -(-k // group)), dtype=scales, device="meta")
            stacks.append(Quantised(code, codes, worths, worths if code == "u4" else None, group))
        bias = new(experts, 64, dtype=B) if oss else None
        packed = ExpertWeights(stacks[0].codes, stacks[1].codes, bias, bias, False, Activation(oss),
                               packed=tuple(stacks))
        routing = moe.route(torch.zeros(num, top_k, dtype=torch.int64), one, experts, hits)
        moe.run_experts(new(num, width, dtype=B), packed, routing, 0, experts,
                        new(num, top_k, width, dtype=B))
for num, dtype in ((4, B), (64, B), (600, B), (9, F)):  # DeepSeek-V3, a shared expert or two
    for shared in (1, 2):
        E, K, D, I = (256, 8, 7168, 2048) if dtype is B else (8, 4, 64, 48)
        groups = Groups(new(E), 8 if dtype is B else 2, 4 if dtype is B else 1, True, 2.5)
        rule = Rule(RuleKind.SIGMOID, groups=groups)
        routing, _ = choose.choose(new(num, E), rule, K, one.long(), hits, F, shared)
        up, down, up_2, down_2 = (
            torch.empty(shape, dtype=dtype, device="meta")
            for shape in ((E, 2 * I, D), (E, D, I), (2 * shared * I, D), (D, shared * I))
        )
        weights = ExpertWeights(up, down, None, None, False, Activation.SILU,
                                SharedWeights(up_2, down_2))
        slots, out = new(num, K + shared, D, dtype=dtype), new(num, D, dtype=dtype)
        moe.run_experts(new(num, D, dtype=dtype), weights, routing, 0, E + shared, slots)
        moe.combine(slots, new(num, K), one, out, Sum(out))
for num, experts in ((32, 384), (40, 160)):  # Kimi-K2, GLM-4.5: no groups
    rule = Rule(RuleKind.SIGMOID, groups=Groups(new(experts), 1, 1, True, 2.5))
    choose.choose(new(num, experts), rule, 8, one.long(), hits, F, 1)
routing = moe.route(torch.zeros(4, 8, dtype=torch.int64), one.long(), 128, hits)
moe.combine(new(4, 8, 2048, dtype=B), new(4, 8, dtype=B), one.long(), new(4, 2048, dtype=B))
norm.rms_norm(new(4, 2048, dtype=B), new(2048, dtype=B), 1e-6)
norm.rms_norm(new(4, 128, dtype=F), new(128), 1e-6)
for num, experts, top_k, kind in ((1, 128, 8, 1), (64, 128, 8, 0), (600, 128, 8, 1), (32, 8, 2, 1),
                                  (32, 16, 2, 2), (600, 16, 2, 2)):
    rule = Rule(RuleKind(kind), 0.02)
    choose.choose(new(num, experts, dtype=B), rule, top_k, one.long(), hits, B)
choose.choose(new(4, 8, dtype=F), Rule(RuleKind.RENORMALISED), 2, one.long(), hits, F)
x = new(4, 2048, dtype=B)
norm.add_rms_norm(x, x, None, new(2048, dtype=B), 1e-6)
norm.add_rms_norm(x, x, 0.22, new(2048, dtype=B), 1e-6)
wide = new(4, 7168, dtype=B)
norm.add_rms_norm(wide, wide, None, new(7168, dtype=B), 1e-6, False, True)  # DeepSeek-V3
norm.rms_norm(new(4, 2880, dtype=B), new(2880, dtype=B), 1e-5, True)  # GPT-OSS
norm.add_rms_norm(*(new(4, 2880, dtype=B) for _ in "ab"), None, new(2880, dtype=B), 1e-5, True)
rope.rotate_and_write(new(5, 64, 64, dtype=B), *(new(5, 8, 64, dtype=B) for _ in "kv"),
                      *(new(5, 32, dtype=B) for _ in "cs"),
                      *(new(1024, 8, 64, dtype=B) for _ in "kv"),
                      torch.zeros(5, dtype=torch.int64), new(5, 64, 64, dtype=B))
rope.rotate_and_write(*(new(5, 16, 128, dtype=B) for _ in "qkv"),  # OLMoE that clips
                      *(new(5, 128, dtype=B) for _ in "cs"),
                      *(new(1024, 16, 128, dtype=B) for _ in "kv"),
                      torch.zeros(5, dtype=torch.int64), new(5, 16, 128, dtype=B), None, 8.0)
norm.silu_mul(new(4, 11264, dtype=B))
for add in (Sum(x), Sum(x, None, x, new(4, 1, dtype=B)), Sum(x, 0.22)):
    moe.combine(new(4, 8, 2048, dtype=B), new(4, 8, dtype=B), one.long(), x, add)
row = torch.zeros(2, dtype=torch.float64)
for dtype in (B, F):
    sampling.sample(new(2, 151936, dtype=dtype), row, row.long(), row, row, row.long(), row.long(),
                    row.long(), row.float())
compile_all(ASKED if sys.argv[2] == "all" else sample())
print(json.dumps(DONE))
"""
KERNELS = {
    "attention": ["_attend", "_join", "_write"],
    "experts": ["_count", "_sort", "_up", "_down", "_combine"],
    "choice": ["_choose", "_choose_and_sort"],
    "rest": ["_rms_norm", "_add_rms_norm", "_silu_mul", "_rotate_and_write"],
    "sampling": ["_scan", "_narrow", "_weigh", "_keep", "_bound", "_settle", "_draw"],
    "latents": ["_write_latents"],
}
SHARED_MEMORY = 227 * 1024
"""What one block may have on an H100 or H200."""


@pytest.mark.parametrize(
    "launches",
    ["sample", pytest.param("all", marks=pytest.mark.slow)],  # the sample has each kernel
)
def test_every_kernel_compiles_for_sm_90(launches: str) -> None:
    names = [name for part in KERNELS.values() for name in part]
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILE, ",".join(names), launches],
        capture_output=True,
        text=True,
        env=env | {"PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert sorted(found) == sorted(names)
    for name, made in found.items():
        assert all(size > 1000 for size, *_ in made), name
        assert all(shared <= SHARED_MEMORY for _, shared, *_ in made), (name, made)
    # GPT-OSS stores gate and up alternating: read one by one they are 2-byte loads, never copies.
    # One 2-byte load is left: the bias, a column per thread, after the loop.
    bf16 = [made for made in found["_up"] if made[-1].count("bfloat16") == 2]
    wide = [(narrow, copies) for _, _, narrow, copies, _ in bf16]
    assert len(wide) == 16 if launches == "all" else len(wide) >= 2
    assert all(narrow <= 1 and copies >= 24 for narrow, copies in wide), wide
