"""Any plan, over pool, host memory and shared blocks of a device: tokens, KV bits and sums."""

import random
from typing import Any

import pytest
import torch
from device_world import BLOCK, PAGE, DeviceWorld, limits_of, prompts_of
from fake_cuda import FakeCuda
from fake_streams import FakeStreams, RaceError, install
from test_swap import SwapFuzz

from qllm.cuda.copies import Arena, Copies
from qllm.cuda.pages import PagedKV
from qllm.plugins import load_policy
from qllm.record import trace
from qllm.types import NS_PER_MS, Priority

LS, BE = Priority.LS, Priority.BE
CASES = [*((seed, False) for seed in range(24)), *((seed, True) for seed in (1, 3, 5, 8, 10))]


@pytest.mark.parametrize(("seed", "stages"), CASES)
def test_any_plan_keeps_tokens_and_sums(
    monkeypatch: pytest.MonkeyPatch, seed: int, stages: bool
) -> None:
    """Bits are compared wherever KV comes back or is referred to; sums after every step."""
    play(monkeypatch, seed, stages)


def play(patch: pytest.MonkeyPatch, seed: int, stages: bool) -> DeviceWorld:
    rng = random.Random(seed)
    streams, cuda = FakeStreams(rng), FakeCuda() if stages else None
    install(patch, streams, BLOCK, cuda)
    limits = limits_of(rng.choice([30, 40, 60]), rng.choice([20, 200]))
    policy: Any = SwapFuzz(seed) if seed % 2 else load_policy("qllm2")
    world = DeviceWorld(policy, limits, streams, num_kept=rng.choice([0, 4, 30]), stages=cuda)
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


@pytest.mark.parametrize(
    "what",
    ["without_compute", "compute_waits_for_nothing", "copies_wait_for_compute_alone",
     "wrong stream", "early"],
)  # fmt: skip
def test_an_order_that_is_left_out_is_seen(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    with pytest.raises((RaceError, AssertionError)):
        for seed in (3, 5, 7, 9, 15):
            with pytest.MonkeyPatch.context() as patch:
                broken(patch, what)
                play(patch, seed, stages=False)


def test_a_stage_that_reads_a_page_too_early_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((RaceError, AssertionError)):
        for seed in (3, 5):
            with pytest.MonkeyPatch.context() as patch:
                broken(patch, "early")
                play(patch, seed, stages=True)


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
