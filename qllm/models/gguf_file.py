"""GGUF files: found, opened, and named as the family's safetensors are.

Config, tokenizer and names of tensors are transformers' (`modeling_gguf_pytorch_utils`), blocks are
read by `formats.gguf`. Stacks of experts get the name of each expert's weight in a checkpoint of
safetensors, so that they are loaded as those are.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import pairwise
from operator import mul
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from qllm.errors import ModelError
from qllm.models.checkpoint import Checkpoint, naming
from qllm.models.folders import first_line
from qllm.models.formats import gguf as blocks
from qllm.models.formats.layout import Weight
from qllm.models.raw_file import Buffers, RawFile

ARCHITECTURES = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}
"""`general.architecture` -> model type, of those that are read."""
STACKS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
"""Tensors `ffn_<key>_exps` -> what an expert's weight is called."""
_DROPPED = (".rope.scaling.", ".attention.sliding_window")
"""Metadata that change what a model computes, and that transformers drops."""
_ENDS = ("eos", "eot", "eom")
"""Tokens that end a text, a turn, and a message behind which a tool answers."""
_WIDTHS = {
    "ffn_gate_exps.weight": "moe_intermediate_size",
    "ffn_gate_shexp.weight": "shared_expert_intermediate_size",
}
_ROW = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufFile(NamedTuple):
    """An open file: its tensors as the package gguf has them."""

    path: Path
    architecture: str
    tensors: Mapping[str, Any]
    ends: tuple[int, ...] = ()
    """Ids of the tokens that end an answer, of which transformers reads one."""


def open_file(path: Path) -> GgufFile:
    """Open a file and see that it is read.

    Raises:
        ModelError: The package gguf is missing, the file is broken or a part of a model, or its
            architecture, a type of its tensors or what changes its positions is not read.
    """
    try:
        from gguf import GGUFReader
    except ModuleNotFoundError as error:
        raise ModelError(
            f"{path} is a GGUF file, and the package gguf is not installed: pip install gguf"
        ) from error
    try:
        open_reader: Any = GGUFReader
        reader = open_reader(path)
        parts = reader.fields.get("split.count")
        num_parts = 1 if parts is None else int(parts.contents())
        if num_parts > 1:
            raise ModelError(
                f"{path} is one of {num_parts} parts of a model; join them: llama-gguf-split "
                "--merge FIRST_PART WHOLE.gguf"
            )
        architecture = str(reader.fields["general.architecture"].contents())
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ModelError(
            f"{path} is truncated or no GGUF file ({type(error).__name__}: {first_line(error)}); "
            "download it again"
        ) from error
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{path} is a GGUF file of architecture {architecture!r}; read are "
            f"{', '.join(ARCHITECTURES)}: load the model's safetensors instead"
        )
    refuse_dropped(path, reader.fields)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    known = (*blocks.READERS, *blocks.PLAIN)
    odd = {t.tensor_type.name for t in tensors.values() if t.tensor_type.name not in known}
    if odd:
        raise ModelError(
            f"{path} has tensors of type {', '.join(sorted(odd))}; read are {', '.join(known)}: "
            "take a file of another quantisation (Q4_K_M, Q8_0)"
        )
    _refuse_overlaps(path, tensors)
    ends = [reader.fields.get(f"tokenizer.ggml.{name}_token_id") for name in _ENDS]
    return GgufFile(
        path, architecture, tensors, tuple(int(end.contents()) for end in ends if end is not None)
    )


def refuse_dropped(path: Path, keys: Iterable[str]) -> None:
    """Refuse a file by the keys of its metadata, where one is dropped that matters.

    Raises:
        ModelError: Names them.
    """
    if dropped := sorted(key for key in keys if any(part in key for part in _DROPPED)):
        raise ModelError(
            f"{path}: {', '.join(dropped)} would be ignored, and the model wrong; take its "
            "original checkpoint in safetensors instead"
        )


def _refuse_overlaps(path: Path, tensors: Mapping[str, Any]) -> None:
    """Refuse a file in which two tensors share bytes: one of its offsets is wrong."""
    places = sorted((int(t.data_offset), int(t.n_bytes), name) for name, t in tensors.items())
    for (start, num_bytes, name), (after, _, other) in pairwise(places):
        if start + num_bytes > after:
            raise ModelError(f"{path}: {name} and {other} lie on the same bytes; download it again")


