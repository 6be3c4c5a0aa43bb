"""GGUF files, opened, with the names of the family's safetensors.

`gguf_config` reads metadata, `formats.gguf` reads blocks. Tensors have the names that the package
gguf gives to those of a checkpoint of safetensors, as llama.cpp's converter does. Each expert of a
stack gets the name of its weight in safetensors, so that it is loaded in the same way.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from operator import mul
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.core_model_loading import revert_weight_conversion

from qllm.errors import ModelError
from qllm.models.folders import first_line
from qllm.models.weights import gguf_config
from qllm.models.weights.checkpoint import Checkpoint, naming
from qllm.models.weights.formats import gguf as blocks
from qllm.models.weights.formats.layout import Weight
from qllm.models.weights.gguf_config import ARCHITECTURES, ROPE_FACTORS, Metadata
from qllm.models.weights.raw_file import Buffers, RawFile

_ENDS = ("eos", "eot", "eom")
"""Tokens that end a text, a turn, and a message that a tool answers."""
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Generation config's name for each key `general.sampling.<key>`."""
_ROW = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_EXPERT = re.compile(r"(?<=\.experts\.)(\d+)\.")
"""The number of an expert in the name of its weight."""
_ONE_OF_STACK = re.compile(r"(blk\.\d+\.ffn_(?:gate|up|down))\.(\d+)(\.weight)")
"""Name of an expert that is a tensor of its own, as in files of early 2024."""


class GgufFile(NamedTuple):
    """An open file: its tensors as the package gguf has them."""

    path: Path
    said: Metadata
    tensors: Mapping[str, Any]
    sampling: Mapping[str, Any] = {}
    """Sampling defaults, with the keys of a generation config."""


class GgufPart(NamedTuple):
    """Place in a file of a weight from a checkpoint of safetensors."""

    tensor: Any
    """Tensor of the package gguf."""
    expert: int | None
    """Number of an expert in a stack; None is the whole tensor."""
    shape: tuple[int, ...]
    """The shape of the weight."""
    rows: Tensor | None
    """Numbers of the tensor's rows in the order of transformers; None if they are in that order."""


def open_reader(path: Path) -> Any:
    """Open a file by the package gguf.

    Raises:
        ModelError: The package is missing, or the file is broken or a part of a model.
    """
    try:
        from gguf import GGUFReader
    except ModuleNotFoundError as error:
        raise ModelError(
            f"{path} is a GGUF file, and the package gguf is not installed: pip install gguf"
        ) from error
    try:
        reader: Any = GGUFReader(path)
        parts = reader.fields.get("split.count")
        num_parts = 1 if parts is None else int(parts.contents())
        reader.fields["general.architecture"].contents()
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ModelError(
            f"{path} is truncated or no GGUF file ({type(error).__name__}: {first_line(error)}); "
            "download it again"
        ) from error
    if num_parts > 1:
        raise ModelError(
            f"{path} is one of {num_parts} parts of a model; join them: llama-gguf-split "
            "--merge FIRST_PART WHOLE.gguf"
        )
    return reader


def open_file(path: Path) -> GgufFile:
    """Open a file and check that it can be read.

    Raises:
        ModelError: `open_reader` refuses the file, or its architecture or a type of its tensors is
            unsupported.
    """
    reader = open_reader(path)
    architecture = str(reader.fields["general.architecture"].contents())
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{path} is a GGUF file of architecture {architecture!r}; read are "
            f"{', '.join(ARCHITECTURES)}: load the model's safetensors instead"
        )
    kind = reader.fields.get("general.type")
    if kind is not None and kind.contents() != "model":
        raise ModelError(f"{path} holds no model, but what it calls {kind.contents()!r}")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    known = (*blocks.READERS, *blocks.PLAIN)
    odd = {t.tensor_type.name for t in tensors.values() if t.tensor_type.name not in known}
    if odd:
        raise ModelError(
            f"{path} has tensors of type {', '.join(sorted(odd))}; read are {', '.join(known)}: "
            "take a file of another quantisation (Q4_K_M, Q8_0)"
        )
    _refuse_overlaps(path, tensors)
    sampling = {
        name: _value(reader.fields[key])
        for end, name in _SAMPLING.items()
        if (key := f"general.sampling.{end}") in reader.fields
    }
    return GgufFile(path, _said(path, architecture, reader.fields, tensors), tensors, sampling)


