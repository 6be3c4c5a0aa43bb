"""`/v1/requests`: a request is re-prioritised, paused and resumed by who sent it."""

import asyncio
import json
import logging
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from qllm.frontend.handle import Piece
from qllm.llm import QLLMEngine
from qllm.server.config import ServerConfig
from qllm.server.requests.ask import Served
from qllm.server.requests.open_answer import STATUS_S, Answer, Comment
from qllm.types import FinishReason, Priority, RequestStatus
from tests.support.engines import Holding
from tests.support.serving import Serving, serving
from tests.support.virtual import VirtualLoop
from tests.support.waiting import wait_for

pytestmark = pytest.mark.usefixtures("invariant_engine")  # each test leaves it idle

COMPLETE = "/v1/completions"
LONG = {"prompt": "def f(x):", "max_tokens": 300, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def commenting(shared_invariant: QLLMEngine) -> Iterator[Serving]:
    """Serve two keys and comment soon on a stream that waits."""
    with serving(shared_invariant, api_keys="alpha,beta", comment_s=0.05) as found:
        yield found


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def patch(served: Serving, name: str, key: str = "alpha", **body: Any) -> httpx.Response:
    url = f"{served.url}/v1/requests/{name}"
    return httpx.patch(url, json=body, headers=bearer(key), timeout=60)


def see(served: Serving, name: str = "", key: str = "alpha") -> httpx.Response:
    return served.get(f"/v1/requests/{name}".rstrip("/"), headers=bearer(key))


@pytest.fixture
def held(holding: Holding) -> Iterator[tuple[Serving, Path]]:
    """Serve so that requests stop at their 20th token until the file exists."""
    settings: dict[str, Any] = {"api_keys": "alpha,beta", "comment_s": 0.05, "max_ls": 1}
    with serving(holding.engine, **settings) as found:
        yield found, holding.gate


def test_a_request_is_paused_and_goes_on_with_the_same_answer(held: tuple[Serving, Path]) -> None:
    served, gate = held
    body = {**LONG, "stream": True, "request_id": "job", "service_tier": "flex"}
    how: dict[str, Any] = {"json": body, "headers": bearer("alpha"), "timeout": 60}
    with httpx.stream("POST", f"{served.url}{COMPLETE}", **how) as answer:
        lines = answer.iter_lines()
        heard = [next(lines)]
        assert patch(served, "cmpl-job", paused=True).json()["paused"] is True
        while ": paused" not in heard:
            heard.append(next(lines))
        gate.touch()
        shown = see(served, "job").json()
        assert (shown["status"], shown["priority"]) == ("paused", "BE")
        assert shown["usage"]["completion_tokens"] <= 20
        assert [x["id"] for x in see(served).json()["data"]] == ["cmpl-job"]
        changed = patch(served, "job", priority="LS", paused=False).json()
        assert (changed["priority"], changed["service_tier"]) == ("LS", "default")
        heard += list(lines)
    events = [json.loads(x[6:]) for x in heard if x.startswith("data: {")]
    assert heard.index(": resumed") > heard.index(": paused")
    wait_for(lambda: served.front._num_ls == 0)
    assert see(served, "job").status_code == 404
    want = served.post(COMPLETE, LONG, headers=bearer("alpha")).json()["choices"][0]["text"]
    assert "".join(e["choices"][0]["text"] for e in events) == want


def test_a_request_of_another_key_is_not_there(held: tuple[Serving, Path]) -> None:
    served, _ = held
    headers = {**bearer("alpha"), "x-request-id": "trace-7"}
    how: dict[str, Any] = {"json": {**LONG, "stream": True}, "headers": headers, "timeout": 60}
    with httpx.stream("POST", f"{served.url}{COMPLETE}", **how) as answer:
        assert answer.headers["x-request-id"] == "trace-7"
        for name in ("trace-7", see(served, "trace-7").json()["id"]):
            assert see(served, name, "beta").status_code == 404
            refused = patch(served, name, "beta", paused=True)
            assert refused.status_code == 404
            assert refused.json()["error"]["code"] == "not_found"
        assert see(served, key="beta").json()["data"] == []
        assert see(served, "trace-7").json()["paused"] is False
    url = f"{served.url}/v1/requests/x"
    assert httpx.patch(url, json={"paused": True}, timeout=60).status_code == 401


def test_of_two_requests_of_one_name_none_is_guessed(held: tuple[Serving, Path]) -> None:
    served, _ = held
    headers = {**bearer("alpha"), "x-request-id": "cmpl-one"}
    url, how = f"{served.url}{COMPLETE}", {"headers": headers, "timeout": 60}
    one, two = ({**LONG, "stream": True, "request_id": name} for name in ("one", "two"))
    talk = {"input": "Hi.", "stream": True, "max_output_tokens": 300, "min_tokens": 300}
    with httpx.stream("POST", url, json=two, **how):
        assert patch(served, "cmpl-one", paused=True).json()["id"] == "cmpl-two"
        with httpx.stream("POST", url, json=one, **how):
            assert see(served, "cmpl-one").json()["id"] == "cmpl-one", "an id goes before a name"
        headers["x-request-id"] = "trace"
        with (
            httpx.stream("POST", url, json={**one, "request_id": "x"}, **how),
            httpx.stream("POST", f"{served.url}/v1/responses", json=talk, **how) as third,
        ):
            refused = patch(served, "trace", priority="BE")
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "ambiguous_id")
            assert "cmpl-x, resp_" in refused.json()["error"]["message"]
            assert third.headers["x-request-id"] == "trace"
            nameless = served.get("/v1/requests/", headers=bearer("alpha"))
            assert nameless.status_code == 404


