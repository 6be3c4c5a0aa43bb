"""Reports: what counts, what is censored, and a run against a server that is known."""

import asyncio
import itertools
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from qllm.errors import ConfigError
from qllm.plan import Row
from qllm.record.trace import Arrived, Event, Finished, Parked, Planned, Ran, Resumed, Token
from qllm.scheduler.program import Index
from qllm.types import NS_PER_MS, FinishReason, Grain, Priority, Slo
from qllm.workloads import client
from qllm.workloads.client import Server, class_bodies, saturate_http, send_http
from qllm.workloads.measure import Served, Window, class_report, report
from qllm.workloads.spec import Arrival, RequestSpec, Turn
from qllm.workloads.tokens import with_tokens
from qllm.workloads.traced import class_inversions, engine_report, served_of
from tests.support.virtual import VirtualLoop

WINDOW = Window(start_s=1.0, end_s=5.0, stop_s=6.0)
SLO = Slo(500.0, 100.0)


def spec(at_s: float, priority: int = Priority.LS, **more: Any) -> RequestSpec:
    return RequestSpec(
        **{
            "at_s": at_s,
            "priority": priority,
            "num_prompt_tokens": 8,
            "max_tokens": 3,
            "name": f"r{at_s}",
            **more,
        }
    )


def answered(at_s: float, *token_s: float, priority: int = Priority.LS) -> Served:
    return Served(spec=spec(at_s, priority), token_s=list(token_s), done=len(token_s) == 3)


# -- the report


def test_who_waits_in_vain_counts_with_its_wait() -> None:
    found = class_report([answered(2.0, 2.1, 2.2, 2.3), answered(3.0)], WINDOW, SLO)
    assert found["arrived"] == 2
    assert found["finished"] == found["no_first_token"] == 1
    assert found["ttft_ms"]["max"] == pytest.approx(3000.0)
    assert found["e2e_ms"]["max"] == pytest.approx(3000.0)
    assert found["slo_attainment"] == 0.5
    assert found["goodput_per_s"] == 0.25


def test_a_cut_off_answer_meets_no_target_and_is_late_to_the_end() -> None:
    found = class_report([answered(4.5, 4.6, 4.65)], WINDOW, SLO)
    assert found["slo_attainment"] == 0
    assert found["ttft_ms"]["max"] == pytest.approx(100.0)
    assert found["e2e_ms"]["max"] == pytest.approx(1500.0)


@pytest.mark.parametrize(
    ("tokens", "met"),
    [((2.5, 2.6, 2.7), 1), ((2.51, 2.6, 2.7), 0), ((2.1, 2.2, 2.31), 0), ((2.1, 2.15, 2.3), 1)],
)
def test_both_targets_are_needed(tokens: tuple[float, ...], met: int) -> None:
    found = class_report([answered(2.0, *tokens)], WINDOW, Slo(500.0001, 100.0001))
    assert found["slo_attainment"] == met


def test_the_warm_up_of_ls_is_dropped_the_backlog_of_be_is_not() -> None:
    early = [answered(0.5, 0.6, 0.7, 0.8), answered(0.0, 1.5, 2.5, 3.5, priority=Priority.BE)]
    late = [answered(5.5, 5.6, 5.7, 5.8)]
    found = report([*early, *late, answered(2.0, 2.1, 2.2, 2.3)], WINDOW)
    assert found["LS"]["arrived"] == 1
    assert found["BE"]["arrived"] == 1


def test_throughput_counts_inside_the_window() -> None:
    be = answered(0.0, 0.5, 1.5, 4.9, priority=Priority.BE)
    found = class_report([be], WINDOW, SLO)
    assert found["output_tokens_per_s"] == pytest.approx(2 / 4)
    assert found["prefill_tokens_per_s"] == 0
    be.num_tokens = 6  # two per chunk
    assert class_report([be], WINDOW, SLO)["output_tokens_per_s"] == pytest.approx(4 / 4)


def test_an_absent_request_has_no_number() -> None:
    found = class_report([], WINDOW, SLO)
    assert found["ttft_ms"] is None
    assert found["slo_attainment"] is None


# -- of a trace


