"""Find the parts of a Hugging Face MoE model by what transformers declares.

`_can_record_outputs` names the classes of layers, attention and routers; the experts carry the
flags of `use_experts_implementation`; `base_model_pp_plan` names embedding, layers and norm.
Nothing is found by the name of a family.

Whether the fast driver may run a layer is decided by a *fingerprint*: the source of the layer's
forward and of its MoE block's, without docstrings, annotations and the name of the MoE child.
A glue that is not in the tables below is driven by hooks.
"""

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from qllm.errors import ModelError
from qllm.models.hybrid import state_makers
from qllm.models.logits import LogitRule, logit_rule_of
from qllm.models.quantised_experts import all_quantised
from qllm.plan import ModelShape
from qllm.types import Driver

PACKED = "qllm_packed"
"""Attribute of experts whose weights a runner holds in a layout of its own."""
CACHES = {"cache_params", "past_key_values"}
"""Names of the argument that is transformers' cache."""
LAST_NORMS = ("norm", "final_layernorm", "embedding_norm", "norm_f")
STATIC_ROPE = {"default", "linear", "llama3", "yarn", "proportional"}
"""Rope types that give a position the same values in every call."""
MOE_NAMES = {"block_sparse_moe": "mlp", "moe": "mlp", "feed_forward": "mlp"}

LAYER_GLUE = {
    "beedea11a992": "plain",  # mixtral, phimoe
    "81d96d2d9d08": "plain",  # qwen2_moe, qwen3_moe, olmoe, deepseek_v3
    "dd4f84571e97": "plain",  # gpt_oss: its block returns a tuple
    "197d68bfbce0": "plain",  # qwen3_next, qwen3_5_moe: attention, or a Gated DeltaNet
    "74a792a86065": "plain",  # qwen3_5
    "0e4c9842356c": "scaled",  # granitemoe: both sums scale what they add
}
"""Fingerprint of DecoderLayer.forward -> what its glue does."""
BLOCK_GLUE = {
    "87832fef4351": "plain",  # mixtral
    "21a27c6fb476": "plain",  # qwen3_moe
    "de8f007fdef6": "plain",  # olmoe
    "728fe7dc9c9d": "plain",  # gpt_oss
    "9093b44f9f82": "plain",  # granitemoe
    "b42d4fc5f32f": "plain",  # granitemoe, transformers 5.17
    "36df0733fead": "plain",  # phimoe
    "ed30505cbacb": "shared",  # deepseek_v3
    "7b1ca88b5a70": "gated_shared",  # qwen2_moe, qwen3_next, qwen3_5_moe
}
"""Fingerprint of the MoE block's forward -> what its glue does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParts:
    """One decoder layer."""

    index: int
    layer: nn.Module
    self_attn: nn.Module | None
    """What sees other tokens: attention, or a module with a state. None: the layer has neither."""
    attentions: tuple[nn.Module, ...] = ()
    """All its attention. More than one, and the layer is not cut between its parts."""
    driver: Driver
    is_moe: bool
    input_layernorm: nn.Module | None = None
    post_attention_layernorm: nn.Module | None = None
    """Both norms are there when the glue is known."""
    mlp: nn.Module | None = None
    """The MoE block, or the dense MLP."""
    router: nn.Module | None = None
    experts: nn.Module | None = None
    shared: nn.Module | None = None
    """Experts that every token takes."""
    shared_gate: nn.Module | None = None
    """Its sigmoid scales the shared experts."""
    residual_multiplier: float | None = None
    window: int | None = None
    """Sliding window of the attention, if it has one."""
    rope_kind: str | None = None
    """Type of the layer, where every type has its own position embeddings."""
    one_by_one: bool = False
    """Whether `self_attn` asks the cache how long the sequence is: it runs for one request."""
    new_state: Callable[[], Any] | None = None
    """Makes the state of a request, if `self_attn` is no attention but carries a state."""


class Chunk(int):
    """In the place of a window: a query sees the keys of its own chunk of so many positions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParts:
    """What the drivers run, in order."""

    embed: nn.Module
    embedding_multiplier: float | None
    layers: tuple[LayerParts, ...]
    norm: nn.Module
    lm_head: nn.Linear
    logit_rule: LogitRule | None
    """What the model does to its logits; None is nothing."""
    rotary_emb: nn.Module | None
    """None: no layer is given position embeddings."""
    latent_kv: bool
    """The KV cache holds MLA latents."""
    shape: ModelShape

    @property
    def num_kv_layers(self) -> int:
        """Layers of the cache: some layers attend twice, some never."""
        found: list[Any] = self.attentions
        return max([len(self.layers), *(int(attn.layer_idx) + 1 for attn in found)])

    @property
    def has_states(self) -> bool:
        """Whether a layer carries a state."""
        return any(layer.new_state is not None for layer in self.layers)

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """Layers of the cache that keys and values are written to."""
        found: list[Any] = self.attentions
        return tuple(sorted({int(attn.layer_idx) for attn in found}))

    @property
    def attentions(self) -> list[nn.Module]:
        """All attention, in order."""
        return [attn for layer in self.layers for attn in layer.attentions]


