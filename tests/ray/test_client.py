# One fake cluster, and what a front end promises on it, one promise per test.
"""What a front end and replicas of Ray say to each other, without Ray and without a model.

`Cluster` stands for the handle of a deployment, `Sums` for an engine whose next token is a function
of all tokens before it, so that an answer which was carried over wrongly is another one.
"""

import asyncio
import itertools
import json
import pickle
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextvars import ContextVar
from typing import Any

import pytest

from qllm.config import EngineConfig
from qllm.errors import EngineClosedError, InvalidRequestError, QueueFullError
from qllm.fleet.members import card_of
from qllm.frontend.handle import Handle
from qllm.frontend.remote import RemoteHello
from qllm.frontend.saved_request import SavedRequest
from qllm.ingress import Submission, Update
from qllm.ingress.codec import EngineMetrics
from qllm.ingress.messages import EngineCard, ModelInfo
from qllm.plan import ModelShape
from qllm.ray import client as clients
from qllm.ray import replica as replicas
from qllm.ray import scaling
from qllm.ray.client import RayClient
from qllm.ray.replica import EngineReplica
from qllm.ray.wire import Seen
from qllm.server.config import ServerConfig
from qllm.types import FinishReason, Priority, RequestStatus, Sampled, SamplingParams, Slo
from tests.support.sizes import SIZES
from tests.support.waiting import wait_for

VOCABULARY = 997


def next_token(tokens: tuple[int, ...]) -> int:
    return sum((i + 1) * t for i, t in enumerate(tokens)) % VOCABULARY


