"""The loop of the device behind `QLLMEngine`, on a GPU."""

from pathlib import Path

import pytest

from tests.support.device_loops import serves_an_engine
from tests.support.engines import save_model


@pytest.mark.gpu
def test_the_loop_on_a_gpu_serves_an_engine(tmp_path: Path) -> None:
    # so many layers that a step takes a millisecond and has stages to be stopped between
    model = save_model(tmp_path / "model", num_layers=48)
    serves_an_engine(model, str(tmp_path / "socket"), is_quick=True)