def events_of(prompt: int = 8) -> list[Event]:
    """BE prefills, is parked after layer 1 of 4 for LS, and goes on."""
    ms = NS_PER_MS
    be, ls = Row(0, 0, prompt, 0, 4), Row(1, 0, 8, 0, 4)
    kind: dict[str, Any] = {"grain": Grain.LAYER, "stop_below": 10}
    return [
        Arrived(at_ns=0, request_id=0, priority=10, num_prompt_tokens=8, max_tokens=1, name="be"),
        Planned(at_ns=0, frame_id=0, rows=(be,), **kind),
        Arrived(
            at_ns=900 * ms, request_id=1, priority=0, num_prompt_tokens=8, max_tokens=1, name="ls"
        ),
        Ran(
            start_ns=0,
            at_ns=1000 * ms,
            frame_id=0,
            start=Index(0, 0),
            end=Index(5, 0),
            why="stopped",
            segments=5,
        ),
        Parked(
            at_ns=1000 * ms,
            frame_id=0,
            request_ids=(0,),
            layer=1,
            inside_layer=False,
            arrival_ns=900 * ms,
        ),
        Planned(at_ns=1000 * ms, frame_id=1, rows=(ls,), **kind),
        Ran(
            start_ns=1000 * ms,
            at_ns=1100 * ms,
            frame_id=1,
            start=Index(0, 0),
            end=Index(18, 0),
            why="done",
            segments=18,
        ),
        Token(at_ns=1100 * ms, request_id=1, token_id=5),
        Finished(at_ns=1100 * ms, request_id=1, reason=FinishReason.LENGTH),
        Resumed(at_ns=1100 * ms, frame_id=0),
        Ran(
            start_ns=1100 * ms,
            at_ns=3100 * ms,
            frame_id=0,
            start=Index(5, 0),
            end=Index(18, 0),
            why="done",
            segments=13,
        ),
        Token(at_ns=3100 * ms, request_id=0, token_id=6),
        Finished(at_ns=3100 * ms, request_id=0, reason=FinishReason.LENGTH),
    ]


def test_prefill_counts_by_layers_and_by_the_part_in_the_window() -> None:
    requests = [spec(0.0, 10, name="be"), spec(0.9, 0, name="ls"), spec(0.95, 0, name="refused")]
    whole = Window(start_s=0.0, end_s=4.0, stop_s=4.0)
    found = engine_report(events_of(), requests, whole)
    assert found["BE"]["prefill_tokens_per_s"] == pytest.approx(8 / 4)
    assert found["LS"]["prefill_tokens_per_s"] == pytest.approx(8 / 4)
    half = Window(start_s=0.5, end_s=1.0, stop_s=4.0)  # half of the first layer
    found = engine_report(events_of(), requests, half)
    assert found["BE"]["prefill_tokens_per_s"] == pytest.approx(8 / 4 / 2 / 0.5)
    late = Window(start_s=2.1, end_s=3.1, stop_s=4.0)  # half of the last three
    found = engine_report(events_of(), requests, late)
    assert found["BE"]["prefill_tokens_per_s"] == pytest.approx(8 * 3 / 4 / 2)


def test_a_program_under_way_at_the_stop_counts_for_its_part_alone() -> None:
    requests = [spec(0.0, 10, name="be"), spec(0.9, 0, name="ls")]
    stopped = Window(start_s=0.0, end_s=2.1, stop_s=2.1)  # 1 s of the last 2 is done
    found = engine_report(events_of(), requests, stopped)
    assert found["BE"]["prefill_tokens_per_s"] == pytest.approx((2 + 3) / 2.1)
    assert found["BE"]["no_first_token"] == 1  # its token came after the stop
    assert found["BE"]["ttft_ms"]["max"] == pytest.approx(2100.0)


def test_a_trace_says_what_a_client_cannot() -> None:
    requests = [spec(0.0, 10, name="be"), spec(0.9, 0, name="ls"), spec(0.95, 0, name="refused")]
    found = engine_report(events_of(), requests, Window(start_s=0.0, end_s=4.0, stop_s=4.0))
    assert found["engine"]["preempt_latency_ms"]["max"] == pytest.approx(100.0)
    assert found["engine"]["class_inversions"] == 0
    assert found["BE"]["preemptions"] == 1
    assert found["BE"]["max_stall_ms"] == pytest.approx(100.0)
    assert found["LS"]["arrived"] == 2
    assert found["LS"]["no_first_token"] == 1
    served = {s.spec.name: s for s in served_of(events_of(), requests)}
    assert served["be"].token_s == [pytest.approx(3.1)]
    assert served["refused"].sent_s is None


