"""500 JSON schemas: one that is taken holds every whole answer; one that is not says why."""

import pytest

from qllm import QLLMEngine
from qllm.types import FinishReason
from tests.long.schemas import ask, load_schemas

GROUP = 25
REFUSED_WHOLE = {11, 12}
"""Groups of which every schema is refused."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("group", range(500 // GROUP))
def test_whole_answers_are_valid(invariant_engine: QLLMEngine, group: int) -> None:
    schemas = load_schemas()[GROUP * group : GROUP * (group + 1)]
    for seed in range(group, group + 5):
        found = ask(invariant_engine, schemas, seed)
        assert len(found) == GROUP
        assert [x for x in found if x.wrong] == []
        assert {x.reason for x in found} <= {FinishReason.STOP, FinishReason.LENGTH, None}
        assert all(x.refused.startswith("structured_outputs.json") for x in found if x.refused)
        assert all(x.refused for x in found) == (group in REFUSED_WHOLE)
        if group in REFUSED_WHOLE or any(x.reason is FinishReason.STOP for x in found):
            return
    pytest.fail("none of these forms was ever filled to its end")
