"""The process of `qllm serve` that speaks HTTP holds no model: no torch, and 150 MB at most."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from qllm.ingress.remote.meeting import Address, Meeting
from tests.support.engines import free_port
from tests.support.serving import tiny_engine
from tests.support.waiting import wait_for

MOST_KB = 150 << 10
MARK = " at http://"
SERVE = """
import atexit, sys
def modules():
    found = {name for name, module in sys.modules.items() if module is not None}
    heavy = {"torch", "accelerate", "safetensors", "transformers.modeling_utils"}
    print(*sorted(found & heavy), sep=",")
atexit.register(modules)
from qllm.cli import main
main()
"""
TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "parameters": {"type": "object", "properties": {"what": {"type": "string"}}},
    },
}
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "What is json?"}], "max_tokens": 8}
FORM = {
    "type": "json_schema",
    "json_schema": {"name": "yes", "schema": {"enum": ["yes", "no"]}},
}


@contextmanager
def serve(log: Path, *arguments: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """`qllm serve` in a process of its own, and its address, which the log says."""
    with (
        log.open("wb") as stderr,
        subprocess.Popen(
            [sys.executable, "-c", SERVE, "serve", *arguments],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        ) as process,
    ):
        try:
            wait_for(lambda: MARK in log.read_text() or process.poll() is not None)
            lines = [line for line in log.read_text().splitlines() if MARK in line]
            assert lines, log.read_text()
            url = lines[-1].split()[-1]
            wait_for(lambda: answers_at(url))  # the line is written before the server listens
            yield process, url
        finally:
            process.send_signal(signal.SIGTERM)


def answers_at(url: str) -> bool:
    with suppress(httpx.ConnectError):
        return httpx.get(f"{url}/health", timeout=60).status_code == 200
    return False


def chat(url: str, **more: Any) -> Any:
    answer = httpx.post(f"{url}/v1/chat/completions", json={**ASK, **more}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


def everything(url: str) -> list[Any]:
    """What clients of a server ask for, and what they get."""
    plain = chat(url, temperature=0).json()["choices"]
    lines = chat(url, temperature=0, stream=True).text.splitlines()
    deltas = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    streamed = "".join(d["choices"][0]["delta"].get("content") or "" for d in deltas)
    assert streamed == plain[0]["message"]["content"]
    called = chat(url, tools=[TOOL], tool_choice="required", max_tokens=64, temperature=0).json()
    formed = chat(url, response_format=FORM, temperature=0).json()["choices"]
    assert json.loads(formed[0]["message"]["content"]) in ("yes", "no")
    calls = called["choices"][0]["message"].get("tool_calls") or []
    asked = {"model": "tiny", "prompt": "def f(", "max_tokens": 4, "temperature": 0, "logprobs": 2}
    text = httpx.post(f"{url}/v1/completions", json=asked, timeout=60).json()["choices"]
    for path in ("/metrics", "/v1/models", "/health", "/openapi.json"):
        assert httpx.get(url + path, timeout=60).status_code == 200
    return [plain, [call["function"] for call in calls], formed, text]


def rss_kb(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1])
    raise AssertionError(f"process {pid} has no memory")


def check_light(process: "subprocess.Popen[str]") -> None:
    """Hold a server to its promise, and end it: at its end it prints what is heavy in it."""
    assert rss_kb(process.pid) <= MOST_KB
    assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()
    process.send_signal(signal.SIGTERM)
    heavy, _ = process.communicate(timeout=60)
    assert (heavy.strip(), process.returncode) == ("", 0)


def test_no_front_end_holds_torch(tmp_path: Path) -> None:
    """That of an engine of this machine, that of one met over the network, and that of two."""
    with serve(
        tmp_path / "near", "tiny", "--port", "0", "--threads", "1", "--set",
        "conformance=false",
    ) as (near, url):  # fmt: skip
        answers = everything(url)
        check_light(near)
    meetings = [Meeting(Address("127.0.0.1", free_port()), "tcp", b"") for _ in range(2)]
    engine, other = (str(meeting.address) for meeting in meetings)
    with ExitStack() as stack:
        for meeting in meetings:
            stack.enter_context(tiny_engine(meeting=meeting, conformance=False))
        there = ("--role", "frontend", "--engine", engine, "--port", "0")
        with serve(tmp_path / "far", *there) as (far, url):
            assert everything(url) == answers
            check_light(far)
        there = ("--role", "frontend", "--engine", f"{engine},{other}", "--port", "0")
        with serve(tmp_path / "fleet", *there, "--route", "least") as (fleet, url):
            assert everything(url) == answers
            engines = httpx.get(f"{url}/health", timeout=60).json()["engines"]
            assert all(found["sent"] for found in engines), engines
            check_light(fleet)
