"""The identity of a model: its class, its settings, a sample of its weights."""

import hashlib

import torch
from torch import nn

from qllm.models.discover import base_model
from qllm.models.weights.expert_file import all_in_file
from qllm.models.weights.quantised_experts import QuantisedExperts, all_quantised
from qllm.models.weights.quantised_linears import QuantisedLinear, all_linears


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
    quantised: dict[str, QuantisedExperts | QuantisedLinear]
    quantised = {**all_quantised(model), **all_linears(model)}
    for name, held in quantised.items():
        digest.update(f"{name}{held.kind}".encode() + held.sample())
    for name, place in all_in_file(model).items():
        digest.update(f"{name}{place.digest()}".encode())
    for name, parameter in model.named_parameters():
        if parameter.device.type == "meta":
            digest.update(f"{name}{tuple(parameter.shape)}".encode())
            continue
        flat = parameter.detach().reshape(-1)
        some = flat[:: max(1, flat.numel() // 64)][:64].contiguous().cpu()
        digest.update(f"{name}{tuple(parameter.shape)}{parameter.dtype}".encode())
        digest.update(some.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
