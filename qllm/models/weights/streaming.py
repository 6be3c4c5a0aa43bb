"""The loader of a checkpoint with quantised weights, tensor by tensor.

    experts     stay quantised, if all weights of a layer are alike and the device is a CPU that
                computes in bf16: packed while they are read, `QuantisedExperts` on their module
    linears     stay so under the same conditions, projections and the head: `QuantisedLinear`
    the rest    becomes bf16 (or the dtype asked for) while it is read, and transformers puts it
                into the model

Tensors are read on demand. Memory contains the weights that were read so far, and the buffers of
one weight at a time.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from qllm.errors import ModelError
from qllm.kernels.cpu.quantised import is_like, stacked
from qllm.kernels.quantised import Quantised
from qllm.models.weights.checkpoint import Checkpoint, naming
from qllm.models.weights.conversions import alike, expanded
from qllm.models.weights.experts_apart import ExpertsApart
from qllm.models.weights.formats.layout import Weight
from qllm.models.weights.formats.rounding import ROUNDINGS
from qllm.models.weights.places import Place, by_module, is_turned, places_of, targets_of
from qllm.models.weights.quantised_experts import (
    WEIGHTS,
    QuantisedExperts,
    Room,
    pack_experts,
    say_rounded,
)
from qllm.models.weights.quantised_linears import QuantisedLinear, all_linears, fits, staying
from qllm.models.weights.quantised_weights import AnyWeights, DeviceWeights, Weights

OUTPUTS_FIRST = ("mxfp4", *ROUNDINGS)
"""Formats whose stacks of experts are [E, n, k], whatever the layout of the model's parameter."""
T = TypeVar("T")
Read = Callable[[], Weight]
Wait = Callable[[], AnyWeights | None]
"""A function that waits for one parameter's weights of all experts. It returns None if the weights
cannot stay quantised.
"""
READERS = 8
"""Threads that read and pack. There are more threads than cores, because they wait for the disk."""
KEPT = "qllm_kept"
"""Our method's name among transformers' quantisers: it leaves parameters out."""


@dataclass(slots=True)
class Outcome:
    """Counts of quantised weights that stayed, and that were expanded."""

    kept: list[str] = field(default_factory=list)
    """Codes and group of every layer whose experts stay quantised."""
    linears: list[str] = field(default_factory=list)
    """Codes and group of every linear module that stays quantised."""
    expanded: int = 0
    """Number of weights that became plain numbers."""

    def text(self, format_name: str, dtype: torch.dtype) -> str:
        """Return a text: "fp8: experts of 24 layers as e4m3 g128, 97 others ..."."""
        kinds = sorted(set(self.kept))
        parts = [f"experts of {self.kept.count(kind)} layers kept as {kind}" for kind in kinds]
        for kind in sorted(set(self.linears)):
            parts.append(f"{self.linears.count(kind)} linear modules kept as {kind}")
        if self.expanded:
            kind = str(dtype).removeprefix("torch.")
            parts.append(f"{self.expanded} {'other ' * bool(parts)}weights expanded to {kind}")
        return f"{format_name}: {', '.join(parts) or 'nothing is quantised'}"


@register_quantization_config(KEPT)
class _KeptConfig(QuantizationConfigMixin):
    """A list of parameters that transformers must not load."""

    def __init__(self, names: Sequence[str] = (), **_: Any) -> None:
        self.quant_method: Any = KEPT
        self.names = list(names)


@register_quantizer(KEPT)
class _Kept(HfQuantizer):
    """A quantiser that removes parameters from a model before transformers loads its weights."""

    requires_calibration = False

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        chosen: Any = self.quantization_config
        for name in chosen.names:
            path, _, parameter = name.rpartition(".")
            module = model.get_submodule(path)
            del module._parameters[parameter]
            module._is_hf_initialized = True  # nothing is left to initialise

    @property
    def is_trainable(self) -> bool:
        return False

    def is_serializable(self, **_: Any) -> bool:
        return False


class _Lazy:
    """A tensor that transformers reads when it needs it."""

    def __init__(self, read: Callable[[], Tensor]) -> None:
        self._read = read

    def __getitem__(self, _: object) -> Tensor:
        return self._read()


