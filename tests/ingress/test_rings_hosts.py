"""Engine and front end on two hosts: they meet over TCP, and share rings over NIXL."""

import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from qllm import QLLMEngine, SamplingParams
from qllm.errors import ConfigError, EngineClosedError, RequestFailedError
from qllm.frontend.remote import RemoteHello
from qllm.ingress.remote.meeting import (
    Address,
    Meeting,
)
from qllm.types import FinishReason, RequestStatus
from tests.support.engines import LONG, SETTINGS, free_port, freeze, pid_of, save_model
from tests.support.forked import start_program
from tests.support.hosts import SECRET
from tests.support.waiting import wait_for

GREEDY = SamplingParams(temperature=0)
LOOPBACK = Address("127.0.0.1", 0)


# -- two processes, one machine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def met(model: str) -> Iterator[QLLMEngine]:
    meeting = Meeting(Address("127.0.0.1", free_port()), "tcp", SECRET)
    with QLLMEngine.from_pretrained(model, meeting=meeting, **SETTINGS) as engine:
        engine.address = str(meeting.address)  # type: ignore[attr-defined]
        yield engine


@pytest.fixture(scope="module")
def secret_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("secret") / "secret"
    file.write_bytes(SECRET)
    return file


@pytest.fixture
def far(met: QLLMEngine, secret_file: Path) -> Iterator[QLLMEngine]:
    with QLLMEngine.connect(met.address, secret_file=secret_file) as far:  # type: ignore[attr-defined]
        yield far


def test_a_far_front_end_gets_the_same_tokens(met: QLLMEngine, far: QLLMEngine) -> None:
    prompts = ["abc", "def f(", "x" * 300]
    near = [met.submit(p, max_tokens=20, sampling=GREEDY).result(300) for p in prompts]
    classes = ("LS", "BE", "LS")
    handles = [far.submit(p, c, 20, sampling=GREEDY) for p, c in zip(prompts, classes, strict=True)]
    for handle, same in zip(handles, near, strict=True):
        result = handle.result(300)
        assert (result.token_ids, result.text) == (same.token_ids, same.text)
        ttft = result.metrics.ttft_ms
        assert ttft is not None
        assert 0 <= ttft <= result.metrics.e2e_ms
    assert (far.model_name, far.config) == (met.model_name, met.config)
    assert far.sampling_defaults == met.sampling_defaults
    stats = far.stats()
    assert stats["kv_blocks"] == met.stats()["kv_blocks"]
    error_ns = far._client.clock.error_ns  # type: ignore[attr-defined]
    before_ns, far_ns, after_ns = met.now_ns(), far.now_ns(), met.now_ns()
    assert before_ns - error_ns <= far_ns <= after_ns + error_ns


def test_a_far_front_end_cancels_and_drains(far: QLLMEngine) -> None:
    handle = far.submit("abc", max_tokens=1500, sampling=LONG)
    next(iter(handle))
    assert handle.status in (RequestStatus.RUNNING, RequestStatus.PARKED)
    handle.cancel()
    assert handle.result(300).finish_reason is FinishReason.CANCELLED
    wait_for(lambda: far.stats()["num_live"] == 0)
    assert far.drain(1)
    with pytest.raises(EngineClosedError, match="drains"):
        far.submit("abc")


def test_what_needs_the_engines_host_is_refused(far: QLLMEngine, tmp_path: Path) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: far.call(os.getpid),
        lambda: far.checkpoint(tmp_path / "x"),
        lambda: far.restore(tmp_path / "x"),
        lambda: far.trace,
    ]
    for call in calls:
        with pytest.raises(ConfigError, match=r"is for the engine's own host; .*127\.0\.0\.1"):
            call()
    client: Any = far._client
    for op in ("call", "checkpoint", "events", "__init__"):
        with pytest.raises(ConfigError, match="is for front ends of the engine's own host"):
            client._ask(op, "x")
    assert far.submit("abc", max_tokens=2).result(300)


def test_who_does_not_belong_is_turned_away(
    met: QLLMEngine, tmp_path: Path, secret_file: Path
) -> None:
    address: str = met.address  # type: ignore[attr-defined]
    with pytest.raises(EngineClosedError, match="do both sides have the same secret_file"):
        QLLMEngine.connect(address)
    with pytest.raises(ConfigError, match="profile='shm' meets an engine with profile='tcp'"):
        QLLMEngine.connect(address, profile="shm", secret_file=secret_file)
    with pytest.raises(ConfigError, match="'tiny' has another vocabulary"):
        QLLMEngine.connect(address, secret_file=secret_file, tokenizer="tiny")
    with pytest.raises(EngineClosedError, match="no engine answers at 127"):
        QLLMEngine.connect(f"127.0.0.1:{free_port()}")
    assert met.submit("abc", max_tokens=2).result(300)


