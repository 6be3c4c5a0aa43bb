"""Who goes first on the way to and from the file, at which pace, and what that costs others."""

import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

from qllm.engine.costs import StepCosts
from qllm.engine.kv.loading import LoadingIngress
from qllm.engine.kv.prefix import PrefixCache
from qllm.engine.kv.tier import GENTLE_SHARE, LATE, FileTier, PageLoad, StoredPage, Write, Written
from qllm.engine.storage import mover
from qllm.engine.storage.mover import SHARE, Mover
from qllm.engine.storage.reads import rest_s
from qllm.ingress import Update
from qllm.plugins import load_policy
from qllm.policy import Tier
from qllm.scheduler.prefix import PageStore
from qllm.sim.check import overload, watch
from qllm.sim.world import World
from qllm.types import NS_PER_MS, Priority
from tests.support.scheduling import finished_well
from tests.support.waiting import wait_for

LS, BE = Priority.LS, Priority.BE


class FakeFile:
    """Says what it is asked for, and does it when a gate is open."""

    def __init__(self) -> None:
        self.did: list[str] = []
        self.torch_threads: set[int] = set()
        """With how many torch would compute on the threads that call."""
        self.gate = threading.Event()
        self.gate.set()

    def read(self, slot: int, name: bytes, checksum: int) -> tuple[str]:
        self.gate.wait()
        self.torch_threads.add(torch.get_num_threads())
        self.did.append(f"read {slot}")
        return (name.decode(),)

    def write(self, slot: int, *_: Any) -> int:
        self.torch_threads.add(torch.get_num_threads())
        self.did.append(f"write {slot}")
        return 0

    def erase(self, slots: Any) -> None:
        self.did.append(f"erase {slots}")

    def close(self) -> None:
        pass


@pytest.fixture
def file() -> FakeFile:
    return FakeFile()


@pytest.fixture
def moving(file: FakeFile, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mover]:
    """A mover whose rests last until something ends them."""
    monkeypatch.setattr(mover, "rest_s", lambda *_: threading.TIMEOUT_MAX)
    monkeypatch.setattr(mover, "LOADS_FIRST_S", threading.TIMEOUT_MAX)
    made = Mover(file, lambda: file.did.append("wake"), lambda: 0)  # type: ignore[arg-type]
    yield made
    file.gate.set()
    made.close()
    assert not any(thread.is_alive() for thread in made._threads)


def load_of(slots: list[int], is_ls: bool) -> PageLoad:
    pages = [(str(slot).encode(), StoredPage(slot, 0)) for slot in slots]
    return PageLoad(pages, lambda *_: None, is_ls, b"")


def test_loads_of_ls_never_rest_and_go_before_others(moving: Mover, file: FakeFile) -> None:
    moving.be_gentle(True)
    batch, chat = load_of([1, 2, 3], False), load_of([7, 8], True)
    moving.read(batch)
    wait_for(lambda: moving._is_resting)
    assert file.did == ["read 1"]
    moving.read(chat)
    wait_for(lambda: chat.is_over and batch.num_ready == 2 and moving._is_resting)
    assert file.did == ["read 1", "read 7", "read 8", "wake", "read 2"]
    assert not batch.is_over
    moving.be_gentle(False)
    wait_for(lambda: batch.is_over)
    assert file.did[5:] == ["read 3"]


