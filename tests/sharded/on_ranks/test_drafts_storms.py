"""`tests/engine/test_drafts_storms.py` with models on ranks."""

from tests.engine import test_drafts_storms
from tests.support.on_ranks import names_of

LEFT_OUT = {
    "test_a_checkpoint_leaves_out_drafts": "layers that carry a state are refused",
}
"""Reasons why a test is left out. The list may only become shorter."""
globals().update(names_of(test_drafts_storms, LEFT_OUT))
