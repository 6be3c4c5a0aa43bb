"""AWQ and GPTQ: codes of 4 or 8 bits in 32-bit words, an fp16 scale and a zero per group.

    AWQ     qweight [k, n / 8]        outputs in a word in the order 0 2 4 6 1 3 5 7
            qzeros  [k / group, n / 8], packed alike       scales [k / group, n]
    GPTQ    qweight [k * bits / 32, n]: a word is consecutive inputs, the first in the lowest bits
            qzeros  [k / group, n * bits / 32]: zero - 1 in version 1, zero in version 2
            scales  [k / group, n]                         g_idx [k]: the group of each input

A value is scale * (code - zero), rounded to bf16 once. The libraries of both formats round it to
fp16 (and then to the model's dtype). With act-order the groups of GPTQ are not consecutive inputs,
so no kernel reads them: those weights are read as their bf16 values.
Source: AutoAWQ (`utils/packing_utils.py`), AutoGPTQ (`nn_modules/qlinear`), GPTQModel (version 2).
"""

from functools import partial

import torch
from torch import Tensor

from qllm.kernels.quantised import Quantised
from qllm.models.weights.formats.layout import (
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
    pairs,
    shifted,
    signed,
)

WORD = 32
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place in a word of AWQ of each output."""
VERSIONS = {"gptq": 1, "gptq_v2": 0}
"""Number added to a stored zero, by `checkpoint_format`."""


def unpacked_awq(words: Tensor) -> Tensor:
    """Unpack int32 [r, n / 8] to uint8 [n, r]."""
    rows = words.shape[0]
    codes = nibbles(words.contiguous().view(torch.uint8).view(rows, -1, WORD // 8))
    return codes[..., AWQ_PLACES].reshape(rows, -1).t()


def read_awq(parts: Parts, group: int) -> Quantised:
    """Read a weight."""
    codes = unpacked_awq(parts[".qweight"])
    scale = parts[".scales"].t()
    k = codes.shape[1]
    group = group if group > 0 else k
    zero = unpacked_awq(parts[".qzeros"]) if ".qzeros" in parts else torch.zeros_like(scale)
    _check_groups(scale, zero, codes.shape[0], cdiv(k, group))
    return shifted("u4", pairs(codes), scale, zero, group)


def read_gptq(parts: Parts, bits: int, group: int, plus: int) -> Weight:
    """Read a weight; return its bf16 values where the groups are not consecutive inputs."""
    words, scale = parts[".qweight"], parts[".scales"].t()
    codes = words.t().contiguous().view(torch.uint8)
    zero = parts[".qzeros"].contiguous().view(torch.uint8)
    if bits == 4:
        zero = nibbles(zero)
    zero = (zero + plus & (1 << bits) - 1).t()  # zero 0 is stored as the largest code
    k = words.shape[0] * WORD // bits
    group = group if group > 0 else k
    _check_groups(scale, zero, words.shape[1], cdiv(k, group))
    in_order = torch.arange(k) // group
    of_input = parts.get(".g_idx", in_order).long()
    check_order(of_input, k, scale.shape[1])
    if not torch.equal(of_input, in_order):
        plain = nibbles(codes) if bits == 4 else codes
        return (scale[:, of_input].float() * (plain.float() - zero[:, of_input])).bfloat16()
    if bits == 4:
        return shifted("u4", codes, scale, zero, group)
    return shifted("i8", signed(codes), scale, zero.float() - 128, group)


def _check_groups(scale: Tensor, zero: Tensor, n: int, groups: int) -> None:
    check(
        scale.shape == zero.shape == (n, groups),
        f"scales {tuple(scale.shape)} and zeros {tuple(zero.shape)} of a weight with {n} outputs "
        f"and {groups} groups of inputs do not fit it",
    )


def _bits(bits: int, group: int, centred: bool = False) -> float:
    """Return bits in memory. Scale and offset are fp32, or a scale is fp16 if all zeros are 8."""
    return bits + ((16 if centred else 64) / group if group > 0 else 0)


def awq(settings: Settings) -> Format:
    """Return AWQ with the settings of a checkpoint.

    Raises:
        ModelError: The words of the checkpoint have the layout of another kernel.
    """
    bits = settings.get("bits", settings.get("w_bit", 4))
    version = str(settings.get("version", settings.get("format", "gemm"))).lower()
    check(bits == 4, f"AWQ with bits={bits!r}; 4 is read")
    check(version == "gemm", f"AWQ with version={version!r}; 'gemm' is read")
    group = int(settings.get("group_size", settings.get("q_group_size", 128)))
    zeros = (".qzeros",)
    has_zeros = bool(settings.get("zero_point", True))
    layout = Layout(
        codes=".qweight",
        needs=(".scales", *(zeros if has_zeros else ())),
        may_have=zeros,
        dtypes=("I32",),
        other_dtypes={".qzeros": ("I32",)},
        read=partial(read_awq, group=group),
    )
    return Format(name="awq", layouts=(layout,), bits=_bits(4, group))


def gptq(settings: Settings) -> Format:
    """Return GPTQ with the settings of a checkpoint.

    Raises:
        ModelError: The bits or the version of the checkpoint are unsupported.
    """
    bits, group = settings.get("bits", 4), int(settings.get("group_size", 128))
    version = str(settings.get("checkpoint_format") or settings.get("format") or "gptq").lower()
    check(bits in (4, 8), f"GPTQ with bits={bits!r}; 4 and 8 are read")
    known = ", ".join(VERSIONS)
    check(version in VERSIONS, f"GPTQ with checkpoint_format={version!r}; read are {known}")
    order, centred = (".g_idx",), bits == 4 and settings.get("sym") is True
    layout = Layout(
        codes=".qweight",
        needs=(".scales", ".qzeros", *(order if settings.get("desc_act") else ())),
        may_have=order,
        dtypes=("I32",),
        other_dtypes={".qzeros": ("I32",), ".g_idx": WHOLE},
        read=partial(read_gptq, bits=bits, group=group, plus=VERSIONS[version]),
    )
    return Format(name="gptq", layouts=(layout,), bits=_bits(bits, group, centred))