def config_of(file: GgufFile) -> PreTrainedConfig:
    """The config of a model; widths of experts, which transformers leaves at a default, by tensors.

    Raises:
        ModelError: transformers makes none of it.
    """
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            file.path.parent, gguf_file=file.path.name
        )
    except Exception as error:
        raise ModelError(f"{file.path} gives no config: {first_line(error)}") from error
    if file.ends:
        config.eos_token_id = list(dict.fromkeys(file.ends))
    for name, attribute in _WIDTHS.items():
        found = next((t for key, t in file.tensors.items() if key.endswith(name)), None)
        if found is not None:
            setattr(config, attribute, len(found.data[0] if "exps" in name else found.data))
    return config


def expert_bits(file: GgufFile) -> float:
    """Bits of a weight of the experts in memory, on average.

    Raises:
        ModelError: There are no experts.
    """
    stacks = [t for name, t in file.tensors.items() if name.endswith("_exps.weight")]
    if not stacks:
        raise ModelError(f"{file.path} has no experts (tensors *_exps.weight); download it again")
    sizes = [int(tensor.n_elements) for tensor in stacks]
    bits = [blocks.BITS.get(tensor.tensor_type.name, 16.0) for tensor in stacks]
    return float(sum(map(mul, sizes, bits)) / sum(sizes))


def checkpoint_of(file: GgufFile, model: Any) -> Checkpoint:
    """The weights of a file by their names in safetensors.

    Args:
        file: An open file.
        model: Of its config, on the meta device.

    Raises:
        ModelError: A tensor has no place in the model, or another shape.
    """
    from transformers import modeling_gguf_pytorch_utils

    theirs: Any = modeling_gguf_pytorch_utils
    processor = theirs.TENSOR_PROCESSORS[file.architecture](config=model.config.to_dict())
    names = theirs.get_gguf_hf_weights_map(model, processor)
    shapes, raw = model.state_dict(), RawFile(file.path, Buffers())
    plain: dict[str, Callable[[], Tensor]] = {}
    quantised: dict[str, Callable[[], Weight]] = {}
    for name, tensor in file.tensors.items():
        target = names.get(name) or names.get(name.removesuffix(".weight"))
        if target is None:
            raise ModelError(f"{file.path}: the tensor {name} has no place in the model")
        is_plain = tensor.tensor_type.name in blocks.PLAIN
        into: dict[str, Callable[[], Any]] = plain if is_plain else quantised
        kind = name.removesuffix("_exps.weight").rpartition("_")[2]
        if name.endswith("_exps.weight") and kind in STACKS:
            start = target.rpartition(".")[0]
            for expert in range(len(tensor.data)):
                into[f"{start}.{expert}.{STACKS[kind]}.weight"] = partial(
                    _read, raw, tensor, expert
                )
        else:
            shape = tuple(shapes[target].shape)
            _refuse_shape(file.path, tensor, shape)
            into[target] = partial(_read, raw, tensor, None, shape)
    kinds = sorted({t.tensor_type.name for t in file.tensors.values()} - set(blocks.PLAIN))
    return Checkpoint(f"gguf {' '.join(kinds)}".strip(), plain, quantised)


def _refuse_shape(path: Path, tensor: Any, wanted: tuple[int, ...]) -> None:
    found = tuple(int(n) for n in reversed(tensor.shape))
    if [n for n in found if n != 1] != [n for n in wanted if n != 1]:
        raise ModelError(
            f"{path}: the tensor {tensor.name} is {found}, and has to be {wanted} as the metadata "
            "say; download it again"
        )


def _read(
    file: RawFile, tensor: Any, expert: int | None, shape: tuple[int, ...] | None = None
) -> Weight:
    """One weight, or a vector in the shape that the model has."""
    data, kind = tensor.data if expert is None else tensor.data[expert], tensor.tensor_type.name
    start = int(tensor.data_offset) + (expert or 0) * int(data.nbytes)
    with naming(str(tensor.name)):
        raw = file.read(start, int(data.nbytes))
    if kind in blocks.READERS:
        return blocks.read(kind, raw.view(data.shape))
    plain = raw.view(_ROW[kind]).view((*data.shape[:-1], -1))
    return plain if shape is None else plain.reshape(shape)
