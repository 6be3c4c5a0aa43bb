"""Experts of a layer whose weights stay quantised.

Their module keeps its parameters on the meta device, for their shapes. Its own forward still runs:
it computes with the bf16 values of the weights, which are in memory for that call alone.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from qllm.errors import ModelError
from qllm.kernels.quantised import Quantised
from qllm.models.formats.rounding import ROUNDINGS

WEIGHTS = ("gate_up_proj", "down_proj")
ATTRIBUTE = "qllm_quantised"
"""Attribute of a module of experts whose weights are quantised."""

Read = Callable[[str, int], Tensor]
"""Name of the parameter and an expert -> bf16 [n, k], outputs in the order of the module."""


class QuantisedExperts:
    """The quantised weights of one module of experts, until a runner packs them.

    Args:
        module: Experts of transformers, whose two parameters become meta tensors.
        weights: By the name of the parameter, one weight [n, k] per expert; outputs in the order
            of the module.
        rounding: How they were rounded from bf16; None if the checkpoint has them so.
    """

    def __init__(
        self, module: Any, weights: dict[str, Sequence[Quantised]], rounding: str | None = None
    ) -> None:
        self._module, self.rounding = module, rounding
        self.num_experts = len(weights[WEIGHTS[0]])
        self._codes: dict[str, list[Quantised | None]] = {n: list(w) for n, w in weights.items()}
        self.like = {name: _shape_of(found[0]) for name, found in weights.items()}
        """One weight of each parameter, without its memory: what all of them are like."""
        self.kind = "+".join(dict.fromkeys(map(_kind, self.like.values())))
        """Codes and groups, for people: "e2m1 g32"."""
        self.num_bytes = sum(_bytes(one) for found in weights.values() for one in found)
        self.sample = b"".join(_sample(found) for found in weights.values())
        """A few bytes of the codes and scales, for the identity of the model."""
        self.read: Read = self._dequantised
        """Gives the bf16 values, wherever the weights are now."""
        self.packed: object | None = None
        """Where the weights are once a runner has packed them; `read` knows how to read it."""
        self._digest: str | None = None
        for name in WEIGHTS:
            own = module._parameters[name]
            kept = torch.empty_like(own, device="meta")
            module._parameters[name] = nn.Parameter(kept, requires_grad=False)
        module.forward = self._forward()
        setattr(module, ATTRIBUTE, self)

    def take(self, expert: int) -> tuple[Quantised, Quantised]:
        """Give one expert's weights away: `gate_up_proj` and `down_proj`.

        Raises:
            ModelError: They were given away before.
        """
        up, down = (self._stored(name, expert) for name in WEIGHTS)
        for name in WEIGHTS:
            self._codes[name][expert] = None
        return up, down

    def _stored(self, name: str, expert: int) -> Quantised:
        found = self._codes[name][expert]
        if found is None:
            raise ModelError(
                "the experts of this model were given to an engine that could not pack them; load "
                "the model once more"
            )
        return found

    def digest(self) -> str:
        """Digest of every byte of the codes and scales.

        Raises:
            ModelError: They were taken before anybody asked.
        """
        if self._digest is None:
            if self.packed is not None:
                raise ModelError(
                    "the experts of this model are packed, so its weights have no digest for "
                    "kv_dir; load the model once more"
                )
            weights = [self._stored(n, e) for n in self._codes for e in range(self.num_experts)]
            tensors = [tensor for one in weights for tensor in _tensors(one)]
            self._digest = self.kind + repr([zlib.crc32(_as_bytes(t)) for t in tensors])
        return self._digest

    def _dequantised(self, name: str, expert: int) -> Tensor:
        return self._stored(name, expert).dequantised()

    def as_parameter(self, name: str, expert: int) -> Tensor:
        """A weight as the module's parameter has it: [k, n] if that is transposed, else [n, k]."""
        value = self.read(name, expert)
        return value.t().contiguous() if self._module.is_transposed else value

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The module has its weights in bf16, and none afterwards."""
        module = self._module
        kept = {name: module._parameters[name] for name in WEIGHTS}
        try:
            for name, empty in kept.items():
                full = torch.empty_like(empty, device="cpu")
                for expert in range(len(full)):
                    full[expert] = self.as_parameter(name, expert)
                module._parameters[name] = nn.Parameter(full, requires_grad=False)
            yield
        finally:
            module._parameters.update(kept)

    def _forward(self) -> Callable[..., Any]:
        own = MethodType(type(self._module).forward, self._module)

        @wraps(own)
        def forward(*args: Any, **given: Any) -> Any:
            with self.in_place():
                return own(*args, **given)

        return forward


def round_experts(module: Any, rounding: str) -> QuantisedExperts:
    """Round the bf16 parameters of a module of experts; they are gone afterwards.

    Args:
        module: Experts of transformers.
        rounding: Key of `ROUNDINGS`.
    """
    turned, rounded = bool(module.is_transposed), ROUNDINGS[rounding]
    weights: dict[str, Sequence[Quantised]] = {}
    for name in WEIGHTS:
        found = module._parameters[name].detach()
        weights[name] = [rounded(one.t() if turned else one) for one in found]
        module._parameters[name] = nn.Parameter(found.to("meta"), requires_grad=False)
    return QuantisedExperts(module, weights, rounding)


def quantised_in(module: object) -> QuantisedExperts | None:
    """The quantised weights of a module of experts; None if they are parameters."""
    found: QuantisedExperts | None = getattr(module, ATTRIBUTE, None)
    return found


def all_quantised(model: nn.Module) -> dict[str, QuantisedExperts]:
    """Every quantised weight of a model, by the name of its module."""
    found = {name: quantised_in(module) for name, module in model.named_modules()}
    return {name: experts for name, experts in found.items() if experts is not None}


def weight_bytes(model: nn.Module) -> int:
    """Bytes of a model's weights, quantised ones as they are."""
    plain = sum(p.nbytes for p in model.parameters() if p.device.type != "meta")
    return plain + sum(experts.num_bytes for experts in all_quantised(model).values())


def _tensors(one: Quantised | None) -> list[Tensor]:
    assert one is not None
    return [t for t in (one.codes, one.scale_NG, one.offset_NG) if t is not None]


def _bytes(one: Quantised) -> int:
    return sum(t.nbytes for t in _tensors(one))


def _kind(one: Quantised) -> str:
    return f"{one.code} g{one.group}"


def _shape_of(one: Quantised) -> Quantised:
    offset = None if one.offset_NG is None else one.offset_NG.to("meta")
    return one._replace(
        codes=one.codes.to("meta"), scale_NG=one.scale_NG.to("meta"), offset_NG=offset
    )


def _as_bytes(tensor: Tensor) -> memoryview:
    array: memoryview = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return array


def _sample(found: Sequence[Quantised]) -> bytes:
    some = [t.reshape(-1)[:: max(1, t.numel() // 16)][:16] for one in found for t in _tensors(one)]
    return b"".join(bytes(_as_bytes(t)) for t in some)
