"""Streams of responses in the background: every event once, whenever they are read."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseStreamEvent

from qllm.llm import QLLMEngine
from qllm.server.api.background import Background
from qllm.server.state.response_store import ResponseStore
from qllm.server.state.store import Store
from tests.support.engines import FileGate, Holding, Holds, pid_of
from tests.support.serving import Serving, serving, tiny_engine
from tests.support.waiting import wait_for

pytestmark = pytest.mark.usefixtures("invariant_engine")  # each test leaves it idle

ASKED: dict[str, Any] = {"model": "tiny", "input": "What does json.dumps do?"}
LONG: dict[str, Any] = {
    **ASKED, "max_output_tokens": 120, "extra_body": {"seed": 5, "ignore_eos": True},
}  # fmt: skip
STREAM: dict[str, Any] = {**LONG, "background": True, "stream": True}
SETTINGS: dict[str, Any] = {"conformance": False, "exactness": "batch-invariant"}


@pytest.fixture(scope="module")
def streaming(
    shared_invariant: QLLMEngine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[openai.OpenAI]:
    """Yield a client of a server whose answers do not depend on what is computed beside them."""
    folder = tmp_path_factory.mktemp("state")
    with serving(shared_invariant, state_dir=folder) as served, served.client() as client:
        yield client


@pytest.fixture
def held(holding: Holding, tmp_path: Path) -> Iterator[tuple[Serving, openai.OpenAI, Path]]:
    """Serve so that requests stop at their 20th token until the file exists."""
    with (
        serving(holding.engine, state_dir=tmp_path, comment_s=0.05) as served,
        served.client() as client,
    ):
        yield served, client, holding.gate


def whole(events: list[ResponseStreamEvent]) -> str:
    """The text of a stream, after a check of its numbers and its end."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type for event in events]
    assert names[:3] == ["response.created", "response.queued", "response.in_progress"]
    assert names[-1] in ("response.completed", "response.incomplete")
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert events[-1].response.output_text == text  # type: ignore[union-attr]
    return text


def first(stream: Any, count: int) -> list[Any]:
    """The first events; the client leaves then."""
    with closing(stream):
        return list(islice(stream, count))


def until_it_speaks(stream: Iterator[Any]) -> list[Any]:
    events: list[Any] = []
    while not events or events[-1].type != "response.output_text.delta":
        events.append(next(stream))
    return events


def test_a_stream_in_the_background_is_that_of_the_foreground(streaming: openai.OpenAI) -> None:
    want = streaming.responses.create(**LONG)
    events = list(streaming.responses.create(**STREAM))
    assert whole(events) == want.output_text
    found = events[-1].response  # type: ignore[union-attr]
    assert (found.background, found.service_tier) == (True, "flex")
    assert streaming.responses.retrieve(found.id) == found
    again = list(streaming.responses.retrieve(found.id, stream=True))
    assert again == events, "also when all is over"
    for number in (0, 2, len(events) - 2, len(events) - 1):
        rest = list(streaming.responses.retrieve(found.id, stream=True, starting_after=number))
        assert rest == events[number + 1 :]


def test_who_comes_back_goes_on_where_the_stream_is(
    held: tuple[Serving, openai.OpenAI, Path],
) -> None:
    served, client, gate = held
    stream = client.responses.create(**STREAM)
    events = until_it_speaks(stream)
    stream.close()
    name, last = events[0].response.id, events[-1].sequence_number
    assert served.front.answers, "the answer does not end with its reader"
    other = client.responses.retrieve(name, stream=True)
    seen = until_it_speaks(other)
    assert seen == events
    gate.touch()
    seen += list(other)
    rest = list(client.responses.retrieve(name, stream=True, starting_after=last))
    assert events + rest == seen
    assert whole(seen)


def test_cancel_ends_the_stream(held: tuple[Serving, openai.OpenAI, Path]) -> None:
    served, client, _ = held
    stream = client.responses.create(**STREAM)
    events = until_it_speaks(stream)
    name = events[0].response.id
    assert client.responses.cancel(name).status == "cancelled"
    events += list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert not events[-1].type.startswith(("response.completed", "response.failed"))
    assert list(client.responses.retrieve(name, stream=True)) == events
    wait_for(lambda: not served.front.answers)
    other = client.responses.create(**STREAM)
    name = next(other).response.id
    client.responses.delete(name)
    list(other)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(name, stream=True)


