"""Tickets, slots and threads of frames that wait for experts, on a virtual clock."""

import errno
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qllm.engine.storage import reads
from qllm.engine.storage.mover import Mover
from qllm.engine.storage.waits import AHEAD_USES, DEADLINE_NS
from qllm.errors import ModelError, PolicyError
from qllm.plan import Plan
from qllm.policy import View, next_row
from qllm.record import trace
from qllm.runner.displacing import LS_STAYS_NS, Use
from qllm.sim.check import _StallWatch
from qllm.sim.world import LIMITS
from qllm.types import NS_PER_MS, NS_PER_S, Cap, FinishReason
from qllm_policies.fcfs import Fcfs
from qllm_policies.priority import PriorityPolicy
from qllm_policies.qllm2 import Qllm2
from tests.support.expert_waits import NUM_EXPERTS, SLOT_BYTES, TOP_K, WaitWorld
from tests.support.scheduling import BE, LS, Fuzz, events, finished_well
from tests.support.waiting import wait_for

Make = Callable[..., WaitWorld]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made = list[WaitWorld]()

    def one(policy: Any = None, num_slots: int = TOP_K, **settings: Any) -> WaitWorld:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(WaitWorld(folder, policy or PriorityPolicy(), num_slots, **settings))
        return made[-1]

    yield one
    for world in made:
        world.close()


# -- a frame waits, and others run


def test_others_run_while_a_frame_waits(make: Make) -> None:
    world = make(num_slots=4)
    slow = world.submit(BE, 20, 2)
    world.stop_at_wait()
    assert world.waiting == {slow}
    assert world.begun == [0, 1]
    other = world.submit(BE, 20, 2)
    world.stop_at_wait()
    assert world.waiting == {slow, other}
    world.let(0, 1)
    world.settle()
    world.let(2, 3)
    world.run_open()
    finished_well(world)


def test_a_waiting_frame_is_not_offered_to_policies(make: Make) -> None:
    seen = list[set[int]]()

    class Looks(PriorityPolicy):
        def rank(self, *numbers: int) -> tuple[int, int]:
            return super().rank(*numbers)

    world = make(Looks(), num_slots=4)
    real = world.scheduler.view

    def view(now_ns: int) -> Any:
        found = real(now_ns)
        seen.append({r.request_id for r in found.requests} & world.waiting)
        assert all(f.rows[0].request_id not in world.waiting for f in found.frames)
        return found

    world.scheduler.view = view
    world.submit(BE, 20, 3)
    world.stop_at_wait()
    world.submit(BE, 20, 3)
    world.run_open()
    assert len(seen) > 4
    assert not set().union(*seen)
    finished_well(world)


def test_nothing_is_decided_while_all_frames_wait(make: Make) -> None:
    """The loop sleeps, and does not ask the policy in turns."""
    world = make()
    world.submit(BE, 20, 2)
    world.stop_at_wait()
    asked = world.scheduler.view
    world.scheduler.view = lambda now: pytest.fail("the policy is asked")
    for _ in range(5):
        assert not world.step()
    world.scheduler.view = asked
    world.run_open()
    finished_well(world)


class Insists:
    """Plans its first request, whether there is KV for it or not."""

    needs = Cap.YIELD_EXPERT

    def plan(self, view: View) -> Plan:
        return Plan(rows=(next_row(view.requests[0], view, view.max_step_tokens),))


def test_a_newcomer_without_kv_waits_for_a_frame_that_waits(make: Make) -> None:
    """All KV is held by the waiting frame, so no plan is possible. This is no fault of a policy."""
    for policy in (Fcfs(), Qllm2(), Fuzz(3), Insists()):
        world = make(policy, limits=replace(LIMITS, num_blocks=4, max_num_seqs=2))
        world.submit(BE, 40, 2)
        world.stop_at_wait()
        world.submit(BE, 60, 2)
        for _ in range(10):
            world.step()
        world.clock.at_ns += 20 * NS_PER_S
        world.step()
        assert not world.loop.policy_errors
        world.run_open()
        assert set(world.finished.values()) == {FinishReason.LENGTH} or isinstance(policy, Fuzz)


