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
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from qllm.errors import ModelError
from qllm.models.quantised import refuse_quantised
from qllm.models.quantised_experts import WEIGHTS, all_quantised, quantised_in
from qllm.plan import ModelShape
from qllm.types import Driver

EXPERT_FLAGS = {"is_concatenated", "is_transposed", "has_bias", "has_gate", "has_post_expert_norm"}
PACKED = "qllm_packed"
"""Attribute of experts whose weights a runner holds in a layout of its own."""
MOE_NAMES = {"block_sparse_moe": "mlp", "moe": "mlp", "feed_forward": "mlp"}

LAYER_GLUE = {
    "beedea11a992": "plain",  # mixtral, phimoe
    "81d96d2d9d08": "plain",  # qwen2_moe, qwen3_moe, olmoe, deepseek_v3
    "dd4f84571e97": "plain",  # gpt_oss: its block returns a tuple
    "0e4c9842356c": "scaled",  # granitemoe: both sums scale what they add
}
"""Fingerprint of DecoderLayer.forward -> what its glue does."""
BLOCK_GLUE = {
    "87832fef4351": "plain",  # mixtral
    "21a27c6fb476": "plain",  # qwen3_moe
    "de8f007fdef6": "plain",  # olmoe
    "728fe7dc9c9d": "plain",  # gpt_oss
    "9093b44f9f82": "plain",  # granitemoe
    "36df0733fead": "plain",  # phimoe
    "ed30505cbacb": "shared",  # deepseek_v3
    "7b1ca88b5a70": "gated_shared",  # qwen2_moe
}
"""Fingerprint of the MoE block's forward -> what its glue does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParts:
    """One decoder layer."""

    index: int
    layer: nn.Module
    self_attn: nn.Module
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParts:
    """What the drivers run, in order."""

    embed: nn.Module
    embedding_multiplier: float | None
    layers: tuple[LayerParts, ...]
    norm: nn.Module
    lm_head: nn.Linear
    logits_scaling: float | None
    """Divides the logits."""
    rotary_emb: nn.Module
    latent_kv: bool
    """The KV cache holds MLA latents."""
    shape: ModelShape


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


def base_model(model: nn.Module) -> Any:
    """The decoder under a causal language model."""
    return getattr(model, "base_model", model)


def _recorded(base: Any, name: str) -> type[nn.Module] | None:
    specs = getattr(base, "_can_record_outputs", None) or {}
    spec = specs.get(name)
    if isinstance(spec, list | tuple):
        spec = spec[0] if spec else None
    found: Any = getattr(spec, "target_class", spec)
    return found if isinstance(found, type) and issubclass(found, nn.Module) else None


def _child_of(module: nn.Module, kind: type[nn.Module] | None) -> nn.Module | None:
    if kind is None:
        return None
    return next((m for m in module.modules() if isinstance(m, kind)), None)


def decoder_layers(base: nn.Module) -> nn.ModuleList:
    """The layers that a model declares.

    Raises:
        ModelError: It declares none.
    """
    kind = _recorded(base, "hidden_states")
    for child in base.children():
        if isinstance(child, nn.ModuleList) and len(child) and kind and isinstance(child[0], kind):
            return child
    raise ModelError(
        f"{type(base).__name__} does not declare its decoder layers in `_can_record_outputs`; "
        "qllm drives models that do (transformers >= 5.17)"
    )


def _window(base: Any, index: int) -> int | None:
    """The window that the model's forward puts in the mask of this layer."""
    source = inspect.getsource(inspect.unwrap(type(base).forward))
    if "create_sliding_window_causal_mask" not in source:
        return None
    window = getattr(base.config, "sliding_window", None) or None
    if "layer_types" in source:
        return window if base.config.layer_types[index] == "sliding_attention" else None
    return window


def _glue(layer: nn.Module, block: nn.Module | None) -> tuple[str | None, str | None]:
    layer_glue = LAYER_GLUE.get(fingerprint(layer))
    block_glue = BLOCK_GLUE.get(fingerprint(block)) if block is not None else None
    return layer_glue, block_glue


def layer_parts(base: nn.Module, layer: nn.Module, index: int) -> LayerParts:
    """Find the parts of one layer.

    Raises:
        ModelError: It has no attention of the declared class.
    """
    attn = _child_of(layer, _recorded(base, "attentions"))
    if attn is None:
        raise ModelError(
            f"layer {index} of {type(base).__name__} has no attention of the declared class "
            "(linear attention and hybrid layers are not supported)"
        )
    experts = next((m for m in layer.modules() if is_experts(m)), None)
    parents = (m for m in layer.modules() if experts is not None and experts in m.children())
    block = next(parents, None)
    layer_glue, block_glue = _glue(layer, block)
    known = layer_glue is not None and (experts is None or block_glue is not None)
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
        window=_window(base, index),
    )


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
    found = getattr(config, "num_experts_per_tok", None)
    if found is None:
        raise ModelError("the model does not say how many experts a token takes")
    return int(found)


