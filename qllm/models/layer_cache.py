"""The content of transformers' cache for one layer of one request, of any kind.

A cache layer has attributes of many kinds: keys and values, windows of these, keys of an indexer,
compressed keys, keys that wait for compression, states of convolutions and recurrences, counters.
A pass that starts from committed tokens works on a copy, so their state stays unchanged.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from qllm.errors import ModelError

JOINED = {
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "DynamicIndexedLayer",
    "DeepseekV4HCACache",
    "DeepseekV4CSACache",
}
"""Kinds of cache layers that never write into a tensor, but make a new tensor."""


KEPT = (Tensor, bool, int, float)
"""Kinds of values that form a state."""
KNOWN = (*KEPT, torch.dtype, torch.device, str, type(None))
"""Further kinds of values in an empty cache layer, which need not be saved."""


class LayerCache:
    """The cache layers that one decoder layer uses, and the further values that a pass carries.

    Args:
        layers: Cache layers by index.
    """

    def __init__(self, layers: Mapping[int, Any]) -> None:
        self.layers = dict(layers)
        self.attended: dict[int, dict[int, Tensor]] = {}
        """Further outputs of the attention, by first position and place."""
        self.handed: dict[int, dict[int, Tensor]] = {}
        """Further outputs of the layer, by first position and place."""

    def __deepcopy__(self, _: dict[int, Any]) -> "LayerCache":
        """Return a copy from which a pass may continue, without the values of the last pass."""
        return LayerCache({index: _copy(layer) for index, layer in self.layers.items()})

    def tensors(self) -> dict[str, Tensor]:
        """Return the whole content as tensors by name."""
        nothing = torch.empty(0, dtype=torch.float32)
        found = {"cache.": nothing}  # an empty cache has a name too
        for index, layer in self.layers.items():
            for path, value in _values(layer):
                name = f"cache.{index}.{path}"
                if isinstance(value, Tensor):
                    found[name] = value.contiguous()
                else:
                    found[f"{name}={type(value).__name__}"] = _number(value)
        for kind in ("attended", "handed"):
            for lo, values in getattr(self, kind).items():
                found[f"{kind}.{lo}."] = nothing
                found.update({f"{kind}.{lo}.{place}": t for place, t in values.items()})
        return found

    def load(self, tensors: Mapping[str, Tensor]) -> "LayerCache":
        """Fill this empty cache with the tensors that `tensors` returned."""
        for name, tensor in tensors.items():
            kind, _, rest = name.partition(".")
            if not rest:
                continue
            number, _, path = rest.partition(".")
            if kind == "cache":
                _set(self.layers[int(number)], path, tensor)
                continue
            values = getattr(self, kind).setdefault(int(number), {})
            if path:
                values[int(path)] = tensor
        return self

    def refuse_unknown(self) -> None:
        """Refuse values that `tensors` would leave out.

        Raises:
            ModelError: Such a value exists; the text names it and its cache layer.
        """
        for layer in self.layers.values():
            for name, value in vars(layer).items():
                for one in value.values() if isinstance(value, dict) else (value,):
                    if not isinstance(one, KNOWN):
                        raise ModelError(
                            f"a {type(layer).__name__} keeps a {type(one).__name__} in its "
                            f"{name}: not supported"
                        )

    def compact(self) -> None:
        """Copy views that keep a larger storage alive, so that the rest of the storage is freed."""
        made: dict[int, Tensor] = {}  # a tensor with two names stays one tensor
        for layer in self.layers.values():
            for name, value in list(_values(layer)):
                if isinstance(value, Tensor) and value.untyped_storage().nbytes() > value.nbytes:
                    if id(value) not in made:
                        made[id(value)] = value.clone(memory_format=torch.contiguous_format)
                    _put(layer, name, made[id(value)])


def _copy(layer: Any) -> Any:
    if type(layer).__name__ not in JOINED:
        return copy.deepcopy(layer)
    made = copy.copy(layer)
    vars(made).update({n: dict(v) for n, v in vars(layer).items() if isinstance(v, dict)})
    return made


def _number(value: bool | float) -> Tensor:
    """Return a tensor with the value of a number."""
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


def _values(layer: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values of a cache layer that a pass may change, by path."""
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            yield from ((f"{name}.{key}", x) for key, x in value.items() if isinstance(x, KEPT))
        elif isinstance(value, KEPT):
            yield name, value


def _set(layer: Any, path: str, tensor: Tensor) -> None:
    """Set a value in an empty cache layer."""
    path, _, kind = path.partition("=")
    if not kind:
        layer.dtype, layer.device = tensor.dtype, tensor.device
    _put(layer, path, tensor.item() if kind else tensor)


def _put(layer: Any, path: str, value: Any) -> None:
    name, _, key = path.partition(".")
    if not key:
        vars(layer)[name] = value
        return
    found = vars(layer)[name]
    found[next(k for k in found if str(k) == key)] = value