def test_a_turn_counts_from_its_arrival_and_only_if_it_arrived() -> None:
    requests = [
        spec(0.0, 10, name="be"),
        spec(0.0, 0, name="ls", follows=Turn("be", 0.9)),
        spec(0.0, 0, name="never", follows=Turn("ls", 0.1)),
    ]
    found = {s.spec.name: s for s in served_of(events_of(), requests)}
    assert found.keys() == {"be", "ls"}
    assert found["ls"].spec.at_s == pytest.approx(0.9)
    assert found["ls"].ttft_ms(9.0) == pytest.approx(200)


def test_a_program_begun_while_ls_waits_is_an_inversion() -> None:
    events = events_of()
    ms = NS_PER_MS
    other = Planned(
        at_ns=950 * ms, frame_id=7, rows=(Row(0, 0, 8, 0, 4),), grain=Grain.STEP, stop_below=0
    )
    run = Ran(
        start_ns=950 * ms,
        at_ns=960 * ms,
        frame_id=7,
        start=Index(0, 0),
        end=Index(18, 0),
        why="done",
        segments=1,
    )
    assert class_inversions([*events, other, run]) == 1


# -- tokens


def test_prompts_depend_on_seed_and_name_alone() -> None:
    one, two = spec(0.0, name="a"), spec(1.0, name="b", num_prompt_tokens=12)
    corpus = tuple(range(100, 140))
    both = with_tokens([one, two], corpus, seed=1)
    assert with_tokens([two], corpus, seed=1) == both[1:]
    assert [len(a.token_ids) for a in both] == [8, 12]
    assert all(
        (b - a) % 40 == 1 for a, b in zip(both[1].token_ids, both[1].token_ids[1:], strict=False)
    )
    assert with_tokens([two], corpus, seed=2) != both[1:]
    with pytest.raises(ConfigError, match="corpus is empty"):
        with_tokens([one], ())


# -- a server


async def told(body: dict[str, Any]) -> AsyncIterator[bytes]:
    """An answer: after 50 ms a token per 30 ms; none to prompts of 14 tokens, one less for 15.

    Its ids, if it is asked for them, count on from the prompt's last one.
    """
    await asyncio.sleep(3600 if len(body["prompt"]) == 14 else 0.05)
    count = body["max_tokens"] - (len(body["prompt"]) == 15)
    for i in range(count):
        last = i == count - 1
        text = "" if i == 0 else "x"  # the first token is half a character
        choice = {"text": text, "finish_reason": "length" if last else None}
        if body.get("return_token_ids"):
            choice["token_ids"] = [body["prompt"][-1] + 1 + i]
        yield b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
        await asyncio.sleep(0.03)
    details = {"cached_tokens": len(body["prompt"]) // 2}
    usage = {
        "choices": [],
        "usage": {"completion_tokens": count, "prompt_tokens_details": details},
    }
    yield f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n".encode()


class FakeAnswer:
    """What the client asks of an answer of aiohttp."""

    status = 200
    headers: ClassVar[dict[str, str]] = {}

    def __init__(self, body: dict[str, Any]) -> None:
        self.content, self._body = self, body

    def iter_any(self) -> AsyncIterator[bytes]:
        return told(self._body)


class FakeSession:
    """A session of aiohttp with a server that is on the loop's clock too."""

    @asynccontextmanager
    async def post(self, url: str, json: dict[str, Any]) -> AsyncIterator[FakeAnswer]:
        yield FakeAnswer(json)


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[VirtualLoop]:
    """A loop whose clock is the client's."""
    made = VirtualLoop()
    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=made.time))
    yield made
    made.close()


