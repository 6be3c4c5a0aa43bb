"""The load of a model for a GPU whose experts do not fit there: they stay in the host's memory."""

from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qllm.errors import ConfigError, ModelError
from qllm.kernels.cpu.experts import Formats
from qllm.kernels.quantised import Quantised
from qllm.models.weights.checkpoint import Checkpoint
from qllm.models.weights.expert_file import refuse_too_few
from qllm.models.weights.expert_source import ExpertSource
from qllm.models.weights.experts_apart import ExpertsApart
from qllm.models.weights.formats.rounding import ROUNDINGS
from qllm.models.weights.on_demand import as_parameters
from qllm.models.weights.on_host import HostWeights, in_lines, leave_on_host, own_pages
from qllm.models.weights.quantised_experts import WEIGHTS, QuantisedExperts
from qllm.models.weights.quantised_weights import tensors_of

READERS = 8
"""Threads that read."""


class ExpertsOnHost(ExpertsApart):
    """The place of a model's experts: the host's memory, in the layout of the GPU's kernels.

    Args:
        max_bytes: Most bytes of experts on the GPU. If all experts fit, they are loaded there.
    """

    where, advice = "in the host's memory", "leave max_expert_bytes out"

    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self._max_bytes = max_bytes

    def take(self, skeleton: PreTrainedModel, checkpoint: Checkpoint) -> Checkpoint:
        """See `ExpertsApart.take`.

        Raises:
            ConfigError: `max_bytes` has no room for the experts of one token in one layer.
        """
        config = skeleton.config.get_text_config(decoder=True)
        self._top_k = getattr(config, "num_experts_per_tok", None) or 1
        return super().take(skeleton, checkpoint)

    def _prepare(self) -> bool:
        """Return False if there is room for all experts, which are loaded to the GPU then."""
        each = [_expert_bytes(source) for source in self._sources]
        total = sum(
            source.num_experts * size for source, size in zip(self._sources, each, strict=True)
        )
        if self._max_bytes >= total:
            return False
        refuse_too_few(self._max_bytes, max(each), self._top_k, total)
        return True

    def _leave(self, module: nn.Module, number: int) -> str:
        source = self._sources[number]
        with ThreadPoolExecutor(READERS, "qllm-read") as pool:
            kind = _read(module, source, source.formats(), self._rounding, pool)
            if kind is None:  # experts that differ get a common format
                kind = _read(module, source, source.common_formats(pool), self._rounding, pool)
        if kind is None:
            raise ModelError(
                f"the experts of {source.path} changed while they were read; load them again"
            )
        leave_on_host(module, source.path, self._max_bytes)
        return kind

    @property
    def _rounding(self) -> str | None:
        return self._expert_weights if self._expert_weights in ROUNDINGS else None

    def _refuse_others(self, model: PreTrainedModel, found: set[str]) -> None:
        """Refuse a model with experts that would be loaded to the GPU."""
        if not found:
            raise ConfigError(f"the model has no experts that can be {self.where}; {self.advice}")
        for path, module in model.named_modules():
            weights = [module._parameters.get(name) for name in WEIGHTS]
            if path not in found and all(w is not None and w.dim() == 3 for w in weights):
                raise ConfigError(
                    f"the experts of {path} cannot be {self.where}: their checkpoint stores them "
                    f"in a way that cannot be read expert by expert; {self.advice}"
                )


def _expert_bytes(source: ExpertSource) -> int:
    """Return the bytes of one expert in a slot, if the others have the format of the first."""
    found, (width, hidden) = 0, source.shape
    rows = 2 * width, hidden
    for like, num_rows, num_values in zip(source.formats(), rows, source.num_values, strict=True):
        if like is None:
            found += in_lines(torch.bfloat16.itemsize * num_values)
        else:
            parts = tensors_of(like)
            found += sum(in_lines(part[0].nbytes * num_rows) for part in parts)
    return found


def _read(
    module: Any, source: ExpertSource, formats: Formats, rounding: str | None, pool: Executor
) -> str | None:
    """Read all experts of a module into the host's memory.

    Args:
        module: The module, with parameters on the meta device.
        source: Its weights.
        formats: Format of all experts.
        rounding: Rounding of plain weights; None keeps them in bf16.
        pool: Threads that read.

    Returns:
        The format for the log, "" for plain weights; None if an expert has another format.
    """
    first = source.expert(0, formats)
    if first is None:
        return None
    stacks = [HostWeights(source.num_experts, w) for w in first if isinstance(w, Quantised)]
    shapes = [] if stacks else [tuple(module._parameters[name].shape) for name in WEIGHTS]
    plain = [own_pages(shape, torch.bfloat16) for shape in shapes]

    def read(expert: int) -> bool:
        weights = source.expert(expert, formats)
        if weights is None:
            return False
        codes = [weight for weight in weights if isinstance(weight, Quantised)]
        for stack, own in zip(stacks, codes, strict=True):
            stack.take(expert, [[own]])
        values = [weight for weight in weights if isinstance(weight, Tensor)]
        if values:
            for whole, one in zip(plain, as_parameters(module, *values), strict=True):
                whole[expert] = one
        return True

    if not all(pool.map(read, range(source.num_experts))):
        return None
    if not stacks:
        for name, whole in zip(WEIGHTS, plain, strict=True):
            module._parameters[name] = nn.Parameter(whole, requires_grad=False)
        return ""
    held = QuantisedExperts(dict(zip(WEIGHTS, stacks, strict=True)), rounding)
    held.enter(module)
    return held.kind
