"""`tests/runner/test_runner.py` with models on ranks."""

from tests.runner import test_runner
from tests.support.on_ranks import names_of

LEFT_OUT = {
    "test_unknown_glue_is_driven_by_hooks": "layers that run by hooks are refused",
    "test_a_lost_expert_is_noticed": "changes the Python code of experts",
    "test_a_parked_frame_says_what_it_holds": (
        "another rank may be inside the next op, whose buffers count"
    ),
    "test_grains_say_where_a_program_stops": "changes the Python code of ops",
}
"""Reasons why a test is left out. The list may only become shorter."""
globals().update(names_of(test_runner, LEFT_OUT))