def test_no_two_open_requests_have_one_id(held: tuple[Serving, Path]) -> None:
    """Nobody could pause, or end the pause of, one of them."""
    served, _ = held
    url, body = f"{served.url}{COMPLETE}", {**LONG, "stream": True, "request_id": "twin"}
    short = {**LONG, "request_id": "twin", "max_tokens": 1, "min_tokens": 1}
    with httpx.stream("POST", url, json=body, headers=bearer("alpha"), timeout=60) as first:
        lines = first.iter_lines()  # that it stays: its end would close the connection
        next(lines)
        again = served.post(COMPLETE, short, headers=bearer("alpha"))
        assert again.status_code == 409
        assert again.json()["error"]["code"] == "duplicate_request_id"
        assert again.json()["error"]["param"] == "request_id"
        assert "'cmpl-twin' is open" in again.json()["error"]["message"]
        assert served.post(COMPLETE, short, headers=bearer("beta")).status_code == 200
        wrong = {**short, "request_id": "single", "stop_token_ids": [10**6]}
        assert served.post(COMPLETE, wrong, headers=bearer("alpha")).status_code == 400
    wait_for(lambda: see(served, "twin").status_code == 404)
    for name in ("twin", "single"):
        done = served.post(COMPLETE, {**short, "request_id": name}, headers=bearer("alpha"))
        assert (done.status_code, done.json()["id"]) == (200, f"cmpl-{name}")


def test_there_must_be_a_seat(held: tuple[Serving, Path]) -> None:
    """A request that becomes LS counts among `max_ls`, and no more when it is BE again."""
    served, _ = held
    url, body = f"{served.url}{COMPLETE}", {**LONG, "stream": True}
    how: dict[str, Any] = {"headers": bearer("alpha"), "timeout": 60}
    one, two = {**body, "request_id": "one"}, {**body, "request_id": "two", "priority": 1}
    with (
        httpx.stream("POST", url, json=one, **how),
        httpx.stream("POST", url, json=two, **how) as second,
    ):
        assert second.headers["x-qllm-priority"] == "BE"
        full = patch(served, "two", priority=0)
        assert (full.status_code, full.json()["error"]["code"]) == (429, "ls_limit")
        for name, tier, num in (("one", "flex", 0), ("two", "default", 1)):
            assert patch(served, name, service_tier=tier).status_code == 200
            assert served.front._num_ls == num
    wait_for(lambda: served.front._num_ls == 0)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "give priority, service_tier or paused"),
        ({"priority": "HIGH"}, "must be 'LS', 'BE' or an integer"),
        ({"priority": "LS", "service_tier": "flex"}, "give one of them"),
        ({"paused": 1}, "paused"),
        ({"pause": True}, "unknown field 'pause'"),
        ({"service_tier": "slow"}, "service_tier"),
    ],
)
def test_wrong_changes_are_refused(commenting: Serving, body: dict[str, Any], says: str) -> None:
    answer = patch(commenting, "cmpl-x", **body)
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]


# -- headers


@pytest.mark.parametrize(
    ("headers", "body", "want"),
    [
        ({"x-gateway-inference-objective": "sheddable"}, {}, "BE"),
        ({"x-llm-d-inference-objective": "realtime"}, {"service_tier": "flex"}, "LS"),
        ({"x-gateway-inference-objective": "unknown"}, {"service_tier": "flex"}, "BE"),
        ({"x-gateway-inference-objective": "unknown"}, {}, "LS"),
        ({"x-dynamo-request-priority": "-1"}, {}, "BE"),
        ({"x-dynamo-request-priority": "10"}, {"priority": 3}, "LS"),
        ({"x-qllm-priority": "LS", "x-gateway-inference-objective": "sheddable"}, {}, "LS"),
    ],
)
def test_gateways_say_the_class(
    invariant_engine: QLLMEngine, headers: dict[str, str], body: dict[str, Any], want: str
) -> None:
    objectives = {"sheddable": "BE", "realtime": "LS"}
    with serving(invariant_engine, objectives=objectives) as served:
        answer = served.post(COMPLETE, {"prompt": "x", "max_tokens": 1, **body}, headers=headers)
        assert answer.headers["x-qllm-priority"] == want
        wrong = {"x-dynamo-request-priority": "high"}
        refused = served.post(COMPLETE, {"prompt": "x"}, headers=wrong)
        assert refused.status_code == 400
        assert "must be an integer" in refused.json()["error"]["message"]


