"""A layer of known parts in few launches: 12 for a decode step of Qwen3-MoE.

    norm | q, k, v | head norms, rotation, write | attend | join | output | residual, norm
    router | choose and sort | up | down | combine, shared, residual

and 15 for DeepSeek-V3's, whose attention is over latents:

    norm | q and latents | norms, rotation, write | q | into latents | attend, rotation | join
    out of latents | output | residual, norm
    router | choose and sort | up | down, of shared experts too | combine, residual

A stage runs a whole layer. When ops run one by one, this module runs `attend`, and the model's own
modules run the rest.
"""

from typing import Any

from torch import Tensor

from qllm.cuda.attention import Attention, is_known_attention, known_attention
from qllm.cuda.experts import DeviceExperts, known_router
from qllm.cuda.norms import WIDE
from qllm.cuda.step import PagedStep
from qllm.cuda.together import Together
from qllm.kernels.routing import SharedWeights, Sum
from qllm.kernels.select import Kernels
from qllm.models.discover import LayerParts
from qllm.models.heard import is_heard
from qllm.models.parts.known import is_swiglu, norm_kind
from qllm.runner.layers.drivers import FastDriver, Rope


def is_known(parts: LayerParts) -> bool:
    """Return True if glue and attention are known, and no hook is on the attention."""
    attn = parts.self_attn
    return (
        parts.input_layernorm is not None
        and attn is not None
        and is_known_attention(attn)
        and not is_heard(attn)
    )


class KnownLayer(FastDriver):
    """A layer of known glue and known attention.

    Args:
        parts: Parts for which `is_known` is true.
        experts: Experts of the layer.
        kernels: Kernels of the device.
    """

    def __init__(self, parts: LayerParts, experts: DeviceExperts | None, kernels: Kernels) -> None:
        super().__init__(parts)
        attn: Any = parts.self_attn
        self._kernels, self._experts = kernels, experts
        self._attention: Attention = known_attention(attn, parts.window)
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
        """True if a kernel chooses experts and their routing weights from the router's logits."""
        return self._known_router is not None

    def enter(self) -> None:
        """Join the weights that share an input into one tensor."""
        self._attention.enter()
        if self._gate_up is not None:
            self._gate_up.enter()

    def leave(self) -> None:
        """Give the model's modules their own weights again."""
        self._attention.leave()
        if self._gate_up is not None:
            self._gate_up.leave()

    def attend(self, x_TD: Tensor, rope: Rope, step: Any) -> Tensor:
        return self._add(x_TD, self._attention(self._norm(x_TD), rope, step))

    def run(self, x_TD: Tensor, rope: Rope, step: PagedStep, num_tokens: Tensor) -> Tensor:
        """Run the whole layer, for capture.

        Args:
            x_TD: Input of the layer.
            rope: Cos and sin of the tokens' positions, each [1, T, H].
            step: KV that the tokens attend to.
            num_tokens: Number of real tokens in x_TD, as one number on the device.
        """
        attended = self._attention(self._norm(x_TD), rope, step)
        mid, x, wide_x = self._add_and_norm(x_TD, attended)
        if self._experts is None:
            return self._add(mid, self._mlp_of(x) if self._swiglu is not None else self._mlp(x))
        router, weights = self._known_router, self._shared_weights()
        shared = gate = None
        if self._parts.shared is not None and weights is None:
            shared = self._mlp_of(x) if self._swiglu is not None else self._parts.shared(x)
        if self._parts.shared_gate is not None:
            gate = self._parts.shared_gate(x)
        add = Sum(mid, self._scale, shared, gate)
        if router is not None:
            logits_TE = router.logits(wide_x if router.is_wide else x)
            return self._experts.choose_and_run(x, logits_TE, router, num_tokens, add, weights)
        _, weights_TK, ids_TK = self._router(x)
        return self._experts.run(x, ids_TK, weights_TK, num_tokens, add)

    def _shared_weights(self) -> SharedWeights | None:
        """Return the shared experts, which every token uses, if they can run with the others.

        Shared experts with a gate are far wider. So more partial results would be rounded.
        """
        if self._gate_up is None or self._known_router is None or self._parts.shared_gate:
            return None
        assert self._experts is not None
        together = self._gate_up.weight
        if together is None:
            return None
        weights = SharedWeights(together, self._swiglu.down_proj.weight)
        return weights if self._experts.can_share(weights) else None

    def _add_and_norm(self, x_TD: Tensor, attended_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sum, its norm, and also the norm in fp32 if the router computes in fp32."""
        norm: Any = self._post_norm
        wide = WIDE.get(str(norm_kind(norm)))
        is_wide = self._known_router is not None and self._known_router.is_wide
        if wide is None or is_heard(norm):
            mid = self._add(x_TD, attended_TD)
            x = norm(mid)
            return mid, x, x.float() if is_wide else x
        mid, x, wide_x = self._kernels.add_rms_norm(
            x_TD, attended_TD, self._scale, norm.weight, norm.variance_epsilon, wide, is_wide
        )
        return mid, x, wide_x

    def _mlp_of(self, x_TD: Tensor) -> Tensor:
        assert self._gate_up is not None
        out: Tensor = self._swiglu.down_proj(self._kernels.silu_mul(self._gate_up.whole(x_TD)))
        return out
