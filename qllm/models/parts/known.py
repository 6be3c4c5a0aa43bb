"""Kinds of the parts of a model, and how each was established.

    structure      modules, shapes and settings decide which kinds are possible
    source         its source is one that was tested (`qllm.models.parts.fingerprints`), or else
    trial          its own forward gives the kind's result (`qllm.models.parts.trials`)

A part without a kind is run by its own module. No name of a class or of a family decides.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qllm.models.parts import fingerprints, glue_trials, trials
from qllm.models.parts.drawn import has_another_forward, is_replaced, own_values
from qllm.models.parts.formulas import NORMS

SOURCE, TRIAL = "their source", "a trial"
NUMBER = "layer_idx"
"""Name under which modules of transformers have the number of their layer."""

P = ParamSpec("P")


class Known(NamedTuple):
    """The kind of a part, if it is known."""

    kind: str | None
    """The kind; None if the part is run by its own module."""
    how: str
    """SOURCE or TRIAL, or the reason why there is no kind."""


_seen: "WeakKeyDictionary[nn.Module, dict[str, tuple[object, Known]]]" = WeakKeyDictionary()
"""Results by module and function."""
_alike: ContextVar[dict[object, Known] | None] = ContextVar("_alike", default=None)
"""Results for modules that differ only in weights, during `one_look` at a model."""


@contextmanager
def one_look() -> Iterator[None]:
    """Try equal parts of a model's layers only once; the model must not change meanwhile."""
    token = _alike.set(_alike.get() or {})
    try:
        yield
    finally:
        _alike.reset(token)


def _once(look: Callable[Concatenate[Any, P], Known]) -> Callable[Concatenate[Any, P], Known]:
    """Cache a module's result until its class, its settings or its forward change."""

    @wraps(look)
    def known(module: Any, *args: P.args, **given: P.kwargs) -> Known:
        found, now = _seen.setdefault(module, {}), _state_of(module)
        if found.get(look.__name__, (None,))[0] != now:
            alike, key = _alike.get(), (look.__name__, repr(now))
            what = None if alike is None else alike.get(key)
            if what is None:
                what = look(module, *args, **given)
            if alike is not None:
                alike[key] = what
            found[look.__name__] = now, what
        return found[look.__name__][1]

    return known  # type: ignore[return-value]


def _is_first(module: nn.Module) -> bool:
    """Return True for the first module of those in `one_look` that differ only in layer number."""
    alike, key = _alike.get(), ("but its number", repr(_state_of(module, NUMBER)))
    if alike is None:
        return True
    return alike.setdefault(key, Known(None, str(id(module)))).how == str(id(module))


def _state_of(module: nn.Module, but: str = "") -> object:
    """Return everything that a trial of a module depends on, except attributes named `but`."""
    return [_settings(name, m, but) for name, m in module.named_modules()]


def _settings(name: str, module: nn.Module, but: str) -> object:
    config = getattr(module, "config", None)
    values = [own_values(owner, but) for owner in (module, config) if owner is not None]
    tensors = {**module._parameters, **module._buffers}
    shapes = [(k, t.shape, t.dtype) for k, t in tensors.items() if t is not None]
    kind = type(module)
    return name, id(kind), id(kind.forward), has_another_forward(module), values, shapes, id(config)


def _found(source: str | None, kinds: Iterable[str], trial: Callable[[str], str]) -> Known:
    """Return the kind of the source, or else the first kind whose trial finds no difference."""
    if source is not None:
        return Known(source, SOURCE)
    whys = []
    for kind in kinds:
        if not (why := trial(kind)):
            return Known(kind, TRIAL)
        whys.append(f"not {kind}: {why}")
    return Known(None, "; ".join(whys) or "its structure is of no known kind")


def _linears(module: Any, names: Iterable[str], bias: bool = False) -> bool:
    """Return True if the children are plain linear modules, without a bias unless `bias` is set."""
    found = [getattr(module, name, None) for name in names]
    return all(type(x) is nn.Linear and (bias or x.bias is None) for x in found)


def _has(module: Any, *names: str) -> bool:
    return all(hasattr(module, name) for name in names)


# -- norms


@_once
def norm(module: Any) -> Known:
    """Return the kind of a norm: a key of `formulas.NORMS`."""
    if type(module) is nn.LayerNorm and not has_another_forward(module):
        is_usual = module.elementwise_affine and len(module.normalized_shape) == 1
        return Known("layer", SOURCE) if is_usual else Known(None, "it has no weight of one row")
    weights = {name: p for name, p in module._parameters.items() if p is not None}
    eps = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)
    is_norm = weights.keys() in ({"weight"}, {"weight", "bias"}) and isinstance(eps, float)
    if not is_norm or module._modules or any(p.dim() != 1 for p in weights.values()):
        return Known(None, "it has no weight of one row, or no epsilon")
    has_bias = "bias" in weights
    kinds = [kind for kind in NORMS if (kind == "layer") >= has_bias]
    is_own = not has_bias and not has_another_forward(module)
    source = fingerprints.norm_by_source(module) if is_own else None
    return _found(source, kinds, partial(trials.norm, module))


