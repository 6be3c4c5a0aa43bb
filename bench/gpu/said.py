"""A plugin of pytest for `make gpu-check` that reports a failed test at once, as a section."""

import json
from typing import Any

from bench.gpu.check import MARK


def pytest_runtest_logreport(report: Any) -> None:
    """Print a failure when it happens: a run that is out of time prints no summary."""
    if report.failed:
        found = {"section": report.nodeid, "error": report.longreprtext[-1200:]}
        print(f"\n{MARK}{json.dumps(found)}", flush=True)
