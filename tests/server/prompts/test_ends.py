"""Open prompts over HTTP: nothing long on the event loop, and a seat that goes back once."""

import json
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from qllm.frontend.incremental_tokens import IncrementalText
from qllm.frontend.streaming_prompt import StreamingPrompt
from qllm.llm import QLLMEngine
from qllm.server.prompts import ndjson as streamed_body
from qllm.server.prompts.ndjson import blocks_of
from qllm.server.prompts.store import Opened, StreamingPrompts
from qllm.server.requests import bodies
from qllm.server.requests.ask import SHORT
from qllm.server.requests.text_work import LONG_THREADS
from qllm.types import Priority, SamplingParams
from tests.support.engines import pid_of
from tests.support.prompts import ASK, NDJSON, PLAIN, Slow, lines, message, post
from tests.support.serving import Serving, serving, tiny_engine
from tests.support.waiting import wait_for

pytestmark = pytest.mark.usefixtures("engine")  # each test leaves the shared engine idle

ONE = {"prompt_idle_s": 3600, "max_ls": 1, "max_open_prompts": 1, "ls_overflow": "refuse"}


@pytest.fixture(scope="module")
def one(shared_engine: QLLMEngine) -> Iterator[Serving]:
    """A server with one seat, and one open prompt."""
    with serving(shared_engine, **ONE) as made:
        yield made


def opened(made: Serving, text: str = "x") -> str:
    answer = made.post("/v1/prompts", {"prompt": text})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def is_free(made: Serving) -> bool:
    """Whether every seat is there once: neither kept nor given back twice."""
    return made.front._num_ls == 0 and made.metric("qllm:num_open_prompts") == 0


