"""Readers of quantised weights: the values that the library of each format gives, bit for bit."""

from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from qllm.errors import ModelError
from qllm.kernels.quantised import E2M1, Quantised
from qllm.models.weights.checkpoint import DTYPES
from qllm.models.weights.formats import gguf as gguf_blocks
from qllm.models.weights.formats import rounding
from qllm.models.weights.formats.compressed_tensors import compressed_tensors
from qllm.models.weights.formats.fp8 import fp8
from qllm.models.weights.formats.int32 import awq, gptq
from qllm.models.weights.formats.layout import Format, Stored, uncentred
from qllm.models.weights.formats.mxfp4 import mxfp4
from qllm.models.weights.quantised import FORMATS, Method, format_of
from tests.support import published
from tests.support.gguf_blocks import made, raw_blocks

N, K = 48, 64


def stored(tensor: Tensor) -> Stored:
    names = {dtype: name for name, dtype in DTYPES.items()}
    return Stored(names[tensor.dtype], tuple(tensor.shape))


def read(form: Format, parts: dict[str, Tensor], weight: str = "x.weight") -> Any:
    """The one weight that the tensors `x<end>` are."""
    tensors = {f"x{end}": part.contiguous() for end, part in parts.items()}
    ((name, layout, ends),) = form.weights({key: stored(t) for key, t in tensors.items()})
    assert name == weight
    assert set(ends.values()) == set(tensors)
    return layout.read({end: tensors[key] for end, key in ends.items()})


def values_of(found: Quantised | Tensor) -> Tensor:
    return found.dequantised() if isinstance(found, Quantised) else found


# -- safetensors


@pytest.mark.parametrize("form", published.FORMATS)
def test_a_weight_has_the_values_of_its_formula(form: str) -> None:
    write, settings, code = published.FORMATS[form]
    parts, values = write(N, K, made())
    found = read(FORMATS[settings["quant_method"]](settings), parts)
    assert torch.equal(values_of(found), values)
    assert values.unique().numel() > 50
    if code:
        assert found.code == code
    else:
        assert found.dtype is torch.bfloat16  # groups of inputs that do not follow each other


def test_zeros_that_wrap_are_zeros() -> None:
    """GPTQ stores zero - 1, so 15 stands for 0; and a symmetric weight needs no fp32."""
    parts, _ = published.gptq(N, K, made())
    parts[".qzeros"] = torch.full_like(parts[".qzeros"], -1)
    found = read(gptq({"group_size": published.GROUP}), parts)
    assert not found.offset_NG.any()
    parts[".qzeros"] = torch.full_like(parts[".qzeros"], 0x77777777)
    found = read(gptq({"group_size": published.GROUP}), parts)
    assert (found.code, found.scale_NG.dtype, found.offset_NG) == ("i4", torch.float16, None)
    assert torch.equal(found.dequantised(), uncentred(found).dequantised())


def test_one_group_of_all_inputs() -> None:
    parts, _ = published.gptq(N, K, made())
    parts[".scales"], parts[".qzeros"] = parts[".scales"][:1], parts[".qzeros"][:1]
    parts[".g_idx"] = torch.zeros(K, dtype=torch.int32)
    found = read(gptq({"group_size": -1}), parts)
    assert found.group == K
    assert found.scale_NG.shape == (N, 1)


@pytest.mark.parametrize("shape", [(48, 64), (256, 384)])
def test_block_fp8_is_what_transformers_dequantises(shape: tuple[int, int]) -> None:
    codes = (torch.randn(shape, generator=made()) * 30).to(published.FP8)
    block = shape[0] // 2, shape[1] // 4
    scale = torch.rand((2, 4), generator=made(1)) * 0.01
    found = read(fp8({"weight_block_size": block}), {"": codes, "_scale_inv": scale}, weight="x")
    oracle = Fp8Dequantize(SimpleNamespace())._dequantize_one(codes, scale, torch.bfloat16)
    assert torch.equal(found.dequantised(), oracle)


