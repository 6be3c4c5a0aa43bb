"""compressed-tensors, as llm-compressor writes it: int4 and int8 in words, int8, and FP8.

    pack-quantized     weight_packed int32 [n, k * bits / 32]: consecutive inputs, the first in the
                       lowest bits, each code plus half of the range; weight_shape [n, k];
                       optional weight_zero_point int32 [n * bits / 32, groups], packed alike
    int-quantized      weight int8 [n, k], optional weight_zero_point int8 [n, groups]
    float-quantized    weight float8_e4m3fn [n, k]
    naive-quantized    the same as the last two

    weight_scale       [n, groups], [n, 1], one, or [n / rows, k / columns] of blocks

A value is scale * (code - zero), rounded to bf16 once; the library rounds to the dtype of the
scales, which is the same where that is bf16. With act-order (weight_g_idx that is not ascending)
weights are read as their bf16 values. Source: the package compressed-tensors.
"""

from functools import partial

import torch
from torch import Tensor

from qllm.kernels.quantised import Quantised
from qllm.models.weights.formats.fp8 import FP8, per_output
from qllm.models.weights.formats.layout import (
    SCALES,
    WHOLE,
    Format,
    Layout,
    Parts,
    Settings,
    Weight,
    cdiv,
    check,
    check_order,
    nibbles,
    shifted,
    signed,
)

READ = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")
SCALE, ZERO, ORDER, SHAPE = (f".weight_{end}" for end in ("scale", "zero_point", "g_idx", "shape"))
WORD = 32
NO_ORDER = -1
"""Content of weight_g_idx for a weight that was never calibrated, as an expert may be."""
Block = tuple[int, int] | None
Sizes = frozenset[int]
"""Possible numbers of inputs per scale; empty where the settings allow any."""


