"""Front ends that fetch their tokens: real NIXL, the native server in a device's place."""

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from qllm.device.server import attach
from qllm.engine.remote import offer, peer_from
from qllm.errors import ConfigError
from qllm.frontend.handle import Handle
from qllm.frontend.remote import RemoteClient
from qllm.ingress.front_end import FrontEnd
from qllm.ingress.layout import NUMBER_BITS
from qllm.ingress.memory import FrontEndMemory
from qllm.ingress.remote import nixl as transport
from qllm.ingress.remote.nixl import NAP_NS, Link, NixlError
from qllm.ingress.remote.pull import MIN_NAP_NS, MIN_WINDOW, LinkDriver, PullingFrontEnd
from qllm.ingress.shm import Doorbell
from qllm.types import FinishReason, RequestId, RequestStatus
from tests.support.forked import start_program
from tests.support.pull_load import Load
from tests.support.pulled import Answerer, Met, block_of, submission, tokens_of
from tests.support.waiting import wait_for

RING = 1 << 14


class Pair:
    """A front end and an engine of one process, with memory of their own and a link."""

    def __init__(self, profile: str, ring_bytes: int = RING) -> None:
        self.engine, self.block = Answerer(), block_of(0, ring_bytes)
        self.block.attach_to(self.engine.server)
        self.ours = FrontEndMemory.create(0, (ring_bytes,) * 4)
        name = os.urandom(4).hex()
        self.far = Link(f"engine-{name}", profile, self.block.memory, is_pulled=True)
        self.link = Link(f"front-end-{name}", profile, self.ours.segment)
        self.link.connect(self.far.offer)
        self.far.connect(self.link.offer)
        self.front_end = PullingFrontEnd(self.ours, self.link)

    def step(self) -> None:
        self.far.drive()
        self.engine.step()

    def settle(self) -> None:
        """Let the READ under way end; a link may have failed."""
        limit = time.monotonic() + 60
        while self.link._reads and self.far._memory and time.monotonic() < limit:
            with suppress(NixlError):
                self.far.drive()
                self.link.is_done(min(self.link._reads))

    def close(self) -> None:
        self.settle()
        self.front_end.close()
        self.far.close()
        for memory in (self.engine.control.segment, self.block, self.ours.segment):
            memory.close()


