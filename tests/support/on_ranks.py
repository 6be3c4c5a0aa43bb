"""Tests of other folders that run again with models on ranks."""

import copy
import sys
import weakref
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from qllm.engine import build, draft_model
from qllm.runner import cpu
from qllm.runner.runner import TorchRunner
from qllm.sharded.runner import sharded_runner
from tests.support import programs
from tests.support.hosts import SECRET
from tests.support.rank_hosts import RankHost

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


IMPORTED = build, draft_model
"""Modules that make runners."""


def put_models_on(monkeypatch: pytest.MonkeyPatch, make: Callable[..., TorchRunner]) -> None:
    """Let tests make their runners with `make`, and compare with a runner without ranks."""
    whole, forward = cpu.cpu_runner, programs.forward
    for name, module in list(sys.modules.items()):
        is_ours = name.startswith(("qllm.engine", "tests."))
        if is_ours and vars(module).get("cpu_runner") is whole:
            monkeypatch.setattr(module, "cpu_runner", make)
        if is_ours and vars(module).get("forward") is forward:
            monkeypatch.setattr(module, "forward", logits_of_whole)


def runner_on_ranks(model: Any, **settings: Any) -> TorchRunner:
    """Return a runner with the settings of `cpu_runner`, on ranks."""
    for name in ("kernels", "max_packed_bytes"):
        settings.pop(name, None)
    return sharded_runner(in_bf16(model), TP, **settings)


def in_bf16(model: Any) -> Any:
    """Return a model, or a copy of it in bf16."""
    return model if model.dtype is torch.bfloat16 else copy.deepcopy(model).bfloat16()


def runner_on_hosts(model: Any, **settings: Any) -> TorchRunner:
    """Return the same, with the second rank on a host of its own."""
    model = in_bf16(model)
    host = RankHost(lambda _: model)
    try:
        runner = runner_on_ranks(model, hosts=[host.address], secret=SECRET, **settings)
    except BaseException:
        host.close()
        raise
    weakref.finalize(runner, host.close)
    return runner


def logits_of_whole(model: Any, ids: list[int], steps: int = programs.STEPS) -> list[Tensor]:
    """Return the logits of a prompt and of greedy decoding, by a runner without ranks."""
    runner, found = cpu.cpu_runner(copy.deepcopy(model).bfloat16()), []
    runner.on_logits = lambda request, position, x: found.append(x.clone())
    programs.add(runner, 1, ids)
    programs.serve(runner, 1, steps)
    runner.close()
    return found
