"""What one worker of Ray Data does with a batch: no cluster is started."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from qllm.errors import ConfigError
from qllm.frontend.handle import Result
from qllm.llm import QLLMEngine
from qllm.ray import data
from qllm.types import Priority


class Watched:
    """An engine whose answers are noted."""

    def __init__(self, engine: QLLMEngine) -> None:
        self.engine = engine
        self.given: list[Result] = []

    def generate(self, prompts: Any, **asked: Any) -> list[Result]:
        found = self.engine.generate(prompts, **asked)
        self.given += found
        return found


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    with QLLMEngine.from_pretrained("tiny", threads=1, exactness="batch-invariant") as engine:
        found = Watched(engine)
        monkeypatch.setattr(data, "connected", lambda name: {"jobs": found}[name])
        yield found


ASKED = {"max_tokens": 4, "temperature": 0.0}


def test_rows_are_answered_in_their_order_as_be(watched: Watched) -> None:
    prompts = ["One day", "The sea", "A ship"]
    expected = [
        watched.engine.generate([prompt], progress=False, **ASKED)[0].text for prompt in prompts
    ]
    assert len(set(expected)) == 3
    answers = data.Answers("jobs", "question", "said", ASKED)
    batch = {"question": np.array(prompts, dtype=object), "id": np.array([7, 8, 9])}
    found = answers(batch)
    assert list(found["said"]) == expected
    assert list(found["id"]) == [7, 8, 9]
    assert list(found["said_tokens"]) == [4, 4, 4]
    assert set(found["said_end"]) == {"length"}
    assert {result.metrics.priority for result in watched.given} == {int(Priority.BE)}


def test_rows_are_of_the_class_that_is_asked_for(watched: Watched) -> None:
    answers = data.Answers("jobs", "prompt", "answer", {**ASKED, "priority": "LS"})
    answers({"prompt": np.array(["One day"], dtype=object)})
    assert [result.metrics.priority for result in watched.given] == [int(Priority.LS)]


def test_prompts_may_be_token_ids_or_messages(watched: Watched) -> None:
    answers = data.Answers("jobs", "prompt", "answer", ASKED)
    rows = np.empty(2, dtype=object)
    rows[:] = [np.array([5, 6, 7]), [{"role": "user", "content": "Hi"}]]
    expected = watched.engine.generate(
        [[5, 6, 7], [{"role": "user", "content": "Hi"}]], progress=False, **ASKED
    )
    assert list(answers({"prompt": rows})["answer"]) == [result.text for result in expected]


def test_a_column_that_is_missing_is_named(watched: Watched) -> None:
    answers = data.Answers("jobs", "prompt", "answer", {})
    with pytest.raises(ConfigError, match=r"column='prompt' is none of the dataset's: \['text'\]"):
        answers({"text": np.array(["x"], dtype=object)})