@pytest.fixture(params=["shm", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(request.param)
    yield made
    made.close()


def over_shared_memory(num_requests: int, seed: int) -> Load:
    """The same requests through shared memory."""
    engine, block = Answerer(), FrontEndMemory.create(0, (RING,) * 4)
    attach(engine.server, block)
    bell, tokens = Doorbell.create(), Doorbell.create()
    load = Load(
        FrontEnd(block, engine.control, bell, tokens), random.Random(seed), lambda: engine.step()
    )
    load.run(num_requests, cancels=0)
    return load


def test_tokens_are_those_over_shared_memory_each_once(pair: Pair) -> None:
    load = Load(pair.front_end, random.Random(1), pair.step)
    load.run(200, cancels=0)
    load.check()
    near = over_shared_memory(200, 1)
    assert load.tokens == near.tokens
    assert load.ends == near.ends
    assert sum(map(len, load.tokens.values())) > 800
    assert pair.front_end.num_waiting == 0
    assert pair.far.offer.is_pulled
    assert not pair.link.offer.is_pulled


def test_the_host_of_the_engine_posts_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """It drives the link, as UCX emulates here; no transfer is its own."""
    monkeypatch.setattr(pair.far, "_begin", lambda *what: pytest.fail("the engine's host posts"))
    load = Load(pair.front_end, random.Random(2), pair.step)
    load.run(20)
    load.check()
    assert pair.far._under_way == {}


def test_cancels_end_what_runs(pair: Pair) -> None:
    load = Load(pair.front_end, random.Random(3), pair.step)
    load.run(300, cancels=0.5)
    load.check()
    ends = list(load.ends.values())
    assert 10 < ends.count(FinishReason.CANCELLED) < 200
    pair.engine.server.check()


def test_full_rings_hold_up_both_ways_and_lose_nothing() -> None:
    pair = Pair("shm", 1 << 12)
    turns = random.Random(4)

    def now_and_then() -> None:
        pair.far.drive()
        if turns.random() < 0.2:
            pair.engine.step()

    load = Load(pair.front_end, random.Random(4), now_and_then)
    load.run(150, cancels=0.1, in_flight=60)
    load.check()
    assert load.num_full > 10
    # A front end that does not look: tokens stay in the engine until it does.
    late = 1 << 20
    for n in range(64):
        load.submit(late + n)
    for _ in range(400):
        pair.step()
        pair.front_end._mirror.ring()
    assert pair.engine.server.counters(0)["owing"] > 0
    load.until(lambda: len(load.ends) == len(load.asked))
    load.check()
    assert load.num_records * 64 > 10 * (1 << 12), "the ring was never gone round"
    pair.close()


def test_one_read_fetches_a_bounded_window_that_follows_the_load(pair: Pair) -> None:
    sizes: list[int] = []
    fetch = pair.link.fetch

    def seen(ranges: Any) -> Any:
        sizes.append(sum(size for _, _, size in ranges) - 32)
        for ours, theirs, size in ranges[1:]:
            assert ours == theirs, "the ring lies at the same place"
            start = pair.ours.offsets["token"]
            assert start <= ours < ours + size <= start + RING
        return fetch(ranges)

    pair.link.fetch = seen  # type: ignore[method-assign]
    load = Load(pair.front_end, random.Random(5), lambda: None)
    load.look()
    assert set(sizes) == {MIN_WINDOW}
    for n in range(60):
        load.submit(n)
    for _ in range(200):  # the front end does not look
        pair.step()
        pair.front_end._mirror.ring()
    load.between = pair.step
    load.until(lambda: len(load.ends) == 60)
    assert max(sizes) > 2 * MIN_WINDOW
    for _ in range(100):
        load.look()
    assert sizes[-1] == MIN_WINDOW
    assert max(sizes) <= RING
    load.check()


def test_it_naps_longer_while_nothing_comes(pair: Pair) -> None:
    load = Load(pair.front_end, random.Random(6), pair.step)
    load.run(3)
    for _ in range(50):
        load.look()
    while pair.front_end._puller.is_under_way:
        load.look()
    assert pair.front_end.nap_s == NAP_NS / 1e9
    load.submit(99)
    load.until(lambda: 99 in load.ends)
    assert pair.front_end.nap_s == MIN_NAP_NS / 1e9


def test_a_read_that_fails_is_an_error_and_a_closed_front_end_is_silent(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(ranges: Any) -> Any:
        raise NixlError("a READ over NIXL failed")

    list(pair.front_end.receive())
    while pair.front_end._puller.is_under_way:
        pair.far.drive()
        list(pair.front_end.receive())
    monkeypatch.setattr(pair.link, "fetch", fail)
    with pytest.raises(NixlError, match="a READ"):
        list(pair.front_end.receive())
    pair.front_end.close()
    assert list(pair.front_end.receive()) == []
    pair.front_end.submit(submission(0, 0, 1, 1))


def test_a_link_that_is_closed_waits_for_its_read_and_else_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair, stuck = Pair("tcp"), []
    monkeypatch.setattr(transport, "_STUCK", stuck)
    load = Load(pair.front_end, random.Random(11), pair.step)
    load.run(3)
    pair.settle()
    while not pair.link._reads:
        list(pair.front_end.receive())
    pair.link.close()
    assert stuck == [pair.link], "the target did not go on: the READ may still land"
    assert len(pair.link._reads) == 1
    pair.close()
    kept.append(pair)

    pair = Pair("tcp")
    load = Load(pair.front_end, random.Random(11), pair.step)
    load.run(3)
    pair.settle()
    while not pair.link._reads:
        list(pair.front_end.receive())
    links = LinkDriver("tcp", lambda number, why: None)
    links.add(0, pair.far)
    pair.front_end.close()
    assert len(stuck) == 1
    links.close()
    pair.close()


kept: list[Pair] = []
"""Memory in which a READ may land."""


def test_a_driver_drives_until_a_link_fails_and_closes_what_leaves() -> None:
    pair, broken = Pair("tcp"), []
    links = LinkDriver("tcp", lambda number, why: broken.append((number, why)))
    links.add(7, pair.far)
    load = Load(pair.front_end, random.Random(7), pair.engine.step)
    load.run(10)
    load.check()

    def fail() -> None:
        raise NixlError("gone")

    pair.far.drive = fail  # type: ignore[method-assign]
    wait_for(lambda: broken)
    assert broken == [(7, "gone")]
    assert pair.far._memory is None
    links.remove(7)
    links.add(8, pair.link)
    links.close()
    assert pair.link._memory is None
    pair.close()


def test_an_offer_names_the_memory_and_the_side_that_fetches(pair: Pair) -> None:
    message = json.loads(json.dumps(offer(pair.far)))
    assert peer_from(message) == pair.far.offer
    assert {name: message[name] for name in ("kind", "device", "is_pulled")} == {
        "kind": "DRAM", "device": 0, "is_pulled": True,
    }  # fmt: skip
    for wrong in ({"kind": "FILE"}, {"is_pulled": 1}, {"device": "x"}, {"kind": None}):
        with pytest.raises(ValueError, match=r"an offer of|invalid literal"):
            peer_from({**message, **wrong})
    for missing in ("kind", "device", "is_pulled"):
        with pytest.raises(KeyError):
            peer_from({name: value for name, value in message.items() if name != missing})


# -- two processes


@contextmanager
def engine_process(profile: str, front_ends: int, ring_bytes: int = RING) -> Iterator[str]:
    code = "from tests.support.pulled import main\nmain()"
    with start_program(code, profile, str(front_ends), str(ring_bytes)) as process:
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def nap(met: Met) -> Callable[[], None]:
    """What a load of it does while it waits."""
    return lambda: time.sleep(met.front_end.nap_s / 4)


@pytest.mark.parametrize(
    "num_requests",
    [250, pytest.param(1300, marks=pytest.mark.slow)],  # the smaller number in the short lane
)
@pytest.mark.parametrize("profile", ["shm", "tcp"])
def test_thousands_of_records_between_two_processes(profile: str, num_requests: int) -> None:
    with engine_process(profile, 2) as address:
        mets = [Met(address, profile) for _ in range(2)]
        for met in mets:
            assert met.peer.is_pulled
            assert (met.peer.kind, met.peer.device) == ("DRAM", 0)
        with pytest.raises(ConfigError, match="all rings are taken"):
            Met(address, profile)
        loads = [Load(met.front_end, random.Random(n), nap(met)) for n, met in enumerate(mets)]
        for load in loads:
            load.run(num_requests, in_flight=200)
            load.check()
            assert FinishReason.CANCELLED in load.ends.values()
        assert sum(load.num_records + len(load.asked) for load in loads) > 8 * num_requests
        assert mets[1].ask("stats") == {"live": 0, "held": 0}
        for met in mets:
            met.close()


def test_a_front_end_that_dies_frees_its_own_requests_and_no_others() -> None:
    dying = f"""
import sys, time
from tests.support.pulled import Met, submission
met = Met(sys.argv[1], "tcp")
for n in range(40):
    met.front_end.submit(submission(met.block.number << {NUMBER_BITS} | n, 10, 50, 200))
while met.ask("stats")["held"] < 30:  # they are pushed; no token is taken
    met.front_end._mirror.pump()
print("runs", flush=True)
time.sleep(60)
"""
    with engine_process("tcp", 2, 1 << 15) as address:
        met = Met(address, "tcp")
        load = Load(met.front_end, random.Random(8), nap(met))
        with start_program(dying, address) as process:
            assert process.stdout.readline() == "runs\n"
            load.run(50)
            assert met.ask("stats")["held"] >= 30
            process.send_signal(signal.SIGKILL)
            load.until(lambda: met.ask("stats")["held"] == 0)
        for n in range(50, 90):
            load.submit(n)
        load.until(lambda: len(load.ends) == len(load.asked))
        load.check()
        met.close()


def test_a_host_meets_an_engine_that_does_not_push() -> None:
    with engine_process("tcp", 1) as address:
        client = RemoteClient.connect(address, "tcp", None)
        assert isinstance(client._front_end, PullingFrontEnd)
        handles = []
        for n in range(20):
            handle = Handle(
                number=RequestId(n), request_id=str(n), prompt_token_ids=(0,), detokenizer=None,
                cancel=client.cancel, status=lambda _: RequestStatus.RUNNING,
                update=client.update,
            )  # fmt: skip
            client.submit(submission(n, n % 2 * 10, 1, 5 + n), handle)
            handles.append(handle)
        for n, handle in enumerate(handles):
            assert list(handle.result(300).token_ids) == tokens_of(n, 5 + n)
        assert client.num_waiting == 0
        assert client.hello.model == "one line"
        client.close()