class _Normal(ast.NodeTransformer):
    """Drop what does not change the meaning: annotations, docstrings, the MoE child's name."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.name, node.returns, node.decorator_list = "f", None, []
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:]
        self.generic_visit(node)
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        node.attr = MOE_NAMES.get(node.attr, node.attr)
        return node


def fingerprint(module: nn.Module) -> str:
    """Digest of the forward of a module's class, names normalised; empty if it has no source."""
    return source_digest(inspect.unwrap(type(module).forward))


@cache
def source_digest(function: Callable[..., Any]) -> str:
    """Digest of the source of a function, names normalised; empty if it has no source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return ""
    text = ast.unparse(_Normal().visit(tree))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def is_experts(module: nn.Module) -> bool:
    """Whether a module was made by `use_experts_implementation`."""
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate")


def _can_drive(module: Any) -> bool:
    """Whether our work units are made for these experts; a layer with others runs whole."""
    return (
        is_experts(module)
        and bool(module.has_gate)
        and not getattr(module, "has_post_expert_norm", False)
    )


def base_model(model: nn.Module) -> Any:
    """The decoder under a causal language model."""
    found = getattr(model, "base_model", model)
    if found is model:  # its prefix names another attribute (Llama 4)
        found = getattr(model, "model", model)
    return getattr(found, "language_model", found)  # beside the parts that see images


def _recorded(base: Any, name: str) -> tuple[type[nn.Module], ...]:
    """The classes that the model declares under a name."""
    specs = (getattr(base, "_can_record_outputs", None) or {}).get(name)
    found = [
        getattr(spec, "target_class", spec)
        for spec in (specs if isinstance(specs, list | tuple) else [specs])
    ]
    return tuple(kind for kind in found if isinstance(kind, type) and issubclass(kind, nn.Module))


def _child_of(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> nn.Module | None:
    return next((m for m in module.modules() if isinstance(m, kinds)), None)


def decoder_layers(base: nn.Module) -> nn.ModuleList:
    """The layers that a model declares.

    Raises:
        ModelError: It declares none.
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
    """The window that the model's forward puts in the mask of this layer."""
    source = inspect.getsource(inspect.unwrap(type(base).forward))
    types = getattr(base.config, "layer_types", None)
    if types and types[index] == "chunked_attention":
        return Chunk(base.config.attention_chunk_size)
    if "create_sliding_window_causal_mask" not in source:
        return None
    window = getattr(base.config, "sliding_window", None) or None
    if '"sliding_attention"' in source:
        return window if base.config.layer_types[index] == "sliding_attention" else None
    return window


def _glue(layer: nn.Module, block: nn.Module | None) -> tuple[str | None, str | None]:
    layer_glue = LAYER_GLUE.get(fingerprint(layer))
    block_glue = BLOCK_GLUE.get(fingerprint(block)) if block is not None else None
    return layer_glue, block_glue


def layer_parts(base: nn.Module) -> tuple[LayerParts, ...]:
    """Find the parts of every layer.

    Raises:
        ModelError: A layer is not declared, or has what no driver runs.
    """
    layers = decoder_layers(base)
    makers = state_makers(base, len(layers))
    return tuple(_layer_parts(base, layer, i, makers[i]) for i, layer in enumerate(layers))


