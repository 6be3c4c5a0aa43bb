"""`tests/engine/test_equality.py` with models on two hosts."""

import pytest

from tests.sharded.on_ranks import test_equality
from tests.support.on_ranks import names_of

globals().update(names_of(test_equality, {}))
pytestmark = pytest.mark.slow  # the long form of `tests/sharded/test_hosts.py`
