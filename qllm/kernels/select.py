"""The kernels that the CUDA backend computes with, always selected by name."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from qllm.errors import ConfigError, pip_install

NAMES = ("triton", "torch")


class Kernels(NamedTuple):
    """One implementation of the kernels; the signatures are those of `kernels.triton`."""

    name: str
    write: Callable[..., None]
    rotate_and_write: Callable[..., None]
    write_latents: Callable[..., Any]
    attend: Callable[..., None]
    choose: Callable[..., Any]
    route: Callable[..., Any]
    run_experts: Callable[..., None]
    combine: Callable[..., None]
    rms_norm: Callable[..., Any]
    add_rms_norm: Callable[..., Any]
    silu_mul: Callable[..., Any]
    sample: Callable[..., None]


def kernels(name: str) -> Kernels:
    """Return the kernels named "triton" (CUDA, or its interpreter) or "torch" (the references).

    Raises:
        ConfigError: The name is unknown, or Triton cannot be imported.
    """
    if name not in NAMES:
        raise ConfigError(f"device kernels {name!r} are unknown; use one of {', '.join(NAMES)}")
    fields = Kernels._fields[1:]
    if name == "torch":
        module = import_module("qllm.kernels.reference")
        return Kernels(name, *(getattr(module, field) for field in fields))
    try:
        parts = [import_module(f"qllm.kernels.triton.{m}") for m in _MODULES]
    except ImportError as error:
        raise ConfigError(
            f"device kernels 'triton' cannot be imported ({error}); {pip_install('cuda')}"
        ) from error
    found = {f: getattr(m, f) for m in parts for f in fields if hasattr(m, f)}
    return Kernels(name, *(found[field] for field in fields))


_MODULES = ("attention", "choose", "latents", "moe", "norm", "rope", "sampling")
