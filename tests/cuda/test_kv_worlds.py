"""Any plan, over pool, host memory and shared blocks of a device: tokens, KV bits and sums."""

import gc
import random
import sys
from typing import Any

import pytest
import torch

from qllm.cuda.copies import Arena, Copies
from qllm.cuda.pages import PagedKV, Pages, Spare
from qllm.kernels.select import kernels
from qllm.plan import Plan
from qllm.plugins import load_policy
from qllm.policy import View, next_row
from qllm.record import trace
from qllm.types import NS_PER_MS, Cap, Grain, Priority
from tests.support.device_world import BLOCK, PAGE, DeviceWorld, limits_of, prompts_of
from tests.support.fake_cuda import FakeCuda
from tests.support.fake_streams import FakeStreams, install
from tests.support.swap import SwapFuzz

LS, BE = Priority.LS, Priority.BE


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", range(24))
def test_any_plan_keeps_tokens_and_sums(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Bits are compared wherever KV comes back or is referred to; sums after every step."""
    play(monkeypatch, seed, stages=False)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", [1, 3, 5, 8, 10])
def test_any_plan_by_stages_keeps_tokens_and_sums(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    play(monkeypatch, seed, stages=True)


def play(patch: pytest.MonkeyPatch, seed: int, stages: bool) -> DeviceWorld:
    rng = random.Random(seed)
    streams, cuda = FakeStreams(), FakeCuda() if stages else None
    install(patch, streams, BLOCK, cuda)
    limits = limits_of(rng.choice([30, 40, 60]), rng.choice([20, 200]))
    policy: Any = SwapFuzz(seed) if seed % 2 else load_policy("qllm2")
    world = DeviceWorld(
        policy, limits, streams, num_kept=rng.choice([0, 4, 30]), stages=cuda,
        copy_bytes=1 if seed % 3 == 0 else None,  # the rests of requests are cached after them
    )  # fmt: skip
    for i, ids in enumerate(prompts_of(rng, 7, world.real.shape.vocab_size)):
        world.ask(rng.choice([LS, BE, BE]), ids, rng.randint(2, 8), at_ns=i * 3 * NS_PER_MS)
    world.run()
    world.right()
    assert streams.finishes == 0, "the host waited for a copy"
    swapped = [e for e in world.record.events if isinstance(e, trace.SwappedIn)]
    assert len(swapped) <= world.both.moved
    world.real.close()
    assert streams.unlocked == 2
    return world


def test_the_plans_move_and_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the plans above are worth: all of it happens in a few of them."""
    moved = shared = loaded = 0
    for seed in (3, 5, 7, 9):
        with pytest.MonkeyPatch.context() as patch:
            world = play(patch, seed, stages=False)
        assert world.loop.prefix is None or world.loop.prefix.stats()["hit_tokens"] >= 0
        moved += world.both.moved
        loaded += world.both.compared * PAGE
        shared += 0 if world.loop.prefix is None else world.loop.prefix.stats()["shared_tokens"]
    assert moved > 10
    assert loaded > shared > 0


class TakesOne:
    """All at once, one layer at a time; at one boundary it takes the KV of one of them."""

    needs = Cap.KV_SWAP

    def __init__(self, at: int, victim: int) -> None:
        self.at, self.victim, self.count = at, victim, 0

    def plan(self, view: View) -> Plan:
        self.count += 1
        victim = view.by_id.get(self.victim)
        if self.count == self.at and victim is not None and victim.is_admitted:
            if victim.last_progress_ns > victim.admitted_ns:
                return Plan(swap_out=(self.victim,), wait_until_ns=view.now_ns)
            self.at += 1
        frames = view.frames
        rows = frames[0].rows if frames else tuple(next_row(r, view) for r in view.requests)
        return Plan(rows=rows, grain=Grain.LAYER, slice_ns=1)


@pytest.mark.parametrize("stages", [False, True])
@pytest.mark.parametrize("num", [1, 3])
def test_swapped_out_at_every_boundary_every_victim_goes_on(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, num: int, stages: bool
) -> None:
    """Alone in its frame it goes on inside it, wherever its KV lies then; else it leaves it.

    The short lane takes some of the boundaries where there are three victims.
    """
    streams, cuda = FakeStreams(), FakeCuda() if stages else None
    install(monkeypatch, streams, BLOCK, cuda)
    policy = TakesOne(0, 0)
    world = DeviceWorld(policy, limits_of(60, 60), streams, stages=cuda)
    rng = random.Random(5)
    boundaries = list(range(2, 16, 2 if stages else 1))
    if num > 1 and request.config.getoption("--lane") == "short":
        boundaries = sorted(random.Random(3).sample(boundaries, 3))
    for at in boundaries:
        for victim in range(num):
            first = len(world.submitted)
            policy.at, policy.count, policy.victim = at, 0, first + victim
            for i in range(num):
                ids = [rng.randrange(world.real.shape.vocab_size) for _ in range(5 + 9 * i)]
                world.ask(BE, ids, 3)
            before = world.both.moved
            world.run()
            assert world.both.moved <= before + 1
    world.right()
    back = sum(isinstance(e, trace.SwappedIn) for e in world.record.events)
    left = sum(isinstance(e, trace.Left) for e in world.record.events)
    assert back == world.both.moved > 5
    assert bool(left) is (num > 1)


# -- the fake itself: what it must not let pass


def broken(patch: pytest.MonkeyPatch, what: str) -> None:
    """Leave one thing out that orders copies."""
    real = Copies._wait

    def without_compute(self: Any, stream: Any, events: Any) -> None:
        real(self, stream, [e for e in events if stream is None or (e and e.stream is not None)])

    def compute_waits_for_nothing(self: Any, stream: Any, events: Any) -> None:
        real(self, stream, list(events) if stream is not None else [])

    def copies_wait_for_compute_alone(self: Any, stream: Any, events: Any) -> None:
        events = list(events)
        real(self, stream, events if stream is None else events[:1])

    if what == "wrong stream":
        make = Copies.__init__

        def crossed(self: Any, *given: Any) -> None:
            make(self, *given)
            record, out, into = self._api.record, self._out, self._in
            other = {id(out): into, id(into): out}
            patch.setattr(self._api, "record", lambda s: record(s if s is None else other[id(s)]))

        patch.setattr(Copies, "__init__", crossed)
    elif what == "early":
        patch.setattr(PagedKV, "_compute_with", lambda self, pages: None)
    else:
        patch.setattr(Copies, "_wait", locals()[what])


def play_all(what: str, *, stages: bool) -> None:
    for seed in (3, 5, 7, 9, 15) if not stages else (3, 5):
        with pytest.MonkeyPatch.context() as patch:
            broken(patch, what)
            play(patch, seed, stages)


@pytest.mark.parametrize(
    ("what", "stages"),
    [
        ("without_compute", False),
        ("compute_waits_for_nothing", False),
        ("copies_wait_for_compute_alone", False),
        ("wrong stream", False),
        ("early", False),
        ("early", True),
    ],
)
def test_an_order_that_is_left_out_is_seen(
    what: str, stages: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a race, or as tokens, bits or requests that are not what they should be."""
    # Without the order, an arena that is dropped cannot wait for all of its copies.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    with pytest.raises((AssertionError, KeyError)):
        play_all(what, stages=stages)
    gc.collect()


def memory(num_pages: int) -> tuple[torch.Tensor, torch.Tensor]:
    shapes = [(3, num_pages * BLOCK, 2, width) for width in (5, 6)]
    k, v = (torch.arange(float(torch.Size(s).numel())).view(s) for s in shapes)
    return k, v


def test_copies_of_a_page_wait_for_each_other_though_nothing_computes() -> None:
    streams, pages = FakeStreams(), memory(4)
    copies, arena = Copies(streams, pages, BLOCK), Arena(streams, 3, BLOCK, pages)
    slots = [slot for _ in range(3) if (slot := arena.take()) is not None]
    want = [t[:, :BLOCK].clone() for t in pages]
    copies.out([0], slots[:1])
    copies.into([3], slots[:1])  # after the copy that fills the slot
    copies.out([3], slots[1:2])  # after the copy that fills the page
    copies.into([0], slots[2:])  # after the copy that reads the page
    copies.finish(slots)
    for name, slot in enumerate(slots[:2]):
        assert all(map(torch.equal, slot.tensors(), want)), name
    assert not streams.races


def test_what_was_copied_ahead_does_not_move_again() -> None:
    """Only the tail does, if there is room; and room is given to whoever is swapped out."""
    streams = FakeStreams()
    pages = Pages(3, 8, BLOCK, kernels("torch"), Spare(streams, 10**6, num_swapped=6))
    first, second = PagedKV(pages, 64), PagedKV(pages, 64)
    new = torch.zeros(1, 2, 14, 5)
    for kv, blocks in ((first, [0, 1, 2, 3]), (second, [4, 5, 6, 7])):
        kv.hold(blocks, 14)
        for layer in range(3):
            kv.write(layer, new, new, 0)
        kv.committed = 13
    assert first.copy_ahead(2) == 2
    assert first.copy_ahead(9) == 1
    assert first.copy_ahead(9) == 0
    assert second.copy_ahead(9) == 3
    first.swap_out()  # its tail takes the room of the other's copies
    assert streams.copies["out"] == 2 * (3 + 3 + 1)
    assert pages.swapped is not None
    assert len(pages.swapped.free) == 2
    assert second.copy_ahead(9) == 2
    first.swap_in([0, 1, 2, 3])
    second.swap_out()
    assert len(pages.swapped.free) == 2
    second.clear()
    assert len(pages.swapped.free) == 6


def test_swapped_out_kv_of_a_checkpoint_goes_on_elsewhere() -> None:
    generator = torch.Generator().manual_seed(1)
    found = []
    for blocks in ([0, 1, 2, 3], []):
        streams = FakeStreams()
        pages = Pages(3, 8, BLOCK, kernels("torch"), Spare(streams, 10**6, num_swapped=6))
        kv = PagedKV(pages, 64)
        kv.begin_restore(blocks, 14)
        for layer in range(3):
            k, v = (torch.randn(1, 2, 14, width, generator=generator) for width in (5, 6))
            kv.restore(layer, *((k, v) if blocks else (found[0][f"{n}.{layer}"] for n in "kv")))
        kv.committed = 13
        if blocks:
            found.append(dict(kv.export()))
            kv.swap_out()
            found.append(dict(kv.export()))  # from where it lies, once it is there
            assert streams.finishes > 0
        else:
            kv.swap_in([5, 3, 1, 0])
            found.append(dict(kv.export()))
    for other in found[1:]:
        assert all(torch.equal(t, other[name]) for name, t in found[0].items())
    assert len(found[0]) == 6


def test_a_slot_is_free_again_when_it_is_forgotten() -> None:

    arena = Arena(FakeStreams(), 2, 4, (torch.zeros(3, 8, 2, 5), torch.zeros(3, 8, 2, 6)))
    first, second = arena.take(), arena.take()
    assert arena.take() is None
    assert first is not None
    assert [t.shape for t in first] == [(3, 2, 4, 5), (3, 2, 4, 6)]
    del first
    third = arena.take()
    assert third is not None
    assert second is not None
    assert {second.number, third.number} == {0, 1}
