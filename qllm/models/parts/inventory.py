"""All parts of a model: their sources, and their kinds."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import nn

from qllm.models.discover import LayerParts, base_model, layer_parts
from qllm.models.parts import known
from qllm.models.parts.digests import fingerprint
from qllm.models.parts.fingerprints import FAMILIES
from qllm.models.parts.known import SOURCE, TRIAL, Known


class KnownPart(NamedTuple):
    """A part of a model's layers, and its kind."""

    role: str
    """"layer", "experts block", "attention", "router", "experts", "norm" or "mlp"."""
    source: str
    """The function that computes the part, like "MixtralAttention.forward"."""
    digest: str
    """12 hexadecimal digits of the function's source digest; empty without a source."""
    known: Known
    """The part's kind, and the way in which it was established."""
    num_layers: int
    """Number of layers that have the part."""


def parts_of(model: Any) -> list[KnownPart]:
    """Return every kind of part in the layers of a model, in the order of a layer.

    Args:
        model: A causal language model; its parameters may be on the meta device.

    Raises:
        ModelError: The model does not declare its layers or their attention.
    """
    return inventory(layer_parts(base_model(model)))


def inventory(layers: Iterable[LayerParts]) -> list[KnownPart]:
    """Return every kind of part in some layers, in the order of a layer."""
    with known.one_look():
        looked = [list(_of_layer(parts)) for parts in layers]
    found: dict[tuple[str, str, Known], KnownPart] = {}
    for of_layer in looked:
        modules = {(role, type(module).__name__, what): module for role, module, what in of_layer}
        for key, module in modules.items():
            role, name, what = key
            part = found.get(key) or KnownPart(
                role, f"{name}.forward", fingerprint(module), what, 0
            )
            found[key] = part._replace(num_layers=part.num_layers + 1)
    return list(found.values())


def _of_layer(parts: LayerParts) -> Iterator[tuple[str, nn.Module, Known]]:
    attn, block = parts.self_attn, parts.mlp if parts.is_moe else None
    if parts.around is None:
        yield "layer", parts.layer, known.layer(parts.layer, attn, block)
    for norm in (parts.input_layernorm, parts.post_attention_layernorm):
        if norm is not None:
            yield "norm", norm, known.norm(norm)
    if attn is not None:
        yield "attention", attn, _attention(parts, attn)
    if block is not None and parts.experts is not None:
        yield "experts block", block, known.block(block, parts.router, parts.experts)
        yield "experts", parts.experts, known.experts(parts.experts)
    if parts.router is not None:
        yield "router", parts.router, known.router(parts.router)
    for mlp in (parts.shared, None if parts.is_moe else parts.mlp):
        if mlp is not None:
            yield "mlp", mlp, known.mlp(mlp)


def _attention(parts: LayerParts, attn: nn.Module) -> Known:
    if parts.new_state is not None:
        return known.delta_net(attn, parts.new_state)
    return known.latents(attn) if hasattr(attn, "kv_lora_rank") else known.attention(attn)


def described(parts: Iterable[KnownPart]) -> str:
    """Return a text: how each part was recognised, or why its own module runs."""
    by_how: dict[str, list[str]] = {SOURCE: [], TRIAL: []}
    rest = []
    for part in parts:
        kind, how = part.known
        if kind is None:
            rest.append(f"{part.role}: its own module ({how})")
        elif part.role not in by_how[how]:
            by_how[how].append(part.role)
    said = [f"by {how}: {', '.join(roles)}" for how, roles in by_how.items() if roles]
    return "; ".join([*said, *dict.fromkeys(rest)])


def changed(model: Any) -> list[KnownPart]:
    """Return unknown parts of a model whose family has only known parts."""
    if getattr(model.config, "model_type", None) not in FAMILIES:
        return []
    return [part for part in parts_of(model) if part.known.kind is None]
