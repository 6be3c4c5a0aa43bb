"""`tests/engine/test_swap_models.py` with models on two hosts."""

import pytest

from tests.sharded.on_ranks import test_swap_models
from tests.support.on_ranks import names_of

globals().update(names_of(test_swap_models, {}))
pytestmark = pytest.mark.slow  # the long form of `tests/sharded/test_hosts.py`
