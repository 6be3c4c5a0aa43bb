"""A layer of which every part is known, as few launches: 12 for a decode step of Qwen3-MoE.

    norm | q, k, v | head norms, rotation, write | attend | join | output | residual, norm
    router | choose and sort | up | down | combine, shared, residual

The weights of projections that take the same input lie together, so one product computes them all;
the modules keep views of them. A stage runs a whole layer; an op of a program that runs one by one
runs `attend` here, and the rest by the model's own modules.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from qllm.cuda.experts import DeviceExperts, known_router
from qllm.cuda.step import PagedStep
from qllm.kernels.routing import HeadNorms, Sum
from qllm.kernels.select import Kernels
from qllm.models.discover import LayerParts
from qllm.models.fingerprints import attention_kind, is_norm, is_swiglu
from qllm.models.heard import is_heard
from qllm.runner.layers.drivers import FastDriver, Rope

ROTATING = {"plain", "head_norm", "row_norm"}
"""Kinds of attention whose rotation a kernel does with the write of KV."""


class Together:
    """Projections of one input as one product.

    Args:
        linears: All with a bias, or all without; otherwise each is a product of its own.
    """

    def __init__(self, linears: Sequence[Any]) -> None:
        self._linears = linears
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None
        self._sizes = [linear.out_features for linear in linears]
        biases = [linear.bias is not None for linear in linears]
        kinds = {(linear.weight.dtype, linear.weight.device) for linear in linears}
        self._can = len(kinds) == 1 and all(biases) == any(biases)

    def enter(self) -> None:
        """Lay the weights together; the modules compute with views of them, as before."""
        if not self._can or self._weight is not None:
            return
        self._weight = _laid([linear.weight for linear in self._linears])
        if self._linears[0].bias is not None:
            self._bias = _laid([linear.bias for linear in self._linears])

    def leave(self) -> None:
        """Give the modules tensors of their own again."""
        if self._weight is None:
            return
        for linear in self._linears:
            for parameter in linear.parameters(recurse=False):
                parameter.data = parameter.data.clone()
        self._weight = self._bias = None

    def __call__(self, x_TD: Tensor) -> list[Tensor]:
        """What each gives, [T, F]; rows of one tensor where they were one product."""
        if self._weight is None:
            return [linear(x_TD) for linear in self._linears]
        return list(torch.split(self.whole(x_TD), self._sizes, 1))

    def whole(self, x_TD: Tensor) -> Tensor:
        """What all give, beside each other."""
        if self._weight is None:
            return torch.cat([linear(x_TD) for linear in self._linears], 1)
        return functional.linear(x_TD, self._weight, self._bias)


def _laid(parameters: list[nn.Parameter]) -> Tensor:
    whole = torch.cat([parameter.detach() for parameter in parameters])
    views = torch.split(whole, [len(parameter) for parameter in parameters])
    for parameter, view in zip(parameters, views, strict=True):
        parameter.data = view
    return whole


def is_known(parts: LayerParts) -> bool:
    """Whether a layer's glue and attention are known, and no hook listens to the attention."""
    attn = parts.self_attn
    return (
        parts.input_layernorm is not None
        and attn is not None
        and attention_kind(attn) in ROTATING
        and not is_heard(attn)
    )


class KnownLayer(FastDriver):
    """A layer of known glue and known attention.

    Args:
        parts: See `is_known`.
        experts: Of the layer.
        kernels: The device's.
    """

    def __init__(self, parts: LayerParts, experts: DeviceExperts | None, kernels: Kernels) -> None:
        super().__init__(parts)
        attn: Any = parts.self_attn
        self._attn, self._kernels, self._experts = attn, kernels, experts
        self._kind = attention_kind(attn)
        self._qkv = Together([attn.q_proj, attn.k_proj, attn.v_proj])
        self._head_norms: HeadNorms | None = None
        if self._kind == "head_norm":
            q, k = attn.q_norm, attn.k_norm
            norms = q.weight.detach(), k.weight.detach()
            self._head_norms = HeadNorms(*norms, q.variance_epsilon, k.variance_epsilon)
        router = None if experts is None else known_router(parts.router)
        self._known_router = router
        mlp = parts.shared if experts is not None else parts.mlp
        is_plain = mlp is not None and is_swiglu(mlp) and not is_heard(mlp)
        self._swiglu: Any = mlp if is_plain else None
        self._gate_up = (
            None if self._swiglu is None else Together([mlp.gate_proj, mlp.up_proj])  # type: ignore[union-attr]
        )

    @property
    def chooses(self) -> bool:
        """Whether a kernel makes experts and weights of the router's logits."""
        return self._known_router is not None

    def enter(self) -> None:
        """Lay weights together."""
        self._qkv.enter()
        if self._gate_up is not None:
            self._gate_up.enter()

    def leave(self) -> None:
        """Give the model's modules their own weights again."""
        self._qkv.leave()
        if self._gate_up is not None:
            self._gate_up.leave()

    def attend(self, x_TD: Tensor, rope: Rope, step: Any) -> Tensor:
        return self._add(x_TD, self._attended(x_TD, rope, step))

    def _attended(self, x_TD: Tensor, rope: Rope, step: PagedStep) -> Tensor:
        attn, num = self._attn, x_TD.shape[0]
        q, k, v = self._qkv(self._norm(x_TD))
        if self._kind == "row_norm":
            q, k = attn.q_norm(q), attn.k_norm(k)
        width = attn.head_dim
        qkv = q.view(num, -1, width), k.view(num, -1, width), v.view(num, -1, width)
        window = self._parts.window
        out = step.attend_known(attn.layer_idx, qkv, rope, self._head_norms, attn.scaling, window)
        attended: Tensor = attn.o_proj(out.view(num, -1))
        return attended

    def run(self, x_TD: Tensor, rope: Rope, step: PagedStep, num_tokens: Tensor) -> Tensor:
        """The whole layer, for capture.

        Args:
            x_TD: Its input.
            rope: Cos and sin of the tokens' positions, each [1, T, H].
            step: What the tokens attend.
            num_tokens: Of x_TD, those that are real; one number on the device.
        """
        mid, x = self._add_and_norm(x_TD, self._attended(x_TD, rope, step))
        if self._experts is None:
            return self._add(mid, self._mlp_of(x) if self._swiglu is not None else self._mlp(x))
        shared = gate = None
        if self._parts.shared is not None:
            shared = self._mlp_of(x) if self._swiglu is not None else self._parts.shared(x)
        if self._parts.shared_gate is not None:
            gate = self._parts.shared_gate(x)
        add = Sum(mid, self._scale, shared, gate)
        if self._known_router is not None:
            return self._experts.choose_and_run(x, self._known_router, num_tokens, add)
        _, weights_TK, ids_TK = self._router(x)
        return self._experts.run(x, ids_TK, weights_TK, num_tokens, add)

    def _add_and_norm(self, x_TD: Tensor, attended_TD: Tensor) -> tuple[Tensor, Tensor]:
        norm: Any = self._post_norm
        if not is_norm(norm) or is_heard(norm):
            mid = self._add(x_TD, attended_TD)
            return mid, norm(mid)
        mid, x = self._kernels.add_rms_norm(
            x_TD, attended_TD, self._scale, norm.weight, norm.variance_epsilon
        )
        return mid, x

    def _mlp_of(self, x_TD: Tensor) -> Tensor:
        assert self._gate_up is not None
        out: Tensor = self._swiglu.down_proj(self._kernels.silu_mul(self._gate_up.whole(x_TD)))
        return out
