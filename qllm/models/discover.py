"""Discovery of the parts of a Hugging Face MoE model from transformers' declarations.

`_can_record_outputs` names the classes of layers, attention and routers. The experts carry the
flags of `use_experts_implementation`. `base_model_pp_plan` names embedding, layers and norm. No
part is found by the name of a family.

The fast driver may run a layer if the code that joins its parts, in its forward and in its MoE
block, is known (`qllm.models.parts.known`). A layer with other code is run by hooks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qllm.errors import ModelError
from qllm.models.arguments import finds_cache
from qllm.models.around import Around, Leave, is_experts
from qllm.models.hybrid import KeepsMoreError, state_makers
from qllm.models.logits import LogitRule, logit_rule_of
from qllm.models.parts import known
from qllm.models.parts.digests import forward_source
from qllm.models.positions import (
    STATIC_ROPE,
    max_position,
    refuse_rope_types,
    rope_kind,
    rotary_of,
)
from qllm.models.weights.quantised_linears import linear_in
from qllm.plan import ModelShape
from qllm.types import Driver

PACKED = "qllm_packed"
"""Attribute of experts whose weights a runner keeps in its own layout."""
LAST_NORMS = ("norm", "final_layernorm", "embedding_norm", "norm_f")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParts:
    """One decoder layer."""

    index: int
    layer: nn.Module
    self_attn: nn.Module | None
    """Attention, or a module with a state. None: the layer has neither."""
    attentions: tuple[nn.Module, ...] = ()
    """All attention modules of the layer. A layer with several is not cut between its parts."""
    driver: Driver
    is_moe: bool
    input_layernorm: nn.Module | None = None
    post_attention_layernorm: nn.Module | None = None
    """Norm after the attention. Both norms are set when the layer's code is known."""
    mlp: nn.Module | None = None
    """The MoE block, or the dense MLP."""
    router: nn.Module | None = None
    experts: nn.Module | None = None
    shared: nn.Module | None = None
    """Experts that every token uses."""
    shared_gate: nn.Module | None = None
    """Gate whose sigmoid scales the shared experts."""
    residual_multiplier: float | None = None
    window: int | None = None
    """Sliding window of the attention, if it has one."""
    rope_kind: str | None = None
    """Type of the layer, if each type has its own position embeddings."""
    one_by_one: bool = False
    """True if `self_attn` reads the cache's length, so it runs for one request at a time."""
    new_state: Callable[[], Any] | None = None
    """Factory of a request's state, if `self_attn` carries a state instead of attending."""
    around: Around | None = None
    """The model's own forward around the layer, if only that forward can call the layer."""


class Chunk(int):
    """A size of chunks, used instead of a window: a query sees only the keys of its chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParts:
    """The parts that drivers run, in order."""

    embed: nn.Module
    embedding_multiplier: float | None
    layers: tuple[LayerParts, ...]
    norm: nn.Module
    lm_head: nn.Linear
    logit_rule: LogitRule | None
    """Rule that the model applies to its logits; None is no rule."""
    rotary_emb: nn.Module | None
    """Module of position embeddings; None if no layer takes them."""
    around: Around | None = None
    """The model's own forward around the layers, if only that forward can call them."""
    latent_kv: bool
    """True if the KV cache contains MLA latents."""
    shape: ModelShape

    @property
    def like(self) -> Tensor:
        """Tensor with the dtype, device and last dimension of the layers' inputs."""
        return _like(self.lm_head) if self.around is None else self.around.like

    @property
    def num_kv_layers(self) -> int:
        """Number of layers in the cache: some layers attend twice, some never."""
        found: list[Any] = self.attentions
        return max([len(self.layers), *(int(attn.layer_idx) + 1 for attn in found)])

    @property
    def has_states(self) -> bool:
        """True if a layer carries a state."""
        return any(layer.new_state is not None for layer in self.layers)

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """Indices of cache layers that keys and values are written to."""
        found: list[Any] = self.attentions
        return tuple(sorted({int(attn.layer_idx) for attn in found}))

    @property
    def attentions(self) -> list[nn.Module]:
        """All attention modules, in order."""
        return [attn for layer in self.layers for attn in layer.attentions]


