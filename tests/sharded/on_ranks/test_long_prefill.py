"""`tests/runner/test_long_prefill.py` with models on ranks."""

from tests.runner import test_long_prefill
from tests.support.on_ranks import names_of

LEFT_OUT = {
    "test_stopping_between_keys_changes_no_bit": "runs ops one by one, without native calls",
    "test_a_frame_that_stopped_between_keys_goes_on_elsewhere": (
        "runs ops one by one, without native calls"
    ),
    "test_blocks_of_queries_shrink_with_their_position": (
        "cuts ops by rows, as for layers without native stops"
    ),
    "test_a_row_may_die_between_keys": "runs ops one by one, without native calls",
}
"""Reasons why a test is left out. The list may only become shorter."""
globals().update(names_of(test_long_prefill, LEFT_OUT))
