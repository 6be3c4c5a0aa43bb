"""`tests/engine/kv/test_prefix.py` with models on ranks."""

from tests.engine.kv import test_prefix
from tests.support.on_ranks import names_of

LEFT_OUT = {
    "test_an_inexact_cache_is_refused": "uses layers that run by hooks, which are refused",
}
"""Reasons why a test is left out. The list may only become shorter."""
globals().update(names_of(test_prefix, LEFT_OUT))
