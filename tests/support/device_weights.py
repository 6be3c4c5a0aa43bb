"""Quantised experts in a device's layout, held in the CPU's memory."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qllm.cuda.backend import cuda_runner
from qllm.models.loader import load
from qllm.models.weights import streaming
from qllm.models.weights.quantised_weights import DeviceWeights
from tests.support.captured import NUM_PAGES

HERE = torch.device("cpu")


def on_device(folder: Path, rounding: str, patch: pytest.MonkeyPatch) -> Any:
    """A model whose experts are as a device keeps them, and nothing else of it is quantised."""
    patch.setattr(streaming, "Weights", partial(DeviceWeights, device=HERE))
    patch.setattr(streaming, "staying", lambda *_: set())
    return load(folder, expert_weights=rounding).model


def answer_of(model: Any, packed: bool) -> Tensor:
    """Compute a few rows in the last layer's experts with the kernels."""
    runner = cuda_runner(
        model, num_pages=NUM_PAGES, page_size=4, graphs=False, kernels_name="triton"
    )
    experts = [e for e in runner.backend.layers.experts if e is not None][-1]
    assert (experts.weights.packed is not None) == packed
    noise = torch.Generator().manual_seed(1)
    rows, num, top_k = 21, experts.weights.num_experts, 2
    x = torch.randn(rows, model.config.hidden_size, generator=noise).bfloat16()
    ids = torch.rand(rows, num, generator=noise).topk(top_k).indices
    share = torch.rand(rows, top_k, generator=noise)
    out = experts.run(x, ids, share, torch.tensor([rows]))
    work = experts.begin(ids, 2)  # in ranges, as one that may be stopped between them
    for unit in range(len(work.units)):
        work.run(x, unit, unit + 1)
    assert work.slots_SD.dtype is torch.bfloat16
    assert torch.equal(work.combine(0, rows, share, torch.bfloat16), out)
    runner.close()
    assert out.isfinite().all()
    assert out.abs().max() > 0
    return out.view(torch.int16)
