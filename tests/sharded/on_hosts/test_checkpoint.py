"""`tests/engine/test_checkpoint.py` with models on two hosts."""

from tests.sharded.on_ranks import test_checkpoint
from tests.support.on_ranks import names_of

globals().update(names_of(test_checkpoint, {}))
