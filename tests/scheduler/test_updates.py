"""A request changes its class, pauses, goes on: whenever it is asked, its tokens are the same."""

import os
import random
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qllm import QLLMEngine, SamplingParams
from qllm.errors import InvalidRequestError, QueueFullError
from qllm.frontend.request_log import RequestLog
from qllm.ingress import Cancel, Update, layout
from qllm.ingress.codec import decode_update, encode_update
from qllm.ingress.front_end import CANCEL_BYTES, MAX_OPEN, UPDATE_BYTES, FrontEndRings
from qllm.ingress.memory import FrontEndMemory
from qllm.ingress.ring import Record, record_bytes
from qllm.plugins import load_policy
from qllm.record import trace
from qllm.scheduler.decision import Parked
from qllm.sim.world import World
from qllm.types import NS_PER_MS, FinishReason, Priority, RequestStatus
from tests.support.engines import SETTINGS, pid_of
from tests.support.scheduling import BY_CLASS, Fuzz, events, finished_well, work_is_exact
from tests.support.swap import SwapFuzz, metrics_of, short_of_kv
from tests.support.waiting import wait_for

LS, BE = Priority.LS, Priority.BE
GREEDY = SamplingParams(temperature=0, ignore_eos=True)


def ask(world: World, request_id: int, **what: Any) -> None:
    world.loop.pending.append(Update(request_id, **what))


def frames(world: World) -> list[Parked]:
    return list(world.scheduler.frames.values())


def state(world: World, request_id: int) -> RequestStatus:
    return world.scheduler.requests[request_id].status


# -- decisions, on a virtual clock


def planned_while_paused(world: World) -> list[int]:
    paused, found = set(), []
    for event in world.record.events:
        if isinstance(event, trace.Updated):
            (paused.add if event.is_paused else paused.discard)(event.request_id)
        if isinstance(event, trace.Planned):
            found += [row.request_id for row in event.rows if row.request_id in paused]
    return found


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", ["fuzz", "swap", *map(str, range(len(BY_CLASS)))])
def test_any_updates_give_every_request_its_tokens(kind: str, seed: int) -> None:
    r = random.Random(seed)
    policy: Any = {"fuzz": Fuzz, "swap": SwapFuzz}[kind](seed) if kind.isalpha() else None
    limits = replace(short_of_kv(r.choice([60, 400]), r.choice([4, 10_000])), max_num_seqs=3)
    world = World(policy or BY_CLASS[int(kind)], limits)
    ids = [
        world.submit(r.choice([0, 3, 10]), r.randint(1, 400), r.randint(1, 10)) for _ in range(6)
    ]
    for _ in range(60):
        ask(
            world,
            r.choice(ids),
            priority=r.choice([None, 0, 10]),
            paused=r.choice([None, True, False]),
        )
        world.step()
        work_is_exact(world)
    for i in ids:
        ask(world, i, paused=False)
    while not world.idle:
        world.step()
        assert world.clock.at_ns < 10**12
    assert not world.loop.policy_errors
    finished_well(world)
    assert not planned_while_paused(world)
    assert not world.scheduler.paused


@pytest.mark.parametrize("policy", BY_CLASS)
def test_a_paused_request_stands_still_and_others_run(policy: Any) -> None:
    world = World(policy, short_of_kv(400))
    one = world.submit(LS, 50, 20)
    while world.tokens[one] < 2:
        world.step()
    other = world.submit(BE, 60, 10)
    ask(world, one, paused=True)
    while other not in world.finished:
        world.step()
    assert world.tokens[one] in (2, 3)
    assert state(world, one) is RequestStatus.PAUSED
    assert world.scheduler.requests[one].is_admitted, "nobody needed its KV"
    assert not world.step(), "nothing is left to do"
    ask(world, one, paused=False)
    world.run()
    finished_well(world)
    assert all(m.evict_recomputed_tokens == 0 for m in metrics_of(world))


def test_who_shares_a_frame_with_a_paused_request_goes_on() -> None:
    """Its row leaves the frame, and loses nothing that it has computed of whole layers."""
    world = World(Fuzz(2), short_of_kv(400))  # stops passes anywhere
    ids = {world.submit(BE, 100, 20) for _ in range(2)}
    while not any(ids == {row.request_id for row in p.held_rows()} for p in frames(world)):
        world.step()
    one, other = sorted(ids)
    ask(world, one, paused=True)
    while other not in world.finished:
        world.step()
        work_is_exact(world)
        assert world.clock.at_ns < 10**12, "the frame stands still with the paused request"
    (left,) = events(world, trace.Left)
    assert left.request_id == one
    assert state(world, one) is RequestStatus.PAUSED
    ask(world, one, paused=False)
    world.run()
    finished_well(world)
    assert all(m.evict_recomputed_tokens == 0 for m in metrics_of(world))


