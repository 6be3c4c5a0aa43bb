"""What a request's settings forbid as its next token, as a function of its output."""

from collections.abc import Sequence

import numpy as np
import pytest

from qllm.grammar import Vocabulary
from qllm.runner.sampling.limits import Limits, Rules
from qllm.types import SamplingParams

SIZE, EOS, STOP = 8, 2, 6
IDS = {"red": [5], " red": [7], "blue": [3, 4], " blue": [1, 3, 4]}


def tokenizer(text: str, add_special_tokens: bool) -> dict[str, list[int]]:
    assert not add_special_tokens
    return {"input_ids": IDS[text]}


def forbidden(sampling: SamplingParams, outputs: Sequence[int]) -> set[int]:
    x_V = np.zeros(SIZE)
    limits = Limits(sampling, Vocabulary(tokenizer, SIZE, frozenset({EOS})), None)
    rules = limits.rules(outputs, SIZE)
    assert isinstance(rules, Rules)
    rules.apply(x_V)
    return set(np.flatnonzero(x_V == -np.inf).tolist())


@pytest.mark.parametrize("least", [1, 2, 5])
def test_no_end_comes_before_so_many_tokens_and_any_may_come_then(least: int) -> None:
    sampling = SamplingParams(min_tokens=least, stop_token_ids=(STOP,))
    for num in range(7):
        wanted = {EOS, STOP} if num < least else set()
        assert forbidden(sampling, [0] * num) == wanted


def test_an_end_may_come_before_if_nothing_else_may() -> None:
    assert forbidden(SamplingParams(min_tokens=3, allowed_token_ids=(EOS,)), []) == (
        set(range(SIZE)) - {EOS}
    )
    both = SamplingParams(min_tokens=3, allowed_token_ids=(EOS, 4))
    assert forbidden(both, []) == set(range(SIZE)) - {4}


def test_the_last_token_of_a_bad_word_does_not_follow_the_others() -> None:
    bad = SamplingParams(bad_words=("red", "blue"))
    assert forbidden(bad, []) == {5, 7}
    assert forbidden(bad, [0, 3]) == {4, 5, 7}
    assert forbidden(bad, [3, 0]) == {5, 7}
    assert forbidden(bad, [1, 3]) == {4, 5, 7}
