"""The driver with our CPU kernels: a layer's parts where they are known, the fast driver's else.

A part that is not in the tables of `known`, or whose shape the kernels are not made for, stays
with torch. Results round where the modules round and differ from theirs only by the order of
fp32 sums.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qllm.kernels import cpu
from qllm.models.attention import Step
from qllm.models.discover import LayerParts, fingerprint
from qllm.models.fast import FastDriver, Rope, Routed
from qllm.models.known import ROUTER, attention_kind, is_norm


def is_usable(tensor: Tensor) -> bool:
    """Whether the kernels can read a weight."""
    in_memory = tensor.device.type == "cpu" and tensor.dtype is torch.bfloat16
    return in_memory and tensor.shape[-1] % 2 == 0 and cpu.MISSING is None


def _is_norm(module: Any) -> bool:
    return is_norm(module) and is_usable(module.weight)


def swiglu(experts: Any) -> bool:
    """Whether experts are gate, up and down of the usual kind, without biases."""
    return (
        not experts.is_transposed
        and not experts.has_bias
        and type(experts)._apply_gate.__module__ == "transformers.integrations.moe"
        and type(getattr(experts, "act_fn", None)).__name__ in {"SiLUActivation", "SiLU"}
        and is_usable(experts.gate_up_proj)
        and is_usable(experts.down_proj)
    )


class NativeLayer(NamedTuple):
    """A layer of which all but the experts is ours (kernels/cpu/sweep.h)."""

    attention: cpu.Attention
    out: cpu.Matrix
    router: cpu.Router
    number: int
    """Of the layer."""
    window: int | None
    scale: float
    """Of what is added to the residual stream."""
    kv_heads: int
    head_dim: int
    top_k: int
    weights: torch.dtype
    """Of the experts' outputs, as the router gives them."""

    @property
    def shapes(self) -> tuple[int, int, int, torch.dtype]:
        """What neighbours must share to run in one call."""
        return self[-4:]


class NativeDriver(FastDriver):
    """A layer of known glue; each part with our kernels if it can be."""

    def __init__(self, parts: LayerParts, arena: cpu.Arena) -> None:
        super().__init__(parts)
        self._arena = arena
        self._attention: cpu.Attention | None = None
        self._router_kernel: cpu.Router | None = None
        self.covered: tuple[nn.Module, ...] = ()
        """Linear modules and routers that are never called."""
        attn: Any = parts.self_attn
        if self._knows_attention(attn):
            self._make_attention(attn)
        if parts.router is not None and self._knows_router(parts.router):
            self._make_router(parts.router)

    # -- what is known

    def _knows_attention(self, attn: Any) -> bool:
        kind = attention_kind(attn)
        return (
            kind is not None
            and attn.head_dim in cpu.HEAD_DIMS
            and attn.num_key_value_groups <= cpu.MAX_SHARE
            and all(is_usable(getattr(attn, f"{x}_proj").weight) for x in "qkvo")
            and _is_norm(self._norm)
            and (kind == "plain" or (_is_norm(attn.q_norm) and _is_norm(attn.k_norm)))
        )

    def _knows_router(self, router: Any) -> bool:
        return (
            fingerprint(router) in ROUTER
            and is_usable(router.weight)
            and router.top_k <= cpu.MAX_TOP_K
            and _is_norm(self._post_norm)
        )

    def _make_attention(self, attn: Any) -> None:
        qkv = [attn.q_proj, attn.k_proj, attn.v_proj]
        norm: Any = self._norm
        qk_norm = None
        if attention_kind(attn) != "plain":
            eps = attn.q_norm.variance_epsilon
            qk_norm = (attn.q_norm.weight.detach(), attn.k_norm.weight.detach(), eps)
        self._kv_heads = attn.k_proj.out_features // attn.head_dim
        self._head_dim = attn.head_dim
        self._attention = cpu.Attention(
            cpu.Matrix([x.weight.detach() for x in qkv], [x.bias for x in qkv], self._arena),
            norm.weight.detach(),
            norm.variance_epsilon,
            num_heads=attn.q_proj.out_features // attn.head_dim,
            num_kv_heads=self._kv_heads,
            head_dim=attn.head_dim,
            scale=attn.scaling,
            qk_norm=qk_norm,
        )
        self._out = cpu.Matrix([attn.o_proj.weight.detach()], [attn.o_proj.bias], self._arena)
        self._index = attn.layer_idx
        self.covered += (*qkv, attn.o_proj)

    def _make_router(self, router: Any) -> None:
        wide = ROUTER[fingerprint(router)] == "wide"
        norm: Any = self._post_norm
        self._router_kernel = cpu.Router(
            router.weight.detach(),
            norm.weight.detach(),
            norm.variance_epsilon,
            top_k=router.top_k,
            renormalise=wide or router.norm_topk_prob,
            wide=wide,
        )
        self.covered += (router,)

    @property
    def names(self) -> Iterator[str]:
        """The parts that run with our kernels."""
        if self._attention is not None:
            yield "attention"
        if self._router_kernel is not None:
            yield "router"

    @property
    def whole(self) -> NativeLayer | None:
        """What one call over several layers needs of this one; None if a part is not ours."""
        attention, router = self._attention, self._router_kernel
        if attention is None or router is None or self._parts.shared is not None:
            return None
        return NativeLayer(
            attention,
            self._out,
            router,
            self._index,
            self._parts.window,
            1.0 if self._scale is None else self._scale,
            self._kv_heads,
            self._head_dim,
            router.top_k,
            router.dtype,
        )

    # -- what runs

    def attend(self, x_TD: Tensor, rope: Rope, step: Step) -> Tensor:
        if self._attention is None:
            return super().attend(x_TD, rope, step)
        kernel, index, window = self._attention, self._index, self._parts.window
        spans = step.addresses(self._kv_heads, self._head_dim, x_TD)
        step.reach()
        at, num = spans.address, len(step.spans)
        q = kernel.enter(x_TD, *rope, index, at, num)
        whole = step.num_attended == step.num_tokens
        out = kernel.attend(q, index, window, at, num, whole)
        return self._add(x_TD, self._out.linear(out))

    def route(self, x_TD: Tensor, mid_TD: Tensor) -> Routed:
        if self._router_kernel is None:
            return super().route(x_TD, mid_TD)
        x, ids_TK, weights_TK = self._router_kernel(mid_TD)
        return Routed(x, ids_TK, weights_TK, self._shared(x))