# -- the thread wakes the loop


def test_the_loop_is_woken_for_ls_and_for_an_engine_that_sleeps(make: Make) -> None:
    world = make(num_slots=4)
    world.submit(BE, 20, 1)
    world.stop_at_wait()
    assert world.num_wakes == 0
    world.let(0)
    assert world.num_wakes == 1, "the loop sleeps"
    world.threads._is_asleep = False  # it is awake, and turns to other work
    world.let(1)
    assert world.num_wakes == 1, "BE stops no other program"
    world.submit(LS, 20, 1)
    world.run_open()
    other = make(num_slots=4)
    other.submit(LS, 20, 1)
    other.stop_at_wait()
    other.threads._is_asleep = False
    other.let(0)
    assert other.num_wakes == 0, "it can do more with both experts"
    other.let(1)
    assert other.num_wakes == 1, "LS stops the running program"


def test_reads_for_ls_begin_first_and_then_those_of_the_oldest(make: Make) -> None:
    world = make(num_slots=10)
    for priority in (BE, BE, LS):
        world.submit(priority, 20, 1)
        world.stop_at_wait()
    assert world.begun == [0, 1], "each of two threads reads"
    world.let(0, 1)
    world.settle()
    assert sorted(world.begun[2:]) == [4, 5]
    world.let(4, 5)
    world.settle()
    assert sorted(world.begun[4:]) == [2, 3]


