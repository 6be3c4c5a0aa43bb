"""A dense checkpoint, read tensor by tensor: a folder of safetensors, or a GGUF file."""

import shutil
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from safetensors import safe_open
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig

from qllm.errors import ModelError
from qllm.models.folders import INDEX, first_line, read_json, weight_files
from qllm.models.weights import gguf_file
from qllm.models.weights.checkpoint import stored_tensors
from qllm.models.weights.gguf_file import open_file
from qllm.models.weights.quantised import FLOATS, method_of

_TEXT_FILES = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_NOT_COPIED = ("config.json", INDEX, "hf_quant_config.json")


class Dense(Protocol):
    """A checkpoint whose tensors are read on demand."""

    config: PreTrainedConfig
    dtype: torch.dtype
    """Dtype of the stored weights; bfloat16 if they are stored in blocks of integers."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of all stored tensors by transformers' name.

        Raises:
            ModelError: A tensor has a name that no model of the config has.
        """
        ...

    def read(self, name: str) -> Tensor:
        """Return a tensor in floating point."""
        ...

    def save_beside(self, folder: Path) -> None:
        """Write the tokenizer, with its chat template, and the generation config."""
        ...


def open_dense(path: Path) -> Dense:
    """Open a folder as `save_pretrained` writes it, or a file that ends in .gguf.

    Raises:
        ModelError: The path is neither, is broken, or contains weights that cannot be read.
    """
    if path.is_dir():
        return DenseFolder(path)
    if path.is_file() and path.suffix == ".gguf":
        return DenseGguf(path)
    raise ModelError(
        f"{path} is no folder with a checkpoint and no .gguf file; give one that is on this machine"
    )


class DenseFolder:
    """Safetensors in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.config = _config(folder)
        method = method_of(self.config, read_json(folder / "hf_quant_config.json"))
        if method is not None:
            raise ModelError(
                f"{folder} is quantised with {method.name!r}; give one with float32, float16 or "
                "bfloat16 weights, or a .gguf file"
            )
        found = {file: stored_tensors(file) for file in weight_files(folder)}
        self._file_of = {name: file for file, tensors in found.items() for name in tensors}
        self._shapes = {name: t.shape for tensors in found.values() for name, t in tensors.items()}
        if not self._shapes:
            raise ModelError(f"{folder} holds no tensors; download it again")
        self.dtype = self.read(next(iter(self._shapes))).dtype
        if self.dtype not in FLOATS:
            raise ModelError(f"{folder} holds {self.dtype}; give float32, float16 or bfloat16")

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of all stored tensors by name."""
        return self._shapes

    def read(self, name: str) -> Tensor:
        """Return a tensor as it is stored."""
        with safe_open(self._file_of[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def save_beside(self, folder: Path) -> None:
        """Copy every text file except those that describe the weights."""
        for file in sorted(self._folder.iterdir()):
            if file.suffix in _TEXT_FILES and file.name not in _NOT_COPIED:
                shutil.copyfile(file, folder / file.name)
        if not (folder / "generation_config.json").exists():
            GenerationConfig.from_model_config(self.config).save_pretrained(folder)


class DenseGguf:
    """A GGUF file, whose blocks of integers are expanded one tensor at a time."""

    def __init__(self, path: Path) -> None:
        self._file = open_file(path)
        self.config = gguf_file.config_of(self._file)
        stored = self._file.tensors.values()
        kinds = {tensor.tensor_type.name for tensor in stored if len(tensor.shape) > 1}
        self.dtype = {"F32": torch.float32, "F16": torch.float16}.get(
            kinds.pop() if len(kinds) == 1 else "", torch.bfloat16
        )

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of all stored tensors by transformers' name."""
        return {name: part.shape for name, part in self._parts.items()}

    @cached_property
    def _parts(self) -> dict[str, gguf_file.GgufPart]:
        """Return the parts of all stored tensors by transformers' name."""
        return gguf_file.parts_of(self._file, meta_model(self.config))

    def read(self, name: str) -> Tensor:
        """Return a tensor in float32, its rows in the order of transformers."""
        from gguf import dequantize

        tensor, _, shape, rows = self._parts[name]
        values = dequantize(tensor.data, tensor.tensor_type).copy()
        found = torch.from_numpy(values).reshape(shape).float()
        return found if rows is None else found[rows]

    def save_beside(self, folder: Path) -> None:
        """Write tokenizer and generation config from the file's metadata."""
        from qllm.models.weights.gguf_tokenizer import tokenizer_of

        tokenizer = tokenizer_of(self._file.path)
        if tokenizer is None:
            raise ModelError(f"{self._file.path} holds no tokenizer; take a file that has one")
        tokenizer.model_max_length = self.config.max_position_embeddings
        tokenizer.save_pretrained(folder)
        GenerationConfig.from_model_config(self.config).save_pretrained(folder)


def meta_model(config: PreTrainedConfig) -> transformers.PreTrainedModel:
    """Return a model of a config whose parameters take no memory."""
    make: Any = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model: transformers.PreTrainedModel = make.from_config(config)
    return model


def _config(folder: Path) -> PreTrainedConfig:
    try:
        config: PreTrainedConfig = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True
        )
    except Exception as error:
        raise ModelError(f"config of {folder} is not usable: {first_line(error)}") from error
    return config
