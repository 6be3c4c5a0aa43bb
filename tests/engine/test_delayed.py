"""Requests that are held back before the loop: what is asked of them meanwhile, and checkpoints."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from qllm import QLLMEngine, SamplingParams
from qllm.engine import checkpoint
from qllm.engine.delayed import Held, HoldingIngress
from qllm.grammar import Vocabulary
from qllm.ingress import Call, Cancel, Submission, Update
from qllm.ingress.inproc import InprocIngress
from qllm.types import Priority, RequestStatus, Slo
from tests.support.families import make_model
from tests.support.inside import loop_of, runner_of
from tests.support.kv_tier import GREEDY, engine_of, held_back, no_load_is_late, prompt_of, run
from tests.support.serving import tiny_engine
from tests.support.waiting import wait_for

FORM: dict[str, Any] = {
    "structured_outputs": {"regex": "[a-c]{30}"},
    "max_tokens": 60,
    "temperature": 1.0,
}
__all__ = ["no_load_is_late"]  # a fixture of all tests here


def submission(number: int) -> Submission:
    return Submission(
        request_id=number, name=str(number), priority=0, token_ids=(1,), slo=Slo(),
        sampling=SamplingParams(), stop_ids=frozenset(), max_tokens=1, arrival_ns=0,
        deadline_ns=None,
    )  # fmt: skip


class Odd(HoldingIngress[str]):
    """Holds requests of odd numbers until they are in `ready`."""

    def __init__(self) -> None:
        super().__init__(InprocIngress(lambda: 0))
        self.ready: set[int] = set()
        self.gone: list[int] = []

    def _begin(self) -> None:
        pass

    def _hold(self, item: Submission) -> str | None:
        return "more" if item.request_id % 2 else None

    def _is_ready(self, item: Submission, wanted: str) -> bool:
        return item.request_id in self.ready

    def _let_go(self, item: Submission, wanted: str) -> Submission:
        assert wanted == "more"
        self.gone.append(item.request_id)
        return item


def test_what_is_asked_of_a_held_request_follows_it() -> None:
    held, (one, two, three) = Odd(), (submission(n) for n in (1, 2, 3))
    pause, other, resume = Update(1, paused=True), Update(2, 10), Update(1, paused=False)
    for item in (one, two, pause, other, three):
        held.put(item)
    assert held.drain() == [two, other]
    assert held.held == (Held(one, (pause,)), Held(three, ()))
    held.ready.add(1)
    for item in (resume, Cancel(3)):
        held.put(item)
    assert held.drain() == [one, pause, resume, three, Cancel(3)]
    assert (held.held, held.gone) == ((), [1, 3])
    held.put(pause)
    assert held.drain() == [pause], "it is the loop's now"


def test_those_of_the_transport_below_are_held_too() -> None:
    below = Odd()
    above = Odd()
    above._inner = below
    below.put(submission(1))
    assert above.drain() == []
    below.ready.add(1)
    assert [x.submission.request_id for x in above.held] == [1]
    assert above.drain() == []
    assert below.held == ()
    assert [x.submission.request_id for x in above.held] == [1]


@contextmanager
def slow_builder() -> Iterator[threading.Event]:
    """No grammar is built before the event is set."""
    gate, build = threading.Event(), Vocabulary.matcher

    def later(vocabulary: Vocabulary, *asked: Any) -> Any:
        assert gate.wait(120)
        return build(vocabulary, *asked)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Vocabulary, "matcher", later)
        yield gate
        gate.set()


def ask(engine: QLLMEngine, seed: int, priority: str = "BE") -> Any:
    return engine.submit("x", priority, seed=seed, request_id=f"form-{seed}", **FORM)


@pytest.fixture(scope="module")
def exact() -> Iterator[QLLMEngine]:
    with tiny_engine(conformance=False, exactness="batch-invariant", run_in="thread") as made:
        yield made


def test_a_checkpoint_has_requests_that_wait_for_their_grammar(
    exact: QLLMEngine, tmp_path: Path
) -> None:
    """They go on here too; elsewhere they are paused and of the class that was asked for."""
    want = {seed: ask(exact, seed).result(300).token_ids for seed in (1, 2, 3)}
    assert len(set(want.values())) == 3
    with slow_builder() as gate:
        handles = {seed: ask(exact, seed) for seed in (1, 2, 3)}
        handles[2].pause()
        handles[3].update(priority="LS")
        assert exact.checkpoint(tmp_path / "file") == 3
        again = exact.restore(tmp_path / "file")
        assert exact.checkpoint(tmp_path / "twice") == 6
        assert all(h.finish_reason is None for h in (*handles.values(), *again))
        gate.set()
        assert [h.request_id for h in again] == ["form-1", "form-2", "form-3"]
        for paused in (handles[2], again[1]):
            wait_for(lambda h=paused: h.status is RequestStatus.PAUSED)
            paused.resume()
        for seed, other in zip((1, 2, 3), again, strict=True):
            results = [handle.result(300) for handle in (handles[seed], other)]
            assert [r.token_ids for r in results] == [want[seed]] * 2
            assert {r.metrics.priority for r in results} == {
                Priority.LS if seed == 3 else Priority.BE
            }
    with tiny_engine(conformance=False, exactness="batch-invariant") as process:
        restored = process.restore(tmp_path / "file")
        wait_for(lambda: restored[1].status is RequestStatus.PAUSED)
        restored[1].resume()
        assert [h.result(300).token_ids for h in restored] == list(want.values())


def test_a_cancelled_one_is_in_no_checkpoint(exact: QLLMEngine, tmp_path: Path) -> None:
    with slow_builder():
        left, gone = ask(exact, 1), ask(exact, 2)
        gone.cancel()
        assert gone.result(300).finish_reason == "cancelled"
        assert exact.checkpoint(tmp_path / "file") == 1
        (again,) = exact.restore(tmp_path / "file")
        for handle in (left, again):
            handle.cancel()
            assert handle.result(300).finish_reason == "cancelled"


def test_a_checkpoint_has_requests_that_wait_for_their_kv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids, file = make_model("qwen3_moe", torch.bfloat16), prompt_of(200), tmp_path / "file"
    folder = tmp_path / "kv"
    with engine_of(model, folder) as first:
        want = run(first, ids, 20).token_ids
        loads = first.submit(ids, "BE", 20, sampling=GREEDY, cache_owner="me")
        assert loads.result(300).metrics.num_cached_tokens == 0, "of another owner"
    gate = held_back(monkeypatch)
    with engine_of(model, folder) as second:
        handles = [
            second.submit(ids, to, 20, sampling=GREEDY, cache_owner=owner)
            for to, owner in (("LS", ""), ("BE", "me"))
        ]
        assert second.checkpoint(file) == 2
        again = second.restore(file)
        assert second.stats()["num_live"] == 0, "all are held back"
        gate.set()
        results = [handle.result(300) for handle in (*handles, *again)]
        assert [r.token_ids for r in results] == [want] * 4
        assert [r.metrics.num_cached_tokens for r in results] == [192] * 4
        assert [r.metrics.priority for r in results] == [0, 10, 0, 10]
    with engine_of(model, None) as plain:
        assert [h.result(300).token_ids for h in plain.restore(file)] == [want] * 2


def test_a_checkpoint_has_what_arrives_beside_it(exact: QLLMEngine, tmp_path: Path) -> None:
    """Over rings the call may be seen before a request that was submitted before it."""
    gate, stands, counts = threading.Event(), threading.Event(), []
    ingress = exact._client.ingress  # type: ignore[attr-defined]
    loop = loop_of(exact)

    def stand() -> None:
        stands.set()
        assert gate.wait(120)

    ingress.put(Call(stand, lambda *_: None))
    assert stands.wait(120)
    save = partial(checkpoint.save, loop, runner_of(exact), tmp_path / "file")
    ingress.put(Call(save, lambda count, _: counts.append(count)))
    handle = exact.submit("x", "BE", 5)
    gate.set()
    handle.result(300)
    assert counts == [1]
    (again,) = exact.restore(tmp_path / "file")
    assert again.result(300).token_ids == handle.result().token_ids
