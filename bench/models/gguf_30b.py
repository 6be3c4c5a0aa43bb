"""The checkpoint of `checkpoint_30b` as a GGUF file in Q4_0, with exactly its values.

A scale of 128 inputs is written for each of the 4 blocks that have these inputs. It is bf16, and
fp16 has the same number. The embedding stays bf16, norms and routers become fp32. One layer at a
time is in memory.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3MoeConfig

from bench.models.checkpoint_30b import GROUP, SHAPE, Noise
from bench.models.four_bits import BLOCK, BLOCK_BYTES, begun
from bench.serving.llama_server import EXPERTS, NAMES

BF16, F32, Q4_0 = (gguf.GGMLQuantizationType[name] for name in ("BF16", "F32", "Q4_0"))
FIRST = "blk.0."


class Made(NamedTuple):
    """A tensor of the file."""

    name: str
    data: np.ndarray
    kind: Any
    """Type in the file."""


def q4_0(words: Tensor, scale: Tensor) -> np.ndarray:
    """Return a weight in blocks of Q4_0, uint8 [n, bytes].

    Args:
        words: Codes of 4 bits around 8, the first in the lowest bits, int32 [n, k / 8].
        scale: Scales, bf16 [n, k / 128].
    """
    pairs = words.numpy().view(np.uint8)
    codes = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(len(pairs), -1, BLOCK)
    blocks = np.empty((*codes.shape[:-1], BLOCK_BYTES), np.uint8)
    exact = scale.float().numpy()
    halves = exact.astype(np.float16)
    assert np.array_equal(halves.astype(np.float32), exact), "fp16 has every scale"
    blocks[..., :2] = np.repeat(halves, GROUP // BLOCK, axis=1)[..., None].view(np.uint8)
    blocks[..., 2:] = codes[..., : BLOCK // 2] | codes[..., BLOCK // 2 :] << 4
    return blocks.reshape(len(pairs), -1)


def _quantised(found: Mapping[str, Tensor], name: str) -> np.ndarray:
    return q4_0(found[f"{name}.weight_packed"], found[f"{name}.weight_scale"])


def _plain(name: str, weight: Tensor) -> Made:
    return Made(name, weight.float().numpy(), F32)


def ends(noise: Noise) -> Iterator[Made]:
    """Yield embedding, last norm and head."""
    found = dict(noise.ends())
    raw = found["model.embed_tokens.weight"].view(torch.uint8)
    yield Made("token_embd.weight", raw.numpy(), BF16)
    yield _plain("output_norm.weight", found["model.norm.weight"])
    yield Made("output.weight", _quantised(found, "lm_head"), Q4_0)


def layer(noise: Noise, index: int, num_experts: int) -> Iterator[Made]:
    """Yield the tensors of a layer."""
    theirs, ours = f"model.layers.{index}.", f"blk.{index}."
    found = {name.removeprefix(theirs): tensor for name, tensor in noise.layer(index)}
    for name, short in NAMES.items():
        if f"{name}.weight" in found:
            yield _plain(f"{ours}{short}.weight", found[f"{name}.weight"])
        else:
            yield Made(f"{ours}{short}.weight", _quantised(found, name), Q4_0)
    yield _plain(f"{ours}ffn_gate_inp.weight", found["mlp.gate.weight"])
    for name, short in EXPERTS.items():
        each = [_quantised(found, f"mlp.experts.{e}.{name}") for e in range(num_experts)]
        yield Made(f"{ours}{short}.weight", np.stack(each), Q4_0)


def write_gguf(path: Path, num_layers: int, shape: Mapping[str, Any] = SHAPE) -> None:
    """Write the file.

    Args:
        path: Path of the file.
        num_layers: Number of layers.
        shape: Other fields of the `Qwen3MoeConfig`.
    """
    config = Qwen3MoeConfig(**{**shape, "num_hidden_layers": num_layers})
    num, writer, noise = shape["num_experts"], begun(path, num_layers, shape), Noise(config)
    for one in ends(noise):
        _announce(writer, one)
    alike = list(layer(noise, 0, num))
    for index in range(num_layers):
        for one in alike:
            _announce(writer, one._replace(name=one.name.replace(FIRST, f"blk.{index}.")))
    del alike
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    noise = Noise(config)
    for one in ends(noise):
        writer.write_tensor_data(one.data)
    for index in range(num_layers):
        for one in layer(noise, index, num):
            writer.write_tensor_data(one.data)
    writer.close()


def _announce(writer: gguf.GGUFWriter, one: Made) -> None:
    """Write the name, shape and type of a tensor, whose data follows later."""
    data = one.data
    writer.add_tensor_info(one.name, data.shape, data.dtype, data.nbytes, raw_dtype=one.kind)
