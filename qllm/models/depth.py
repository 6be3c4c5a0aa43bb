"""A model cut after its first layers. A cut model is a model: it has answers of its own.

A cut model has the first layers, the embeddings, the last norm and the head of the whole model. It
is made as the whole model on the meta device, and then loses its further layers. So each layer that
stays is that of the whole model, even if its numbers depend on the number of all layers (the decay
of MiniMax, the scale of MiniCPM3).
"""

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedModel

from qllm.errors import ConfigError, shown
from qllm.models.discover import base_model, decoder_layers
from qllm.models.weights.checkpoint import Checkpoint
from qllm.models.weights.places import renamed

WHOLE = "qllm_whole_layers"
"""Attribute of a cut model's config: the number of layers of the whole model. As a setting of the
model it is part of the model's identity."""
FURTHER = ("num_nextn_predict_layers", "num_mtp_layers")
"""Counts in a config of layers that predict further tokens. They read what the last layer computes,
so a cut model has none."""
V = TypeVar("V")


def num_layers(model: nn.Module) -> int:
    """Return the number of layers that a model has."""
    return len(decoder_layers(base_model(model)))


def whole_layers(model: nn.Module) -> int:
    """Return the number of layers that a model has, or had before it was cut."""
    return int(getattr(base_model(model).config, WHOLE, 0)) or num_layers(model)


class Cut:
    """The first layers of a model, and what a load of them needs.

    Args:
        name: Name of the model, for errors.
        whole: Whole model, on the meta device.
        depth: Number of layers to keep.

    Raises:
        ConfigError: The depth is no number of layers that the model has.
        ModelError: The model does not declare its layers.
    """

    def __init__(self, name: str, whole: PreTrainedModel, depth: Any) -> None:
        layers = decoder_layers(base_model(whole))
        is_count = isinstance(depth, int) and not isinstance(depth, bool)
        if not is_count or not 1 <= depth <= len(layers):
            raise ConfigError(
                f"depth={shown(depth)} must be an integer in [1, {len(layers)}], the layers of "
                f"model {name!r}; leave depth out for the whole model"
            )
        self._whole, self._num_layers, self.depth = whole, len(layers), int(depth)
        path = next(path for path, module in whole.named_modules() if module is layers)
        self._of_layer = re.compile(rf"{re.escape(path)}\.(\d+)\.")
        self.model_class = self._cut_class(type(whole))
        """Class of transformers that makes the cut model from the whole model's config."""

    @property
    def is_whole(self) -> bool:
        """True if all layers are kept."""
        return self.depth == self._num_layers

    def of(self, tensors: Mapping[str, V]) -> dict[str, V]:
        """Return tensors of a checkpoint, by name, without those of layers that are cut off."""
        gone = {one.name for one in renamed(self._whole, tensors) if not self._is_kept(one.target)}
        return {name: value for name, value in tensors.items() if name not in gone}

    def of_checkpoint(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return a checkpoint without the weights of layers that are cut off."""
        return checkpoint._replace(
            plain=self.of(checkpoint.plain), quantised=self.of(checkpoint.quantised)
        )

    def finish(self, model: PreTrainedModel) -> None:
        """Give a loaded model of `model_class` the whole model's class, and a cut config."""
        model.__class__ = type(self._whole)
        _cut_config(base_model(model).config, self.depth, self._num_layers)

    def _is_kept(self, target: str) -> bool:
        layer = self._of_layer.match(target)
        return layer is None or int(layer[1]) < self.depth

    def _cut_class(self, whole_class: Any) -> Any:
        depth = self.depth

        def make(model: Any, *args: Any, **more: Any) -> None:
            whole_class.__init__(model, *args, **more)
            del decoder_layers(base_model(model))[depth:]

        same = {name: getattr(whole_class, name) for name in ("__module__", "__qualname__")}
        return type(whole_class.__name__, (whole_class,), {**same, "__init__": make})


def _cut_config(config: Any, depth: int, whole: int) -> None:
    """Cut the counts and lists of layers in the config of a cut model."""
    counted = config.num_hidden_layers
    kept = depth * (counted // whole)  # LongCat counts a layer once per attention
    for name, value in list(vars(config).items()):
        is_per_layer = "layer" in name or "types" in name
        if is_per_layer and isinstance(value, list | tuple) and len(value) == counted:
            setattr(config, name, value[:kept])
    config.num_hidden_layers = kept
    if vars(config).get("num_layers") == whole:
        config.num_layers = depth
    for name in FURTHER:
        if getattr(config, name, None):
            setattr(config, name, 0)
    setattr(config, WHOLE, whole)