def _like(head: nn.Linear) -> Tensor:
    held = linear_in(head)
    return head.weight if held is None else held.weight.scale_NG.new_empty(0, dtype=torch.bfloat16)


def _can_drive(module: Any) -> bool:
    """Return True if our work units support these experts. A layer with others runs whole."""
    return (
        is_experts(module)
        and bool(module.has_gate)
        and not getattr(module, "has_post_expert_norm", False)
    )


def base_model(model: nn.Module) -> Any:
    """Return the decoder of a causal language model."""
    found = getattr(model, "base_model", model)
    if found is model:  # `base_model_prefix` is not the decoder (Llama 4)
        found = getattr(model, "model", model)
    return getattr(found, "language_model", found)  # a model with images has both parts


def _recorded(base: Any, name: str) -> tuple[type[nn.Module], ...]:
    """Return the classes that the model declares under a name."""
    specs = (getattr(base, "_can_record_outputs", None) or {}).get(name)
    found = [
        getattr(spec, "target_class", spec)
        for spec in (specs if isinstance(specs, list | tuple) else [specs])
    ]
    return tuple(kind for kind in found if isinstance(kind, type) and issubclass(kind, nn.Module))


def _child_of(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> nn.Module | None:
    return next((m for m in module.modules() if isinstance(m, kinds)), None)


def decoder_layers(base: nn.Module) -> nn.ModuleList:
    """Return the layers that a model declares.

    Raises:
        ModelError: The model declares none.
    """
    kinds = _recorded(base, "hidden_states")
    for child in base.children():
        if isinstance(child, nn.ModuleList) and len(child) and isinstance(child[0], kinds):
            return child
    raise ModelError(
        f"{type(base).__name__} does not declare its decoder layers in `_can_record_outputs`; "
        "qllm drives models that do (transformers >= 5.17)"
    )


def _window(base: Any, index: int) -> int | None:
    """Return the window that the model's forward uses in the mask of this layer."""
    source = forward_source(base)
    types = getattr(base.config, "layer_types", None)
    if types and types[index] == "chunked_attention":
        return Chunk(base.config.attention_chunk_size)
    if "create_sliding_window_causal_mask" not in source:
        return None
    window = getattr(base.config, "sliding_window", None) or None
    if '"sliding_attention"' in source:
        return window if base.config.layer_types[index] == "sliding_attention" else None
    return window


def layer_parts(base: nn.Module) -> tuple[LayerParts, ...]:
    """Return the parts of every layer.

    Raises:
        ModelError: A layer is not declared, or has a part that no driver supports.
    """
    layers = decoder_layers(base)
    makers = state_makers(base, len(layers))
    with known.one_look():
        return tuple(_layer_parts(base, layer, i, makers[i]) for i, layer in enumerate(layers))


def _layer_parts(
    base: nn.Module, layer: nn.Module, index: int, new_state: Callable[[], Any] | None
) -> LayerParts:
    kinds = _recorded(base, "attentions")
    attentions = tuple(m for m in layer.modules() if isinstance(m, kinds))
    attn = next(iter(attentions), None)
    if attn is None:
        attn = next((m for m in layer.children() if finds_cache(m)), None)
        if attn is not None and new_state is None:
            raise ModelError(
                f"layer {index} of {type(base).__name__} gives the cache to a "
                f"{type(attn).__name__}, which is no attention of the declared class"
            )
    experts = next((m for m in layer.modules() if _can_drive(m)), None)
    parents = (m for m in layer.modules() if experts is not None and experts in m.children())
    block = next(parents, None)
    router = _router(base, block, experts)
    layer_glue = known.layer(layer, attn, block).kind
    block_glue = None
    if block is not None and experts is not None:
        block_glue = known.block(block, router, experts).kind
    source = "" if attn is None else forward_source(attn)
    one_by_one = "get_seq_length" in source
    is_known = layer_glue is not None and (experts is None or block_glue is not None)
    is_known = is_known and len(attentions) == (new_state is None) and not one_by_one
    if len(attentions) > 1:
        experts = block = None
    driver = Driver.HOOKED
    if experts is None:
        driver = Driver.DENSE
    elif is_known:
        driver = Driver.FAST
    shared, gate = known.Shared(None, None) if block_glue is None else known.shared_in(block)
    mlp = block
    if is_known and block is None:
        mlp = getattr(layer, "mlp", None)
    return LayerParts(
        index=index,
        layer=layer,
        self_attn=attn,
        attentions=attentions if new_state is None else (),
        driver=driver,
        is_moe=experts is not None,
        input_layernorm=layer.get_submodule("input_layernorm") if is_known else None,
        post_attention_layernorm=layer.get_submodule("post_attention_layernorm")
        if is_known
        else None,
        mlp=mlp,
        router=router if block is not None else None,
        experts=experts,
        shared=shared,
        shared_gate=gate,
        residual_multiplier=_multiplier(layer) if layer_glue == "scaled" else None,
        window=None if new_state is not None else _window(base, index),
        rope_kind=rope_kind(base, index),
        one_by_one=one_by_one,
        new_state=new_state,
    )


def _router(base: nn.Module, block: nn.Module | None, experts: Any) -> nn.Module | None:
    """Return the declared router, or (transformers 5.17) the child with a row per expert."""
    if block is None:
        return None
    declared = _child_of(block, _recorded(base, "router_logits"))
    if declared is not None:
        return declared
    for child in block.children():
        weight = getattr(child, "weight", None)
        if isinstance(weight, Tensor) and weight.shape[0] == experts.num_experts:
            return child
    return None


def _multiplier(layer: Any) -> float:
    return float(layer.residual_multiplier)


def _top_k(layers: tuple[LayerParts, ...], config: Any) -> int:
    for parts in layers:
        if parts.router is not None and hasattr(parts.router, "top_k"):
            return int(parts.router.top_k)  # type: ignore[arg-type]
    found = getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", None)
    if found is None:
        raise ModelError("the model does not say how many experts a token takes")
    return int(found)


def _checked(top_k: int, experts: Any) -> int:
    """Return the experts per token, if a layer has that many.

    Raises:
        ModelError: The layer has fewer.
    """
    if not 1 <= top_k <= experts.num_experts:
        raise ModelError(
            f"num_experts_per_tok={top_k} must be in [1, {experts.num_experts}], the number of "
            "experts of a layer; correct the model's config.json"
        )
    return top_k


def _norm(base: Any) -> nn.Module:
    """Return the norm before the output head: the last child that is a norm."""
    for name in LAST_NORMS:
        norm = getattr(base, name, None)
        if isinstance(norm, nn.Module):
            return norm
    raise ModelError(
        f"{type(base).__name__} has no norm before its output head under a name that is known: "
        f"{', '.join(LAST_NORMS)}"
    )


def _rotary(base: Any, layers: tuple[LayerParts, ...], like: Tensor) -> nn.Module | None:
    attend = [layer for layer in layers if layer.new_state is None]
    kinds = {layer.rope_kind for layer in attend}
    return rotary_of(base, kinds, like, may_lack=len(attend) < len(layers))


EXTRAS = {
    "hidden_size_per_layer_input": "gives every layer an embedding of its own",
    "num_kv_shared_layers": "shares keys and values between layers",
}
"""Settings that are 0 in models whose layers take only hidden states, positions and the cache."""


def _refuse_extras(base: Any, config: Any) -> None:
    for field, what in EXTRAS.items():
        if found := getattr(config, field, None):
            raise ModelError(
                f"{type(base).__name__} {what} ({field} is {found}): not supported, only 0 is"
            )


def discover(model: Any) -> ModelParts:
    """Return the parts of a model that `refuse_unsafe` accepted.

    If its layers cannot be run part by part, the model's own forward calls them.

    Raises:
        ModelError: A part is not declared, or the model is no MoE decoder.
    """
    try:
        return _discover(model, None)
    except KeepsMoreError as error:
        first = error
    try:
        around = _around(model)
    except ModelError as second:
        raise ModelError(f"{first}; and {second}") from second
    except Exception as second:
        what = f"its layers cannot be tried: {type(second).__name__}: {second}"
        raise ModelError(f"{first}; and {what}") from second
    return _discover(model, around)


def _around(model: Any) -> Around:
    """Return how a model's forward calls its layers.

    Raises:
        ModelError: The forward is not supported here, or the model has no weights yet.
    """
    base = base_model(model)
    layers = decoder_layers(base)
    for module in base.modules():
        refuse_rope_types(module)
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, str) and kind not in STATIC_ROPE:
            raise ModelError(f"{type(module).__name__} has rope type {kind!r}: not supported there")
    if any(t.device.type == "meta" for t in base.parameters()):
        raise ModelError("its layers cannot be tried without weights")
    kinds, attentions = _recorded(base, "attentions"), []
    for layer in layers:
        found = [m for m in layer.modules() if isinstance(m, kinds)]
        attentions.append(found[0] if len(found) == 1 else None)
    experts = next((m for m in base.modules() if _can_drive(m)), None)
    routers = [m for m in base.modules() if isinstance(m, _recorded(base, "router_logits"))]
    top_k = next((int(r.top_k) for r in routers if hasattr(r, "top_k")), 0)  # type: ignore[arg-type]
    if experts is not None:
        top_k = _checked(top_k or _top_k((), base.config), experts)
    return Around(model, base, list(layers), attentions, top_k)


