"""Slots for experts of a file: which experts are in memory, and when the table says so."""

import errno
import os
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from qllm.errors import ConfigError, InvariantError, ModelError
from qllm.models.weights.expert_file import (
    ExpertFile,
    ExpertLayer,
    parts_of,
    room_for,
    written,
)
from qllm.runner.displacing import HALF_LIFE, LEAST_SCORE
from qllm.runner.residency import FileResidency, LayerResidency, Residency

SAYS = {"weights": "a"}
NUM = (5, 4)
LAYERS = [
    ExpertLayer(f"layers.{i}.experts", num, 24, 16, parts_of({"up": size, "down": 60}))
    for i, (num, size) in enumerate(zip(NUM, (5000, 70), strict=True))
]
SLOT, ALL = 8192, 5 * 8192 + 4 * 4096


def bytes_of(layer: int, expert: int) -> bytes:
    """Bytes of an expert that differ from those of all others."""
    return bytes([16 * layer + expert + 1]) * LAYERS[layer].expert_bytes


@pytest.fixture
def file(tmp_path: Path) -> Iterator[ExpertFile]:
    with written(tmp_path / "experts", SAYS, LAYERS) as writer:
        for i, layer in enumerate(LAYERS):
            writer.start(layer)
            for expert in range(layer.num_experts):
                room = room_for(layer.expert_bytes)
                room[:] = bytes_of(i, expert)
                writer.write(expert, room)
            writer.finish((None, None))
    made = ExpertFile(tmp_path / "experts", SAYS)
    yield made
    made.close()


def entered(file: ExpertFile, num_slots: int) -> tuple[Residency, list[LayerResidency]]:
    residency = FileResidency(file, num_slots * SLOT, 2)
    residency.enter()
    return residency, [residency.layer(i) for i in range(len(LAYERS))]


def present(residency: Residency, layers: list[LayerResidency]) -> set[tuple[int, int]]:
    """The experts that the table holds, whose bytes are checked."""
    found, rows = set(), iter(residency.table.tolist())
    for i, layer in enumerate(layers):
        for expert in range(NUM[i]):
            address, _ = next(rows)
            slot = layer.slot(expert)
            assert layer.has(expert) == bool(address) == (slot is not None)
            if slot is not None:
                assert address == slot.data_ptr()
                assert bytes(slot.numpy().data[: LAYERS[i].expert_bytes]) == bytes_of(i, expert)
                found.add((i, expert))
    return found


