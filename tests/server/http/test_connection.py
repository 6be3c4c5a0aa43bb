import asyncio
import json
import re
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from qllm import QLLMEngine
from qllm.frontend.waker import Waker
from qllm.server.http.connection import MOST_HELD, Together
from qllm.server.requests.text_work import TextWork
from tests.support.engines import Holding
from tests.support.serving import Serving, serving
from tests.support.waiting import wait_for

pytestmark = pytest.mark.usefixtures("engine")  # each test leaves the shared engine idle

ASK = {"prompt": "a", "max_tokens": 2, "temperature": 0, "ignore_eos": True}
LONG = {"max_tokens": 40}
MOST = 4000
OFFER = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
"""As Java's HTTP client offers HTTP/2 on its first request."""


@pytest.fixture(scope="module")
def small_heads(shared_engine: QLLMEngine) -> Iterator[Serving]:
    """Serve with a small limit of the bytes of a head."""
    with serving(shared_engine, max_header_bytes=MOST) as made:
        yield made


def asked(more: str = "", **fields: Any) -> bytes:
    body = json.dumps({**ASK, **fields}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}{more}Content-Length: {len(body)}\r\n\r\n".encode() + body


def connected(served: Serving) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(served.url.rsplit(":", 1)[1])), timeout=60)


def answer(sock: socket.socket) -> tuple[bytes, Any]:
    """The head and the body of one answer."""
    found = b""
    while b"\r\n\r\n" not in found:
        found += received(sock)
    head, _, body = found.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head)
    assert length is not None
    while len(body) < int(length[1]):
        body += received(sock)
    return head, json.loads(body)


def received(sock: socket.socket) -> bytes:
    part = sock.recv(65536)
    assert part, "the connection was closed"
    return part


def to_the_end(sock: socket.socket) -> bytes:
    found = b""
    while part := sock.recv(65536):
        found += part
    return found


def text(body: Any) -> str:
    return str(body["choices"][0]["text"])


def test_who_offers_another_protocol_keeps_its_body_and_its_connection(
    small_heads: Serving,
) -> None:
    want = text(small_heads.post("/v1/completions", ASK).json())
    with connected(small_heads) as sock:
        for request in (asked(OFFER), asked(), asked(OFFER)):
            sock.sendall(request)
            head, body = answer(sock)
            assert head.startswith(b"HTTP/1.1 200")
            assert text(body) == want


def test_an_offer_behind_other_requests_on_a_connection(small_heads: Serving) -> None:
    with connected(small_heads) as sock:
        sock.sendall(asked())
        assert answer(sock)[0].startswith(b"HTTP/1.1 200")
        half = len(asked(OFFER)) - 20
        sock.sendall(asked(OFFER)[:half])
        sock.sendall(asked(OFFER)[half:])
        assert answer(sock)[0].startswith(b"HTTP/1.1 200")


def test_an_offer_sent_before_an_answer_came_is_left_to_a_new_connection(
    small_heads: Serving,
) -> None:
    with connected(small_heads) as sock:
        sock.sendall(asked() + asked(OFFER))
        found = to_the_end(sock)
    assert found.count(b"HTTP/1.1 200") == 1
    assert found.count(b"HTTP/1.1") == 1
    assert b"connection: close" in found


@pytest.mark.parametrize("more", [b"garbage\r\n\r\n", asked(OFFER), b"GET /health?" + b"a" * 5000])
def test_what_follows_a_request_and_cannot_be_served_leaves_its_answer(
    holding: Holding, more: bytes
) -> None:
    engine, gate = holding
    with (
        serving(engine, max_header_bytes=MOST) as served,
        connected(served) as sock,
    ):
        sock.sendall(asked(max_tokens=40))
        wait_for(lambda: served.front.answers)
        (connection,) = served.server.server_state.connections
        for part in (more[:-10], more[-10:]):
            sock.sendall(part)
        wait_for(lambda: not connection._takes_more)  # type: ignore[union-attr]
        gate.touch()
        found = to_the_end(sock)
    assert found.startswith(b"HTTP/1.1 200")
    assert found.count(b"HTTP/1.1") == 1
    assert b"connection: close" in found


