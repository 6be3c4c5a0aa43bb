"""All runners of these tests have their model on two ranks."""

import sys
from pathlib import Path

import pytest

from qllm.engine import build, draft_model
from qllm.runner import cpu
from tests.support import programs
from tests.support.on_ranks import logits_of_whole, runner_on_ranks

HERE = Path(__file__).parent
IMPORTED = build, draft_model
"""Modules that make runners."""


@pytest.fixture(autouse=True)
def _models_are_on_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, forward = cpu.cpu_runner, programs.forward
    for name, module in list(sys.modules.items()):
        is_ours = name.startswith(("qllm.engine", "tests."))
        if is_ours and vars(module).get("cpu_runner") is whole:
            monkeypatch.setattr(module, "cpu_runner", runner_on_ranks)
        if is_ours and vars(module).get("forward") is forward:
            monkeypatch.setattr(module, "forward", logits_of_whole)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out models in fp32, which have no kernels."""
    items[:] = [i for i in items if not (HERE in i.path.parents and "fp32" in i.name)]