@contextmanager
def gate(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> Iterator[Any]:
    """Calls of a method wait until the test lets them go on."""
    begun, go, plain = threading.Event(), threading.Event(), getattr(owner, name)

    def slow(*args: Any, **how: Any) -> Any:
        begun.set()
        assert go.wait(60)
        return plain(*args, **how)

    monkeypatch.setattr(owner, name, slow)
    try:
        yield begun, go
    finally:
        go.set()
        monkeypatch.setattr(owner, name, plain)


# -- beside the event loop


def test_nothing_of_a_piece_is_done_on_the_event_loop(
    one: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[str] = set()

    def watch(owner: Any, name: str) -> None:
        plain = getattr(owner, name)

        def watched(*args: Any, **how: Any) -> Any:
            seen.add(threading.current_thread().name.partition("_")[0])
            return plain(*args, **how)

        monkeypatch.setattr(owner, name, watched)

    for name in ("append", "replace", "finish", "look", "_encode"):
        watch(IncrementalText, name)
    watch(bodies, "read")
    watch(streamed_body, "_json")
    monkeypatch.setattr("qllm.server.prompts.routes.read", bodies.read)
    long = "long " * (SHORT // 5 + 1)
    for text in ("short", long):
        path = f"/v1/prompts/{(name := opened(one, long))}"
        assert one.post(f"{path}/append", {"append": text}).status_code == 200
        put = httpx.put(f"{one.url}{path}", json={"replace": text, "from": 3}, timeout=60)
        assert put.status_code == 200
        assert one.get(path).status_code == 200
        assert one.post(PLAIN, {**ASK, "prompt_id": name}).status_code == 200
        first = {**ASK, "prompt": long}
        answer = post(one, PLAIN, lines(first, {"append": text}, {"replace": text, "from": 2}))
        assert answer.status_code == 200
    assert seen
    assert seen <= {"qllm-text-LS", "qllm-short-LS", "qllm-apart"}
    wait_for(lambda: is_free(one))


@pytest.mark.parametrize("size", [1, 3, 10, 1000])
def test_lines_come_together_with_the_number_of_the_first(size: int) -> None:
    whole = b"\n{1}\n\n{22}\n" + b"x" * 50 + b"\n{3}"

    class Body:
        async def stream(self) -> AsyncIterator[bytes]:
            for at in range(0, len(whole), size):
                yield whole[at : at + size]
            yield b""

    async def all_of_it() -> list[tuple[int, bytes]]:
        return [x async for x in blocks_of(Body())]  # type: ignore[arg-type]

    import asyncio

    found = asyncio.run(all_of_it())
    assert b"".join(block for _, block in found) == whole
    for number, block in found:
        at = whole.index(block) if len(block) > 1 else None
        assert at is None or number == whole.count(b"\n", 0, at) + 1
        assert block.endswith(b"\n") or block == b"{3}"


def test_a_hundred_thousand_lines_of_one_byte(one: Serving, engine: QLLMEngine) -> None:
    text = "ab" + " " * 49_998
    half = b"".join(b'{"append": "%c"}\n' % c for c in text.encode())
    body = lines(ASK) + half + lines({"replace": "", "from": 0}) + half
    greedy = SamplingParams(temperature=0)
    want = engine.submit(text, "LS", 8, sampling=greedy).result(300).text
    answer = httpx.post(f"{one.url}{PLAIN}", content=body, headers=NDJSON, timeout=300)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == want


# -- a seat goes back once


def test_each_way_a_prompt_can_end_gives_its_seat_back(one: Serving) -> None:
    name = opened(one)
    gone = httpx.delete(f"{one.url}/v1/prompts/{name}", timeout=60)
    assert gone.status_code == 200
    assert is_free(one)
    again = httpx.delete(f"{one.url}/v1/prompts/{name}", timeout=60)
    assert "was deleted" in message(again, 409)
    assert is_free(one)

    name = opened(one)  # refused, then sent
    refused = one.post(PLAIN, {**ASK, "prompt_id": name, "min_tokens": 10**7})
    assert "min_tokens=10000000 must" in message(refused, 400)
    assert one.front._num_ls == 1
    assert one.post(PLAIN, {**ASK, "prompt_id": name}).status_code == 200
    wait_for(lambda: is_free(one))

    for wrong, status in ((b"nonsense\n", 400), (lines({"append": "x" * 5_000_000}), 413)):
        assert post(one, PLAIN, lines(ASK) + wrong).status_code == status
        wait_for(lambda: is_free(one))
    assert "min_tokens=10000000 must" in message(
        post(one, PLAIN, lines({**ASK, "min_tokens": 10**7}, {"append": "x"})), 400
    )
    wait_for(lambda: is_free(one))

    with Slow(one) as client:
        client.send(lines(ASK, {"append": "x"}))
        wait_for(lambda: one.metric("qllm:num_open_prompts") == 1)
    wait_for(lambda: is_free(one))


def test_a_streamed_body_belongs_to_its_key_alone(one: Serving, engine: QLLMEngine) -> None:
    with Slow(one) as client:
        client.send(lines(ASK, {"append": "x"}))
        wait_for(lambda: one.metric("qllm:num_open_prompts") == 1)
        assert one.get("/v1/prompts").json()["data"] == []
        assert "max_open_prompts=1" in message(one.post("/v1/prompts", {}), 429)
        [name] = [entry.handle.request_id for entry in engine.client._open.values()]
        assert f"no prompt '{name}'" in message(one.get(f"/v1/prompts/{name}"), 404)
        client.socket.sendall(b"0\r\n\r\n")
        assert b'"finish_reason"' in client.answer()
    wait_for(lambda: is_free(one))


def test_what_comes_while_a_prompt_is_sent_is_refused(
    one: Serving, engine: QLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = opened(one, "some text")
    path = f"{one.url}/v1/prompts/{name}"
    with gate(monkeypatch, IncrementalText, "finish") as (begun, go), ThreadPoolExecutor(1) as pool:
        sent: Future[httpx.Response] = pool.submit(one.post, PLAIN, {**ASK, "prompt_id": name})
        assert begun.wait(60)
        for call in (
            one.post(f"/v1/prompts/{name}/append", {"append": "x"}),
            httpx.put(path, json={"replace": "x", "from": 0}, timeout=60),
            one.post(PLAIN, {**ASK, "prompt_id": name}),
            httpx.delete(path, timeout=60),
        ):
            assert "is being sent" in message(call, 409)
            assert call.json()["error"]["code"] == "prompt_busy"
        assert one.get("/v1/prompts").json()["data"] == []
        go.set()
        assert sent.result().status_code == 200
    wait_for(lambda: is_free(one))
    assert "was sent" in message(httpx.delete(path, timeout=60), 409)
    assert is_free(one)


def test_a_prompt_that_is_being_changed_is_not_sent(
    one: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And if it is deleted meanwhile, the change says so."""
    name = opened(one, "some text")
    with gate(monkeypatch, IncrementalText, "append") as (begun, go), ThreadPoolExecutor(1) as pool:
        change = pool.submit(one.post, f"/v1/prompts/{name}/append", {"append": "x" * 200})
        assert begun.wait(60)
        sent = one.post(PLAIN, {**ASK, "prompt_id": name})
        assert "is being changed" in message(sent, 409)
        assert httpx.delete(f"{one.url}/v1/prompts/{name}", timeout=60).status_code == 200
        assert is_free(one)
        go.set()
        assert "was deleted" in message(change.result(), 409)
    assert is_free(one)


def changing(monkeypatch: pytest.MonkeyPatch) -> list[Opened]:
    """The prompts that are changed from now on, once for each change that comes."""
    seen: list[Opened] = []
    plain = StreamingPrompts.change

    async def change(self: StreamingPrompts, opened: Opened, *args: Any) -> Any:
        seen.append(opened)
        return await plain(self, opened, *args)

    monkeypatch.setattr(StreamingPrompts, "change", change)
    return seen


def test_pieces_are_added_as_they_came(one: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short one has another thread than a long one, and does not overtake it."""
    seen, go, long = changing(monkeypatch), threading.Event(), "long " * (SHORT // 5 + 1)
    path = f"/v1/prompts/{opened(one, '')}"
    added: list[str] = []
    plain = IncrementalText.append
    monkeypatch.setattr(
        IncrementalText, "append", lambda self, piece: (added.append(piece), plain(self, piece))[1]
    )
    threads = one.front.text_of(Priority.LS).pool
    busy = [threads.submit(go.wait, 60) for _ in range(LONG_THREADS)]
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(one.post, f"{path}/append", {"append": long})
        wait_for(lambda: len(seen) == 1 and seen[0].num_changing == 1)
        second = pool.submit(one.post, f"{path}/append", {"append": "short"})
        wait_for(lambda: len(seen) == 2 and (seen[0].num_changing == 2 or second.done()))
        wait([second], timeout=0.2)
        go.set()
        assert [call.result().status_code for call in (first, second)] == [200, 200]
    assert all(job.result() for job in busy)
    assert added == [long, "short"]
    assert httpx.delete(f"{one.url}{path}", timeout=60).status_code == 200


def test_a_prompt_is_not_idle_while_it_changes(
    one: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither while its first piece is added, nor while one waits behind that."""
    seen, timers = changing(monkeypatch), []
    path = f"/v1/prompts/{opened(one, '')}"
    plain = IncrementalText.append

    def append(self: IncrementalText, piece: str) -> None:
        timers.append(seen[0].timer)
        wait_for(lambda: len(seen) == 2)
        plain(self, piece)

    with monkeypatch.context() as patched, ThreadPoolExecutor(2) as pool:
        patched.setattr(IncrementalText, "append", append)
        calls = [pool.submit(one.post, f"{path}/append", {"append": "x"}) for _ in range(2)]
        assert [call.result().status_code for call in calls] == [200, 200]
    assert timers == [None, None]
    assert seen[0].timer is not None
    assert httpx.delete(f"{one.url}{path}", timeout=60).status_code == 200
    assert seen[0].timer is None


def test_a_prompt_is_idle_again_after_its_sending_was_refused(
    one: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = changing(monkeypatch)
    name = opened(one, "x")
    assert one.post(f"/v1/prompts/{name}/append", {"append": "y"}).status_code == 200
    ask = {**ASK, "prompt_id": name, "min_tokens": 10**7}
    assert "min_tokens=10000000 must" in message(one.post(PLAIN, ask), 400)
    wait_for(lambda: seen[0].timer is not None)
    assert httpx.delete(f"{one.url}/v1/prompts/{name}", timeout=60).status_code == 200


@pytest.mark.parametrize("way", ["by id", "streamed"])
def test_who_hangs_up_while_his_prompt_is_tokenised(
    one: Serving, engine: QLLMEngine, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    with gate(monkeypatch, IncrementalText, "finish") as (begun, go):
        if way == "streamed":
            with Slow(one) as client:
                client.send(lines(ASK, {"append": "some text"}))
                client.socket.sendall(b"0\r\n\r\n")
                assert begun.wait(60)
        else:
            body = json.dumps({**ASK, "prompt_id": opened(one, "some text")}).encode()
            host, port = one.url.removeprefix("http://").split(":")
            head = f"POST {PLAIN} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            with socket.create_connection((host, int(port))) as client:
                client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                assert begun.wait(60)
        wait_for(lambda: is_free(one))
        go.set()
    wait_for(lambda: engine.stats()["num_live"] == 0)
    assert is_free(one)
    assert one.post(PLAIN, {**ASK, "prompt": "x"}).status_code == 200
    wait_for(lambda: is_free(one))


def test_a_prompt_of_a_dead_engine_gives_its_seat_back() -> None:
    with tiny_engine(conformance=False) as mortal, serving(mortal, **ONE) as made:
        name = opened(made)
        os.kill(pid_of(mortal), signal.SIGKILL)
        wait_for(lambda: mortal.failure is not None)
        wait_for(lambda: made.get(f"/v1/prompts/{name}").status_code == 409)
        assert "has ended" in message(made.get(f"/v1/prompts/{name}"), 409)
        assert is_free(made)


def test_prompts_that_are_opened_at_once_are_counted_at_once(
    engine: QLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        serving(engine, max_open_prompts=2) as made,
        gate(monkeypatch, StreamingPrompt, "begin") as (_, go),
        ThreadPoolExecutor(5) as pool,
    ):
        calls = [pool.submit(made.post, "/v1/prompts", {"prompt": "x"}) for _ in range(5)]
        wait_for(lambda: sum(call.done() for call in calls) == 3)
        go.set()
        assert sorted(call.result().status_code for call in calls) == [200, 200, 429, 429, 429]
    wait_for(lambda: engine.stats()["num_live"] == 0)


def test_a_prompt_that_cannot_be_opened_takes_no_seat(one: Serving) -> None:
    for _ in range(2):  # there is one seat, and room for one open prompt
        assert "token id" in message(one.post("/v1/prompts", {"prompt": [10**7]}), 400)
        assert is_free(one)
    assert httpx.delete(f"{one.url}/v1/prompts/{opened(one)}", timeout=60).status_code == 200


# -- what is wrong


def test_replacing_again_and_again_makes_no_prompt_larger(engine: QLLMEngine) -> None:
    with serving(engine, max_prompt_bytes=1024) as made:
        name = opened(made, "a b c d")
        url = f"{made.url}/v1/prompts/{name}"
        for _ in range(4):
            put = httpx.put(url, json={"replace": "x" * 600, "from": 1}, timeout=60)
            assert put.status_code == 200, put.text
        assert put.json()["num_bytes"] < 610
        before = made.get(f"/v1/prompts/{name}").json()
        body = {"replace": "y" * 600, "from": before["num_tokens"]}
        put = httpx.put(url, json=body, timeout=60)
        assert "max_prompt_bytes" in message(put, 413)
        assert made.get(f"/v1/prompts/{name}").json() == before
        chat = [{"role": "user", "content": [{"type": "text", "text": "y" * 1025}]},
                {"role": "user", "content": ""}]  # fmt: skip
        assert "max_prompt_bytes" in message(made.post("/v1/prompts", {"messages": chat}), 413)


@pytest.mark.parametrize("value", ["NaN", "true", "1.0", '"1"', "-1", "null", "Infinity"])
def test_what_is_no_number_of_tokens(one: Serving, value: str) -> None:
    body = f'{{"replace": "x", "from": {value}}}'.encode()
    url = f"{one.url}/v1/prompts/{(name := opened(one, 'abc'))}"
    headers = {"Content-Type": "application/json"}
    put = httpx.put(url, content=body, headers=headers, timeout=60)
    assert "from" in message(put, 400)
    for wrong, text in (
        (b"", "the body is missing"),
        (b"{", "the body is no JSON"),
        (b'{"append": "\xff"}', "the body is no JSON"),
        (b"[" * 10_000, "the body is no JSON"),
        (b"[" * 100_000, "lists and objects inside each other"),
    ):
        call = httpx.post(f"{url}/append", content=wrong, headers=headers, timeout=60)
        assert text in message(call, 400)
    call = httpx.post(f"{url}/append", content=b'{"append": "x"}', timeout=60)
    assert "Content-Type is missing" in message(call, 400)
    assert one.get(f"/v1/prompts/{name}").json()["num_bytes"] == 3
    assert httpx.delete(url, timeout=60).status_code == 200
    assert "line 2: from" in message(post(one, PLAIN, lines(ASK) + body), 400)
    wait_for(lambda: is_free(one))


def test_replacing_counts_as_posting_does(engine: QLLMEngine) -> None:
    with serving(engine, rate_per_minute=3) as made:
        url = f"{made.url}/v1/prompts/{opened(made)}"
        calls = [httpx.put(url, json={"replace": "x", "from": 0}, timeout=60) for _ in range(3)]
        assert [call.status_code for call in calls] == [200, 200, 429]