def test_strangers_do_not_close_the_door(met: QLLMEngine, secret_file: Path) -> None:
    address: str = met.address  # type: ignore[attr-defined]
    host, _, port = address.rpartition(":")
    reset = struct.pack("ii", 1, 0)
    held = []
    for n in range(40):
        stranger = socket.create_connection((host, int(port)))
        if n < 20:
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            stranger.close()
        else:  # more than the door lets wait
            stranger.sendall(b"\0\0\0\2{}")
            held.append(stranger)
    for stranger in held:
        stranger.close()
    connect = partial(QLLMEngine.connect, address, secret_file=secret_file)
    with until_it_works(connect) as far:
        assert far.submit("abc", max_tokens=2).result(300)


def until_it_works(connect: Callable[[], QLLMEngine]) -> QLLMEngine:
    found: list[QLLMEngine] = []

    def works() -> bool:
        with suppress(EngineClosedError):
            found.append(connect())
        return bool(found)

    wait_for(works)
    return found[0]


FRONT_END = """
    import sys
    from qllm import QLLMEngine, SamplingParams
    engine = QLLMEngine.connect({address!r}, secret_file={secret!r})
    greedy = SamplingParams(temperature=0)
    print(engine.submit("def f(", max_tokens=20, sampling=greedy).result(300).token_ids, flush=True)
    long = SamplingParams(temperature=0, ignore_eos=True)
    handle = engine.submit("abc", max_tokens=1900, sampling=long)
    next(iter(handle))
    print("runs", flush=True)
    sys.stdin.read()
"""


def front_end_of(address: str, secret: Path) -> str:
    return textwrap.dedent(FRONT_END.format(address=address, secret=str(secret)))


def test_a_far_front_end_that_dies_frees_its_requests(met: QLLMEngine, secret_file: Path) -> None:
    with start_program(front_end_of(met.address, secret_file)) as process:  # type: ignore[attr-defined]
        process.stdout.readline()
        assert process.stdout.readline() == "runs\n"
        assert met.stats()["num_live"] == 1
        process.kill()
        wait_for(lambda: met.stats()["num_live"] == 0)
    assert met.stats()["kv_blocks_used"] == 0
    assert met.submit("abc", max_tokens=2).result(300)


def test_a_far_engine_that_dies_ends_every_handle(model: str) -> None:
    meeting = Meeting(Address("127.0.0.1", free_port()), "tcp", b"")
    with (
        QLLMEngine.from_pretrained(model, meeting=meeting, **SETTINGS) as engine,
        QLLMEngine.connect(str(meeting.address)) as far,
    ):
        handles = [far.submit("abc", p, 1500, sampling=LONG) for p in ("LS", "BE")]
        next(iter(handles[0]))
        os.kill(pid_of(engine), signal.SIGKILL)
        for handle in handles:
            with pytest.raises(RequestFailedError, match=r"the engine at 127.* is gone"):
                handle.result(300)
        assert "is gone" in (far.failure or "")
        with pytest.raises(EngineClosedError, match="is gone"):
            far.submit("abc")


def test_a_silent_engine_is_gone(
    model: str, monkeypatch: pytest.MonkeyPatch, secret_file: Path
) -> None:
    meeting = Meeting(Address("127.0.0.1", free_port()), "tcp", b"")
    with (
        QLLMEngine.from_pretrained(model, meeting=meeting, **SETTINGS) as engine,
        QLLMEngine.connect(str(meeting.address)) as far,
    ):
        handle = far.submit("abc", max_tokens=1500, sampling=LONG)
        next(iter(handle))
        monkeypatch.setattr("qllm.ingress.remote.meeting.LIVENESS_S", 1.0)
        freeze(pid_of(engine))
        with pytest.raises(RequestFailedError, match="is gone"):
            handle.result(300)
        os.kill(pid_of(engine), signal.SIGCONT)


# -- `qllm serve` in two roles


def start(stack: ExitStack, log: Path, *arguments: str) -> Any:
    """Start `qllm serve`, whose log goes to a file."""
    log.touch()
    code = f"""
import os, sys
os.dup2(os.open({str(log)!r}, os.O_WRONLY), 2)
sys.argv[1:1] = ["serve"]
from qllm.cli import main
main()
"""
    process = stack.enter_context(start_program(code, *arguments))
    stack.callback(process.kill)
    return process