def test_a_stream_goes_on_with_the_next_engine(tmp_path: Path) -> None:
    """Killed in the middle: its reader, and one that comes later, see every event once."""
    gate = tmp_path / "gate"
    make = partial(tiny_engine, policy=Holds(str(gate)), **SETTINGS)
    gate.touch()
    with (
        serving(make(), make, state_dir=tmp_path, restart_backoff_s=0) as served,
        served.client() as client,
    ):
        want = client.responses.create(**LONG).output_text
        gate.unlink()
        stream = client.responses.create(**STREAM)
        events = until_it_speaks(stream)
        last, name = events[-1].sequence_number, events[0].response.id
        engine = served.front.engine
        os.kill(pid_of(engine), signal.SIGKILL)
        wait_for(lambda: served.front.engine is not engine)
        gate.touch()
        events += list(stream)
        assert whole(events) == want
        rest = list(client.responses.retrieve(name, stream=True, starting_after=last))
        assert rest == events[last + 1 :]
        served.front.engine.close()


def test_after_a_restart_of_the_server(
    invariant_engine: QLLMEngine, holding: Holding, tmp_path: Path
) -> None:
    """What has not begun is answered; what was cut off has failed, and its last event says so."""
    how: dict[str, Any] = {"state_dir": tmp_path, "drain_s": 0, "batch_concurrency": 1}
    with (
        serving(holding.engine, **how) as served,
        served.client() as client,
    ):
        want = until_it_speaks(stream := client.responses.create(**STREAM))
        queued = first(client.responses.create(**STREAM), 2)
        stream.close()
    with serving(invariant_engine, **how) as served, served.client() as client:
        cut, other = (x[0].response.id for x in (want, queued))
        events = list(client.responses.retrieve(cut, stream=True))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[: len(want)] == want
        assert events[-1].type == "response.failed"
        assert events[-1].response.error
        assert "cut off in the middle" in events[-1].response.error.message
        assert client.responses.retrieve(cut).status == "failed"
        assert whole(list(client.responses.retrieve(other, stream=True)))


