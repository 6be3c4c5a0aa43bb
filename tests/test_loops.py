"""Every loop behind `QLLMEngine` gives the same answers and keeps the same promises."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from device_loops import GPU, serves_an_engine
from fake_gpu import BOOT, FAULT, HANG
from families import make_model
from hosts import LONG, SETTINGS, pid_of, save_model, wait_for
from serving import serving as served_over_http
from serving import until
from test_process_client import ATTACHED
from test_rings_hosts import SECRET, free_port
from test_server_replay import Client

from qllm import QLLMEngine, SamplingParams
from qllm.device import serving
from qllm.device.server import MAX_FRONT_ENDS, MIN_CAPACITY
from qllm.errors import ConfigError, EngineClosedError, InvalidRequestError, RequestFailedError
from qllm.frontend.prompts import MOST_STOP_IDS
from qllm.ingress.layout import NUMBER_BITS
from qllm.ingress.remote.meeting import Address, Meeting
from qllm.ingress.remote.pull import PullingFrontEnd
from qllm.types import FinishReason, RequestStatus

EXACT = SETTINGS | {"exactness": "batch-invariant", "max_kv_tokens": 8192}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def socket_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("engine") / "socket")


@pytest.fixture(scope="module")
def engine(model: str, socket_path: str) -> Iterator[QLLMEngine]:
    with QLLMEngine.from_pretrained(model, loop="native", listen=socket_path, **EXACT) as made:
        yield made


@pytest.fixture(scope="module")
def wanted(model: str) -> Iterator[QLLMEngine]:
    with QLLMEngine.from_pretrained(model, **EXACT) as made:
        yield made


def answers(engine: QLLMEngine) -> list[tuple[Any, ...]]:
    """LS arrives inside BE passes; greedy, sampled, with stop strings and ids, and too late."""
    found = []
    for i in range(3):
        long = [engine.submit([5 + i + k] * 900, "BE", 8, sampling=LONG) for k in range(2)]
        wait_for(lambda: any(f["state"] == "running" for f in engine.stats()["frames"]))
        for k, how in enumerate((LONG, SamplingParams(temperature=0.8, seed=i, top_p=0.9))):
            long.append(engine.submit(f"hello {i} {k}", "LS", 8, sampling=how))
        long.append(engine.submit("q", "LS", 30, sampling=SamplingParams(temperature=1, seed=2)))
        found += [(r.token_ids, r.text, r.finish_reason) for r in [h.result(60) for h in long]]
    whole = engine.submit("q", max_tokens=30, sampling=LONG).result(60)
    short = engine.submit("q", max_tokens=30, sampling=LONG, stop=whole.text[4:7]).result(60)
    by_id = SamplingParams(temperature=0, stop_token_ids=(whole.token_ids[3],))
    early = engine.submit("q", max_tokens=30, sampling=by_id).result(60)
    assert [r.finish_reason for r in (short, early)] == [FinishReason.STOP] * 2
    late = engine.submit("abc", "BE", 1500, sampling=LONG, timeout_s=0.05).result(60)
    assert late.finish_reason is FinishReason.TIMEOUT
    return [*found, *((r.token_ids, r.text) for r in (whole, short, early))]


def test_the_native_loop_answers_as_the_loop_of_the_host(
    engine: QLLMEngine, wanted: QLLMEngine
) -> None:
    assert answers(engine) == answers(wanted)
    stats, theirs = engine.stats(), wanted.stats()
    assert stats.keys() == theirs.keys()
    assert stats["num_preemptions"] > 0
    assert len(stats["preempt_latencies_ms"]) == stats["num_preemptions"]
    assert all(0 < ms < 10_000 for ms in stats["preempt_latencies_ms"])
    assert stats["longest_segment_ms"] > 0
    assert stats["longest_plan_ms"] > 0
    assert stats["expert_bytes"] > 0
    wait_for(lambda: engine.stats()["num_live"] == 0)
    assert engine.stats()["kv_blocks_used"] == 0
    assert engine.num_waiting == 0


def test_where_a_request_is(engine: QLLMEngine) -> None:
    long = engine.submit([7] * 1000, "BE", 400, sampling=LONG)
    next(iter(long))
    assert long.status is RequestStatus.RUNNING
    seen = set()
    while RequestStatus.PARKED not in seen and not long.finish_reason:
        again = engine.submit([3] * 1000, "BE", 2, sampling=LONG)
        engine.submit("abc", "LS", 2, sampling=LONG).result(60)
        seen |= set(engine.statuses([long, again]))
        again.result(60)
    assert RequestStatus.PARKED in seen
    long.cancel()
    assert long.result(60).finish_reason is FinishReason.CANCELLED
    assert long.status is RequestStatus.FINISHED
    wait_for(lambda: engine.stats()["num_live"] == 0)


def test_what_it_does_not_serve_is_said(engine: QLLMEngine, model: str, tmp_path: Path) -> None:
    unserved: list[dict[str, Any]] = [
        *({f"{name}_penalty": 1.5} for name in ("presence", "frequency", "repetition")),
        *({"logprobs": 0}, {"logit_bias": {7: 1.0}}, {"stop_token_ids": tuple(range(9, 18))}),
    ]
    for wrong in unserved:
        name = "9 stop ids" if "stop_token_ids" in wrong else next(iter(wrong))
        with pytest.raises(InvalidRequestError, match=f"{name}.* loop='native'; leave it out"):
            engine.submit("abc", max_tokens=2, sampling=SamplingParams(ignore_eos=True, **wrong))
    most = SamplingParams(ignore_eos=True, stop_token_ids=tuple(range(MOST_STOP_IDS)))
    engine.submit("abc", max_tokens=2, sampling=most).result(60)
    assert MOST_STOP_IDS == serving.MOST_STOP_IDS
    with pytest.raises(ConfigError, match="checkpoint is not there with loop='native'"):
        engine.checkpoint(tmp_path / "file")
    with pytest.raises(ConfigError, match="restore is not there with loop='native'"):
        engine.restore(tmp_path / "file")
    for settings, what in (
        ({"loop": "magic"}, "'magic' is unknown; use one of host, native, conditional"),
        ({"loop": "device-launch"}, "'device-launch' is gone: a loop on the device is 'conditi"),
        ({"loop": "native", "record": True}, "record=True needs loop='host'"),
        ({"loop": "native", "on_policy_error": "fcfs"}, "on_policy_error='fcfs' needs loop='host'"),
        ({"loop": "native", "scheduler": "native"}, "leave scheduler at 'python'"),
        ({"loop": "native", "run_in": "thread"}, "serves rings and needs run_in='process'"),
        ({"loop": "conditional"}, "runs on a GPU and device='cpu'; use 'native' or 'host'"),
        ({"loop": "native", "policy": "rota"}, "Rota plans by itself; only a RankPolicy can be"),
    ):
        with pytest.raises(ConfigError, match=what):
            QLLMEngine.from_pretrained(model, **{**EXACT, **settings})
    with pytest.raises(ConfigError, match="needs run_in='process'"):
        QLLMEngine.from_model(make_model("mixtral"), loop="native")


def test_front_ends_come_later_and_die(engine: QLLMEngine, socket_path: str) -> None:
    assert engine.call(os.getpid) == pid_of(engine) != os.getpid()
    with QLLMEngine.attach(socket_path) as other:
        handles = [e.submit("hello", max_tokens=9) for e in (engine, other)]
        assert len({h.result(60).token_ids for h in handles}) == 1
        left = other.submit("hello", max_tokens=1500, sampling=LONG)
        next(iter(left))
    assert left.result(1).finish_reason is FinishReason.CANCELLED
    command = [sys.executable, "-c", ATTACHED, socket_path]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as killed:
        assert killed.stdin is not None
        assert killed.stdout is not None
        assert int(killed.stdout.readline()) >> NUMBER_BITS > 1
        mine = engine.submit("hello", max_tokens=60, sampling=LONG)
        killed.stdin.write("\n")
        killed.stdin.flush()
        assert killed.wait(60) == -signal.SIGKILL
        assert len(mine.result(60).token_ids) == 60
    wait_for(lambda: engine.stats()["num_live"] == 0)


def test_more_front_ends_than_there_is_room_for(engine: QLLMEngine, socket_path: str) -> None:
    others = []
    try:
        for _ in range(MAX_FRONT_ENDS - 1):
            others.append(QLLMEngine.attach(socket_path))
            others[-1].submit("abc", max_tokens=1).result(60)
        one_more = QLLMEngine.attach(socket_path)
        others.append(one_more)
        wait_for(lambda: one_more.failure is not None)
        assert len(engine.submit("hello", max_tokens=9).result(60).token_ids) == 9
    finally:
        for other in others:
            other.close()
    wait_for(lambda: len(_fresh(socket_path)) == 2)


def _fresh(socket_path: str) -> tuple[int, ...]:
    """What a front end gets that comes now; nothing if there is no room."""
    with QLLMEngine.attach(socket_path) as other:
        try:
            return other.submit("abc", max_tokens=2).result(60).token_ids
        except Exception:  # noqa: BLE001 - the place of the last one is not free yet
            return ()


def _broken(*_: object) -> None:
    raise RuntimeError("broken on purpose")


def _break() -> None:
    from qllm.device.server import NativeServer

    NativeServer.decide = _broken  # type: ignore[assignment,method-assign]


def test_a_crash_of_the_loop_ends_every_request_with_the_reason(model: str) -> None:
    engine = QLLMEngine.from_pretrained(model, loop="native", **EXACT)
    try:
        classes = ("LS", *["BE"] * (MIN_CAPACITY + 20))  # some stay in their ring
        handles = [engine.submit("abc", p, 1500, sampling=LONG) for p in classes]
        next(iter(handles[0]))
        with suppress(EngineClosedError):  # it may be gone before it answers
            engine.call(_break)
        for handle in handles:
            with pytest.raises(RequestFailedError, match="RuntimeError: broken on purpose"):
                handle.result(60)
        assert "broken on purpose" in str(engine.failure)
    finally:
        engine.close()


# -- the loop on the device, on this CPU


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    tests = str(Path(__file__).parent)
    monkeypatch.setattr("qllm.frontend.process._BOOT", BOOT)
    monkeypatch.setattr("qllm.llm.check_device", lambda device: None)
    monkeypatch.syspath_prepend(tests)


@pytest.mark.usefixtures("fake_gpu")
def test_the_loop_on_the_device_serves_an_engine(model: str, socket_path: str) -> None:
    serves_an_engine(model, socket_path + "-device")


@pytest.mark.usefixtures("fake_gpu")
def test_front_ends_of_other_hosts_fetch_what_the_device_wrote(model: str, tmp_path: Path) -> None:
    meeting = Meeting(Address("127.0.0.1", free_port()), "tcp", SECRET)
    secret_file = tmp_path / "secret"
    secret_file.write_bytes(SECRET)
    settings = GPU | {"loop": "conditional", "device": "cuda", "meeting": meeting}
    with QLLMEngine.from_pretrained(model, **settings) as engine:
        with QLLMEngine.connect(str(meeting.address), secret_file=secret_file) as far:
            assert isinstance(far._client._front_end, PullingFrontEnd)  # type: ignore[attr-defined]
            for _ in range(3):
                handles = [e.submit("hello", max_tokens=9, sampling=LONG) for e in (engine, far)]
                assert len({h.result(60).token_ids for h in handles}) == 1
            for _ in range(40):  # they ring no bell, and stop a step all the same
                slow = engine.submit([9] * 45, "BE", 2, sampling=LONG)
                wait_for(lambda: engine.stats()["frames"])
                far.submit("abc", "LS", 2, sampling=LONG).result(60)
                slow.result(60)
                if engine.stats()["num_preemptions"]:
                    break
            assert engine.stats()["num_preemptions"] > 0
            left = far.submit("hello", "BE", 200, sampling=LONG)
            next(iter(left))
            assert far.stats()["num_live"] == 1
        assert left.result(1).finish_reason is FinishReason.CANCELLED
        wait_for(lambda: engine.stats()["num_live"] == 0)
        assert len(engine.submit("hello", max_tokens=5, sampling=LONG).result(60).token_ids) == 5


@pytest.mark.parametrize(("length", "why"), [(FAULT, "IllegalAddress"), (HANG, "a stage hangs")])
@pytest.mark.usefixtures("fake_gpu")
def test_a_fault_or_a_hang_of_the_device_ends_its_process(
    length: int, why: str, model: str
) -> None:
    settings = GPU | {"loop": "conditional", "device": "cuda"}
    engine = QLLMEngine.from_pretrained(model, **settings)
    try:
        long = engine.submit("abc", "BE", 200, sampling=LONG)
        next(iter(long))
        engine.submit([3] * length, "LS", 2, sampling=LONG)
        with pytest.raises(RequestFailedError, match=why):
            long.result(60)
        assert why in str(engine.failure)
    finally:
        engine.close()


@pytest.mark.usefixtures("fake_gpu")
def test_after_a_fault_of_the_device_every_stream_goes_on(model: str) -> None:
    """A request makes two devices fault and gets the error; the others see nothing of it."""
    settings = GPU | {"loop": "conditional", "device": "cuda"}
    make = partial(QLLMEngine.from_pretrained, model, **settings)
    common = {"prompt": "hello", "max_tokens": 40, "ignore_eos": True, "stream": True}
    asks: list[dict[str, Any]] = [
        {**common, "temperature": 0},
        {**common, "temperature": 0.9, "seed": 3, "service_tier": "flex"},
    ]
    with served_over_http(make(), make, restart_backoff_s=0.1) as served:
        calm = [Client(served, "/v1/completions", ask).answer() for ask in asks]
        clients = [Client(served, "/v1/completions", ask) for ask in asks]
        until(lambda: all(client.has_begun for client in clients))
        poison = Client(served, "/v1/completions", {"prompt": [3] * FAULT, "max_tokens": 4})
        assert "2 engines died while they had this request" in poison.error()["message"]
        assert [client.answer() for client in clients] == calm
        assert served.metric("qllm:engine_restarts_total") == 2
