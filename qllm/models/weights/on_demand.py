"""The experts of a checkpoint that stay in its files until they are used.

Each rank of a split model reads its share of them, packs it, and keeps the packed bytes alone. The
module of such experts keeps its parameters on the meta device, for their shapes. The module's own
forward still runs. It reads the experts that it uses, and frees them after the call.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from qllm.errors import ModelError
from qllm.kernels.cpu.experts import BF16, Clamp, Cut, Experts, Formats
from qllm.kernels.quantised import INTEGERS, Quantised
from qllm.models.weights.checkpoint import naming
from qllm.models.weights.expert_source import ExpertSource
from qllm.models.weights.formats.rounding import INT8_GROUPS
from qllm.models.weights.quantised_experts import WEIGHTS, QuantisedExperts, quantised_in
from qllm.models.weights.quantised_weights import Weights, checksum, sample_of

ON_DEMAND = "qllm_on_demand"
"""Attribute of a module of experts whose weights are read on demand: an `OnDemand`."""
PACKED_NAMES = ("up", "down")
"""Names of the packed weights, as in `Experts.parts`, in the order of WEIGHTS."""


class OnDemand:
    """The weights of one module of experts, in the files of a checkpoint.

    Args:
        module: Experts of transformers, with parameters on the meta device.
        source: Their weights.
        expert_weights: Format of experts, see `EngineConfig`.
    """

    def __init__(self, module: Any, source: ExpertSource, expert_weights: str) -> None:
        self._module, self._source = module, source
        self.num_experts, self.expert_weights = source.num_experts, expert_weights
        found = source.formats()
        self._group = INT8_GROUPS.get(expert_weights) if found == BF16 else None
        self.formats = found
        """Formats of quantised weights, without memory."""
        self.activations = "bf16"
        """Dtype of rows that products with quantised weights read."""

    @property
    def is_quantised(self) -> bool:
        """True if a load without ranks would keep the weights quantised."""
        return self.formats != BF16

    @property
    def kind(self) -> str:
        """Text of the format, as in `QuantisedExperts.kind`."""
        if self.is_quantised:
            return "+".join(dict.fromkeys(like.kind for like in self._likes()))
        return "bf16" if self._group is None else self.expert_weights

    @property
    def reads(self) -> str:
        """Text of the format, and the dtype of activations if that is not bf16."""
        if not self.is_quantised:
            return self.kind
        kinds = [like.reading(self.activations).kind for like in self._likes()]
        return "+".join(dict.fromkeys(kinds))

    @property
    def has_integers(self) -> bool:
        """True if products support rounded activations."""
        return self.is_quantised and any(like.code in INTEGERS for like in self._likes())

    @property
    def num_bytes(self) -> int:
        """Bytes of all experts in memory, without ranks."""
        return self.num_experts * self._room(0).num_bytes

    def _likes(self) -> list[Quantised]:
        return [like for like in self.formats if like is not None]

    def _room(
        self,
        num: int,
        biases: tuple[Tensor, Tensor] | None = None,
        clamp: Clamp | None = None,
        activations: str = "bf16",
        cut: Cut | None = None,
    ) -> Experts:
        likes = [None if like is None else like.reading(activations) for like in self.formats]
        shape, formats = (num, *self._source.shape), Formats(*likes)
        return Experts(*shape, self._group, biases, clamp, formats, cut=cut)

    def packed(
        self,
        experts: Sequence[int],
        biases: tuple[Tensor, Tensor] | None,
        clamp: Clamp | None,
        cut: Cut | None = None,
    ) -> Experts:
        """Read experts, and return them packed.

        Args:
            experts: Numbers of the experts.
            biases: Their biases, see `Experts`.
            clamp: Their gate, see `Experts`.
            cut: Share of a rank in each expert; None is all.

        Raises:
            ModelError: An expert cannot be read, or has another format than the first one.
        """
        made = self._room(len(experts), biases, clamp, self.activations, cut)
        for i, expert in enumerate(experts):
            with self._naming(expert):
                weights = self._read(expert, cut)
                made.pack(i, *(self._reading(weight) for weight in weights))
        return made

    def _reading(self, weight: Tensor | Quantised) -> Tensor | Quantised:
        return weight.reading(self.activations) if isinstance(weight, Quantised) else weight

    @contextmanager
    def _naming(self, expert: int) -> Iterator[None]:
        with naming(f"expert {expert} of {self._source.path}"):
            try:
                yield
            except ValueError as error:
                raise ModelError(f"weights cannot be packed: {error}") from error

    def _read(
        self, expert: int, cut: Cut | None = None
    ) -> tuple[Tensor | Quantised, Tensor | Quantised]:
        """Return the weights of an expert, or a share of them, the gate's outputs first."""
        weights = self._source.expert(expert, self.formats, cut)
        if weights is None:
            raise ModelError(
                "its format is not that of expert 0, so a rank cannot read its share alone; use "
                "tp=1"
            )
        return weights

    # -- identity

    def stored(self, expert: int) -> list[Tensor]:
        """Return both weights of an expert that is not quantised, as the parameters have them."""
        return as_parameters(self._module, *map(_plain, self._read(expert)))

    def ends(self) -> list[list[Tensor]]:
        """Return each weight of the first and of the last expert, as a load without ranks has it.

        Quantised weights are packed bytes. Others are values.
        """
        both = 0, self.num_experts - 1
        if not self.is_quantised:
            return [list(pair) for pair in zip(*map(self.stored, both), strict=True)]
        packed = self.packed(both, None, None)
        return [[packed.parts(i)[name] for i in range(len(both))] for name in PACKED_NAMES]

    def sample(self) -> bytes:
        """Return a few bytes of quantised weights: `QuantisedExperts.sample`."""
        return b"".join(sample_of(tensor) for pair in self.ends() for tensor in pair)

    def digest(self) -> str:
        """Return a digest of every byte of quantised weights: `QuantisedExperts.digest`."""
        sums: list[list[int]] = [[] for _ in PACKED_NAMES]
        for expert in range(self.num_experts):
            parts = self.packed([expert], None, None).parts(0)
            for own, name in zip(sums, PACKED_NAMES, strict=True):
                own.append(checksum(parts[name]))
        found = zip(self._likes(), sums, strict=True)
        return repr([like.kind + repr(own) for like, own in found])

    @cached_property
    def checksums(self) -> dict[str, int]:
        """The checksum of each parameter, if the weights are not quantised."""
        sums = [0] * len(WEIGHTS)
        for expert in range(self.num_experts):
            weights = zip(self.stored(expert), sums, strict=True)
            sums = [checksum(weight, before) for weight, before in weights]
        return dict(zip(WEIGHTS, sums, strict=True))

    # -- the module's own forward

    def _values(self, expert: int) -> list[Tensor]:
        """Return both weights of an expert as the parameters have them, after rounding."""
        width, hidden = self._source.shape
        up = torch.empty((2 * width, hidden), dtype=torch.bfloat16)
        down = torch.empty((hidden, width), dtype=torch.bfloat16)
        self.packed([expert], None, None).unpack(0, up, down)
        return as_parameters(self._module, up, down)

    def forward(self) -> Any:
        """Return the module's forward."""
        own = MethodType(type(self._module).forward, self._module)
        read = self._quantised if self.is_quantised else self._in_memory

        @wraps(own)
        def forward(*args: Any, **given: Any) -> Any:
            ids = given["top_k_index"] if "top_k_index" in given else args[1]
            used = [e for e in ids.unique().tolist() if e < self.num_experts]
            with read(used) as compute:
                return (compute or own)(*args, **given)

        made: Any = forward
        made.is_ours = True
        return made

    @contextmanager
    def _in_memory(self, experts: Sequence[int]) -> Iterator[None]:
        """Read experts into the module's parameters inside the block."""
        kept = {name: self._module._parameters[name] for name in WEIGHTS}
        full = [torch.empty_like(empty, device="cpu") for empty in kept.values()]
        for expert in experts:
            for whole, values in zip(full, self._values(expert), strict=True):
                whole[expert] = values
        for name, whole in zip(WEIGHTS, full, strict=True):
            self._module._parameters[name] = nn.Parameter(whole, requires_grad=False)
        try:
            yield
        finally:
            self._module._parameters.update(kept)

    @contextmanager
    def _quantised(self, experts: Sequence[int]) -> Iterator[Callable[..., Any]]:
        """Read experts as they are without ranks; yield the forward that computes with them."""
        module = self._module
        weights: dict[str, Weights] = {}
        for expert in experts or (0,):
            for name, weight in zip(WEIGHTS, self._read(expert), strict=True):
                assert isinstance(weight, Quantised)
                own = weights.get(name) or Weights(self.num_experts, weight)
                own.take(expert, [[weight]])
                weights[name] = own
        forward = module.forward
        held = QuantisedExperts(weights)
        held.activations = self.activations
        held.enter(module)
        try:
            yield module.forward
        finally:
            held.leave()
            module.forward = forward


