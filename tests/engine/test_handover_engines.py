"""Requests move between engines in processes, over NIXL; either side may die meanwhile."""

import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from qllm import QLLMEngine, SamplingParams
from qllm.engine import pulling
from qllm.engine.parcel import read_header, seal, tensor
from qllm.engine.pulling import Puller, give
from qllm.errors import CheckpointError, ConfigError, EngineClosedError, QllmError
from qllm.frontend.handle import Handle, Result
from qllm.frontend.open import Open
from qllm.frontend.request_log import RequestLog
from qllm.ingress.messages import Source
from qllm.ingress.remote import meeting
from qllm.ingress.remote.meeting import Address, Meeting, MeetingError, Wire
from qllm.types import FinishReason
from tests.support.engines import free_port, freeze, pid_of, save_model
from tests.support.handover import SAMPLED, SECRET, SETTINGS, TEXT, same
from tests.support.serving import until

GREEDY = SamplingParams(temperature=0, ignore_eos=True, logprobs=1)
NUM = 300


@pytest.fixture(scope="module", autouse=True)
def patient() -> Iterator[None]:
    """Nobody is gone because the machine is busy, or stands still on purpose."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meeting, "HANDSHAKE_S", 120.0)
        patch.setattr(meeting, "LIVENESS_S", 120.0)
        yield


class Engine(NamedTuple):
    """An engine's process, and our front end that meets it as one of another host would."""

    owner: QLLMEngine
    far: QLLMEngine

    @property
    def moved(self) -> dict[str, int]:
        """What was handed over."""
        return dict(self.far.stats()["handover"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def secret_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("secret") / "secret"
    file.write_bytes(SECRET)
    return file


class Pair:
    """Two engines, and what a door to them does with requests that leave one of them."""

    def __init__(
        self, stack: ExitStack, model: str, secret: Path, profile: str, **how: Any
    ) -> None:
        def start(**more: Any) -> Engine:
            where = Meeting(Address("127.0.0.1", free_port()), profile, SECRET)
            settings = {**SETTINGS, "handover_gib": 0.1, "swap_kv_tokens": 2048, **more}
            made = QLLMEngine.from_pretrained(model, meeting=where, **settings)
            owner = stack.enter_context(made)
            address = str(where.address)
            far = QLLMEngine.connect(address, profile=profile, secret_file=secret)
            return Engine(owner, stack.enter_context(far))

        self.a, self.b = start(**how), start()
        self.log = RequestLog(3, lambda: None)

    def go_to(self, replay: Callable[[Open], None]) -> None:
        """Where requests go on."""
        self.log.go_on(replay)

    def submit(self, sampling: SamplingParams, at_least: int = 5) -> Handle:
        handle = self.a.far.submit(TEXT, "BE", NUM, sampling=sampling)
        self.log.keep(handle)
        until(lambda: len(handle.token_ids) >= at_least)
        return handle


@pytest.fixture(scope="module", params=["tcp", "shm"])
def pair(request: Any, model: str, secret_file: Path) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack, model, secret_file, request.param)


@pytest.fixture(scope="module")
def stayed(pair: Pair) -> dict[str, Result]:
    return {
        name: pair.a.owner.submit(TEXT, "BE", NUM, sampling=sampling).result(120)
        for name, sampling in (("greedy", GREEDY), ("sampled", SAMPLED))
    }


@pytest.mark.parametrize(("name", "sampling"), [("greedy", GREEDY), ("sampled", SAMPLED)])
def test_a_stream_goes_on_at_another_engine(
    name: str, sampling: SamplingParams, pair: Pair, stayed: dict[str, Result]
) -> None:
    pair.go_to(pair.b.far.replay)
    before = pair.b.moved
    handle = pair.submit(sampling)
    client: Any = pair.a.far._client
    client.give_away(handle.number)
    result = handle.result(120)
    assert same(result, stayed[name])
    after = pair.b.moved
    assert after["taken"] + after["missed"] == before["taken"] + before["missed"] + 1
    assert after["taken"] == before["taken"] + 1
    assert after["taken_tokens"] - before["taken_tokens"] >= len(result.prompt_token_ids)
    until(lambda: pair.a.moved["waiting_bytes"] == 0)
    assert pair.a.far.stats()["num_live"] == 0
    assert result.metrics.queue_ms is None
    assert result.metrics.ttft_ms is not None


def test_a_paused_request_moves_and_stays_paused(pair: Pair, stayed: dict[str, Result]) -> None:
    pair.go_to(pair.b.far.replay)
    before = pair.b.moved["taken"]
    handle = pair.submit(GREEDY)
    handle.pause()
    client: Any = pair.a.far._client
    client.give_away(handle.number)
    until(lambda: pair.b.moved["taken"] == before + 1)
    until(lambda: handle.status == "paused")
    handle.resume()
    assert same(handle.result(120), stayed["greedy"])


def test_nothing_is_handed_over_of_what_is_not_known(pair: Pair) -> None:
    client: Any = pair.a.far._client
    before = pair.a.moved
    client.give_away(123)
    assert pair.a.moved == before
    assert pair.a.far.submit("abc", max_tokens=2).result(60).finish_reason is not FinishReason.ERROR


def test_without_another_engine_it_goes_on_where_it_was(
    pair: Pair, stayed: dict[str, Result]
) -> None:
    handle = pair.a.far.submit(TEXT, "BE", NUM, sampling=GREEDY)  # no log keeps it
    until(lambda: len(handle.token_ids) >= 5)
    client: Any = pair.a.far._client
    client.give_away(handle.number)
    assert same(handle.result(120), stayed["greedy"])


def test_engines_that_prefill_and_decode(model: str, secret_file: Path) -> None:
    with ExitStack() as stack:
        pair = Pair(stack, model, secret_file, "tcp", role="prefill")
        plain = stack.enter_context(QLLMEngine.from_pretrained(model, **SETTINGS))
        pair.go_to(pair.b.far.replay)
        texts = [TEXT[i:] for i in range(4)]
        expected = [plain.submit(t, "LS", 40, sampling=SAMPLED).result(60) for t in texts]
        handles = [pair.a.far.submit(t, "LS", 40, sampling=SAMPLED) for t in texts]
        for handle in handles:
            pair.log.keep(handle)
        found = [handle.result(60) for handle in handles]
        assert all(map(same, found, expected))
        moved = pair.b.moved
        assert moved["taken"] + moved["missed"] >= 1
        given = pair.a.moved["given"]
        assert given >= 1


@pytest.mark.parametrize("who", ["giver", "taker"])
def test_either_side_dies_before_the_kv_is_there(who: str, model: str, secret_file: Path) -> None:
    """The request is computed: at B, or once more at A."""
    with ExitStack() as stack:
        pair = Pair(stack, model, secret_file, "tcp")
        stayed = pair.a.owner.submit(TEXT, "BE", NUM, sampling=SAMPLED).result(60)
        a, b = (pid_of(engine.owner) for engine in (pair.a, pair.b))
        announced = threading.Event()

        def replay(entry: Open) -> None:
            assert entry.source is not None
            freeze(a)  # it gives nothing
            pair.b.far.replay(entry)
            announced.set()

        pair.go_to(replay)
        handle = pair.submit(SAMPLED)
        giving = threading.Thread(target=give_away, args=(pair.a.far, handle))
        giving.start()
        assert announced.wait(300)
        if who == "giver":
            os.kill(a, signal.SIGKILL)
        else:
            os.kill(b, signal.SIGKILL)
            os.kill(a, signal.SIGCONT)
            until(lambda: pair.log.holds(handle))
            pair.go_to(pair.a.far.replay)
        assert same(handle.result(120), stayed)
        giving.join()
        if who == "giver":
            assert pair.b.moved["missed"] == 1


def give_away(engine: QLLMEngine, handle: Handle) -> None:
    """Have a request leave an engine that may be gone before it says so."""
    client: Any = engine._client
    with suppress(EngineClosedError):
        client.give_away(handle.number)


# -- the way of the bytes alone


PARCEL = seal({"of": "this"}, {"k": [torch.arange(1 << 20)], "v": [torch.arange(100)]})


def serve(profile: str, end: Any, how: str) -> None:
    """Another process that gives: all of it, or something that no giver of ours sends."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        end.send(server.getsockname()[1])
        while True:
            sock, _ = server.accept()
            wire = Wire(sock)
            try:
                wire.be_engine(SECRET)
                wire.receive()
                if how == "good":
                    give(wire, profile, PARCEL)
                elif how == "silent":
                    pulling.GIVE_S, pulling.Link.drive = 60.0, lambda _: None  # type: ignore[method-assign]
                    give(wire, profile, PARCEL)
                elif how == "refusing":
                    wire.send({"error": "no KV is kept under this ticket"})
                else:
                    wire.send({"bytes": -5, "kind": "DRAM"})
            except QllmError:
                pass
            finally:
                wire.close()


class Giver(NamedTuple):
    process: Any
    source: Source


@pytest.fixture
def giver() -> Iterator[Callable[..., Giver]]:
    made: list[Giver] = []

    def start(how: str, profile: str = "tcp") -> Giver:
        ours, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=serve, args=(profile, theirs, how), daemon=True)
        process.start()
        made.append(Giver(process, Source(f"127.0.0.1:{ours.recv()}", "0" * 32)))
        return made[-1]

    yield start
    for one in made:
        one.process.kill()
        one.process.join()


def whole(memory: memoryview, num_bytes: int) -> list[tuple[int, int]]:
    parts = read_header(memory, num_bytes).parts.values()
    return [(part.at, part.end - part.at) for part in parts]


@pytest.mark.parametrize("profile", ["tcp", "shm"])
def test_a_parcel_is_fetched_whole_or_in_part(profile: str, giver: Any) -> None:
    source = giver("good", profile).source
    puller, allowed = Puller(SECRET, profile), list[int]()
    memory = puller(source, allowed.append, whole, lambda: True)
    assert memory[:] == PARCEL[:]
    assert allowed == [len(PARCEL)]
    header = read_header(memoryview(PARCEL), len(PARCEL))
    last = header.parts["v"]
    memory = puller(source, allowed.append, lambda m, n: whole(m, n)[1:], lambda: True)
    assert torch.equal(tensor(memory, last), torch.arange(100))
    with pytest.raises(CheckpointError, match="damaged"):
        tensor(memory, header.parts["k"])


def refuse(num_bytes: int) -> None:
    raise CheckpointError(f"{num_bytes} are too many")


def test_what_is_refused_or_makes_no_sense(giver: Any) -> None:
    good, puller = giver("good").source, Puller(SECRET, "tcp")
    with pytest.raises(CheckpointError, match="too many"):
        puller(good, refuse, whole, lambda: True)
    with pytest.raises(MeetingError):
        Puller(b"another secret of the same length", "tcp")(good, print, whole, lambda: True)
    with pytest.raises(MeetingError, match="under this ticket"):
        puller(giver("refusing").source, print, whole, lambda: True)
    with pytest.raises(CheckpointError, match="makes no sense"):
        puller(giver("mad").source, print, whole, lambda: True)
    with pytest.raises(MeetingError, match="no engine answers"):
        puller(Source(f"127.0.0.1:{free_port()}", ""), print, whole, lambda: True)
    with pytest.raises(ConfigError, match="HOST:PORT"):
        puller(Source("nowhere", ""), print, whole, lambda: True)


def test_a_giver_that_dies_in_the_middle(giver: Any) -> None:
    """Over tcp nothing moves while it does not drive the link; then it is gone."""
    silent = giver("silent")
    asked = threading.Event()

    def is_wanted() -> bool:
        asked.set()
        return True

    thread = threading.Thread(target=lambda: asked.wait(60) and silent.process.kill())
    thread.start()
    with pytest.raises(QllmError):
        Puller(SECRET, "tcp")(silent.source, lambda _: None, whole, is_wanted)
    thread.join()


def test_nobody_waits_for_a_giver_that_stands_still(giver: Any) -> None:
    looks = iter([True] * 100)
    with pytest.raises(CheckpointError, match="nobody waits"):
        Puller(SECRET, "tcp")(
            giver("silent").source, lambda _: None, whole, lambda: next(looks, False)
        )
