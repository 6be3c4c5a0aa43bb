"""`tests/engine/test_equality.py` with models on ranks."""

from tests.engine import test_equality
from tests.support.on_ranks import names_of

LEFT_OUT = {
    "test_greedy_tokens_are_those_of_generate": (
        "compares with transformers, whose bits differ from those of the kernels"
    ),
    "test_the_row_rule_holds_for_thousands_of_rows": "looks for the rule of products in torch",
    "test_who_left_the_sweep_loses_nothing_when_the_others_die_inside_a_layer": (
        "waits for a number of units that ranks do not report"
    ),
}
"""Reasons why a test is left out. The list may only become shorter."""
globals().update(names_of(test_equality, LEFT_OUT))
