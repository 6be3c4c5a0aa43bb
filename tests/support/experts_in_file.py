"""Experts that were loaded into a file, and the packed experts of a load without a file."""

import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from qllm.errors import RequestFailedError
from qllm.frontend.handle import Handle
from qllm.models.loader import load
from qllm.models.weights.expert_file import ExpertFile, room_for
from qllm.models.weights.experts_in_file import ExpertsInFile
from qllm.runner.cpu import cpu_runner
from qllm.runner.residency import Residency
from qllm.runner.runner import TorchRunner
from tests.support.copies import copy_into
from tests.support.dense import save
from tests.support.families import make_model
from tests.support.gguf_files import convert

ROOM = 64 << 20
"""Bytes for the experts of a tiny model."""
EXPERTS_IN_FILE = "model.experts"


def saved(place: Path, family: str = "mixtral") -> Path:
    """Save a tiny model in bf16."""

    def make(folder: Path) -> None:
        make_model(family, torch.bfloat16).save_pretrained(folder)

    copy_into(place, ("plain", family), make)
    return place


def gguf_of(place: Path, kind: str, *, stacks: bool = True) -> Path:
    """Save a tiny model of two layers with four experts each as a GGUF file.

    Args:
        place: Folder for the file.
        kind: Format of its weights: "Q4_0", "Q8_0", "Q4_1" or "F32".
        stacks: True stores the experts of a layer as one tensor.
    """
    sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32}
    config = AutoConfig.for_model(
        "qwen3_moe", **sizes, vocab_size=260, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, num_experts=4, num_experts_per_tok=2,
        norm_topk_prob=True, eos_token_id=1, bos_token_id=None, pad_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    torch.manual_seed(3)
    folder = save(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), place / "m")
    return convert(folder, place / "model.gguf", kind, stacks=stacks)


def loaded(folder: Path, how: str = "auto", max_bytes: int = ROOM, **more: Any) -> Any:
    """Load a model whose experts go to a file beside its weights; return both."""
    path = (
        more.pop("path", None) or (folder if folder.is_dir() else folder.parent) / EXPERTS_IN_FILE
    )
    place = ExpertsInFile(path, max_bytes)
    settings = {"dtype": "bfloat16", "expert_weights": how, "experts": place} | more
    return load(folder, **settings).model, place.file


def bytes_of(stack: Any, expert: int) -> tuple[bytes, bytes]:
    """Return the packed weight of an expert, and its scales in int8."""

    def raw(tensor: torch.Tensor) -> bytes:
        return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()

    scales = getattr(stack, "scales", None)
    return raw(stack.packed[expert]), b"" if scales is None else raw(scales[expert])


def assert_file_is_bank(file: ExpertFile, folder: Path, how: str = "auto") -> None:
    """Check every byte against the experts that a runner has packed in memory."""
    model = load(folder, dtype="bfloat16", expert_weights=how).model
    runner: Any = cpu_runner(model, expert_weights=how)
    banks = [bank for bank in runner.backend.compute.banks if bank is not None]
    assert len(banks) == len(file.layers) > 0
    for layer, (bank, own) in enumerate(zip(banks, file.layers, strict=True)):
        packed = bank._packed
        assert own.num_experts == bank.num_experts
        stacks = {"up": packed._up, "down": packed._down}
        for stack, found in zip(stacks.values(), own.formats, strict=True):
            format = getattr(stack, "format", None)
            assert (found and found.products) == (format and format.products)
            assert (found and found.group) == (format and format.group)
        for expert in range(own.num_experts):
            room, found = room_for(own.expert_bytes), {}
            file.read(layer, expert, room)
            for name, start, count in own.parts:
                found[name] = bytes(room[start : start + count])
            for name, stack in stacks.items():
                weight, scales = bytes_of(stack, expert)
                assert found.pop(name) == weight, (own.name, expert, name)
                assert found.pop(f"{name}_scale", b"") == scales, (own.name, expert, name)
            assert not found
    runner.close()


def flip_weight(folder: Path, name: str) -> None:
    """Change the last bit of every value of a weight, in a file of the same size and time."""
    path = folder / "model.safetensors"
    tensors, times = load_file(path), path.stat()
    weight = tensors[name]
    tensors[name] = (weight.view(torch.int16) ^ 1).view(weight.dtype)
    save_file(tensors, path, metadata={"format": "pt"})
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert path.stat().st_size == times.st_size


def in_slots(folder: Path, num_slots: int, how: str = "auto", **settings: Any) -> TorchRunner:
    """Return a runner with memory for so many experts, in ops that stop between all tasks.

    The experts are in a file beside the weights, which is written first if it is not there.
    """
    slot_bytes = max(layer.expert_bytes for layer in loaded(folder, how)[1].layers)
    model, _ = loaded(folder, how, num_slots * slot_bytes)
    return cpu_runner(model, max_segment_ms=float("inf"), expert_weights=how, **settings)


def errors_of(handles: Sequence[Handle], wanted: Sequence[Sequence[int]]) -> list[str]:
    """Return the errors of requests. All others have the tokens that are wanted."""
    errors = list[str]()
    for handle, tokens in zip(handles, wanted, strict=True):
        try:
            assert handle.result(300).token_ids == tokens
        except RequestFailedError as error:
            errors.append(str(error))
    return errors


def residency_of(runner: TorchRunner) -> Residency:
    """Return the slots of a runner."""
    found = runner.residency
    assert found is not None
    return found


def draw_residents(runner: TorchRunner, rng: random.Random) -> None:
    """Put a drawn set of experts into slots, and no others."""
    residency = residency_of(runner)
    residency.clear()
    numbers = range(len(residency.layers))
    for number in rng.sample(numbers, rng.randint(0, len(numbers))):
        layer, num = residency.layer(number), rng.randint(1, residency.num_slots)
        chosen = rng.sample(range(layer.num_experts), min(num, layer.num_experts))
        with torch.inference_mode(), layer.pinned(chosen):
            pass
