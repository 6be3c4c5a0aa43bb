"""What the tests on clusters share."""

import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import ray
from ray import serve

import qllm.ray
from qllm.frontend.handle import Handle
from qllm.llm import QLLMEngine
from qllm.types import RequestStatus

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # no worker finds this module
PORT = 8731
URL = f"http://127.0.0.1:{PORT}"
EXACT = "batch-invariant"
ARGS = {
    "model": "tiny",
    "threads": 1,
    "engine.exactness": EXACT,
    "engine.max_num_seqs": 8,
    "ray.cpus": 0.5,
    "ray.stats_s": 0.2,
    "ray.health_s": 1.0,
    "drain_s": 10,
    "shutdown_delay_s": 0,
}
LONG = 900
"""Tokens of an answer that is not over before a test has done something to it."""


def until(condition: Callable[[], Any]) -> Any:
    """Wait as long as the test may take (`conftest.py`)."""
    while not (found := condition()):
        time.sleep(0.05)
    return found


def replicas() -> set[int]:
    """Processes of replicas that have an engine."""
    return processes(b"ray::ServeReplica:qllm:engines")


def processes(title: bytes) -> set[int]:
    """Those whose line begins so."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if line.startswith(title):
            found.add(int(folder.name))
    return found


def engine_of(replica: int) -> int:
    """The process of its engine."""
    children = Path(f"/proc/{replica}/task").glob("*/children")
    pids = [int(pid) for file in children for pid in file.read_text().split()]
    (found,) = [
        p for p in pids if b"qllm.engine.process" in Path(f"/proc/{p}/cmdline").read_bytes()
    ]
    return found


def states() -> "Counter[str]":
    """How many replicas with an engine are in each of Ray's states."""
    found = serve.status().applications["qllm"].deployments.get("engines")
    return Counter() if found is None else Counter(found.replica_states)


def whole(count: int) -> None:
    """Wait until so many replicas serve."""

    def served() -> bool:
        status = serve.status().applications["qllm"]
        states = [s for d in status.deployments.values() for s in d.replica_states.values()]
        running = status.deployments["engines"].replica_states.get("RUNNING", 0)
        return running == count and sum(states) == count + 1

    until(served)


def answer_of(prompt: str, max_tokens: int, **more: Any) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **more}
    return httpx.post(f"{URL}/v1/completions", json=body, timeout=300)


def ask_http(prompt: str, max_tokens: int, **more: Any) -> dict[str, Any]:
    answer = answer_of(prompt, max_tokens, **more)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def long(engine: QLLMEngine, seed: int, max_tokens: int = LONG, **more: Any) -> Handle:
    """A sampled answer that goes on to its last token."""
    options = {"priority": "BE", "temperature": 1.0, "seed": seed, "ignore_eos": True, **more}
    return engine.submit(f"Story {seed}:", max_tokens=max_tokens, **options)


@ray.remote(num_cpus=0)
class FrontEnd:
    """Another process that has requests in the engines, which wait there."""

    def hold(self, count: int) -> int:
        self.engines = qllm.ray.connect()
        self.handles = [paused(self.engines, seed) for seed in range(count)]
        return os.getpid()


def paused(engines: QLLMEngine, seed: int) -> Handle:
    """A request with a token that waits in an engine, however fast that is."""
    handle = long(engines, seed)
    until(lambda: handle.token_ids)
    handle.pause()
    until(lambda: handle.status is RequestStatus.PAUSED)
    return handle
