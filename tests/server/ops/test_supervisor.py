"""An engine that dies under a server, and comes back."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qllm.config import EngineConfig
from qllm.errors import ModelError, RequestFailedError
from qllm.frontend.process import WATCH_S, Watchdog
from qllm.llm import QLLMEngine
from qllm.server.config import ServerConfig, load_config
from qllm.server.ops.supervisor import Restarts
from qllm.server.serve import serve, serve_engine
from tests.support.batches import ended, line, records, start
from tests.support.engines import POISON, Poisoned, freeze, is_alive, pid_of
from tests.support.serving import Serving, serving, tiny_engine
from tests.support.sizes import SIZES
from tests.support.waiting import wait_for

COMPLETIONS = "/v1/completions"
SETTINGS = {"max_kv_tokens": 16384, "conformance": False}
make = partial(tiny_engine, **SETTINGS)


def kill(served: Serving) -> None:
    os.kill(pid_of(served.front.engine), signal.SIGKILL)


def is_ready(served: Serving) -> bool:
    return served.get("/ready").status_code == 200


def test_without_replays_a_killed_engine_ends_its_streams_and_comes_back(tmp_path: Path) -> None:
    num_lines, go_on = 80, threading.Event()

    def later() -> QLLMEngine:
        assert go_on.wait(120)
        return make()

    with (
        serving(make(), later, state_dir=tmp_path, restart_backoff_s=0, max_replays=0) as served,
        served.client() as client,
    ):
        lengths = [30 if n < 8 else 120 for n in range(num_lines)]
        lines = [line(n, max_tokens=x, ignore_eos=True) for n, x in enumerate(lengths)]
        batch_id = start(client, lines).id
        streams = [
            client.completions.create(
                model="tiny", prompt="x", max_tokens=4000, stream=True,
                extra_body={"ignore_eos": True},
            )
            for _ in range(3)
        ]  # fmt: skip
        for stream in streams:
            next(stream)
        whole = httpx.Client(timeout=60)
        wait_for(lambda: client.batches.retrieve(batch_id).request_counts.completed >= 4)
        kill(served)
        for stream in streams:
            with pytest.raises(openai.APIError, match="was killed by SIGKILL"):
                list(stream)
        refused = served.post(COMPLETIONS, {"prompt": "a"})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "engine_restarting"
        assert int(refused.headers["retry-after"]) >= 1
        ready = served.get("/ready")
        assert (ready.status_code, "retry-after" in ready.headers) == (503, True)
        assert served.get("/health").json()["status"] == "restarting"
        assert 'qllm:engine_up{model_name="tiny"} 0.0' in served.get("/metrics").text
        before = client.batches.retrieve(batch_id)
        assert before.status == "in_progress"
        assert 4 <= before.request_counts.completed < num_lines
        go_on.set()
        wait_for(lambda: is_ready(served), 60)
        answer = whole.post(f"{served.url}{COMPLETIONS}", json={"prompt": "a", "max_tokens": 2})
        assert answer.status_code == 200
        batch = ended(client, batch_id, 120)
        assert batch.request_counts.model_dump() == {
            "total": num_lines, "completed": num_lines, "failed": 0,
        }  # fmt: skip
        found = records(client, batch.output_file_id)
        assert [r["custom_id"] for r in found] == [f"line-{n}" for n in range(num_lines)]
        assert [r["response"]["body"]["usage"]["completion_tokens"] for r in found] == lengths
        assert served.metric("qllm:engine_restarts_total") == 1
        assert served.metric("qllm:requests_replayed_total") == 0
        assert served.metric("qllm:engine_up") == 1
        whole.close()
        served.front.engine.close()


@pytest.mark.slow  # without processes: tests/frontend/test_request_log.py
def test_a_line_that_kills_engines_fails_alone(tmp_path: Path) -> None:
    make = partial(tiny_engine, policy=Poisoned(), **SETTINGS)
    settings = {"state_dir": tmp_path, "restart_backoff_s": 0, "batch_concurrency": 4}
    with serving(make(), make, **settings) as served, served.client() as client:
        lines = [line(n, max_tokens=20, ignore_eos=True) for n in range(12)]
        lines[5] = line(5, prompt=[9] * POISON)
        batch = ended(client, start(client, lines).id, 120)
        counts = {"total": 12, "completed": 11, "failed": 1}
        assert batch.request_counts.model_dump() == counts
        (failed,) = records(client, batch.error_file_id)
        assert failed["custom_id"] == "line-5"
        assert failed["response"]["status_code"] == 500
        error = failed["response"]["body"]["error"]
        assert error["code"] == "engine_ended"
        assert "the engine ended 2 times while it answered this" in error["message"]
        assert served.metric("qllm:engine_restarts_total") == 2
        wait_for(lambda: is_ready(served), 60)
        served.front.engine.close()


def test_a_stuck_engine_is_killed_and_replaced() -> None:
    settings: dict[str, Any] = {"restart_backoff_s": 0, "max_replays": 0}
    with serving(make(), make, **settings) as served, served.client() as client:
        pid = pid_of(served.front.engine)
        stream = client.completions.create(
            model="tiny", prompt="x", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        freeze(pid)
        served.front.engine.end_if_stuck(2)
        with pytest.raises(openai.APIError, match="did not come round for 2 s"):
            list(stream)
        wait_for(lambda: not is_alive(pid))
        wait_for(lambda: is_ready(served), 60)
        assert served.post(COMPLETIONS, {"prompt": "a", "max_tokens": 2}).status_code == 200
        served.front.engine.close()


def test_a_limit_that_is_set_again_and_again_still_ends_a_stuck_engine() -> None:
    with make() as engine:
        handle = engine.submit("x", "LS", 4000, ignore_eos=True)
        freeze(pid_of(engine))
        wait_for(lambda: engine.end_if_stuck(2) or engine.failure is not None)
        with pytest.raises(RequestFailedError, match="did not come round for 2 s"):
            handle.result(60)


def test_a_server_ends_if_its_engine_does_not_come_back() -> None:
    tries: list[int] = []

    def fail() -> QLLMEngine:
        tries.append(1)
        raise ModelError("the disk is gone")

    with serving(make(), fail, restart_backoff_s=0, max_restarts=3) as served:
        kill(served)
        wait_for(lambda: served.server.should_exit or served.front.gave_up is not None)
        wait_for(lambda: not served.server.started or served.front.draining.is_set())
        assert len(tries) == 3
        assert "the disk is gone; the engine is not brought back: max_restarts=3" in (
            served.front.gave_up or ""
        )


def test_serve_exits_with_the_reason() -> None:
    code = "from qllm.cli import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", code, "serve", "tiny", "--port", "0", "--threads", "1",
         "--set", "conformance=false", "--server", "max_restarts=0"],
        stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as server:  # fmt: skip
        assert server.stderr is not None
        text = "\n"
        while text and "http://" not in text:
            text = server.stderr.readline()
        assert text, "the server ended before it listened"
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
        said = server.stderr.read()
        assert server.wait(60) == 2
    assert re.search(
        r"qllm: the engine process \(pid \d+\) was killed by SIGKILL.* max_restarts=0", said
    )


def test_a_restart_waits_longer_each_time_and_not_for_ever() -> None:
    config = ServerConfig(
        model="x", max_restarts=4, restart_window_s=100, restart_backoff_s=2,
        restart_backoff_cap_s=7,
    )  # fmt: skip
    restarts = Restarts(config)
    assert [restarts.wait_s(t) for t in (0, 10, 20, 30, 40)] == [2, 4, 7, 7, None]
    assert restarts.wait_s(101) == 7
    assert restarts.wait_s(300) == 2


@given(st.lists(st.floats(0, 50), max_size=40), st.integers(0, 5))
def test_no_window_has_more_restarts_than_allowed(gaps: list[float], most: int) -> None:
    restarts = Restarts(ServerConfig(model="x", max_restarts=most, restart_window_s=60))
    now, done = 0.0, []
    for gap in gaps:
        now += gap
        if restarts.wait_s(now) is not None:
            done.append(now)
    assert all(sum(t - 60 <= other <= t for other in done) <= most for t in done)
    assert bool(done) == bool(gaps and most)


S = 10**9


def test_the_watchdog_counts_only_what_it_watched() -> None:
    dog = Watchdog(10, 0)
    looks = [dog.is_stuck(5, True, t * S) for t in range(1, 12)]
    assert looks == [False] * 11  # the first look has seen the heartbeat change
    assert dog.is_stuck(5, True, 12 * S)
    assert not dog.is_stuck(6, True, 13 * S)
    assert not dog.is_stuck(6, False, 10_000 * S)
    assert not dog.is_stuck(6, True, 20_000 * S), "a suspended machine"
    assert 2 * WATCH_S < 10


def test_only_a_process_that_is_ours_can_be_ended() -> None:
    from tests.support.families import make_model

    with (
        QLLMEngine.from_model(make_model("mixtral"), conformance=False) as engine,
        pytest.raises(ValueError, match="a process of its own, made here"),
    ):
        engine.end_if_stuck(1)


@pytest.mark.parametrize("run", [serve, serve_engine])
def test_an_engine_that_follows_another_has_the_sizes_that_it_chose(
    run: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    class EnoughError(Exception):
        pass

    def seen(*args: Any) -> None:
        got.extend(args)
        raise EnoughError

    got: list[Any] = []
    info = SimpleNamespace(chosen=("max_kv_tokens", "prefix_states_gib"))
    engine = SimpleNamespace(
        config=EngineConfig(**SIZES), client=SimpleNamespace(info=info), fleet=None, failure="dead"
    )
    engine.close = lambda: None
    module = "qllm.server.serve"
    monkeypatch.setattr(f"{module}.make_engine", lambda config: engine)
    monkeypatch.setattr(f"{module}.banner", lambda *_: [])
    monkeypatch.setattr(f"{module}.PERIOD_S", 0)
    for name in ("create_app", "_replaced"):
        monkeypatch.setattr(f"{module}.{name}", seen)
    config = load_config(
        None, {}, {"model": "tiny", "port": 0, "engine": {"max_num_seqs": 4, "record": True}}
    )
    with pytest.raises(EnoughError):
        run(config)
    again = got[2].args[0] if run is serve else got[0]
    sizes = {"max_kv_tokens": 65536, "prefix_states_gib": 2.0}
    assert again.engine == {"max_num_seqs": 4, "record": True, **sizes}
