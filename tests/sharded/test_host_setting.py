"""The setting `tp_hosts` and the command `qllm rank`: engines whose ranks are on several hosts."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from qllm import QLLMEngine, SamplingParams
from qllm.cli.app import FAILED, INTERRUPTED, app
from qllm.config import EngineConfig
from qllm.errors import ConfigError, DeviceError
from qllm.frontend.handle import Handle
from qllm.ingress.remote.meeting import Wire, parse_address
from qllm.kernels import cpu
from qllm.server.ops.banner import ranks_line
from tests.support.hosts import SECRET
from tests.support.rank_hosts import children_of, is_there
from tests.support.waiting import wait_for

assert cpu.MISSING is None, cpu.MISSING
SOME: dict[str, Any] = {"max_kv_tokens": 4096, "threads": 1}
KINDS = (
    SamplingParams(temperature=0, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.9, seed=3, ignore_eos=True),
    SamplingParams(temperature=0, logprobs=3, ignore_eos=True),
)


@contextmanager
def rank_process(*more: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `qllm rank` for the model `tiny`, and yield its process and its address."""
    words = [sys.executable, "-m", "qllm.cli", "rank", "tiny", "--listen", "127.0.0.2:0"]
    made = subprocess.Popen([*words, "--threads", "1", *more], stdout=subprocess.PIPE, text=True)
    try:
        assert made.stdout is not None
        yield made, made.stdout.readline().split()[4]
    finally:
        made.kill()
        made.communicate()


@contextmanager
def rank_command(*more: str) -> Iterator[str]:
    """Run `qllm rank` for the model `tiny`, and yield its address."""
    with rank_process(*more) as (_, address):
        yield address


def submit_all(engine: QLLMEngine) -> list[Handle]:
    """Submit requests of both classes. LS requests preempt BE requests."""
    prompts = ["The capital of France is", "a " * 150, "Once upon a time"]
    return [
        engine.submit(prompts[i % 3], "LS" if i % 3 == 2 else "BE", 24, sampling=KINDS[i % 3])
        for i in range(9)
    ]


def answers_of(engine: QLLMEngine) -> list[Any]:
    results = [handle.result(120) for handle in submit_all(engine)]
    return [(result.token_ids, result.logprobs) for result in results]


def test_an_engine_on_two_hosts_has_the_answers_of_one_process(tmp_path: Path) -> None:
    """Engines come one after the other, and the prefix cache has hits."""
    file = tmp_path / "secret"
    file.write_bytes(SECRET)
    settings = SOME | {"max_segment_ms": 0.5}
    with QLLMEngine.from_pretrained("tiny", **settings) as engine:
        expected = [answers_of(engine) for _ in range(2)]
    with rank_command("--secret-file", str(file)) as address:
        hosts = {"tp": 2, "tp_hosts": [address], "tp_secret_file": file}
        for place in ("process", "thread"):
            with QLLMEngine.from_pretrained("tiny", run_in=place, **hosts, **settings) as engine:
                assert [answers_of(engine) for _ in range(2)] == expected
                stats = engine.stats()
                assert stats["prefix_cache"]["hit_tokens"] > 0
                assert [rank.get("host") for rank in stats["ranks"]] == [None, address]
                assert f" on {address})" in ranks_line(stats)


def test_a_host_with_another_depth_loads_as_many_layers() -> None:
    with QLLMEngine.from_pretrained("tiny", depth=2, **SOME) as engine:
        expected = answers_of(engine)
    with rank_command() as address:
        hosts = {"tp": 2, "tp_hosts": [address]}
        with QLLMEngine.from_pretrained("tiny", depth=2, **hosts, **SOME) as engine:
            assert answers_of(engine) == expected


def test_experts_are_rounded_on_the_host_too() -> None:
    settings = SOME | {"expert_weights": "int4"}
    with QLLMEngine.from_pretrained("tiny", **settings) as engine:
        expected = answers_of(engine)
    with rank_command() as address:
        hosts = {"tp": 2, "tp_hosts": [address]}
        with QLLMEngine.from_pretrained("tiny", **hosts, **settings) as engine:
            assert answers_of(engine) == expected


def test_ctrl_c_ends_the_command_and_a_process_that_is_stopped() -> None:
    """A terminal sends the signal to all processes. The command alone obeys it, and ends others."""
    with (
        rank_process() as (made, address),
        closing(Wire(socket.create_connection(parse_address(address)))) as wire,
    ):
        wait_for(lambda: children_of(made.pid))
        (child,) = children_of(made.pid)
        assert wire.socket.recv(1, socket.MSG_PEEK), "the process answers"
        os.kill(child, signal.SIGINT)
        wire.be_front_end(b"")
        os.kill(child, signal.SIGSTOP)
        made.send_signal(signal.SIGINT)
        assert made.wait(60) == INTERRUPTED
        assert not is_there(child)


# -- what is refused


@pytest.mark.parametrize("tp", [1, 3])
def test_a_number_of_ranks_that_is_not_that_of_the_hosts_is_refused(tp: int) -> None:
    with pytest.raises(ConfigError, match=rf"tp={tp} with 1 tp_hosts: .*; use tp=2"):
        EngineConfig(tp=tp, tp_hosts=("a:1",))


@pytest.mark.parametrize("hosts", ["a:1", ("",), (1,), None, {"a:1"}])
def test_hosts_that_are_no_list_are_refused(hosts: Any) -> None:
    with pytest.raises(ConfigError, match=r"tp_hosts=.* must be a list of addresses HOST:PORT"):
        EngineConfig(tp=2, tp_hosts=hosts)


def test_a_host_that_is_named_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tp_hosts=.* names a host twice"):
        EngineConfig(tp=3, tp_hosts=("a:1", "a:1"))


def test_a_secret_without_hosts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tp_secret_file='/s' is for tp_hosts; give both"):
        EngineConfig(tp_secret_file="/s")
    with pytest.raises(ConfigError, match=r"tp_secret_file='' must be None or the path of a file"):
        EngineConfig(tp=2, tp_hosts=("a:1",), tp_secret_file="")


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("127.0.0.2", "'127.0.0.2' must be HOST:PORT"),
        ("10.1.2.3:29500", "give both sides the same tp_secret_file"),
        ("a..b:29500", "'a..b' cannot be resolved"),
    ],
)
def test_an_address_without_a_port_or_a_secret_is_refused(host: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        QLLMEngine.from_pretrained("tiny", tp=2, tp_hosts=[host], run_in="thread", **SOME)


def test_a_host_that_does_not_answer_ends_the_start() -> None:
    with pytest.raises(DeviceError, match=r"tp_hosts: '127.0.0.2:9' does not answer as a rank"):
        QLLMEngine.from_pretrained("tiny", tp=2, tp_hosts=["127.0.0.2:9"], run_in="thread", **SOME)


@pytest.mark.parametrize(
    ("listen", "why"),
    [
        ("127.0.0.2", "'127.0.0.2' must be HOST:PORT"),
        ("10.1.2.3:29500", "give both sides the same secret_file"),
        ("{taken}", "listen='{taken}': Address already in use"),
    ],
)
def test_the_command_refuses_an_address_that_it_cannot_listen_at(listen: str, why: str) -> None:
    with socket.create_server(("127.0.0.2", 0)) as server:
        taken = f"127.0.0.2:{server.getsockname()[1]}"
        words = ["rank", "tiny", "--listen", listen.format(taken=taken)]
        result = CliRunner().invoke(app, words)
    assert result.exit_code == FAILED
    assert why.format(taken=taken) in result.stderr