def _layer_parts(
    base: nn.Module, layer: nn.Module, index: int, new_state: Callable[[], Any] | None
) -> LayerParts:
    kinds = _recorded(base, "attentions")
    attentions = tuple(m for m in layer.modules() if isinstance(m, kinds))
    attn = next(iter(attentions), None)
    if attn is None:
        attn = next((m for m in layer.children() if _arguments(m).keys() & CACHES), None)
        if attn is not None and new_state is None:
            raise ModelError(
                f"layer {index} of {type(base).__name__} gives the cache to a "
                f"{type(attn).__name__}, which is no attention of the declared class"
            )
    experts = next((m for m in layer.modules() if _can_drive(m)), None)
    parents = (m for m in layer.modules() if experts is not None and experts in m.children())
    block = next(parents, None)
    layer_glue, block_glue = _glue(layer, block)
    source = "" if attn is None else inspect.getsource(inspect.unwrap(type(attn).forward))
    one_by_one = "get_seq_length" in source
    known = layer_glue is not None and (experts is None or block_glue is not None)
    known = known and len(attentions) == (new_state is None) and not one_by_one
    if len(attentions) > 1:
        experts = block = None
    driver = Driver.HOOKED
    if experts is None:
        driver = Driver.DENSE
    elif known:
        driver = Driver.FAST
    shared, gate = _shared(block, block_glue)
    mlp = block
    if known and block is None:
        mlp = getattr(layer, "mlp", None)
    return LayerParts(
        index=index,
        layer=layer,
        self_attn=attn,
        attentions=attentions if new_state is None else (),
        driver=driver,
        is_moe=experts is not None,
        input_layernorm=layer.get_submodule("input_layernorm") if known else None,
        post_attention_layernorm=layer.get_submodule("post_attention_layernorm") if known else None,
        mlp=mlp,
        router=_router(base, block, experts),
        experts=experts,
        shared=shared,
        shared_gate=gate,
        residual_multiplier=_multiplier(layer) if layer_glue == "scaled" else None,
        window=None if new_state is not None else _window(base, index),
        rope_kind=_rope_kind(base, index),
        one_by_one=one_by_one,
        new_state=new_state,
    )


