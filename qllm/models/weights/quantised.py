"""Quantised checkpoints, and the methods that are supported.

transformers loads some of them wrongly without an error: it casts float8 weights with unknown
scales as if they were bf16. Those are errors here, found in the headers of the shards before a
weight is read.
"""

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from qllm.errors import ModelError
from qllm.models.weights.formats.compressed_tensors import compressed_tensors
from qllm.models.weights.formats.fp8 import fp8
from qllm.models.weights.formats.int32 import awq, gptq
from qllm.models.weights.formats.layout import Format, Settings, Stored, check
from qllm.models.weights.formats.mxfp4 import mxfp4

FORMATS: dict[str, Callable[[Settings], Format]] = {
    "mxfp4": mxfp4,
    "fp8": fp8,
    "awq": awq,
    "gptq": gptq,
    "compressed-tensors": compressed_tensors,
}
"""Supported methods of `quantization_config`."""
FLOATS = {torch.float32, torch.bfloat16, torch.float16}
"""Dtypes that the drivers compute in."""
_NARROW = ("F8_", "F6_", "F4")
_INTEGERS = ("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64")
_PLAIN = ("F32", "F16", "BF16")
_LOAD_WHAT = "load float32, float16 or bfloat16 weights"
_INV_FREQ = r"rotary_emb\.inv_freq|(^|\.)position_ids$"
"""Buffers that old checkpoints carry and transformers ignores for every family."""


class Method(NamedTuple):
    """A checkpoint's own description of its quantisation."""

    name: str
    settings: Settings = MappingProxyType({})
    """The `quantization_config`."""


def method_of(config: PreTrainedConfig, beside: Mapping[str, Any]) -> Method | None:
    """Return a checkpoint's method of quantisation; None if it has none.

    Args:
        config: Config of the model.
        beside: Contents of hf_quant_config.json, which ModelOpt writes; empty without the file.

    Raises:
        ModelError: The file's contents are not as ModelOpt writes them.
    """
    for part in (config, config.get_text_config(decoder=True)):
        for name in ("quantization_config", "compression_config"):
            found = getattr(part, name, None)
            if found is not None:
                return _method(found if isinstance(found, Mapping) else vars(found))
    algorithm = _object_in(beside, "quantization").get("quant_algo")
    if algorithm is None:
        return None
    producer = _object_in(beside, "producer").get("name", "hf_quant_config.json")
    return Method(f"{producer} {algorithm}")


def _object_in(beside: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = beside.get(key)
    check(
        found is None or isinstance(found, Mapping),
        f"hf_quant_config.json says {key}={str(found)[:200]!r}, which must be an object; download "
        "it again, or delete it where no weight is quantised",
    )
    return found or {}


def _method(settings: Mapping[str, Any]) -> Method:
    if settings.get("load_in_8bit") or settings.get("load_in_4bit"):
        return Method("bitsandbytes")
    found = settings.get("quant_method") or settings.get("quant_algo") or "no method named"
    return Method(str(getattr(found, "value", found)), dict(settings))


def format_of(name: str, method: Method) -> Format:
    """Return the format of a checkpoint with this method.

    Args:
        name: Name of the model.
        method: Result of `method_of`.

    Raises:
        ModelError: The method, or a setting of it, is unsupported; the text lists the supported
            ones.
    """
    start = f"checkpoint of model {name!r}"
    make = FORMATS.get(method.name)
    if make is None:
        raise ModelError(
            f"{start} is quantised with {method.name!r}, which is not supported; read are "
            f"{', '.join(FORMATS)} and GGUF files, or load float32, float16 or bfloat16 weights"
        )
    try:
        return make(method.settings)
    except ModelError as error:
        raise ModelError(f"{start}: {error}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelError(
            f"{start}: its quantization_config is none of {method.name!r} "
            f"({type(error).__name__}: {error}); download config.json again"
        ) from error


def refuse_dtypes(name: str, tensors: Mapping[str, Stored], why: str) -> None:
    """Refuse 8-bit weights without scales, and unsupported dtypes: transformers would cast them.

    Args:
        name: Name of the model.
        tensors: Tensors that no format claims, by name.
        why: Text about the missing scales of weights of 8 bits.

    Raises:
        ModelError: There is one; the text names the first.
    """
    narrow = sorted(key for key, found in tensors.items() if found.dtype.startswith(_NARROW))
    if narrow:
        raise ModelError(
            f"checkpoint of model {name!r} has {len(narrow)} tensors of 8 bits or fewer and {why}, "
            f"first {narrow[0]} ({tensors[narrow[0]].dtype}); {_LOAD_WHAT}"
        )
    odd = sorted(k for k, found in tensors.items() if found.dtype not in _PLAIN + _INTEGERS)
    if odd:
        raise ModelError(
            f"checkpoint of model {name!r} has {len(odd)} tensors of a dtype that is not read, "
            f"first {odd[0]} ({tensors[odd[0]].dtype}); read are {', '.join(_PLAIN)}: convert them"
        )


def refuse_integers(model: PreTrainedModel, name: str, tensors: Mapping[str, Stored]) -> None:
    """Refuse integers where the model has none: an unknown method packed them.

    Raises:
        ModelError: There is one; the text names the first.
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


def refuse_quantised(model: nn.Module) -> None:
    """Refuse a model in memory whose weights are not plain floating-point tensors.

    Raises:
        ModelError: There is one; the text names the method, or the first such tensor.
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
