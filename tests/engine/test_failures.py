# Over 500 lines: one kind of failure per test.
"""What breaks inside breaks one request at most; what breaks everything ends every handle."""

import itertools
import random
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from qllm import QLLMEngine, SamplingParams
from qllm.errors import (
    DeviceError,
    EngineClosedError,
    InvalidRequestError,
    QueueFullError,
    RequestFailedError,
)
from qllm.frontend.handle import Handle
from qllm.plan import Plan
from qllm.policy import RankPolicy, Ride, View, next_row
from qllm.sim.world import World
from qllm.types import NS_PER_MS, NS_PER_S, Cap, FinishReason, Grain, Priority, RequestStatus
from tests.support.byte_models import byte_tokenizer
from tests.support.families import VOCAB, make_model
from tests.support.files import ROOT
from tests.support.inside import loop_of, runner_of
from tests.support.waiting import wait_for

GREEDY = SamplingParams(temperature=0, logprobs=0, ignore_eos=True)
POISON = 13
"""A token that no clean prompt holds; layers are made to choke on it."""


def ids(n: int, seed: int = 0) -> list[int]:
    rng = random.Random(1000 * n + seed)
    return [rng.choice([t for t in range(VOCAB) if t != POISON]) for _ in range(n)]


def engine_of(**settings: Any) -> QLLMEngine:
    defaults = {
        "conformance": False,
        "threads": 1,
        "max_kv_tokens": 1024,
        "exactness": "batch-invariant",
    }
    return QLLMEngine.from_model(
        make_model("mixtral"), byte_tokenizer(), **{**defaults, **settings}
    )


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    wait_for(lambda: not set(threading.enumerate()) - before, what="a thread is left")


def submit_all(engine: QLLMEngine, prompts: list[list[int]], n: int = 8) -> list[Handle]:
    """In one go, so that they share programs."""
    handles: list[Handle] = engine.call(
        lambda: [engine.submit(p, "BE", n, sampling=GREEDY) for p in prompts]
    )
    return handles


def assert_serves(engine: QLLMEngine) -> None:
    assert len(engine.submit(ids(5, 77), "LS", 3, sampling=GREEDY).result(300).token_ids) == 3
    assert_clean(engine)


def assert_clean(engine: QLLMEngine) -> None:
    """Nothing is live, and nothing is left of what was."""
    wait_for(lambda: not engine.stats()["num_live"])
    scheduler, runner = loop_of(engine).scheduler, runner_of(engine)
    engine.call(scheduler.check)
    assert scheduler.pool.num_free == engine.config.num_blocks
    assert not scheduler.requests
    assert not scheduler.frames
    assert not runner.requests
    assert not runner.frames
    assert not runner.sampler._requests
    assert not engine._client.handles
    assert not loop_of(engine).metrics._meters
    assert not loop_of(engine).metrics._frames


class LayerError(RuntimeError):
    """Raised by a submodule on purpose."""


# -- layers


def _poisoned_rows(engine: QLLMEngine, do: Callable[[Any], Any]) -> Callable[[], None]:
    """Call `do` with the output of layer 1's norm, if a poisoned token passed the embedding."""
    model = runner_of(engine).model
    seen = {"poison": False}

    def embedded(module: Any, args: Any, out: Any) -> None:
        seen["poison"] = bool((args[0] == POISON).any())

    def normed(module: Any, args: Any, out: Any) -> Any:
        return do(out) if seen["poison"] else None

    hooks = [
        model.model.embed_tokens.register_forward_hook(embedded),
        model.model.layers[1].post_attention_layernorm.register_forward_hook(normed),
    ]
    return lambda: [hook.remove() for hook in hooks] and None