def _arguments(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(inspect.unwrap(type(module).forward)).parameters


def _rotary_child(base: Any) -> Any:
    return getattr(base, "rotary_emb", None) or getattr(base, "pos_emb", None)


def _rope_kind(base: Any, index: int) -> str | None:
    rotary = _rotary_child(base)
    if not isinstance(rotary, nn.Module) or "layer_type" not in _arguments(rotary):
        return None
    return str(base.config.layer_types[index])


def _router(base: nn.Module, block: nn.Module | None, experts: Any) -> nn.Module | None:
    """The declared router; else (transformers 5.17) the child with a row per expert."""
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


def _shared(block: Any, glue: str | None) -> tuple[nn.Module | None, nn.Module | None]:
    if glue == "shared":
        return block.shared_experts, None
    if glue == "gated_shared":
        return block.shared_expert, block.shared_expert_gate
    return None, None


def _top_k(layers: tuple[LayerParts, ...], config: Any) -> int:
    for parts in layers:
        if parts.router is not None and hasattr(parts.router, "top_k"):
            return int(parts.router.top_k)  # type: ignore[arg-type]
    found = getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", None)
    if found is None:
        raise ModelError("the model does not say how many experts a token takes")
    return int(found)


def _norm(base: Any) -> nn.Module:
    """The norm before the output head: the last child that is one."""
    for name in LAST_NORMS:
        norm = getattr(base, name, None)
        if isinstance(norm, nn.Module):
            return norm
    raise ModelError(
        f"{type(base).__name__} has no norm before its output head under a name that is known: "
        f"{', '.join(LAST_NORMS)}"
    )


def _rotary(base: Any, layers: tuple[LayerParts, ...], like: Tensor) -> nn.Module | None:
    """The module that gives embeddings of positions to the layers."""
    rotary = _rotary_child(base)
    if not isinstance(rotary, nn.Module):
        if any(layer.new_state is not None for layer in layers):
            return None  # states know the order of tokens; the start-up check sees the rest
        raise ModelError(
            f"{type(base).__name__} has no `rotary_emb`: other embeddings of positions than "
            "rotary ones are not supported"
        )
    _refuse_rope_types(rotary)
    positions = torch.zeros(1, 1, dtype=torch.long, device=like.device)
    what = f"{type(rotary).__name__} does not give embeddings of positions"
    for kind in {layer.rope_kind for layer in layers if layer.new_state is None}:
        given = {} if kind is None else {"layer_type": kind}
        try:
            with torch.inference_mode():
                found = rotary(like.new_empty(0), positions, **given)
        except Exception as error:
            raise ModelError(f"{what}: it raised {type(error).__name__}: {error}") from error
        if not isinstance(found, Tensor) and (not isinstance(found, tuple) or len(found) != 2):
            raise ModelError(f"{what}: it returned {type(found).__name__}")
    return rotary


def _refuse_rope_types(rotary: Any) -> None:
    kinds = getattr(rotary, "rope_type", None)
    for layer_type, kind in kinds.items() if isinstance(kinds, Mapping) else ():
        if kind not in STATIC_ROPE:
            raise ModelError(
                f"{type(rotary).__name__} has rope type {kind!r} for {layer_type}: where every "
                f"type of layer has its own, only {', '.join(sorted(STATIC_ROPE))} are supported"
            )


def _max_position(config: Any) -> int:
    """Longest sequence; dynamic NTK is made to go beyond `max_position_embeddings` by a factor."""
    length = getattr(config, "max_position_embeddings", 1 << 30)
    rope = getattr(config, "rope_parameters", None) or {}
    return int(length * rope.get("factor", 1.0) if rope.get("rope_type") == "dynamic" else length)


EXTRAS = {
    "hidden_size_per_layer_input": "gives every layer an embedding of its own",
    "num_kv_shared_layers": "shares keys and values between layers",
}
"""Settings that are 0 where layers get nothing but hidden states, positions and the cache."""


def _refuse_extras(base: Any, config: Any) -> None:
    for field, what in EXTRAS.items():
        if found := getattr(config, field, None):
            raise ModelError(
                f"{type(base).__name__} {what} ({field} is {found}): not supported, only 0 is"
            )


def discover(model: Any) -> ModelParts:
    """Find the parts of a model that `refuse_unsafe` accepted.

    Raises:
        ModelError: Something is not declared, or it is no MoE decoder.
    """
    base = base_model(model)
    layers = layer_parts(base)
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ModelError(f"{type(model).__name__} has no linear output head")
    config = base.config
    _refuse_extras(base, config)
    experts = next((parts.experts for parts in layers if parts.experts is not None), None)
    multiplier = getattr(base, "embedding_multiplier", None)
    return ModelParts(
        embed=model.get_input_embeddings(),
        embedding_multiplier=None if multiplier is None else float(multiplier),
        layers=layers,
        norm=_norm(base),
        lm_head=head,
        logit_rule=logit_rule_of(model, config),
        rotary_emb=_rotary(base, layers, head.weight),
        latent_kv=any(hasattr(parts.self_attn, "kv_lora_rank") for parts in layers),
        shape=ModelShape(
            num_layers=len(layers),
            num_experts=0 if experts is None else int(experts.num_experts),  # type: ignore[arg-type]
            experts_per_token=0 if experts is None else _top_k(layers, config),
            is_moe=tuple(parts.is_moe for parts in layers),
            vocab_size=head.out_features,
            max_position=_max_position(config),
        ),
    )


def identity(model: nn.Module, expert_weights: str = "auto") -> str:
    """Digest of a model: its class, its settings, a sample of its weights' bytes, their format."""
    kind = type(model).__name__ + expert_weights.removeprefix("auto")
    digest = hashlib.sha256(kind.encode())
    settings = base_model(model).config.to_dict()
    for name in ("_name_or_path", "transformers_version", "dtype", "torch_dtype"):
        settings.pop(name, None)
    digest.update(repr(sorted(settings.items(), key=lambda item: item[0])).encode())
    quantised = all_quantised(model)
    for name, experts in quantised.items():
        digest.update(f"{name}{experts.kind}".encode() + experts.sample)
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[0] in quantised and parameter.device.type == "meta":
            digest.update(f"{name}{tuple(parameter.shape)}".encode())
            continue
        flat = parameter.detach().reshape(-1)
        some = flat[:: max(1, flat.numel() // 64)][:64].contiguous().cpu()
        digest.update(f"{name}{tuple(parameter.shape)}{parameter.dtype}".encode())
        digest.update(some.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
