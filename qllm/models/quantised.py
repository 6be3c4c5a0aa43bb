"""Which checkpoints are quantised, and what becomes of them.

transformers loads some of them without a word: float8 weights whose scales it does not know are
cast as if they were bf16, and weights it knows are expanded. The first are errors here, found in
the headers of the shards before a weight is read; the second are loaded, and named.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from qllm.errors import ModelError

EXPANDED = ("fp8", "mxfp4")
"""Methods of `quantization_config` that transformers expands as it loads: float8 with a scale per
block (DeepSeek), and the 4-bit experts of gpt-oss."""
SCALE = "_scale_inv"
"""Ends the name of the scales of a float8 weight, in method "fp8"."""
FLOATS = {torch.float32, torch.bfloat16, torch.float16}
"""Dtypes that the drivers compute in."""
_NARROW = ("F8", "F6", "F4")
_INTEGERS = ("U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64")
_LOAD_WHAT = "load float32, float16 or bfloat16 weights"
_INV_FREQ = r"rotary_emb\.inv_freq|(^|\.)position_ids$"
"""Buffers that old checkpoints carry and transformers ignores for every family."""


class Stored(NamedTuple):
    """A tensor in a file."""

    dtype: str
    """As safetensors spells it: BF16, F8_E4M3."""
    shape: tuple[int, ...]


class Method(NamedTuple):
    """How a checkpoint says it is quantised."""

    name: str
    block: tuple[int, ...] | None = None
    """Rows and columns that share a scale, in method "fp8"; None is all of a weight."""


def stored_tensors(shard: Path) -> dict[str, Stored]:
    """Read the header of a file: its tensors by name.

    Raises:
        ModelError: The file is truncated, or no safetensors file.
    """
    try:
        with safe_open(shard, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {
                name: Stored(str(found.get_dtype()), tuple(found.get_shape()))
                for name, found in slices.items()
            }
    except (SafetensorError, OSError) as error:
        text = str(error).strip().splitlines() or ["no message"]
        raise ModelError(
            f"{shard} is truncated or no safetensors file ({text[0][:300]}); download it again"
        ) from error


def method_of(config: PreTrainedConfig, beside: Mapping[str, Any]) -> Method | None:
    """What a checkpoint says it is quantised with; None if it says nothing.

    Args:
        config: Of the model.
        beside: Contents of hf_quant_config.json, which ModelOpt writes; empty without the file.
    """
    for part in (config, config.get_text_config(decoder=True)):
        for name in ("quantization_config", "compression_config"):
            found = getattr(part, name, None)
            if found is not None:
                return _method(found if isinstance(found, Mapping) else vars(found))
    algorithm = dict(beside.get("quantization") or {}).get("quant_algo")
    if algorithm is None:
        return None
    producer = dict(beside.get("producer") or {}).get("name", "hf_quant_config.json")
    return Method(f"{producer} {algorithm}")


def _method(settings: Mapping[str, Any]) -> Method:
    if settings.get("load_in_8bit") or settings.get("load_in_4bit"):
        return Method("bitsandbytes")
    found = settings.get("quant_method") or settings.get("quant_algo") or "no method named"
    block = settings.get("weight_block_size")
    return Method(str(getattr(found, "value", found)), None if block is None else tuple(block))


def refuse_unknown(name: str, method: Method | None, tensors: Mapping[str, Stored]) -> None:
    """Refuse a checkpoint whose weights transformers would not expand, or expand wrongly.

    Args:
        name: Of the model.
        method: What `method_of` found.
        tensors: All that are stored, by name.

    Raises:
        ModelError: Names the method, or the first tensor that would be wrong.
    """
    start = f"checkpoint of model {name!r}"
    if method is not None and method.name not in EXPANDED:
        raise ModelError(
            f"{start} is quantised with {method.name!r}, which is not supported "
            f"(expanded as they load: {', '.join(EXPANDED)}); {_LOAD_WHAT}"
        )
    narrow = sorted(key for key, found in tensors.items() if found.dtype.startswith(_NARROW))
    why = "no known quantization_config to scale them"
    if method is not None and method.name == "fp8":
        weights = [key for key in narrow if not key.endswith(SCALE)]
        narrow = [key for key in weights if key + SCALE not in tensors]
        why = f"no {narrow[0]}{SCALE}" if narrow else ""
        _refuse_uneven(start, method, {key: tensors[key] for key in weights}, tensors)
    if narrow:
        raise ModelError(
            f"{start} has {len(narrow)} tensors of 8 bits or fewer and {why}, first {narrow[0]} "
            f"({tensors[narrow[0]].dtype}); {_LOAD_WHAT}"
        )


def _refuse_uneven(
    start: str, method: Method, weights: Mapping[str, Stored], tensors: Mapping[str, Stored]
) -> None:
    """Refuse float8 weights whose last block is cut: transformers 5.23 takes equal blocks."""
    for key, weight in weights.items():
        scale = tensors.get(key + SCALE)
        if method.block is None or scale is None:
            continue
        grid = scale.shape[-2:]
        sides = zip(weight.shape[-2:], grid, method.block, strict=False)
        if any(num > 1 and size != num * block for size, num, block in sides):
            raise ModelError(
                f"{start}: {key} of shape {weight.shape} is no whole number of blocks of "
                f"{method.block}, whose scales transformers would put to the wrong rows; "
                f"{_LOAD_WHAT}"
            )


def refuse_integers(model: PreTrainedModel, name: str, tensors: Mapping[str, Stored]) -> None:
    """Refuse integers where the model has none: weights packed by an unknown method.

    Raises:
        ModelError: Names the first of them.
    """
    own = model.state_dict()
    prefix = model.base_model_prefix + "."
    patterns = [*(model._keys_to_ignore_on_load_unexpected or ()), _INV_FREQ]
    ignored = re.compile("|".join(f"({pattern})" for pattern in patterns))

    def is_known(key: str) -> bool:
        mine = own.get(key, own.get(prefix + key))
        if mine is not None:
            return not mine.is_floating_point()
        return ignored.search(key) is not None

    packed = [k for k, found in tensors.items() if found.dtype in _INTEGERS and not is_known(k)]
    if packed:
        first = min(packed)
        raise ModelError(
            f"checkpoint of model {name!r} has {len(packed)} integer tensors where its model has "
            f"floating point, first {first} ({tensors[first].dtype}), and no known "
            f"quantization_config; {_LOAD_WHAT}"
        )


def expansion(model: nn.Module, method: Method | None, stored_bytes: int) -> str | None:
    """What was expanded into what, for people; None if nothing was."""
    if method is None:
        return None
    tensors = [*model.parameters(), *model.buffers()]
    now = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    kinds = {tensor.dtype for tensor in model.parameters()}
    dtype = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
    return f"{_size(stored_bytes)} of {method.name} expanded to {_size(now)} of {dtype}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def refuse_quantised(model: nn.Module) -> None:
    """Refuse a model in memory whose weights are not plain floating-point tensors.

    Raises:
        ModelError: Names the method, or the first tensor that is something else.
    """
    if getattr(model, "is_quantized", False):
        method = getattr(model, "quantization_method", "an unknown method")
        raise ModelError(
            f"the model is quantised with {getattr(method, 'value', method)}; {_LOAD_WHAT}"
        )
    for name, parameter in model.named_parameters():
        kind = type(parameter.data)
        if kind not in (Tensor, nn.Parameter):
            raise ModelError(f"parameter {name} is quantised ({kind.__name__}); {_LOAD_WHAT}")
        if parameter.dtype not in FLOATS:
            raise ModelError(f"parameter {name} is quantised ({parameter.dtype}); {_LOAD_WHAT}")
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() and buffer.element_size() == 1:
            raise ModelError(f"buffer {name} is quantised ({buffer.dtype}); {_LOAD_WHAT}")
