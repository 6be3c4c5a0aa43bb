"""The router on replicas that are only described: no cluster is started."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.request_router import RequestRouter

from qllm.config import EngineConfig
from qllm.fleet.members import card_of
from qllm.fleet.routes import EngineView, RequestView
from qllm.frontend.remote import RemoteHello
from qllm.ingress import Submission
from qllm.ingress.messages import EngineCard, ModelInfo
from qllm.plan import ModelShape
from qllm.ray.router import EngineRouter
from qllm.ray.wire import Ask, Local, Seen
from qllm.types import Priority, SamplingParams, Slo


def asked(key: str = "here-1", priority: int = int(Priority.LS), num_prompt: int = 100) -> Ask:
    item = Submission(
        request_id=1,
        name="x",
        priority=priority,
        token_ids=tuple(range(num_prompt)),
        sampling=SamplingParams(seed=0),
        stop_ids=frozenset(),
        max_tokens=10,
        slo=Slo(),
        arrival_ns=0,
        deadline_ns=None,
    )
    return Ask(key, "same", 0, b"", local=Local(item))


def pending(*args: Any, number: str = "n", **kwargs: Any) -> Any:
    return SimpleNamespace(
        args=args, kwargs=kwargs, metadata=SimpleNamespace(internal_request_id=number)
    )


def replica(name: str, identity: str = "same", **backlogs: Any) -> Any:
    return SimpleNamespace(
        replica_id=SimpleNamespace(unique_id=name),
        routing_stats={"backlogs": backlogs} if backlogs else {},
        replica_metadata={"identity": identity, "seats": 8},
    )


class Id(SimpleNamespace):
    def __hash__(self) -> int:
        return hash(self.unique_id)


def hashable(*replicas: Any) -> list[Any]:
    for each in replicas:
        each.replica_id = Id(unique_id=each.replica_id.unique_id)
    return list(replicas)


@pytest.fixture
def router() -> EngineRouter:
    made: EngineRouter = EngineRouter.__new__(EngineRouter)
    made.initialize_state(route="class")
    return made


def choose(router: EngineRouter, replicas: list[Any], request: Any) -> list[list[str]]:
    ranks = asyncio.run(router.choose_replicas(replicas, request))
    return [[r.replica_id.unique_id for r in rank] for rank in ranks]


BUSY = [(1, 1, 4000, 10), (0, 0, 0, 0)]
BE_WORK = [(0, 0, 0, 0), (5, 5, 4000, 500)]


def test_ls_goes_where_ls_starts_first_and_be_where_least_is_to_do(router: EngineRouter) -> None:
    both = hashable(replica("a", other=BUSY), replica("b", other=BE_WORK))
    assert choose(router, both, pending(asked())) == [["b"]]
    third = hashable(*both, replica("c", other=BUSY, more=BE_WORK))
    be = asked(priority=int(Priority.BE))
    assert choose(router, third, pending(be)) == [["a"]]


def test_what_was_sent_from_here_counts_at_once_and_until_it_ends(router: EngineRouter) -> None:
    both = hashable(replica("a"), replica("b"))
    ask = asked("here-2")
    assert choose(router, both, pending(ask)) == [["a"]]
    router.on_request_routed(pending(ask, number="m"), both[0].replica_id, None)
    assert ask.local is not None
    assert ask.local.heard is not None
    assert choose(router, both, pending(asked("here-3"))) == [["b"]]
    ask.local.heard(1, ask.local.item.priority)  # its prompt is computed: LS starts there again
    assert choose(router, both, pending(asked("here-3", num_prompt=1))) == [["b"]]  # fewer open
    router.on_request_completed(both[0].replica_id, "m")
    assert choose(router, both, pending(asked("here-3"))) == [["a"]]


def test_what_a_replica_says_of_our_own_requests_is_not_counted_twice(
    router: EngineRouter,
) -> None:
    """It is late, and we know better."""
    both = hashable(replica("a", here=BUSY), replica("b", other=[(1, 1, 9, 9), (0, 0, 0, 0)]))
    assert choose(router, both, pending(asked())) == [["a"]]


def test_a_replica_of_another_model_is_passed_by_and_waited_for(router: EngineRouter) -> None:
    old, new = hashable(replica("old", identity="other"), replica("new", other=BUSY))
    assert choose(router, [old, new], pending(asked())) == [["new"]]
    assert choose(router, [old], pending(asked())) == []  # Ray asks again


def test_a_front_end_is_told_which_replicas_there_are_and_what_differs(
    router: EngineRouter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(RequestRouter, "update_replicas", lambda *_: None)
    said, others = said_of("these"), said_of("others")
    seen, ours = Seen(), card_of("the front end's start", RemoteHello.from_json(said))
    same, other = hashable(replica("a"), replica("b"))
    same.replica_metadata |= {"identity": ours.digest, "card": said, "load_s": 2.5}
    other.replica_metadata |= {"identity": "x", "card": others, "load_s": 9.0}
    choose(router, [same], pending(seen))
    assert (list(seen.replicas or {}), seen.router, seen.load_s) == (["a"], router._router, 2.5)
    seen.card, seen.identity = ours, ours.digest
    router.update_replicas([same, other])
    (why,) = seen.refused.values()
    assert why.startswith(
        "the engine at b cannot serve beside that at the front end's start: weigh"
    )
    assert "is 'others' there and 'these' here" in why
    assert [name for name in seen.replicas or {} if seen.serves(name)] == ["a"]
    assert [r.getMessage() for r in caplog.records] == [f"the replica b gets no requests: {why}"]
    router.update_replicas([same])
    assert seen.refused == {}, "it is gone"
    ask = Ask("here-1", ours.digest, 0, b"", local=Local(asked().local.item, seen))  # type: ignore[union-attr]
    assert choose(router, [same], pending(ask)) == [["a"]]
    seen.refused["a"] = "its engine was killed"
    assert choose(router, [same], pending(ask)) == []
    assert not seen.serves("a")


def said_of(weights: str) -> dict[str, Any]:
    """What a replica says of its engine."""
    shape = ModelShape(
        num_layers=1,
        is_moe=(True,),
        num_experts=2,
        experts_per_token=1,
        vocab_size=9,
        max_position=64,
    )
    info = ModelInfo("tiny", shape, frozenset({1}), {}, ("fast",), {}, None, weights, "this")
    config = EngineConfig(max_kv_tokens=65536, prefix_cache_tokens=16384)
    return EngineCard(info, config, {"policy": "Qllm2()"}, "tiny").to_json()


@pytest.mark.parametrize(
    "said", [None, {}, {"info": "of another shape"}], ids=["nothing", "empty", "other"]
)
def test_a_replica_of_another_release_is_passed_by_and_nothing_breaks(
    said: Any, router: EngineRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RequestRouter, "update_replicas", lambda *_: None)
    seen = Seen(card=card_of("here", RemoteHello.from_json(said_of("these"))), identity="ours")
    choose(router, [], pending(seen))
    (other,) = hashable(replica("b", identity="theirs"))
    other.replica_metadata["card"] = said
    router.update_replicas([other])
    assert seen.refused["b"].startswith("it is of another release: ")


def test_a_call_for_one_replica_goes_there_if_it_is_there(router: EngineRouter) -> None:
    both = hashable(replica("a"), replica("b", identity="other"))
    assert choose(router, both, pending("key", "cancel", at="b")) == [["b"]]
    assert choose(router, both, pending("key", "cancel", at="gone")) == [["a", "b"]]
    assert choose(router, both, pending()) == [["a", "b"]]
    assert choose(router, both, None) == [["a", "b"]]


def test_others_requests_count_as_long_as_a_replica_says_so(router: EngineRouter) -> None:
    both = hashable(replica("a", other=BUSY), replica("b"))
    assert choose(router, both, pending(asked())) == [["b"]]
    both[0].routing_stats = {"backlogs": {}}
    both[1].routing_stats = {"backlogs": {"other": BUSY}}
    assert choose(router, both, pending(asked())) == [["a"]]
    assert choose(router, both[1:], pending(asked())) == [["b"]]  # the other one is gone


def test_a_prompt_that_begins_alike_goes_where_its_beginning_is(router: EngineRouter) -> None:
    router.initialize_state(route="prefix")
    both = hashable(replica("a"), replica("b"))
    for each in both:
        each.replica_metadata["kept_tokens"] = 10_000
    first = asked("here-1", num_prompt=640)
    assert choose(router, both, pending(first)) == [["a"]]
    router.on_request_routed(pending(first), both[0].replica_id, None)
    router.on_request_completed(both[0].replica_id, "n")
    assert choose(router, both[::-1], pending(asked("here-2", num_prompt=700))) == [["a"]]
    assert choose(router, both[::-1], pending(asked("here-3", num_prompt=30))) != []


def broken(request: RequestView, engines: Any) -> EngineView:
    raise KeyError("no such engine")


def stranger(request: RequestView, engines: Any) -> EngineView:
    return EngineView(name="none of them")


@pytest.mark.parametrize("route", [broken, stranger])
def test_a_route_that_fails_is_told_once_and_the_least_loaded_taken(
    route: Any, router: EngineRouter, caplog: pytest.LogCaptureFixture
) -> None:
    router._router.route = route
    both = hashable(replica("a", other=BUSY), replica("b"))
    assert choose(router, both, pending(asked())) == [["b"]]
    assert choose(router, both, pending(asked())) == [["b"]]
    assert [record.message[:16] for record in caplog.records] == ["the route made n"]
