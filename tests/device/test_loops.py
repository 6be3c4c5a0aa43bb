"""The loop on the device behind `QLLMEngine`, on this CPU: answers as from the host's loop."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from qllm import QLLMEngine, SamplingParams
from qllm.device import serving
from qllm.device.server import MAX_FRONT_ENDS
from qllm.errors import ConfigError, InvalidRequestError, RequestFailedError
from qllm.frontend.prompts import MOST_STOP_IDS
from qllm.ingress.remote.meeting import Address, Meeting
from qllm.ingress.remote.pull import PullingFrontEnd
from qllm.types import FinishReason
from tests.support.device_loops import GPU, serves_an_engine
from tests.support.engines import LONG, SETTINGS, free_port, save_model
from tests.support.fake_gpu import BOOT, FAULT, HANG, FakeNursery
from tests.support.families import make_model
from tests.support.files import ROOT
from tests.support.hosts import SECRET
from tests.support.replay import Client
from tests.support.serving import serving as served_over_http
from tests.support.waiting import wait_for

ON_DEVICE: dict[str, Any] = {**GPU, "loop": "conditional", "device": "cuda"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def socket_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("engine") / "socket")


@pytest.fixture(scope="module")
def fake_nursery(request: pytest.FixtureRequest) -> Iterator[FakeNursery | None]:
    """A process that forks the engines; `--lane all` starts each as users do."""
    if request.config.getoption("--lane") != "short":
        yield None
        return
    nursery = FakeNursery()
    yield nursery
    nursery.close()


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch, fake_nursery: FakeNursery | None) -> None:
    monkeypatch.setattr("qllm.frontend.process._BOOT", BOOT)
    if fake_nursery is not None:
        monkeypatch.setattr("qllm.frontend.process.start_process", fake_nursery.fork)
    monkeypatch.setattr("qllm.models.loader.check_device", lambda device: None)
    monkeypatch.syspath_prepend(str(ROOT))


@pytest.mark.usefixtures("fake_gpu")
def test_what_it_does_not_serve_is_said(model: str, tmp_path: Path) -> None:
    unserved: list[dict[str, Any]] = [
        *({f"{name}_penalty": 1.5} for name in ("presence", "frequency", "repetition")),
        *({"logprobs": 0}, {"logit_bias": {7: 1.0}}, {"stop_token_ids": tuple(range(9, 18))}),
    ]
    with QLLMEngine.from_pretrained(model, **ON_DEVICE) as engine:
        for wrong in unserved:
            name = "9 stop ids" if "stop_token_ids" in wrong else next(iter(wrong))
            sampling = SamplingParams(ignore_eos=True, **wrong)
            with pytest.raises(InvalidRequestError, match=f"{name}.* loop='conditional'; leave it"):
                engine.submit("abc", max_tokens=2, sampling=sampling)
        most = SamplingParams(ignore_eos=True, stop_token_ids=tuple(range(MOST_STOP_IDS)))
        engine.submit("abc", max_tokens=2, sampling=most).result(300)
        for what in (engine.checkpoint, engine.restore):
            with pytest.raises(ConfigError, match="is not there with loop='conditional'"):
                what(tmp_path / "file")
    assert MOST_STOP_IDS == serving.MOST_STOP_IDS


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"loop": "magic"}, "'magic' is unknown; use one of host, conditional"),
        ({"loop": "device-launch"}, "'device-launch' is gone: a loop on the device is 'conditi"),
        ({"loop": "native"}, "loop='native' is gone: it saved little on a CPU"),
        ({"scheduler": "native"}, "'scheduler' is gone: Python decides"),
        ({"loop": "conditional", "record": True}, "record=True needs loop='host'"),
        ({"loop": "conditional", "on_policy_error": "fcfs"}, "'fcfs' needs loop='host'"),
        ({"loop": "conditional", "run_in": "thread"}, "rings and needs run_in='process'"),
        ({"loop": "conditional"}, "runs on a GPU and device='cpu'; use 'host'"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], what: str, model: str) -> None:
    with pytest.raises(ConfigError, match=what):
        QLLMEngine.from_pretrained(model, **{**SETTINGS, **settings})


@pytest.mark.usefixtures("fake_gpu")
def test_a_policy_that_does_not_rank_has_no_loop_on_the_device(model: str) -> None:
    with pytest.raises(ConfigError, match="Rota plans by itself; only a RankPolicy can be"):
        QLLMEngine.from_pretrained(model, policy="rota", **ON_DEVICE)
    with pytest.raises(ConfigError, match="needs run_in='process'"):
        QLLMEngine.from_model(make_model("mixtral"), loop="conditional")


@pytest.mark.usefixtures("fake_gpu")
def test_more_front_ends_than_there_is_room_for(model: str, socket_path: str) -> None:
    others = []
    with QLLMEngine.from_pretrained(model, listen=socket_path, **ON_DEVICE) as engine:
        try:
            for _ in range(MAX_FRONT_ENDS - 1):
                others.append(QLLMEngine.attach(socket_path))
                others[-1].submit("abc", max_tokens=1).result(300)
            one_more = QLLMEngine.attach(socket_path)
            others.append(one_more)
            wait_for(lambda: one_more.failure is not None)
            assert len(engine.submit("hello", max_tokens=9).result(300).token_ids) == 9
        finally:
            for other in others:
                other.close()
        wait_for(lambda: len(_fresh(socket_path)) == 2)


def _fresh(socket_path: str) -> tuple[int, ...]:
    """What a front end gets that comes now; nothing if there is no room."""
    with QLLMEngine.attach(socket_path) as other:
        try:
            return other.submit("abc", max_tokens=2).result(300).token_ids
        except Exception:  # noqa: BLE001 - the place of the last one is not free yet
            return ()


@pytest.mark.usefixtures("fake_gpu")
def test_the_loop_on_the_device_serves_an_engine(model: str, socket_path: str) -> None:
    serves_an_engine(model, socket_path + "-device")


@pytest.mark.usefixtures("fake_gpu")
def test_front_ends_of_other_hosts_fetch_what_the_device_wrote(model: str, tmp_path: Path) -> None:
    meeting = Meeting(Address("127.0.0.1", free_port()), "tcp", SECRET)
    secret_file = tmp_path / "secret"
    secret_file.write_bytes(SECRET)
    with QLLMEngine.from_pretrained(model, meeting=meeting, **ON_DEVICE) as engine:
        with QLLMEngine.connect(str(meeting.address), secret_file=secret_file) as far:
            assert isinstance(far._client._front_end, PullingFrontEnd)  # type: ignore[attr-defined]
            for _ in range(3):
                handles = [e.submit("hello", max_tokens=9, sampling=LONG) for e in (engine, far)]
                assert len({h.result(300).token_ids for h in handles}) == 1
            for _ in range(40):  # they ring no bell, and stop a step all the same
                slow = engine.submit([9] * 45, "BE", 2, sampling=LONG)
                wait_for(lambda: engine.stats()["frames"])
                far.submit("abc", "LS", 2, sampling=LONG).result(300)
                slow.result(300)
                if engine.stats()["num_preemptions"]:
                    break
            assert engine.stats()["num_preemptions"] > 0
            left = far.submit("hello", "BE", 200, sampling=LONG)
            next(iter(left))
            assert far.stats()["num_live"] == 1
        assert left.result(300).finish_reason is FinishReason.CANCELLED
        wait_for(lambda: engine.stats()["num_live"] == 0)
        assert len(engine.submit("hello", max_tokens=5, sampling=LONG).result(300).token_ids) == 5


@pytest.mark.parametrize(("length", "why"), [(FAULT, "IllegalAddress"), (HANG, "a stage hangs")])
@pytest.mark.usefixtures("fake_gpu")
def test_a_fault_or_a_hang_of_the_device_ends_its_process(
    length: int, why: str, model: str
) -> None:
    engine = QLLMEngine.from_pretrained(model, **ON_DEVICE)
    try:
        long = engine.submit("abc", "BE", 200, sampling=LONG)
        next(iter(long))
        engine.submit([3] * length, "LS", 2, sampling=LONG)
        with pytest.raises(RequestFailedError, match=why):
            long.result(300)
        assert why in str(engine.failure)
    finally:
        engine.close()


@pytest.mark.slow  # a fault of two devices, with clients: the test above
@pytest.mark.usefixtures("fake_gpu")
def test_after_a_fault_of_the_device_every_stream_goes_on(model: str) -> None:
    """A request makes two devices fault and gets the error; the others see nothing of it."""
    make = partial(QLLMEngine.from_pretrained, model, **ON_DEVICE)
    common = {"prompt": "hello", "max_tokens": 40, "ignore_eos": True, "stream": True}
    asks: list[dict[str, Any]] = [
        {**common, "temperature": 0},
        {**common, "temperature": 0.9, "seed": 3, "service_tier": "flex"},
    ]
    with served_over_http(make(), make, restart_backoff_s=0.1) as served:
        calm = [Client(served, "/v1/completions", ask).answer() for ask in asks]
        clients = [Client(served, "/v1/completions", ask) for ask in asks]
        wait_for(lambda: all(client.has_begun for client in clients))
        poison = Client(served, "/v1/completions", {"prompt": [3] * FAULT, "max_tokens": 4})
        assert "2 engines died while they had this request" in poison.error()["message"]
        assert [client.answer() for client in clients] == calm
        assert served.metric("qllm:engine_restarts_total") == 2