@pytest.mark.parametrize("room", [0, 10_000])
def test_the_kv_of_a_paused_request_is_there_for_all(room: int) -> None:
    """Also for a request of a worse class, which could evict nobody else."""
    world = World(load_policy("qllm2"), short_of_kv(16, room))
    one = world.submit(LS, 200, 20)
    while world.tokens[one] < 2:
        world.step()
    ask(world, one, paused=True)
    other = world.submit(BE, 200, 5)
    while other not in world.finished:
        world.step()
    assert not world.scheduler.requests[one].is_admitted
    assert len(events(world, trace.SwappedOut if room else trace.Evicted)) == 1
    ask(world, one, paused=False)
    world.run()
    finished_well(world)


def test_the_stall_bound_does_not_count_a_paused_request() -> None:
    world = World(load_policy("qllm2", {"max_be_stall_ms": 100}), short_of_kv(400))
    batch = world.submit(BE, 2000, 30)
    while world.tokens[batch] < 2:
        world.step()
    ask(world, batch, paused=True)
    chat = world.submit(LS, 40, 400)
    while chat not in world.finished:
        world.step()
    waited_ns = world.clock.at_ns
    ask(world, batch, paused=False)
    world.run()
    finished_well(world)
    found = {m.request_id: m for m in metrics_of(world)}
    assert waited_ns > 200 * NS_PER_MS, "long enough to break the bound"
    assert found[batch].max_stall_ms < 100
    (first, second) = events(world, trace.Updated)
    assert (first.is_paused, second.is_paused) == (True, False)


def test_who_goes_on_has_not_stalled() -> None:
    """Else it would be overdue, and run before everybody else."""
    world = World(load_policy("qllm2"), short_of_kv(400))
    one, other = world.submit(BE, 50, 20), world.submit(BE, 50, 60)
    while world.tokens[one] < 2:
        world.step()
    ask(world, one, paused=True)
    while other not in world.finished:
        world.step()
    before = world.scheduler.requests[one].last_progress_ns
    ask(world, one, paused=False)
    world.loop.take()
    assert world.scheduler.requests[one].last_progress_ns == world.clock.at_ns > before


def test_a_batch_job_that_became_urgent_runs_before_batch_jobs() -> None:
    world = World(load_policy("qllm2"), replace(short_of_kv(400), max_num_seqs=1))
    jobs = [world.submit(BE, 300, 5) for _ in range(4)]
    world.step()
    ask(world, jobs[3], priority=int(LS))
    while jobs[3] not in world.finished:
        world.step()
    assert set(world.finished) == {jobs[3]}
    world.run()
    finished_well(world)
    assert {m.request_id: m.priority for m in metrics_of(world)} == {
        jobs[0]: BE, jobs[1]: BE, jobs[2]: BE, jobs[3]: LS,
    }  # fmt: skip


def test_an_update_of_a_request_that_has_ended_is_nothing() -> None:
    world = World(load_policy("qllm2"))
    one = world.submit(LS, 5, 1)
    world.run()
    ask(world, one, paused=True)
    world.run()
    assert not events(world, trace.Updated)
    assert not world.scheduler.paused


def test_a_paused_request_ends_when_it_is_cancelled_or_late() -> None:
    world = World(load_policy("qllm2"), short_of_kv(400))
    one, two = world.submit(LS, 50, 20), world.submit(BE, 50, 20, timeout_ns=NS_PER_MS * 500)
    while world.tokens[one] < 2:
        world.step()
    ask(world, one, paused=True)
    ask(world, two, paused=True)
    world.step()
    world.cancel(one)
    world.run()
    assert world.finished[one] is FinishReason.CANCELLED
    assert world.finished[two] is FinishReason.TIMEOUT
    assert world.scheduler.pool.num_free == 400


# -- rings


@given(
    st.integers(0, 2**63 - 1),
    st.none() | st.integers(-layout.PRIORITY_LIMIT, layout.PRIORITY_LIMIT),
    st.none() | st.booleans(),
)
def test_an_update_is_what_was_put(number: int, priority: int | None, paused: bool | None) -> None:
    item = Update(number, priority, paused)
    assert decode_update(Record(layout.UPDATE_KIND, 0, encode_update(item))) == item


@pytest.mark.parametrize(("priority", "what"), [(0, 6), (0, 8), (2**30, 1), (-(2**30), 1)])
def test_what_no_front_end_puts_is_refused(priority: int, what: int) -> None:
    body = layout.body_struct(layout.UPDATE).pack(1, priority, what)
    with pytest.raises(ValueError, match="an update of"):
        decode_update(Record(layout.UPDATE_KIND, 0, body))