def test_the_last_block_of_fp8_may_be_cut() -> None:
    n, k = 50, 60
    assert n % published.BLOCK
    assert k % published.BLOCK
    parts, values = published.blocks(n, k, made())
    form = fp8({"weight_block_size": [published.BLOCK, published.BLOCK]})
    assert torch.equal(read(form, parts, "x.weight").dequantised(), values)


def test_fp8_with_one_scale() -> None:
    codes = (torch.randn((N, K), generator=made()) * 30).to(published.FP8)
    scale = torch.tensor(0.0137)
    found = read(fp8({"weight_block_size": None}), {"": codes, "_scale_inv": scale}, weight="x")
    oracle = Fp8Dequantize(SimpleNamespace())._dequantize_one(codes, scale, torch.bfloat16)
    assert torch.equal(found.dequantised(), oracle)


def test_mxfp4_is_what_transformers_dequantises() -> None:
    blocks = torch.randint(256, (3, N, K // 32, 16), generator=made(), dtype=torch.uint8)
    scales = torch.randint(30, 220, (3, N, K // 32), generator=made(1), dtype=torch.uint8)
    found = read(mxfp4({}), {"_blocks": blocks, "_scales": scales}, weight="x")
    oracle = convert_moe_packed_tensors(blocks, scales).transpose(1, 2)
    assert torch.equal(found.dequantised(), oracle)
    scales[0] = 0  # what is below bf16's normal numbers is exact too
    found = read(mxfp4({}), {"_blocks": blocks, "_scales": scales}, weight="x").dequantised()
    assert torch.equal(found, convert_moe_packed_tensors(blocks, scales).transpose(1, 2))
    assert found[0].any()
    with pytest.raises(ModelError, match=r"NaN \(exponent 255\)"):
        read(mxfp4({}), {"_blocks": blocks, "_scales": scales.fill_(255)}, weight="x")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("form", "weights"),
    [
        ("pack-quantized", {"num_bits": 4, "group_size": 16, "strategy": "group"}),
        (
            "pack-quantized",
            {"num_bits": 4, "group_size": 16, "strategy": "group", "symmetric": False},
        ),
        ("pack-quantized", {"num_bits": 8, "strategy": "channel"}),
        ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
        ("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
        ("naive-quantized", {"num_bits": 8, "group_size": 16, "strategy": "group"}),
        ("float-quantized", {"num_bits": 8, "strategy": "channel", "type": "float"}),
        ("float-quantized", {"num_bits": 8, "strategy": "tensor", "type": "float"}),
    ],
)
def test_compressed_tensors_are_what_the_library_decompresses(
    form: str, weights: dict[str, Any], dtype: torch.dtype
) -> None:
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    columns = {"group": K // 16, "channel": 1, "tensor": 1}[weights["strategy"]]
    rows = 1 if weights["strategy"] == "tensor" else N
    most = 1.2 if form == "float-quantized" else 0.02
    scale = (torch.rand((rows, columns), generator=made()) * most / 10 + 0.001).to(dtype)
    weight = torch.randn((N, K), generator=made(1)).to(dtype)
    given = {"weight": weight, "weight_scale": scale}
    if not weights.get("symmetric", True):
        given["weight_zero_point"] = torch.randint(
            -8, 8, (N, columns), generator=made(2), dtype=torch.int8
        )
    compressor = BaseCompressor.get_value_from_registry(form)
    parts = {f".{end}": t for end, t in compressor.compress(given, scheme).items()}
    library = compressor.decompress({end[1:]: t for end, t in parts.items()}, scheme)["weight"]
    found = read(compressed_tensors({"format": form}), parts).dequantised()
    if dtype is torch.bfloat16:
        assert torch.equal(found, library)
    else:  # the library rounds to fp16 and then to bf16
        wide = compressor.decompress(
            {end[1:]: t.float() if t is parts[".weight_scale"] else t for end, t in parts.items()},
            scheme,
        )["weight"]
        assert wide.dtype is torch.float32
        assert torch.equal(found, wide.bfloat16())


def test_fp8_in_blocks_of_compressed_tensors() -> None:
    codes = (torch.randn((48, 64), generator=made()) * 30).to(published.FP8)
    scale = torch.rand((2, 4), generator=made(1)) * 0.01
    group = {"weights": {"block_structure": [24, 16], "strategy": "block"}}
    form = compressed_tensors({"format": "float-quantized", "config_groups": {"a": group}})
    found = read(form, {".weight": codes, ".weight_scale": scale})
    oracle = Fp8Dequantize(SimpleNamespace())._dequantize_one(codes, scale, torch.bfloat16)
    assert torch.equal(found.dequantised(), oracle)


def test_codes_without_their_scales_are_refused() -> None:
    parts, _ = published.awq(N, K, made())
    del parts[".scales"]
    with pytest.raises(ModelError, match=r"x\.qweight \(I32\) is there without x\.scales"):
        read(awq({"group_size": published.GROUP}), parts)


@pytest.mark.parametrize(
    ("form", "more", "end"),
    [
        ("awq", {}, ".qzeros"),
        ("gptq-act-order", {}, ".g_idx"),
        ("packed-zeros", {"symmetric": False}, ".weight_zero_point"),
        ("packed", {"actorder": "group"}, ".weight_g_idx"),
    ],
)
def test_codes_without_what_the_settings_say_are_refused(
    form: str, more: dict[str, Any], end: str
) -> None:
    """A weight without its zeros, or its order, has other values."""
    write, settings, _ = published.FORMATS[form]
    parts, _ = write(N, K, made())
    parts.pop(end, None)
    if more:
        settings = {**settings, "config_groups": {"group_0": {"weights": more}}}
    with pytest.raises(ModelError, match=rf"is there without x{end}"):
        read(FORMATS[settings["quant_method"]](settings), parts)


@pytest.mark.parametrize("form", ["packed", "int8"])
@pytest.mark.parametrize("num", [1, 2])
def test_groups_are_as_large_as_the_settings_say(form: str, num: int) -> None:
    """A weight that lost some of its scales would have groups of more inputs."""
    write, settings, _ = published.FORMATS[form]
    parts, _ = write(N, K, made())
    grouped = {"group_0": {"weights": {"group_size": published.GROUP}}}
    parts[".weight_scale"] = parts[".weight_scale"][:, :1].repeat(1, K // published.GROUP)
    form_read = compressed_tensors({**settings, "config_groups": grouped})
    assert read(form_read, parts).group == published.GROUP
    parts[".weight_scale"] = parts[".weight_scale"][:, :num]
    with pytest.raises(ModelError, match=rf"\(48, {num}\) does not fit .* in groups of 16 inputs"):
        read(form_read, parts)


@pytest.mark.parametrize(
    "change", [lambda x: x[:1], lambda x: x[:-1], lambda x: x - 1, lambda x: x + 1]
)
def test_an_order_that_is_none_is_refused(change: Any) -> None:
    parts, _ = published.gptq_act_order(N, K, made())
    parts[".g_idx"] = change(parts[".g_idx"])
    with pytest.raises(ModelError, match=r"g_idx of shape .* of 4 groups for each of 64 inputs"):
        read(gptq({"group_size": published.GROUP}), parts)
    parts, _ = published.packed(N, K, made())
    parts[".weight_g_idx"] = change((torch.arange(K) // published.GROUP).int())
    with pytest.raises(ModelError, match=r"g_idx of shape .* of 4 groups for each of 64 inputs"):
        read(compressed_tensors({}), parts)


def test_a_weight_that_was_never_ordered_is_in_order() -> None:
    parts, values = published.packed(N, K, made())
    parts[".weight_g_idx"] = torch.full((K,), -1, dtype=torch.int32)
    assert torch.equal(values_of(read(compressed_tensors({}), parts)), values)


def test_inputs_of_compressed_tensors_have_the_groups_that_their_order_names() -> None:
    parts, _ = published.packed(N, K, made())
    in_order = values_of(read(compressed_tensors({}), parts))
    parts[".weight_scale"] = torch.ones_like(parts[".weight_scale"])
    codes = values_of(read(compressed_tensors({}), parts)).float()
    parts, _ = published.packed(N, K, made())
    groups = torch.arange(K) // published.GROUP
    parts[".weight_g_idx"] = groups.flip(0).int()
    found = values_of(read(compressed_tensors({}), parts))
    scale = parts[".weight_scale"].float()[:, groups.flip(0)]
    assert torch.equal(found, (codes * scale).bfloat16())
    assert not torch.equal(found, in_order)


def test_awq_without_zeros_says_so() -> None:
    parts, _ = published.awq(N, K, made())
    del parts[".qzeros"]
    found = read(awq({"group_size": published.GROUP, "zero_point": False}), parts)
    assert not found.offset_NG.any()


def test_fp8_with_a_zero_point_is_refused() -> None:
    write, settings, _ = published.FORMATS["float8"]
    parts, _ = write(N, K, made())
    parts[".weight_zero_point"] = torch.zeros((N, 1))
    assert read(compressed_tensors(settings), parts).offset_NG is None
    parts[".weight_zero_point"][-1] = 1
    with pytest.raises(ModelError, match="FP8 weights with a zero point"):
        read(compressed_tensors(settings), parts)


def test_zeros_that_are_not_packed_are_refused() -> None:
    """As compressed-tensors wrote them before it packed them."""
    write, settings, _ = published.FORMATS["packed-zeros"]
    parts, _ = write(N, K, made())
    parts[".weight_zero_point"] = torch.zeros((N, K // published.GROUP), dtype=torch.int8)
    with pytest.raises(
        ModelError, match=r"weight_zero_point is torch.int8 .* torch.int32 \(6, 4\)"
    ):
        read(compressed_tensors(settings), parts)


@pytest.mark.parametrize(
    ("method", "settings", "reason"),
    [
        ("awq", {"bits": 3}, "AWQ with bits=3; 4 is read"),
        ("awq", {"version": "gemv"}, "AWQ with version='gemv'; 'gemm' is read"),
        ("gptq", {"bits": 3}, "GPTQ with bits=3; 4 and 8 are read"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format='marlin'; read are gptq"),
        (
            "compressed-tensors",
            {"format": "nvfp4-pack-quantized"},
            "format=nvfp4-pack-quantized; read are pack-quantized",
        ),
        ("compressed-tensors", {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ("compressed-tensors", {"sparsity_config": {"format": "sparse-24"}}, "sparsity"),
        (
            "compressed-tensors",
            {
                "transform_config": {
                    "config_groups": {
                        "R1": {"apply": [{"location": "weight_output"}]},
                        "R4": {"apply": [{"location": "input"}, {"location": "weight_input"}]},
                    }
                }
            },
            "transform_config that changes input while the model computes",
        ),
        ("fp8", {"weight_block_size": [0, 0]}, r"weight_block_size=\[0, 0\] must be above 0"),
        ("fp8", {"weight_block_size": [128]}, r"weight_block_size=\[128\] must be two numbers"),
    ],
)
def test_settings_that_are_not_read_are_refused(
    method: str, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelError, match=reason):
        FORMATS[method](settings)


def test_transforms_that_are_in_the_weights_are_read() -> None:
    groups = {"R1": {"apply": [{"location": "weight_output"}, {"location": "weight_input"}]}}
    compressed_tensors({"transform_config": {"config_groups": groups}})


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fp8", {"weight_block_size": 128}),
        ("awq", {"group_size": None}),
        ("gptq", {"group_size": "all"}),
        ("compressed-tensors", {"config_groups": ["group_0"]}),
        ("compressed-tensors", {"transform_config": {"config_groups": {"R4": {}}}}),
    ],
)
def test_settings_that_make_no_sense_are_refused(method: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=f"quantization_config is none of '{method}'"):
        format_of("name", Method(method, settings))


@pytest.mark.parametrize(
    ("form", "end"),
    [
        ("awq", ".scales"),
        ("gptq", ".qzeros"),
        ("packed", ".weight_scale"),
        ("fp8", ".weight_scale_inv"),
    ],
)
def test_parts_that_do_not_fit_are_refused(form: str, end: str) -> None:
    write, settings, _ = published.FORMATS[form]
    parts, _ = write(N, K, made())
    parts[end] = parts[end][:, :-1] if end != ".weight_scale" else parts[end][:-1]
    with pytest.raises(ModelError, match="fit"):
        read(FORMATS[settings["quant_method"]](settings), parts)


def test_zeros_of_mxfp4_may_have_any_exponent() -> None:
    blocks = torch.randint(256, (2, N, K // 32, 16), generator=made(), dtype=torch.uint8)
    blocks[1, :, 0] &= 0x88  # zeros, some of them below
    scales = torch.full((2, N, K // 32), 120, dtype=torch.uint8)
    scales[1, :, 0] = 0
    found = read(mxfp4({}), {"_blocks": blocks, "_scales": scales}, weight="x")
    oracle = convert_moe_packed_tensors(blocks, scales).transpose(1, 2)
    assert torch.equal(found.dequantised().view(torch.int16), oracle.view(torch.int16))
    assert found.scale_NG.min() >= 2.0**-100, "which kernels take"


# -- GGUF


@pytest.mark.parametrize("kind", gguf_blocks.READERS)
def test_gguf_blocks_are_what_the_package_dequantises(kind: str) -> None:
    raw = raw_blocks(kind, 6, 4)
    oracle = gguf.dequantize(raw.numpy(), gguf.GGMLQuantizationType[kind])
    found = gguf_blocks.read(kind, raw)
    assert torch.equal(found.dequantised(), torch.from_numpy(oracle).bfloat16())
    stack = gguf_blocks.read(kind, raw.view(2, 3, -1))
    assert torch.equal(stack.dequantised().flatten(0, 1), found.dequantised())


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_gguf_blocks_that_the_package_quantised(kind: str) -> None:
    weight = torch.randn((5, 96), generator=made())
    raw = gguf.quantize(weight.numpy(), gguf.GGMLQuantizationType[kind])
    found = gguf_blocks.read(kind, torch.from_numpy(raw)).dequantised()
    error = (found.float() - weight).abs().max()
    assert error < (0.05 if kind == "Q8_0" else 0.4)
    oracle = gguf.dequantize(raw, gguf.GGMLQuantizationType[kind])
    assert torch.equal(found, torch.from_numpy(np.ascontiguousarray(oracle)).bfloat16())


# -- rounding


@pytest.mark.parametrize("form", sorted(rounding.ROUNDINGS))
def test_rounding_makes_its_constants_where_the_weights_are(form: str) -> None:
    """A bench rounds on a card: tensors on the default device would be elsewhere."""
    weight = torch.randn((N, K), generator=made()).bfloat16()
    wanted = rounding.ROUNDINGS[form](weight)
    with torch.device("meta"):
        found = rounding.ROUNDINGS[form](weight)
    assert torch.equal(found.codes, wanted.codes)
    assert torch.equal(found.scale_NG, wanted.scale_NG)


@pytest.mark.parametrize("k", [64, 96, 200, 30])
def test_int4_takes_the_nearest_of_sixteen_values(k: int) -> None:
    weight = (torch.randn((N, k), generator=made()) * 0.05).bfloat16()
    weight[3] = 0.5
    found = rounding.int4(weight)
    values = found.dequantised().float()
    step = found.scale_NG.float().repeat_interleave(found.group, 1)[:, :k]
    # half a step, the rounding of the scale over 15 steps, and that of the value
    slack = step * (0.5 + 15 / 256) + weight.float().abs() / 128
    assert ((values - weight.float()).abs() <= slack).all()
    assert (values[3] == 0.5).all()
    grid = torch.arange(16) * step.unsqueeze(2)
    offset = found.offset_NG
    assert offset is not None
    grid += offset.float().repeat_interleave(found.group, 1)[:, :k, None]
    nearest = (grid - weight.float().unsqueeze(2)).abs().amin(2)
    chosen = (values - weight.float()).abs()
    assert (chosen <= nearest + weight.float().abs() / 128 + 1e-6).all()


@pytest.mark.parametrize("k", [64, 96, 40])
def test_mxfp4_takes_the_nearest_float(k: int) -> None:
    weight = (torch.randn((N, k), generator=made()) * 0.05).bfloat16()
    weight[3] = 0
    weight[4, ::2], weight[5] = 2.5, 5.0  # ties go to the even code
    weight[6], weight[6, ::2] = 6.0, 3.5
    found = rounding.mxfp4(weight)
    values = found.dequantised().float()
    scale = found.scale_NG.float().repeat_interleave(found.group, 1)[:, :k]
    assert ((torch.log2(scale) % 1) == 0).all()
    grid = torch.tensor(E2M1[:8] + E2M1[8:]) * scale.unsqueeze(2)
    nearest = (grid - weight.float().unsqueeze(2)).abs().amin(2)
    assert torch.equal((values - weight.float()).abs(), nearest)
    top = weight.float().abs().view(N, -1).amax(1)
    assert (values[3] == 0).all()
    assert not values[3].signbit().any()
    assert (values.abs().view(N, -1).amax(1) <= top * 1.35).all()
    assert (values[4, ::2] == 2.0).all()
    assert (values[5] == 4.0).all()
    assert (values[6, ::2] == 4.0).all()


def test_groups_of_tiny_values_round_to_what_kernels_take() -> None:
    tiny = torch.full((1, 64), 2.0**-110).bfloat16()
    found = rounding.mxfp4(tiny)
    assert (found.scale_NG == 2.0**-100).all()
    assert not found.dequantised().any()
    steps = torch.tensor([0.0, 21.0] * 32).mul(2.0**-133).bfloat16().unsqueeze(0)
    values = rounding.int4(steps).dequantised()  # a step has no fraction there: 1.4 of it is 1
    assert torch.equal(values, steps.clamp(max=15 * 2.0**-133))


def test_a_tensor_that_belongs_to_codes_is_none_itself() -> None:
    parts, _ = published.blocks(N, K, made())
    tensors = {f"x.weight{end}": stored(part) for end, part in [("", parts[".weight"])]}
    tensors |= dict.fromkeys(("x.weight_scale_inv", "x.input_scale"), tensors["x.weight"])
    assert [name for name, *_ in fp8({}).weights(tensors)] == ["x.weight"]


@pytest.mark.parametrize("how", rounding.ROUNDINGS)
def test_values_on_the_grid_are_not_moved_again(how: str) -> None:
    weight = torch.randn((N, K), generator=made()).bfloat16()
    once = rounding.ROUNDINGS[how](weight).dequantised()
    if how == "mxfp4":
        assert torch.equal(rounding.ROUNDINGS[how](once).dequantised(), once)
    with pytest.raises(ModelError, match="not finite"):
        rounding.ROUNDINGS[how](weight.fill_(torch.inf))


@pytest.mark.parametrize("how", rounding.ROUNDINGS)
@pytest.mark.parametrize("shape", [(37, 96), (3, 37, 96)])
def test_a_weight_that_is_rounded_in_parts_has_the_codes_of_the_whole(
    how: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(4)).bfloat16()
    whole = rounding.ROUNDINGS[how](weight)
    monkeypatch.setattr(rounding, "AT_ONCE", 5 * 96)
    parts = rounding.ROUNDINGS[how](weight)
    assert torch.equal(whole.codes, parts.codes)
    assert torch.equal(whole.dequantised(), parts.dequantised())
