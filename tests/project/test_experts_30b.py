"""The parts of `bench experts_30b` that decide what its numbers mean."""

import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bench.models.checkpoint_30b import GROUP, SHAPE, STEP, write
from bench.models.experts_30b import Ceiling, check_room, expert_bytes, largest, once
from bench.models.gguf_30b import write_gguf
from bench.models.memory_limit import own_group
from qllm import QLLMEngine
from qllm.block_file import BLOCK

NUM_LAYERS, NUM_EXPERTS = 6, 8
SMALL: dict[str, Any] = SHAPE | {
    "vocab_size": 512,
    "hidden_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "moe_intermediate_size": 128,
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": 2,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts_30b") / "int4"
    write(folder, NUM_LAYERS, SMALL)
    return folder


@pytest.fixture(scope="module")
def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    parts = [load_file(path) for path in checkpoint.glob("*.safetensors")]
    return {name: tensor for part in parts for name, tensor in part.items()}


def weight(tensors: dict[str, torch.Tensor], name: str) -> np.ndarray:
    """The values of a weight, by the definition of compressed-tensors."""
    if f"{name}.weight" in tensors:
        return tensors[f"{name}.weight"].float().numpy()
    words = tensors[f"{name}.weight_packed"].numpy()[..., None]
    codes = (words >> np.arange(0, 32, 4)) & 15
    scale = tensors[f"{name}.weight_scale"].float().numpy().repeat(GROUP, axis=1)
    return (codes.reshape(scale.shape) - 8) * scale


def test_llama_gets_exactly_the_values_of_the_checkpoint(
    tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    path = tmp_path / "q4_0.gguf"
    write_gguf(path, NUM_LAYERS, SMALL)
    found = {
        one.name: gguf.quants.dequantize(one.data, one.tensor_type)
        for one in gguf.GGUFReader(path).tensors
    }
    assert len(found) == 3 + 12 * NUM_LAYERS
    for name, theirs in (
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("model.layers.1.self_attn.q_norm", "blk.1.attn_q_norm"),
        ("model.layers.1.self_attn.o_proj", "blk.1.attn_output"),
        ("model.layers.2.mlp.gate", "blk.2.ffn_gate_inp"),
    ):
        assert np.array_equal(found[f"{theirs}.weight"], weight(tensors, name)), name
    for name, theirs in (("gate_proj", "gate"), ("up_proj", "up"), ("down_proj", "down")):
        stacks = found[f"blk.2.ffn_{theirs}_exps.weight"]
        for expert in range(NUM_EXPERTS):
            ours = weight(tensors, f"model.layers.2.mlp.experts.{expert}.{name}")
            assert np.array_equal(stacks[expert], ours)


@pytest.fixture(scope="module")
def used(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The file of experts of an engine, and its statistics."""
    folder = tmp_path_factory.mktemp("experts")
    with QLLMEngine.from_pretrained(
        checkpoint,
        run_in="thread",
        threads=1,
        max_expert_bytes=(NUM_LAYERS * NUM_EXPERTS - 1) * expert_bytes(SMALL),
        expert_dir=str(folder),
    ) as engine:
        found = engine.stats()["experts"]
    return largest(folder), found


def test_weights_of_the_checkpoint_have_no_mean(tensors: dict[str, torch.Tensor]) -> None:
    """With a mean, each layer lets tokens look more alike, and deep layers use few experts."""
    names = [name.removesuffix(".weight_packed") for name in tensors if "packed" in name]
    assert len(names) == 1 + NUM_LAYERS * (4 + 3 * NUM_EXPERTS)
    means = [abs(weight(tensors, name).mean()) for name in names]
    assert max(means) < STEP / 4  # -STEP / 2 is the mean of codes from -8 to 7


def test_the_ceiling_reads_whole_experts_of_the_file_of_an_engine(
    used: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, experts = used
    own = expert_bytes(SMALL)
    assert experts["slot_bytes"] // experts["slots"] == own
    places, preadv = list[tuple[int, int]](), os.preadv

    def read(fd: int, rooms: list[memoryview], at: int) -> int:
        places.append((at, len(rooms[0])))
        return preadv(fd, rooms, at)

    monkeypatch.setattr("bench.models.experts_30b.READ_S", 0.05)
    ceiling = Ceiling(path, own)
    monkeypatch.setattr(os, "preadv", read)
    assert ceiling.bytes_per_s() > 0
    reads = [(at, size) for at, size in places if size == own]
    assert len(reads) >= 4
    every = {BLOCK + i * own for i in range(NUM_LAYERS * NUM_EXPERTS)}
    assert {at for at, _ in reads} <= every


def test_a_file_has_its_name_only_when_it_is_complete(tmp_path: Path) -> None:
    path, made = tmp_path / "one", list[Path]()

    def broken(part: Path) -> None:
        part.mkdir()
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        once(path, broken)
    assert not path.exists()

    def complete(part: Path) -> None:
        part.mkdir()
        made.append(part)

    assert once(path, complete) == once(path, complete) == path
    assert path.is_dir()
    assert len(made) == 1


def test_a_disk_that_is_too_small_is_refused(tmp_path: Path) -> None:
    check_room(tmp_path, 1)
    with pytest.raises(SystemExit, match=r"GB free, and the bench writes .* GB: give another"):
        check_room(tmp_path, 1 << 62)


def test_the_group_of_memory_is_found_or_another_way_named(tmp_path: Path) -> None:
    groups = tmp_path / "cgroup"
    groups.write_text("5:devices:/\n4:memory:/some/one\n0::/\n")
    assert own_group(groups, tmp_path) == tmp_path / "some/one"
    groups.write_text("0::/user.slice\n")
    with pytest.raises(SystemExit, match="systemd-run --scope -p MemoryMax=BYTES"):
        own_group(groups, tmp_path)
