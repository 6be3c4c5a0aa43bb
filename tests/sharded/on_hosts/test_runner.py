"""`tests/runner/test_runner.py` with models on two hosts."""

import pytest

from tests.sharded.on_ranks import test_runner
from tests.support.on_ranks import names_of

globals().update(names_of(test_runner, {}))
pytestmark = pytest.mark.slow  # the long form of `tests/sharded/test_hosts.py`