def answer(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    tokens = prompt
    for _ in range(count):
        tokens += (next_token(tokens),)
    return tokens[len(prompt) :]


class Sums:
    """An engine, and the client of it: a token for each open request at every `step`."""

    def __init__(self, numbers: Iterator[int]) -> None:
        self.config, self.failure = EngineConfig(**SIZES), None
        self.client = self.hello = self
        shape = ModelShape(
            num_layers=1,
            is_moe=(True,),
            num_experts=2,
            experts_per_token=1,
            vocab_size=VOCABULARY,
            max_position=4096,
        )
        self.info = ModelInfo("sums", shape, frozenset({3, 1}), {}, ("fast",), {}, None, "w", "s")
        self.trace_meta = {"policy": "Qllm2()"}
        self.is_full = False
        self.open: dict[int, SavedRequest] = {}
        self.paused: set[int] = set()
        self.was_told: list[Update] = []
        self._numbers = numbers

    def raise_if_closed(self) -> None:
        if self.failure is not None:
            raise EngineClosedError(self.failure)

    def close(self) -> None:
        self.open.clear()

    def replay(self, entry: SavedRequest) -> None:
        self.raise_if_closed()
        if self.is_full:
            raise QueueFullError("the ring is full")
        number = next(self._numbers)
        entry.handle.move(number, self.cancel, self.status, self.update)
        self.open[number] = entry

    def cancel(self, number: int) -> None:
        self._end(number, FinishReason.CANCELLED)

    def update(self, item: Update) -> None:
        self.was_told.append(item)
        if item.paused is not None:
            (self.paused.add if item.paused else self.paused.discard)(item.request_id)

    def status(self, number: int) -> RequestStatus:
        return RequestStatus.PAUSED if number in self.paused else RequestStatus.RUNNING

    def _end(self, number: int, reason: FinishReason) -> None:
        if (entry := self.open.pop(number, None)) is not None:
            known = EngineMetrics.unknown(1, entry.priority, len(entry.handle.prompt_token_ids))
            entry.finish(number, (reason, None), known)

    def step(self) -> None:
        for number, entry in list(self.open.items()):
            if number in self.paused:
                continue
            item = entry.rest(number)
            entry.handle.on_token(Sampled(number, next_token(item.token_ids)))
            if item.num_output_tokens + 1 >= item.max_tokens:
                self._end(number, FinishReason.LENGTH)

    def crash(self) -> None:
        self.failure = "the engine was killed"
        for number, entry in list(self.open.items()):
            del self.open[number]
            entry.handle.log.take(entry, 0, self.failure)  # type: ignore[union-attr]

    def stats(self) -> dict[str, Any]:
        return {"num_live": len(self.open)}


SERVING: ContextVar[int] = ContextVar("SERVING")
"""Which replica a task stands for."""


class DiedError(Exception):
    """As Ray raises it."""


class Cluster:
    """The handle of a deployment of replicas; a call goes to the one that has least to do.

    It stands for the router too, which tells front ends of this process what it sees.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        numbers = itertools.count(100)
        self.engines = [Sums(numbers) for _ in range(count)]
        made = iter(self.engines)
        monkeypatch.setattr(replicas, "make_engine", lambda *_, **__: next(made))
        monkeypatch.setattr(replicas, "_own_id", lambda: str(SERVING.get()))
        monkeypatch.setattr(replicas, "forgo_torch", lambda: None)  # other tests need it
        config = ServerConfig(model="sums", drain_s=0)
        self.replicas = [EngineReplica(config, None, 30.0) for _ in range(count)]
        self.alive = set(range(count))
        self.draining: set[int] = set()
        """Those that stream on, and that Ray sends nothing more."""
        self.takes_calls = threading.Event()
        self.takes_calls.set()
        self.sent: list[int] = []
        """Which replica got each request."""
        self.seen = Seen()
        self.knows_refusals = True
        """Whether calls pass replicas over that have refused."""

    def options(self, **_: Any) -> "Cluster":
        return self

    def __getattr__(self, method: str) -> Any:
        cluster = self

        class Method:
            def remote(self, *args: Any, at: str | None = None) -> Any:
                for arg in args:
                    cluster.seen = arg if isinstance(arg, Seen) else cluster.seen
                cluster.announce()
                sent = pickle.loads(pickle.dumps(args))
                if method == "generate":
                    return Stream(cluster, *sent)
                return cluster.call(method, *sent, at=at)

        return Method()

    def announce(self) -> None:
        """Say which replicas there are."""
        said = {str(i): self.replicas[i].record_replica_metadata() for i in self.running}
        self.seen.look(said)

    @property
    def running(self) -> list[int]:
        return sorted(self.alive - self.draining)

    def pick(self) -> int:
        usable = [i for i in self.running if str(i) not in self.seen.refused]
        found = usable if self.knows_refusals else self.running
        return min(found, key=lambda i: (len(self.engines[i].open), i))

    async def call(self, method: str, *args: Any, at: str | None = None) -> Any:
        found = self.pick() if at is None or int(at) in self.draining else int(at)
        if found not in self.alive:
            raise DiedError("the actor is dead")
        result = getattr(self.replicas[found], method)(*args)
        return await result if asyncio.iscoroutine(result) else result

    def broadcast(self, method: str, *args: Any) -> Any:
        cluster = self

        class Asked:
            async def results_async(self, **_: Any) -> list[Any]:
                return [await cluster.call(method, *args, at=str(i)) for i in cluster.running]

        return Asked()

    def kill(self, number: int) -> None:
        self.alive.discard(number)
        self.engines[number].open.clear()
        self.announce()

    def drain(self, number: int) -> None:
        self.draining.add(number)
        self.announce()

    def step(self) -> None:
        for i in sorted(self.alive):
            self.engines[i].step()


class Stream:
    """What a replica streams; it raises when the replica dies."""

    def __init__(self, cluster: Cluster, ask: Any) -> None:
        self._cluster, self._ask = cluster, ask

    def cancel(self) -> None:
        """Who iterates it leaves, which ends it here."""

    async def __aiter__(self) -> AsyncIterator[Any]:
        cluster = self._cluster
        while not (
            cluster.takes_calls.is_set()
            and set(cluster.running) - set(map(int, cluster.seen.refused))
        ):
            await asyncio.sleep(0.005)
        number = cluster.pick()
        cluster.sent.append(number)
        source = cluster.replicas[number].generate(self._ask)
        SERVING.set(number)
        item: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        try:
            while True:
                item = asyncio.ensure_future(anext(source, None))
                while not item.done() and number in cluster.alive:
                    await asyncio.wait([item], timeout=0.005)
                if number not in cluster.alive:
                    raise DiedError("the actor died\nand more")
                if (said := item.result()) is None:
                    return
                yield pickle.loads(pickle.dumps(said))
        finally:
            item.cancel()
            await asyncio.gather(item, return_exceptions=True)
            await source.aclose()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch, 3)


@pytest.fixture
def front(cluster: Cluster) -> Iterator[RayClient]:
    made = RayClient(cluster)
    yield made
    made.close()


def until(condition: Callable[[], Any], cluster: Cluster | None = None) -> None:
    wait_for(condition, meanwhile=cluster.step if cluster else lambda: None)


def submit(front: RayClient, *prompt: int, most: int = 12, **more: Any) -> Handle:
    with front.admission_lock:
        number = front.new_number()
        handle = Handle(
            number=number,
            request_id=f"r{number}",
            prompt_token_ids=prompt,
            detokenizer=None,
            cancel=front.cancel,
            status=front.status,
            update=front.update,
        )
        fields: dict[str, Any] = {"priority": 0, "deadline_ns": None, "slo": Slo()}
        fields |= {"arrival_ns": front.now_ns(), **more}
        item = Submission(
            request_id=number,
            name=handle.request_id,
            token_ids=prompt,
            sampling=SamplingParams(seed=1),
            stop_ids=frozenset(),
            max_tokens=most,
            **fields,
        )
        front.submit(item, handle)
    return handle


def test_answers_come_and_the_work_is_shared(cluster: Cluster, front: RayClient) -> None:
    first = submit(front, 3, 4)
    until(lambda: len(cluster.sent) == 1 and cluster.engines[0].open)
    second = submit(front, 5)
    until(lambda: second.has_ended and first.has_ended, cluster)
    assert (first.token_ids, second.token_ids) == (answer((3, 4), 12), answer((5,), 12))
    assert sorted(cluster.sent) == [0, 1]
    assert first.finish_reason is FinishReason.LENGTH
    assert first.result().metrics.num_output_tokens == 12
    assert front.num_waiting == 0
    assert front.stats()["num_live"] == 0
    until(lambda: all(not r._relays and r._load.counts() == {} for r in cluster.replicas))


def test_what_a_replica_ends_by_itself_goes_on_elsewhere(
    cluster: Cluster, front: RayClient
) -> None:
    handles = [submit(front, i + 1, 7, most=20) for i in range(4)]
    until(lambda: all(len(h.token_ids) >= 4 for h in handles), cluster)
    for relay in list(cluster.replicas[0]._relays.values()):
        relay.cancel()  # as an engine that is closed does, or a replica for its front end's silence
    until(lambda: all(handle.has_ended for handle in handles), cluster)
    assert [h.token_ids for h in handles] == [answer((i + 1, 7), 20) for i in range(4)]
    assert {h.finish_reason for h in handles} == {FinishReason.LENGTH}


@pytest.mark.parametrize("how", ["replica", "engine"])
def test_a_death_loses_and_doubles_no_token(cluster: Cluster, front: RayClient, how: str) -> None:
    handles = [submit(front, i + 1, 7, most=20) for i in range(6)]
    until(lambda: all(len(h.token_ids) >= 4 for h in handles), cluster)
    if how == "replica":
        cluster.kill(0)
    else:  # the replica is there until Ray has looked, and gets no request of ours any more
        cluster.engines[0].crash()
    until(lambda: all(handle.has_ended for handle in handles), cluster)
    assert [h.token_ids for h in handles] == [answer((i + 1, 7), 20) for i in range(6)]
    assert {h.finish_reason for h in handles} == {FinishReason.LENGTH}
    assert not any(engine.open for engine in cluster.engines)
    assert front.taken == {"0": cluster.sent[: len(handles)].count(0)}, "what it had when it went"


def test_a_request_that_kills_again_and_again_ends(cluster: Cluster, front: RayClient) -> None:
    handle = submit(front, 9, most=50)
    until(lambda: len(handle.token_ids) >= 2, cluster)
    for number in (0, 1):
        cluster.kill(number)
        until(lambda at=number + 1: cluster.engines[at].open)  # tried there, and no token yet
    cluster.kill(2)
    until(lambda: handle.has_ended)
    assert handle.finish_reason is FinishReason.ERROR
    with pytest.raises(Exception, match="3 engines died while they had this request"):
        handle.result()


def test_while_there_is_no_replica_requests_wait(cluster: Cluster, front: RayClient) -> None:
    cluster.takes_calls.clear()
    handle, given_up = submit(front, 2), submit(front, 4)
    late = submit(front, 3, deadline_ns=front.now_ns() + 50_000_000)
    until(lambda: late.has_ended)
    assert late.finish_reason is FinishReason.TIMEOUT
    assert handle.status is RequestStatus.WAITING
    assert front.num_waiting == 2
    given_up.cancel()
    until(lambda: given_up.has_ended)
    assert given_up.finish_reason is FinishReason.CANCELLED
    cluster.takes_calls.set()
    until(lambda: handle.has_ended, cluster)
    assert handle.token_ids == answer((2,), 12)


def test_a_cancel_reaches_the_engine(cluster: Cluster, front: RayClient) -> None:
    handle = submit(front, 2, most=500)
    until(lambda: handle.token_ids, cluster)
    handle.cancel()
    until(lambda: handle.has_ended)
    assert cluster.engines[0].open == {}
    assert handle.result().metrics.num_prompt_tokens == 1


def test_a_pause_and_a_class_reach_the_engine_and_go_along(
    cluster: Cluster, front: RayClient
) -> None:
    handle = submit(front, 2, most=30)
    until(lambda: handle.token_ids, cluster)
    handle.update(priority="BE")
    handle.pause()
    until(lambda: cluster.engines[0].paused)
    assert handle.status is RequestStatus.PAUSED
    assert [(u.priority, u.paused) for u in cluster.engines[0].was_told] == [
        (10, None),
        (None, True),
    ]
    cluster.kill(0)
    until(lambda: cluster.engines[1].paused)
    handle.resume()
    until(lambda: handle.has_ended, cluster)
    assert handle.token_ids == answer((2,), 30)


@pytest.fixture
def held(cluster: Cluster, front: RayClient) -> Handle:
    """A request that is paused at a replica that drains."""
    handle = submit(front, 2, most=30)
    until(lambda: len(handle.token_ids) >= 3, cluster)
    handle.pause()
    until(lambda: cluster.engines[0].paused)
    cluster.drain(0)
    return handle


def test_a_replica_that_drains_ends_what_it_has(cluster: Cluster, front: RayClient) -> None:
    handle = submit(front, 2, most=30)
    until(lambda: len(handle.token_ids) >= 3, cluster)
    cluster.drain(0)
    assert handle.status is RequestStatus.RUNNING
    other = submit(front, 3)
    until(lambda: handle.has_ended and other.has_ended, cluster)
    assert (handle.token_ids, other.token_ids) == (answer((2,), 30), answer((3,), 12))
    assert cluster.sent == [0, 1]


def test_what_is_asked_of_a_request_where_it_drains_is_done_elsewhere(
    cluster: Cluster, front: RayClient, held: Handle
) -> None:
    """Ray lets nobody tell that replica anything."""
    assert held.status is RequestStatus.PAUSED
    held.update(priority="BE")
    until(lambda: cluster.engines[1].paused)
    until(lambda: not cluster.engines[0].open)
    held.resume()
    until(lambda: held.has_ended, cluster)
    assert held.token_ids == answer((2,), 30)
    assert held.result().metrics.priority == 10
    assert (cluster.sent, front.taken) == ([0, 1], {})


def test_what_is_asked_where_the_last_replica_drains_waits_for_another(
    cluster: Cluster, front: RayClient, held: Handle
) -> None:
    cluster.draining |= {1, 2}
    cluster.announce()
    held.resume()
    time.sleep(3 * clients.LOOK_S)  # it would have gone on by then
    assert cluster.engines[0].open
    cluster.draining.remove(2)
    cluster.announce()
    until(lambda: held.has_ended, cluster)
    assert held.token_ids == answer((2,), 30)
    assert cluster.sent == [0, 2]


def test_a_cancel_reaches_a_replica_that_drains(cluster: Cluster, held: Handle) -> None:
    cluster.draining |= {1, 2}
    cluster.announce()
    held.cancel()
    until(lambda: held.has_ended)
    assert held.finish_reason is FinishReason.CANCELLED
    until(lambda: not cluster.engines[0].open)


def test_who_waits_too_short_does_not_stand_against_the_tokens(
    cluster: Cluster, front: RayClient
) -> None:
    """It asks for the status with the handle's lock, which whoever delivers tokens takes."""
    handle = submit(front, 2, most=100_000)
    until(lambda: handle.token_ids, cluster)
    stop = threading.Event()

    def compute() -> None:
        while not stop.wait(0.0005):
            cluster.step()

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        for _ in range(20):
            with pytest.raises(TimeoutError, match="is running"):
                handle.result(timeout=0.001)
    finally:
        stop.set()
        thread.join()
    handle.cancel()


def test_another_model_is_refused_by_the_replica(cluster: Cluster, front: RayClient) -> None:
    cluster.replicas[0]._identity = "another"
    handle = submit(front, 2)
    until(lambda: handle.has_ended, cluster)
    assert handle.token_ids == answer((2,), 12)
    assert cluster.sent == [0, 1], "it was refused there, and is asked no more"
    assert "another model or version" in cluster.seen.refused["0"]


def test_a_replica_without_an_engine_costs_a_request_none_of_its_lives(
    cluster: Cluster, front: RayClient
) -> None:
    """Ray asks replicas for their health now and then; until then calls may go to a dead engine."""
    handle = submit(front, 2, most=40)
    until(lambda: len(handle.token_ids) >= 3, cluster)
    cluster.engines[1].failure = cluster.engines[2].failure = "the engine was killed"
    cluster.engines[0].crash()
    until(lambda: len(cluster.seen.refused) == 3)
    assert not handle.has_ended
    cluster.engines[2].failure = None  # as a new replica
    cluster.seen.refused.clear()
    until(lambda: handle.has_ended, cluster)
    assert handle.token_ids == answer((2,), 40)
    assert handle.finish_reason is FinishReason.LENGTH


def test_a_refusal_is_no_death_where_nothing_is_carried_over(cluster: Cluster) -> None:
    front = RayClient(cluster, max_replays=0)
    cluster.engines[0].failure = "the engine was killed"
    handle = submit(front, 2)
    until(lambda: handle.has_ended, cluster)
    assert handle.token_ids == answer((2,), 12)
    other = submit(front, 3)
    until(lambda: other.token_ids, cluster)
    cluster.kill(1)
    until(lambda: other.has_ended)
    assert other.finish_reason is FinishReason.ERROR
    front.close()


def test_a_full_engine_is_asked_again_and_its_request_is_not_lost(
    cluster: Cluster, front: RayClient
) -> None:
    for engine in cluster.engines:
        engine.is_full = True
    handle = submit(front, 2)
    until(lambda: len(cluster.sent) >= 2)
    for engine in cluster.engines:
        engine.is_full = False
    until(lambda: handle.has_ended, cluster)
    assert handle.token_ids == answer((2,), 12)
    assert cluster.seen.refused == {}


def test_a_full_engine_is_left_alone_for_a_while(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "LOOK_S", 3600)
    front = RayClient(cluster)
    for engine in cluster.engines:
        engine.is_full = True
    handle = submit(front, 2)
    until(lambda: front.log.holds(handle))
    for _ in range(20):  # each goes through the loop on which it would be asked
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0.01), front._front_end._loop).result(300)
    assert len(cluster.sent) == 1
    front.close()
    assert handle.finish_reason is FinishReason.CANCELLED


