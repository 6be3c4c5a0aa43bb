"""Requests that outlive their engine: every answer is that of a run in which nothing died."""

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from qllm import QLLMEngine, SamplingParams
from qllm.errors import ModelError
from qllm.frontend.request_log import RequestLog
from qllm.types import FinishReason
from tests.support.engines import POISON, CrashOnce, Poisoned, freeze, pid_of
from tests.support.replay import (
    COMPLETIONS,
    NUM,
    PENALTIES,
    SAMPLED,
    SETTINGS,
    Client,
    ask_all,
    ask_until_they_run,
    body,
    kill,
)
from tests.support.serving import Serving, serving, tiny_engine
from tests.support.waiting import wait_for

make = partial(tiny_engine, **SETTINGS)
HOUR_NS = 3600 * 10**9


def is_ready(served: Serving) -> bool:
    return served.get("/ready").status_code == 200


def test_every_stream_goes_on_as_if_nothing_had_died(tmp_path: Path) -> None:
    gate = tmp_path / "crash"
    new = partial(make, policy=CrashOnce(str(gate)))
    with serving(new(), new, restart_backoff_s=0) as served:
        expected = [client.answer() for client in ask_all(served)]
        assert {usage["completion_tokens"] for usage, *_ in expected} == {NUM, 2 * NUM}
        for num_deaths, how in enumerate(("killed", "hung", "crashed"), 1):
            engine = served.front.engine
            clients = ask_until_they_run(served)
            if how == "killed":
                kill(served)
            elif how == "crashed":
                gate.touch()
            else:
                freeze(pid_of(engine))
                engine.end_if_stuck(2)
            go_on(served, engine, clients)
            assert [client.answer() for client in clients] == expected, how
            assert served.metric("qllm:requests_replayed_total") == 9 * num_deaths
            assert served.metric("qllm:engine_restarts_total") == num_deaths
        label = {"class": "BE", "finished_reason": "length"}
        ls = {**label, "class": "LS"}
        wait_for(lambda: served.metric("qllm:request_success_total", **label) == 4 * 4)
        wait_for(lambda: served.metric("qllm:request_success_total", **ls) == 5 * 4)
        wait_for(lambda: not served.front.answers)
        wait_for(lambda: served.front.engine.stats()["num_live"] == 0)
        served.front.engine.close()


def go_on(served: Serving, engine: QLLMEngine, clients: list[Client]) -> None:
    """Wait for the engine after this one; nobody's answer was done before."""
    wait_for(lambda: engine.failure is not None or served.front.engine is not engine)
    assert all(client.is_alive() for client in clients), "all are in the middle of their answers"
    wait_for(lambda: served.front.engine is not engine, 60)


@pytest.mark.slow  # once: test_every_stream_goes_on_as_if_nothing_had_died
def test_front_ends_of_their_own_carry_their_requests_over_twice(tmp_path: Path) -> None:
    door = str(tmp_path / "engine")
    new, far = partial(make, listen=door), partial(QLLMEngine.attach, door)
    settings: dict[str, Any] = {"restart_backoff_s": 0.2, "max_restarts": 1000}
    settings["restart_backoff_cap_s"] = 0.2
    with (
        serving(new(), new, **settings) as owner,
        serving(far(), far, **settings) as other,
        far() as plain,
    ):
        both = (owner, other)
        expected = [client.answer() for client in ask_all(owner)]
        clients = [ask_until_they_run(served) for served in both]
        lost = plain.submit("abc", "BE", 1000)
        for num_deaths in (1, 2):
            engines = [served.front.engine for served in both]
            kill(owner)
            for served, engine, theirs in zip(both, engines, clients, strict=True):
                go_on(served, engine, theirs)
                if num_deaths == 1:
                    wait_for(lambda log=served.front.log: not log._waiting and log._trial is None)
        assert [client.answer() for theirs in clients for client in theirs] == expected * 2
        assert [s.metric("qllm:requests_replayed_total") for s in both] == [18, 18]
        assert lost.finish_reason is FinishReason.ERROR
        for served in both[::-1]:
            assert served.front.engine.stats()["num_live"] == 0
            served.front.engine.close()


@pytest.mark.slow  # without processes: tests/frontend/test_request_log.py
def test_one_that_kills_engines_fails_alone() -> None:
    new = partial(make, policy=Poisoned())
    with serving(new(), new, restart_backoff_s=0) as served:
        expected = [client.answer() for client in ask_all(served)]
        clients = ask_until_they_run(served)
        poison = Client(served, COMPLETIONS, body(0, prompt=[9] * POISON, service_tier="flex"))
        error = poison.error()
        assert (poison.status, error["code"]) == (500, "engine_error")
        assert "2 engines died while they had this request" in error["message"]
        assert [client.answer() for client in clients] == expected
        assert served.metric("qllm:engine_restarts_total") == 2
        wait_for(lambda: is_ready(served), 60)
        assert served.post(COMPLETIONS, {"prompt": "a", "max_tokens": 2}).status_code == 200
        served.front.engine.close()


def test_all_that_wait_end_when_there_is_no_further_engine() -> None:
    def fail() -> QLLMEngine:
        raise ModelError("the disk is gone")

    with serving(make(), fail, restart_backoff_s=0.3, max_restarts=2) as served:
        clients = ask_until_they_run(served)
        kill(served)
        errors = [client.error() for client in clients]
    assert {error["code"] for error in errors} == {"engine_closed"}
    assert all(
        "the disk is gone; the engine is not brought back: max_restarts=2" in error["message"]
        for error in errors
    )