class FakeServer:
    """Streams what is `told`, over HTTP; refuses prompts of 13 tokens."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._ready.wait(60)

    def _serve(self) -> None:
        from aiohttp import web

        async def completions(request: web.Request) -> web.StreamResponse:
            body = await request.json()
            self.bodies.append(body)
            if len(body["prompt"]) == 13:
                return web.json_response({"error": "unlucky"}, status=400)
            answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await answer.prepare(request)
            async for part in told(body):
                await answer.write(part)
            return answer

        async def models(request: web.Request) -> web.Response:
            return web.json_response({"data": []})

        async def start() -> None:
            app = web.Application()
            app.router.add_post("/v1/completions", completions)
            app.router.add_get("/v1/models", models)
            self._runner = web.AppRunner(app, shutdown_timeout=0.1)
            await self._runner.setup()
            site = web.TCPSite(self._runner, "127.0.0.1", 0)
            await site.start()
            self.port = self._runner.addresses[0][1]
            self._ready.set()

        self._loop.run_until_complete(start())
        self._loop.run_forever()

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(300)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.close()


def arrival(at_s: float, num_prompt: int, priority: int = Priority.LS) -> Arrival:
    return Arrival(
        at_s=at_s,
        name=f"p{num_prompt}",
        priority=priority,
        token_ids=tuple(range(num_prompt)),
        max_tokens=4,
    )


def test_a_server_is_measured_from_when_requests_were_due(loop: VirtualLoop) -> None:
    server, session = Server(url="", model="m"), FakeSession()
    arrivals = [arrival(0.0, 8), arrival(0.0, 14), arrival(0.2, 9), arrival(0.75, 10)]
    sent = client._send_all(session, server, arrivals, 0.81)
    found = {s.spec.name: s for s in loop.run_until_complete(sent)}
    assert loop.now_s == pytest.approx(0.81)
    for name, at_s, times in (
        ("p8", 0, [0.05, 0.08, 0.11, 0.14]),
        ("p9", 0.2, [0.25, 0.28, 0.31, 0.34]),
        ("p10", 0.75, [0.8]),
        ("p14", 0, []),
    ):
        one = found[name]
        assert (one.sent_s, one.token_s) == (pytest.approx(at_s), pytest.approx(times))
        assert (one.done, one.error) == (len(times) == 4, None)
    assert found["p9"].ttft_ms(9.0) == pytest.approx(50)
    assert found["p9"].tpot_ms == pytest.approx(30)


def test_a_run_over_http_may_end_with_the_last_answer(loop: VirtualLoop) -> None:
    server, session = Server(url="", model="m"), FakeSession()
    arrivals = [arrival(0.0, 8), arrival(0.2, 9)]
    sent = client._send_all(session, server, arrivals, 9.0, until_answered=True)
    found = loop.run_until_complete(sent)
    assert loop.now_s == pytest.approx(0.37)
    assert all(s.done for s in found)
    loop.run_until_complete(
        client._send_all(session, server, [arrival(0.0, 14)], 2.0, until_answered=True)
    )
    assert loop.now_s == pytest.approx(2.37)


def test_what_a_server_says_over_http_is_kept(fake: FakeServer) -> None:
    server = Server(url=f"http://127.0.0.1:{fake.port}", model="m", bodies=class_bodies("priority"))
    arrivals = [arrival(0.0, 8), arrival(0.0, 13), arrival(0.0, 15), arrival(0.0, 9, Priority.BE)]
    found = {s.spec.name: s for s in saturate_http(server, arrivals, 4, 60.0)}
    assert [found[name].done for name in ("p8", "p9")] == [True, True]
    assert len(found["p8"].token_s) == 4
    assert found["p13"].error == 'HTTP 400: {"error": "unlucky"}'
    assert found["p15"].error == "3 of 4 tokens came"
    body = next(b for b in fake.bodies if len(b["prompt"]) == 9)
    assert body["priority"] == 10
    assert body["ignore_eos"] is True
    assert body["max_tokens"] == 4
    (cut,) = send_http(server, [arrival(0.0, 14)], 0.1)
    assert (cut.done, cut.token_s, cut.error) == (False, [], None)


def test_a_closed_loop_keeps_so_many_requests_open(loop: VirtualLoop, fake: FakeServer) -> None:
    session, endless = FakeSession(), (arrival(0.0, 8) for _ in itertools.count())
    sent = client._saturate(session, Server(url="", model="m"), endless, 3, 0.6)
    found = loop.run_until_complete(sent)
    assert {s.error for s in found} == {None}
    times = [(s.spec.at_s, s.token_s[-1] if s.done else 0.6) for s in found]
    assert max(sum(start <= at_s < end for start, end in times) for at_s, _ in times) == 3
    done = [s for s in found if s.done]
    assert (len(done), len(found)) == (9, 12), "one takes 170 ms"
    assert [s.ttft_ms(9.0) for s in done] == pytest.approx([50] * 9)
    server = Server(url=f"http://127.0.0.1:{fake.port}", model="m")
    refused = saturate_http(server, (arrival(0.0, 13) for _ in range(50)), 2, 60.0)
    assert [s.error for s in refused] == ['HTTP 400: {"error": "unlucky"}'] * 2
    assert len(saturate_http(server, [arrival(0.0, 8)] * 3, 8, 60.0)) == 3


def session(num: int, wait_s: float = 0.5) -> list[Arrival]:
    """Return a session of so many turns, each with two new tokens."""
    return [
        replace(
            arrival(0.0, 2),
            name=f"t{i}",
            follows=Turn(f"t{i - 1}", wait_s, f"t{i - 1}") if i else None,
        )
        for i in range(num)
    ]


def test_a_turn_is_sent_after_the_answer_with_the_answer_in_its_prompt(loop: VirtualLoop) -> None:
    sent = client._send_all(FakeSession(), Server(url="", model="m"), session(4), 2.0)
    found = loop.run_until_complete(sent)
    assert [s.spec.name for s in found] == ["t0", "t1", "t2"], "the window ended before t3"
    assert [s.spec.at_s for s in found] == pytest.approx([0.0, 0.67, 1.34])  # 170 ms an answer
    assert [s.spec.num_prompt_tokens for s in found] == [2, 8, 14]  # of 14 none is answered
    assert found[1].token_ids == [2, 3, 4, 5]
    assert found[1].num_cached == 4
    assert found[2].token_ids == []


def test_a_batch_is_open_until_the_last_turn_is_answered(loop: VirtualLoop) -> None:
    batch = (replace(arrival(0.0, 9, Priority.BE), name=f"be-{i}") for i in itertools.count())
    turns = session(2)
    server = Server(url="", model="m")
    found = loop.run_until_complete(client._talk_all(FakeSession(), server, turns, 9.0, batch, 3))
    assert loop.now_s == pytest.approx(0.84), "two answers and a tool"
    assert {s.spec.name: s.done for s in found if s.spec.name[0] == "t"} == {"t0": True, "t1": True}
    jobs = [s for s in found if s.spec.name[0] == "b"]
    assert (len(jobs), sum(s.done for s in jobs)) == (15, 12)
    assert all(len(s.token_ids) == 4 for s in jobs if s.done)


class Restarting(FakeSession):
    """A session with a server that is back after a second."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now

    @asynccontextmanager
    async def post(self, url: str, json: dict[str, Any]) -> AsyncIterator[FakeAnswer]:
        answer = FakeAnswer(json)
        if self._now() < 1.0:
            answer.status, answer.headers = 503, {"Retry-After": "0.4"}
        yield answer


