"""A hybrid decodes beside a prefill of 2,000 tokens that is preempted, moved out and saved."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hybrids import NATIVE, make_hybrid
from test_equality import Chaos
from test_hybrid_prefix import GREEDY, engine_of, prompt_of, run

LONG = 1900
Job = tuple[list[int], int]


def jobs() -> tuple[list[Job], Job, list[Job]]:
    """Three that decode, one with a long prompt, and six of LS."""
    be = [(prompt_of(50 + 9 * i, i), 60) for i in range(3)]
    return be, (prompt_of(LONG, 7), 12), [(prompt_of(30 + 5 * i, 10 + i), 6) for i in range(6)]


@pytest.mark.parametrize(("policy", "prefix_cache"), [("chaos", "auto"), ("qllm2", False)])
@pytest.mark.parametrize("family", NATIVE)
def test_every_stream_of_a_storm_equals_its_solo_run(
    family: str, policy: str, prefix_cache: Any, tmp_path: Path
) -> None:
    model, (be, long, ls) = make_hybrid(family), jobs()
    with engine_of(model, prefix_cache=False) as engine:
        want = {tuple(ids): run(engine, ids, n).token_ids for ids, n in (*be, long, *ls)}
        states = engine.stats()["states"]["tokens_per_request"]
    how = {
        "max_kv_tokens": 5 * states + LONG + 400,  # a step of LS alone has no room beside BE
        "swap_kv_tokens": 16 * (states + LONG),
        "max_segment_ms": 0.5,
        "prefix_cache": prefix_cache,
        "record": True,
    }
    with engine_of(model, policy=Chaos(3) if policy == "chaos" else policy, **how) as engine:
        handles = [engine.submit(ids, "BE", n, sampling=GREEDY) for ids, n in be]
        for handle in handles:
            next(iter(handle))
        handles.append(engine.submit(long[0], "BE", long[1], sampling=GREEDY))
        handles += [engine.submit(ids, "LS", n, sampling=GREEDY) for ids, n in ls[:4]]
        num_saved = engine.checkpoint(tmp_path / "saved")
        handles += [engine.submit(ids, "LS", n, sampling=GREEDY) for ids, n in ls[4:]]
        found = [handle.result(300) for handle in handles]
        events = Counter(type(event).__name__ for event in engine.trace.events)
    for result in found:
        assert result.token_ids == want[tuple(result.prompt_token_ids)]
    assert events["SwappedOut"] > 0
    assert events["Parked"] > 0 or policy != "chaos"
    assert num_saved > 0
    with engine_of(model, policy="qllm2", **how) as engine:
        again = [handle.result(300) for handle in engine.restore(tmp_path / "saved")]
    assert len(again) == num_saved
    assert any(len(result.prompt_token_ids) == LONG for result in again)
    for result in again:
        assert result.token_ids == want[tuple(result.prompt_token_ids)]