def read_packed(parts: Parts, sizes: Sizes) -> Weight:
    """Read a weight of pack-quantized."""
    words, scale = parts[".weight_packed"], parts[SCALE]
    n, k = parts[SHAPE].tolist()
    bits = WORD * words.shape[1] // k
    check(bits in (4, 8), f"pack-quantized weights of {bits} bits; 4 and 8 are read")
    codes = words.contiguous().view(torch.uint8)[:, : k * bits // 8]
    zero: Tensor | int = 1 << bits - 1
    scale = _per_group(scale, n, k, None, sizes)
    if ZERO in parts:
        wanted = cdiv(n * bits, WORD), scale.shape[1]
        check(
            parts[ZERO].dtype is torch.int32 and parts[ZERO].shape == wanted,
            f"weight_zero_point is {parts[ZERO].dtype} {tuple(parts[ZERO].shape)}; a weight of "
            f"{n} x {k} in {bits} bits has torch.int32 {wanted}",
        )
        packed = parts[ZERO].t().contiguous().view(torch.uint8)
        zero = (nibbles(packed) if bits == 4 else packed)[:, :n].t()
    group = k // scale.shape[1]
    of_input = _order(parts, k, group)
    if of_input is not None:
        plain = (nibbles(codes) if bits == 4 else codes).float()
        plain -= zero[:, of_input] if isinstance(zero, Tensor) else zero
        return (plain * scale[:, of_input].float()).bfloat16()
    if bits == 4:
        return shifted("u4", codes, scale, zero, group)
    zero = zero.float() - 128 if isinstance(zero, Tensor) else 0
    return _int8(signed(codes), scale, zero, group)


def _order(parts: Parts, k: int, group: int) -> Tensor | None:
    """Return the group of each of k inputs; None where groups are consecutive inputs."""
    of_input = parts.get(ORDER)
    if of_input is None or bool((of_input == NO_ORDER).all()):
        return None
    check_order(of_input, k, k // group)
    in_order = torch.equal(of_input.long(), torch.arange(k) // group)
    return None if in_order else of_input.long()


def read_plain(parts: Parts, block: Block, sizes: Sizes) -> Quantised:
    """Read a weight of int-quantized or float-quantized."""
    codes, scale = parts[".weight"], parts[SCALE]
    n, k = codes.shape
    in_blocks = block is not None and scale.numel() > 1 and scale.shape[0] != n
    scale = _per_group(scale, n, k, block, sizes)
    group = min(block[1], k) if block is not None and in_blocks else k // scale.shape[1]
    zero = parts[ZERO].float() if ZERO in parts else torch.zeros(1, dtype=torch.float32)
    zero = zero.reshape(()) if zero.numel() == 1 else zero
    check(
        zero.dim() == 0 or zero.shape == scale.shape,
        f"weight_zero_point of shape {tuple(zero.shape)} does not fit {tuple(scale.shape)} scales",
    )
    if codes.dtype is torch.int8:
        return _int8(codes, scale, zero, group)
    check(not bool(zero.any()), "FP8 weights with a zero point")
    return Quantised("e4m3", codes, scale, None, group)


def _int8(codes: Tensor, scale: Tensor, zero: Tensor | int, group: int) -> Quantised:
    if isinstance(zero, int) or not bool(zero.any()):
        return Quantised("i8", codes, scale, None, group)
    return shifted("i8", codes, scale, zero, group)


def _per_group(scale: Tensor, n: int, k: int, block: Block, sizes: Sizes) -> Tensor:
    """Return scales as [n, groups]."""
    if scale.numel() == 1 and not sizes:
        return scale.reshape(1, 1).expand(n, 1).contiguous()
    if block is not None and scale.shape[0] != n:
        return per_output(scale, n, k, block)
    check(
        scale.dim() == 2
        and scale.shape[0] == n
        and scale.shape[1] > 0
        and k % scale.shape[1] == 0
        and (not sizes or k // scale.shape[1] in sizes),
        f"weight_scale of shape {tuple(scale.shape)} does not fit a weight of {n} x {k}"
        + (f" in groups of {', '.join(map(str, sorted(sizes)))} inputs" if sizes else ""),
    )
    return scale


def _block(settings: Settings) -> Block:
    """Return the blocks that a config group names; None if none does."""
    for group in dict(settings.get("config_groups") or {}).values():
        found = dict(dict(group).get("weights") or {}).get("block_structure")
        if found is not None:
            return int(found[0]), int(found[1])
    return None


def _sizes(settings: Settings) -> Sizes:
    """Return the sizes of groups, if all weights have groups."""
    groups = dict(settings.get("config_groups") or {}).values()
    found = [dict(dict(group).get("weights") or {}).get("group_size") or 0 for group in groups]
    return frozenset(found) if found and min(found) > 0 else frozenset()


def _bits(settings: Settings) -> float:
    """Return bits of the widest group: a bf16 scale, and an offset if 4-bit codes have zeros."""
    found = []
    for group in dict(settings.get("config_groups") or {}).values():
        weights = dict(dict(group).get("weights") or {})
        bits, inputs = int(weights.get("num_bits") or 8), weights.get("group_size") or 0
        worth = 32 if bits == 4 and weights.get("symmetric") is False else 16
        found.append(bits + (worth / inputs if inputs > 0 else 0))
    return max(found, default=8.0)


def _all_say(settings: Settings, name: str, values: tuple[object, ...]) -> bool:
    """Return True if a setting of all config groups' weights has one of these values."""
    groups = dict(settings.get("config_groups") or {}).values()
    return bool(groups) and all(
        dict(dict(group).get("weights") or {}).get(name) in values for group in groups
    )


def _rotated(settings: Settings) -> set[str]:
    """Return the places that transforms (SpinQuant, QuIP) change, such as input or k_cache."""
    groups = dict(dict(settings.get("transform_config") or {}).get("config_groups") or {})
    places = {str(dict(x).get("location")) for g in groups.values() for x in dict(g)["apply"]}
    return places - {"weight_input", "weight_output"}


def compressed_tensors(settings: Settings) -> Format:
    """Return the format with the settings of a checkpoint.

    Raises:
        ModelError: A part of it has an unsupported layout.
    """
    groups = dict(settings.get("config_groups") or {}).values()
    found = [settings.get("format") or "pack-quantized"]
    found += [dict(group).get("format") or found[0] for group in groups]
    odd = sorted({name for name in found if name not in READ})
    check(not odd, f"compressed-tensors with format={', '.join(odd)}; read are {', '.join(READ)}")
    check(
        not settings.get("kv_cache_scheme"),
        "compressed-tensors with a kv_cache_scheme: KV is kept in bf16 here",
    )
    sparse = dict(settings.get("sparsity_config") or {}).get("format", "dense")
    check(sparse == "dense", f"compressed-tensors with sparsity {sparse!r}; 'dense' is read")
    rotated = sorted(_rotated(settings))
    check(
        not rotated,
        f"compressed-tensors with a transform_config that changes {', '.join(rotated)} while the "
        "model computes; only weights that are stored as changed are read",
    )
    zero = (ZERO,) if _all_say(settings, "symmetric", (False,)) else ()
    order = (ORDER,) if _all_say(settings, "actorder", ("group", "dynamic")) else ()
    packed = Layout(
        codes=".weight_packed",
        needs=(SCALE, SHAPE, *zero, *order),
        may_have=(ZERO, ORDER),
        dtypes=("I32",),
        other_dtypes={ZERO: ("I32", "I8"), ORDER: WHOLE, SHAPE: WHOLE},
        read=partial(read_packed, sizes=_sizes(settings)),
    )
    plain = Layout(
        codes=".weight",
        needs=(SCALE, *zero),
        may_have=(ZERO,),
        dtypes=("I8", FP8),
        other_dtypes={ZERO: ("I8", FP8, *SCALES)},
        read=partial(read_plain, block=_block(settings), sizes=_sizes(settings)),
    )
    return Format(
        name="compressed-tensors",
        layouts=(packed, plain),
        bits=_bits(settings),
        unused=(".input_scale", ".input_zero_point"),
    )