@pytest.mark.parametrize("first", ["", OFFER])
def test_each_head_has_its_time_not_only_the_first(engine: QLLMEngine, first: str) -> None:
    with (
        serving(engine, header_timeout_s=2, keep_alive_s=600) as served,
        connected(served) as sock,
    ):
        sock.sendall(asked(first))
        assert answer(sock)[0].startswith(b"HTTP/1.1 200")
        sock.sendall(b"GET /health HTTP/1.1\r\nX: ")

        def is_closed() -> bool:
            with suppress(ConnectionError):
                sock.sendall(b"a")
                return bool(select.select([sock], (), (), 0)[0])
            return True

        wait_for(is_closed, 60)


@pytest.mark.parametrize("first", ["", OFFER])
def test_a_head_that_came_is_not_limited_by_its_time(holding: Holding, first: str) -> None:
    engine, gate = holding
    with (
        serving(engine, header_timeout_s=3600) as served,
        connected(served) as sock,
    ):
        sock.sendall(f"GET /version HTTP/1.1\r\nHost: x\r\n{first}\r\n".encode())
        assert answer(sock)[0].startswith(b"HTTP/1.1 200")
        (connection,) = served.server.server_state.connections
        sock.sendall(asked(**LONG)[:20])
        wait_for(lambda: connection._deadline is not None)
        sock.sendall(asked(**LONG)[20:])
        wait_for(lambda: served.front.answers)
        assert connection._deadline is None
        gate.touch()
        assert answer(sock)[0].startswith(b"HTTP/1.1 200")


# -- clients that end their side


@pytest.fixture
def held(holding: Holding) -> Iterator[tuple[Serving, Path]]:
    """Serve so that requests of `LONG` stop at their 20th token until a file is there."""
    with serving(holding.engine) as made:
        yield made, holding.gate


def looks_for_client(served: Serving) -> bool:
    return any(c._probe is not None for c in served.server.server_state.connections)  # type: ignore[union-attr]


@pytest.mark.parametrize("more", ["", OFFER])
@pytest.mark.parametrize("stream", [False, True])
def test_who_ends_his_side_behind_a_request_gets_its_answer(
    held: tuple[Serving, Path], more: str, stream: bool
) -> None:
    served, gate = held
    with connected(served) as sock:
        sock.sendall(asked(more, stream=stream, **LONG))
        sock.shutdown(socket.SHUT_WR)
        wait_for(lambda: served.front.answers and looks_for_client(served))
        gate.touch()
        found = to_the_end(sock)
    before, _, got = found.partition(b"HTTP/1.1 200")
    assert set(before.split(b"\r\n")) <= {b"HTTP/1.1 100 Continue", b""}
    assert b"HTTP/1.1" not in got
    assert b'"finish_reason":"length"' in got.replace(b" ", b"")
    assert got.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n" if stream else b"}")


