"""The type of activations that quantised weights multiply: `EngineConfig.activations`."""

from torch import nn

from qllm.errors import ConfigError
from qllm.kernels import cpu
from qllm.kernels.quantised import INTEGERS
from qllm.models.weights.formats.rounding import ROUNDINGS
from qllm.models.weights.on_demand import held_experts
from qllm.models.weights.quantised_experts import all_quantised, rounded_before
from qllm.models.weights.quantised_linears import all_linears


def read_rows(model: nn.Module, activations: str) -> None:
    """Set the type of activations for quantised weights with integer codes, in every forward."""
    for experts in all_quantised(model).values():
        experts.activations = activations
    for linear in all_linears(model).values():
        linear.read(activations)


def refuse_other_activations(
    model: nn.Module, activations: str, kernels: str, expert_weights: str
) -> None:
    """Raise unless a runner on the CPU supports these activations.

    Args:
        model: Model whose quantised weights are checked.
        activations: Setting of `EngineConfig`.
        kernels: Setting of `EngineConfig`.
        expert_weights: Setting of `EngineConfig`.

    Raises:
        ConfigError: The runner does not support them.
    """
    if activations == "bf16":
        return
    asked = f"activations={activations!r}"
    if kernels == "reference" or cpu.MISSING is not None:
        why = cpu.MISSING or "kernels='reference' has 'bf16' alone"
        raise ConfigError(f"{asked} needs our CPU kernels: {why}; use 'bf16'")
    experts, linears = held_experts(model).values(), all_linears(model).values()
    found = [held.has_integers for held in experts]
    found += [held.weight.code in INTEGERS for held in linears]
    if any(found) or expert_weights in ROUNDINGS:
        return
    names = {held.kind for held in experts} | {held.kind for held in linears}
    expanded = {how for module in model.modules() if (how := rounded_before(module)) is not None}
    kinds = sorted(names) or [f"{how}, expanded to bf16" for how in sorted(expanded)]
    raise ConfigError(
        f"{asked} is for weights that are integers of 4 or 8 bits, and this model has none "
        f"({', '.join(kinds) or 'not quantised'}); use 'bf16', or a checkpoint in int4 or int8"
    )
