"""RAM, the file and what is between them: nothing leaks, nothing pinned or deleted is found."""

import random
from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from qllm.engine.costs import StepCosts
from qllm.engine.kv.tier import FileTier, PageLoad, StoredPage, Write, Written
from qllm.scheduler.prefix import Chain, PageStore
from qllm.types import NS_PER_S, Priority


class FakeDisk:
    """Does what it is asked for when the test says so."""

    def __init__(self, rng: random.Random) -> None:
        self.failure: str | None = None
        self.slots: dict[int, tuple[bytes, Any]] = {}
        self.asked: list[Write | tuple[int, ...]] = []
        self.loads: list[PageLoad] = []
        self._written: list[Written] = []
        self._rng = rng

    def write(self, job: Write) -> None:
        self.asked.append(job)

    def read(self, load: PageLoad) -> None:
        self.loads.append(load)

    def erase(self, slots: Any) -> None:
        self.asked.append(tuple(slots))

    def be_gentle(self, gentle: bool) -> None:
        pass

    def written(self) -> list[Written]:
        found, self._written = self._written, []
        return found

    def work(self) -> None:
        """Some of it: in order within a direction."""
        for _ in range(self._rng.randint(0, len(self.asked))):
            job = self.asked.pop(0)
            if isinstance(job, Write):
                self.slots[job.slot] = job.name, job.page
                self._written.append(Written(job.name, StoredPage(job.slot, 0)))
                continue
            for slot in job:
                self.slots.pop(slot, None)
        for _ in range(self._rng.randint(0, len(self.loads))):
            self._load(self.loads.pop(0))

    def _load(self, load: PageLoad) -> None:
        for i, (name, page) in enumerate(load.pages):
            if load.is_given_up:
                break
            if isinstance(page, StoredPage):
                there, page = self.slots.get(page.slot, (b"", None))
                if there != name:
                    load.damaged = name
                    break
            load.into(i, page)
            load.num_ready += 1
        load.is_over = True


class World:
    """RAM, a file, and what may happen to them."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.now = rng, 0
        self.disk = FakeDisk(rng)
        self.ram = PageStore[Any](rng.randint(1, 5))
        slots = rng.randint(1, 6)
        index = PageStore[StoredPage](slots)
        self.files = FileTier(self.disk, index, range(slots), 1 << 23, 1, StepCosts())

    def step(self) -> None:
        self.now += self.rng.randint(0, 3) * NS_PER_S
        self.salt = self.rng.choice([b"a" * 32, b"b" * 32])
        self.priority = self.rng.choice([Priority.LS, Priority.BE])
        self.ids = [self.rng.randint(0, 1) for _ in range(self.rng.randint(1, 4))]
        self.names = Chain(self.ids, 1, (self.salt,)).upto(len(self.ids))
        deeds = [self.keep, self.keep, self.load, self.delete, self.expire, self.disk.work]
        self.rng.choice([*deeds, self.turn, self.turn])()
        self.files.check()
        self.ram.check(dict(Counter(self.files.pins())))

    def page(self, i: int) -> bytes:
        return self.salt[:1] + bytes(self.ids[: i + 1])

    def keep(self) -> None:
        ram, files, now, is_ls = self.ram, self.files, self.now, self.priority == Priority.LS
        for i, name in enumerate(self.names):
            if name not in ram and ram.make_room(self.priority, now):
                ram.add(name, self.page(i), self.priority, now, self.salt)
            elif name not in ram and name not in files.index and files.has_room():
                ram.lend(name, self.page(i), self.priority, now, self.salt)
                files.take_lent(name, is_ls)
            if name in ram:
                files.offer(name, is_ls)

    def load(self) -> None:
        wanted = [self.page(i) for i in range(len(self.ids))]
        seen: list[Any] = []

        def into(i: int, page: Any) -> None:
            assert (i, page) == (len(seen), wanted[i])
            seen.append(page)

        is_ls = self.priority == Priority.LS
        self.files.load(self.names, self.ram, into, is_ls, self.salt, self.now)

    def delete(self) -> None:
        self.files.delete(self.salt, self.ram)
        for name in self.ram.tagged(self.salt):
            self.ram.drop(name)
        assert not self.files.index.tagged(self.salt)

    def expire(self) -> None:
        self.files.expire(self.now - 2 * NS_PER_S)

    def turn(self) -> None:
        self.files.turn(self.ram, self.now)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**40))
def test_the_sums_of_ram_and_file_are_right_whatever_happens(seed: int) -> None:
    world = World(random.Random(seed))
    disk, files, ram = world.disk, world.files, world.ram
    for _ in range(world.rng.randint(1, 60)):
        world.step()
    while disk.asked or disk.loads or files.is_busy:
        disk.work()
        world.turn()
    files.check()
    ram.check({})
    assert len(ram) <= ram.capacity
    for name in files.index.names():
        assert disk.slots[files.index.read(name).slot][0] == name
    assert len(disk.slots) == len(files.index), "nothing that was deleted is left"
