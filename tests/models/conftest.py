"""Fixtures that tests of models share."""

import pytest

from tests.support.loads import Live


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Live:
    """Count the bytes of the tensors that are alive inside a `with` block."""
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # a mode sees the operators of its thread
    return Live()
