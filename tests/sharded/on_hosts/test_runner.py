"""`tests/runner/test_runner.py` with models on two hosts."""

from tests.sharded.on_ranks import test_runner
from tests.support.on_ranks import names_of

globals().update(names_of(test_runner, {}))