def test_updates_take_no_cancel_its_place() -> None:
    class Silent(FrontEndRings):
        def _ring(self) -> None:
            pass

    block = FrontEndMemory.create(0, (1 << 16, 1 << 16, CANCEL_BYTES, 1 << 16))
    front_end = Silent(block)
    for _ in range(UPDATE_BYTES // record_bytes(16)):
        front_end.update(Update(1, paused=True))
    with pytest.raises(QueueFullError, match="earlier updates"):
        front_end.update(Update(1, paused=True))
    for _ in range(2 * MAX_OPEN):
        front_end.cancel(Cancel(1))


# -- engines


@pytest.mark.parametrize("run_in", ["thread", "process"])
def test_the_answer_is_the_same(run_in: str) -> None:
    settings: dict[str, Any] = {**SETTINGS, "exactness": "batch-invariant", "swap_kv_tokens": 512}
    settings["max_kv_tokens"] = 512
    r = random.Random(7)
    with QLLMEngine.from_pretrained("tiny", run_in=run_in, **settings) as engine:
        prompts = [[r.randint(5, 900) for _ in range(r.randint(5, 120))] for _ in range(5)]
        sampling = SamplingParams(temperature=1.0, seed=3, ignore_eos=True)
        want = [engine.submit(p, "LS", 40, sampling=sampling).result(300) for p in prompts]
        handles = [engine.submit(p, "BE", 40, sampling=sampling) for p in prompts]
        for _ in range(40):
            handle = r.choice(handles)
            handle.update(priority=r.choice(["LS", "BE", 5]), paused=r.choice([None, True, False]))
            r.choice(handles).resume()
            r.choice(handles).resume()
        for handle in handles:
            handle.resume()
        found = [handle.result(300) for handle in handles]
    assert [x.token_ids for x in found] == [x.token_ids for x in want]


@pytest.mark.parametrize("run_in", ["thread", "process"])
def test_a_paused_handle_says_so_and_waits(run_in: str) -> None:
    with QLLMEngine.from_pretrained("tiny", run_in=run_in, **SETTINGS) as engine:
        handle = engine.submit("abc", "BE", 200, sampling=GREEDY)
        next(iter(handle))
        handle.pause()
        wait_for(lambda: handle.status is RequestStatus.PAUSED)
        before = len(handle.token_ids)
        engine.submit("x", max_tokens=20, sampling=GREEDY).result(300)
        assert len(handle.token_ids) == before
        handle.update(priority="LS", paused=False)
        assert handle.result(300).metrics.priority == LS
        handle.pause()  # it has ended: nothing
        with pytest.raises(InvalidRequestError, match="needs a priority"):
            handle.update()
        with pytest.raises(InvalidRequestError, match="'urgent' is unknown"):
            engine.submit("x", max_tokens=1).update(priority="urgent")
        with pytest.raises(InvalidRequestError, match="paused=1 must be"):
            engine.submit("x", max_tokens=1).update(paused=1)  # type: ignore[arg-type]


def test_a_request_that_waits_for_its_grammar_is_paused(tmp_path: Path) -> None:
    form = {"regex": "[a-c]{30}"}
    with QLLMEngine.from_pretrained("tiny", run_in="thread", **SETTINGS) as engine:
        handle = engine.submit("x", max_tokens=60, structured_outputs=form, seed=1)
        handle.pause()
        wait_for(lambda: handle.status is RequestStatus.PAUSED)
        assert engine.checkpoint(tmp_path / "file") == 1
        (other,) = engine.restore(tmp_path / "file")
        wait_for(lambda: other.status is RequestStatus.PAUSED)
        handle.resume()
        other.resume()
        assert handle.result(300).token_ids == other.result(300).token_ids


def test_a_paused_request_is_paused_in_the_next_engine_too() -> None:
    """After kill -9: it stays paused, holds nobody up, and goes on with the same tokens."""
    log = RequestLog(3, lambda: None)
    settings = {**SETTINGS, "exactness": "batch-invariant"}
    with QLLMEngine.from_pretrained("tiny", **settings) as engine:
        want = engine.submit("abc", "BE", 60, sampling=GREEDY).result(300).token_ids
        paused, other = (engine.submit("abc", "BE", 60, sampling=GREEDY) for _ in range(2))
        for handle in (paused, other):
            log.keep(handle)
        next(iter(paused))
        paused.update(priority="LS", paused=True)
        other.pause()
        wait_for(lambda: other.status is RequestStatus.PAUSED)
        os.kill(pid_of(engine), signal.SIGKILL)
        wait_for(lambda: log.holds(paused) and log.holds(other))
        assert paused.status is RequestStatus.PAUSED
        other.resume()
        with QLLMEngine.from_pretrained("tiny", **settings) as second:
            log.go_on(second.replay)
            assert other.result(300).token_ids == want
            wait_for(lambda: paused.status is RequestStatus.PAUSED)
            paused.resume()
            result = paused.result(300)
    assert result.token_ids == want
    assert result.metrics.priority == LS


def test_a_pause_is_no_progress() -> None:
    """Whoever has not run since it was given KV keeps it, however often it pauses."""
    world = World(load_policy("qllm2"), short_of_kv(400))
    batch = world.submit(BE, 200, 30)
    while world.tokens[batch] < 2:
        world.step()
    request = world.scheduler.requests[batch]
    for progress_ns, admitted_ns in ((5, 5), (7, 5)):
        request.last_progress_ns, request.admitted_ns = progress_ns, admitted_ns
        for at_ns in (10, 30):
            world.scheduler.update(batch, None, True, at_ns)
            world.scheduler.update(batch, None, False, at_ns + 10)
        assert request.last_progress_ns - request.admitted_ns == progress_ns - admitted_ns
        assert request.last_progress_ns == progress_ns + 20, "its time stood still"
