"""Guests in the runner: expert rows of parked frames run beside a program, with their own bits."""

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from families import DTYPES, FAMILIES, LAYERS
from test_runner import (
    GREEDY,
    Poll,
    add,
    assert_same,
    compiled,
    fine,
    model_of,
    next_row,
    prompt_of,
    runner_of,
    serve,
    sweep,
)
from torch import Tensor

from qllm.errors import InvariantError
from qllm.models.experts import Work
from qllm.models.frame import Frame
from qllm.plan import START, Index, OpKind, Program, Row
from qllm.runner import TorchRunner

LAYER = 2
"""A layer with experts in every family."""
PLENTY = 10_000
Logits = dict[tuple[int, int], Tensor]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# -- any schedule


@dataclass
class Group:
    """Requests that share all their programs."""

    ids: list[int]
    steps: int
    program: Program | None = None
    index: Index = START

    def turn(self, runner: TorchRunner, poll: Poll, rows: int, guests: list[int]) -> None:
        """Run the next program, or go on with it, until it ends or is stopped."""
        if self.program is None:
            self.program = compiled(runner, *[next_row(runner, i) for i in self.ids])
            self.index = START
            runner.accept(self.program)
        asked = replace(self.program, guest_rows=rows, guests=tuple(guests))
        self.index = runner.run(asked, self.index, poll)
        if self.index == self.program.end:
            runner.finish(self.program)
            self.program = None
            self.steps -= 1


def groups_of(runner: TorchRunner, seed: int) -> list[Group]:
    """Two long groups, and short ones that come while those are under way."""
    rng, groups, number = random.Random(seed), [], 0
    for sizes, steps in ((19, 6), 3), ((19, 6), 3), ((11,), 3), *[((4, 2), 2)] * 4:
        ids = []
        for size in sizes:
            add(runner, number, prompt_of(size, rng.randrange(1000)))
            ids.append(number)
            number += 1
        groups.append(Group(ids, steps))
    return groups


def schedule(runner: TorchRunner, seed: int, guest_rows: int | None) -> None:
    """Serve the groups in turns of random length; None serves one after the other."""
    groups = groups_of(runner, seed)
    rng, parked = random.Random(seed), deque[Group]()
    if guest_rows is None:
        for group in groups:
            while group.steps:
                group.turn(runner, Poll(), 0, [])
        return
    while groups:
        group = rng.choice(groups)
        others = [g.program.frame_id for g in parked if g is not group and g.program is not None]
        group.turn(runner, Poll(rng.choice((0, 3, 9, 25, 60))), guest_rows, others)
        if group in parked:
            parked.remove(group)
        if group.program is not None:
            parked.append(group)
        if not group.steps:
            groups.remove(group)


CASES = [
    *[(family, dtype, "reference", False) for family in FAMILIES for dtype in DTYPES],
    *[(family, "bf16", "fast", False) for family in FAMILIES],
    *[(family, "bf16", "reference", True) for family in ("mixtral", "gpt_oss", "deepseek_v3")],
]


@pytest.mark.parametrize(("family", "dtype", "kernels", "invariant"), CASES)
def test_any_schedule_leaves_every_bit(
    family: str, dtype: str, kernels: str, invariant: bool
) -> None:
    found: dict[int | None, Logits] = {}
    for rows in (None, 0, 7, PLENTY):
        runner, found[rows] = runner_of(
            model_of(family, dtype), kernels=kernels, batch_invariant=invariant
        )
        fine(runner)
        schedule(runner, len(family), rows)
        assert (runner.guest_rows > 0) == bool(rows)
        assert not runner.frames
        runner.close()
    alone = found.pop(None)
    assert len({tuple(x.tolist()) for x in alone.values()}) == len(alone) > 20
    for logits in found.values():
        assert logits.keys() == alone.keys()
        assert_same([logits[key] for key in alone], list(alone.values()))


# -- one guest, looked at closely