def _said(
    path: Path, architecture: str, fields: Mapping[str, Any], tensors: Mapping[str, Any]
) -> Metadata:
    """Return a file's description of its model, without the vocabulary."""
    start = f"{architecture}."
    token = {
        name: int(fields[key].contents())
        for name in ("bos", *_ENDS)
        if (key := f"tokenizer.ggml.{name}_token_id") in fields
    }
    factors = tensors.get(ROPE_FACTORS)
    return Metadata(
        file=str(path),
        architecture=architecture,
        values={
            key.removeprefix(start): _value(field)
            for key, field in fields.items()
            if key.startswith(start)
        },
        shapes={name: _shape(tensor) for name, tensor in tensors.items()},
        ends=[token[name] for name in _ENDS if name in token],
        start=token.get("bos"),
        rope_factors=None if factors is None else torch.from_numpy(factors.data.copy()).float(),
    )


def _value(field: Any) -> Any:
    """Return the value of a key; for a 32-bit float, the shortest number that rounds to it.

    The original config has that number: 1e-05, and not 9.99999974e-06.
    """
    value = field.contents()
    if field.types[-1].name != "FLOAT32":
        return value
    found = [float(str(field.parts[i][0])) for i in field.data]
    return found if isinstance(value, list) else found[0]


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(int(n) for n in reversed(tensor.shape))


def _refuse_overlaps(path: Path, tensors: Mapping[str, Any]) -> None:
    """Refuse a file in which two tensors share bytes: one of its offsets is wrong."""
    places = sorted((int(t.data_offset), int(t.n_bytes), name) for name, t in tensors.items())
    for (start, num_bytes, name), (after, _, other) in pairwise(places):
        if start + num_bytes > after:
            raise ModelError(f"{path}: {name} and {other} lie on the same bytes; download it again")


def config_of(file: GgufFile) -> PreTrainedConfig:
    """Return the config of a model.

    Raises:
        ModelError: A key of the metadata is missing or unknown.
    """
    return gguf_config.config_of(file.said)


def expert_bits(file: GgufFile) -> float:
    """Return the average bits of a weight of the experts in memory.

    Raises:
        ModelError: There are no experts.
    """
    stacks = [t for name, t in file.tensors.items() if _is_of_experts(name)]
    if not stacks:
        raise ModelError(f"{file.path} has no experts (tensors *_exps.weight); download it again")
    sizes = [int(tensor.n_elements) for tensor in stacks]
    bits = [blocks.BITS.get(tensor.tensor_type.name, 16.0) for tensor in stacks]
    return float(sum(map(mul, sizes, bits)) / sum(sizes))


def _is_of_experts(name: str) -> bool:
    return name.endswith("_exps.weight") or _ONE_OF_STACK.fullmatch(name) is not None


def parts_of(file: GgufFile, model: Any) -> dict[str, GgufPart]:
    """Return the weights of a file by their names in safetensors.

    Args:
        file: An open file.
        model: Model of its config, on the meta device.

    Raises:
        ModelError: A tensor has no place in the model, or another shape, or is missing.
    """
    places = _places(file, model)
    found: dict[str, GgufPart] = {}
    for name, tensor in file.tensors.items():
        if name == ROPE_FACTORS and gguf_config.architecture_of(file.said).pairs:
            continue  # the config contains it
        if name not in places:
            raise ModelError(f"{file.path}: the tensor {name} has no place in the model")
        is_stack, weights = name.endswith("_exps.weight"), places[name]
        shape = tuple(next(iter(weights.values())))
        _refuse_shape(file.path, tensor, (len(weights), *shape) if is_stack else shape)
        if twice := sorted(weights.keys() & found.keys()):
            raise ModelError(f"{file.path}: {name} is there twice ({twice[0]}); download it again")
        rows = _rows(file, model.config, name)
        for weight in weights:
            number = _EXPERT.search(weight) if is_stack else None
            found[weight] = GgufPart(tensor, number and int(number[1]), shape, rows)
    for name, weights in places.items():
        if missing := sorted(weights.keys() - found.keys()):
            raise ModelError(
                f"{file.path} lacks the tensor {name} ({missing[0]}); download it again"
            )
    return found


