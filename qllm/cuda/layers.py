"""The layers of a model on a device: attention, norms and routing without the host."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from qllm.cuda.experts import DeviceExperts, DeviceWork, packed_weights
from qllm.cuda.known import KnownLayer, is_known
from qllm.cuda.latents import Latents
from qllm.cuda.norms import Norms
from qllm.cuda.pages import Pages, Spare
from qllm.cuda.ranked import RankExperts, RankHead, RankLayer, RankSteps
from qllm.cuda.shares import RankPages, Ranks, owner_bytes
from qllm.cuda.slots import DeviceResidency, ExpertRoom, HostLayer, SlotExperts
from qllm.cuda.step import PagedStep
from qllm.errors import ConfigError, ModelError
from qllm.kernels.routing import expert_weights
from qllm.kernels.select import Kernels
from qllm.kernels.tiles import Tiles
from qllm.models.discover import LayerParts, ModelParts, base_model
from qllm.models.weights.on_host import on_host
from qllm.models.weights.quantised_experts import quantised_in
from qllm.runner.layers.drivers import LayerDriver, Rope


class DeviceLayers:
    """The modules and kernels that the CUDA backend computes with.

    Args:
        model: The model, on the device.
        parts: Parts of the model.
        drivers: Drivers of layers that are not known.
        kernels: Kernels of the device.
        room: Room for experts that come and go; None if all experts are on the device.
        ranks: Ranks that compute the layers, and the split of the model; None is this device.

    Raises:
        ConfigError: The room is too small for the experts of one token in one layer.
        ModelError: Experts or latents of a kind without a kernel.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: ModelParts,
        drivers: tuple[LayerDriver, ...],
        kernels: Kernels,
        room: ExpertRoom | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self._kernels, self.ranks = kernels, ranks
        self._parts, self._device = parts, parts.lm_head.weight.device
        self._hits: dict[int, Tensor] = {}
        """Number of expert reads by the bytes of an expert, each as one number on the device."""
        self.experts = tuple(self._experts(layer) for layer in parts.layers)
        self.residency = self._residency(parts, room)
        """Slots for experts; None if all experts are on the device."""
        self.slots = self._slots(parts)
        """Experts of each layer that are in slots."""
        self._latents = Latents(parts.attentions)
        self.norms = Norms(model, kernels)
        config: Any = base_model(model).config
        num = config.num_attention_heads
        groups = getattr(config, "num_key_value_heads", None) or num
        self.heads_per_group = max(1, num if self._latents.modules else num // groups)
        """Query heads per KV head. With MLA, all query heads share the latents."""
        self.rank_head = None if ranks is None else RankHead(parts, ranks)
        every = zip(drivers, parts.layers, self.experts, strict=True)
        self.drivers = tuple(self._driver(*given) for given in every)
        self._known = [driver for driver in self.drivers if isinstance(driver, KnownLayer)]

    def _driver(
        self, driver: LayerDriver, layer: LayerParts, experts: DeviceExperts | None
    ) -> LayerDriver:
        if self.ranks is not None:
            return RankLayer(layer, experts, self._kernels, self.ranks)
        return KnownLayer(layer, experts, self._kernels) if is_known(layer) else driver

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
        hits = self._hits[size]
        if self.ranks is None:
            return DeviceExperts(found, self._kernels, hits)
        return RankExperts(found, self._kernels, hits, layer.index, self.ranks)

    @property
    def head(self) -> Callable[[Tensor], Tensor]:
        """The output head, from normed rows to logits."""
        return self.rank_head or self._parts.lm_head

    @property
    def rank_bytes(self) -> list[int]:
        """Bytes of each rank's weights; empty without ranks."""
        if self.ranks is None:
            return []
        owner, *others = self.ranks.weight_bytes
        return [owner + owner_bytes(self._parts), *others]

    def pages(self, num_pages: int, page_size: int, spare: Spare | None) -> Pages:
        """Return the memory of KV.

        Args:
            num_pages: Number of pages.
            page_size: Tokens of a page.
            spare: Room for KV outside of the pages; None is no room.
        """
        sizes = self._parts.num_kv_layers, num_pages, page_size
        if self.ranks is None:
            return Pages(*sizes, self._kernels, spare)
        if spare is not None:
            raise ConfigError("ranks of devices have no KV outside of their pages yet; leave spare")
        return RankPages(*sizes, self._kernels, self.ranks)

    def step(self, pages: Pages, tables_RP: Tensor, tiles: Tiles, slots_T: Tensor) -> Any:
        """Return the KV of an ATTN op: see `PagedStep`."""
        given = self._kernels, tables_RP, tiles, slots_T
        if isinstance(pages, RankPages):
            return RankSteps(pages, *given)
        return PagedStep(pages, *given)

    def _residency(self, parts: ModelParts, room: ExpertRoom | None) -> DeviceResidency | None:
        modules = {f"layer {layer.index}": layer.experts for layer in parts.layers}
        made = None
        if room is not None:
            layers = [HostLayer(name, one) for name, one in modules.items() if one is not None]
            top_k = parts.shape.experts_per_token
            made = DeviceResidency(layers, room, top_k, self._device) if layers else None
        if made is None or made.has_all:
            for name, module in modules.items():
                if on_host(module) is not None:
                    raise ModelError(
                        f"the experts of {name} are in the host's memory, and this runner needs "
                        "all experts on the device; use the max_expert_bytes of the load"
                    )
            return None
        return made

    def _slots(self, parts: ModelParts) -> dict[int, SlotExperts]:
        found: dict[int, SlotExperts] = {}
        for layer, experts in zip(parts.layers, self.experts, strict=True):
            if self.residency is not None and experts is not None:
                module: Any = layer.experts
                turned = quantised_in(module) is None and module.is_transposed
                found[layer.index] = SlotExperts(experts, self.residency, len(found), turned=turned)
        return found

    def begin(self, layer: int, ids_TK: Tensor, num_ranges: int) -> DeviceWork:
        """Return the EXPERTS op of a layer as work.

        Args:
            layer: Index of the layer.
            ids_TK: Experts of each token.
            num_ranges: Number of ranges between which the work may stop.
        """
        if (slots := self.slots.get(layer)) is not None:
            return slots.begin(ids_TK, num_ranges)
        experts = self.experts[layer]
        assert experts is not None
        return experts.begin(ids_TK, num_ranges)

    def enter(self) -> None:
        """Let the model's modules compute with the kernels.

        Raises:
            DeviceError: The host has too little memory that can be page-locked.
        """
        if self.residency is not None:
            self.residency.enter()
            for slots in self.slots.values():
                slots.enter()
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
        if self.residency is not None:
            self.residency.leave()

    def run(self, index: int, x_TD: Tensor, rope: Rope, step: Any, num_tokens: Tensor) -> Tensor:
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
        mid = driver.attend(x_TD, rope, step)
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
        fused, slots = f"{name} fused", self.residency
        if slots is not None:
            fused += f", {slots.num_slots} of {slots.num_experts} experts at a time"
        own = {} if self.ranks is None else {"ranks": self.ranks.gathers.kind}
        return own | {
            "experts": fused,
            "router": f"torch, then {name} in stages ({chooses} of {len(self.drivers)} layers)",
            "linear": "torch",
            "head": "torch",
            "attention": f"{name} paged" + ", over latents" * bool(self._latents.modules),
            "rope": f"{name} with the write of KV ({rotating} of {len(self.drivers)} layers)",
            "norm": f"{name} ({len(self.norms.modules)} modules)",
            "sampling": f"{name}, on the host for penalties, biases and logprobs",
        }
