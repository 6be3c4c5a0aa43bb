"""A checkpoint of safetensors that is open: its tensors by name, read when they are asked for."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open
from torch import Tensor

from qllm.errors import ModelError
from qllm.models.formats.layout import Format, Layout, Stored, Weight


class Checkpoint(NamedTuple):
    """How each weight of a checkpoint is read, by its name in the family."""

    format: str
    plain: Mapping[str, Callable[[], Tensor]]
    quantised: Mapping[str, Callable[[], Weight]]


class Shards:
    """Tensors of some files by name; their memory is the files' until somebody writes to them."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files: dict[str, Any] = {}
        for path in files:
            file: Any = safe_open(path, framework="pt")
            self._files.update(dict.fromkeys(file.keys(), file))

    def read(self, name: str) -> Tensor:
        """One tensor."""
        found: Tensor = self._files[name].get_tensor(name)
        return found


def open_checkpoint(
    name: str, files: Sequence[Path], tensors: Mapping[str, Stored], form: Format
) -> tuple[Checkpoint, dict[str, Stored]]:
    """Open the files of a checkpoint.

    Args:
        name: Of the model.
        files: Its shards.
        tensors: All that they hold.
        form: How its weights are held.

    Returns:
        The checkpoint, and what is stored of tensors that are no part of a quantised weight.

    Raises:
        ModelError: Codes lack a tensor that belongs to them.
    """
    shards = Shards(files)
    quantised: dict[str, Callable[[], Weight]] = {}
    claimed = {key for key in tensors if form.unused and key.endswith(form.unused)}
    try:
        for weight, layout, parts in form.weights(tensors):
            quantised[weight] = partial(_read, name, weight, shards, layout, parts)
            claimed.update(parts.values())
    except ModelError as error:
        raise ModelError(f"checkpoint of model {name!r}: {error}") from error
    rest = {key: stored for key, stored in tensors.items() if key not in claimed}
    plain = {key: partial(shards.read, key) for key in rest}
    return Checkpoint(form.name, plain, quantised), rest


def _read(
    name: str, weight: str, shards: Shards, layout: Layout, parts: Mapping[str, str]
) -> Weight:
    try:
        return layout.read({end: shards.read(key) for end, key in parts.items()})
    except ModelError as error:
        raise ModelError(f"checkpoint of model {name!r}, {weight}: {error}") from error
