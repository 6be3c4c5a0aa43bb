"""The shm transport: both of its ends, in one process."""

import json
import math
import platform
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from qllm.errors import ConfigError, InvalidRequestError, QueueFullError
from qllm.ingress import CONTROL, Call, Cancel, Submission, codec
from qllm.ingress.ends import PYTHON_ENDS, ring_ends
from qllm.ingress.layout import NUMBER_BITS
from qllm.ingress.memory import ControlMemory, EngineStats, FrontEndMemory
from qllm.ingress.ring import RingWriter
from qllm.ingress.shm import BEAT_NS
from qllm.ingress.words import OrderedWords
from qllm.plan import ANY_ARRIVAL
from qllm.types import NS_PER_S, FinishReason, Sampled
from tests.support.shm_rig import Rig, ids_of, submission
from tests.support.watching import has_changed


@pytest.fixture(params=["x86_64", "aarch64"])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Ends, and words of shared memory, as a machine of this kind takes them."""
    monkeypatch.setattr(platform, "machine", lambda: request.param)
    ring_ends.cache_clear()
    yield request.param
    ring_ends.cache_clear()


def test_a_machine_of_weaker_order_takes_ends_in_cpp_or_none(
    machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = ControlMemory.create(5)
    block = FrontEndMemory.create(3, (4096,) * 4)
    words = control.words, block.rings["ls"][1], block.segment.words
    is_ordered = machine != "x86_64"
    assert (ring_ends() is PYTHON_ENDS) is not is_ordered
    assert all(isinstance(each, OrderedWords) is is_ordered for each in words)
    control.stop, control.heartbeat_ns = True, (1 << 63) - 1
    control.write_stats(EngineStats(1, 2, 3))
    assert (control.stop, control.zero_ns) == (True, 5)
    assert control.heartbeat_ns == (1 << 63) - 1
    assert control.read_stats() == EngineStats(1, 2, 3)
    assert (block.number, block.capacities) == (3, (4096,) * 4)
    with pytest.raises(IndexError):
        control.words[len(control.words)]
    ring_ends.cache_clear()
    monkeypatch.setitem(sys.modules, "qllm.ingress._ends", None)
    if is_ordered:
        with pytest.raises(ConfigError, match=r"need x86-64.*install qllm where a C\+\+ compiler"):
            ControlMemory.create(0)
    else:
        ControlMemory.create(0)


@pytest.mark.usefixtures("machine")
def test_what_was_put_before_the_bell_is_there_after_it(make_rig: Callable[..., Rig]) -> None:
    """Requests, a cancel, tokens and a full token ring, with the ends of either machine."""
    rig = make_rig(capacity=4096)
    ids = [rig.submit(number, priority=number % 2 * 10) for number in range(4)]
    assert rig.ingress.stop.word == 0
    assert sorted(ids_of(rig.ingress.drain())) == ids
    rig.front_ends[0].cancel(Cancel(ids[0], FinishReason.CANCELLED))
    assert ids_of(rig.ingress.drain()) == ids[:1]
    for token_id in range(500):
        rig.sink.on_token(Sampled(ids[1], token_id), token_id)
    heard: list[int] = []
    while len(heard) < 500:
        rig.ingress.flush()
        new = [item.sampled.token_id for item in rig.front_ends[0].receive()]  # type: ignore[union-attr]
        assert new, "tokens of the backlog are lost"
        heard += new
    assert heard == list(range(500))


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(**options: Any) -> Rig:
        rigs.append(Rig(**options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


def test_the_word_follows_arrivals_until_they_are_drained(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    word = rig.ingress.stop
    assert word.word == ANY_ARRIVAL
    assert not has_changed(word.watch())
    rig.submit(0, priority=10)
    assert has_changed(word.watch())
    assert word.word == 10
    assert not has_changed(word.watch())
    rig.submit(1, priority=0)
    assert has_changed(word.watch())
    arrived = rig.now
    assert word.word == 0
    assert word.lowered_ns == arrived
    rig.submit(2, priority=10)
    assert word.word == 0
    assert word.lowered_ns == arrived
    rig.front_ends[0].cancel(Cancel(1))
    assert word.word == CONTROL
    items = rig.ingress.drain()
    assert ids_of(items[:3]) == [0, 1, 2]
    assert items[3] == Cancel(1)
    assert word.word == ANY_ARRIVAL
    assert rig.ingress.drain() == []


def test_a_call_of_this_process_lowers_the_word(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    call = Call(lambda: 1, lambda *_: None)
    rig.ingress.put(call)
    assert rig.ingress.stop.word == CONTROL
    assert rig.ingress.drain() == [call]
    assert rig.ingress.stop.word == ANY_ARRIVAL


def test_the_stop_cell_closes_the_loop_once(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.front_ends[0].stop()
    assert rig.ingress.stop.word == CONTROL
    (call,) = rig.ingress.drain()
    call.function()
    assert rig.closed == [1]
    assert rig.ingress.drain() == []


def test_classes_have_rings_apart(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(capacity=1 << 14)
    with pytest.raises(QueueFullError, match="the ring for BE requests is full"):
        rig.fill(priority=10)
    number = rig.front_ends[0].num_waiting
    rig.submit(number, priority=9)  # the LS ring has room
    with pytest.raises(InvalidRequestError, match="too large"):
        rig.submit(2000, priority=0, size=1 << 13)
    assert ids_of(rig.ingress.drain()) == list(range(number + 1))
    rig.submit(3000, priority=10, size=100)
    assert ids_of(rig.ingress.drain()) == [3000]


def test_a_refused_request_leaves_the_counts_as_they_were(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(capacity=1 << 12)
    front_end = rig.front_ends[0]
    with pytest.raises(QueueFullError):
        rig.fill(priority=0)
    taken = front_end.num_waiting
    assert ids_of(rig.ingress.drain()) == list(range(taken))
    assert taken > 5
    rig.ingress.decided(num_live=taken, num_waiting=3)
    assert front_end.num_waiting == 3
    rig.submit(5000)
    assert front_end.num_waiting == 4
    stats = rig.control.read_stats()
    assert (stats.num_live, stats.num_waiting, stats.num_steps) == (taken, 3, 1)
    assert rig.control.heartbeat_ns > 0


def test_front_ends_do_not_mix(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(front_ends=3)
    want = [rig.submit(n, priority=10 * (n % 2), front_end=n % 3) for n in range(12)]
    assert ids_of(rig.ingress.drain()) == want
    for request_id in want:
        rig.sink.on_token(Sampled(request_id, 7), 5)
        rig.sink.on_finish(request_id, FinishReason.STOP, None, None)
    for n, front_end in enumerate(rig.front_ends):
        ends = [item.request_id for item in front_end.receive() if isinstance(item, codec.End)]
        assert ends == [x for x in want if x >> NUMBER_BITS == n]
    rig.ingress.detach(1)
    rig.submit(50, front_end=1)
    assert rig.ingress.drain() == []
    rig.sink.on_token(Sampled(1 << NUMBER_BITS, 7), 5)
    assert list(rig.front_ends[1].receive()) == []


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, bool]]:
    """Per sleep of an ingress its limit in seconds, and whether something woke it."""
    seen: list[tuple[float, bool]] = []
    real = select.select

    def recorded(readers: Any, writers: Any, others: Any, limit_s: float) -> Any:
        found = real(readers, writers, others, limit_s)
        seen.append((limit_s, bool(found[0])))
        return found

    monkeypatch.setattr("qllm.ingress.shm.select", SimpleNamespace(select=recorded))
    return seen


def test_what_was_put_before_its_front_end_was_attached_is_seen(
    make_rig: Callable[..., Rig], sleeps: list[tuple[float, bool]]
) -> None:
    rig = make_rig(front_ends=2)
    port = rig.ingress.ports.pop(1)
    number = rig.submit(0, front_end=1)
    assert rig.ingress.drain() == []
    rig.ingress.attach(port)
    rig.ingress.wait(None)
    assert sleeps == []
    assert rig.ingress.stop.word == 0
    assert ids_of(rig.ingress.drain()) == [number]


def test_detaching_forgets_what_was_taken_and_not_drained(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(front_ends=2)
    rig.submit(0, front_end=1)
    kept = rig.submit(1, front_end=0)
    assert rig.ingress.stop.word == 0
    rig.ingress.detach(1)
    assert ids_of(rig.ingress.drain()) == [kept]


def test_a_full_token_ring_costs_no_token(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(capacity=1 << 12)
    got: list[Any] = []
    for n in range(500):
        rig.sink.on_token(Sampled(0, n), n)
        if n % 100 == 99:
            got += rig.front_ends[0].receive()  # there is room again, and a backlog before it
    rig.sink.on_finish(0, FinishReason.LENGTH, None, None)
    for _ in range(50):
        got += rig.front_ends[0].receive()
        rig.ingress.drain()
    assert [item.sampled.token_id for item in got[:-1]] == list(range(500))
    assert got[-1].reason is FinishReason.LENGTH


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["ls", "be", "cancel"]), st.integers(0, 7), st.binary(max_size=400))
@example("ls", 0, b"\xff" * 200)
@example("cancel", 0, b"\x00" * 8 + b"\x09" + b"\x00" * 7)
def test_whatever_a_front_end_writes_the_engine_lives(name: str, flags: int, body: bytes) -> None:
    rig = Rig(front_ends=2)
    try:
        RingWriter(*rig.blocks[0].rings[name]).write(1, flags, body)
        kept = rig.submit(1, front_end=1)
        items = rig.ingress.drain()
        assert kept in ids_of(items)
        if rig.broken:
            assert [number for number, _ in rig.broken] == [0]
            assert 0 not in rig.ingress.ports
        else:
            assert len(items) <= 2
    finally:
        rig.close()


def test_an_id_of_another_front_end_is_not_believed(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(front_ends=2)
    rig.front_ends[0].submit(submission(1 << NUMBER_BITS, 0, 4, 1))
    rig.front_ends[1].cancel(Cancel(1 << NUMBER_BITS))
    items = rig.ingress.drain()
    assert items == [Cancel(1 << NUMBER_BITS)]
    assert rig.broken[0][0] == 0
    assert "of another" in rig.broken[0][1]


def test_a_segment_of_another_release_is_refused(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.control.words[1] += 1
    with pytest.raises(ConfigError, match="same release of qllm on both sides"):
        ControlMemory(rig.control.segment)


def test_statistics_are_read_whole(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.ingress.decided(num_live=3, num_waiting=2)
    words, version = rig.control.words, ControlMemory._VERSION
    words[version] += 1  # as if the engine were writing
    reads = 0

    class Moving:
        def __getitem__(self, index: int) -> int:
            nonlocal reads
            reads += 1
            if reads == 30:
                words[version] += 1
            return int(words[index])

    rig.control.words = Moving()  # type: ignore[assignment]
    assert rig.control.read_stats()[1:] == (3, 2)
    assert reads > 30
    rig.control.words = words


def test_waiting_ends_at_an_arrival_or_at_its_time(
    make_rig: Callable[..., Rig], sleeps: list[tuple[float, bool]]
) -> None:
    rig = make_rig()
    assert rig.ingress.drain() == []
    rig.ingress.wait(5_000_000)
    assert sleeps == [(0.005, False)]
    rig.submit(0)
    rig.ingress.wait(None)
    assert len(sleeps) == 1, "it slept although something had come"
    rig.ingress.drain()
    rig.ingress.wait(None)
    assert sleeps[1:] == [(BEAT_NS / NS_PER_S, False)], "it was woken by what it has seen already"
    ringing = threading.Timer(0.05, rig.submit, (1,))
    ringing.start()
    rig.ingress.wait(None)
    ringing.join()
    assert sleeps[2:] in ([], [(BEAT_NS / NS_PER_S, True)]), "an arrival did not wake it"
    assert math.isfinite(rig.control.heartbeat_ns)


def test_an_arrival_during_a_look_is_seen_at_the_next(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig()
    port = rig.ingress.ports[0]
    take = port.take

    def slow_take() -> Any:
        taken = take()
        if rig.now < 20:  # it has read the rings, and has not returned
            rig.now = 20
            rig.submit(next(numbers), priority=-3)
        return taken

    numbers = iter((1, 3))
    monkeypatch.setattr(port, "take", slow_take)
    rig.submit(0, priority=10)
    assert rig.ingress.stop.word == 10
    assert rig.ingress.stop.word == -3
    rig.now = 0
    rig.submit(2, priority=10)
    assert ids_of(rig.ingress.drain()) == [0, 1, 2]
    assert rig.ingress.stop.word == -3
    assert ids_of(rig.ingress.drain()) == [3]


def test_a_cancel_comes_after_its_request_whenever_the_engine_looks(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig()
    port = rig.ingress.ports[0]
    for name in ("_cancels", "_requests"):
        ring = getattr(port, name)
        for reader in ring if name == "_requests" else (ring,):
            monkeypatch.setattr(reader, "read", _putting(rig, reader.read))
    seen: list[Any] = []
    while rig.now < 40:
        seen += rig.ingress.drain()
    submitted = set()
    for item in seen:
        if isinstance(item, Submission):
            submitted.add(item.request_id)
        else:
            assert item.request_id in submitted
    assert len(submitted) > 3


def _putting(rig: Rig, read: Callable[[], Any]) -> Callable[[], Any]:
    """Put a request and its cancel whenever a ring was found empty."""

    def reading() -> Any:
        record = read()
        if record is None and rig.now < 40:
            number = rig.now
            rig.submit(number)
            rig.front_ends[0].cancel(Cancel(number))
        return record

    return reading


@pytest.mark.parametrize(
    "num_records",
    [5000, pytest.param(20_000, marks=pytest.mark.slow)],  # the smaller number in the short lane
)
def test_front_ends_and_an_engine_in_processes_lose_nothing(num_records: int) -> None:
    script = Path(__file__).resolve().parents[2] / "scripts" / "soak_rings.py"
    command = [sys.executable, str(script), "--records", str(num_records)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["ok"] is True
    assert said["records"] >= num_records
    assert said["ring_full"] > 0, "the rings never ran full"
