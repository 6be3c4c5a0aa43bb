"""The parts of a model in memory, and how many of its experts fit, before the experts are loaded.

memory | process and weights outside of experts | KV 1/4 of the rest, or as set | experts |
"""

from fractions import Fraction
from typing import Any, NamedTuple

from qllm.config import EngineConfig
from qllm.engine.memory import Claim, free_for
from qllm.models.discover import discover
from qllm.models.loader import load
from qllm.models.weights.expert_file import ExpertLayer
from qllm.models.weights.experts_counted import ExpertsCounted
from qllm.models.weights.quantised_linears import weight_bytes
from qllm.runner.layers.trial import kv_token_bytes

FOR_KV = Fraction(1, 4)
"""Part of the memory beside the weights outside of experts that KV gets, if it has no size."""


class Fit(NamedTuple):
    """The bytes of a model, and of the memory that it may have."""

    layers: tuple[ExpertLayer, ...]
    """Layers with experts, as a file of experts has them."""
    top_k: int
    """Experts per token."""
    rest_bytes: int
    """Bytes of the weights outside of experts."""
    token_bytes: int
    """Bytes of a token's KV."""
    free_bytes: int
    """Bytes of memory beside the process and the weights outside of experts."""
    kv_bytes: int
    """Bytes of them for KV."""
    given_bytes: int | None
    """The setting `max_expert_bytes`."""
    packing_bytes: int
    """Least bytes with which the file of experts can be written."""

    @property
    def expert_bytes(self) -> int:
        """Bytes of all experts."""
        return sum(layer.num_bytes for layer in self.layers)

    @property
    def num_experts(self) -> int:
        """Number of experts of all layers."""
        return sum(layer.num_experts for layer in self.layers)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot, which has room for the largest expert."""
        return max(layer.expert_bytes for layer in self.layers)

    @property
    def budget(self) -> int:
        """Most bytes of experts in memory: the setting, or what KV leaves."""
        return self.free_bytes - self.kv_bytes if self.given_bytes is None else self.given_bytes

    @property
    def least(self) -> int:
        """Least budget of an engine that writes the file of experts."""
        return max(self.top_k * self.slot_bytes, self.packing_bytes)

    @property
    def num_slots(self) -> int:
        """Number of experts that are in memory at a time."""
        if self.budget >= self.expert_bytes:
            return self.num_experts
        return max(0, self.budget) // self.slot_bytes

    @property
    def decode_bytes(self) -> float:
        """Bytes that one token reads, if all experts of a layer are equally likely."""
        each = sum(layer.expert_bytes for layer in self.layers)
        return each * self.top_k * (1 - self.num_slots / self.num_experts)

    def prompt_bytes(self, num_tokens: int) -> float:
        """Return the most bytes that a prompt reads: its experts, none of them in memory before.

        All experts of a layer are taken to be equally likely.
        """
        if self.num_slots == self.num_experts:
            return 0.0
        used = (1 - (1 - self.top_k / e.num_experts) ** num_tokens for e in self.layers)
        return sum(part * layer.num_bytes for part, layer in zip(used, self.layers, strict=True))


def fit_of(name_or_path: str, config: EngineConfig, **how: Any) -> Fit:
    """Load a model without its experts, and return what it takes. It is on the CPU, of one rank.

    Args:
        name_or_path: Name of the model, as in `load`.
        config: Settings of the engine. Without `memory` it may have what is free.
        how: Further arguments of `load`.

    Raises:
        ConfigError: `memory` is too little for the weights outside of experts, or the experts
            cannot be in a file.
        ModelError: The model cannot be loaded.
    """
    counted, claim = ExpertsCounted(), Claim("cpu")
    try:
        model = load(
            name_or_path,
            expert_weights=config.expert_weights,
            depth=config.depth,
            experts=counted,
            **how,
        ).model
        parts, rest = discover(model), weight_bytes(model)
        token_bytes = kv_token_bytes(parts, model)
        with claim.others() as others:
            free = free_for(config, rest, others, on_cuda=False)
    finally:
        claim.close()
    tokens = config.max_kv_tokens
    return Fit(
        layers=tuple(counted.layers),
        top_k=parts.shape.experts_per_token,
        rest_bytes=rest,
        token_bytes=token_bytes,
        free_bytes=free,
        kv_bytes=int(free * FOR_KV) if tokens is None else tokens * token_bytes,
        given_bytes=None if config.max_expert_bytes is None else int(config.max_expert_bytes),
        packing_bytes=counted.packing_bytes,
    )
