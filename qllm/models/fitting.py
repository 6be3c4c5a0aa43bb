"""A check of a checkpoint's headers against its model, before a weight is read.

transformers reports misfits only after it has read everything, by its own parameter names. It does
not name the missing tensors of incomplete lists of experts.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedConfig, PreTrainedModel

from qllm.errors import ModelError
from qllm.models.weights.places import Renamed, in_list, makes_several, renamed

Shape = tuple[int, ...]
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_AGAIN = "download it again"


class _Part(NamedTuple):
    """The part of a checkpoint that a parameter needs."""

    target: str
    expert: int | None
    part: int
    shape: Shape


def without_further_layers(names: Iterable[str], config: PreTrainedConfig) -> set[str]:
    """Return names without the names of layers after the last, which predict further tokens.

    DeepSeek-V3 and GLM publish such layers. transformers skips them by their numbers in a few
    models. This function skips the layers that the config counts, if they have a projection of two
    hidden states, which no other layer has.
    """
    names = set(names)
    text = config.get_text_config(decoder=True)
    first, num = text.num_hidden_layers, getattr(text, "num_nextn_predict_layers", None) or 0
    for layer in range(first, first + num):
        own = {name for name in names if f"layers.{layer}." in name}
        if any(name.endswith(".eh_proj.weight") for name in own):
            names -= own
    return names


def refuse_misfits(name: str, model: PreTrainedModel, shapes: Mapping[str, Shape | None]) -> None:
    """Refuse a checkpoint that lacks a tensor of its model, or has a tensor of another shape.

    Args:
        name: Name of the model.
        model: Model made from its config, on the meta device.
        shapes: Shapes of its weights by name; None if only the weight's codes show the shape.

    Raises:
        ModelError: The checkpoint does not fit. The text has the first wrong name, in the
            checkpoint's spelling.
    """
    found: dict[str, dict[str, Renamed]] = {}
    for one in renamed(model, shapes):
        found.setdefault(one.target, {})[one.name] = one
    start = f"checkpoint of model {name!r} does not fit its config: "
    spelling = _Spelling(found)
    missing, odd = list[str](), list[tuple[str, Shape, Shape]]()
    for target, parameter in _needed(model, found):
        have = {_place(one): key for key, one in found.get(target, {}).items()}
        if None in have:
            continue  # made by transformers' own rules
        for part in _parts(target, tuple(parameter.shape), spelling, have):
            key = have.get((part.expert, part.part))
            if key is None:
                missing.append(spelling.of(part))
            elif (shape := shapes[key]) is not None and shape != part.shape:
                odd.append((key, shape, part.shape))
    if missing:
        raise ModelError(
            f"{start}{len(missing)} missing keys, first {min(missing)}; "
            f"{_advice(model, shapes, found)}"
        )
    if odd:
        key, shape, wanted = min(odd)
        raise ModelError(
            f"{start}{len(odd)} weights of another shape, first {key}, which is {shape} and must "
            f"be {wanted}; {_AGAIN}"
        )


def _needed(model: PreTrainedModel, found: Mapping[str, object]) -> Iterator[tuple[str, Any]]:
    """Yield the parameters and buffers that a checkpoint must have, one of each tied group."""
    if makes_several(model):
        yield from ((name, x) for name, x in model.state_dict().items() if name in found)
        return
    optional = re.compile(
        "|".join(f"({x})" for x in model._keys_to_ignore_on_load_missing or ["$^"])
    )
    names: dict[int, list[str]] = {}
    own = model.state_dict(keep_vars=True)
    for name, value in own.items():
        names.setdefault(id(value), []).append(name)
    for same in names.values():
        there = [name for name in same if name in found]
        for name in there or [name for name in same[:1] if not optional.search(name)]:
            yield name, own[name]


def _place(one: Renamed) -> tuple[int | None, int] | None:
    """Return the tensor's expert and its part of the parameter; None if they are unknown."""
    if one.converter is None:
        return (None, 0)
    place = in_list(one.name, *one.converter)
    return None if place is None else (place[1], place[0])


def _parts(
    target: str, shape: Shape, spelling: "_Spelling", have: Mapping[Any, str]
) -> Iterator[_Part]:
    """Yield the tensors that make a parameter: the parameter itself, or parts of its experts."""
    num_parts = spelling.num_parts(target)
    if not num_parts or (None, 0) in have:
        yield _Part(target, None, 0, shape)
        return
    wanted = (shape[1] // num_parts, *shape[2:])
    for expert in range(max(shape[0], *(place[0] + 1 for place in have), 0)):
        for part in range(num_parts):
            yield _Part(target, expert, part, wanted)


class _Spelling:
    """The names of parameters in a checkpoint, derived from the names in other layers."""

    def __init__(self, found: Mapping[str, Mapping[str, Renamed]]) -> None:
        self._names: dict[tuple[str, int], str] = {}
        self._num_parts: dict[str, int] = {}
        for target, own in found.items():
            for name, one in own.items():
                place = _place(one)
                if place is not None:
                    self._names.setdefault((_kind(target), place[1]), name)
                if one.converter is not None and place is not None:
                    self._num_parts[_kind(target)] = len(one.converter[1].source_patterns)

    def num_parts(self, target: str) -> int:
        """Return the number of parts per expert if the checkpoint lists experts singly, else 0."""
        return self._num_parts.get(_kind(target), 0)

    def of(self, part: _Part) -> str:
        """Return the name of a part, or the parameter's name if the checkpoint has no such part."""
        like = self._names.get((_kind(part.target), part.part), part.target)
        numbers = _NUMBER.findall(part.target)
        if part.expert is not None:
            numbers.append(str(part.expert))
        if len(_NUMBER.findall(like)) != len(numbers):
            return part.target
        left = iter(numbers)
        return _NUMBER.sub(lambda _: next(left), like)


def _kind(name: str) -> str:
    return _NUMBER.sub("N", name)


def _advice(model: PreTrainedModel, names: Iterable[str], found: Mapping[str, object]) -> str:
    """Return advice about missing tensors: other names, or another download."""
    prefix = _prefix_of(sorted(names), model)
    if prefix and not found:
        return (
            f"all its names begin with {prefix!r}, so it is a part of another model: save that "
            "part alone"
        )
    return _AGAIN


def _prefix_of(names: Sequence[str], model: PreTrainedModel) -> str:
    """Return the prefix that all names of a checkpoint have before the names of parameters."""
    starts = [i + 1 for i, letter in enumerate(names[0]) if letter == "."] if names else []
    for end in starts:
        prefix = names[0][:end]
        if all(name.startswith(prefix) for name in names):
            rest = [name.removeprefix(prefix) for name in names]
            if len(list(renamed(model, rest))) == len(rest):
                return prefix
    return ""