def test_no_thread_of_torch_spins_beside_those_that_move(file: FakeFile) -> None:
    """OpenMP's would, after every copy of a page, on the cores that compute the model."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        moving = Mover(file, lambda: None, lambda: 0)  # type: ignore[arg-type]
        moving.read(load_of([1], is_ls=True))
        moving.write(Write(b"2", 2, None, b"", True, 0))
        wait_for(lambda: sorted(file.did) == ["read 1", "write 2"])
        moving.close()
        assert file.torch_threads == {1}
        assert torch.get_num_threads() == 3
        seen: list[int] = []
        other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        other.start()
        other.join()
        assert seen == [3], "threads of others are as they were"
    finally:
        torch.set_num_threads(before)


def test_stores_go_on_while_a_load_rests_and_not_before(moving: Mover, file: FakeFile) -> None:
    moving.be_gentle(True)
    file.gate.clear()
    batch = load_of([1, 2], False)
    moving.read(batch)
    moving.write(Write(b"x", 9, None, b"", False, 0))
    file.gate.set()
    wait_for(lambda: moving.written())
    assert file.did == ["read 1", "write 9"]
    assert not batch.is_over


def test_without_ls_loads_go_before_stores_and_never_rest(moving: Mover, file: FakeFile) -> None:
    file.gate.clear()
    moving.read(load_of([1, 2, 3], False))
    moving.write(Write(b"x", 9, None, b"", False, 0))
    file.gate.set()
    wait_for(lambda: moving.written())
    assert file.did == ["read 1", "read 2", "read 3", "write 9"]


@pytest.mark.parametrize(("gentle", "share"), [(True, GENTLE_SHARE), (False, SHARE)])
def test_a_store_leaves_the_rest_of_a_core(
    file: FakeFile, monkeypatch: pytest.MonkeyPatch, gentle: bool, share: float
) -> None:
    asked: list[float] = []
    monkeypatch.setattr(mover, "rest_s", lambda busy_s, share: asked.append(share) or 0.0)
    moving = Mover(file, lambda: None, lambda: 0)  # type: ignore[arg-type]
    moving.be_gentle(gentle)
    moving.write(Write(b"x", 9, None, b"", False, 0))
    wait_for(lambda: asked)
    moving.close()
    assert asked == [share]


def test_who_is_busy_for_its_share_rests_for_the_others() -> None:
    assert rest_s(1.0, 0.5) == 1.0
    assert rest_s(0.1, 0.1) == pytest.approx(0.9)
    assert rest_s(2.0, 1.0) == 0.0


# -- when a load is late, and whether it is worth its time


class StillDisk:
    """Moves nothing by itself."""

    failure = None

    def __init__(self) -> None:
        self.loads: list[PageLoad] = []

    def write(self, job: Any) -> None:
        pass

    def read(self, load: PageLoad) -> None:
        self.loads.append(load)

    def erase(self, slots: Any) -> None:
        pass

    def be_gentle(self, gentle: bool) -> None:
        pass

    def written(self) -> list[Any]:
        return []


PAGE_NS, NUM = 10 * NS_PER_MS, 8


def tier_of(*, busy: float, prefill_ns: int = 0) -> FileTier:
    """A tier that has learned that a page of 4 tokens takes `PAGE_NS`, a part of it computing."""
    costs = StepCosts()
    costs._prefill_token_ns = prefill_ns
    index = PageStore[StoredPage](NUM)
    for slot in range(NUM):
        index.add(bytes([slot]), StoredPage(slot, 0), BE, 0)
    made = FileTier(StillDisk(), index, [], 100, 4, costs)
    made._busy = busy
    load = ask(made, True)
    assert load is not None
    load.num_read, load.elapsed_ns, load.busy_ns = NUM, NUM * PAGE_NS, int(NUM * PAGE_NS * busy)
    load.is_over = True
    made.turn(PageStore[Any](0), 0)
    assert costs.table().move_token_ns == (0, PAGE_NS // 4)
    return made


def ask(files: FileTier, is_ls: bool) -> PageLoad | None:
    names = [bytes([slot]) for slot in range(NUM)]
    return files.load(names, PageStore[Any](0), lambda *_: None, is_ls, b"", 0)


@pytest.mark.parametrize("gentle", [True, False])
def test_the_pace_beside_ls_makes_no_load_late(gentle: bool) -> None:
    """LS may come at any time, so it counts from the start."""
    files = tier_of(busy=0.25)
    files.be_gentle(gentle)
    batch, chat = ask(files, False), ask(files, True)
    assert batch is not None
    assert chat is not None
    paced_ns = PAGE_NS + 0.25 * PAGE_NS * (1 / GENTLE_SHARE - 1)
    assert batch.late_ns == pytest.approx(LATE * NUM * paced_ns)
    assert chat.late_ns == LATE * NUM * PAGE_NS
    again = ask(files, False)
    assert again is not None
    assert again.late_ns == pytest.approx(LATE * NUM * (2 * paced_ns + PAGE_NS))


def test_a_load_that_takes_longer_than_computing_is_none() -> None:
    """At full speed half of the time of computing, and twice of it beside LS."""
    busy = 3 / (1 / GENTLE_SHARE - 1)
    files = tier_of(busy=busy, prefill_ns=PAGE_NS // 2)
    assert ask(files, False) is not None
    files.disk.loads[-1].is_over = True  # type: ignore[attr-defined]
    files.turn(PageStore[Any](0), 0)
    files.be_gentle(True)
    assert ask(files, False) is None
    assert ask(files, True) is not None


def test_what_reading_takes_is_learned_by_its_parts() -> None:
    files = tier_of(busy=0.5)
    load = ask(files, True)
    assert load is not None
    load.num_read, load.elapsed_ns, load.busy_ns = NUM, 2 * NUM * PAGE_NS, 0
    load.is_over = True
    files.turn(PageStore[Any](0), 0)
    assert files._busy == pytest.approx(0.375)
    assert files._costs.table().move(Tier.FILE, 4) == PAGE_NS * 5 // 4


# -- the bounds of others, on a virtual clock


class VirtualDisk(StillDisk):
    """Takes a while for each page, of virtual time; looked at once per turn."""

    def __init__(self, now_ns: Callable[[], int], page_ns: int) -> None:
        super().__init__()
        self._now_ns, self._page_ns = now_ns, page_ns
        self._free_ns = [0, 0]
        self._jobs: list[Write] = []
        self.num_moved = [0, 0]
        self.is_gentle = False

    def be_gentle(self, gentle: bool) -> None:
        self.is_gentle = gentle

    def write(self, job: Write) -> None:
        self._jobs.append(job)

    def _took(self, direction: int) -> bool:
        if self._free_ns[direction] > self._now_ns():
            return False
        self._free_ns[direction] = self._now_ns() + self._page_ns
        self.num_moved[direction] += 1
        return True

    def written(self) -> list[Written]:
        self.loads = [load for load in self.loads if not load.is_over]
        for load in sorted(self.loads, key=lambda load: not load.is_ls):
            while not load.is_over and self._took(0):
                load.into(load.num_ready, load.pages[load.num_ready])
                load.num_ready, load.num_read = load.num_ready + 1, load.num_read + 1
                load.is_over = load.num_ready == len(load.pages) or load.is_given_up
        if self._jobs and self._took(1):
            job = self._jobs.pop(0)
            return [Written(job.name, StoredPage(job.slot, 0))]
        return []


class Target:
    """KV of a request that the runner does not know."""

    def put(self, number: int, page: Any) -> None:
        """Nothing is there to put."""


class Keeper:
    """The simulated runner's pages; a copy on the loop's thread takes virtual time."""

    def __init__(self, world: World) -> None:
        self.world, self.num_copied, self.num_adopted = world, 0, 0
        self.kv_regime, self.kv_of = world.runner.kv_regime, world.runner.kv_of

    def load_target(self, num_tokens: int) -> Target:
        return Target()

    def adopt(self, request_id: int, target: Target, num_tokens: int) -> None:
        self.num_adopted += 1
        self.world.runner.copy_in(request_id, 0, num_tokens, (0, num_tokens))

    def copy_out(self, kv: Any, lo: int, hi: int) -> Any:
        self._copy()
        return self.world.runner.copy_out(kv, lo, hi)

    def copy_in(self, request_id: int, lo: int, hi: int, page: Any) -> None:
        self._copy()
        self.world.runner.copy_in(request_id, lo, hi, (lo, hi))

    def _copy(self) -> None:
        self.num_copied += 1
        self.world.clock.at_ns += NS_PER_MS // 20


def attach(world: World) -> tuple[Keeper, VirtualDisk, PrefixCache]:
    """A prefix cache with a file, of which two pages may be copied at once."""
    keeper, disk = Keeper(world), VirtualDisk(world.clock, 2 * NS_PER_MS)
    files = FileTier(disk, PageStore[StoredPage](100), range(40, 100), 1, 16, StepCosts())
    found, clock = world.scheduler.found, world.clock
    blocks = world.scheduler.pool
    prefix = PrefixCache(keeper, "", PageStore(50), 16, found, clock, blocks, 2, files)
    prefix._page_bytes = 1
    world.loop.prefix = world.loop.effects._prefix = prefix
    world.loop.ingress = LoadingIngress(world.ingress, prefix)
    return keeper, disk, prefix


def test_a_paused_chat_leaves_the_machine_to_the_mover() -> None:
    world = World(load_policy("qllm2"))
    _, disk, _ = attach(world)
    chat = world.submit(LS, 60, 50)
    for paused, gentle in ((None, True), (True, False), (False, True)):
        if paused is not None:
            world.loop.pending.append(Update(chat, paused=paused))
        world.step()
        assert disk.is_gentle is gentle
    world.loop.pending.append(Update(chat, priority=BE))
    world.step()
    assert not disk.is_gentle
    world.run()
    finished_well(world)


@pytest.mark.parametrize("bound_ms", [100, 300])
@pytest.mark.parametrize("name", ["qllm2", "priority", "priority-layered", "chunked"])
def test_bounds_hold_while_the_mover_is_busy(name: str, bound_ms: int) -> None:
    """LS without end, whose pages go out, beside BE whose pages come in."""
    world = overload(load_policy(name, {"max_be_stall_ms": bound_ms}), bound_ms)
    keeper, disk, prefix = attach(world)
    most = prefix._copy_bytes
    longest = max(world.submitted.values(), key=lambda item: item.num_prompt_tokens)
    for slot, key in enumerate(prefix.chain(longest, longest.token_ids).upto(400)):
        prefix.tier.index.add(key, StoredPage(slot, 0), BE, 0)  # type: ignore[union-attr]
    turn, copied = prefix.turn, []

    def looked() -> None:
        copied.append(keeper.num_copied)
        turn()

    prefix.turn = looked  # type: ignore[method-assign]
    paces, run = set(), world.runner.run

    def noted(*what: Any) -> Any:
        live = world.scheduler.requests.values()
        paces.add((disk.is_gentle, any(r.priority == LS for r in live)))
        return run(*what)

    world.runner.run = noted  # type: ignore[method-assign]
    watch(world)
    finished_well(world)
    assert (True, True) in paces
    assert (False, True) not in paces, "the prefill of the first LS request too"
    turn()
    assert not disk.is_gentle
    assert keeper.num_adopted >= 2
    assert disk.num_moved[0] > 20
    found = [m for m in world.metrics.values() if m is not None]
    assert max(m.max_stall_ms for m in found if m.priority == BE) <= bound_ms
    segment_ns = world.runner.segments.longest_ns
    if name == "qllm2":
        assert world.loop.num_preemptions
        assert max(world.loop.preempt_latencies_ns) <= segment_ns
    pages = [b - a for a, b in pairwise(copied)]
    ls_pages = 60 // 16  # a hit of LS is copied in one go
    assert max(pages) <= most + world.scheduler.limits.max_num_seqs * ls_pages
