"""`qllm serve --ray` on a cluster of its own."""

import os
import signal
import subprocess
import sys
import time

import httpx
import pytest

PORT = 8733
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


def test_it_serves_until_it_is_told_to_end() -> None:
    process = subprocess.Popen([*COMMAND, "--port", str(PORT)], stderr=subprocess.PIPE, text=True)
    try:
        end, url = time.monotonic() + 300, f"http://127.0.0.1:{PORT}"
        while True:
            try:
                answer = httpx.get(f"{url}/ready", timeout=5)
                if answer.status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            assert time.monotonic() < end
            assert process.poll() is None
            time.sleep(0.5)
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] <= 4
        os.kill(process.pid, signal.SIGTERM)
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said
        assert f"qllm: tiny at {url}" in said
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{url}/ready", timeout=5)
    finally:
        process.kill()