def _around_parts(base: Any, around: Around) -> tuple[LayerParts, ...]:
    """Return the parts of layers that are called with the arguments of the model's forward."""
    out = []
    kinds = _recorded(base, "attentions")
    for index, layer in enumerate(around.layers):
        experts = next((m for m in layer.modules() if _can_drive(m)), None)
        if not around.may_stop[index]:
            experts = None
        parents = (m for m in layer.modules() if experts is not None and experts in m.children())
        block = next(parents, None)
        out.append(
            LayerParts(
                index=index,
                layer=layer,
                self_attn=None if experts is None else _child_of(layer, kinds),
                driver=Driver.AROUND,
                is_moe=experts is not None,
                mlp=block,
                router=_router(base, block, experts),
                experts=experts,
                new_state=partial(around.new_state, index),
                around=around,
            )
        )
    return tuple(out)


def _discover(model: Any, around: Around | None) -> ModelParts:
    base = base_model(model)
    layers = layer_parts(base) if around is None else _around_parts(base, around)
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ModelError(f"{type(model).__name__} has no linear output head")
    config = base.config
    if around is None:
        _refuse_extras(base, config)
    experts = next((parts.experts for parts in layers if parts.experts is not None), None)
    multiplier = None if around is not None else getattr(base, "embedding_multiplier", None)
    return ModelParts(
        embed=model.get_input_embeddings(),
        embedding_multiplier=None if multiplier is None else float(multiplier),
        layers=layers,
        norm=_norm(base) if around is None else Leave(around),
        lm_head=head,
        logit_rule=logit_rule_of(model, config),
        rotary_emb=None if around is not None else _rotary(base, layers, _like(head)),
        around=around,
        latent_kv=any(hasattr(parts.self_attn, "kv_lora_rank") for parts in layers),
        shape=ModelShape(
            num_layers=len(layers),
            num_experts=0 if experts is None else int(experts.num_experts),  # type: ignore[arg-type]
            experts_per_token=0 if experts is None else _checked(_top_k(layers, config), experts),
            is_moe=tuple(parts.is_moe for parts in layers),
            vocab_size=head.out_features,
            max_position=max_position(config),
        ),
    )