def norm_kind(module: Any) -> str | None:
    """Return the kind of a norm, if it is known."""
    return norm(module).kind


# -- attention


@_once
def attention(attn: Any) -> Known:
    """Return the kind of attention over keys and values: a value of `fingerprints.ATTENTION`."""
    if not _linears(attn, ("q_proj", "k_proj", "v_proj", "o_proj"), bias=True):
        return Known(None, "its projections are not four linear modules")
    if not _has(attn, "head_dim", "scaling", "layer_idx", "config"):
        return Known(None, "it does not say its heads, scaling, or layer")
    source = None if is_replaced(attn) else fingerprints.attention_by_source(attn)
    if source is not None:
        return Known(source, SOURCE)
    turned = num_turned(attn)
    part = "part_" if turned != attn.head_dim else ""
    kinds = _kinds_of_attention(attn)
    if part:
        kinds = [k if k.startswith("gated") else part + k for k in kinds if k != "sinks"]
    return _found(None, kinds, lambda kind: trials.attends(attn, kind, turned, _is_first(attn)))


def _kinds_of_attention(attn: Any) -> list[str]:
    """Return the kinds that fit the modules and weights of an attention."""
    if hasattr(attn, "sinks"):
        return ["sinks"]
    q_norm = getattr(attn, "q_norm", None)
    width = getattr(getattr(q_norm, "weight", None), "numel", int)()
    if attn.q_proj.out_features == 2 * attn.o_proj.in_features:
        return ["gated_head_norm"] if width == attn.head_dim else []
    clip = getattr(attn.config, "clip_qkv", None) is not None
    if q_norm is None:
        return ["plain"]
    if width == attn.q_proj.out_features:
        return ["clipped_row_norm" if clip else "row_norm"]
    return ["head_norm"] if width == attn.head_dim else []


def num_turned(attn: Any) -> int:
    """Return how many first values of a head are rotated."""
    rope = getattr(attn.config, "rope_parameters", None) or {}
    return int(attn.head_dim * rope.get("partial_rotary_factor", 1.0))


def attention_kind(attn: Any) -> str | None:
    """Return the kind of an attention over keys and values, if it is known."""
    return None if attn is None else attention(attn).kind


@_once
def latents(attn: Any) -> Known:
    """Return the rotation of a multi-head latent attention: "halves", "pairs" or "complex"."""
    names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "q_lora_rank")
    if not _has(attn, *names, "kv_a_proj_with_mqa", "kv_b_proj", "expand_kv", "scaling", "config"):
        return Known(None, "it keeps no latents")
    if not all(type(x) is nn.Linear for x in latent_linears(attn)):
        return Known(None, "its projections are not linear modules")
    source = None if is_replaced(attn) else fingerprints.latents_by_source(attn)
    in_pairs = getattr(attn.config, "rope_interleave", None)
    kinds = ["complex", "halves"] if in_pairs is None else ["pairs" if in_pairs else "halves"]
    return _found(source, kinds, lambda kind: trials.keeps_latents(attn, kind, _is_first(attn)))


def rotation_of_latents(attn: Any) -> str | None:
    """Return the rotation of a multi-head latent attention; None if it is unknown."""
    return None if attn is None else latents(attn).kind


@_once
def expansion(attn: Any) -> Known:
    """Return the kind of the expansion of latents to keys and values of all heads."""
    is_source = fingerprints.expands_by_source(attn) and not has_another_forward(attn)
    source = "expansion" if is_source else None
    return _found(source, ["expansion"], lambda _: trials.expands_latents(attn))


def latent_linears(attn: Any) -> list[Any]:
    """Return all projections of a multi-head latent attention, those of queries first."""
    queries = [attn.q_proj] if attn.q_lora_rank is None else [attn.q_a_proj, attn.q_b_proj]
    return [*queries, attn.kv_a_proj_with_mqa, attn.kv_b_proj, attn.o_proj]


@_once
def delta_net(attn: Any, new_state: Callable[[], Any]) -> Known:
    """Return the kind of a Gated DeltaNet: a value of `fingerprints.DELTA_NET`.

    Args:
        attn: The module.
        new_state: Factory of the state of a request without tokens.
    """
    names = ("num_v_heads", "num_k_heads", "head_k_dim", "head_v_dim", "A_log", "dt_bias", "norm")
    conv = getattr(attn, "conv1d", None)
    if not _has(attn, *names) or type(conv) is not nn.Conv1d or conv.bias is not None:
        return Known(None, "it is no Gated DeltaNet")
    if not all(type(x) is nn.Linear and x.bias is None for x in delta_linears(attn)):
        return Known(None, "its projections are not linear modules without a bias")
    kind = "grouped" if hasattr(attn, "in_proj_qkvz") else "split"
    source = None if is_replaced(attn) else fingerprints.delta_net_by_source(attn)
    return _found(source, [kind], lambda kind: trials.is_delta_net(attn, kind, new_state))


