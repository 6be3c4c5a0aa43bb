"""Requests move between engines in processes, over NIXL; either side may die meanwhile."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from qllm import QLLMEngine, SamplingParams
from qllm.engine.handover.format import read_header, tensor
from qllm.engine.handover.transfer import Puller
from qllm.errors import CheckpointError, ConfigError, EngineClosedError, QllmError
from qllm.frontend.handle import Handle, Result
from qllm.frontend.request_log import RequestLog
from qllm.frontend.saved_request import SavedRequest
from qllm.ingress.messages import Source
from qllm.ingress.remote import meeting
from qllm.ingress.remote.meeting import Address, Meeting, MeetingError
from qllm.types import FinishReason
from tests.support.engines import free_port, freeze, is_alive, pid_of, save_model
from tests.support.forked import start_program
from tests.support.handover import SAMPLED, SECRET, SETTINGS, TEXT, same
from tests.support.parcels import PARCEL
from tests.support.waiting import wait_for

GREEDY = SamplingParams(temperature=0, ignore_eos=True, logprobs=1)
NUM = 300


@pytest.fixture(scope="module", autouse=True)
def patient() -> Iterator[None]:
    """Give both sides time: a busy machine, or a process that is stopped, is not gone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meeting, "HANDSHAKE_S", 120.0)
        patch.setattr(meeting, "LIVENESS_S", 120.0)
        yield


class Engine(NamedTuple):
    """An engine's process, and our front end that meets it as one of another host would."""

    owner: QLLMEngine
    far: QLLMEngine
    stack: ExitStack

    @property
    def moved(self) -> dict[str, int]:
        """Return the counts of requests that were handed over."""
        return dict(self.far.stats()["handover"])


class Engines:
    """The engines of one profile at a time, by name; one that was killed is replaced.

    Each looks for what its front end sent 5,000 times a second, so that none stays without need.
    """

    def __init__(self, model: str, secret: Path) -> None:
        self._model, self._secret = model, secret
        self._made: dict[str, Engine] = {}
        self._profile = ""

    def pair(self, profile: str) -> "Pair":
        """Return two engines that have nothing to do and keep no KV."""
        if profile != self._profile:
            self.close()
            self._profile = profile
        for name in "ab":
            made = self._made.get(name)
            if made is None or not is_alive(pid_of(made.owner)):
                if made is not None:
                    made.stack.close()
                self._made[name] = self.start(profile)
            self._made[name].owner.reset_prefix_cache()
        return Pair(self._made["a"], self._made["b"])

    def start(self, profile: str, **how: Any) -> Engine:
        """Start one engine, and have a front end meet it."""
        stack, where = ExitStack(), Meeting(Address("127.0.0.1", free_port()), profile, SECRET)
        settings = {**SETTINGS, "handover_gib": 0.1, "swap_kv_tokens": 2048, **how}
        owner = QLLMEngine.from_pretrained(self._model, meeting=where, **settings)
        stack.enter_context(owner)
        far = QLLMEngine.connect(str(where.address), profile=profile, secret_file=self._secret)
        return Engine(owner, stack.enter_context(far), stack)

    def check_idle(self) -> None:
        """Check that no engine has a request."""
        for made in self._made.values():
            if is_alive(pid_of(made.owner)):
                wait_for(lambda one=made: one.owner.stats()["num_live"] == 0)

    def close(self) -> None:
        """Close all of them."""
        while self._made:
            self._made.popitem()[1].stack.close()


