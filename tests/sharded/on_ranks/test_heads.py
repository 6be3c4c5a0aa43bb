"""`tests/runner/test_heads.py` with models on ranks."""

from tests.runner import test_heads
from tests.support.on_ranks import names_of

LEFT_OUT = {
    "test_a_frame_parked_in_the_head_goes_on_after_a_checkpoint": (
        "stops after some of the head's blocks, of which ranks report all or none"
    ),
    "test_greedy_rows_hold_no_logits_and_dead_rows_get_no_token": (
        "stops after some of the head's blocks"
    ),
    "test_after_each_false_alarm_it_goes_on": "counts calls of native code for one process",
    "test_one_call_does_all_blocks_without_a_poll": "counts calls of native code for one process",
    "test_time_is_looked_at_between_tasks": "counts calls of native code for one process",
    "test_nothing_is_polled_in_the_head_at_grain_step": (
        "counts calls of native code for one process"
    ),
    "test_a_stop_that_is_due_ends_the_head_after_a_task_at_the_grain_of_experts": (
        "counts calls of native code for one process"
    ),
    "test_segments_of_one_call_are_told_apart": "stops after some of the head's blocks",
}
"""Reasons why a test is left out. The list may only become shorter."""
globals().update(names_of(test_heads, LEFT_OUT))