def test_an_exception_in_a_layer_fails_its_request_alone() -> None:
    with engine_of() as engine:
        clean = [ids(9, 1), ids(30, 2), ids(4, 3)]
        want = [h.result(300).token_ids for h in submit_all(engine, clean)]
        calls = []

        def choke(out: Any) -> None:
            calls.append(1)
            raise LayerError("choked")

        undo = _poisoned_rows(engine, choke)
        *handles, bad = submit_all(engine, [*clean, [*ids(6), POISON, *ids(3)]])
        with pytest.raises(RequestFailedError, match="LayerError: choked"):
            bad.result(300)
        assert bad.finish_reason is FinishReason.ERROR
        assert bad.status is RequestStatus.FINISHED
        assert [h.result(300).token_ids for h in handles] == want
        assert len(calls) == 2  # with the others, then alone
        with pytest.raises(RequestFailedError, match="choked"):
            list(bad)
        undo()
        assert_serves(engine)


def test_a_passing_exception_costs_no_token() -> None:
    with engine_of() as engine:
        prompts = [ids(9, 1), ids(30, 2), ids(4, 3)]
        want = [h.result(300) for h in submit_all(engine, prompts)]
        count = 0

        def nth(module: Any, args: Any) -> None:
            nonlocal count
            count += 1
            if count in (2, 9):
                raise LayerError(f"call {count}")

        hook = runner_of(engine).model.model.layers[2].self_attn.register_forward_pre_hook(nth)
        got = [h.result(300) for h in submit_all(engine, prompts)]
        hook.remove()
        assert count > 11
        for a, b in zip(got, want, strict=True):
            assert (a.token_ids, a.logprobs) == (b.token_ids, b.logprobs)
        assert sum(r.metrics.retry_recomputed_tokens for r in got) > 0
        assert sum(r.metrics.preempt_recomputed_tokens for r in got) == 0
        assert_serves(engine)