def said(log: Path, process: Any, mark: str) -> str:
    wait_for(lambda: mark in log.read_text() or process.poll() is not None, 120)
    lines = [line for line in log.read_text().splitlines() if mark in line]
    assert lines, log.read_text()
    return lines[-1].split()[-1].removeprefix("http://")


def is_ready(url: str) -> bool:
    with suppress(httpx.ConnectError):
        return httpx.get(f"{url}/ready", timeout=60).status_code == 200
    return False


def test_the_two_roles_serve_and_come_back(tmp_path: Path, model: str) -> None:
    with ExitStack() as stack:
        engine = start(
            stack, tmp_path / "engine", model, "--role", "engine", "--listen", "127.0.0.1:0",
            "--threads", "1", "--set", "conformance=false", "--set", "max_kv_tokens=2048",
        )  # fmt: skip
        address = said(tmp_path / "engine", engine, "meet the engine at")
        front = start(
            stack, tmp_path / "front", "--role", "frontend", "--engine", address, "--port", "0",
            "--server", "restart_backoff_s=0.5", "--server", "restart_backoff_cap_s=0.5",
            "--server", "max_restarts=1000",
        )  # fmt: skip
        url = "http://" + said(tmp_path / "front", front, "http://")
        body = {"prompt": "abc", "max_tokens": 8, "temperature": 0}
        wait_for(lambda: is_ready(url))  # the line is written before the server listens
        first = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
        assert first["usage"]["completion_tokens"] == 8
        children = Path(f"/proc/{front.pid}/task/{front.pid}/children").read_text().split()
        commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children]
        assert all(b"apart_process" in command for command in commands), "it has no engine"
        engine.send_signal(signal.SIGTERM)
        assert engine.wait(60) == 0
        wait_for(lambda: httpx.get(f"{url}/ready", timeout=60).status_code == 503)
        host, _, port = address.rpartition(":")
        start(
            stack, tmp_path / "again", model, "--role", "engine", "--listen", f"{host}:{port}",
            "--threads", "1", "--set", "conformance=false", "--set", "max_kv_tokens=2048",
        )  # fmt: skip
        wait_for(lambda: httpx.get(f"{url}/ready", timeout=60).status_code == 200, 240)
        again = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
        assert again["choices"] == first["choices"]
        front.send_signal(signal.SIGTERM)
        assert front.wait(60) == 0


# -- two network namespaces


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def namespace() -> Iterator[str]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("a network namespace needs root and the ip command")
    name = f"qllm-{os.getpid()}"
    try:
        ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespace can be made here: {error.stderr.decode()}")
    try:
        ip("link", "add", "qllm-a", "type", "veth", "peer", "name", "qllm-b", "netns", name)
        ip("addr", "add", "198.18.77.1/24", "dev", "qllm-a")
        ip("link", "set", "qllm-a", "up")
        ip("-n", name, "addr", "add", "198.18.77.2/24", "dev", "qllm-b")
        ip("-n", name, "link", "set", "qllm-b", "up")
        ip("-n", name, "link", "set", "lo", "up")
        yield name
    finally:
        ip("netns", "del", name)


@pytest.mark.slow  # one network: the tests above
def test_a_front_end_in_another_network(namespace: str, model: str, secret_file: Path) -> None:
    meeting = Meeting(Address("198.18.77.1", free_port()), "tcp", SECRET)
    code = front_end_of(str(meeting.address), secret_file)
    with (
        QLLMEngine.from_pretrained(model, meeting=meeting, **SETTINGS) as engine,
        subprocess.Popen(
            ["ip", "netns", "exec", namespace, sys.executable, "-c", code],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        ) as process,
    ):  # fmt: skip
        assert process.stdout is not None
        near = engine.submit("def f(", max_tokens=20, sampling=GREEDY).result(300)
        assert process.stdout.readline() == f"{near.token_ids}\n"
        assert process.stdout.readline() == "runs\n"
        assert engine.stats()["num_live"] == 1
        ip("link", "set", "qllm-a", "down")  # the cable is pulled: nobody says goodbye
        wait_for(lambda: engine.stats()["num_live"] == 0)
        process.kill()


def test_what_an_engine_says_survives_json(met: QLLMEngine) -> None:
    from qllm.ingress.messages import EngineCard

    card = EngineCard(met._client.info, met.config, {"policy": "p"}, "m")
    found = RemoteHello.from_json(json.loads(json.dumps(card.to_json())))
    assert found == (met._client.info, met.config, {"policy": "p"}, "m")