def test_a_failure_is_the_last_event(
    streaming: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qllm.server.api.response_writer.changes", lambda *_: {}["no"])
    events = list(streaming.responses.create(**STREAM))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.failed"
    assert "KeyError" in str(events[-1].response.error)
    assert streaming.responses.retrieve(events[0].response.id).status == "failed"  # type: ignore[union-attr]


def test_wrong_ways_to_read(streaming: openai.OpenAI) -> None:
    plain = streaming.responses.create(**LONG)
    events = list(streaming.responses.create(**STREAM))
    name = events[0].response.id  # type: ignore[union-attr]
    wrong: list[tuple[str, dict[str, Any], str]] = [
        (plain.id, {"stream": True}, "this response has no events"),
        (name, {"stream": True, "extra_query": {"starting_after": "x"}}, "starting_after"),
        (name, {"stream": True, "extra_query": {"starting_after": -1}}, "greater than or equal"),
        (name, {"stream": True, "starting_after": len(events)}, f"so far is {len(events) - 1}"),
        (name, {"extra_query": {"starting_after": 1}}, "give it with stream=true"),
    ]
    for response_id, how, says in wrong:
        with pytest.raises(openai.BadRequestError, match=says) as caught:
            streaming.responses.retrieve(response_id, **how)
        assert caught.value.param in ("stream", "starting_after")
    whole = streaming.responses.retrieve(name, extra_query={"stream": False, "starting_after": 1})
    assert whole.id == name
    with pytest.raises(openai.BadRequestError, match="compaction is not served") as refused:
        streaming.responses.compact(model="tiny", input="x")
    assert refused.value.status_code == 400


def test_unfinished_responses_of_a_key_have_a_limit(tmp_path: Path) -> None:
    gate, how = tmp_path / "gate", {**LONG, "background": True}
    with (
        tiny_engine(policy=FileGate(str(gate)), **SETTINGS) as engine,
        serving(engine, state_dir=tmp_path, max_background=2, api_keys="a,b") as served,
        served.client("a") as client,
        served.client("b") as other,
    ):
        names = [client.responses.create(**how).id for _ in range(2)]
        for more in ({}, {"stream": True}):
            with pytest.raises(openai.RateLimitError, match=r"max_background=2") as full:
                client.responses.create(**how, **more)
            assert int(full.value.response.headers["retry-after"]) >= 1
            assert full.value.code == "background_limit"
        assert other.responses.create(**how).status == "queued", "of another key"
        client.responses.cancel(names[0])
        names.append(client.responses.create(**how).id)
        gate.touch()
        wait_for(lambda: client.responses.retrieve(names[2]).status == "incomplete")
        client.responses.create(**how)


def test_readers_of_a_key_have_a_limit(tmp_path: Path) -> None:
    gate, how = tmp_path / "gate", {**LONG, "background": True, "stream": True}
    with (
        tiny_engine(policy=FileGate(str(gate)), **SETTINGS) as engine,
        serving(
            engine, state_dir=tmp_path, max_event_streams=2, max_background=3, api_keys="a,b"
        ) as served,
        served.client("a") as client,
        served.client("b") as other,
    ):

        def read(response_id: str) -> Any:
            return client.responses.retrieve(response_id, stream=True)

        def full() -> None:
            for ask in (lambda: client.responses.create(**how), lambda: read(name)):
                with pytest.raises(openai.RateLimitError, match=r"max_event_streams=2") as caught:
                    ask()
                assert int(caught.value.response.headers["retry-after"]) >= 1
                assert caught.value.code == "event_stream_limit"

        def refusal() -> str | None:
            try:
                client.responses.create(**how)
            except openai.RateLimitError as error:
                return error.code
            return None

        first = client.responses.create(**how)
        name = next(iter(first)).response.id
        second = read(name)
        full()
        assert client.responses.retrieve(name).id == name, "it is read whole"
        assert next(iter(other.responses.create(**how))), "of another key"
        for _ in range(2):
            client.responses.create(**{**how, "stream": False})
        second.close()
        wait_for(lambda: refusal() == "background_limit")
        third = read(name)
        assert next(iter(third)), "what was refused has no seat"
        full()
        gate.touch()
        assert list(third)[-1].type == "response.incomplete"


def test_the_store_numbers_events_and_takes_none_after_the_end(tmp_path: Path) -> None:
    store = Store(tmp_path)
    kept = ResponseStore(store)
    row: dict[str, Any] = {"id": "a", "status": "queued", "previous_response_id": None}
    kept.add("me", "{}", "[]", row, events=["0", "1"])
    assert kept.events("a", -1) == (["0", "1"], False)
    assert kept.add_event("a", "2")
    assert kept.change("a", {**row, "status": "completed"}, "3")
    assert not kept.add_event("a", "4")
    assert not kept.change("a", {**row, "status": "failed"}, "4")
    assert kept.events("a", 1) == (["2", "3"], True)
    assert kept.num_events("a") == 4
    kept.delete("a", "me")
    assert kept.num_events("a") == 0
    old = (
        "SELECT COUNT(*) FROM responses WHERE owner = 'me' AND status IN ('queued', 'in_progress')"
    )
    (plan,) = store.rows(f"EXPLAIN QUERY PLAN {old}")
    assert "responses_unfinished" in plan["detail"], "it does not read what is kept"
    store.close()


def test_nothing_is_left_of_a_client_that_read_a_stream_to_its_end(tmp_path: Path) -> None:
    store = Store(tmp_path)
    kept = ResponseStore(store)
    row: dict[str, Any] = {"id": "a", "status": "queued", "previous_response_id": None}
    kept.add("me", "{}", "[]", row, events=["0"])
    kept.change("a", {**row, "status": "completed"}, "1")

    async def read() -> None:
        front = SimpleNamespace(draining=asyncio.Event())
        background = Background(front, kept, None)  # type: ignore[arg-type]
        assert [event async for event in background.follow("a", -1)] == ["0", "1"]
        assert background._news == {}

    asyncio.run(read())
    store.close()