def _norm(base: Any) -> nn.Module:
    norm = getattr(base, "norm", None)
    if not isinstance(norm, nn.Module):
        raise ModelError(f"{type(base).__name__} has no `norm` before its output head")
    return norm


def _rotary(base: Any, like: Tensor) -> nn.Module:
    """The module that gives cos and sin of positions, the same for all layers."""
    rotary = getattr(base, "rotary_emb", None)
    if not isinstance(rotary, nn.Module):
        raise ModelError(
            f"{type(base).__name__} has no `rotary_emb`: other embeddings of positions than "
            "rotary ones that all layers share are not supported"
        )
    positions = torch.zeros(1, 1, dtype=torch.long, device=like.device)
    what = f"{type(rotary).__name__} does not give one cos and sin for all layers"
    try:
        with torch.inference_mode():
            found = rotary(like.new_empty(0), positions)
    except Exception as error:
        raise ModelError(f"{what}: it raised {type(error).__name__}: {error}") from error
    if not isinstance(found, tuple) or len(found) != 2:
        raise ModelError(f"{what}: it returned {type(found).__name__}")
    return rotary


def _max_position(config: Any) -> int:
    """Longest sequence; dynamic NTK is made to go beyond `max_position_embeddings` by a factor."""
    length = getattr(config, "max_position_embeddings", 1 << 30)
    rope = getattr(config, "rope_parameters", None) or {}
    return int(length * rope.get("factor", 1.0) if rope.get("rope_type") == "dynamic" else length)


def discover(model: Any) -> ModelParts:
    """Find the parts of a model that `refuse_unsafe` accepted.

    Raises:
        ModelError: Something is not declared, or it is no MoE decoder.
    """
    base = base_model(model)
    layers = tuple(layer_parts(base, layer, i) for i, layer in enumerate(decoder_layers(base)))
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ModelError(f"{type(model).__name__} has no linear output head")
    config = base.config
    if getattr(config, "final_logit_softcapping", None):
        raise ModelError("final_logit_softcapping is not supported")
    experts = next((parts.experts for parts in layers if parts.experts is not None), None)
    multiplier = getattr(base, "embedding_multiplier", None)
    scaling = getattr(config, "logits_scaling", None)
    return ModelParts(
        embed=model.get_input_embeddings(),
        embedding_multiplier=None if multiplier is None else float(multiplier),
        layers=layers,
        norm=_norm(base),
        lm_head=head,
        logits_scaling=None if scaling is None else float(scaling),
        rotary_emb=_rotary(base, head.weight),
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


def _refuse_tensor(name: str, tensor: Tensor) -> None:
    if tensor.device.type == "meta":
        raise ModelError(
            f"parameter {name} is on the meta device (offloaded to disk?): load the whole model"
        )
    if type(tensor).__name__ == "DTensor" or type(tensor.data).__name__ == "DTensor":
        raise ModelError(f"parameter {name} is sharded (DTensor); load without tensor parallelism")


def _refuse_experts(name: str, experts: Any) -> None:
    if "forward" in vars(experts) and quantised_in(experts) is None:
        raise ModelError(f"{name}.forward was replaced on the instance (expert parallelism?)")
    if getattr(experts, "_is_expert_parallel", False):
        raise ModelError(f"{name} is sharded over devices (expert parallelism)")
    if not experts.has_gate or getattr(experts, "has_post_expert_norm", False):
        raise ModelError(f"{name} has no gate, or a norm after its experts: not supported")
    known = EXPERT_FLAGS | {"_is_expert_parallel"}
    flags = {key for key in vars(experts) if key.startswith(("has_", "is_", "_is_"))}
    unknown = flags - known - {"_is_full_backward_hook", "_is_hf_initialized"}
    if unknown:
        raise ModelError(f"{name} has layout flags qllm does not know: {', '.join(unknown)}")


def refuse_unsafe(model: nn.Module) -> None:
    """Refuse a model that the drivers would run wrongly.

    Raises:
        ModelError: Names the part and the reason.
    """
    if model.training:
        raise ModelError("the model is in training mode; call model.eval()")
    if getattr(model, "use_kernels", False) or getattr(model, "_use_kernels", False):
        raise ModelError("use_kernels swaps modules for hub kernels; load with use_kernels=False")
    for name, module in model.named_modules():
        if hasattr(module, PACKED):
            raise ModelError(
                f"the weights of {name} are packed for another runner; close that runner (or its "
                "engine) first, or load the model once more"
            )
    quantised = {f"{module}.{name}" for module in all_quantised(model) for name in WEIGHTS}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name not in quantised:
            _refuse_tensor(name, tensor)
    refuse_quantised(model)
    for name, module in model.named_modules():
        if hasattr(module, "_hf_hook"):
            raise ModelError(f"{name or 'the model'} has an accelerate hook (offload?)")
        if is_experts(module):
            _refuse_experts(name, module)


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
