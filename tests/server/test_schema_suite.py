"""500 JSON schemas: one that is taken holds every whole answer; one that is not says why."""

from collections.abc import Iterator

import pytest

from bench.serving.schemas import ask, load_schemas
from qllm import QLLMEngine
from qllm.types import FinishReason

GROUP = 25


@pytest.fixture(scope="module")
def engine() -> Iterator[QLLMEngine]:
    with QLLMEngine.from_pretrained("tiny", threads=1, conformance=False) as engine:
        yield engine


@pytest.mark.sampled(2)
@pytest.mark.parametrize("group", range(500 // GROUP))
def test_whole_answers_are_valid(engine: QLLMEngine, group: int) -> None:
    found = ask(engine, load_schemas()[GROUP * group : GROUP * (group + 1)], seed=group)
    assert len(found) == GROUP
    assert [x for x in found if x.wrong] == []
    assert {x.reason for x in found} <= {FinishReason.STOP, FinishReason.LENGTH, None}
    assert any(x.reason is FinishReason.STOP for x in found)
    assert all(x.refused.startswith("structured_outputs.json") for x in found if x.refused)
