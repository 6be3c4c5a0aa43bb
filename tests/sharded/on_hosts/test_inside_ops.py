"""`tests/runner/test_inside_ops.py` with models on two hosts."""

from tests.sharded.on_ranks import test_inside_ops
from tests.support.on_ranks import names_of

globals().update(names_of(test_inside_ops, {}))