class Lfu:
    """A slow residency, which counts all uses again before each read."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots, self.now, self.num_reads = num_slots, 0, 0
        self.used = dict[tuple[int, int], int]()
        self.uses = list[tuple[int, int]]()
        self.pins = list[tuple[int, int]]()

    def score(self, one: tuple[int, int]) -> tuple[float, int]:
        half_life, found = HALF_LIFE * self.num_slots, 0.0
        for i, other in enumerate(self.uses, 1):
            found = found / 2 if i % half_life == 0 else found
            found = (found if found >= LEAST_SCORE else 0.0) + (other == one)
        return found, -self.used[one]

    def pin(self, wanted: list[tuple[int, int]]) -> list[tuple[int, int]]:
        held = [one for one in wanted if one in self.used]
        self.pins += held
        for one in wanted:
            if one in held:
                continue
            free = [other for other in self.used if other not in self.pins]
            if len(self.used) == self.num_slots:
                if not free:
                    break
                del self.used[min(free, key=self.score)]
            self.used[one], self.num_reads = self.now, self.num_reads + 1
            self.pins.append(one)
            held.append(one)
        return held


@pytest.mark.parametrize("num_slots", [2, 3, 6])
@pytest.mark.parametrize("seed", range(4))
def test_drawn_calls_leave_the_experts_of_a_slow_residency(
    file: ExpertFile, num_slots: int, seed: int
) -> None:
    """Every use has a time of its own, so that the expert used last is one expert."""
    rng = random.Random(seed)
    residency, layers = entered(file, num_slots)
    slow, nested = Lfu(num_slots), list[tuple[Any, list[tuple[int, int]]]]()
    for _ in range(150):
        layer = rng.randrange(len(LAYERS))
        experts = rng.sample(range(NUM[layer]), rng.randint(1, NUM[layer]))
        if nested and rng.random() < 0.5:
            block, held = nested.pop()
            block.__exit__(None, None, None)
            for one in held:
                slow.pins.remove(one)
        elif len(set(slow.pins)) < num_slots - 1:
            held = list[tuple[int, int]]()
            block = ExitStack()
            for expert in experts:
                if len(set(slow.pins)) == num_slots:
                    break
                block.enter_context(layers[layer].pinned([expert]))
                held += slow.pin([(layer, expert)])
                slow.now += 1
                layers[layer].use([expert])
                slow.used[layer, expert] = slow.now
                slow.uses.append((layer, expert))
            nested.append((block, held))
        assert present(residency, layers) == set(slow.used)
        assert residency.num_reads == slow.num_reads
        assert residency.clock == slow.now
    assert slow.num_reads > 2 * num_slots


def test_as_many_experts_are_held_as_there_are_slots(file: ExpertFile) -> None:
    residency, (first, second) = entered(file, 3)
    with second.pinned([1]):
        with first.pinned([4, 0, 4, 2, 3]):
            assert present(residency, [first, second]) == {(1, 1), (0, 4), (0, 0)}
            with pytest.raises(InvariantError, match="every slot of experts is pinned"):
                first.pinned([2]).__enter__()
            with first.pinned([0, 3]):  # one is there, and there is no slot for the other
                assert residency.num_reads == 3
            with pytest.raises(InvariantError, match="every slot"):
                second.pinned([0]).__enter__()
        with first.pinned([2, 3, 0]):
            assert present(residency, [first, second]) == {(1, 1), (0, 0), (0, 2)}
            assert residency.num_reads == 4, "what is there stays"


@contextmanager
def watched(file: ExpertFile, seen: Any) -> Iterator[None]:
    """Call `seen` in the middle of every read."""
    real = file.read

    def read(layer: int, expert: int, into: memoryview) -> None:
        into[:] = bytes(into.nbytes)
        seen(layer, expert)
        real(layer, expert, into)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file, "read", read)
        yield


def test_the_table_has_an_expert_after_its_read_and_not_before(file: ExpertFile) -> None:
    residency, layers = entered(file, 2)
    with layers[0].pinned([0, 1]):
        before = present(residency, layers)
    assert before == {(0, 0), (0, 1)}
    found = list[set[tuple[int, int]]]()
    seen = watched(file, lambda *_: found.append(present(residency, layers)))
    with seen, layers[1].pinned([3, 2]):
        after = present(residency, layers)
    assert [len(one) for one in found] == [1, 1], "one expert has left, and none is there for it"
    assert after == {(1, 3), (1, 2)}


def fail_with_eio(*_: object) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("damage", ["flipped", "cut off", "EIO"])
def test_an_expert_that_cannot_be_read_is_an_error_of_its_own(
    file: ExpertFile, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    residency, layers = entered(file, 2)
    with layers[0].pinned([0, 1]):
        pass
    place = file.layers[0].place(4)
    whole = file.path.read_bytes()
    with file.path.open("r+b") as out, monkeypatch.context() as patch:
        if damage == "flipped":
            out.seek(place + 17)
            out.write(bytes([whole[place + 17] ^ 4]))
        elif damage == "cut off":
            out.truncate(place + 4096)
        else:
            patch.setattr(os, "preadv", fail_with_eio)
        out.flush()
        texts = {"flipped": "is damaged", "cut off": "is cut off", "EIO": "cannot be read from"}
        named = f"expert 4 of layers.0.experts.* {texts[damage]}"
        for _ in range(2):
            with pytest.raises(ModelError, match=named):
                layers[0].pinned([1, 4]).__enter__()
            assert present(residency, layers) == {(0, 1)}, "its slot is empty"
            with layers[0].pinned([1]):
                pass
    if damage == "flipped":
        with layers[0].pinned([2, 3]):
            assert present(residency, layers) == {(0, 2), (0, 3)}
    with file.path.open("r+b") as out:
        out.write(whole)
    with layers[0].pinned([4, 1]):  # nothing is pinned that was pinned in a failed call
        assert present(residency, layers) == {(0, 4), (0, 1)}


@pytest.mark.parametrize("num_bytes", [1, SLOT, 2 * SLOT - 1])
def test_a_budget_without_room_for_one_token_is_refused(file: ExpertFile, num_bytes: int) -> None:
    wanted = (
        rf"max_expert_bytes={num_bytes} has room for {num_bytes // SLOT} experts, and a token "
        r"uses 2 .* "
        rf"give at least {2 * SLOT}, or {ALL} for all experts"
    )
    with pytest.raises(ConfigError, match=wanted):
        FileResidency(file, num_bytes, 2)


@pytest.mark.parametrize(("num_bytes", "num_slots"), [(2 * SLOT, 2), (ALL - 1, 6), (ALL, 0)])
def test_a_budget_has_slots_until_all_experts_fit(
    file: ExpertFile, num_bytes: int, num_slots: int
) -> None:
    residency = FileResidency(file, num_bytes, 2)
    assert (residency.num_slots, residency.has_all) == (num_slots, num_slots == 0)
    assert residency.num_experts == sum(NUM)


def test_left_slots_are_empty_when_they_are_entered_again(file: ExpertFile) -> None:
    residency, layers = entered(file, 2)
    with layers[0].pinned([0, 1]):
        pass
    for _ in range(2):
        residency.leave()
        assert present(residency, layers) == set()
    residency.enter()
    with layers[1].pinned([0]):
        assert present(residency, layers) == {(1, 0)}
    residency.enter()
    assert present(residency, layers) == {(1, 0)}, "entered slots keep their experts"
