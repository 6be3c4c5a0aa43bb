"""flash-attn 3 in place of our attention kernel, through torch's `varlen_attn`, where it is there.

A tile of queries becomes a sequence of its own, padded at its front: flash-attn aligns causal
masks at the end, so a tile of few queries sees what its last query may see. Each tile reads its
keys by itself and keys are not divided, so a sequence has the same bits in any batch. Sinks and
latents are not for it.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from qllm.errors import ConfigError
from qllm.kernels.tiles import TilePart, Tiles

PACKAGE = "flash_attn_interface"
"""What the package flash-attn 3 installs."""
MOST_WIDTH = 256
"""Of a head."""
_varlen: Any = None


def activate() -> None:
    """Make torch's `varlen_attn` call flash-attn 3.

    Raises:
        ConfigError: Torch or the package is not there.
    """
    global _varlen
    try:
        varlen = import_module("torch.nn.attention.varlen").varlen_attn
        names = varlen.__code__.co_varnames
    except (ImportError, AttributeError):
        names = ()
    if "block_table" not in names:
        raise ConfigError(
            f"attention='flash3' needs torch >= 2.12 and this is {torch.__version__}; use 'triton'"
        )
    if find_spec(PACKAGE) is None:
        raise ConfigError(
            "attention='flash3' needs flash-attn 3 (the module flash_attn_interface), which is not "
            "installed; use 'triton'"
        )
    nn_attention: Any = import_module("torch.nn.attention")
    nn_attention.activate_flash_attention_impl("FA3")
    _varlen = varlen


def attend(
    q_TND: Tensor,
    k_SGD: Tensor,
    v_SGE: Tensor,
    tables_RP: Tensor,
    tiles: Tiles,
    *,
    page_size: int,
    scale: float,
    window: int | None = None,
    sinks_N: Tensor | None = None,
    q_rope_TNF: Tensor | None = None,
    k_rope_SF: Tensor | None = None,
    out_TNE: Tensor,
) -> None:
    """See `kernels.triton.attention.attend`.

    Raises:
        ConfigError: The model has sinks, latents, fp32 weights or heads that are too wide.
    """
    why = _why_not(q_TND, sinks_N, q_rope_TNF)
    if why:
        raise ConfigError(f"attention='flash3': {why}; use 'triton'")
    pages = (x.view(-1, page_size, *x.shape[1:]) for x in (k_SGD, v_SGE))
    k, v = pages
    for part in tiles.parts:
        if part.num_tiles:
            _attend_part(q_TND, k, v, tables_RP, part, scale, window, out_TNE)


def _why_not(q_TND: Tensor, sinks_N: Tensor | None, q_rope_TNF: Tensor | None) -> str:
    if sinks_N is not None:
        return "the model has attention sinks"
    if q_rope_TNF is not None:
        return "the model attends over latents (MLA)"
    if q_TND.dtype not in (torch.float16, torch.bfloat16):
        return f"the model computes in {q_TND.dtype}, flash-attn in float16 or bfloat16"
    if q_TND.shape[2] > MOST_WIDTH:
        return f"heads are {q_TND.shape[2]} wide, flash-attn's at most {MOST_WIDTH}"
    return ""


def _attend_part(
    q_TND: Tensor,
    k: Tensor,
    v: Tensor,
    tables_RP: Tensor,
    part: TilePart,
    scale: float,
    window: int | None,
    out_TNE: Tensor,
) -> None:
    """Tiles of one size. No shape depends on what is in a tensor: it can be captured."""
    num, block = part.num_tiles, part.block
    inside = torch.arange(block, device=q_TND.device)
    ends = (part.tok + part.num)[:, None].long()
    is_query = inside >= (block - part.num)[:, None]
    at = torch.where(is_query, ends - block + inside, out_TNE.shape[0]).flatten()
    queries = q_TND[at.clamp(max=q_TND.shape[0] - 1)]
    starts = torch.arange(num + 1, device=q_TND.device, dtype=torch.int32) * block
    found = _varlen(
        queries,
        k,
        v,
        starts,
        None,
        block,
        tables_RP.shape[1] * k.shape[1],
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=q_TND.shape[1] != k.shape[2],
        seqused_k=torch.where(part.num > 0, part.pos + part.num, 0).int(),
        block_table=tables_RP[part.seq.long()].int(),
        num_splits=1,
    )
    spare = torch.cat((out_TNE, out_TNE[:1]))  # its last row takes what is no query
    out_TNE.copy_(spare.index_copy(0, at, found)[:-1])
