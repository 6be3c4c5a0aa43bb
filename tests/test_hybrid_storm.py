"""A hybrid decodes beside a prefill of 2,000 tokens that is preempted, moved out and saved."""

import threading
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
    return be, (prompt_of(LONG, 7), 12), [(prompt_of(150 + 5 * i, 10 + i), 6) for i in range(6)]


class Held:
    """Keeps a pass of the long prompt waiting, between two segments, until `go`."""

    def __init__(self, engine: Any) -> None:
        self.seen, self.go = threading.Event(), threading.Event()
        self._loop = loop = engine._client.loop
        engine.call(lambda: setattr(loop.runner, "on_segment", self._look))

    def _look(self, *_: object) -> None:
        requests = self._loop.scheduler.requests.values()
        written = [r.block_table for r in requests if r.num_prompt_tokens == LONG]
        if not self.seen.is_set() and any(len(table) * 16 > LONG // 4 for table in written):
            self.seen.set()
            self.go.wait(120)


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
        # all of BE, and one of LS has no room beside it
        "max_kv_tokens": 4 * states + LONG + 12 + 3 * (68 + 60) + 16,
        "swap_kv_tokens": 16 * (states + LONG),
        "max_segment_ms": 0.5,
        "prefix_cache": prefix_cache,
        "record": True,
    }
    with engine_of(model, policy=Chaos(3) if policy == "chaos" else policy, **how) as engine:
        handles = [engine.submit(ids, "BE", n, sampling=GREEDY) for ids, n in be]
        for handle in handles:
            next(iter(handle))
        held = Held(engine)
        handles.append(engine.submit(long[0], "BE", long[1], sampling=GREEDY))
        assert held.seen.wait(300)
        handles += [engine.submit(ids, "LS", n, sampling=GREEDY) for ids, n in ls[:4]]
        handles[3].update(paused=True)  # it is there when all is saved
        held.go.set()
        num_saved = engine.checkpoint(tmp_path / "saved")
        handles[3].update(paused=False)
        handles += [engine.submit(ids, "LS", n, sampling=GREEDY) for ids, n in ls[4:]]
        found = [handle.result(300) for handle in handles]
        events = Counter(type(event).__name__ for event in engine.trace.events)
    for result in found:
        assert result.token_ids == want[tuple(result.prompt_token_ids)]
    assert events["Parked"] > 0
    if policy == "qllm2":
        assert events["SwappedOut"] > 0
    assert num_saved > 0
    with engine_of(model, policy="qllm2", **how) as engine:
        restored = engine.restore(tmp_path / "saved")
        for handle in restored:
            handle.update(paused=False)
        again = [handle.result(300) for handle in restored]
    assert len(again) == num_saved
    assert any(len(result.prompt_token_ids) == LONG for result in again)
    for result in again:
        assert result.token_ids == want[tuple(result.prompt_token_ids)]
