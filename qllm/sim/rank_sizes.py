"""The sizes by which ranks share a model, found in its modules: see `qllm.sim.ranks`."""

import math

from torch import nn

from qllm.models.discover import LayerParts, ModelParts, base_model, discover
from qllm.models.weights.quantised_linears import weight_bytes
from qllm.runner.cuts import cut_rule
from qllm.runner.inference import inference
from qllm.runner.layers.native_parts import HeadWeights, Projection, router_of
from qllm.sharded.weights import LayerWeights, bytes_of, why_unsplit
from qllm.sim.ranks import LayerSizes, RankSizes

ID_BYTES = 8
"""Bytes of the number of an expert."""


def rank_sizes(model: nn.Module) -> RankSizes | None:
    """Return the sizes of a model; None if ranks cannot share it, or its layers are of many sizes.

    Args:
        model: Model in evaluation mode, which no runner drives.
    """
    parts = discover(model)
    if why_unsplit(parts):
        return None
    with inference():
        _, costs = cut_rule(parts, base_model(model).config, math.inf)
        found = {_layer_sizes(layer) for layer in parts.layers}
        choice_bytes = _choice_bytes(parts)
    moe = [sizes for sizes in found if sizes.num_experts]
    dense = [sizes for sizes in found if not sizes.num_experts]
    if len(moe) > 1 or len(dense) > 1:
        return None
    return RankSizes(
        hidden=parts.lm_head.in_features,
        choice_bytes=choice_bytes,
        range_rows=costs.range_rows,
        moe=moe[0] if moe else None,
        dense=dense[0] if dense else None,
    )


def _layer_sizes(layer: LayerParts) -> LayerSizes:
    weights = LayerWeights.of(layer)
    attention, normed = weights.attention, 0
    if isinstance(attention, HeadWeights) and attention.norm_is_whole:
        normed = attention.queries.num_outputs + attention.keys.num_outputs
    return LayerSizes(
        **weights.shape._asdict(),
        heads_width=_num_inputs(attention.out),
        normed_width=normed,
        out_bytes=bytes_of([attention.out.weight]),
        router_bytes=0 if layer.router is None else weight_bytes(layer.router),
    )


def _num_inputs(projection: Projection) -> int:
    return int(projection.weight.shape[1])


def _choice_bytes(parts: ModelParts) -> int:
    routed = [layer for layer in parts.layers if layer.router is not None]
    if not routed:
        return 0
    router = router_of(routed[0].router, routed[0].post_attention_layernorm)
    return ID_BYTES + router.dtype.itemsize
