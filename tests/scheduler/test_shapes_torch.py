"""Cohorts on tensors: rows that leave between layers keep their hidden states."""

from qllm import QLLMEngine, SamplingParams
from qllm.record.trace import Planned

GREEDY = SamplingParams(temperature=0, ignore_eos=True)


def answers(policy: str, **settings: int) -> tuple[list[list[int]], set[tuple[int, int]]]:
    """Tokens of five requests of both classes in level L2, and the layers of all rows."""
    with QLLMEngine.from_pretrained(
        "tiny",
        policy=policy,
        policy_settings=settings,
        exactness="batch-invariant",
        threads=1,
        record=True,
    ) as engine:
        prompts = [[3 + i * (k + 7) % 50 for i in range(5 + 11 * k)] for k in range(5)]
        handles = [
            engine.submit(ids, ("BE", "LS")[k % 2], 6, sampling=GREEDY)
            for k, ids in enumerate(prompts)
        ]
        tokens = [list(handle.result(300).token_ids) for handle in handles]
        rows = [row for e in engine.trace if isinstance(e, Planned) for row in e.rows]
    return tokens, {(row.start_layer, row.end_layer) for row in rows}


def test_layered_prefill_gives_the_tokens_of_whole_prefill() -> None:
    whole, layers = answers("fcfs")
    assert layers == {(0, 4)}
    assert len({tuple(tokens) for tokens in whole}) == 5
    layered, layers = answers("priority-layered", group_tokens=8)
    assert {(0, 1), (2, 3)} <= layers
    assert layered == whole