def stream(
    model_class: Any,
    config: PreTrainedConfig,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    rounding: str | None = None,
    experts: ExpertsApart | None = None,
) -> tuple[PreTrainedModel, dict[str, Any], Outcome]:
    """Load a model.

    Args:
        model_class: Class of transformers, for causal generation.
        config: Config of the model, without a quantization_config.
        checkpoint: Weights to load.
        dtype: Type of the weights that do not stay quantised.
        device: Device of the weights.
        rounding: Key of `ROUNDINGS`: plain weights of experts are rounded while they are read.
        experts: Place of the experts outside the model; None keeps them in the model.

    Returns:
        The model, transformers' report of keys and shapes that do not fit, and the counts of
        quantised weights.

    Raises:
        ModelError: Weights do not fit the model.
    """
    with torch.device("meta"):
        skeleton: PreTrainedModel = model_class._from_config(config, dtype=dtype)
    outcome, kept = Outcome(), _Held()
    if experts is not None:
        checkpoint = experts.take(skeleton, checkpoint)
    keeps, on_cpu = dtype is torch.bfloat16 and device.type in ("cpu", "cuda"), device.type == "cpu"
    if rounding is not None and keeps:
        checkpoint = _rounded(skeleton, checkpoint, rounding)
    rest = dict(checkpoint.quantised)
    places = places_of(skeleton, checkpoint.quantised)
    turned = {name for name, place in places.items() if is_turned(skeleton, place)}
    if turned and checkpoint.format not in OUTPUTS_FIRST:
        raise ModelError(
            f"{min(turned)} is a stack of {checkpoint.format} for a parameter that has inputs "
            "first: how it is laid out is not known; load bfloat16 weights"
        )
    if keeps:
        room: Room = Weights if on_cpu else partial(DeviceWeights, device=device)
        kept.take(skeleton, checkpoint, places, rest, room, linears=on_cpu)
    plain = _without_empty_biases(skeleton, checkpoint)
    lazies = {name: _Lazy(read) for name, read in plain.items()}
    lazies |= {
        name: _Lazy(partial(_expanded, name, read, name in turned)) for name, read in rest.items()
    }
    model, info = model_class.from_pretrained(
        None,
        config=config,
        state_dict=lazies,
        dtype=dtype,
        device_map=None if device.type == "cpu" else {"": device},
        quantization_config=_KeptConfig([*kept.names(), *(experts.names() if experts else ())]),
        ignore_mismatched_sizes=True,  # the caller refuses them by name
        output_loading_info=True,
    )
    kept.enter(skeleton, model, rounding, outcome)
    if experts is not None:
        outcome.kept += experts.enter(model)
    outcome.expanded = len(rest)
    for path in {place.module for name, place in places.items() if name in rest}:
        say_rounded(model.get_submodule(path), checkpoint.format)
    _forget_method(model)
    return model, info, outcome


@contextmanager
def _readers() -> Iterator[Executor]:
    """Run threads that read and pack. After the block they start nothing more."""
    pool = ThreadPoolExecutor(READERS, "qllm-read")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _one_ahead(items: Iterable[T]) -> Iterator[T]:
    """Yield each item after the next one was made, so that readers already work on the next."""
    before: list[T] = []
    for item in items:
        yield from before
        before = [item]
    yield from before


class _Held:
    """The weights of a model that stay quantised."""

    def __init__(self) -> None:
        self._experts: dict[str, dict[str, AnyWeights]] = {}
        self._linears: dict[str, Quantised] = {}

    def take(
        self,
        skeleton: PreTrainedModel,
        checkpoint: Checkpoint,
        places: Mapping[str, Place],
        rest: dict[str, Callable[[], Weight]],
        room: Room,
        *,
        linears: bool,
    ) -> None:
        """Read experts, and linears if set, that can stay quantised; drop them from `rest`."""
        with _readers() as pool:
            others = {n: read for n, read in rest.items() if n not in places} if linears else {}
            found_linears = _linears(skeleton, others, pool)  # early: the head takes long
            read = partial(_begun, places=places, checkpoint=checkpoint, pool=pool, room=room)
            begun = (
                (path, names, read(skeleton.get_submodule(path), names))
                for path, names in by_module(places).items()
            )
            for path, names, wait in _one_ahead(begun):
                if (found := wait()) is not None:
                    self._experts[path] = found
                    for name in names:
                        del rest[name]
            for name, target, weight in found_linears:
                self._linears[target.rpartition(".")[0]] = weight
                del rest[name]

    def names(self) -> list[str]:
        """Return the parameters that transformers must not load."""
        experts = [f"{path}.{name}" for path in self._experts for name in WEIGHTS]
        return [*experts, *(f"{path}.weight" for path in self._linears)]

    def enter(
        self, skeleton: nn.Module, model: nn.Module, rounding: str | None, outcome: Outcome
    ) -> None:
        """Put the weights into the model."""
        for path, weights in self._experts.items():
            empty, experts = skeleton.get_submodule(path)._parameters, model.get_submodule(path)
            experts._parameters.update({name: empty[name] for name in WEIGHTS})
            held = QuantisedExperts(weights, rounding)
            held.enter(experts)
            outcome.kept.append(held.kind)
        for path, weight in self._linears.items():
            module: Any = model.get_submodule(path)
            outcome.linears.append(QuantisedLinear(module, weight).kind)