@dataclass
class Scene:
    """Frame 1 parked inside EXPERTS of `LAYER`, and a request 2 that is about to decode."""

    runner: TorchRunner
    logits: Logits
    guests: list[Program] = field(default_factory=list)
    indexes: list[Index] = field(default_factory=list)

    @property
    def frames(self) -> list[Frame]:
        return [self.runner.frames[program.frame_id] for program in self.guests]

    @property
    def works(self) -> list[Work]:
        found = [frame.layer.work for frame in self.frames]
        assert None not in found
        return [work for work in found if work is not None]

    def decode(self, rows: int, poll: Poll | None = None, **changes: Any) -> Index:
        """Run the decode step of request 2 with the parked frames as guests."""
        self.program = compiled(self.runner, next_row(self.runner, 2))
        self.runner.accept(self.program)
        guests = tuple(program.frame_id for program in self.guests)
        asked = replace(self.program, **{"guest_rows": rows, "guests": guests, **changes})
        index = self.runner.run(asked, START, poll or Poll())
        if index == self.program.end:
            self.runner.finish(self.program)
        return index

    def experts(self) -> set[int]:
        """What request 2 takes in `LAYER`: the decode step, run with nobody beside it."""
        seen: set[int] = set()
        real = Work.run

        def run(work: Work, x: Tensor, start: int, stop: int) -> int:
            if work.bank is self.runner._banks[LAYER]:
                seen.update(unit.expert for unit in work.units[start:stop])
            return real(work, x, start, stop)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Work, "run", run)
            self.decode(0)
        self.runner.remove(2)
        add(self.runner, 2, prompt_of(9, 2))
        sweep(self.runner, Row(2, 0, 9, 0, LAYERS))
        return seen

    def end(self) -> Logits:
        """Resume the guests to their ends."""
        for program, index in zip(self.guests, self.indexes, strict=True):
            assert self.runner.run(program, index, Poll()) == program.end
            self.runner.finish(program)
        return {key: x for key, x in self.logits.items() if key[0] != 2}


def scene(
    positions: tuple[int, ...] = (3,), layer: int = LAYER, model: Any = None, tokens: int = 14
) -> Scene:
    """Per position a guest, parked there in EXPERTS of a layer, `tokens` tokens each."""
    runner, logits = runner_of(model or model_of("mixtral", "bf16"))
    fine(runner)
    found = Scene(runner, logits)
    add(runner, 2, prompt_of(9, 2))
    sweep(runner, Row(2, 0, 9, 0, LAYERS))
    for number, pos in enumerate(positions):
        request = 100 + number
        add(runner, request, prompt_of(tokens, request))
        program = compiled(runner, Row(request, 0, tokens, 0, LAYERS))
        runner.accept(program)
        index = START
        while program.ops[index.op][:2] != (OpKind.EXPERTS, layer) or index.pos < pos:
            index = runner.run(program, index, Poll(1))
        assert index.pos == pos
        found.guests.append(program)
        found.indexes.append(index)
    return found


def ridden(done: bytearray, pos: int) -> set[int]:
    return {at for at in range(pos, len(done)) if done[at]}


def shared(work: Work, pos: int, experts: set[int]) -> set[int]:
    return {at for at in range(pos, len(work.units)) if work.units[at].expert in experts}


def rows_of(work: Work, units: set[int]) -> int:
    return sum(work.units[at].hi - work.units[at].lo for at in units)


def test_a_guest_runs_the_units_of_the_experts_that_are_read_and_no_other() -> None:
    alone = scene().end()
    it = scene()
    experts, (work,), (frame,) = it.experts(), it.works, it.frames
    before, slots = bytes(work.done), frame.slots_done
    it.decode(PLENTY)
    want = shared(work, 3, experts)
    assert ridden(work.done, 3) == want
    assert 0 < len(want) < len(work.units) - 3
    assert bytes(work.done[:3]) == before[:3] == b"\1\1\1"
    rows = rows_of(work, want)
    assert it.runner.guest_rows == rows == frame.slots_done - slots
    found = it.end()
    assert found.keys() == alone.keys()
    assert_same(list(found.values()), list(alone.values()))


def test_a_frame_parked_before_its_first_expert_is_a_guest_too() -> None:
    alone, it = scene((0,)).end(), scene((0,))
    experts, (frame,) = it.experts(), it.frames
    assert frame.layer.work is None
    it.decode(PLENTY)
    (work,) = it.works
    assert ridden(work.done, 0) == shared(work, 0, experts) != set()
    assert_same(list(it.end().values()), list(alone.values()))


def test_what_ran_as_a_guest_costs_nothing_when_the_frame_goes_on() -> None:
    it = scene()
    experts, (work,) = it.experts(), it.works
    it.decode(PLENTY)
    ran: list[int] = []
    real = Work.run

    def run(self: Work, x: Tensor, start: int, stop: int) -> int:
        if self is work:
            ran.extend(range(start, stop))
        return real(self, x, start, stop)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Work, "run", run)
        it.end()
    assert ran == sorted(set(range(3, len(work.units))) - shared(work, 3, experts))


