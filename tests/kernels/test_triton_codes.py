"""Experts with quantised weights by Triton kernels: the bits of bf16 weights of their values."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from qllm.kernels import reference
from qllm.kernels.quantised import Code, Quantised
from qllm.kernels.routing import Activation, ExpertWeights
from qllm.kernels.triton import moe
from qllm.kernels.triton.codes import CODES, code_values
from qllm.models.weights.quantised_weights import DeviceWeights
from tests.support.interpret import DEVICES
from tests.support.quantised_products import quantised
from tests.support.triton_cases import FEW, Noise, close, elsewhere


def stack(
    code: Code, num: int, n: int, k: int, group: int, dtype: torch.dtype, offset: bool, device: str
) -> Quantised:
    """Weights of the law's tests, one on the other."""
    ones = [quantised(code, n, k, group, dtype, offset=offset, seed=i) for i in range(num)]
    weights = DeviceWeights(num, ones[0], torch.device(device))
    weights.take(0, [[one] for one in ones])
    return weights.whole


def experts_of(up: Quantised, down: Quantised, activation: Activation) -> ExpertWeights:
    return ExpertWeights(up.codes, down.codes, None, None, False, activation, packed=(up, down))


@DEVICES
@FEW
@given(
    code=st.sampled_from(["u4", "i4", "e2m1", "i8", "e4m3"]),
    group=st.sampled_from([16, 32, 48, 128, 4096]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    offset=st.booleans(),
    sizes=st.sampled_from([(64, 48), (192, 96), (144, 64), (66, 34)]),
    num=st.sampled_from([1, 40, 300]),
    biases=st.booleans(),
    activation=st.sampled_from(list(Activation)),
)
def test_products_of_codes_are_those_of_their_values(
    device: str,
    code: Code,
    group: int,
    dtype: torch.dtype,
    offset: bool,
    sizes: tuple[int, int],
    num: int,
    biases: bool,
    activation: Activation,
) -> None:
    """Tiles of 16, 64 and 128 rows, groups smaller and larger than a block, and of a rest."""
    width, inner = sizes
    noise, experts, top_k = Noise(num, device), 2, 1
    offset = offset and code in ("u4", "i4", "i8")
    up, down = (
        stack(code, experts, n, k, min(group, k), dtype, offset, device)
        for n, k in ((2 * inner, width), (width, inner))
    )
    codes = experts_of(up, down, activation)
    values = codes._replace(up_EFD=up.dequantised(), down_EDI=down.dequantised(), packed=None)
    if biases:
        bias = noise(experts, 2 * inner, dtype=torch.bfloat16), noise(experts, width).bfloat16()
        codes, values = (
            w._replace(up_bias_EF=bias[0], down_bias_ED=bias[1]) for w in (codes, values)
        )
    x = noise(num, width, dtype=torch.bfloat16) * 0.05
    ids = torch.arange(num, device=device).remainder(experts)[:, None]
    one, hits = (torch.tensor([n], dtype=torch.int32, device=device) for n in (num, 0))
    assert moe.tile_rows(num, experts) == {1: 16, 40: 64, 300: 128}[num]
    routing = moe.route(ids, one, experts, hits)
    places = torch.tensor([3, 1], device=device)
    far = [
        one._replace(
            codes=elsewhere(one.codes, places),
            scale_NG=elsewhere(one.scale_NG, places),
            offset_NG=None if one.offset_NG is None else elsewhere(one.offset_NG, places),
        )
        for one in (up, down)
    ]
    placed = codes._replace(
        up_EFD=far[0].codes, down_EDI=far[1].codes, packed=(far[0], far[1]), place_E=places
    )
    outs = []
    for kernels, weights in ((moe, codes), (moe, values), (reference, codes), (moe, placed)):
        slots = torch.full((num, top_k, width), math.nan, dtype=torch.bfloat16, device=device)
        kernels.run_experts(x, weights, routing, 0, experts, slots)
        outs.append(slots)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[3]), "codes that lie elsewhere"
    close(outs[0], outs[2])


