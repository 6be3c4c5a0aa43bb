"""Read a dense checkpoint tensor by tensor: a folder of safetensors, or a GGUF file."""

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

from qllm.errors import ModelError, pip_install
from qllm.models.checkpoint import stored_tensors
from qllm.models.folders import INDEX, first_line, read_json, weight_files
from qllm.models.gguf_file import refuse_dropped
from qllm.models.quantised import FLOATS, method_of

_TEXT_FILES = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_NOT_COPIED = ("config.json", INDEX, "hf_quant_config.json")


class Dense(Protocol):
    """A checkpoint whose tensors are read when they are asked for."""

    config: PreTrainedConfig
    dtype: torch.dtype
    """The weights' own as they are stored; bfloat16 if they are stored in blocks of integers."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every stored tensor by transformers' name.

        Raises:
            ModelError: One has a name that no model of the config has.
        """
        ...

    def read(self, name: str) -> Tensor:
        """One tensor, in floating point."""
        ...

    def save_beside(self, folder: Path) -> None:
        """Write the tokenizer, with its chat template, and the generation config."""
        ...


def open_dense(path: Path) -> Dense:
    """Open a folder as `save_pretrained` writes it, or a file that ends in .gguf.

    Raises:
        ModelError: It is neither, broken, or holds weights that cannot be read.
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
        """Every stored tensor by name."""
        return self._shapes

    def read(self, name: str) -> Tensor:
        """One tensor as it is stored."""
        with safe_open(self._file_of[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def save_beside(self, folder: Path) -> None:
        """Copy every text file but those that describe the weights."""
        for file in sorted(self._folder.iterdir()):
            if file.suffix in _TEXT_FILES and file.name not in _NOT_COPIED:
                shutil.copyfile(file, folder / file.name)
        if not (folder / "generation_config.json").exists():
            GenerationConfig.from_model_config(self.config).save_pretrained(folder)


class DenseGguf:
    """A GGUF file; blocks of integers are expanded, one tensor at a time."""

    def __init__(self, path: Path) -> None:
        try:
            from gguf import GGUFReader
        except ModuleNotFoundError as error:
            raise ModelError(f"reading {path} needs {error.name}: {pip_install('gguf')}") from error
        self._path = path
        try:
            reader = GGUFReader(path)
        except (ValueError, IndexError, KeyError) as error:
            raise ModelError(
                f"{path} is truncated or no GGUF file ({first_line(error)}); download it again"
            ) from error
        refuse_dropped(path, reader.fields)
        self.config = _config(path.parent, gguf_file=path.name)
        self._architecture = str(reader.fields["general.architecture"].contents())
        self._stored = reader.tensors
        kinds = {tensor.tensor_type.name for tensor in reader.tensors if len(tensor.shape) > 1}
        self.dtype = {"F32": torch.float32, "F16": torch.float16}.get(
            kinds.pop() if len(kinds) == 1 else "", torch.bfloat16
        )

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every stored tensor by transformers' name."""
        return {
            name: tuple(int(n) for n in reversed(tensor.shape))
            for name, tensor in self._tensors.items()
        }

    @cached_property
    def _tensors(self) -> dict[str, Any]:
        """Every stored tensor by transformers' name."""
        named = self._names()
        if unknown := sorted(t.name for t in self._stored if t.name not in named):
            raise ModelError(
                f"{self._path}: {len(unknown)} tensors are none of a {self.config.model_type} "
                f"model, first {unknown[0]}"
            )
        return {named[tensor.name]: tensor for tensor in self._stored}

    def _names(self) -> dict[str, str]:
        """Names in the file -> names of transformers."""
        from transformers import modeling_gguf_pytorch_utils as gguf_utils

        processors: Any = gguf_utils.TENSOR_PROCESSORS
        self._processor = processors.get(self._architecture, gguf_utils.TensorProcessor)(
            config=self.config.to_dict()
        )
        names: Any = gguf_utils.get_gguf_hf_weights_map
        found: dict[str, str] = names(meta_model(self.config), self._processor)
        return found

    def read(self, name: str) -> Tensor:
        """One tensor in float32, its rows in the order of transformers."""
        from gguf import dequantize

        tensor = self._tensors[name]
        values = dequantize(tensor.data, tensor.tensor_type)
        done = self._processor.process(weights=values, name=tensor.name)
        return torch.from_numpy(done.weights.copy()).float()

    def save_beside(self, folder: Path) -> None:
        """Write what the metadata of the file say."""
        make: Any = transformers.AutoTokenizer
        try:
            tokenizer = make.from_pretrained(
                self._path.parent, gguf_file=self._path.name, local_files_only=True
            )
        except Exception as error:
            raise ModelError(
                f"tokenizer of {self._path} cannot be read: {first_line(error)}"
            ) from error
        tokenizer.model_max_length = self.config.max_position_embeddings
        tokenizer.save_pretrained(folder)
        GenerationConfig.from_model_config(self.config).save_pretrained(folder)


def meta_model(config: PreTrainedConfig) -> transformers.PreTrainedModel:
    """A model of a config whose parameters take no memory."""
    make: Any = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model: transformers.PreTrainedModel = make.from_config(config)
    return model


def _config(folder: Path, **gguf: str) -> PreTrainedConfig:
    try:
        config: PreTrainedConfig = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, **gguf
        )
    except Exception as error:
        where = "/".join((str(folder), *gguf.values()))
        raise ModelError(f"config of {where} is not usable: {first_line(error)}") from error
    return config