def as_parameters(module: Any, up: Tensor, down: Tensor) -> list[Tensor]:
    """Return both weights of an expert as the parameters of its module have them.

    Args:
        module: Experts of transformers.
        up: Weight with outputs as rows, the gate's first.
        down: Weight with outputs as rows.
    """
    if not module.is_concatenated:
        up = torch.stack(up.chunk(2), dim=1).flatten(0, 1)
    return [w.t().contiguous() if module.is_transposed else w for w in (up, down)]


def leave_for_ranks(module: Any, weights: OnDemand) -> None:
    """Mark a module of experts whose weights ranks read. Its own forward reads them, too."""
    setattr(module, ON_DEMAND, weights)
    module.forward = weights.forward()


def on_demand_in(module: object) -> OnDemand | None:
    """Return the weights of a module of experts that are read on demand; None without them."""
    found: OnDemand | None = getattr(module, ON_DEMAND, None)
    return found


def all_on_demand(model: nn.Module) -> dict[str, OnDemand]:
    """Return all experts of a model that are read on demand, by the name of their module."""
    found = {name: on_demand_in(module) for name, module in model.named_modules()}
    return {name: experts for name, experts in found.items() if experts is not None}


def held_experts(model: nn.Module) -> dict[str, QuantisedExperts | OnDemand]:
    """Return all quantised experts of a model, in memory or not, by the name of their module."""
    held: dict[str, QuantisedExperts | OnDemand] = {}
    for name, module in model.named_modules():
        apart = on_demand_in(module)
        if (own := quantised_in(module)) is not None:
            held[name] = own
        elif apart is not None and apart.is_quantised:
            held[name] = apart
    return held


def _plain(weight: Tensor | Quantised) -> Tensor:
    assert isinstance(weight, Tensor)
    return weight
