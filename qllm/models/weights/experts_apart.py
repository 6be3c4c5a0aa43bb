"""The experts of a checkpoint that a load does not put into the model."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel

from qllm.errors import ConfigError
from qllm.kernels import cpu
from qllm.models.parts.known import experts as known_experts
from qllm.models.weights.checkpoint import Checkpoint
from qllm.models.weights.expert_source import ExpertSource
from qllm.models.weights.formats.rounding import INT8_GROUPS, ROUNDINGS
from qllm.models.weights.places import Place, by_module, places_of
from qllm.models.weights.quantised import Method
from qllm.models.weights.quantised_experts import WEIGHTS


class ExpertsApart(ABC):
    """The experts of one load. The modules of experts get parameters without memory."""

    where: str
    """Place of the experts, for messages: "in a file"."""
    advice: str
    """Way to load the model without this class."""
    is_needed = True
    """True if a model without experts is refused."""

    def __init__(self) -> None:
        self._expert_weights = "auto"
        self._sources: list[ExpertSource] = []

    def identify(self, files: Sequence[Path], method: Method | None, expert_weights: str) -> None:
        """Set everything that decides the bytes of packed experts.

        Args:
            files: Files of the checkpoint's weights.
            method: The checkpoint's quantisation; None if it has none of its own.
            expert_weights: Format of experts, see `EngineConfig`.

        Raises:
            ConfigError: The format of experts is unknown.
        """
        known = ("auto", *INT8_GROUPS, *ROUNDINGS)
        if expert_weights not in known:
            raise ConfigError(f"expert_weights={expert_weights!r} must be one of {known}")
        self._expert_weights = expert_weights

    def take(self, skeleton: PreTrainedModel, checkpoint: Checkpoint) -> Checkpoint:
        """Take the experts, and return the checkpoint without them, or all of it if they stay.

        Raises:
            ConfigError: The experts cannot be there.
            ModelError: Weights cannot be read, or do not fit the model.
        """
        places = places_of(skeleton, chain(checkpoint.plain, checkpoint.quantised))
        self._refuse_others(skeleton, {place.module for place in places.values()})
        self._refuse_rounded_twice(places, checkpoint)
        rounding = ROUNDINGS.get(self._expert_weights)
        names = by_module(places)
        self._sources = [
            ExpertSource(path, module, names[path], places, checkpoint, rounding)
            for path, module in skeleton.named_modules()
            if path in names
        ]
        if not self._prepare():
            self._sources = []
            return checkpoint
        plain, quantised = checkpoint.plain.items(), checkpoint.quantised.items()
        return checkpoint._replace(
            plain={name: read for name, read in plain if name not in places},
            quantised={name: read for name, read in quantised if name not in places},
        )

    def names(self) -> list[str]:
        """Return the parameters that transformers must not load."""
        return [f"{source.path}.{name}" for source in self._sources for name in WEIGHTS]

    def enter(self, model: nn.Module) -> list[str]:
        """Give the model's experts parameters without memory; return formats for the log."""
        found = []
        for number, source in enumerate(self._sources):
            empty, own = source.module._parameters, model.get_submodule(source.path)
            own._parameters.update({name: empty[name] for name in WEIGHTS})
            found.append(self._leave(own, number))
        return list(filter(None, found))

    @abstractmethod
    def _prepare(self) -> bool:
        """Prepare all sources before the model is made; return False if experts stay in it."""

    @abstractmethod
    def _leave(self, module: nn.Module, number: int) -> str:
        """Mark the module of a source. Return its format for the log; "" for plain weights."""

    def _refuse_others(self, model: PreTrainedModel, found: set[str]) -> None:
        """Refuse a model with experts that would stay in memory."""
        if cpu.MISSING is not None:
            raise ConfigError(f"experts {self.where} need our CPU kernels: {cpu.MISSING}")
        if not found and self.is_needed:
            raise ConfigError(f"the model has no experts that can be {self.where}; {self.advice}")
        for path, module in model.named_modules():
            weights = [module._parameters.get(name) for name in WEIGHTS]
            stacks = [weight for weight in weights if weight is not None and weight.dim() == 3]
            if path not in found and len(stacks) < len(WEIGHTS):
                continue
            sizes = [size for weight in stacks for size in weight.shape[1:]]
            if not hasattr(module, "is_transposed") or known_experts(module).kind is None:
                why = "our kernels do not know how they compute"
            elif path not in found:
                why = "its checkpoint stores them in a way that cannot be read expert by expert"
            elif any(size % 2 for size in sizes):
                why = f"their sizes {sizes} are not all even"
            else:
                continue
            raise ConfigError(f"the experts of {path} cannot be {self.where}: {why}; {self.advice}")

    def _refuse_rounded_twice(self, places: Mapping[str, Place], checkpoint: Checkpoint) -> None:
        codes = sorted(name for name in places if name in checkpoint.quantised)
        if codes and self._expert_weights != "auto":
            raise ConfigError(
                f"expert_weights={self._expert_weights!r} rounds bfloat16 weights, and {codes[0]} "
                "is quantised already; use 'auto'"
            )