def test_from_its_first_word_the_replica_minds_the_deadline(
    cluster: Cluster, front: RayClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two clocks would end it, one of them without what the engine knows of it."""
    limits: list[Any] = []

    class Limit:
        def __init__(self, after_s: float | None) -> None:
            limits.append(after_s)

        def reschedule(self, when: float | None) -> None:
            limits.append(when)

        async def __aenter__(self) -> "Limit":
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(clients.asyncio, "timeout", Limit)
    handle = submit(front, 2, deadline_ns=front.now_ns() + 3600 * 10**9)
    until(lambda: handle.has_ended, cluster)
    assert limits[0] > 3000
    assert set(limits[1:]) == {None}


def test_without_a_replica_a_server_refuses_and_a_batch_job_waits(
    cluster: Cluster, front: RayClient
) -> None:
    server = RayClient(cluster, waits=False)
    kept = submit(server, 8, most=30)
    until(lambda: kept.token_ids, cluster)
    assert [engine["up"] for engine in server.engines()] == [True] * 3
    seen = server._seen
    for number in (0, 1, 2):
        cluster.kill(number)
    assert (server.engines(), server.back_in_s) == ([], 1)
    with pytest.raises(EngineClosedError, match="none of 0 replicas serves"):
        server.raise_if_closed()
    front._seen.look({})
    front.raise_if_closed()
    waits = submit(front, 3)
    cluster.alive = {1}
    cluster.replicas[1]._load_s = 41.2
    cluster.seen = seen
    cluster.announce()
    assert server.back_in_s == 42, "as long as the last one took to load"
    server.raise_if_closed()
    until(lambda: kept.has_ended and waits.has_ended, cluster)
    assert (kept.token_ids, waits.token_ids) == (answer((8,), 30), answer((3,), 12))
    seen.refused["1"] = "its engine was killed"
    with pytest.raises(EngineClosedError, match=r"none of 1 replicas serves \(1: its engine"):
        server.raise_if_closed()
    assert server.engines()[0]["why"] == "its engine was killed"
    server.close()


def test_equal_engines_have_one_digest_in_every_process_and_others_another() -> None:
    def digest(**changed: Any) -> str:
        engine = Sums(itertools.count())
        engine.info = engine.info._replace(**changed)
        card = EngineCard(engine.info, engine.config, engine.trace_meta, "sums").to_json()
        found = card_of("there", RemoteHello.from_json(json.loads(json.dumps(card))))
        assert found.digest == card_of("here", engine).digest
        return found.digest

    assert digest() == digest(name="at another place")
    assert len({digest(), digest(weights="others"), digest(software="newer")}) == 3


def test_an_open_prompt_is_refused(front: RayClient) -> None:
    with pytest.raises(InvalidRequestError, match="over Ray it must be whole"):
        submit(front, 2, is_open=True)
    assert front.handles == {}


def test_requests_of_a_front_end_that_is_gone_end(
    cluster: Cluster, front: RayClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = submit(front, 2, most=10**6)
    until(lambda: handle.token_ids, cluster)
    assert 3 * clients.BEAT_S < replicas.SILENT_TICKS
    monkeypatch.setattr(replicas, "SILENT_TICKS", 1)
    monkeypatch.setattr(cluster.replicas[0], "beat", lambda _: None)  # none is heard
    until(lambda: not cluster.engines[0].open)


def test_a_replica_that_drains_gets_no_requests_and_waits_as_long_as_it_may(
    cluster: Cluster, front: RayClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "SILENT_TICKS", 10_000)
    replica = cluster.replicas[0]
    replica._drain_s = 10_000
    handle = submit(front, 2, most=10**6)
    until(lambda: handle.token_ids, cluster)
    cluster.drain(0)
    told: list[str] = []
    (relay,) = replica._relays.values()
    monkeypatch.setattr(relay, "cancel", lambda: told.append("cancel"))
    for _ in range(15_000):
        replica.tick()
    assert not told
    for _ in range(5_001):
        replica.tick()
    assert told


def test_a_front_end_that_drains_takes_no_new_requests(cluster: Cluster, front: RayClient) -> None:
    handle = submit(front, 2)
    front.drain()
    assert front.draining
    with pytest.raises(EngineClosedError, match="the engine drains"):
        submit(front, 3)
    until(lambda: handle.has_ended, cluster)
    assert handle.token_ids == answer((2,), 12)


def test_replicas_say_how_late_ls_is_and_how_much_be_is_to_do(
    cluster: Cluster, front: RayClient
) -> None:
    first, second = cluster.replicas[:2]
    slo = Slo(ttft_ms=100.0)
    five_s_ago = front.now_ns() - 5 * 10**9
    late = submit(front, 1, 2, slo=slo, arrival_ns=five_s_ago)
    until(lambda: cluster.engines[0].open)
    submit(front, 3, 4, 5, most=20, priority=int(Priority.BE))
    until(lambda: cluster.engines[1].open)
    found = first.record_autoscaling_stats()
    assert found[scaling.LATENESS] >= 50.0
    assert found[scaling.BE_TOKENS] == 0.0
    assert second.record_autoscaling_stats() == {scaling.LATENESS: 0.0, scaling.BE_TOKENS: 23.0}
    cluster.engines[1].step()
    until(lambda: second.record_autoscaling_stats()[scaling.BE_TOKENS] == 19.0)
    until(lambda: late.token_ids, cluster)
    cluster.kill(0)
    until(lambda: len(cluster.sent) == 3)
    third = cluster.replicas[2]
    until(lambda: cluster.engines[2].open)
    assert third.record_autoscaling_stats()[scaling.LATENESS] == 0.0, "it had its first token"


def test_close_ends_what_is_open(cluster: Cluster, front: RayClient) -> None:
    handle = submit(front, 2, most=10**6)
    until(lambda: handle.token_ids, cluster)
    front.close()
    assert handle.has_ended
    assert handle.finish_reason is FinishReason.CANCELLED
    with pytest.raises(EngineClosedError):
        submit(front, 3)