@pytest.mark.slow  # an engine that comes back: test_supervisor.py
def test_while_there_is_no_engine() -> None:
    """Deadlines and clients that leave do not wait for the next one."""
    go_on = threading.Event()

    def later() -> QLLMEngine:
        assert go_on.wait(60)
        return make()

    with serving(make(), later, restart_backoff_s=0) as served:
        stays = Client(served, COMPLETIONS, body(0, stream=True, max_tokens=1500))
        with httpx.Client(timeout=60) as http:
            asked = body(1, stream=True, max_tokens=1500, service_tier="flex")
            with http.stream("POST", f"{served.url}{COMPLETIONS}", json=asked) as answer:
                lines = answer.iter_lines()
                next(lines)
                wait_for(lambda: stays.has_begun)
                kill(served)
                wait_for(lambda: served.front.log._waiting)
                wait_for(lambda: len(served.front.log._waiting) == 2)
                refused = served.post(COMPLETIONS, {"prompt": "a"})
                assert refused.status_code == 503
                assert refused.json()["error"]["code"] == "engine_restarting"
                assert int(refused.headers["retry-after"]) >= 1
                assert stays.is_alive()
            wait_for(lambda: len(served.front.log._waiting) == 1)
        (late,) = served.front.log._waiting.values()
        late.shift(-HOUR_NS)
        assert stays.error()["code"] == "timeout"
        label = {"class": "BE", "finished_reason": "cancelled"}
        wait_for(lambda: served.metric("qllm:request_success_total", **label) == 1)
        go_on.set()
        wait_for(lambda: is_ready(served), 60)
        assert served.metric("qllm:requests_replayed_total") == 0
        assert served.front.engine.stats()["num_live"] == 0
        served.front.engine.close()


def test_a_request_in_python_has_the_metrics_of_its_whole_life(tmp_path: Path) -> None:
    replayed: list[int] = []
    log = RequestLog(3, lambda: replayed.append(1))
    sampling = SamplingParams(**SAMPLED, ignore_eos=True, logprobs=1, **PENALTIES)
    with make() as first:
        expected = first.submit("abc", "BE", NUM, sampling=sampling).result(300)
        asked_s = time.monotonic()
        slow = first.submit("abc", "BE", NUM, sampling=sampling)
        plain = first.submit("abc", "BE", 1000, sampling=sampling)
        log.keep(slow)
        wait_for(lambda: slow.token_ids)
        first_ms = 1e3 * (time.monotonic() - asked_s)
        wait_for(lambda: len(slow.token_ids) >= 5)
        os.kill(pid_of(first), signal.SIGKILL)
        wait_for(lambda: plain.finish_reason is not None)
        wait_for(lambda: log.holds(slow))
        assert plain.finish_reason is FinishReason.ERROR
        num_before, ended_s = len(slow.token_ids), time.monotonic()
        assert slow.finish_reason is None
        assert slow.status.value == "waiting"
    with make() as second:
        load_ms = 1e3 * (time.monotonic() - ended_s)
        log.go_on(second.replay)
        found = slow.result(300)
        assert (found.token_ids, found.text) == (expected.token_ids, expected.text)
        assert found.logprobs == expected.logprobs
        assert found.finish_reason is FinishReason.LENGTH
        metrics = found.metrics
        assert (metrics.num_prompt_tokens, metrics.num_output_tokens) == (
            len(found.prompt_token_ids), NUM,
        )  # fmt: skip
        gaps = metrics.itl_ms
        assert metrics.queue_ms is None
        assert max(gaps) == gaps[num_before - 1] > load_ms, "the new engine's load"
        assert metrics.ttft_ms is not None
        assert 0 < metrics.ttft_ms < first_ms, "of the first engine"
        assert metrics.e2e_ms == pytest.approx(metrics.ttft_ms + sum(gaps))
        assert replayed == [1]


@pytest.mark.parametrize("draft", ["auto", "exit:2", "model:tiny"])
def test_an_engine_that_drafts_is_killed_and_the_next_one_drafts_on(draft: str) -> None:
    log = RequestLog(3, lambda: None)
    how: dict[str, Any] = {**SAMPLED, **PENALTIES, "logprobs": 1, "ignore_eos": True}
    sampling = SamplingParams(**how, prediction=tuple(range(40, 90)))
    with make() as plain:
        expected = plain.submit("abc", "BE", NUM, sampling=sampling).result(300)
    with make(draft=draft) as first:
        slow = first.submit("abc", "BE", NUM, sampling=sampling)
        log.keep(slow)
        wait_for(lambda: len(slow.token_ids) >= 5)
        os.kill(pid_of(first), signal.SIGKILL)
        wait_for(lambda: log.holds(slow))
        assert slow.finish_reason is None
    with make(draft=draft) as second:
        log.go_on(second.replay)
        found = slow.result(300)
        drafts = second.stats()["drafts"]
    assert (found.token_ids, found.text) == (expected.token_ids, expected.text)
    assert found.logprobs == expected.logprobs
    assert found.finish_reason is FinishReason.LENGTH
    assert drafts["BE"]["accepted"] + drafts["BE"]["rejected"] > 0 or draft == "auto"