def _lines(caplog: pytest.LogCaptureFixture, name: str) -> list[str]:
    lines = [r.getMessage() for r in caplog.records if r.name == "qllm.server.http.access"]
    return [line for line in lines if f"id={name}" in line]


def test_every_answer_has_an_id_that_the_log_has_too(
    commenting: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("qllm").addHandler(caplog.handler)
    try:
        plain = commenting.post(COMPLETE, {"prompt": "x", "max_tokens": 1}, headers=bearer("alpha"))
        assert plain.headers["x-request-id"] == plain.json()["id"]
        failed = commenting.get("/v1/models")
        assert failed.status_code == 401
        lost = commenting.get("/a%0Ab", headers=bearer("alpha"))
        ids = [x.headers["x-request-id"] for x in (plain, failed, lost)]
        assert len(set(ids)) == 3
        begins = (f'"POST {COMPLETE}" 200', '"GET /v1/models" 401', '"GET /a%0Ab" 404')
        for name, begin in zip(ids, begins, strict=True):
            wait_for(lambda name=name: _lines(caplog, name))
            (line,) = _lines(caplog, name)
            assert line.startswith(begin)
    finally:
        logging.getLogger("qllm").removeHandler(caplog.handler)


def test_the_rate_limit_is_said_as_openai_says_it(invariant_engine: QLLMEngine) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    with serving(invariant_engine, rate_per_minute=2, api_keys="alpha,beta") as served:
        answers = [served.post(COMPLETE, body, headers=bearer("alpha")) for _ in range(3)]
        left = [x.headers["x-ratelimit-remaining-requests"] for x in answers]
        assert left == ["1", "0", "0"]
        assert [x.status_code for x in answers] == [200, 200, 429]
        assert {x.headers["x-ratelimit-limit-requests"] for x in answers} == {"2"}
        resets = [float(x.headers["x-ratelimit-reset-requests"].rstrip("s")) for x in answers]
        assert 0 < resets[0] <= 30 < resets[1] <= 60
        other = served.post(COMPLETE, body, headers=bearer("beta"))
        assert other.headers["x-ratelimit-remaining-requests"] == "1"
    with serving(invariant_engine) as served:
        found = served.post(COMPLETE, body).headers
        assert not [name for name in found if name.startswith("x-ratelimit")]


# -- silence, on a virtual clock


class Waits:
    """A handle that says nothing for 60 s, then one token and its end."""

    def __init__(self, loop: VirtualLoop, status: RequestStatus) -> None:
        self.loop, self.status = loop, status

    def at(self, position: int) -> Piece | FinishReason | None:
        if self.loop.now_s < 60:
            return None
        return FinishReason.STOP if position else Piece("a", (1,), ())

    def listen(self, wake: Any) -> None:
        self.loop.call_later(60, wake)

    def unlisten(self, wake: Any) -> None:
        pass


@pytest.mark.parametrize("status", ["waiting", "parked", "paused", "running", "asleep"])
def test_a_stream_that_waits_for_a_minute_is_never_silent_for_15_s(status: str) -> None:
    """By the longest `comment_s` that may be set, and with an engine that does not say."""
    loop = VirtualLoop()
    known = RequestStatus.WAITING if status == "asleep" else RequestStatus(status)
    handle: Any = Waits(loop, known)
    answer = Answer([handle], 1, Served(Priority.BE), lambda _: None, lambda *_: None, lambda: 3)  # type: ignore[arg-type, return-value]
    heard: list[tuple[float, str]] = []

    async def state() -> str:
        if status == "asleep":
            await asyncio.sleep(1.999)  # within STATUS_S
        return answer._read_state()

    answer._state = state  # type: ignore[method-assign]

    async def listen() -> None:
        async for _, item in answer.pieces(13.0):
            heard.append((loop.now_s, item.text if isinstance(item, Comment) else "token"))

    loop.run_until_complete(listen())
    loop.close()
    times = [0.0, *(at for at, _ in heard)]
    assert times[-1] == 60
    assert max(b - a for a, b in pairwise(times)) <= 15
    said = {"waiting": "waiting 3", "asleep": "waiting 3"}.get(status, status)
    assert heard[0][1] == said
    assert ("resumed" in [text for _, text in heard]) is (status in ("parked", "paused"))


def test_comment_s_leaves_time_for_the_status() -> None:
    """The longest setting and the time in which the engine may say where a request is."""
    assert ServerConfig(model="x", comment_s=13).comment_s + STATUS_S <= 15
    assert ServerConfig(model="x").comment_s <= 13
    with pytest.raises(ValueError, match="comment_s"):
        ServerConfig(model="x", comment_s=13.01)
    with pytest.raises(ValidationError):
        ServerConfig(model="x", comment_s=13.1)
