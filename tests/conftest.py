"""What holds for all tests: Triton's interpreter where no GPU is, and samples of many cases."""

import os
import random
from collections import defaultdict

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton's own library is imported


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all", action="store_true", help="every test, and every case of those marked `sampled`"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep some cases of each test marked `sampled`, always the same, and no exhaustive test.

    Tests that are named on the command line run whatever they are marked.
    """
    if config.getoption("--all") or any("::" in name for name in config.args):
        return
    dropped = {item for item in items if item.get_closest_marker("exhaustive")}
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for name, found in cases.items():
        marker = found[0].get_closest_marker("sampled")
        assert marker is not None
        (count,) = marker.args
        kept = random.Random(name).sample(found, min(count, len(found)))
        dropped |= set(found) - set(kept)
    config.hook.pytest_deselected(items=list(dropped))
    items[:] = [item for item in items if item not in dropped]
