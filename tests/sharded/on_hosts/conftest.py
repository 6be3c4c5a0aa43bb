"""All runners of these tests have their model on two ranks, of which one is on another host."""

from pathlib import Path

import pytest

from tests.support.on_ranks import put_models_on, runner_on_hosts

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _models_are_on_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    put_models_on(monkeypatch, runner_on_hosts)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out models in fp32, which have no kernels."""
    items[:] = [i for i in items if not (HERE in i.path.parents and "fp32" in i.name)]