@triton.jit
def _tile(
    w: "Any", scale: "Any", offset: "Any", out: "Any", n_stride: "Any", N: tl.constexpr,
    D: tl.constexpr, CODE: tl.constexpr, GROUP: tl.constexpr, HAS_OFFSET: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
) -> None:  # fmt: skip
    n, d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    for k in range(0, D, BLOCK_K):
        found = code_values(
            w, scale, offset, n, k, n < N, n_stride, (D + GROUP - 1) // GROUP, D, CODE, GROUP,
            HAS_OFFSET, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        tl.store(out + n[None, :] * (BLOCK_K * 3) + (k + d)[:, None], found)


WORTHS = (0.0, -0.0, 1.0, -1.0, 0.3, -0.7, 2.0**-100, -(2.0**100), 3.0e-5, 448.0)


@DEVICES
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("k", [136, 138])  # rows of whole words, and of bytes
@pytest.mark.parametrize("group", [24, 32, None])
@pytest.mark.parametrize("offset", [None, -0.0, 1.5])
def test_every_code_has_its_value_to_the_bit(
    device: str, code: Code, dtype: torch.dtype, group: int | None, k: int, offset: float | None
) -> None:
    """Zeros have signs. Past the last input and output codes and worths are 0: none is read."""
    n, blocks, group = len(WORTHS), 192, group or k
    codes = torch.arange(256, dtype=torch.uint8).repeat(n, 2)[:, :k]
    codes = (codes + torch.arange(n, dtype=torch.uint8)[:, None] * 25).contiguous()
    if code == "e4m3":
        codes[(codes & 127) == 127] = 128
        codes = codes.view(torch.float8_e4m3fn)
    elif code != "i8":
        codes = codes[:, : k // 2].contiguous()
    kept = codes.view(torch.int8) if code == "i8" else codes
    largest = 2.0 ** (15 if dtype is torch.float16 else 100)
    one = torch.tensor(WORTHS).clamp(-largest, largest)[:, None].to(dtype)
    scales = one.repeat(1, -(-k // group))
    scales[:, 1:] *= 0.5  # a group is not another
    offsets = None if offset is None else torch.full_like(scales, offset)
    out = torch.full((16, blocks), math.nan, dtype=torch.bfloat16, device=device)
    raw = _followed_by(255, codes.view(torch.uint8)).to(device)
    raw = raw.view(torch.int8) if code == "i8" else raw
    worths = [_followed_by(math.nan, x).to(device) for x in (scales, offsets) if x is not None]
    _tile[(1,)](
        raw, worths[0], worths[-1], out, codes.stride(0), N=n, D=k,
        CODE=1 + CODES.index(code), GROUP=group, HAS_OFFSET=offset is not None, BLOCK_N=16,
        BLOCK_K=64, enable_fp_fusion=False,
    )  # fmt: skip
    wide = blocks if group == k else group  # one group of all inputs
    per_byte, past = k // codes.shape[1], -(-blocks // wide) - scales.shape[1]
    raw = F.pad(codes.view(torch.uint8), (0, (blocks - k) // per_byte, 0, 6))
    padded = [None if x is None else F.pad(x, (0, past, 0, 6)) for x in (scales, offsets)]
    whole = Quantised(code, raw.view(kept.dtype), padded[0], padded[1], wide)
    assert torch.equal(out.cpu().view(torch.int16), whole.dequantised().view(torch.int16))


def _followed_by(number: float, x: torch.Tensor) -> torch.Tensor:
    """The same numbers, and behind them in memory others."""
    return torch.cat((x.flatten(), torch.full((999,), number, dtype=x.dtype)))[: x.numel()]


def test_sizes_of_packed_experts() -> None:
    up, down = (
        stack("i4", 3, n, k, 32, torch.bfloat16, False, "cpu") for n, k in ((96, 64), (64, 48))
    )
    weights = experts_of(up, down, Activation.SILU)
    assert (weights.num_experts, weights.inner, weights.num_shared) == (3, 48, 0)
    assert weights.bytes_per_expert == 96 * 64 // 2 + 64 * 48 // 2 + 2 * (96 * 2 + 64 * 2)
    for expert in range(3):
        assert torch.equal(up.one(expert).dequantised(), up.dequantised()[expert])
