"""Block FP8, as DeepSeek-V3 and Qwen3 are published: e4m3 and a scale per block of 128 x 128.

    <name>              float8_e4m3fn [n, k]
    <name>_scale_inv    [n / rows, k / columns] of `weight_block_size`, the last block may be
                        shorter; one scale where that is None

Source: the DeepSeek-V3 repository (inference/kernel.py, `weight_dequant`); transformers,
`integrations/finegrained_fp8.py`. A value is rounded to bf16 once: code * scale.
"""

from functools import partial

from torch import Tensor

from qllm.kernels.quantised import Quantised
from qllm.models.weights.formats.layout import SCALES, Format, Layout, Parts, Settings, cdiv, check

SCALE = "_scale_inv"
FP8 = "F8_E4M3"


def per_output(scale: Tensor, n: int, k: int, block: tuple[int, int]) -> Tensor:
    """Return scales of blocks [..., rows, columns] as scales per output [..., n, columns]."""
    rows, columns = block
    grid = (cdiv(n, rows), cdiv(k, columns))
    check(
        tuple(scale.shape[-2:]) == grid,
        f"FP8 scales of shape {tuple(scale.shape)} do not fit a weight of {n} x {k} in blocks of "
        f"{rows} x {columns}, which has {grid[0]} x {grid[1]}",
    )
    return scale.float().repeat_interleave(rows, -2)[..., :n, :]


def read(parts: Parts, block: tuple[int, int] | None) -> Quantised:
    """Read a weight, or a stack of weights."""
    codes, scale = parts[""], parts[SCALE]
    n, k = codes.shape[-2:]
    if block is None:
        scale, block = scale.reshape(*codes.shape[:-2], 1, 1), (n, k)
    return Quantised("e4m3", codes, per_output(scale, n, k, block), None, min(block[1], k))


def fp8(settings: Settings) -> Format:
    """Return the format with the blocks that the settings name.

    Raises:
        ModelError: The block size is not two numbers above 0.
    """
    found = settings.get("weight_block_size")
    check(found is None or len(found) == 2, f"weight_block_size={found!r} must be two numbers")
    block = None if found is None else (int(found[0]), int(found[1]))
    check(block is None or min(block) > 0, f"weight_block_size={found!r} must be above 0")
    bits = 8 + (0 if block is None else 32 / block[1])
    layout = Layout(
        codes="",
        needs=(SCALE,),
        dtypes=(FP8,),
        other_dtypes={SCALE: (*SCALES, "F8_E8M0", FP8)},
        weight="",
        read=partial(read, block=block),
    )
    return Format(
        name="fp8", layouts=(layout,), bits=bits, unused=("input_scale", "activation_scale")
    )