@pytest.fixture
def long_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rests last until something ends them."""
    monkeypatch.setattr(reads, "rest_s", lambda *_: threading.TIMEOUT_MAX)


@pytest.mark.usefixtures("long_rests")
def test_reads_for_be_rest_while_ls_exists_and_those_for_ls_never(make: Make) -> None:
    world = make(num_slots=12, experts_of=lambda i: range(2, 10) if i == 0 else (0, 1))
    world.submit(BE, 20, 1)
    world.stop_at_wait()
    world.let(2, 3)
    world.settle()
    assert world.begun == [2, 3, 4, 5], "no LS exists"
    chat = world.submit(LS, 20, 50)
    world.stop_at_wait()
    world.let(4, 5)
    world.settle()
    assert sorted(world.begun[4:]) == [0, 1], "LS waits, so the threads do not rest"
    world.let(0, 1)
    wait_for(lambda: len(world.begun) == 8)
    assert sorted(world.begun[6:]) == [6, 7]
    world.let(6, 7)
    wait_for(lambda: world.threads.num_resting == 2)
    for _ in range(5):
        world.step()
    assert world.threads.num_resting == 2
    assert len(world.begun) == 8
    world.cancel(chat)
    world.run_open()
    assert sorted(world.begun[8:]) == [8, 9]
    assert world.finished[0] is FinishReason.LENGTH


@pytest.mark.usefixtures("long_rests")
def test_threads_that_rest_can_be_closed(make: Make) -> None:
    world = make(num_slots=12)
    world.submit(BE, 20, 1)
    world.stop_at_wait()
    world.threads.be_gentle(True)
    world.let(0, 1)
    wait_for(lambda: world.threads.num_resting == 2)
    world.close()
    assert not any(thread.is_alive() for thread in world.threads._threads)


def test_a_class_that_changes_changes_the_order_of_reads(make: Make) -> None:
    world = make(num_slots=10)
    for _ in range(3):
        last = world.submit(BE, 20, 1)
        world.stop_at_wait()
    world.scheduler.update(last, LS, None, world.clock.at_ns)
    world.step()
    tickets = sorted(world.waits._tickets.values(), key=lambda ticket: ticket.rank)
    assert [ticket.use for ticket in tickets] == [Use.LS, Use.PASSING, Use.PASSING]
    world.let(0, 1)
    world.settle()
    assert sorted(world.begun[2:]) == [4, 5]


def test_stores_of_kv_wait_for_experts(make: Make) -> None:
    world = make()
    file: Any = _NoFile()
    mover = Mover(file, lambda: None, world.clock, world.order)
    assert mover._may_write()
    world.submit(BE, 20, 1)
    world.stop_at_wait()
    assert not mover._may_write()
    mover._in_haste = True
    assert mover._may_write()
    mover._in_haste = False
    world.run_open()
    assert mover._may_write()
    mover.close()


class _NoFile:
    def close(self) -> None:
        """Close nothing."""


# -- frames that end while they wait


@pytest.mark.parametrize("how", ["cancelled", "evicted", "paused"])
def test_a_read_that_ends_after_its_frame_died_does_no_harm(make: Make, how: str) -> None:
    world = make(num_slots=TOP_K)
    first = world.submit(BE, 20, 2)
    world.stop_at_wait()
    other = world.submit(BE, 20, 2)
    world.stop_at_wait()
    assert world.waiting == {first, other}
    if how == "cancelled":
        world.cancel(first)
    elif how == "evicted":
        for effect in world.scheduler.evict(first, other):
            world.loop.effects.apply(effect)
    else:
        world.scheduler.update(first, None, True, world.clock.at_ns)
    world.step()
    assert (first in world.waiting) is (how == "evicted"), "it starts over"
    assert [read.slot for read in world.threads.running] == [0, 1], "the threads still write"
    assert not any(world.residency.table[:, 0]), "nothing is in the table before its read ends"
    world.let(0, 1)
    world.stop_at_wait()
    assert how == "evicted" or sorted(world.begun[2:]) == [2, 3]
    world.scheduler.update(first, None, False, world.clock.at_ns) if how == "paused" else None
    world.run_open()
    is_over = FinishReason.CANCELLED if how == "cancelled" else FinishReason.LENGTH
    assert world.finished[first] is is_over
    assert world.finished[other] is FinishReason.LENGTH
    assert not world.residency._pins.any()


def test_reads_that_no_frame_wants_are_not_begun(make: Make) -> None:
    world = make(num_slots=10)
    for _ in range(2):
        last = world.submit(BE, 20, 2)
        world.stop_at_wait()
    world.cancel(last)
    world.step()
    world.let(0, 1)
    world.run_open()
    assert world.begun == [0, 1]
    assert world.order.num_reads == 0


def test_a_waiting_request_is_swapped_out_and_asks_again(make: Make) -> None:
    limits = replace(LIMITS, num_blocks=4, num_swap_blocks=8, max_num_seqs=1)
    world = make(num_slots=4, limits=limits)
    slow = world.submit(BE, 40, 2)
    world.stop_at_wait()
    chat = world.submit(LS, 40, 2)
    world.stop_at_wait()
    assert world.waiting == {chat}
    assert [e.request_id for e in events(world, trace.SwappedOut)] == [slow]
    assert [parked.waits_for for parked in world.scheduler.away.values()] == [None]
    world.run_open()
    finished_well(world)
    assert not world.scheduler.requests


# -- slots


@pytest.mark.parametrize("policy", [PriorityPolicy(), Fcfs(), Qllm2(max_be_stall_ms=100)])
@pytest.mark.parametrize("num_slots", [TOP_K, TOP_K + 1, 7])
def test_requests_with_disjoint_experts_all_end(make: Make, policy: Any, num_slots: int) -> None:
    world = make(policy, num_slots)
    for i in range(16):
        world.submit(LS if i % 5 == 0 else BE, 20 + i, 3)
    world.run_open()
    finished_well(world)
    assert world.residency.num_reads >= 16 * TOP_K


@pytest.mark.parametrize("seed", range(10))
def test_any_plan_ends_with_drawn_experts_and_slots(make: Make, seed: int) -> None:
    r = random.Random(seed)
    sets = [r.sample(range(NUM_EXPERTS), r.randint(1, 6)) for _ in range(7)]
    limits = replace(
        LIMITS,
        num_blocks=r.choice([30, 60, 400]),
        max_num_seqs=r.choice([2, 3, 8]),
        num_swap_blocks=r.choice([0, 40]),
    )
    num_slots = r.choice([TOP_K, 3, 8])
    world = make(Fuzz(seed), num_slots, experts_of=lambda i: sets[i], limits=limits)
    for _ in range(7):
        world.submit(r.choice([0, 3, 10]), r.randint(1, 400), r.randint(1, 6))
    world.cancel(r.randrange(7), at_ns=r.randrange(100) * NS_PER_MS)
    world.run_open()
    assert not world.loop.policy_errors
    assert set(world.finished.values()) <= {FinishReason.LENGTH, FinishReason.CANCELLED}
    assert world.scheduler.pool.num_free == limits.num_blocks
    assert not world.residency._pins.any()


def test_ls_takes_slots_from_be_and_the_first_be_from_later_ones(make: Make) -> None:
    world = make(Fcfs(), num_slots=TOP_K)
    first, second = world.submit(BE, 20, 1), world.submit(BE, 20, 1)
    world.stop_at_wait()
    assert world.begun == [0, 1]
    chat = world.submit(LS, 20, 1)
    world.stop_at_wait()
    assert world.begun == [0, 1], "a read that has begun is not stopped"
    assert world.waiting == {first, second, chat}
    tickets = world.waits._tickets.values()
    assert [t.has_slots for t in sorted(tickets, key=lambda t: t.rank)] == [False, True, False]
    world.let(0, 1)
    turn(world)  # the first could run now
    assert sorted(world.begun[2:]) == [4, 5]
    world.run_open()
    finished_well(world)


def turn(world: WaitWorld) -> None:
    """Give slots to tickets, and let no frame run."""
    assert not list(world.waits.turn(world.clock.at_ns))
    world.settle()


def test_no_later_frame_takes_the_slots_that_the_first_waits_for(make: Make) -> None:
    """Two slots are written to for a frame that is gone, and the first frame needs two at once."""
    world = make(Fcfs(), num_slots=TOP_K + 1)
    gone = world.submit(BE, 20, 1)
    world.stop_at_wait()
    world.cancel(gone)
    first = world.submit(BE, 20, 1)
    world.runner.ranges.add(first)
    world.stop_at_wait()
    later = world.submit(BE, 20, 1)
    world.stop_at_wait()
    assert world.waiting == {first, later}
    assert world.begun == [0, 1]
    assert not world.threads._queue
    world.let(0, 1)
    turn(world)
    assert sorted(world.begun[2:]) == [2, 3]
    world.let(2)
    turn(world)
    assert first in world.waiting, "it needs both"
    world.run_open()
    assert world.finished[first] is world.finished[later] is FinishReason.LENGTH


def test_the_oldest_be_takes_slots_from_later_ones(make: Make) -> None:
    world = make(Fcfs(), num_slots=TOP_K)
    first = world.submit(BE, 20, 1)
    world.stop_at_wait()
    second = world.submit(BE, 20, 1)
    world.stop_at_wait()
    world.scheduler.update(first, None, True, world.clock.at_ns)
    world.let(0, 1)
    world.stop_at_wait()
    assert sorted(world.begun[2:]) == [2, 3]
    world.scheduler.update(first, None, False, world.clock.at_ns)
    world.stop_at_wait()
    assert world.waiting == {first, second}
    world.let(2, 3)
    turn(world)
    assert sorted(world.begun[4:]) == [0, 1]
    world.run_open()
    finished_well(world)


def test_experts_stay_until_their_frame_has_run(make: Make) -> None:
    """A later frame takes no slot of an earlier one, whose experts are in memory."""
    world = make(Fcfs(), num_slots=TOP_K)
    world.submit(BE, 20, 1)
    world.stop_at_wait()
    world.submit(BE, 20, 1)
    world.stop_at_wait()
    world.let(0, 1)
    taken = list[int]()
    residency: Any = world.residency
    real = residency.reserve

    def reserve(layer: int, slot: int) -> memoryview:
        taken.append(slot)
        view: memoryview = real(layer, slot)
        return view

    residency.reserve = reserve
    for ticket in world.waits.turn(world.clock.at_ns):
        pytest.fail(f"{ticket} fails")
    assert not taken
    world.run_open()
    finished_well(world)
    assert world.residency.num_reads == 2 * TOP_K


# -- errors


def test_an_error_of_the_disk_ends_the_request_that_needs_the_expert(make: Make) -> None:
    world = make(num_slots=4)
    world.wrong[1] = ModelError("expert 1 cannot be read")
    bad, good = world.submit(BE, 20, 2), world.submit(BE, 20, 2)
    world.run_open()
    assert world.finished == {bad: FinishReason.ERROR, good: FinishReason.LENGTH}
    assert "expert 1 cannot be read" in (world.errors[bad] or "")
    assert world.begun.count(1) == 2, "the request has a second try, alone"
    del world.wrong[1]
    again = world.submit(BE, 20, 2)
    world.run_open()
    assert world.finished[again] is FinishReason.LENGTH
    assert not world.residency._pins.any()


def test_an_error_of_the_disk_is_none_of_frames_that_wait_for_other_experts(make: Make) -> None:
    world = make(num_slots=4)
    world.wrong[1] = ModelError("expert 1 cannot be read")
    bad = world.submit(BE, 20, 2)
    world.stop_at_wait()
    good = world.submit(BE, 20, 2)
    world.stop_at_wait()
    assert world.waiting == {bad, good}
    world.run_open()
    assert world.finished == {bad: FinishReason.ERROR, good: FinishReason.LENGTH}
    retried = {i: m.retry_recomputed_tokens for i, m in world.metrics.items() if m is not None}
    assert retried[good] == 0 < retried[bad]


def test_three_failed_reads_in_a_row_are_a_failure_until_one_succeeds(make: Make) -> None:
    world = make(num_slots=2)
    error = OSError(errno.EIO, "Input/output error")
    for expert in range(8):
        world.wrong[expert] = error
    world.submit(BE, 20, 1)
    world.run_open()
    assert world.waits.stats()["failure"] == str(error)
    world.wrong.clear()
    world.submit(BE, 20, 1)
    world.run_open()
    assert world.waits.stats()["failure"] is None
    world.wrong[4] = error
    world.submit(BE, 20, 1)
    world.run_open()
    assert world.waits.stats()["failure"] is None, "others between them were read"


def test_a_disk_that_hangs_ends_the_rows_that_wait_for_it(make: Make) -> None:
    world = make(num_slots=4)
    slow = world.submit(BE, 20, 1)
    world.stop_at_wait()
    world.let(0)
    at = world.clock.at_ns
    world.loop_looks = True
    until = world.waits.next_turn_ns(at)
    world.loop_looks = False
    assert until is not None
    assert at < until <= at + DEADLINE_NS
    world.clock.at_ns = at + DEADLINE_NS - 2
    world.step()
    assert world.waiting == {slow}
    world.clock.at_ns = at + DEADLINE_NS
    for _ in range(6):
        world.step()
    assert world.finished[slow] is FinishReason.ERROR
    assert "expert 1 of layers.1.experts was not read within 30 s" in (world.errors[slow] or "")
    other = world.submit(BE, 20, 1)  # the other thread reads, and two slots are left
    for expert in (2, 3):
        world.gate(expert).set()
    for _ in range(40):
        if not world.step() and world.waiting:
            world.settle()
            world.clock.at_ns += NS_PER_MS
    assert world.finished[other] is FinishReason.LENGTH
    world.let(1)  # it comes back: what it has read is in memory now
    world.step()
    world.step()
    assert world.residency.place(1) is not None
    assert not world.residency._pins.any()


def test_a_disk_that_hangs_in_every_thread_ends_all_that_wait(make: Make) -> None:
    world = make(num_slots=2 * TOP_K)
    first = world.submit(BE, 20, 1)
    world.stop_at_wait()
    second = world.submit(BE, 20, 1)
    world.stop_at_wait()
    world.clock.at_ns += DEADLINE_NS
    for _ in range(12):
        world.step()
    assert world.finished == {first: FinishReason.ERROR, second: FinishReason.ERROR}
    assert world.waits.failure is None or "was not read within" in world.waits.failure
    world.let(0, 1)
    last = world.submit(BE, 20, 1)
    world.run_open()
    assert world.finished[last] is FinishReason.LENGTH


# -- the stall bound


def test_an_own_wait_is_no_stall_and_the_wait_behind_it_is(make: Make) -> None:
    world = make(Qllm2(max_be_stall_ms=1000), num_slots=TOP_K)
    own = world.submit(BE, 20, 1)
    world.stop_at_wait()
    behind = world.submit(BE, 20, 1)
    world.stop_at_wait()
    begun_ns = world.clock.at_ns
    for _ in range(10):
        world.clock.at_ns += NS_PER_S
        world.step()
    requests = world.scheduler.requests
    assert world.clock.at_ns - requests[own].last_progress_ns <= NS_PER_S
    assert begun_ns - requests[own].last_progress_ns < 0, "the wait is taken out"
    assert world.clock.at_ns - requests[behind].last_progress_ns >= 10 * NS_PER_S
    stalls = _StallWatch(world)
    with pytest.raises(PolicyError, match=rf"request {behind} stand still .* \(I14\)"):
        stalls.look(begun_ns)
    world.run_open()
    finished_well(world)


def test_a_run_that_misses_at_once_does_not_count_as_a_run(make: Make) -> None:
    world = make()
    request = world.submit(BE, 20, 1)
    world.stop_at_wait()
    found = world.scheduler.requests[request]
    world.let(0, 1)
    turn(world)
    assert not world.waiting
    world.residency.leave()  # its experts are gone before it runs
    world.residency.enter()
    before = found.last_progress_ns
    world.clock.at_ns += NS_PER_S
    assert world.step()
    assert world.waiting == {request}
    assert found.last_progress_ns == before
    world.run_open()
    finished_well(world)


# -- whose experts stay


def flooded(make: Make, prompt: int, be_experts: int, num_slots: int = 16) -> tuple[WaitWorld, Any]:
    """A world in which LS has used four experts twice, and then BE uses others.

    Returns:
        The world, and a function that serves LS once more and returns the experts that it read.
    """
    chat = (0, 1, 2, 3)
    flood = range(4, 4 + be_experts)

    def experts_of(request: int) -> Any:
        is_ls = world.scheduler.requests[request].priority <= LS
        return chat if is_ls else flood

    world = make(Qllm2(), num_slots, experts_of=experts_of)
    world.is_open = True

    def serve_ls() -> int:
        before = world.waits.stats()["LS"]["loads"]
        world.submit(LS, 20, 2)
        world.run_open()
        loads: int = world.waits.stats()["LS"]["loads"] - before
        return loads

    assert [serve_ls(), serve_ls()] == [4, 0]
    for _ in range(3):
        world.submit(BE, prompt, 8)
        world.run_open()
    return world, serve_ls


def test_ls_finds_its_experts_after_prompts_of_be_that_use_all_others(make: Make) -> None:
    """Long after the last LS, too, since what passes through has no score."""
    world, serve_ls = flooded(make, 300, 36)
    assert world.waits.stats()["BE"]["loads"] > 3 * 16
    assert serve_ls() == 0
    world.clock.at_ns += 3600 * NS_PER_S
    world.submit(BE, 300, 1)
    world.run_open()
    assert serve_ls() == 0


def test_ls_finds_its_experts_after_steps_of_be_while_ls_was_served_lately(make: Make) -> None:
    world, serve_ls = flooded(make, 1, 36)
    assert world.waits.stats()["BE"]["loads"] > 3 * 16
    assert serve_ls() == 0
    world.clock.at_ns += LS_STAYS_NS + NS_PER_S
    for _ in range(12):
        world.submit(BE, 1, 8)
        world.run_open()
    assert serve_ls() == 4, "BE may have the slots that LS uses no longer"


def test_be_finds_its_experts_after_a_prompt_of_be(make: Make) -> None:
    world, _ = flooded(make, 1, 8)
    before = world.waits.stats()["BE"]["loads"]
    world.runner.experts_of = lambda _: range(12, 40)
    world.submit(BE, 300, 1)
    world.run_open()
    num_prompt = world.waits.stats()["BE"]["loads"] - before
    assert num_prompt >= 28
    world.runner.experts_of = lambda _: range(4, 12)
    world.submit(BE, 1, 4)
    world.run_open()
    assert world.waits.stats()["BE"]["loads"] == before + num_prompt


def test_uses_are_counted_by_class(make: Make) -> None:
    world = make(num_slots=6)
    world.is_open = True
    world.submit(LS, 20, 3)
    world.submit(BE, 20, 2)
    world.run_open()
    stats = world.waits.stats()
    assert (stats["LS"]["uses"], stats["BE"]["uses"]) == (3 * TOP_K, 2 * TOP_K)
    assert (stats["LS"]["loads"], stats["BE"]["loads"]) == (TOP_K, TOP_K)


def test_the_first_be_displaces_experts_of_ls_if_its_range_needs_more(make: Make) -> None:
    world = make(Qllm2(), 16, experts_of=lambda i: range(8) if i < 2 else range(8, 20))
    world.is_open = True
    for _ in range(2):
        world.submit(LS, 20, 1)
        world.run_open()
    assert world.residency.displacing.num_ls == 8
    last = world.submit(BE, 1, 2)
    world.runner.ranges.add(last)
    wait_for(lambda: world.step() is None or last in world.finished, 30)
    assert world.finished[last] is FinishReason.LENGTH
    assert world.waits.stats()["BE"]["loads"] == 12


# -- reads ahead

WIDE = AHEAD_USES * NUM_EXPERTS // TOP_K
"""Least tokens of a pass that uses nearly all experts of a layer."""
NEXT = range(NUM_EXPERTS, 2 * NUM_EXPERTS)
"""Experts of the second layer of a file, by row of the table."""


def two_layers(make: Make, num_slots: int = 16, **settings: Any) -> WaitWorld:
    """A world whose requests need the experts 0 to 3 of two layers, and later ones 4 and 5."""
    experts = settings.pop("experts_of", lambda i: range(4) if i == 0 else (4, 5))
    return make(num_slots=num_slots, experts_of=experts, num_layers=2, **settings)


def test_a_long_prompt_reads_experts_of_its_next_layer_when_it_has_its_own(make: Make) -> None:
    world = two_layers(make)
    room = world.residency.displacing.num_passing
    world.submit(BE, WIDE, 1)
    world.stop_at_wait()
    assert world.begun == [0, 1]
    world.let(0, 1)
    world.settle()
    assert sorted(world.begun[2:]) == [2, 3], "its own experts go first"
    world.let(2, 3)
    world.settle()
    assert sorted(world.begun[4:]) == list(NEXT[:2])
    world.run_open()
    assert sorted(set(world.begun)) == [*range(4), *NEXT[:room]]
    ahead, be = (world.waits.stats()[name] for name in ("ahead", "BE"))
    assert ahead == {"loads": room, "bytes": room * SLOT_BYTES, "unused_bytes": 0}
    assert be["loads"] == 4 + room
    finished_well(world)


def test_a_long_prompt_reads_nothing_ahead_before_it_has_slots_for_its_own(make: Make) -> None:
    """The slots are full of experts that nothing will use, and a long prompt may take few."""
    world = two_layers(make, 24, experts_of=lambda i: range(8, 32) if i == 0 else range(8))
    world.waits.reads_ahead, world.is_open = False, True
    world.submit(BE, WIDE, 1)
    world.run_open()
    world.waits.reads_ahead, world.is_open = True, False
    assert world.residency.num_resident == 24
    world.submit(BE, WIDE, 1)
    world.stop_at_wait()
    reads = list(world.waits._reads.values())
    assert 0 < len(reads) < 8
    assert all(read.ahead is None for read in reads)
    world.run_open()
    finished_well(world)


def test_a_frame_waits_for_no_read_ahead_of_another(make: Make) -> None:
    world = two_layers(make)
    world.submit(BE, WIDE, 1)
    world.stop_at_wait()
    world.submit(BE, 20, 1)
    world.stop_at_wait()
    for pair in ((0, 1), (2, 3), (4, 5)):
        world.settle()
        assert {read.wanted.number for read in world.threads.running} == set(pair)
        world.let(*pair)
    world.run_open()
    finished_well(world)


def test_reads_ahead_give_their_slots_to_the_first_frame(make: Make) -> None:
    """The first frame needs four of six slots, and two are read ahead. The next frame needs six."""
    world = two_layers(make, 6, experts_of=lambda i: range(4) if i == 0 else range(10, 16))
    world.submit(BE, WIDE, 1)
    world.stop_at_wait()
    world.let(0, 1)
    world.let(2, 3)
    world.settle()
    assert {read.wanted.number for read in world.threads.running} == set(NEXT[:2])
    second = world.submit(BE, 20, 1)
    world.runner.ranges.add(second)
    world.run_open()
    assert second in world.finished
    finished_well(world)


@pytest.mark.parametrize("why", ["few tokens", "off", "another waits", "LS lives"])
def test_nothing_is_read_ahead(make: Make, why: str) -> None:
    world = two_layers(make)
    world.waits.reads_ahead = why != "off"
    world.submit(BE, WIDE - (why == "few tokens"), 1)
    world.stop_at_wait()
    if why in ("another waits", "LS lives"):
        world.submit(LS if why == "LS lives" else BE, 20, 1)
        world.stop_at_wait()
    world.let(0, 1)
    world.settle()
    assert not [read for read in world.waits._reads.values() if read.ahead is not None]
    world.run_open()
    if why in ("few tokens", "off"):
        assert world.waits.stats()["ahead"]["loads"] == 0
    finished_well(world)


def test_bytes_that_were_read_ahead_in_vain_are_counted(make: Make) -> None:
    world = two_layers(make, 6, experts_of=lambda i: range(4) if i == 0 else range(10, 16))
    world.submit(BE, WIDE, 1)
    world.stop_at_wait()
    world.runner.experts_of = lambda i: (20, 21) if i == 0 else range(10, 16)
    world.run_open()
    world.submit(BE, 1, 4)
    world.run_open()
    ahead = world.waits.stats()["ahead"]
    assert ahead["loads"] > 0
    assert ahead["unused_bytes"] == ahead["bytes"]


@pytest.mark.parametrize("seed", range(6))
def test_answers_end_whatever_is_read_ahead(make: Make, seed: int) -> None:
    rng = random.Random(seed)
    num_slots = rng.randint(TOP_K, 12)
    world = make(
        Fuzz(seed) if seed % 2 else Qllm2(),
        num_slots,
        experts_of=lambda i: random.Random(i).sample(range(NUM_EXPERTS), 1 + i % num_slots),
        num_layers=2,
    )
    for _ in range(8):
        world.submit(rng.choice((LS, BE)), rng.choice((3, WIDE, 2 * WIDE)), rng.randint(1, 3))
    world.run_open()
    finished_well(world)
    assert not world.residency._pins.any()