class Pair:
    """Two engines, and what a door to them does with requests that leave one of them."""

    def __init__(self, a: Engine, b: Engine) -> None:
        self.a, self.b = a, b
        self.log = RequestLog(3, lambda: None)

    def go_to(self, replay: Callable[[SavedRequest], None]) -> None:
        """Replay every request by a function."""
        self.log.go_on(replay)

    def submit(self, sampling: SamplingParams, at_least: int = 5) -> Handle:
        handle = self.a.far.submit(TEXT, "BE", NUM, sampling=sampling)
        self.log.keep(handle)
        wait_for(lambda: len(handle.token_ids) >= at_least)
        return handle


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def all_engines(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    secret = tmp_path_factory.mktemp("secret") / "secret"
    secret.write_bytes(SECRET)
    engines = Engines(model, secret)
    yield engines
    engines.close()


@pytest.fixture
def engines(all_engines: Engines) -> Iterator[Engines]:
    yield all_engines
    all_engines.check_idle()


@pytest.fixture(scope="module", params=["shm", "tcp"])
def profile(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pair(profile: str, engines: Engines) -> Pair:
    return engines.pair(profile)


@pytest.fixture(scope="module")
def plain(model: str) -> Iterator[QLLMEngine]:
    """An engine that hands nothing over."""
    with QLLMEngine.from_pretrained(model, run_in="thread", **SETTINGS) as made:
        yield made


@pytest.fixture(scope="module")
def stayed(plain: QLLMEngine) -> dict[str, Result]:
    """Results of requests that stay where they are, by the kind of sampling."""
    return {
        name: plain.submit(TEXT, "BE", NUM, sampling=sampling).result(300)
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
    result = handle.result(300)
    assert same(result, stayed[name])
    after = pair.b.moved
    assert after["taken"] + after["missed"] == before["taken"] + before["missed"] + 1
    assert after["taken"] == before["taken"] + 1
    assert after["taken_tokens"] - before["taken_tokens"] >= len(result.prompt_token_ids)
    wait_for(lambda: pair.a.moved["waiting_bytes"] == 0)
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
    wait_for(lambda: pair.b.moved["taken"] == before + 1)
    wait_for(lambda: handle.status == "paused")
    handle.resume()
    assert same(handle.result(300), stayed["greedy"])


def test_nothing_is_handed_over_of_what_is_not_known(pair: Pair) -> None:
    client: Any = pair.a.far._client
    before = pair.a.moved
    client.give_away(123)
    assert pair.a.moved == before
    assert (
        pair.a.far.submit("abc", max_tokens=2).result(300).finish_reason is not FinishReason.ERROR
    )


def test_without_another_engine_it_goes_on_where_it_was(
    pair: Pair, stayed: dict[str, Result]
) -> None:
    handle = pair.a.far.submit(TEXT, "BE", NUM, sampling=GREEDY)  # no log keeps it
    wait_for(lambda: len(handle.token_ids) >= 5)
    client: Any = pair.a.far._client
    client.give_away(handle.number)
    assert same(handle.result(300), stayed["greedy"])


def test_engines_that_prefill_and_decode(engines: Engines, plain: QLLMEngine) -> None:
    texts = [TEXT[i:] for i in range(4)]
    expected = [plain.submit(t, "LS", 40, sampling=SAMPLED).result(300) for t in texts]
    decode, prefill = engines.pair("tcp").b, engines.start("tcp", role="prefill")
    with prefill.stack:
        pair = Pair(prefill, decode)
        pair.go_to(decode.far.replay)
        before = decode.moved
        handles = [prefill.far.submit(t, "LS", 40, sampling=SAMPLED) for t in texts]
        for handle in handles:
            pair.log.keep(handle)
        found = [handle.result(300) for handle in handles]
        assert all(map(same, found, expected))
        moved = decode.moved
        assert moved["taken"] + moved["missed"] > before["taken"] + before["missed"]
        assert prefill.moved["given"] >= 1


@pytest.mark.parametrize("who", ["giver", "taker"])
def test_either_side_dies_before_the_kv_is_there(
    who: str, engines: Engines, stayed: dict[str, Result]
) -> None:
    """The request is computed: at B, or once more at A."""
    pair = engines.pair("tcp")
    a, b = (pid_of(engine.owner) for engine in (pair.a, pair.b))
    before, announced = pair.b.moved["missed"], threading.Event()

    def replay(entry: SavedRequest) -> None:
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
        wait_for(lambda: pair.log.holds(handle))
        pair.go_to(pair.a.far.replay)
    assert same(handle.result(300), stayed["sampled"])
    giving.join()
    if who == "giver":
        assert pair.b.moved["missed"] == before + 1


def give_away(engine: QLLMEngine, handle: Handle) -> None:
    """Have a request leave an engine that may be gone before it says so."""
    client: Any = engine._client
    with suppress(EngineClosedError):
        client.give_away(handle.number)


# -- the way of the bytes alone


class Giver(NamedTuple):
    """A process that gives the parcel; a ticket says how."""

    address: str
    program: Any

    def source(self, how: str) -> Source:
        """Return where to ask for the parcel."""
        return Source(self.address, how)

    def silent_pid(self) -> int:
        """Return the process that answered the last silent request."""
        return int(self.program.stdout.readline())


@pytest.fixture(scope="module")
def giver() -> Iterator[Giver]:
    code = "import sys\nfrom tests.support.parcels import serve\nserve(sys.argv[1].encode())"
    with start_program(code, SECRET.decode()) as program:
        yield Giver(program.stdout.readline().strip(), program)
        program.kill()


def whole(memory: memoryview, num_bytes: int) -> list[tuple[int, int]]:
    parts = read_header(memory, num_bytes).parts.values()
    return [(part.at, part.end - part.at) for part in parts]


def test_a_parcel_is_fetched_whole_or_in_part(profile: str, giver: Giver) -> None:
    source = giver.source("good")
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


def test_what_is_refused_or_makes_no_sense(giver: Giver) -> None:
    good, puller = giver.source("good"), Puller(SECRET, "tcp")
    with pytest.raises(CheckpointError, match="too many"):
        puller(good, refuse, whole, lambda: True)
    with pytest.raises(MeetingError):
        Puller(b"another secret of the same length", "tcp")(good, print, whole, lambda: True)
    with pytest.raises(MeetingError, match="under this ticket"):
        puller(giver.source("refusing"), print, whole, lambda: True)
    with pytest.raises(CheckpointError, match="makes no sense"):
        puller(giver.source("mad"), print, whole, lambda: True)
    with pytest.raises(MeetingError, match="no engine answers"):
        puller(Source(f"127.0.0.1:{free_port()}", ""), print, whole, lambda: True)
    with pytest.raises(ConfigError, match="HOST:PORT"):
        puller(Source("nowhere", ""), print, whole, lambda: True)


def test_a_giver_that_dies_in_the_middle(giver: Giver) -> None:
    """Over tcp nothing moves while it does not drive the link; then it is gone."""
    asked = threading.Event()

    def is_wanted() -> bool:
        asked.set()
        return True

    def kill() -> None:
        assert asked.wait(60)
        os.kill(giver.silent_pid(), signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(QllmError):
        Puller(SECRET, "tcp")(giver.source("silent"), lambda _: None, whole, is_wanted)
    thread.join()


def test_a_fetch_that_is_not_wanted_any_more_ends_though_the_giver_stands_still(
    giver: Giver,
) -> None:
    looks = iter([True] * 100)
    with pytest.raises(CheckpointError, match="nobody waits"):
        Puller(SECRET, "tcp")(
            giver.source("silent"), lambda _: None, whole, lambda: next(looks, False)
        )
    giver.silent_pid()
    assert next(looks, None) is None
