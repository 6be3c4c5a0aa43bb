"""READs that are of no one moment: bytes of different times, words that can be no tail."""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from qllm.ingress.codec import encode_finish, encode_token
from qllm.ingress.layout import FINISH_KIND, FRONT_END, TOKEN_KIND, cell
from qllm.ingress.memory import FrontEndMemory, Segment
from qllm.ingress.remote import pull
from qllm.ingress.remote.pull import MIN_WINDOW, PullingFrontEnd
from qllm.ingress.ring import BROKEN_AFTER_NS, RingError, RingWriter
from qllm.types import FinishReason, RequestId, Sampled
from tests.support.pull_load import Load
from tests.support.pulled import Answerer, block_of

RING = 1 << 12
Ranges = list[tuple[int, int, int]]


class TornLink:
    """A link of one process: WRITEs are whole, a READ takes each byte from another time.

    Args:
        ours: The front end's memory.
        theirs: The engine's.
        meanwhile: The engine goes on while a READ is under way.
        rng: Chooses.
    """

    def __init__(
        self, ours: Segment, theirs: Segment, meanwhile: Callable[[], Any], rng: random.Random
    ) -> None:
        self.ours, self.theirs, self.meanwhile, self.rng = ours.bytes, theirs.bytes, meanwhile, rng
        self.change_word: Callable[[int, int], int] = lambda index, value: value
        self.num_torn = 0

    def drive(self) -> None:
        """Nothing is emulated."""

    def post(self, ranges: list[tuple[int, int]]) -> str:
        for at, size in ranges:
            self.theirs[at : at + size] = self.ours[at : at + size]
        return "written"

    def fetch(self, ranges: Ranges) -> Any:
        return SimpleNamespace(ranges=ranges, times=[self._now(ranges)])

    def _now(self, ranges: Ranges) -> list[bytes]:
        return [bytes(self.theirs[at : at + size]) for _, at, size in ranges]

    def is_done(self, transfer: Any) -> bool:
        if transfer == "written":
            return True
        self.meanwhile()
        transfer.times.append(self._now(transfer.ranges))
        if self.rng.random() < 0.6:
            return False
        for number, (at, _, size) in enumerate(transfer.ranges):
            seen = [time[number] for time in transfer.times]
            self.num_torn += seen[0] != seen[-1]
            self.ours[at : at + size] = self._words(seen) if number == 0 else self._bytes(seen)
        return True

    def _words(self, seen: list[bytes]) -> bytes:
        out = b""
        for i in range(len(seen[0]) // 8):
            value = int.from_bytes(self.rng.choice(seen)[8 * i : 8 * i + 8], "little")
            out += self.change_word(i, value).to_bytes(8, "little")
        return out

    def _bytes(self, seen: list[bytes]) -> bytes:
        return bytes(self.rng.choice(values) for values in zip(*seen, strict=True))

    def close(self) -> None:
        """Nothing is held."""


def torn_pair(rng: random.Random) -> tuple[Answerer, PullingFrontEnd, TornLink]:
    engine, block = Answerer(), block_of(0, RING)
    block.attach_to(engine.server)
    assert isinstance(block.memory, Segment)
    ours = FrontEndMemory.create(0, (RING,) * 4)

    def goes_on() -> None:
        if rng.random() < 0.5:
            engine.step()

    link: Any = TornLink(ours.segment, block.memory, goes_on, rng)
    front_end = PullingFrontEnd(ours, link)
    for memory in (ours.segment, block.memory):
        memory.close()
    return engine, front_end, link


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(5))
def test_torn_reads_lose_nothing_and_invent_nothing(seed: int) -> None:
    rng = random.Random(seed)
    engine, front_end, link = torn_pair(rng)
    load = Load(front_end, random.Random(seed), lambda: None)
    load.run(400, in_flight=25)
    load.check()
    assert link.num_torn > 100
    assert FinishReason.CANCELLED in load.ends.values()
    assert load.num_records * 64 > 10 * RING, "the ring was never gone round"
    engine.server.check()


def test_a_tail_that_can_be_none_is_not_taken() -> None:
    """Too much room would let a writer go over what was not read."""
    rng = random.Random(9)
    engine, front_end, link = torn_pair(rng)

    def spoilt(index: int, value: int) -> int:
        if index == 3 or rng.random() < 0.7:
            return value
        return rng.choice([value + (1 << 40), 0, value + RING, 1 << 63])

    link.change_word = spoilt
    load = Load(front_end, random.Random(9), lambda: None)
    load.run(150)
    load.check()
    assert engine.server.cut_off() == []
    engine.server.check()


@pytest.mark.parametrize("wrong", [0, 1 << 50], ids=["went back", "too far"])
def test_words_that_stay_wrong_are_an_error(wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = [1]
    monkeypatch.setattr(pull, "time", SimpleNamespace(monotonic_ns=lambda: now_ns[0]))
    _, front_end, link = torn_pair(random.Random(10))
    load = Load(front_end, random.Random(10), lambda: None)
    load.run(20)
    before = front_end._words[cell(FRONT_END, "be_tail")]
    assert before > 0
    link.change_word = lambda index, value: wrong if index == 1 else value

    def look(times: int) -> None:
        for _ in range(times):
            assert list(front_end.receive()) == []

    look(20)
    now_ns[0] += BROKEN_AFTER_NS
    look(20)
    good, link.change_word = link.change_word, lambda index, value: value
    look(20)
    link.change_word = good
    look(20)
    now_ns[0] += BROKEN_AFTER_NS
    look(20)
    assert front_end._words[cell(FRONT_END, "be_tail")] == before
    now_ns[0] += 1
    with pytest.raises(RingError, match="its memory was overwritten"):
        look(20)


class Written:
    """An engine's block whose token ring the test writes."""

    def __init__(self) -> None:
        theirs, ours = (FrontEndMemory.create(0, (RING,) * 4) for _ in range(2))
        self.link: Any = TornLink(ours.segment, theirs.segment, lambda: None, random.Random(0))
        self.front_end = PullingFrontEnd(ours, self.link)
        self.theirs = RingWriter(*theirs.rings["token"])
        self.ours = RingWriter(*ours.rings["token"])
        for block in (theirs, ours):
            block.segment.close()

    def receive(self) -> list[Any]:
        return [record for _ in range(20) for record in self.front_end.receive()]


def test_a_record_larger_than_the_window_comes_too() -> None:
    written = Written()
    flags, body = encode_finish(RequestId(5), FinishReason.ERROR, "x" * 2000, None)
    assert len(body) > MIN_WINDOW
    assert written.theirs.write(FINISH_KIND, flags, body)
    (end,) = written.receive()
    assert (end.request_id, end.error) == (5, "x" * 2000)


def test_a_window_is_never_larger_than_the_ring() -> None:
    puller = Written().front_end._puller
    for _ in range(20):
        puller.adapt(has_more=True)
    assert puller.window == RING


def test_no_reader_looks_at_a_ring_while_a_read_lands_in_it() -> None:
    written = Written()
    is_done, written.link.is_done = written.link.is_done, lambda transfer: transfer == "written"
    assert written.receive() == []
    assert written.ours.write(TOKEN_KIND, *encode_token(Sampled(1, 2), 3))
    assert written.theirs.write(TOKEN_KIND, *encode_token(Sampled(1, 2), 3))
    assert written.receive() == []
    written.link.is_done = is_done
    assert [record.sampled for record in written.receive()] == [Sampled(1, 2)]