def test_nan_logits_of_one_row_fail_only_it() -> None:
    with engine_of() as engine:
        clean = [ids(9, 1), ids(12, 2)]
        want = [h.result(300) for h in submit_all(engine, clean)]
        marker = ids(7, 3)
        model = runner_of(engine).model

        class Spoil:
            """The norm before the head: one request's last row turns into NaN."""

            def __call__(self, module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
                runner = runner_of(engine)
                out = out.clone()
                for frame in runner.frames.values():
                    program = frame.program
                    if not program.ops or frame.group is None:
                        continue
                    members = program.groups[program.ops[-1].group]
                    if len(members) == out.shape[0]:
                        for i, r in enumerate(members):
                            request = runner.requests.get(program.rows[r].request_id)
                            if request is not None and request.ids[:7] == marker:
                                out[i] = float("nan")
                return out

        hook = model.model.norm.register_forward_hook(Spoil())
        bad, *handles = submit_all(engine, [marker, *clean])
        with pytest.raises(RequestFailedError, match="must be finite"):
            bad.result(300)
        got = [h.result(300) for h in handles]
        hook.remove()
        for a, b in zip(got, want, strict=True):
            assert (a.token_ids, a.logprobs) == (b.token_ids, b.logprobs)
        assert_serves(engine)


def test_a_tokenizer_that_raises_fails_its_request_alone() -> None:
    with engine_of() as engine:
        tokenizer = engine.tokenizer
        real = tokenizer.decode

        def decode(token_ids: Any, **kwargs: Any) -> Any:
            if len(token_ids) > 2:
                raise LayerError("no such character")
            return real(token_ids, **kwargs)

        letters = SamplingParams(temperature=0, logit_bias={195: 500.0})  # half a character
        tokenizer.decode = decode
        try:
            bad = engine.submit("abc", max_tokens=20, sampling=letters, stop="zz")
            good = engine.submit(ids(5), max_tokens=6, sampling=GREEDY)
            with pytest.raises(RequestFailedError, match="no such character"):
                bad.result(300)
            list(good)
        except LayerError:
            pass  # the reader's own thread decodes the answer without stop strings
        finally:
            tokenizer.decode = real
        assert len(good.result(300).token_ids) == 6
        assert_serves(engine)


# -- policies


@dataclass(frozen=True, kw_only=True)
class BadRank(RankPolicy):
    """Breaks at the n-th question."""

    grain: Grain = Grain.EXPERT
    ride: Ride = field(default=Ride(frac=0.5))
    after: int = 0
    answer: Any = None

    def rank(self, *args: int) -> Any:
        count = _asked.setdefault(id(self), 0)
        _asked[id(self)] += 1
        if count >= self.after:
            if self.answer is not None:
                return self.answer
            raise LayerError("no opinion")
        return args[1], args[0]


_asked: dict[int, int] = {}


class Planner:
    """A policy from a function."""

    needs = Cap.NONE

    def __init__(self, plan: Callable[[View], Any]) -> None:
        self._plan = plan

    def plan(self, view: View) -> Any:
        return self._plan(view)


def _raises(view: View) -> Any:
    raise LayerError("no plan")


def _row(view: View, **changes: Any) -> Plan:
    return Plan(rows=(next_row(view.requests[0], view)._replace(**changes),))


NONSENSE: dict[str, Callable[[View], Any]] = {
    "raises": _raises,
    "stalls": lambda view: Plan(),
    "none": lambda view: None,
    "a-list": lambda view: [next_row(view.requests[0], view)],
    "unknown-request": lambda view: _row(view, request_id=999),
    "beyond-the-prompt": lambda view: _row(view, hi=10**6),
    "off-the-frontier": lambda view: _row(view, lo=1),
    "no-tokens": lambda view: _row(view, hi=0),
    "negative": lambda view: _row(view, lo=-3),
    "no-layers": lambda view: _row(view, end_layer=0),
    "too-many-layers": lambda view: _row(view, end_layer=99),
    "twice": lambda view: Plan(rows=_row(view).rows * 2),
    "drops-the-unknown": lambda view: Plan(drop=(999,)),
    "drops-the-planned": lambda view: Plan(
        rows=_row(view).rows, drop=(view.requests[0].request_id,)
    ),
    "rows-of-text": lambda view: Plan(rows=("x",)),  # type: ignore[arg-type]
    "rows-none": lambda view: Plan(rows=None),  # type: ignore[arg-type]
    "rows-of-tuples": lambda view: Plan(rows=(tuple(_row(view).rows[0]),)),  # type: ignore[arg-type]
    "text-in-a-row": lambda view: _row(view, hi="9"),
    "grain-none": lambda view: Plan(rows=_row(view).rows, grain=None),  # type: ignore[arg-type]
    "slice-text": lambda view: Plan(rows=_row(view).rows, slice_ns="5"),  # type: ignore[arg-type]
    "stop-text": lambda view: Plan(
        rows=_row(view).rows,
        grain=Grain.EXPERT,
        stop_below="5",  # type: ignore[arg-type]
    ),
    "wait-text": lambda view: Plan(wait_until_ns="soon"),  # type: ignore[arg-type]
    "drop-none": lambda view: Plan(rows=_row(view).rows, drop=None),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("what", NONSENSE)
def test_a_policy_that_plans_nonsense_is_named_and_the_engine_lives(what: str) -> None:
    broken = threading.Event()
    broken.set()

    def plan(view: View) -> Any:
        if broken.is_set():
            return NONSENSE[what](view)
        return Plan(rows=(next_row(view.requests[0], view),))

    with engine_of(policy=Planner(plan)) as engine:
        for handle in submit_all(engine, [ids(5), ids(6)]):
            with pytest.raises(RequestFailedError, match="policy Planner"):
                handle.result(300)
        assert engine.stats()["policy_errors"]
        broken.clear()
        assert_serves(engine)


@pytest.mark.sampled
@pytest.mark.parametrize("answer", [None, "first", 3, ("a", "b"), (1,)])
@pytest.mark.parametrize("after", [0, 1, 4, 5, 6, 9, 30])
def test_a_rank_that_breaks_is_named_and_the_engine_lives(after: int, answer: Any) -> None:
    with engine_of(policy=BadRank(after=after, answer=answer), max_kv_tokens=64) as engine:
        for handle in submit_all(engine, [ids(20), ids(6)], 30):
            try:
                handle.result(300)
            except RequestFailedError as error:
                assert "policy BadRank" in str(error)  # noqa: PT017
        assert any("BadRank" in text for text in engine.stats()["policy_errors"])
        assert engine._client._thread.is_alive()
        assert_clean(engine)


@pytest.mark.parametrize("hook", ["on_arrival", "on_finish", "on_step_done"])
def test_a_hook_that_raises_is_named(hook: str) -> None:
    policy = Planner(lambda view: Plan(rows=(next_row(view.requests[0], view),)))

    def broken(*_: object) -> None:
        raise LayerError("hooked")

    setattr(policy, hook, broken)
    with engine_of(policy=policy) as engine:
        handles = submit_all(engine, [ids(5), ids(6)])
        failed = []
        for handle in handles:
            try:
                handle.result(300)
            except RequestFailedError as error:
                failed.append(str(error))
        told = f"Planner raised in {hook}"
        assert all(told in text for text in failed)
        assert bool(failed) is (hook != "on_finish")  # then the request has ended already
        errors = engine.stats()["policy_errors"]
        assert errors
        assert all(told in text for text in errors)
        delattr(policy, hook)
        engine.call(lambda: setattr(loop_of(engine).scheduler, "hook_errors", deque()))
        assert_serves(engine)


@pytest.mark.parametrize("what", ["raises", "stalls", "none", "twice", "off-the-frontier"])
def test_a_broken_policy_falls_back_if_so_configured(what: str) -> None:
    count = 0

    def plan(view: View) -> Any:
        nonlocal count
        count += 1
        if count > 5:
            return NONSENSE[what](view)
        return Plan(rows=(next_row(view.requests[0], view),))

    with engine_of(policy=Planner(plan), on_policy_error="fcfs") as engine:
        results = [h.result(300) for h in submit_all(engine, [ids(5), ids(30), ids(6)])]
        assert [len(r.token_ids) for r in results] == [8, 8, 8]
        errors = engine.stats()["policy_errors"]
        assert len(errors) == 1
        assert "policy Planner" in errors[0]
        assert_serves(engine)


SLEEP: dict[str, Callable[[View], Plan]] = {
    "a-little": lambda view: Plan(wait_until_ns=view.now_ns + NS_PER_MS),
    "for-days": lambda view: Plan(wait_until_ns=view.now_ns + 10**6 * NS_PER_S),
    "in-the-past": lambda view: Plan(wait_until_ns=0),
    "drops-for-ever": lambda view: Plan(drop=(view.requests[0].request_id,)),
}


@pytest.mark.parametrize("how", SLEEP)
def test_a_policy_that_waits_for_ever_is_named_and_its_requests_fail(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("decision", "scheduler"):
        monkeypatch.setattr(f"qllm.scheduler.{module}.MAX_IDLE_NS", 500 * NS_PER_MS)
    world = World(Planner(SLEEP[how]))
    for _ in range(2):
        world.submit(Priority.LS, 9, 2, at_ns=5 * NS_PER_MS)
    for _ in range(10_000):
        world.step()
        if world.idle:
            break
    assert set(world.finished.values()) == {FinishReason.ERROR}
    assert "policy Planner stalls: 2 requests wait and nothing ran for 0.5 s" in world.errors[0]
    assert len(world.loop.policy_errors) == 1
    assert world.clock.at_ns // NS_PER_MS == 505


def test_waiting_now_and_then_is_no_stall() -> None:
    """Patience begins again whenever something ran, and when nobody waits."""
    naps = 0

    def plan(view: View) -> Plan:
        nonlocal naps
        naps += 1
        if naps % 2:
            return Plan(wait_until_ns=view.now_ns + 9 * NS_PER_S)
        return Plan(rows=(next_row(view.requests[0], view),))

    world = World(Planner(plan))
    world.submit(Priority.LS, 9, 3)
    world.submit(Priority.LS, 9, 1, at_ns=10**12)
    world.submit(Priority.LS, 9, 1, at_ns=10**12, timeout_ns=5 * NS_PER_S)
    world.submit(Priority.LS, 9, 1, at_ns=2 * 10**12)
    world.run()
    assert not world.loop.policy_errors
    assert [world.finished[i] for i in range(4)].count(FinishReason.LENGTH) == 3


def test_an_engine_outlives_a_policy_that_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qllm.scheduler.decision.MAX_IDLE_NS", 200 * NS_PER_MS)
    with engine_of(policy=Planner(SLEEP["a-little"])) as engine:
        for handle in submit_all(engine, [ids(5), ids(6)]):
            with pytest.raises(RequestFailedError, match="policy Planner stalls"):
                handle.result(300)
        engine.policy._plan = lambda view: Plan(rows=(next_row(view.requests[0], view),))
        assert_serves(engine)
    with engine_of(policy=Planner(SLEEP["for-days"]), on_policy_error="fcfs") as engine:
        assert [len(h.result(300).token_ids) for h in submit_all(engine, [ids(5), ids(6)])] == [
            8,
            8,
        ]
        assert ["stalls" in text for text in engine.stats()["policy_errors"]] == [True]


def test_a_slow_plan_costs_time_and_nothing_else() -> None:
    def plan(view: View) -> Plan:
        time.sleep(0.05)
        return Plan(rows=(next_row(view.requests[0], view),))

    prompts = [ids(5), ids(30)]
    with engine_of(policy=Planner(plan)) as slow, engine_of(policy="fcfs") as engine:
        assert slow.stats()["longest_plan_ms"] < 50
        got, want = ([h.result(300) for h in submit_all(e, prompts)] for e in (slow, engine))
        assert [r.token_ids for r in got] == [r.token_ids for r in want]
        assert slow.stats()["longest_plan_ms"] >= 50
        late = slow.submit(ids(6), "BE", 500, sampling=GREEDY)
        gone = slow.submit(ids(7), "BE", 8, sampling=GREEDY, timeout_s=0.12)
        assert gone.result(300).finish_reason is FinishReason.TIMEOUT
        late.cancel()
        assert late.result(300).finish_reason is FinishReason.CANCELLED
        assert_serves(slow)


def test_a_row_that_left_its_parked_frame_early_is_not_lost() -> None:
    """A frame parked above the layer at which one of its rows left, then replaced."""
    split = threading.Event()

    def plan(view: View) -> Plan:
        by_id = {r.request_id: r for r in view.requests}
        new = all(r.frontier is None and not r.num_computed_tokens for r in view.requests)
        if not split.is_set() and len(by_id) == 2 and not view.frames and new:
            a, b = (next_row(r, view) for r in view.requests)
            return Plan(rows=(a, b._replace(end_layer=1)), grain=Grain.LAYER, stop_below=-5)
        if view.frames:
            split.set()
            rows = view.frames[0].rows
            free = [r for r in view.requests if r.frame_id is None][:1]
            return Plan(rows=(*rows, *(next_row(r, view) for r in free)))
        free = [r for r in view.requests if r.frame_id is None]
        return Plan(rows=tuple(next_row(r, view) for r in free))

    policy = Planner(plan)
    policy.needs = Cap.LAYER_RANGE | Cap.YIELD_LAYER
    with engine_of(policy=policy) as engine:
        want = [engine.submit(ids(n), "BE", 4, sampling=GREEDY).result(300) for n in (9, 12)]
        third = []

        def look(program: Any, index: Any, *_: object) -> None:
            if program.layer_at(index) == 1 and len(program.rows) == 2 and not third:
                third.append(engine.submit(ids(3), -9, 4, sampling=GREEDY))  # stops it

        engine.call(lambda: setattr(runner_of(engine), "on_segment", look))
        handles = submit_all(engine, [ids(9), ids(12)], 4)
        got = [h.result(300) for h in handles]
        engine.call(lambda: setattr(runner_of(engine), "on_segment", None))
        assert third
        assert [r.token_ids for r in got] == [r.token_ids for r in want]
        third[0].result(300)
        assert_serves(engine)


# -- the loop


def _crash_points(engine: QLLMEngine) -> dict[str, tuple[Any, str]]:
    loop = loop_of(engine)
    return {
        "remove": (runner_of(engine), "remove"),
        "decide": (loop.scheduler, "decide"),
        "done": (loop.scheduler, "done"),
        "count": (loop, "_done"),
        "drain": (engine._client.ingress, "drain"),
        "expire": (loop, "_expire"),
    }


@pytest.mark.parametrize("times", [1, 1000])
def test_a_frame_that_cannot_be_made_fails_its_requests_not_the_engine(
    times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_of() as engine:
        real = runner_of(engine).accept
        left = [times]

        def accept(program: Any, tables: Any) -> None:
            left[0] -= 1
            if left[0] >= 0:
                raise MemoryError("no room for a frame")
            real(program, tables)

        monkeypatch.setattr(runner_of(engine), "accept", accept)
        handles = submit_all(engine, [ids(5), ids(6)])
        for handle in handles:
            if times == 1:
                assert handle.result(300).finish_reason is FinishReason.LENGTH
            else:
                with pytest.raises(RequestFailedError, match="no room for a frame"):
                    handle.result(300)
        left[0] = 0
        assert_serves(engine)


@pytest.mark.parametrize("after", [0, 7])
def test_a_request_that_cannot_be_admitted_ends_alone(after: int) -> None:
    engine = engine_of()
    runner: Any = runner_of(engine)
    real, seen = runner.add, itertools.count()

    def broken(*args: Any, **kwargs: Any) -> Any:
        if next(seen) == after:
            raise LayerError("the runner is broken")
        return real(*args, **kwargs)

    runner.add = broken
    with engine:
        handles = [engine.submit(ids(5, i), "BE", 12, sampling=GREEDY) for i in range(12)]
        for number, handle in enumerate(handles):
            if number == after:
                with pytest.raises(RequestFailedError, match="LayerError: the runner is broken"):
                    handle.result(300)
            else:
                assert handle.result(300).finish_reason is FinishReason.LENGTH
        assert engine.failure is None


@pytest.mark.parametrize("where", ["remove", "decide", "done", "count", "drain", "expire"])
@pytest.mark.parametrize("after", [0, 7])
def test_a_crashed_loop_ends_every_handle(where: str, after: int) -> None:
    engine = engine_of()
    owner, name = _crash_points(engine)[where]
    real = getattr(owner, name)
    count = 0

    def crash(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == after + 1:
            raise LayerError("the loop is broken")
        return real(*args, **kwargs)

    handles: list[Handle] = []

    def start() -> None:
        handles.extend(engine.submit(ids(5, i), "BE", 12, sampling=GREEDY) for i in range(12))
        setattr(owner, name, crash)

    engine.call(start)
    for handle in handles:
        try:
            handle.result(300)
        except RequestFailedError as error:
            assert "the loop is broken" in str(error)  # noqa: PT017
        assert handle.finish_reason is not None
    engine._client._thread.join(60)
    assert not engine._client._thread.is_alive()
    assert any(h.finish_reason is FinishReason.ERROR for h in handles)
    assert engine.failure == "the engine crashed: LayerError: the loop is broken"
    with pytest.raises(EngineClosedError, match="crashed") as caught:
        engine.submit(ids(5))
    assert isinstance(caught.value.__cause__, LayerError)
    with pytest.raises(EngineClosedError):
        engine.checkpoint("/nowhere")
    engine.close()
    engine.close()


@pytest.mark.parametrize("where", ["add", "accept", "run", "finish"])
def test_a_lost_device_ends_the_engine_not_its_requests_one_by_one(where: str) -> None:
    """CUDA's faults stay: an engine that lived on would fail every later request."""
    engine = engine_of()
    runner: Any = runner_of(engine)

    def lost(*args: Any, **kwargs: Any) -> Any:
        raise LayerError("an illegal memory access was encountered")

    runner.backend.fault = lambda error: DeviceError(f"the device is lost ({error})")

    def start() -> list[Handle]:
        setattr(runner, where, lost)
        return [engine.submit(ids(5, i), "BE", 12, sampling=GREEDY) for i in range(3)]

    for handle in engine.call(start):
        with pytest.raises(RequestFailedError, match="the engine crashed: DeviceError: the device"):
            handle.result(300)
    with pytest.raises(EngineClosedError, match="crashed"):
        engine.submit(ids(5))
    engine.close()


def test_a_system_exit_in_the_loop_ends_every_handle() -> None:
    engine = engine_of()

    def leave() -> None:
        raise SystemExit

    def start() -> Handle:
        handle = engine.submit(ids(5), "BE", 50)
        runner_of(engine).run = lambda *_: leave()
        return handle

    handle = engine.call(start)
    with pytest.raises(RequestFailedError, match="SystemExit"):
        handle.result(300)
    with pytest.raises(EngineClosedError):
        engine.submit(ids(5))
    engine.close()


# -- closing


def test_close_ends_what_is_in_flight() -> None:
    engine = engine_of()
    handles = [engine.submit(ids(20, i), "BE", 400, sampling=GREEDY) for i in range(4)]
    first = iter(handles[0])
    num_read = len(next(first).token_ids)
    engine.close()
    engine.close()
    for handle in handles:
        result = handle.result(0)
        assert result.finish_reason is FinishReason.CANCELLED
        assert len(result.token_ids) < 400, "closing waited for its end"
        assert handle.status is RequestStatus.FINISHED
    rest = [token for piece in first for token in piece.token_ids]
    assert num_read + len(rest) == len(handles[0].result(0).token_ids)
    with pytest.raises(EngineClosedError):
        engine.submit(ids(5))


def test_close_from_many_threads_at_once() -> None:
    engine = engine_of()
    handles = [engine.submit(ids(20, i), "BE", 400) for i in range(4)]
    threads = [threading.Thread(target=engine.close) for _ in range(5)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not any(t.is_alive() for t in threads)
    assert all(h.result(0).finish_reason is FinishReason.CANCELLED for h in handles)


def test_an_exception_in_the_with_block_closes_the_engine() -> None:
    handles = []

    def use() -> None:
        with engine_of() as engine:
            handles.append(engine.submit(ids(5), max_tokens=400))
            next(iter(handles[0]))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        use()
    assert handles[0].result(0).finish_reason is FinishReason.CANCELLED


INTERRUPTED = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
sys.path.insert(0, sys.argv[1])
from tests.support.families import make_model
from qllm import QLLMEngine, SamplingParams
from qllm.plan import Plan
from qllm.policy import next_row
from qllm.types import Cap
handles = []
LONG = SamplingParams(ignore_eos=True)
class Slow:
    needs = Cap.NONE
    def plan(self, view):
        time.sleep(0.1)  # 3,000 tokens in turn: no answer ends by itself before the signal comes
        return Plan(rows=(next_row(view.requests[0], view),))
def main():
    model = make_model("mixtral")
    with QLLMEngine.from_model(model, policy=Slow(), threads=1, conformance=False) as engine:
        for i in range(6):
            handles.append(engine.submit([1, 2, 3 + i], "BE" if i else "LS", 500, sampling=LONG))
        for n, piece in enumerate(handles[0]):
            if n == 2:
                print("iterating", flush=True)
        for handle in handles:
            handle.result()
try:
    main()
    print("not interrupted")
except KeyboardInterrupt:
    print([str(h.finish_reason) for h in handles])
engine = QLLMEngine.from_model(make_model("mixtral"), threads=1, conformance=False)
left = [engine.submit([1, 2, 3 + i], "BE", 500) for i in range(6)]
next(iter(left[0]))
print("leaving", flush=True)
"""
"""A program that is interrupted, and then ends while an engine of it runs."""


def test_ctrl_c_ends_everything_and_a_program_that_never_closes_still_exits() -> None:
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", INTERRUPTED, str(ROOT)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "iterating\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err[-2000:]
    said = [str(["cancelled"] * 6), "leaving"]
    assert out.splitlines() == said, "it waited for an answer's end, or was not interrupted"
    assert "Fatal" not in err


# -- timeouts


LATER_S = 1000.0


def once_seen(engine: QLLMEngine, handle: Handle) -> Callable[..., None]:
    """For `on_segment`: once a request has a token and runs again, LATER_S pass at once."""
    passed = threading.Event()

    def look(program: Any, *_: object) -> None:
        if handle.number in program.request_ids and handle.token_ids and not passed.is_set():
            passed.set()
            engine._client._zero_ns -= int(LATER_S * NS_PER_S)

    return look


def test_timeouts_end_requests_wherever_they_are() -> None:
    held = threading.Event()

    def plan(view: View) -> Plan:
        if not held.is_set():
            return Plan(wait_until_ns=view.now_ns + 10**12)
        return Plan(rows=(next_row(view.requests[0], view),))

    with engine_of(policy=Planner(plan)) as engine:
        result = engine.submit(ids(5), timeout_s=0.1).result(300)
        assert result.finish_reason is FinishReason.TIMEOUT
        assert result.token_ids == ()
        held.set()
        running = engine.submit(ids(5), "BE", 500, timeout_s=LATER_S)
        engine.call(lambda: setattr(runner_of(engine), "on_segment", once_seen(engine, running)))
        result = running.result(300)
        assert result.finish_reason is FinishReason.TIMEOUT
        assert 0 < len(result.token_ids) < 500
        assert_serves(engine)


def test_a_parked_request_times_out() -> None:
    with engine_of(policy_settings={"ride_frac": 0.0, "max_be_stall_ms": None}) as engine:
        object.__setattr__(runner_of(engine).backend.costs, "range_ns", 0.5)
        hits: list[Handle] = []
        later: list[Callable[..., None]] = []

        def look(program: Any, index: Any, *rest: object) -> None:
            if 0 in program.request_ids and index.pos and not hits:
                hits.append(engine.submit(ids(5), "LS", 300, sampling=GREEDY))
                later.append(once_seen(engine, hits[0]))
            for pass_time in later:
                pass_time(program, index, *rest)

        engine.call(lambda: setattr(runner_of(engine), "on_segment", look))
        parked = engine.submit(ids(60), "BE", 10, timeout_s=LATER_S)
        result = parked.result(300)
        assert result.finish_reason is FinishReason.TIMEOUT
        assert result.metrics.preemptions == 1
        assert result.metrics.parked_ms > 0
        assert len(hits[0].result(300).token_ids) == 300
        engine.call(lambda: setattr(runner_of(engine), "on_segment", None))
        assert_serves(engine)


# -- everything at once


def _hammer(engine: QLLMEngine, seed: int, count: int, mine: list[Handle]) -> None:
    rng = random.Random(seed)
    while len(mine) < count:
        try:
            mine.append(
                engine.submit(
                    ids(rng.randrange(1, 60), rng.randrange(9)),
                    rng.choice(["LS", "BE", 5]),
                    rng.randrange(1, 20),
                    timeout_s=rng.choice([None, None, 0.05]),
                    stop=rng.choice([None, "e"]),
                )
            )
        except QueueFullError:
            time.sleep(0.01)
        if rng.random() < 0.1:
            with pytest.raises(InvalidRequestError):
                engine.submit("", "LS")
        if mine and rng.random() < 0.4:
            rng.choice(mine).cancel()
        if mine and rng.random() < 0.2:
            assert rng.choice(mine).status in RequestStatus
        if rng.random() < 0.3:
            time.sleep(rng.random() * 0.02)


def test_hammer() -> None:
    num_threads, count = 8, 40
    settings = {"max_kv_tokens": 512, "max_waiting": 64, "record": True, "exactness": "order"}
    finished: dict[int, int] = {}
    with engine_of(**settings) as engine:
        real = engine._client.on_finish

        def on_finish(request_id: int, *rest: Any) -> None:
            finished[request_id] = finished.get(request_id, 0) + 1
            real(request_id, *rest)

        engine._client.on_finish = on_finish  # type: ignore[method-assign]
        handles: list[Handle] = []
        broken: list[BaseException] = []

        def work(seed: int) -> None:
            mine: list[Handle] = []
            try:
                _hammer(engine, seed, count, mine)
            except BaseException as error:  # noqa: BLE001 - shown by the test's thread
                broken.append(error)
            handles.extend(mine)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(num_threads)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
        assert not broken
        results = [h.result(300) for h in handles]
        reasons = {str(r.finish_reason) for r in results}
        assert {"length", "cancelled"} <= reasons
        assert "error" not in reasons
        assert len(handles) == num_threads * count
        assert_serves(engine)
        assert engine._client._thread.is_alive()
        events = [e.request_id for e in engine.trace.events if type(e).__name__ == "Finished"]
    assert sorted(events) == sorted(finished)
    assert set(finished.values()) == {1}
    assert {h.number for h in handles} <= set(finished)
