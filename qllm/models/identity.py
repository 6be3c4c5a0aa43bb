"""The identity of a model: its class, its settings, a sample of its weights."""

import hashlib
from operator import itemgetter

import torch
from torch import Tensor, nn

from qllm.models.discover import base_model
from qllm.models.weights.expert_file import all_in_file
from qllm.models.weights.on_demand import OnDemand, all_on_demand, held_experts
from qllm.models.weights.quantised_experts import WEIGHTS, QuantisedExperts
from qllm.models.weights.quantised_linears import QuantisedLinear, all_linears

SAMPLES = 64
"""Number of values of a parameter in the identity."""
STACK = 3
"""Dimensions of a stack of experts. Its first and last weight alone are sampled, because a rank
must not read all experts. So a model that differs in other experts alone has the same identity."""


def identity(model: nn.Module, expert_weights: str = "auto", activations: str = "bf16") -> str:
    """Return a digest of everything that decides bits.

    Its input is the model's class, its settings, a sample of its weights' bytes, their format, and
    the type of activations.
    """
    kind = type(model).__name__ + expert_weights.removeprefix("auto")
    kind += f" on {activations}".removesuffix(" on bf16")
    digest = hashlib.sha256(kind.encode())
    settings = base_model(model).config.to_dict()
    for name in ("_name_or_path", "transformers_version", "dtype", "torch_dtype"):
        settings.pop(name, None)
    digest.update(repr(sorted(settings.items(), key=lambda item: item[0])).encode())
    quantised: dict[str, QuantisedExperts | OnDemand | QuantisedLinear]
    quantised = {**held_experts(model), **all_linears(model)}
    for name, held in quantised.items():
        digest.update(f"{name}{held.kind}".encode() + held.sample())
    for name, place in all_in_file(model).items():
        digest.update(f"{name}{place.digest()}".encode())
    apart = _samples_apart(model)
    for name, parameter in sorted(model.named_parameters(), key=itemgetter(0)):
        if (some := apart.get(name)) is None and parameter.is_meta:
            digest.update(f"{name}{tuple(parameter.shape)}".encode())
            continue
        if some is None:
            own = parameter.detach()
            is_stack = own.dim() == STACK and name.endswith(WEIGHTS)
            some = _sample(own[[0, -1]] if is_stack else own)
        digest.update(f"{name}{tuple(parameter.shape)}{parameter.dtype}".encode())
        digest.update(some.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _sample(weight: Tensor) -> Tensor:
    """Return a few values of a weight."""
    flat = weight.reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES].contiguous().cpu()


def _samples_apart(model: nn.Module) -> dict[str, Tensor]:
    """Return a few values of plain weights that are read on demand, by parameter."""
    found = {}
    for path, one in all_on_demand(model).items():
        if not one.is_quantised:
            for name, pair in zip(WEIGHTS, one.ends(), strict=True):
                found[f"{path}.{name}"] = _sample(torch.stack(pair))
    return found