def _rounded(model: PreTrainedModel, checkpoint: Checkpoint, rounding: str) -> Checkpoint:
    """Return a checkpoint that rounds the weights of experts while they are read."""
    plain, quantised = dict(checkpoint.plain), dict(checkpoint.quantised)
    for name, place in places_of(model, checkpoint.plain).items():
        turned = is_turned(model, place)
        quantised[name] = partial(_round, name, plain.pop(name), ROUNDINGS[rounding], turned)
    return checkpoint._replace(format=rounding, plain=plain, quantised=quantised)


def _round(
    name: str, read: Callable[[], Tensor], rounding: Callable[[Tensor], Quantised], turned: bool
) -> Quantised:
    with naming(name):
        weight = read()
        return rounding(weight.transpose(-1, -2) if turned else weight)


def _without_empty_biases(model: PreTrainedModel, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return plain tensors without the zeros that AutoGPTQ writes for missing biases."""
    ends = {weight.removesuffix(".weight") + ".bias" for weight in checkpoint.quantised}
    biases = ends & checkpoint.plain.keys()
    spare = biases - targets_of(model, biases).keys()
    read = checkpoint.plain.items()
    return {name: one for name, one in read if name not in spare or bool(one().any())}


def _expanded(name: str, read: Callable[[], Weight], turned: bool) -> Tensor:
    """Return a quantised weight in bf16, in the layout of the model's parameter."""
    value = expanded(name, read())
    return value.transpose(-1, -2) if turned else value


def _forget_method(model: Any) -> None:
    """Remove transformers' marks of quantisation, because only our modules describe it."""
    for name in ("hf_quantizer", "quantization_method", "is_quantized"):
        if name in vars(model):
            delattr(model, name)
    for config in (model.config, getattr(model, "generation_config", None)):
        vars(config).pop("quantization_config", None)
    if all_linears(model):
        return
    for module in model.modules():  # the Mamba of Jamba computes other bits with this mark
        if (own := getattr(module, "config", None)) is not None:
            vars(own).pop("_is_quantized", None)


# -- linear modules


def _linears(
    model: PreTrainedModel, reads: Mapping[str, Read], pool: Executor
) -> Iterator[tuple[str, str, Quantised]]:
    """Start to read the linears that can stay quantised.

    Yield for each linear its name in the checkpoint, its name in the model, and its weight.
    """
    every = targets_of(model, reads)
    kept = staying(model, every.values())
    targets = {name: target for name, target in every.items() if target in kept}

    def read(name: str) -> Quantised | None:
        weight, shape = reads[name](), model.get_parameter(targets[name]).shape
        return weight if fits(weight) and weight.shape == shape else None

    found = zip(targets.items(), pool.map(read, targets), strict=True)
    return ((name, target, weight) for (name, target), weight in found if weight is not None)


# -- the experts of one layer


def _begun(
    module: nn.Module,
    names: Sequence[str],
    places: Mapping[str, Place],
    checkpoint: Checkpoint,
    pool: Executor,
    room: Room,
) -> Callable[[], dict[str, AnyWeights] | None]:
    """Start to read a module's experts.

    Returns:
        A function that waits for every expert's weights by parameter. It returns None if weights
        are missing, or not alike.
    """
    stacks = {}
    for parameter in WEIGHTS:
        own = [name for name in names if places[name].parameter == parameter]
        stacks[parameter] = _of_parameter(module, parameter, own, places, checkpoint, pool, room)

    def wait() -> dict[str, AnyWeights] | None:
        found: dict[str, AnyWeights] = {}
        for parameter in WEIGHTS:
            shape = getattr(module, parameter).shape
            wanted = tuple(shape[:0:-1] if module.is_transposed else shape[1:])
            weights = stacks[parameter]()
            if weights is None or (weights.num, *weights.shape) != (shape[0], *wanted):
                stacks.clear()  # frees the room of the other parameter, too
                return None
            found[parameter] = weights
        return found

    return wait


def _of_parameter(
    module: nn.Module,
    parameter: str,
    names: Sequence[str],
    places: Mapping[str, Place],
    checkpoint: Checkpoint,
    pool: Executor,
    room: Room,
) -> Wait:
    """Start to read one weight per expert; None if weights are missing, or are not alike."""
    by_place = {places[name][2:]: name for name in names}
    if list(by_place) == [(0, None)]:
        return partial(_of_stack, module, parameter, names[0], checkpoint, room)
    num_parts = 1 + max((place.part for place in map(places.get, names) if place), default=0)
    num_experts = len(by_place) // num_parts
    wanted = [(part, expert) for expert in range(num_experts) for part in range(num_parts)]
    if not names or set(wanted) != set(by_place) or not module.is_concatenated:
        return lambda: None
    experts = _grouped([by_place[place] for place in wanted], num_parts)
    begun = [_one_by_one(experts, checkpoint, pool, room)]

    def wait() -> AnyWeights | None:
        found = begun.pop()()  # frees its room before more is taken
        return found or _at_once(experts, checkpoint, pool, room)

    return wait


def _of_stack(
    module: nn.Module, parameter: str, name: str, checkpoint: Checkpoint, room: Room
) -> AnyWeights | None:
    """Read the weights of all experts in one tensor, and pack them; None if not quantised."""
    stack = checkpoint.quantised[name]()
    if not isinstance(stack, Quantised) or stack.codes.dim() != 3:
        return None
    apart = [stack.one(expert) for expert in range(len(stack.codes))]
    with naming(name):
        return pack_experts(module, {parameter: apart}, room)[parameter]


def _one_by_one(
    experts: Sequence[Sequence[str]], checkpoint: Checkpoint, pool: Executor, room: Room
) -> Wait:
    """Start to pack each expert on the thread that reads it; None if one is not like the first."""

    def read(expert: int) -> list[Quantised]:
        return _matrices([checkpoint.quantised[name]() for name in experts[expert]])

    def first() -> AnyWeights | None:
        parts = read(0)
        weights = _weights_of(parts, len(experts), room)
        if weights is not None:
            _take(weights, 0, experts[0], parts)
        return weights

    weights = pool.submit(first).result()  # queued after earlier work of the readers
    if weights is None:
        return lambda: None

    are_alike = True

    def take(expert: int) -> bool:
        nonlocal are_alike
        parts = read(expert) if are_alike else []
        if not parts or not all(is_like(part, weights.like) for part in parts):
            are_alike = False
            return False
        _take(weights, expert, experts[expert], parts)
        return True

    taken = pool.map(take, range(1, len(experts)))
    return lambda: weights if all(taken) else None


def _matrices(weights: Sequence[Weight]) -> list[Quantised]:
    """Return the weights if each is quantised and a matrix, else an empty list."""
    found = [one for one in weights if isinstance(one, Quantised) and one.codes.dim() == 2]
    return found if len(found) == len(weights) else []


def _at_once(
    experts: Sequence[Sequence[str]], checkpoint: Checkpoint, pool: Executor, room: Room
) -> AnyWeights | None:
    """Read all weights, and convert them to one format; None if that is impossible."""
    names = chain.from_iterable(experts)
    found = alike(list(pool.map(lambda name: checkpoint.quantised[name](), names)))
    num_parts = len(experts[0])
    weights = None if found is None else _weights_of(found[:num_parts], len(experts), room)
    if found is None or weights is None:
        return None
    grouped = _grouped(found, num_parts)
    list(pool.map(partial(_take, weights), range(len(experts)), experts, grouped))
    return weights


def _take(
    weights: AnyWeights, expert: int, names: Sequence[str], parts: Sequence[Quantised]
) -> None:
    """Pack one expert."""
    with naming(" and ".join(names)):
        weights.take(expert, [parts])


def _grouped(parts: Sequence[T], num: int) -> list[Sequence[T]]:
    """Return parts in groups of `num` neighbours."""
    return [parts[i : i + num] for i in range(0, len(parts), num)]


def _weights_of(parts: Sequence[Quantised], num: int, room: Room) -> AnyWeights | None:
    """Return room for `num` weights like the one of these parts; None if the parts differ."""
    whole = stacked(parts)
    return None if whole is None else room(num, whole)
