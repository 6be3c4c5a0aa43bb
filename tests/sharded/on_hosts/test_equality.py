"""`tests/engine/test_equality.py` with models on two hosts."""

from tests.sharded.on_ranks import test_equality
from tests.support.on_ranks import names_of

globals().update(names_of(test_equality, {}))
