"""The experts of a load that leaves them in the checkpoint and only counts their bytes."""

from pathlib import Path

from torch import nn

from qllm.models.weights.expert_file import ExpertLayer
from qllm.models.weights.experts_in_file import ExpertsInFile, kind_of


class ExpertsCounted(ExpertsInFile):
    """The place of experts that are not loaded. Of each quantised layer, one expert is read."""

    where, advice, is_needed = "in a file", "load all experts", False

    def __init__(self) -> None:
        super().__init__(Path(), 0)

    @property
    def layers(self) -> list[ExpertLayer]:
        """Layers with experts, as a file has them. Experts that differ in format may take more."""
        return [plan.layer for plan in self._plans]

    @property
    def packing_bytes(self) -> int:
        """Least `max_expert_bytes` with which a load writes the file; 0 without experts."""
        return max((plan.working_bytes for plan in self._plans), default=0)

    def _prepare(self) -> bool:
        """Return True: no expert is in the model."""
        return True

    def _leave(self, module: nn.Module, number: int) -> str:
        """Leave the module without memory. Its forward cannot run."""
        return f"{kind_of(self.layers[number])} in the checkpoint"