def test_who_ends_his_side_behind_two_requests_gets_both_answers(
    held: tuple[Serving, Path],
) -> None:
    served, gate = held
    with connected(served) as sock:
        sock.sendall(asked("X-Request-Id: one\r\n", **LONG) + asked("X-Request-Id: two\r\n"))
        sock.shutdown(socket.SHUT_WR)
        wait_for(lambda: served.front.answers)
        gate.touch()
        ids = re.findall(rb"x-request-id: (\w+)", to_the_end(sock))
    assert ids == [b"one", b"two"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("half_first", [False, True])
def test_a_client_that_left_is_told_from_one_that_still_reads(
    held: tuple[Serving, Path], stream: bool, half_first: bool
) -> None:
    served, _ = held
    with connected(served) as sock:
        sock.sendall(asked(stream=stream, **LONG))
        wait_for(lambda: served.front.answers)
        if half_first:
            sock.shutdown(socket.SHUT_WR)
            wait_for(lambda: looks_for_client(served))
            assert served.front.answers
    wait_for(lambda: not served.front.answers)


def test_a_waiting_stream_gets_only_comments_after_a_half_close(
    held: tuple[Serving, Path],
) -> None:
    served, gate = held
    with connected(served) as sock:
        sock.sendall(asked(stream=True, **LONG))
        wait_for(lambda: served.front.answers)
        sock.shutdown(socket.SHUT_WR)
        found = b""
        while found.count(b": alive\n\n") < 2:
            found += received(sock)
        gate.touch()
        found += to_the_end(sock)
    events = re.findall(rb"data: (.*)\n\n", found)
    assert events[-1] == b"[DONE]"
    assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("part", [asked()[:-3], asked()[:30]])
def test_who_ends_his_side_within_a_request_is_gone(
    held: tuple[Serving, Path], part: bytes
) -> None:
    with connected(held[0]) as sock:
        sock.sendall(part)
        sock.shutdown(socket.SHUT_WR)
        assert to_the_end(sock) == b""


def test_the_end_of_an_http_1_0_client_is_that_of_its_request(
    held: tuple[Serving, Path],
) -> None:
    served, _ = held
    with connected(served) as sock:
        sock.sendall(asked(**LONG).replace(b"HTTP/1.1", b"HTTP/1.0"))
        wait_for(lambda: served.front.answers)
        sock.shutdown(socket.SHUT_WR)
        assert to_the_end(sock) == b""
        wait_for(lambda: not served.front.answers)


def test_requests_sent_at_once_are_answered_in_order(small_heads: Serving) -> None:
    with connected(small_heads) as sock:
        sock.sendall(
            asked("X-Request-Id: one\r\n") + asked("X-Request-Id: two\r\nConnection: close\r\n")
        )
        ids = re.findall(rb"x-request-id: (\w+)", to_the_end(sock))
    assert ids == [b"one", b"two"]


CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def test_a_body_in_pieces(small_heads: Serving) -> None:
    body = json.dumps(ASK).encode()
    with connected(small_heads) as sock:
        sock.sendall(CHUNKED + chunk(body[:7]))
        sock.sendall(chunk(body[7:]) + b"0\r\n\r\n")
        assert answer(sock)[0].startswith(b"HTTP/1.1 200")


def test_what_follows_a_body_is_no_header(small_heads: Serving) -> None:
    with connected(small_heads) as sock:
        rest = b"0\r\nX-Qllm-Priority: BE\r\nX-Request-Id: late\r\n\r\n"
        sock.sendall(CHUNKED + chunk(json.dumps(ASK).encode()) + rest)
        head, _ = answer(sock)
    assert b"x-qllm-priority: LS" in head
    assert b"late" not in head


@pytest.mark.parametrize(
    "start",
    [
        b"GET /health HTTP/1.1\r\nX-Big: ",
        b"GET /",
        CHUNKED + chunk(b"{") + b"0\r\nX-Big: ",
        CHUNKED + chunk(b"{") + b"1;",
    ],
)
def test_what_does_not_end_is_refused(small_heads: Serving, start: bytes) -> None:
    with connected(small_heads) as sock:
        sock.sendall(start)
        with suppress(ConnectionError):  # it may close while we still send
            while not select.select([sock], (), (), 0)[0]:
                sock.sendall(b"a" * MOST)
            assert to_the_end(sock)[:12] in (b"", b"HTTP/1.1 400")


def test_a_long_body_in_many_small_parts_is_no_head(small_heads: Serving) -> None:
    with connected(small_heads) as sock:
        sock.sendall(CHUNKED)
        for _ in range(3 * MOST // 6):
            sock.sendall(chunk(b" "))
        sock.sendall(chunk(json.dumps(ASK).encode()) + b"0\r\n\r\n")
        assert answer(sock)[0].startswith(b"HTTP/1.1 200")


class Wire:
    def __init__(self) -> None:
        self.said: list[bytes | str] = []

    def write(self, data: bytes) -> None:
        self.said.append(data)

    def close(self) -> None:
        self.said.append("closed")


def test_what_is_written_in_one_turn_goes_together() -> None:
    async def talk() -> list[bytes | str]:
        wire = Wire()
        both = Together(wire, asyncio.get_running_loop())  # type: ignore[arg-type]
        both.write(b"head ")
        both.write(b"body")
        assert wire.said == []
        await asyncio.sleep(0)
        assert wire.said == [b"head body"]
        both.write(b"a" * MOST_HELD)
        assert len(wire.said) == 2
        both.write(b"last")
        both.close()
        await asyncio.sleep(0)
        return wire.said[2:]

    assert asyncio.run(talk()) == [b"last", "closed"]


# -- between threads


def test_calls_of_many_threads_all_reach_the_loop_in_their_order() -> None:
    found: list[tuple[int, int]] = []

    async def gather() -> None:
        waker, done = Waker.here(), asyncio.Event()

        def put(thread: int) -> None:
            for n in range(2000):
                waker.call(lambda n=n: found.append((thread, n)))  # type: ignore[misc]
            waker.call(lambda: done.set() if len(found) == 8000 else None)

        threads = [threading.Thread(target=put, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        await done.wait()

    asyncio.run(asyncio.wait_for(gather(), 60))
    for thread in range(4):
        assert [n for which, n in found if which == thread] == list(range(2000))


def test_a_call_to_a_loop_that_is_closed_is_nothing() -> None:
    async def here() -> Waker:
        return Waker.here()

    with asyncio.Runner() as runner:
        waker = runner.run(here())
        loop = runner.get_loop()
    waker.call(lambda: None)
    assert loop.is_closed()


def test_many_calls_wake_the_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def count() -> int:
        loop, woken = asyncio.get_running_loop(), []
        plain = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda f: (woken.append(f), plain(f)))
        waker, found = Waker.here(), []
        for n in range(5):
            waker.call(lambda n=n: found.append(n))  # type: ignore[misc]
        await asyncio.sleep(0)
        assert found == [0, 1, 2, 3, 4]
        return len(woken)

    assert asyncio.run(count()) == 1


def test_short_work_is_in_order_on_one_thread_and_waits_for_no_long_work() -> None:
    gate, work, seen = threading.Event(), TextWork("test"), []

    def one(n: int) -> str:
        seen.append(n)
        return threading.current_thread().name

    async def ask() -> None:
        long = asyncio.create_task(work.run(gate.wait, is_short=False, abandon=print))
        await asyncio.sleep(0)
        jobs = (work.run(lambda n=n: one(n), is_short=True, abandon=print) for n in range(50))  # type: ignore[misc]
        names = await asyncio.gather(*jobs)
        assert len(set(names)) == 1
        assert seen == list(range(50))
        gate.set()
        assert await long is True

    try:
        asyncio.run(asyncio.wait_for(ask(), 60))
    finally:
        gate.set()
        work.close()


def test_an_error_of_the_work_is_raised_and_a_late_result_is_given_back() -> None:
    gate, begun, work = threading.Event(), threading.Event(), TextWork("test")
    late: list[Any] = []

    def slow() -> str:
        begun.set()
        gate.wait()
        return "late"

    def fail() -> None:
        raise KeyError("wrong")

    async def ask() -> None:
        with pytest.raises(KeyError, match="wrong"):
            await work.run(fail, is_short=True, abandon=late.append)
        task = asyncio.create_task(work.run(slow, is_short=True, abandon=late.append))
        await asyncio.to_thread(begun.wait)
        unbegun = asyncio.create_task(work.run(slow, is_short=True, abandon=late.append))
        await asyncio.sleep(0)
        task.cancel()
        unbegun.cancel()
        await asyncio.wait([task, unbegun])
        gate.set()
        assert await work.run(lambda: 1, is_short=True, abandon=late.append) == 1
        assert late == ["late"]

    try:
        asyncio.run(asyncio.wait_for(ask(), 60))
    finally:
        gate.set()
        work.close()


@pytest.mark.parametrize("is_short", [True, False])
def test_who_waits_for_work_when_it_closes_is_cancelled(is_short: bool) -> None:
    gate, work = threading.Event(), TextWork("test")

    async def ask() -> None:
        jobs = (work.run(gate.wait, is_short=is_short, abandon=print) for _ in range(5))
        tasks = [asyncio.create_task(job) for job in jobs]
        await asyncio.sleep(0)
        work.close()
        await asyncio.wait(tasks)
        assert all(task.cancelled() for task in tasks)

    try:
        asyncio.run(asyncio.wait_for(ask(), 60))
    finally:
        gate.set()