def delta_linears(attn: Any) -> list[Any]:
    """Return all projections of a Gated DeltaNet, that of the output last."""
    names = ("qkvz", "ba") if hasattr(attn, "in_proj_qkvz") else ("qkv", "z", "b", "a")
    found = [getattr(attn, f"in_proj_{name}", None) for name in names]
    return [*found, getattr(attn, "out_proj", None)]


# -- MLPs, experts and routers


def _is_silu(act: Any) -> bool:
    x = torch.linspace(-8, 8, 33, dtype=torch.float32)
    found = act(x) if isinstance(act, nn.Module) else None
    return isinstance(found, Tensor) and torch.equal(found, F.silu(x))


@_once
def mlp(module: Any) -> Known:
    """Return the kind of a dense layer or of shared experts: the usual gated MLP."""
    if not _linears(module, ("gate_proj", "up_proj", "down_proj")):
        return Known(None, "it is no gated MLP of linear modules without a bias")
    is_source = fingerprints.is_swiglu_by_source(module) and _is_silu(module.act_fn)
    source = "swiglu" if is_source and not is_replaced(module) else None
    return _found(source, ["swiglu"], lambda _: trials.mlp(module))


def is_swiglu(module: Any) -> bool:
    """Return True if a module is the usual gated MLP."""
    return module is not None and mlp(module).kind is not None


@_once
def experts(module: Any) -> Known:
    """Return the kind of routed experts: a key of `formulas.GATES`."""
    kind = "swiglu" if module.is_concatenated else "clamped"
    if not module.has_gate or getattr(module, "has_post_expert_norm", False):
        return Known(None, "they have no gate, or a norm behind them")
    gate = type(module)._apply_gate
    default = gate.__module__ == "transformers.integrations.moe"
    is_default = default and _is_silu(getattr(module, "act_fn", None))
    is_source = is_default if kind == "swiglu" else fingerprints.is_clamped_by_source(module)
    is_source = is_source and type(module).__module__.startswith("transformers.")
    source = kind if is_source and not is_replaced(module) else None
    return _found(source, [kind], partial(trials.experts, module))


@_once
def router(module: Any) -> Known:
    """Return the kind of a router: a value of `fingerprints.ROUTER`."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not hasattr(module, "top_k"):
        return Known(None, "it has no weight with a row per expert")
    if hasattr(module, "e_score_correction_bias"):
        kinds = ["sigmoid"]
    elif hasattr(module, "router_jitter_noise"):
        kinds = ["sparse_mixer"]
    elif hasattr(module, "topk_method"):
        kinds = ["softmax_fp32"]
    elif getattr(module, "bias", None) is not None:
        kinds = ["chosen"]
    else:
        kinds = ["wide", *(["flag"] if hasattr(module, "norm_topk_prob") else []), "chosen"]
    source = None if is_replaced(module) else fingerprints.router_by_source(module)
    return _found(source, kinds, partial(trials.router, module))


def router_kind(module: Any) -> str | None:
    """Return the kind of a router, if it is known."""
    return router(module).kind


# -- the glue between the parts


@_once
def layer(module: Any, attn: nn.Module | None, block: nn.Module | None) -> Known:
    """Return the kind of a layer's glue: "plain", or "scaled" if each added term is multiplied.

    Args:
        module: The layer.
        attn: Module that sees other tokens.
        block: Block of its experts; None if that is its `mlp`.
    """
    block = getattr(module, "mlp", None) if block is None else block
    has_norms = _has(module, "input_layernorm", "post_attention_layernorm")
    if attn is None or block is None or not has_norms:
        return Known(None, "it has no attention, no MLP, or other norms than two")
    kinds = ["plain", *(["scaled"] if hasattr(module, "residual_multiplier") else [])]
    source = fingerprints.by_source(fingerprints.LAYER_GLUE, module)
    source = None if has_another_forward(module) else source
    return _found(
        source, kinds, lambda kind: glue_trials.layer(module, kind, attn, block, _is_first(module))
    )


class Shared(NamedTuple):
    """Experts that every token uses, and the gate whose sigmoid scales them."""

    experts: nn.Module | None
    gate: nn.Module | None


def shared_in(block: Any) -> Shared:
    """Return the shared experts of a block."""
    found = getattr(block, "shared_experts", None) or getattr(block, "shared_expert", None)
    return Shared(found, getattr(block, "shared_expert_gate", None))


@_once
def block(module: Any, router: nn.Module | None, experts: nn.Module) -> Known:
    """Return the kind of the glue of a block of experts: "plain", "shared" or "gated_shared".

    Args:
        module: The block.
        router: Module that chooses experts.
        experts: The routed experts.
    """
    if router is None:
        return Known(None, "it has no router")
    shared, gate = shared_in(module)
    kind = "plain" if shared is None else "shared" if gate is None else "gated_shared"
    source = fingerprints.by_source(fingerprints.BLOCK_GLUE, module)
    source = None if has_another_forward(module) else source
    return _found(
        source, [kind], lambda _: glue_trials.block(module, router, experts, shared, gate)
    )
