import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qllm.llm import QLLMEngine
from qllm.server.http.errors import ApiError
from qllm.server.http.guard import Keys, Limits, _authorization
from tests.support.engines import stand_still
from tests.support.serving import Serving, serving
from tests.support.waiting import wait_for

pytestmark = pytest.mark.usefixtures("engine")  # each test leaves the shared engine idle

ASK = {"prompt": "a", "max_tokens": 1}
ENDLESS = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}
HASTE_S = 1.0


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# -- keys


def test_without_keys_everybody_may_call(engine: QLLMEngine) -> None:
    with serving(engine) as served:
        assert served.post("/v1/completions", ASK).status_code == 200


def test_with_keys_only_their_owners_may(engine: QLLMEngine, tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nalpha\n\nbeta # of the other team\n")
    with serving(engine, api_key_file=file, api_keys="gamma") as served:
        for key in ("alpha", "beta", "gamma"):
            assert served.post("/v1/completions", ASK, headers=bearer(key)).status_code == 200
        others = ("alpha", "Basic alpha", "Bearer")
        wrong = [bearer(key) for key in ("alph", "alpha beta", "# ours")]
        for headers in ({}, *wrong, *({"Authorization": text} for text in others)):
            answer = served.post("/v1/completions", ASK, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
            assert answer.headers["www-authenticate"] == "Bearer"
        for path in ("/v1/models", "/v1/files", "/v1/batches", "/ui/events", "/nothing"):
            assert served.get(path).status_code == 401
        for path in ("/health", "/ready", "/metrics", "/version", "/openapi.json"):
            assert served.get(path).status_code == 200
        with served.client("beta") as client, served.client("delta") as stranger:
            assert client.models.list().data
            with pytest.raises(openai.AuthenticationError):
                stranger.models.list()


def test_two_keys_are_two_callers() -> None:
    keys = Keys(["a", "b"])
    assert keys.caller("Bearer a") == keys.caller("bearer  a") != keys.caller("Bearer b")
    assert keys.caller("Bearer a") not in ("a", "Bearer a")


# -- rates


@given(
    rate=st.integers(1, 120),
    gaps_s=st.lists(st.floats(0, 30, allow_nan=False), min_size=1, max_size=60),
)
def test_no_minute_has_more_than_a_bucket_and_a_minutes_refill(
    rate: int, gaps_s: list[float]
) -> None:
    now = 0.0
    limits = Limits(rate, None, lambda: now)
    passed: list[float] = []
    refused: list[ApiError] = []
    for gap in gaps_s:
        now += gap
        try:
            limits.enter("a")
        except ApiError as error:
            refused.append(error)
        else:
            limits.leave("a")
            passed.append(now)
    for error in refused:
        assert error.headers is not None
        assert 1 <= int(error.headers["Retry-After"]) <= 60 / rate + 1
    for start in passed:
        assert sum(1 for t in passed if start <= t < start + 60) <= 2 * rate
    assert len(passed) >= min(rate, len(gaps_s))


@pytest.mark.parametrize(("rate", "late_s"), [(3, 0), (7, 0.1), (7, 4.3)])
def test_who_waits_as_told_is_let_in(rate: int, late_s: float) -> None:
    now = 0.0
    limits = Limits(rate, None, lambda: now)
    for _ in range(rate):
        limits.enter("a")
    now += late_s
    with pytest.raises(ApiError) as full:
        limits.enter("a")
    limits.enter("b")
    assert full.value.headers is not None
    now += int(full.value.headers["Retry-After"])
    limits.enter("a")


def test_rates_are_per_key(engine: QLLMEngine) -> None:
    with serving(engine, api_keys="a,b", rate_per_minute=2) as served:
        codes = [
            served.post("/v1/completions", ASK, headers=bearer(key)).status_code
            for key in ("a", "a", "a", "b")
        ]
        assert codes == [200, 200, 429, 200]
        last = served.post("/v1/completions", ASK, headers=bearer("a"))
        assert last.json()["error"]["type"] == "rate_limit_error"
        assert 1 <= int(last.headers["retry-after"]) <= 30
        assert served.metric("qllm:requests_refused_total", status="429") == 2
        assert served.get("/v1/models", headers=bearer("a")).status_code == 200


def test_concurrency_is_per_key_and_ends_with_the_stream(engine: QLLMEngine) -> None:
    with (
        serving(engine, api_keys="a,b", max_concurrent=1) as served,
        httpx.Client(base_url=served.url, timeout=60) as client,
    ):
        ask = ("POST", "/v1/completions")
        with client.stream(*ask, json=ENDLESS, headers=bearer("a")) as stream:
            texts = stream.iter_text()  # httpx hangs up when this is collected
            next(texts)
            second = served.post("/v1/completions", ASK, headers=bearer("a"))
            assert (second.status_code, second.headers["retry-after"]) == (429, "1")
            assert second.json()["error"]["code"] == "concurrency_limit"
            assert served.post("/v1/completions", ASK, headers=bearer("b")).status_code == 200
        wait_for(
            lambda: served.post("/v1/completions", ASK, headers=bearer("a")).status_code == 200
        )


# -- LS admission


@pytest.mark.parametrize("overflow", ["demote", "refuse"])
def test_a_flood_of_ls(engine: QLLMEngine, overflow: str) -> None:
    with (
        serving(engine, max_ls=2, ls_overflow=overflow) as served,
        httpx.Client(base_url=served.url, timeout=60) as client,
    ):
        with client.stream("POST", "/v1/completions", json={**ENDLESS, "n": 2}) as stream:
            assert stream.headers["x-qllm-priority"] == "LS"
            assert "x-qllm-demoted" not in stream.headers
            over = served.post("/v1/completions", ASK)
            if overflow == "demote":
                assert (over.status_code, over.headers["x-qllm-priority"]) == (200, "BE")
                assert over.headers["x-qllm-demoted"] == "1"
                assert over.json()["service_tier"] == "flex"
                assert served.metric("qllm:requests_demoted_total") == 1
            else:
                assert (over.status_code, over.headers["retry-after"]) == (429, "1")
                assert over.json()["error"]["code"] == "ls_limit"
            flex = served.post("/v1/completions", {**ASK, "service_tier": "flex"})
            assert (flex.status_code, "x-qllm-demoted" in flex.headers) == (200, False)
        wait_for(lambda: served.front._num_ls == 0)
        assert served.post("/v1/completions", ASK).headers["x-qllm-priority"] == "LS"


# -- bodies, headers, slow clients


@pytest.fixture(scope="module")
def small(shared_engine: QLLMEngine) -> Iterator[Serving]:
    with serving(
        shared_engine,
        max_body_bytes=2000,
        max_header_bytes=4000,
        cors_origins=("https://ours.example",),
    ) as served:
        yield served


@pytest.fixture(scope="module")
def hasty(shared_engine: QLLMEngine) -> Iterator[Serving]:
    with serving(shared_engine, body_timeout_s=HASTE_S, header_timeout_s=HASTE_S) as served:
        yield served


def talk(served: Serving, *parts: bytes, pause_s: float = 0.0) -> bytes:
    port = int(served.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
        for part in parts:
            sock.sendall(part)
            time.sleep(pause_s)
        received = b""
        while part := sock.recv(65536):
            received += part
            if b"\r\n\r\n" in received and b'"}}' in received:
                break
        return received


def test_a_body_over_the_limit_is_413(small: Serving) -> None:
    assert small.post("/v1/completions", {**ASK, "prompt": "a" * 1500}).status_code == 200
    over = small.post("/v1/completions", {**ASK, "prompt": "a" * 2000})
    assert (over.status_code, over.json()["error"]["code"]) == (413, "body_too_large")

    def pieces() -> Iterator[bytes]:
        for _ in range(30):
            yield b" " * 100

    chunked = httpx.post(f"{small.url}/v1/completions", content=pieces(), timeout=60)
    assert chunked.status_code == 413


@pytest.mark.parametrize("length", [b"-1", b"+5", b"1e3", b"\xb2", b"9" * 30])
def test_a_length_that_is_none_is_refused(small: Serving, length: bytes) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: " + length
    assert talk(small, head + b"\r\n\r\n").split()[1] in (b"400", b"413")


def test_headers_over_the_limit_are_refused(small: Serving) -> None:
    head = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Big: " + b"a" * 9000
    assert talk(small, head + b"\r\n\r\n").startswith(b"HTTP/1.1 431")
    assert talk(small, head, b"a", pause_s=0.05).startswith(b"HTTP/1.1 400")


def test_half_a_body_is_408(hasty: Serving) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    answer = talk(hasty, head + b'Content-Length: 50\r\n\r\n{"prompt"')
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"body_timeout" in answer


def test_half_a_header_is_hung_up_on(hasty: Serving) -> None:
    assert talk(hasty, b"GET /health HT") == b""


def test_an_answer_may_take_longer_than_the_timeouts(
    hasty: Serving, engine: QLLMEngine, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    with ThreadPoolExecutor() as pool:
        pool.submit(engine.call, partial(stand_still, str(gate)))
        wait_for(Path(f"{gate}-reached").exists)
        body = json.dumps({**ENDLESS, "max_tokens": 5}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        answer = pool.submit(talk, hasty, head + body)  # at once: it is the answer that is slow
        wait_for(lambda: hasty.front.answers)
        time.sleep(2 * HASTE_S)
        gate.touch()
        assert b"data: [DONE]\n\n" in answer.result(300)


def scope_of(headers: dict[str, str]) -> Any:
    return {"headers": [(name.encode(), value.encode()) for name, value in headers.items()]}


def test_an_empty_header_hides_no_key() -> None:
    """Clients of Anthropic send `x-api-key`, and some an empty Authorization beside it."""
    known = Keys(["alpha"])
    for headers in (
        {"x-api-key": "alpha"},
        {"x-api-key": "alpha", "authorization": ""},
        {"x-api-key": "beta", "authorization": "Bearer alpha"},
    ):
        assert known.caller(_authorization(scope_of(headers)))
    for headers in ({}, {"x-api-key": ""}, {"x-api-key": "beta", "authorization": ""}):
        with pytest.raises(ApiError, match="no valid API key"):
            known.caller(_authorization(scope_of(headers)))


def test_cors_only_for_the_origins_named(small: Serving, engine: QLLMEngine) -> None:
    header, ours = "access-control-allow-origin", "https://ours.example"
    assert small.get("/health", headers={"Origin": ours}).headers[header] == ours
    assert header not in small.get("/health", headers={"Origin": "https://x.example"}).headers
    shown = small.get("/health", headers={"Origin": ours}).headers["access-control-expose-headers"]
    assert shown == "*", "x-request-id, Retry-After and our own"
    for method in ("GET", "POST", "PATCH", "DELETE"):
        asked = {"Origin": ours, "Access-Control-Request-Method": method}
        asked["Access-Control-Request-Headers"] = "authorization,x-api-key,x-qllm-priority"
        url = f"{small.url}/v1/requests/x"
        assert httpx.options(url, headers=asked, timeout=60).status_code == 200
    with serving(engine) as served:
        assert header not in served.get("/health", headers={"Origin": ours}).headers


def test_many_at_once_all_end(engine: QLLMEngine) -> None:
    codes: list[int] = []
    with serving(engine) as served:

        def one(i: int) -> None:
            body = {**ASK, "max_tokens": 1 + i % 7, "priority": i % 2, "stream": i % 3 == 0}
            codes.append(served.post("/v1/completions", body).status_code)

        threads = [threading.Thread(target=one, args=(i,)) for i in range(40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert codes == [200] * 40
        wait_for(lambda: served.front._num_ls == 0)


def test_a_client_that_takes_no_bytes_gives_its_seats_back(engine: QLLMEngine) -> None:
    with serving(engine, stalled_client_s=0.5, max_ls=4) as served:
        body = {"prompt": "x", "max_tokens": 900, "n": 4, "stream": True, "logprobs": 20}
        body |= {"ignore_eos": True}
        host, port = served.url.removeprefix("http://").split(":")
        with socket.socket() as link:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            link.connect((host, int(port)))
            data = json.dumps(body).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
            head += "Content-Type: application/json\r\n\r\n"
            link.sendall(head.encode() + data)
            wait_for(lambda: served.front._num_ls == 4)
            wait_for(lambda: served.front._num_ls == 0)
