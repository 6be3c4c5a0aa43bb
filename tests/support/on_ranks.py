"""Tests of other folders that run again with models on ranks."""

import copy
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from qllm.runner.cpu import cpu_runner
from qllm.runner.runner import TorchRunner
from qllm.sharded.runner import sharded_runner
from tests.support import programs

TP = 2


def names_of(module: ModuleType, left_out: Mapping[str, str]) -> dict[str, Any]:
    """Return what a module of tests has, except some tests.

    Args:
        module: Module of tests.
        left_out: Reason why a test is left out, by its name. Families whose layers carry a state
            are refused, and tests over them too.
    """
    names = vars(module)
    assert not left_out.keys() - names.keys(), "a test that is left out is not there"
    return {n: x for n, x in names.items() if not n.startswith("__") and n not in left_out}


def runner_on_ranks(model: Any, **settings: Any) -> TorchRunner:
    """Return a runner with the settings of `cpu_runner`, on ranks."""
    for name in ("kernels", "max_packed_bytes"):
        settings.pop(name, None)
    if model.dtype is not torch.bfloat16:
        model = copy.deepcopy(model).bfloat16()
    return sharded_runner(model, TP, **settings)


def logits_of_whole(model: Any, ids: list[int], steps: int = programs.STEPS) -> list[Tensor]:
    """Return the logits of a prompt and of greedy decoding, by a runner without ranks."""
    runner, found = cpu_runner(copy.deepcopy(model).bfloat16()), []
    runner.on_logits = lambda request, position, x: found.append(x.clone())
    programs.add(runner, 1, ids)
    programs.serve(runner, 1, steps)
    runner.close()
    return found
