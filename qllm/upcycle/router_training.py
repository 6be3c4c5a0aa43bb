"""Training of an upcycled model's routers, for a few steps on local text."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from qllm.errors import ConfigError
from qllm.models.folders import first_line
from qllm.models.tokenizer import load_tokenizer

WINDOW = 256
"""Tokens of a step."""
LEARNING_RATE = 1e-3
BALANCE_COEF = 0.02
"""Weight of the load balancing loss, relative to the model's own loss. Source: transformers'
`load_balancing_loss_func`, after arXiv:2101.03961, eq. 4 to 6."""
MOST_STEPS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The result of a training of the routers."""

    steps: int
    losses: tuple[float, ...]
    """Two losses per step: next tokens, and balance."""
    busiest: tuple[float, float]
    """Fraction of choices that the busiest expert of a layer got, before and after the training. It
    is averaged over the layers. With E experts and perfect balance it is 1/E."""


def read_windows(folder: Path, text_file: Path) -> list[list[int]]:
    """Return windows of `WINDOW` tokens, cut from a text.

    Raises:
        ConfigError: The text cannot be read, or is shorter than a window.
    """
    try:
        text = text_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"text {text_file} cannot be read: {first_line(error)}") from error
    tokenizer: Any = load_tokenizer(folder)
    if tokenizer is None:
        raise ConfigError(f"{folder} has no tokenizer to read {text_file} with")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    windows = [ids[i : i + WINDOW] for i in range(0, len(ids) - WINDOW + 1, WINDOW)]
    if not windows:
        raise ConfigError(f"text {text_file} has {len(ids)} tokens; give at least {WINDOW}")
    return windows


def train_routers(
    folder: Path, routers: Sequence[str], windows: Sequence[list[int]], steps: int, seed: int
) -> Training:
    """Train the routers and write them into their files. All other weights stay unchanged.

    The model is in memory once, in float32. The result depends only on the arguments, for one kind
    of machine and one number of threads.

    Args:
        folder: Folder of a model that `upcycle` wrote.
        routers: Names of the model's routers in the checkpoint.
        windows: Windows of token ids. Step s takes window `order[s % len]` of a seeded order.
        steps: Number of steps, at least 1.
        seed: Seed of the order.
    """
    make: Any = transformers.AutoModelForCausalLM
    model = make.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    # the eager implementation has a backward pass on every machine
    model.set_experts_implementation("eager")
    model.train(False)
    model.config.output_router_logits = True
    model.router_aux_loss_coef = BALANCE_COEF
    model.requires_grad_(False)
    gates = _gates(model, len(routers))
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed)).tolist()
    batches = [torch.tensor([windows[order[step % len(order)]]]) for step in range(steps)]
    before = _busiest(model, batches[:8])
    optimiser = torch.optim.AdamW(gates, lr=LEARNING_RATE, weight_decay=0.0)
    losses = []
    for ids in batches:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    after = _busiest(model, batches[:8])
    _write(folder, {name: gate.detach() for name, gate in zip(routers, gates, strict=True)})
    return Training(steps=steps, losses=tuple(losses), busiest=(before, after))


def _gates(model: Any, count: int) -> list[nn.Parameter]:
    """Return the routers' weights, layer by layer, with gradients switched on."""
    found = [layer.mlp.gate.weight for layer in model.model.layers]
    assert len(found) == count, "one router per layer"
    for gate in found:
        gate.requires_grad_(True)
    return found


@torch.no_grad()
def _busiest(model: Any, batches: Sequence[Tensor]) -> float:
    shares: list[float] = []
    for ids in batches:
        for logits in model(input_ids=ids, use_cache=False).router_logits:
            chosen = logits.topk(model.config.num_experts_per_tok, dim=-1).indices
            shares.append(float(chosen.flatten().bincount().max()) / chosen.numel())
    return sum(shares) / len(shares)


def _write(folder: Path, routers: dict[str, Tensor]) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    for name, weight in routers.items():
        path = folder / index[name]
        tensors = load_file(path)
        tensors[name] = weight.to(tensors[name].dtype).contiguous()
        save_file(tensors, path, metadata={"format": "pt"})
