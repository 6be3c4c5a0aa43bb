"""The check of a drafter before it serves."""

from collections.abc import Sequence
from typing import Any

import pytest

from qllm import check_drafter
from qllm.drafters.check import REQUESTS
from qllm.drafters.choose import Auto
from qllm.drafters.protocol import DraftRequest
from qllm.errors import ConfigError, InvariantError
from qllm.runner.choosing import Verified


class Words:
    """A drafter that proposes no token ids after a while."""

    def __init__(self, request: DraftRequest) -> None:
        self.num_calls = 0

    def propose(self, token_ids: Sequence[int], most: int) -> Any:
        self.num_calls += 1
        return [token_ids[-1]] if self.num_calls < 4 else "word"


class Raises(Words):
    def propose(self, token_ids: Sequence[int], most: int) -> Any:
        raise KeyError("gone")


def test_a_good_drafter_is_counted_and_timed() -> None:
    report = check_drafter(Auto)
    assert report.num_requests == len(REQUESTS)
    assert report.accepted > 20
    assert 0 < report.accepted_share < 1
    assert 0 < report.call_ms <= report.longest_call_ms


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Words, r"a drafter proposed 'w'; a token id is an int in \[0, \d+\)"),
        (Raises, "a drafter raised KeyError: 'gone'"),
        (7, "make=7, most=4 must be a class of drafters"),
    ],
)
def test_what_a_drafter_must_not_do_is_said(make: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_drafter(make)


@pytest.mark.parametrize("most", [0, 17])
def test_an_impossible_number_of_drafts_is_refused(most: int) -> None:
    with pytest.raises(ConfigError, match=rf"most={most} must be .* in \[1, 16\]"):
        check_drafter(Auto, most=most)


def test_an_engine_that_takes_wrong_drafts_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine samples at every position of a row, also behind a wrong draft."""
    monkeypatch.setattr(
        Verified,
        "open_place",
        lambda row, chosen: next((place for place in row.places() if place not in chosen), None),
    )
    with pytest.raises(InvariantError, match="drafts changed the answer to"):
        check_drafter(Auto)
