"""Embeddings of positions: the module that computes them, and its arguments."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qllm.errors import ModelError
from qllm.models.arguments import parameters_of

STATIC_ROPE = {"default", "linear", "llama3", "yarn", "proportional"}
"""Rope types that give a position the same values in every call."""


def _child(base: Any) -> Any:
    return getattr(base, "rotary_emb", None) or getattr(base, "pos_emb", None)


def rope_kind(base: Any, index: int) -> str | None:
    """Return the layer type that selects position embeddings; None if all layers share them."""
    rotary = _child(base)
    if not isinstance(rotary, nn.Module) or "layer_type" not in parameters_of(rotary):
        return None
    return str(base.config.layer_types[index])


def embeddings(rotary: nn.Module, kind: str | None, like: Tensor, positions_1T: Tensor) -> Any:
    """Return a module's embeddings of the positions of text.

    Args:
        rotary: The module.
        kind: `rope_kind` of the layers that get them.
        like: Tensor with the dtype and device of hidden states.
        positions_1T: The positions. For a module of several axes they are repeated on each axis,
            because some releases of transformers do not repeat them.
    """
    axes = getattr(rotary, "mrope_section", None)
    if axes is not None:
        positions_1T = positions_1T.expand(len(axes), 1, -1)
    return rotary(like, positions_1T, **({} if kind is None else {"layer_type": kind}))


def rotary_of(
    base: Any, kinds: Iterable[str | None], like: Tensor, *, may_lack: bool
) -> nn.Module | None:
    """Return the module that gives position embeddings to the layers.

    Args:
        base: The decoder.
        kinds: `rope_kind` of the layers that attend.
        like: Tensor with the dtype and device of hidden states.
        may_lack: True if layers carry states, which know the order of tokens; the start-up check
            finds other errors.

    Raises:
        ModelError: There is no such module, or it is unknown.
    """
    rotary = _child(base)
    if not isinstance(rotary, nn.Module):
        if may_lack:
            return None
        raise ModelError(
            f"{type(base).__name__} has no `rotary_emb`: other embeddings of positions than "
            "rotary ones are not supported"
        )
    refuse_rope_types(rotary)
    positions = torch.zeros(1, 1, dtype=torch.long, device=like.device)
    what = f"{type(rotary).__name__} does not give embeddings of positions"
    for kind in set(kinds):
        try:
            with torch.inference_mode():
                found = embeddings(rotary, kind, like.new_empty(0), positions)
        except Exception as error:
            raise ModelError(f"{what}: it raised {type(error).__name__}: {error}") from error
        if not isinstance(found, Tensor) and (not isinstance(found, tuple) or len(found) != 2):
            raise ModelError(f"{what}: it returned {type(found).__name__}")
    return rotary


def refuse_rope_types(rotary: Any) -> None:
    """Refuse a module in which a type of layer has a rope that follows the length."""
    kinds = getattr(rotary, "rope_type", None)
    for layer_type, kind in kinds.items() if isinstance(kinds, Mapping) else ():
        if kind not in STATIC_ROPE:
            raise ModelError(
                f"{type(rotary).__name__} has rope type {kind!r} for {layer_type}: where every "
                f"type of layer has its own, only {', '.join(sorted(STATIC_ROPE))} are supported"
            )


def max_position(config: Any) -> int:
    """Return the longest sequence. Dynamic NTK extends `max_position_embeddings` by a factor."""
    length = getattr(config, "max_position_embeddings", 1 << 30)
    rope = getattr(config, "rope_parameters", None) or {}
    return int(length * rope.get("factor", 1.0) if rope.get("rope_type") == "dynamic" else length)