def _places(file: GgufFile, model: Any) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return names and shapes of weights in safetensors, by the names of the file's tensors.

    A stack of experts comes first. After it, each expert has the name that old files give it.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    arch = next(key for key, name in MODEL_ARCH_NAMES.items() if name == file.said.architecture)
    names = get_tensor_name_map(arch, model.config.num_hidden_layers)
    stored: Any = revert_weight_conversion(model, model.state_dict())
    stacks: dict[str, dict[str, tuple[int, ...]]] = {}
    single: dict[str, dict[str, tuple[int, ...]]] = {}
    for weight, value in stored.items():
        if weight == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        shape, expert = tuple(value.shape), _EXPERT.search(weight)
        spelling = _EXPERT.sub("", weight).replace("_correction_bias", "_correction.bias")
        name = names.get_name(spelling, (".weight", ".bias")) or weight
        stacks.setdefault(name, {})[weight] = shape
        if expert is not None:
            single[name.replace("_exps.", f".{expert[1]}.")] = {weight: shape}
    return stacks | single


def _rows(file: GgufFile, config: Any, name: str) -> Tensor | None:
    """Return rows of queries and keys that lie in pairs, reordered to halves of a head."""
    kind = name.split(".")[-2]
    if kind not in ("attn_q", "attn_k") or not gguf_config.architecture_of(file.said).pairs:
        return None
    heads = config.num_attention_heads if kind == "attn_q" else config.num_key_value_heads
    num = file.said.shapes[name][0]
    return torch.arange(num).view(heads, -1, 2).transpose(1, 2).reshape(num)


def checkpoint_of(file: GgufFile, model: Any) -> Checkpoint:
    """Return a checkpoint that reads the weights of a file by their names in safetensors.

    Args:
        file: An open file.
        model: Model of its config, on the meta device.

    Raises:
        ModelError: A tensor has no place in the model, or another shape, or is missing.
    """
    raw = RawFile(file.path, Buffers())
    plain: dict[str, Callable[[], Tensor]] = {}
    quantised: dict[str, Callable[[], Weight]] = {}
    parts = parts_of(file, model)
    for name, part in parts.items():
        is_plain = part.tensor.tensor_type.name in blocks.PLAIN
        into: dict[str, Callable[[], Any]] = plain if is_plain else quantised
        into[name] = partial(_read, raw, part)
    kinds = sorted({t.tensor_type.name for t in file.tensors.values()} - set(blocks.PLAIN))

    def one(name: str, index: int | None) -> Weight:
        assert index is None, "experts of a stack have names of their own"
        return plain[name]() if name in plain else quantised[name]()

    def rows(name: str, index: int | None, rows: range) -> Weight:
        assert index is None, "experts of a stack have names of their own"
        return _read(raw, parts[name], rows)

    in_rows = {name for name, part in parts.items() if part.rows is None and len(part.shape) == 2}
    return Checkpoint(f"gguf {' '.join(kinds)}".strip(), plain, quantised, one, rows, in_rows)


def _refuse_shape(path: Path, tensor: Any, wanted: tuple[int, ...]) -> None:
    found = _shape(tensor)
    if [n for n in found if n != 1] != [n for n in wanted if n != 1]:
        raise ModelError(
            f"{path}: the tensor {tensor.name} is {found}, and has to be {wanted} as the metadata "
            "say; download it again"
        )


def _read(file: RawFile, part: GgufPart, own: range | None = None) -> Weight:
    """Read a weight, its rows in the order of transformers, and a vector in the model's shape.

    Args:
        file: File of the weight.
        part: Place of the weight.
        own: Rows to read, of a weight with rows in the file's order; None is all.
    """
    tensor, kind = part.tensor, part.tensor.tensor_type.name
    data = tensor.data if part.expert is None else tensor.data[part.expert]
    start = int(tensor.data_offset) + (part.expert or 0) * int(data.nbytes)
    size, shape = int(data.nbytes), part.shape
    if own is not None:
        row_bytes = size // len(data)
        data, shape = data[own.start : own.stop], (len(own), *shape[1:])
        start, size = start + own.start * row_bytes, len(own) * row_bytes
    with naming(str(tensor.name)):
        raw = file.read(start, size)
    stored = raw.view(data.shape) if kind in blocks.READERS else raw.view(_ROW[kind])
    if kind in blocks.READERS:
        return blocks.read(kind, stored if part.rows is None else stored[part.rows])
    plain = stored.view(shape)
    return plain if part.rows is None else plain[part.rows]
