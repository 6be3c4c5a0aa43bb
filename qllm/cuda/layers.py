"""The layers of a model on a device: attention, norms and routing without the host."""

from typing import Any

import torch
from torch import Tensor, nn

from qllm.cuda.experts import DeviceExperts, packed_weights
from qllm.cuda.known import KnownLayer, is_known
from qllm.cuda.latents import Latents
from qllm.cuda.norms import Norms
from qllm.cuda.step import PagedStep
from qllm.errors import ModelError
from qllm.kernels.routing import expert_weights
from qllm.kernels.select import Kernels
from qllm.models.discover import LayerParts, ModelParts, base_model
from qllm.models.weights.quantised_experts import quantised_in
from qllm.runner.layers.drivers import LayerDriver, Rope


class DeviceLayers:
    """The modules and kernels that the CUDA backend computes with.

    Args:
        model: The model, on the device.
        parts: Parts of the model.
        drivers: Drivers of layers that are not known.
        kernels: Kernels of the device.

    Raises:
        ModelError: Experts or latents of a kind without a kernel.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: ModelParts,
        drivers: tuple[LayerDriver, ...],
        kernels: Kernels,
    ) -> None:
        self._kernels = kernels
        self._device = parts.lm_head.weight.device
        self._hits: dict[int, Tensor] = {}
        """Number of expert reads by the bytes of an expert, each as one number on the device."""
        self.experts = tuple(self._experts(layer) for layer in parts.layers)
        self._latents = Latents(parts.attentions)
        self.norms = Norms(model, kernels)
        config: Any = base_model(model).config
        num = config.num_attention_heads
        groups = getattr(config, "num_key_value_heads", None) or num
        self.heads_per_group = max(1, num if self._latents.modules else num // groups)
        """Query heads per KV head. With MLA, all query heads share the latents."""
        every = zip(drivers, parts.layers, self.experts, strict=True)
        self.drivers = tuple(
            KnownLayer(layer, experts, kernels) if is_known(layer) else driver
            for driver, layer, experts in every
        )
        self._known = [driver for driver in self.drivers if isinstance(driver, KnownLayer)]

    def _experts(self, layer: LayerParts) -> DeviceExperts | None:
        if layer.experts is None:
            return None
        found = expert_weights(layer.experts)
        held = quantised_in(layer.experts)
        if held is not None and not isinstance(found, str):
            found = packed_weights(found, held)
        if isinstance(found, str):
            raise ModelError(f"layer {layer.index}: {found}; no device kernel is made for it")
        size = found.bytes_per_expert
        if size not in self._hits:  # int32 would overflow after hours of decoding
            self._hits[size] = torch.zeros(1, dtype=torch.int64, device=self._device)
        return DeviceExperts(found, self._kernels, self._hits[size])

    def enter(self) -> None:
        """Let the model's modules compute with the kernels."""
        self.norms.enter()
        self._latents.enter()
        for layer in self._known:
            layer.enter()

    def leave(self) -> None:
        """Restore the modules."""
        self.norms.leave()
        self._latents.leave()
        for layer in self._known:
            layer.leave()

    def run(
        self, index: int, x_TD: Tensor, rope: Rope, step: PagedStep, num_tokens: Tensor
    ) -> Tensor:
        """Run a whole layer, for capture. No host decision depends on a device value.

        Args:
            index: Index of the layer.
            x_TD: Input of the layer.
            rope: Cos and sin of the tokens' positions, each [1, T, H].
            step: KV that the tokens attend to.
            num_tokens: Number of real tokens in x_TD, as one number on the device.
        """
        driver, experts = self.drivers[index], self.experts[index]
        if isinstance(driver, KnownLayer):
            return driver.run(x_TD, rope, step, num_tokens)
        mid = driver.attend(x_TD, rope, step)  # type: ignore[arg-type]
        if experts is None:
            return driver.dense(x_TD, mid)
        routed = driver.route(x_TD, mid)
        out = experts.run(routed.x_TD, routed.ids_TK, routed.weights_TK, num_tokens)
        return driver.combine(x_TD, mid, routed, out.to(routed.x_TD.dtype))

    @property
    def expert_bytes(self) -> int:
        """Wait for the device; return bytes of experts read, each once per layer of a program."""
        return sum(int(hits) * size for size, hits in self._hits.items())

    def forget_bytes(self) -> None:
        """Reset the counts of experts to zero."""
        for hits in self._hits.values():
            hits.zero_()

    @property
    def names(self) -> dict[str, str]:
        """Return the names of the kernels in use, for results."""
        name = self._kernels.name
        rotating, chooses = len(self._known), sum(layer.chooses for layer in self._known)
        return {
            "experts": f"{name} fused",
            "router": f"torch, then {name} in stages ({chooses} of {len(self.drivers)} layers)",
            "linear": "torch",
            "head": "torch",
            "attention": f"{name} paged" + ", over latents" * bool(self._latents.modules),
            "rope": f"{name} with the write of KV ({rotating} of {len(self.drivers)} layers)",
            "norm": f"{name} ({len(self.norms.modules)} modules)",
            "sampling": f"{name}, on the host for penalties, biases and logprobs",
        }
