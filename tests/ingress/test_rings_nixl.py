"""Rings over NIXL, which emulates RDMA in software here."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qllm.errors import ConfigError, QueueFullError
from qllm.ingress import CONTROL, Cancel
from qllm.ingress.codec import End
from qllm.ingress.memory import ControlMemory, FrontEndMemory
from qllm.ingress.remote import nixl as transport
from qllm.ingress.remote.nixl import Link, NixlError, NixlFrontEnd, NixlIngress
from qllm.ingress.shm import Doorbell, RingSink
from qllm.plan import ANY_ARRIVAL
from qllm.types import FinishReason, Sampled
from tests.support.files import ROOT
from tests.support.forked import start_program
from tests.support.shm_rig import ids_of, submission
from tests.support.waiting import wait_for


class Pair:
    """A front end and an engine with memory of their own and a link between them."""

    def __init__(self, profile: str) -> None:
        names = ("front-end", "engine")
        self.blocks = [FrontEndMemory.create(0, (1 << 14,) * 4) for _ in names]
        self.links = [
            Link(f"{name}-{os.urandom(4).hex()}", profile, block.segment)
            for name, block in zip(names, self.blocks, strict=True)
        ]
        self.links[0].connect(self.links[1].offer)
        self.links[1].connect(self.links[0].offer)
        self.broken: list[str] = []
        self.control, self.bell = ControlMemory.create(0), Doorbell.create()
        self.ingress = NixlIngress(
            self.control,
            self.bell,
            time.monotonic_ns,
            lambda: None,
            lambda _, why: self.broken.append(why),
        )
        self.ingress.attach_over(self.blocks[1], self.links[1])
        self.front_end = NixlFrontEnd(self.blocks[0], self.links[0])
        self.got: list[Any] = []

    def until(self, condition: Callable[[], Any]) -> None:
        wait_for(condition, meanwhile=lambda: self.got.extend(self.front_end.receive()))

    def close(self) -> None:
        for link in self.links:
            link.close()
        self.bell.close()
        for segment in (self.control.segment, *(block.segment for block in self.blocks)):
            segment.close_fd()


@pytest.fixture(params=["shm", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(request.param)
    yield made
    made.close()


def test_a_request_there_and_its_tokens_back(pair: Pair) -> None:
    stop = pair.ingress.stop
    assert stop.word == ANY_ARRIVAL
    assert stop.watch().look_ns < 1_000_000, "links move while `word` is read, and only then"
    pair.front_end.submit(submission(0, 10, 300, 1))
    pair.until(lambda: stop.word == 10)
    pair.front_end.submit(submission(1, 0, 4, 2))
    pair.until(lambda: stop.word == 0)
    pair.front_end.cancel(Cancel(0))
    pair.until(lambda: stop.word == CONTROL)
    items = pair.ingress.drain()
    assert ids_of(items) == [0, 1, 0]
    assert items[0].token_ids == tuple(range(300))
    assert stop.word == ANY_ARRIVAL
    pair.ingress.decided(num_live=2, num_waiting=1)
    sink = RingSink(pair.ingress.ports)
    for n in range(300):
        sink.on_token(Sampled(1, n), n)
    sink.on_finish(1, FinishReason.LENGTH, None, None)
    pair.until(lambda: pair.ingress.drain() or (pair.got and isinstance(pair.got[-1], End)))
    assert [item.sampled.token_id for item in pair.got[:-1]] == list(range(300))
    assert pair.front_end.num_waiting == 1
    assert pair.broken == []


def test_a_full_ring_says_so_and_has_room_again(pair: Pair) -> None:
    with pytest.raises(QueueFullError):
        _fill(pair)
    taken: list[int] = []

    def is_empty() -> bool:
        taken.extend(ids_of(pair.ingress.drain()))
        return pair.front_end.ls.num_used == 0

    pair.until(is_empty)
    assert taken == list(range(len(taken)))
    assert len(taken) > 5
    pair.front_end.submit(submission(1000, 0, 100, 1))
    pair.until(lambda: ids_of(pair.ingress.drain()) == [1000])


def _fill(pair: Pair) -> None:
    for number in range(1000):
        pair.front_end.submit(submission(number, 0, 100, number))


def test_an_idle_engine_naps_and_sees_what_comes(pair: Pair) -> None:
    assert pair.ingress.drain() == []
    start = time.monotonic()
    pair.ingress.wait(20_000_000)
    assert time.monotonic() - start >= 0.02
    pair.front_end.submit(submission(0, 0, 4, 1))
    pair.ingress.wait(None)
    pair.until(lambda: ids_of(pair.ingress.drain()) == [0])


def test_a_link_that_fails_cuts_its_front_end_off(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(transfer: Any) -> bool:
        raise NixlError("a WRITE over NIXL ended in ERR")

    pair.front_end.submit(submission(0, 0, 4, 1))
    pair.until(lambda: pair.ingress.stop.word == 0)
    monkeypatch.setattr(pair.links[1], "is_done", fail)
    pair.until(lambda: pair.ingress.drain() or pair.broken)
    assert pair.ingress.ports == {}
    assert pair.ingress.drain() == []
    pair.ingress.wait(1_000_000)


@pytest.mark.parametrize("how", ["a push is under way", "a push has failed"])
def test_an_agent_ends_with_its_link_even_if_other_parts_are_referenced(
    how: str, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended with the last transfer that anybody kept, on the thread of a garbage collection."""
    link, front_end = pair.links[0], pair.front_end
    if how == "a push has failed":

        def fail(_: Any) -> str:
            raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")

        monkeypatch.setattr(link._agent, "check_xfer_state", fail)
    else:
        monkeypatch.setattr(link, "is_done", lambda _: False)
    front_end.submit(submission(0, 0, 4, 1))
    if how == "a push has failed":
        with pytest.raises(NixlError, match="REMOTE_DISCONNECT"):
            list(front_end.receive())
        monkeypatch.setattr(link._agent, "check_xfer_state", lambda _: "DONE")
    assert len(link._under_way) == 1
    monkeypatch.undo()
    agent = link._agent.agent  # what is in C++
    front_end.close()
    assert sys.getrefcount(agent) == 2, "ours, and that of the question"


def test_real_rdma_is_never_emulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    segment = FrontEndMemory.create(0, (1 << 12,) * 4).segment
    monkeypatch.setattr(transport, "RDMA_DEVICES", tmp_path)
    with pytest.raises(ConfigError, match=r"profile='rdma' needs an RDMA device .* lists none"):
        Link("a", "rdma", segment)
    with pytest.raises(ConfigError, match="profile='ib' is unknown; use one of rdma, shm, tcp"):
        Link("a", "ib", segment)
    assert transport.PROFILES["rdma"].environment["UCX_PROTO_EMULATION_ENABLE"] == "n"
    assert "tcp" not in transport.PROFILES["rdma"].environment["UCX_TLS"]
    segment.close_fd()


@pytest.mark.parametrize(
    "num_records",
    [1000, pytest.param(3000, marks=pytest.mark.slow)],  # the smaller number in the short lane
)
@pytest.mark.parametrize("profile", ["shm", "tcp"])
def test_processes_lose_nothing(profile: str, num_records: int) -> None:
    script = str(ROOT / "scripts" / "soak_rings.py")
    code = f"import runpy; runpy.run_path({script!r}, run_name='__main__')"
    with start_program(code, "--records", str(num_records), "--over", profile) as process:
        said = json.loads(process.stdout.read().splitlines()[-1])
        assert process.wait(300) == 0
    assert said["ok"] is True
    assert said["records"] >= num_records
