"""Whole programs in one native call: the state at every boundary is that of ops one by one."""

import random
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from qllm.errors import InvariantError, ModelError
from qllm.ingress import InprocIngress
from qllm.ingress.inproc import StopWord
from qllm.kernels import cpu
from qllm.runner.runner import TorchRunner
from qllm.runner.sweep import NOTHING, Sweep
from qllm.scheduler.program import START, Index, OpKind, Program
from qllm.types import Grain
from tests.support.sweeps import (
    GREEDY,
    LAYERS,
    MAKERS,
    TOP_K,
    Poll,
    Ringing,
    Watched,
    assert_same,
    compiled,
    count_calls,
    held,
    model_of,
    next_row,
    prompt_of,
    run_beside,
    runner_of,
)
from tests.support.watching import has_changed

pytestmark = pytest.mark.usefixtures("one_thread")
COVERED = {"qwen3": 4, "part_dense": 4, "part_torch": 3, "mixtral": 4, "olmoe": 4}


@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize("name", MAKERS)
def test_every_boundary_holds_what_ops_one_by_one_leave(name: str, fine: bool) -> None:
    model, rng = model_of(name), random.Random(fine)
    runners = [runner_of(model, native=native, fine=fine) for native in (False, True)]
    cpu.set_threads(1 + fine)
    assert runners[1].names["sweep"] == f"{COVERED[name]} of {LAYERS} layers in one call"
    for request in range(3):
        prompt = prompt_of(rng.randint(5, 40), request)
        for runner in runners:
            runner.add(request, prompt, GREEDY, len(prompt), len(prompt) + 8)
    stops = 0
    for seed, grain in enumerate((Grain.EXPERT, Grain.LAYER, Grain.STEP, Grain.EXPERT)):
        rows = [next_row(runners[0], request) for request in range(3)]
        if seed == 0:  # a chunk, rows that leave early, rows that join late
            first = rows[0]._replace(end_layer=2)
            stops += run_beside(runners, compiled(runners[0], [first], grain), 0.6, seed)
            half = rows[1]._replace(hi=rows[1].hi // 2)
            rows = [rows[0]._replace(start_layer=2), half, rows[2]._replace(end_layer=3)]
            stops += run_beside(runners, compiled(runners[0], rows, grain), 0.6, seed)
            rest = [next_row(runners[0], 1), rows[2]._replace(start_layer=3, end_layer=LAYERS)]
            rows = rest
        stops += run_beside(runners, compiled(runners[0], rows, grain), 0.6, seed)
    assert stops > (40 if fine else 15)
    assert all(runner.segments.longest_ns > 0 for runner in runners)


@pytest.mark.parametrize("name", ["qwen3", "part_dense", "part_torch"])
def test_a_frame_changes_between_both_ways_and_through_a_checkpoint(name: str) -> None:
    model, rng = model_of(name), random.Random(7)
    plain, mixed = (
        runner_of(model, native=False, fine=True),
        runner_of(model, native=True, fine=True),
    )
    ours = mixed.backend.sweep
    for runner in (plain, mixed):
        runner.add(0, prompt_of(30, 0), GREEDY, 30, 40)
        runner.add(1, prompt_of(11, 1), GREEDY, 11, 40)
    program = compiled(plain, [next_row(plain, 0), next_row(plain, 1)], Grain.EXPERT)
    for runner in (plain, mixed):
        runner.accept(program)
    bare = replace(program, ops=tuple(program.ops))  # as the engine cuts programs short
    at, polls = START, [Poll(3, 0.5), Poll(3, 0.5)]
    while at != program.end:
        mixed.backend.sweep = rng.choice((ours, NOTHING))
        end = mixed.run(rng.choice((program, bare)), at, polls[1])
        at = plain.run(program, at, polls[0])
        assert end == at
        assert_same(held(mixed, program, at), held(plain, program, at))
        if rng.random() < 0.3:
            tensors = mixed.export_frame(program, at)
            mixed.drop(program)
            mixed.import_frame(program, at, tensors)
    assert mixed.finish(program) == plain.finish(program)


def test_a_killed_row_is_skipped_from_then_on() -> None:
    model = model_of("qwen3")
    runners = [runner_of(model, native=native, fine=True) for native in (False, True)]
    for runner in runners:
        for request in range(3):
            runner.add(request, prompt_of(9 + request, request), GREEDY, 9 + request, 40)
    program = compiled(runners[0], [next_row(runners[0], i) for i in range(3)], Grain.EXPERT)
    ends = []
    for runner in runners:
        runner.accept(program)
        poll = Poll(0, 1.0)
        at = START
        for _ in range(14):
            at = runner.run(program, at, poll)
        runner.kill(program, 1)
        poll.share = 0.0
        ends.append(runner.run(program, at, poll))
    assert ends == [program.end] * 2
    assert_same(held(runners[1], program, program.end), held(runners[0], program, program.end))
    sampled = [runner.finish(program) for runner in runners]
    assert sampled[0] == sampled[1]
    assert [s.request_id for s in sampled[0]] == [0, 2]


def test_a_parked_frame_says_what_it_holds() -> None:
    runner = runner_of(model_of("qwen3"), native=True)
    program = accepted(runner, Grain.EXPERT)
    frame, stream = runner.frames[program.frame_id], 40 * 128 * 2
    at = runner.run(program, START, Poll(0, 1.0))
    assert frame.num_bytes() == stream
    at = runner.run(program, at, Poll(0, 1.0))  # after ATTN; the whole layer's room is there
    num, units = 40 * TOP_K, frame.layer.space.units.numel()
    held = (4 + TOP_K) * stream + 2 * num + 8 * (3 * num + units)
    assert frame.num_bytes() == held
    while program.inside_layer(at):
        at = runner.run(program, at, Poll(0, 1.0))
        assert frame.num_bytes() == (held if program.inside_layer(at) else stream)


# -- how many calls, and when they return


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry per native sweep."""
    return count_calls(monkeypatch, "sweep")


def accepted(runner: TorchRunner, grain: Grain, tokens: int = 40) -> Program:
    runner.add(0, prompt_of(tokens, 0), GREEDY, tokens, tokens + 40)
    program = compiled(runner, [next_row(runner, 0)], grain)
    runner.accept(program)
    return program


@pytest.mark.parametrize("name", ["qwen3", "mixtral", "olmoe"])
def test_a_step_takes_one_call(name: str, calls: list[int]) -> None:
    runner, stop = runner_of(model_of(name), native=True, fine=True), Watched()
    program = accepted(runner, Grain.EXPERT)
    assert runner.run(program, START, stop) == program.end
    assert len(calls) == 1
    runner.finish(program)
    program = compiled(runner, [next_row(runner, 0)], Grain.EXPERT)
    runner.accept(program)
    assert runner.run(program, START, stop) == program.end
    assert len(calls) == 2
    assert runner.segments.longest_op in set(OpKind)


def boundaries(runner: TorchRunner, program: Program) -> list[Index]:
    """Every boundary that a stop may fall on."""
    runner.accept(program)
    found, at = [], START
    while at != program.end:
        at = runner.run(program, at, Poll(0, 1.0))
        found.append(at)
    runner.drop(program)
    return found


@pytest.mark.parametrize("grain", [Grain.LAYER, Grain.EXPERT])
def test_a_call_returns_as_soon_as_it_may_when_a_stop_is_due(
    grain: Grain, calls: list[int]
) -> None:
    runner = runner_of(model_of("qwen3"), native=True, fine=True)
    program = accepted(runner, grain)
    runner.drop(program)
    found = boundaries(runner, program)
    asked, late, rang = Watched(), Watched(), Ringing()
    asked.word = 0
    late.stop_at_ns, late.at_ns = 5, 6
    for stop in (asked, late):
        runner.accept(program)
        at = START
        ends = []
        while at != program.end:
            at = runner.run(program, at, stop)
            ends.append(at)
        runner.drop(program)
        if grain is Grain.LAYER:
            assert ends == found
        else:  # after every task
            assert {*ends} > {*found}
            assert len(ends) > 5 * len(found)
    runner.accept(program)
    del calls[:]
    assert runner.run(program, START, rang) == program.end  # false alarms: the word is still high
    if grain is Grain.LAYER:
        assert len(calls) == len(found) - 2  # all but EMBED and HEAD
    else:
        assert len(calls) > 5 * len(found)
    runner.drop(program)


def test_the_time_is_looked_at_inside_a_call() -> None:
    runner, stop = runner_of(model_of("qwen3"), native=True, fine=True), Watched()
    program = accepted(runner, Grain.EXPERT)
    stop.stop_at_ns = 1  # the clock stands at 0, one nanosecond before: the call sees it pass
    reads: list[Index] = []
    stop.now_ns = lambda: reads.append(START) or 0  # type: ignore[method-assign, func-returns-value]
    assert runner.run(program, START, stop) == program.end
    assert len(reads) > 100, "every boundary came back to look at the clock"
    runner.drop(program)


def test_nothing_is_polled_at_grain_step(calls: list[int]) -> None:
    runner, stop = runner_of(model_of("qwen3"), native=True, fine=True), Watched()
    stop.word, stop.stop_at_ns, stop.at_ns = -1, 0, 1
    program = accepted(runner, Grain.STEP)
    assert runner.run(program, START, stop) == program.end
    assert len(calls) == 1


def test_a_watcher_of_segments_sees_each_of_them() -> None:
    model, seen = model_of("qwen3"), []
    for native in (False, True):
        runner, mine = runner_of(model, native=native, fine=True), []
        runner.on_segment = lambda program, at, begin, end, mine=mine: mine.append(at)
        program = accepted(runner, Grain.STEP)
        runner.run(program, START, Watched())
        seen.append(mine)
    assert seen[0] == seen[1]
    assert len(seen[0]) > 100


def test_units_that_were_left_out_are_seen() -> None:
    runner = runner_of(model_of("qwen3"), native=True, fine=True)
    program = accepted(runner, Grain.EXPERT)
    at, stop = START, Poll(0, 1.0)
    while not at.pos:
        at = runner.run(program, at, stop)
    work: Any = runner.frames[program.frame_id].layer.work
    work.done[0] = 0
    with pytest.raises(InvariantError, match="I1"):
        runner.run(program, at, stop)
    work.done[0] = work.done[at.pos] = 1
    with pytest.raises(InvariantError, match="out of order"):
        runner.run(program, at, stop)
    work.done[at.pos] = 0
    while program.ops[at.op].kind is not OpKind.COMBINE:
        at = runner.run(program, at, stop)
    runner.frames[program.frame_id].layer.work.done[3] = 0  # type: ignore[union-attr]
    with pytest.raises(InvariantError, match="before all its experts"):
        runner.run(program, at, stop)


def test_an_id_that_is_no_expert_s_is_refused() -> None:
    runner = runner_of(model_of("qwen3"), native=True, fine=True)
    program = accepted(runner, Grain.EXPERT)
    at, stop = START, Poll(0, 1.0)
    while program.ops[at.op].kind is not OpKind.EXPERTS:
        at = runner.run(program, at, stop)
    ids_TK = runner.frames[program.frame_id].layer.routed[0].ids_TK
    for bad in (-1, 8):
        with torch.inference_mode():
            ids_TK[0, 0] = bad
        with pytest.raises(ModelError, match="layer 0 gave an id"):
            runner.run(program, at, stop)


def test_layers_of_another_shape_are_left_to_ops() -> None:
    model: Any = model_of("qwen3")
    model.model.layers[2].mlp.gate.top_k = 3
    runner = runner_of(model, native=True)
    assert runner.backend.sweep.num_layers == 3
    runner.backend.compute.drivers[1]._attention.slab = (1, 32, 32)  # type: ignore[union-attr]
    assert (
        Sweep(runner.backend.compute.drivers, runner.backend.compute.banks, TOP_K).num_layers == 2
    )
    program = accepted(runner, Grain.EXPERT)
    with pytest.raises(ModelError, match="takes 3 experts per token"):
        runner.run(program, START, Watched())


# -- arrivals


def stopped_by_another_thread(runner: TorchRunner, stop: StopWord) -> tuple[Program, Index]:
    """A pass, and where it stopped for a thread that could only run beside its native call.

    How late a busy machine wakes the thread is not ours to say, so passes that ended first are
    tried again; a call that held the GIL would end first every time.
    """
    for request in range(50):
        runner.add(request, prompt_of(450, 0), GREEDY, 450, 490)
        program = compiled(runner, [next_row(runner, request)], Grain.EXPERT)
        runner.accept(program)
        running = threading.Event()

        def arrive(running: threading.Event = running) -> None:
            running.wait()
            time.sleep(0.002)
            stop.lower(0)

        thread = threading.Thread(target=arrive)
        thread.start()
        running.set()
        end = runner.run(program, START, stop)
        thread.join()
        if end not in (START, program.end):
            return program, end
        runner.drop(program)
        runner.remove(request)
        stop.reset()
    pytest.fail("no call was stopped in its midst")


def test_an_arrival_on_another_thread_stops_a_call() -> None:
    model = model_of("qwen3")
    runner = runner_of(model, native=True, fine=True)
    ingress = InprocIngress(time.monotonic_ns)
    stop = ingress.stop
    before = stop.watch()
    assert not has_changed(before)
    program, end = stopped_by_another_thread(runner, stop)
    assert has_changed(before)
    assert not has_changed(stop.watch())
    assert ingress.drain() == []  # the word is up again
    assert runner.run(program, end, stop) == program.end
    plain = runner_of(model, native=False, fine=True)
    other = accepted(plain, Grain.EXPERT, tokens=450)
    assert plain.run(other, START, Poll(0, 0.0)) == other.end
    [stopped] = runner.finish(program)
    assert plain.finish(other) == [stopped._replace(request_id=0)]
