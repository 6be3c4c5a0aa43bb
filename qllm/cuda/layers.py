"""The layers of a model as a device runs them: who attends, norms and routes, without the host."""

from typing import Any

import torch
from torch import Tensor, nn

from qllm.cuda.experts import DeviceExperts
from qllm.cuda.latents import Latents
from qllm.cuda.norms import Norms
from qllm.cuda.step import PagedStep
from qllm.errors import ModelError
from qllm.kernels.routing import expert_weights
from qllm.kernels.select import Kernels
from qllm.models.discover import LayerParts, ModelParts, base_model
from qllm.models.fingerprints import attention_kind
from qllm.runner.layers.drivers import FastDriver, LayerDriver, Rope

ROTATING = {"plain", "head_norm", "row_norm"}
"""Kinds of attention whose rotation a kernel does with the write of KV."""


class RotatingDriver(FastDriver):
    """A layer whose attention rotates and writes in one launch; ten and more in its own module.

    Args:
        parts: A layer of known glue and known attention.
    """

    def __init__(self, parts: LayerParts) -> None:
        super().__init__(parts)
        self._attn: Any = parts.self_attn
        self._kind = attention_kind(self._attn)

    def attend(self, x_TD: Tensor, rope: Rope, step: Any) -> Tensor:
        attn, num = self._attn, x_TD.shape[0]
        width = attn.head_dim
        x = self._norm(x_TD)
        q, k, v = attn.q_proj(x), attn.k_proj(x), attn.v_proj(x)
        if self._kind == "row_norm":
            q, k = attn.q_norm(q), attn.k_norm(k)
        q, k, v = q.view(num, -1, width), k.view(num, -1, width), v.view(num, -1, width)
        if self._kind == "head_norm":
            q, k = attn.q_norm(q), attn.k_norm(k)
        step.rotate_and_write(attn.layer_idx, q, k, v, rope)
        q_1NTH = q.transpose(0, 1).unsqueeze(0)
        out = step.attend(attn, q_1NTH, attn.scaling, self._parts.window, None)
        return self._add(x_TD, attn.o_proj(out.view(num, -1)))


class DeviceLayers:
    """What the CUDA backend computes with.

    Args:
        model: On the device.
        parts: Of the model.
        drivers: What runs the layers that are not known.
        kernels: The device's.

    Raises:
        ModelError: Experts or latents of a kind that no kernel is made for.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: ModelParts,
        drivers: tuple[LayerDriver, ...],
        kernels: Kernels,
    ) -> None:
        self._kernels = kernels
        self._hits = torch.zeros(1, dtype=torch.int32, device=parts.lm_head.weight.device)
        self.experts = tuple(self._experts(layer) for layer in parts.layers)
        self._latents = Latents([layer.self_attn for layer in parts.layers])
        self.norms = Norms(model, kernels)
        config: Any = base_model(model).config
        num = config.num_attention_heads
        groups = getattr(config, "num_key_value_heads", None) or num
        self.heads_per_group = max(1, num if self._latents.modules else num // groups)
        """Query heads of a KV head; all of them share MLA's latents."""
        pairs = zip(drivers, parts.layers, strict=True)
        self.drivers = tuple(_driver(driver, layer) for driver, layer in pairs)

    def _experts(self, layer: LayerParts) -> DeviceExperts | None:
        if layer.experts is None:
            return None
        found = expert_weights(layer.experts)
        if isinstance(found, str):
            raise ModelError(f"layer {layer.index}: {found}; no device kernel is made for it")
        return DeviceExperts(found, self._kernels, self._hits)

    def enter(self) -> None:
        """Let the model's modules compute with the kernels."""
        self.norms.enter()
        self._latents.enter()

    def leave(self) -> None:
        """Give the modules back what they had."""
        self.norms.leave()
        self._latents.leave()

    def run(
        self, index: int, x_TD: Tensor, rope: Rope, step: PagedStep, num_tokens: Tensor
    ) -> Tensor:
        """A whole layer, for capture: no host decision depends on a device value.

        Args:
            index: Of the layer.
            x_TD: Its input.
            rope: Cos and sin of the tokens' positions, each [1, T, H].
            step: What the tokens attend.
            num_tokens: Of x_TD, those that are real; one number on the device.
        """
        driver, experts = self.drivers[index], self.experts[index]
        mid = driver.attend(x_TD, rope, step)  # type: ignore[arg-type]
        if experts is None:
            return driver.dense(x_TD, mid)
        routed = driver.route(x_TD, mid)
        out = experts.run(routed.x_TD, routed.ids_TK, routed.weights_TK, num_tokens)
        return driver.combine(x_TD, mid, routed, out.to(routed.x_TD.dtype))

    @property
    def expert_bytes(self) -> int:
        """Weights read so far: each expert once per layer of a program. Waits for the device."""
        first = next((e for e in self.experts if e is not None), None)
        return 0 if first is None else int(self._hits) * first.weights.bytes_per_expert

    def forget_bytes(self) -> None:
        """Nothing was read so far."""
        self._hits.zero_()

    @property
    def names(self) -> dict[str, str]:
        """What computes what, for results."""
        name = self._kernels.name
        rotating = sum(isinstance(driver, RotatingDriver) for driver in self.drivers)
        return {
            "experts": f"{name} fused",
            "router": "torch",
            "linear": "torch",
            "head": "torch",
            "attention": f"{name} paged" + ", over latents" * bool(self._latents.modules),
            "rope": f"{name} with the write of KV ({rotating} of {len(self.drivers)} layers)",
            "norm": f"{name} ({len(self.norms.modules)} modules)",
            "sampling": f"{name}, on the host for penalties, biases and logprobs",
        }


def _driver(driver: LayerDriver, parts: LayerParts) -> LayerDriver:
    is_known = parts.input_layernorm is not None and attention_kind(parts.self_attn) in ROTATING
    return RotatingDriver(parts) if is_known else driver
