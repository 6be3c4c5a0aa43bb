"""Places of a checkpoint's weights in a model.

transformers' own tables turn names of tensors into names of parameters. So every family that
transformers loads is loaded here.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from qllm.models.weights.quantised_experts import WEIGHTS


class Place(NamedTuple):
    """The place of an expert's weight in a model."""

    module: str
    parameter: str
    part: int
    """Number of the output: gate is 0 and up 1 where they are stored separately."""
    expert: int | None
    """Number of the expert; None is a stack of all experts."""


class Renamed(NamedTuple):
    """A tensor of a checkpoint for which a model has a parameter."""

    name: str
    target: str
    converter: tuple[str, WeightConverter] | None
    """Converter that makes the parameter from several tensors, and its pattern for this one."""


def places_of(model: PreTrainedModel, names: Iterable[str]) -> dict[str, Place]:
    """Return the places of experts' weights by their names in the checkpoint, without others."""
    dims = {name: p.dim() for name, p in model.named_parameters(remove_duplicate=False)}
    found = {}
    for name, target, converter in renamed(model, names):
        module, _, parameter = target.rpartition(".")
        if parameter not in WEIGHTS or dims[target] != 3:
            continue
        if not hasattr(model.get_submodule(module), "is_transposed"):
            continue  # llama4: experts without transformers' interface run as they are
        if converter is None:
            found[name] = Place(module, parameter, 0, None)
        elif (place := in_list(name, *converter)) is not None:
            found[name] = Place(module, parameter, *place)
    return found


def targets_of(model: PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """Return the parameters that are equal to weights of the checkpoint, by the weights' names."""
    every = renamed(model, names)
    return {name: target for name, target, converter in every if converter is None}


def by_module(places: Mapping[str, Place]) -> dict[str, list[str]]:
    """Return names of the weights of each module of experts."""
    found: dict[str, list[str]] = {}
    for name, place in places.items():
        found.setdefault(place.module, []).append(name)
    return found


def is_turned(model: nn.Module, place: Place) -> bool:
    """Return True if a stack of weights [n, k] belongs to a parameter [E, k, n]."""
    if place.expert is not None:
        return False
    experts: Any = model.get_submodule(place.module)
    return bool(experts.is_transposed)


def renamed(model: PreTrainedModel, names: Iterable[str]) -> Iterator[Renamed]:
    """Yield the names for which a model has a parameter."""
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    of_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    shapes = model.state_dict()
    prefix = model.base_model_prefix
    for name in names:
        target, pattern = rename_source_key(name, renamings, converters, prefix, shapes)
        if target in shapes:
            yield Renamed(name, target, None if pattern is None else (pattern, of_pattern[pattern]))


def makes_several(model: PreTrainedModel) -> bool:
    """Return True if several parameters of a model may be made of one tensor."""
    mapping = get_model_conversion_mapping(model)
    return any(len(x.target_patterns) > 1 for x in mapping if isinstance(x, WeightConverter))


def in_list(name: str, pattern: str, converter: WeightConverter) -> tuple[int, int] | None:
    """Return part and expert of a listed weight; None if loading does not only stack and join."""
    operations = [type(operation) for operation in converter.operations]
    if operations not in ([MergeModulelist], [MergeModulelist, Concatenate]):
        return None
    match = _numbered(pattern).search(name)
    return None if match is None else (converter.source_patterns.index(pattern), int(match[1]))


@cache
def _numbered(pattern: str) -> re.Pattern[str]:
    """Return a converter's pattern with a group for the number in place of its star."""
    return re.compile(re.escape(pattern).replace(r"\*", r"(\d+)"))
