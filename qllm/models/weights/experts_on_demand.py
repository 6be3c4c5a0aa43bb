"""The load of a model whose experts are read by its ranks."""

from torch import nn

from qllm.models.weights.experts_apart import ExpertsApart
from qllm.models.weights.on_demand import OnDemand, leave_for_ranks


class ExpertsOnDemand(ExpertsApart):
    """The place of a model's experts: their checkpoint, from which ranks read their share."""

    where, advice, is_needed = "read by ranks", "use tp=1", False

    def _prepare(self) -> bool:
        """Return True: experts are read after the load."""
        return True

    def _leave(self, module: nn.Module, number: int) -> str:
        made = OnDemand(module, self._sources[number], self._expert_weights)
        leave_for_ranks(module, made)
        return made.kind if made.is_quantised else ""
