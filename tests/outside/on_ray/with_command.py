"""`qllm serve --ray` and `serve run`, each on a cluster of its own."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from qllm.ray.run import ENVIRONMENT

COMMAND = [sys.executable, "-m", "qllm.cli", "serve", "tiny", "--ray", "--threads", "1"]


def run(*args: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*COMMAND, *args], capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--set", "ray.replicas=2"], "ray.replicas=2: Extra inputs are not permitted"),
        (["--port", "0"], "port=0 does not go with Ray"),
        (["--ssl-certfile", "x.pem"], "ssl_certfile does not go with Ray"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(args: list[str], said: str) -> None:
    done = run(*args)
    assert done.returncode == 2
    assert said in done.stderr


LONG = 900
"""Tokens of an answer that is not over when the end is asked for."""
RAY = str(Path(sys.executable).with_name("serve"))


@pytest.mark.parametrize(
    ("command", "port", "said"),
    [
        (
            [*COMMAND, "--port", "8733"],
            8733,
            "qllm: tiny at http://127.0.0.1:8733",
        ),
        ([RAY, "run", "qllm.ray:app", "model=tiny", "threads=1"], 8000, ""),  # its default port
    ],
    ids=["qllm serve --ray", "serve run"],
)
def test_it_serves_until_it_is_told_to_end(command: list[str], port: int, said: str) -> None:
    """By ours, an answer that is on its way then comes whole.

    What is started in the background of a script ignores SIGINT, and so would what it starts.
    """
    process = subprocess.Popen(
        ["env", "--default-signal=INT", *command],
        env={**os.environ, **ENVIRONMENT, "QLLM_DRAIN_S": "300"},
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    heard: list[str] = []
    assert process.stderr is not None
    reader = threading.Thread(target=heard.extend, args=(process.stderr,), daemon=True)
    reader.start()
    try:
        url = f"http://127.0.0.1:{port}"
        while not is_ready(url):
            assert process.poll() is None, "".join(heard)
            time.sleep(0.5)
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
        assert answer.json()["usage"]["completion_tokens"] <= 4
        with open_stream(url) as lines:
            process.send_signal(signal.SIGTERM if said else signal.SIGINT)
            rest = [line for line in lines if line] if said else []  # Ray's command does not wait
        if said:
            assert rest.pop() == "data: [DONE]"
            ends = [json.loads(line.removeprefix("data: ")) for line in rest if line[0] != ":"]
            assert [end["choices"][0]["finish_reason"] for end in ends][-1] == "length"
        assert process.wait() == 0, "".join(heard)
        reader.join()
        assert said in "".join(heard)
        assert not is_ready(url)
    finally:
        process.kill()


@contextmanager
def open_stream(url: str) -> Iterator[Iterator[str]]:
    """The lines of an answer behind its first one."""
    body = {"prompt": "Story", "max_tokens": LONG, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as answer:
        lines = answer.iter_lines()
        next(lines)
        yield lines


def is_ready(url: str) -> bool:
    """Whether a server takes requests there."""
    try:
        return httpx.get(f"{url}/ready", timeout=60).status_code == 200
    except httpx.HTTPError:
        return False
