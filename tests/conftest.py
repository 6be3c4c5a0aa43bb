"""What holds for all tests: Triton's interpreter where no GPU is, and samples of many cases.

A failure is printed when it happens, so that a run that is stopped has said what failed. A test
that leaves a setting of the server (QLLM_...) in the environment fails itself, not those after it.
"""

import gc
import os
import sys
import time
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.support.lanes"]
pytest.register_assert_rewrite("tests.support")

from tests.support.warm import Nurseries  # noqa: E402 - its asserts are rewritten, too

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton's own library is imported

# no example fails because the machine is slow, or stood still
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")


@pytest.fixture(autouse=True, scope="session")
def _loaded_modules_are_not_collected() -> Iterator[None]:
    """Freeze the heap once instead of at the start of every engine.

    An engine that starts on a thread collects garbage and freezes what is left, and unfreezes it
    when it is closed. Among thousands of tests, torch and transformers that takes 0.3 s of CPU.
    """
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "freeze", lambda: None)
        patch.setattr(gc, "unfreeze", lambda: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def _engines_start_warm(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fork engines from a process that has imported torch; `--lane all` starts each as users do."""
    if request.config.getoption("--lane") != "short":
        yield
        return
    nurseries = Nurseries()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qllm.frontend.process.start_process", nurseries.start_process)
        yield
    nurseries.close()


@pytest.fixture(autouse=True)
def _settings_end_with_their_test() -> Iterator[None]:
    before = _settings()
    yield
    left = {k: v for k, v in _settings().items() if before.get(k) != v}
    for name in left:
        del os.environ[name]
    assert not left, f"this test leaves {left} in the environment"


def _settings() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key.startswith("QLLM_")}


BEGAN = time.monotonic()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print a failure at once; the process that has the workers sees each report once."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        seconds = time.monotonic() - BEGAN
        said = f"\nFAILED after {seconds:.0f} s: {report.nodeid} ({report.when})\n"
        sys.stdout.write(said + report.longreprtext[-3000:] + "\n")
        sys.stdout.flush()
