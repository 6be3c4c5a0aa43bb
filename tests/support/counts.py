"""Numbers of cases that tests run in a loop, by lane."""

import pytest


def in_lane(request: pytest.FixtureRequest, short: int, full: int) -> int:
    """Return the number of cases for the short lane, or that for the other lanes."""
    return short if request.config.getoption("--lane") == "short" else full