def test_an_agent_asks_again_when_the_server_says_when(loop: VirtualLoop) -> None:
    server, restarting = Server(url="", model="m"), Restarting(loop.time)
    (late,) = loop.run_until_complete(client._talk_all(restarting, server, session(1), 9.0, (), 0))
    assert (late.done, late.error) == (True, None)
    assert late.ttft_ms(9.0) == pytest.approx(1250), "counted from when it was due"


def test_a_server_without_ids_cannot_have_sessions(
    loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Server, "body", lambda self, arrival, with_ids: {
        "prompt": list(arrival.token_ids), "max_tokens": arrival.max_tokens,
    })  # fmt: skip
    sent = client._send_all(FakeSession(), Server(url="", model="m"), session(2), 2.0)
    (only,) = loop.run_until_complete(sent)
    assert only.error is not None
    assert "0 ids of 4 tokens came" in only.error


def test_the_body_of_a_class_has_the_last_word() -> None:
    bodies = {10: {"priority": 7, "temperature": None}}
    server = Server(
        url="",
        model="m",
        bodies=bodies,
        fixed=("min_tokens",),
        text_of=lambda ids: f"{len(ids)} ids",
    )
    body = server.body(arrival(0.0, 9, Priority.BE))
    assert body["priority"] == 7
    assert body["min_tokens"] == 4
    assert not {"temperature", "ignore_eos"} & body.keys()
    with pytest.raises(ConfigError, match=r"\['eos'\]; known: ignore_eos, min_tokens"):
        Server(url="", model="m", fixed=("eos",))
    assert body["prompt"] == "9 ids"
    assert class_bodies("service_tier")[0] == {"service_tier": "priority"}
    assert class_bodies("none") == {}
    with pytest.raises(ConfigError, match="classes by 'x' are unknown"):
        class_bodies("x")


def test_no_server_is_one_clear_error() -> None:
    server = Server(url="http://127.0.0.1:9", model="m")
    with pytest.raises(ConfigError, match=r"no server answers at http://127\.0\.0\.1:9"):
        send_http(server, [arrival(0.0, 8)], 0.1)