def test_long_ranges_end_behind_shared_experts_and_before_units_that_are_done() -> None:
    alone, it = scene().end(), scene()
    experts, (work,) = it.experts(), it.works
    object.__setattr__(it.runner._costs, "range_ns", float("inf"))
    it.decode(PLENTY)
    assert ridden(work.done, 3) == shared(work, 3, experts)
    assert 0 in work.done[3 : max(ridden(work.done, 3))], "a range would run over what is done"
    assert_same(list(it.end().values()), list(alone.values()))


def test_weights_are_counted_where_they_are_read() -> None:
    def read(rows: int) -> tuple[int, Scene]:
        it = scene()
        it.decode(rows)
        it.end()
        return it.runner.expert_bytes, it

    apart, it = read(0)
    unit_bytes = it.runner._banks[LAYER].unit_bytes
    whole = scene()
    experts, (work,) = whole.experts(), whole.works
    own = {work.units[at].expert for at in range(3)}
    taken = {work.units[at].expert for at in shared(work, 3, experts)} - own
    assert taken
    assert apart - read(PLENTY)[0] == len(taken) * unit_bytes


def test_with_no_budget_or_no_names_nothing_happens() -> None:
    for changes in ({"guest_rows": 0}, {"guests": ()}, {"guests": (12345,)}):
        it = scene()
        (work,), (frame,) = it.works, it.frames
        before = bytes(work.done), frame.slots_done
        it.decode(PLENTY, **changes)
        assert (bytes(work.done), frame.slots_done) == before
        assert it.runner.guest_rows == 0


# -- the budget, and who comes first


def test_the_budget_is_never_passed_and_is_used_in_the_order_of_the_guests() -> None:
    it = scene((3, 3))
    experts, works = it.experts(), it.works
    wanted = [shared(work, 3, experts) for work in works]
    most = sum(rows_of(work, units) for work, units in zip(works, wanted, strict=True))
    seen = set()
    for budget in (1, 4, 9, most - 1, most, most + 1):
        for turn in (1, -1):
            it = scene((3, 3))
            order = it.guests[::turn]
            it.decode(budget, guests=tuple(program.frame_id for program in order))
            taken = it.runner.guest_rows
            assert taken <= budget
            assert taken == greedy(it.works[::turn], experts, budget)
            seen.add(taken)
    assert len(seen) > 3
    assert max(seen) == most


def greedy(works: list[Work], experts: set[int], budget: int) -> int:
    """Expert by expert, guest by guest: what still fits is taken, whole; checks the masks."""
    total = 0
    for expert in sorted(experts):
        for work in works:
            units = shared(work, 3, {expert})
            rows = rows_of(work, units)
            fits = bool(units) and total + rows <= budget
            total += rows if fits else 0
            assert ridden(work.done, 3) & units == (units if fits else set())
    return total


def test_the_budget_of_a_layer_lasts_when_the_program_is_stopped_inside_it() -> None:
    it = scene((0, 0, 0, 0))
    index = it.decode(PLENTY, Poll(1))
    guests = tuple(program.frame_id for program in it.guests)
    asked = replace(it.program, guest_rows=5, guests=guests)
    stops = 0
    while index != it.program.end:
        assert index.pos == 0 or it.runner.guest_rows <= 5
        inside = it.program.ops[index.op][:2] == (OpKind.EXPERTS, LAYER)
        index = it.runner.run(asked, index, Poll(2 if inside else 1))
        stops += inside
    assert stops > 2
    assert 0 < it.runner.guest_rows <= 5
    it.runner.finish(it.program)


def test_what_is_due_when_the_program_stops_stays_owed() -> None:
    alone, it = scene().end(), scene()
    index = it.decode(PLENTY, Poll(1))
    asked = replace(it.program, guest_rows=PLENTY, guests=(it.guests[0].frame_id,))
    while index != it.program.end:
        index = it.runner.run(asked, index, Poll(1))
    assert it.runner.guest_rows == 0
    it.runner.finish(it.program)
    assert_same(list(it.end().values()), list(alone.values()))


def test_a_guest_is_run_in_ranges_and_the_program_may_stop_between_them() -> None:
    """Units of four rows, one per range: each is a segment, and a stop leaves the rest owed."""
    it = scene(tokens=40)
    segments: list[tuple[int, Index]] = []
    it.runner.on_segment = lambda program, index, *_: segments.append((program.frame_id, index))
    it.decode(PLENTY)
    work = it.works[0]
    units = ridden(work.done, 3)
    experts = {work.units[at].expert for at in units}
    assert len(units) > len(experts), "an expert has several units"
    own = len({index for _, index in segments})
    assert len(segments) == own + len(units)
    again = scene(tokens=40)
    polls = Poll(next(i for i in range(len(segments)) if segments[i] == segments[i + 1]) + 1)
    index = again.decode(PLENTY, polls)
    assert index != again.program.end
    (work,) = again.works
    assert len(ridden(work.done, 3)) == 1
    alone = scene(tokens=40).end()
    assert_same(list(again.end().values()), list(alone.values()))


