"""Refusals, by name, of models that the drivers would run incorrectly."""

from typing import Any

from torch import Tensor, nn

from qllm.errors import ModelError
from qllm.models.around import is_experts
from qllm.models.discover import PACKED
from qllm.models.weights.expert_file import all_in_file, in_file
from qllm.models.weights.on_demand import all_on_demand, on_demand_in
from qllm.models.weights.on_host import on_host
from qllm.models.weights.quantised import refuse_quantised
from qllm.models.weights.quantised_experts import WEIGHTS, all_quantised, quantised_in
from qllm.models.weights.quantised_linears import all_linears

EXPERT_FLAGS = {"is_concatenated", "is_transposed", "has_bias", "has_gate", "has_post_expert_norm"}


def _refuse_tensor(name: str, tensor: Tensor) -> None:
    if tensor.device.type == "meta":
        raise ModelError(
            f"parameter {name} is on the meta device (offloaded to disk?): load the whole model"
        )
    if type(tensor).__name__ == "DTensor" or type(tensor.data).__name__ == "DTensor":
        raise ModelError(f"parameter {name} is sharded (DTensor); load without tensor parallelism")


def _refuse_experts(name: str, experts: Any) -> None:
    places = quantised_in, in_file, on_demand_in, on_host
    is_ours = any(find(experts) is not None for find in places)
    if "forward" in vars(experts) and not is_ours:
        raise ModelError(f"{name}.forward was replaced on the instance (expert parallelism?)")
    if getattr(experts, "_is_expert_parallel", False):
        raise ModelError(f"{name} is sharded over devices (expert parallelism)")
    known = EXPERT_FLAGS | {"_is_expert_parallel"}
    flags = {key for key in vars(experts) if key.startswith(("has_", "is_", "_is_"))}
    unknown = flags - known - {"_is_full_backward_hook", "_is_hf_initialized"}
    if unknown:
        raise ModelError(f"{name} has layout flags qllm does not know: {', '.join(unknown)}")


def _refuse_elsewhere(name: str, module: nn.Module, reads_files: bool, on_ranks: bool) -> None:
    """Refuse a module whose weights are not in its parameters."""
    if hasattr(module, PACKED):
        raise ModelError(
            f"the weights of {name} are packed for another runner; close that runner (or its "
            "engine) first, or load the model once more"
        )
    place = in_file(module)
    if place is not None and not reads_files:
        raise ModelError(
            f"the experts of {name} are in {place.file.path}, and only a runner on one CPU reads "
            "them there; load the model without a file of experts"
        )
    if on_demand_in(module) is not None and not on_ranks:
        raise ModelError(
            f"the experts of {name} are read by ranks, and this runner has none; load the model "
            "without ranks"
        )


def refuse_unsafe(model: nn.Module, *, reads_files: bool = False, on_ranks: bool = False) -> None:
    """Refuse a model that the drivers would run incorrectly.

    Args:
        model: Whole model.
        reads_files: True if the runner reads experts that are in a file.
        on_ranks: True if the runner has ranks, which read their own experts.

    Raises:
        ModelError: The model is unsafe; the text names the part and the reason.
    """
    if model.training:
        raise ModelError("the model is in training mode; call model.eval()")
    if getattr(model, "use_kernels", False) or getattr(model, "_use_kernels", False):
        raise ModelError("use_kernels swaps modules for hub kernels; load with use_kernels=False")
    for name, module in model.named_modules():
        _refuse_elsewhere(name, module, reads_files, on_ranks)
    experts = {*all_quantised(model), *all_in_file(model), *all_on_demand(model)}
    elsewhere = {f"{module}.{name}" for module in experts for name in WEIGHTS}
    elsewhere |= {f"{module}.weight" for module in all_linears(model)}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name not in elsewhere:
            _refuse_tensor(name, tensor)
    refuse_quantised(model)
    for name, module in model.named_modules():
        if hasattr(module, "_hf_hook"):
            raise ModelError(f"{name or 'the model'} has an accelerate hook (offload?)")
        if is_experts(module):
            _refuse_experts(name, module)
