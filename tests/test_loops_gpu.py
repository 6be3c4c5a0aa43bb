"""The loop of the device behind `QLLMEngine`, on a GPU."""

from pathlib import Path

import pytest
from device_loops import serves_an_engine
from engines import save_model


@pytest.mark.gpu
def test_the_loop_on_a_gpu_serves_an_engine(tmp_path: Path) -> None:
    serves_an_engine(save_model(tmp_path / "model"), str(tmp_path / "socket"), is_quick=True)