# -- frames that are no guests


def test_a_frame_elsewhere_is_left_alone() -> None:
    """In another layer it is a guest there; at another op, or at its end, nowhere."""
    runner, _ = runner_of(model_of("mixtral", "bf16"))
    fine(runner)
    add(runner, 1, prompt_of(14))
    add(runner, 2, prompt_of(5, 2))
    program = compiled(runner, Row(1, 0, 14, 0, LAYERS))
    runner.accept(program)
    index = START
    it = Scene(runner, {}, [program], [index])
    while index != program.end:
        index = runner.run(program, index, Poll(1))
        kind = OpKind.HEAD if index == program.end else program.ops[index.op].kind
        before, done = runner.guest_rows, it.frames[0].slots_done
        runner.remove(2)
        add(runner, 2, prompt_of(5, 2))
        it.decode(PLENTY)
        assert (runner.guest_rows > before) <= (kind is OpKind.EXPERTS)
        assert it.frames[0].slots_done - done == runner.guest_rows - before
    assert runner.guest_rows > 0
    runner.finish(program)


def test_dropped_split_and_killed_frames_are_left_alone() -> None:
    it = scene((3, 3, 3))
    runner, works = it.runner, it.works
    masks = [bytes(work.done) for work in works]
    runner.drop(it.guests[0])
    runner.kill(it.guests[1], 101)
    start = it.guests[2].layer_start(it.indexes[2])
    runner.split(it.guests[2], start)
    it.decode(PLENTY)
    assert [bytes(work.done) for work in works] == masks
    assert runner.guest_rows == 0
    assert runner.run(it.guests[1], it.indexes[1], Poll()) == it.guests[1].end
    assert runner.finish(it.guests[1]) == []
    serve(runner, 2, 0)


def test_a_guest_that_is_dropped_or_split_later_takes_nothing_with_it() -> None:
    """Its rows go on from what they hold: all over again, or from the start of the layer."""
    alone = scene((3, 3)).end()
    it = scene((3, 3))
    it.decode(PLENTY)
    assert it.runner.guest_rows > 0
    it.runner.drop(it.guests[0])
    it.runner.evict(100)
    sweep(it.runner, Row(100, 0, 14, 0, LAYERS))
    it.runner.split(it.guests[1], it.guests[1].layer_start(it.indexes[1]))
    sweep(it.runner, Row(101, 0, 14, LAYER, LAYERS))
    found = {key: x for key, x in it.logits.items() if key[0] != 2}
    assert_same([found[key] for key in alone], list(alone.values()))


# -- checkpoints


def test_a_checkpoint_keeps_what_ran_as_a_guest_and_its_frame_may_be_one_again() -> None:
    alone = scene().end()
    it = scene()
    it.decode(5)
    (work,), (program,), (index,) = it.works, it.guests, it.indexes
    assert 0 < it.runner.guest_rows <= 5
    other = scene((), model=it.runner.model)
    state = it.runner.export_frame(program, index)
    other.runner.import_request(100, GREEDY, *it.runner.export_request(100))
    other.runner.import_frame(program, index, state)
    other.guests, other.indexes = [program], [index]
    assert bytes(other.works[0].done) == bytes(work.done)
    other.decode(PLENTY)
    assert other.runner.guest_rows > 0
    assert_same(list(other.end().values()), list(alone.values()))
    assert_same(list(it.end().values()), list(alone.values()))


@pytest.mark.parametrize("wrong", ["forget", "claim", "uncounted"])
def test_a_wrong_done_mask_or_count_is_seen(wrong: str) -> None:
    it = scene()
    it.decode(PLENTY)
    (work,), (frame,) = it.works, it.frames
    at = next(iter(ridden(work.done, 3)))
    if wrong == "forget":
        work.done[at] = 0
    elif wrong == "claim":
        work.done[work.done.index(0, 3)] = 1
    else:
        frame.slots_done -= 1
    with pytest.raises(InvariantError, match="I1"):
        it.end()


def test_a_unit_never_runs_twice() -> None:
    it = scene()
    it.decode(PLENTY)
    (work,), (frame,) = it.works, it.frames
    at = next(iter(ridden(work.done, 3)))
    x = frame.layer.experts_x_TD
    assert x is not None
    with pytest.raises(InvariantError, match="twice"):
        work.run(x, at, at + 1)
