"""`tests/engine/test_checkpoint.py` with models on ranks."""

from tests.engine import test_checkpoint
from tests.support.on_ranks import names_of

LEFT_OUT = {
    "test_another_model_or_other_settings_are_refused": (
        "uses a model in fp32, which is in bf16 here"
    ),
    "test_a_new_process_finishes_what_was_parked": (
        "waits for a number of units that ranks do not report"
    ),
}
"""Reasons why a test is left out. The list may only become shorter."""
globals().update(names_of(test_checkpoint, LEFT_OUT))
