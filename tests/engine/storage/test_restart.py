"""An engine that was killed finds its pages again: the same tokens, a load in place of prefill."""

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from qllm import QLLMEngine, SamplingParams
from qllm.frontend.handle import Result
from qllm.frontend.request_log import RequestLog
from tests.support.engines import pid_of
from tests.support.replay import COMPLETIONS, Client, kill
from tests.support.serving import serving, tiny_engine
from tests.support.waiting import wait_for

SETTINGS: dict[str, Any] = {"max_kv_tokens": 16384, "conformance": False, "kv_dir_gib": 0.05}
GREEDY = SamplingParams(temperature=0, ignore_eos=True)
TEXT = "def parse(text, at):  # what json.loads does with numbers, strings and lists\n" * 60
NUM = 900
ASKS: list[dict[str, Any]] = [
    {"prompt": f"{i} {TEXT}", "max_tokens": NUM, "ignore_eos": True, "stream": True,
     "temperature": 0.8, "seed": i, "service_tier": "flex"}
    for i in range(3)
]  # fmt: skip


class Plain(NamedTuple):
    """Answers of an engine without a file."""

    results: dict[str, Result]
    """By the class of priority."""
    answers: list[Any]
    """The answers of a server to each of `ASKS`."""


@pytest.fixture(scope="module")
def plain() -> Plain:
    with tiny_engine(**SETTINGS, run_in="thread") as made:
        results = {
            priority: made.submit(TEXT, priority, NUM, sampling=GREEDY).result(300)
            for priority in ("LS", "BE")
        }
        with serving(made) as served:
            return Plain(results, [Client(served, COMPLETIONS, ask).answer()[1:3] for ask in ASKS])


def file_of(engine: QLLMEngine) -> dict[str, Any]:
    return dict(engine.stats()["prefix_cache"]["file"])


def pages_in_file(engine: QLLMEngine) -> int:
    return int(file_of(engine)["kept_pages"])


def came_back(engine: QLLMEngine, num_tokens: int) -> bool:
    """Whether so many tokens were loaded; a machine that is too busy computes them, and says so."""
    file = file_of(engine)
    hits = engine.stats()["prefix_cache"]["hit_tokens"]
    return hits >= num_tokens or file["late_requests"] + file["quicker_requests"] > 0


@pytest.mark.parametrize("priority", ["LS", "BE"])
def test_prompt_and_output_of_a_killed_engine_are_loaded(
    tmp_path: Path, priority: str, plain: Plain
) -> None:
    log = RequestLog(3, lambda: None)
    make = partial(tiny_engine, kv_dir=str(tmp_path), **SETTINGS)
    expected = plain.results[priority]
    num_prompt = len(expected.prompt_token_ids)
    assert num_prompt > 1000
    with make() as first:
        slow = first.submit(TEXT, priority, NUM, sampling=GREEDY)
        log.keep(slow)
        wait_for(lambda: len(slow.token_ids) >= 140)
        slow.update(paused=True)  # it stays open however long the file takes
        wait_for(lambda: pages_in_file(first) >= (num_prompt + 128) // 64)
        assert slow.finish_reason is None, "it is open while its engine is killed"
        os.kill(pid_of(first), signal.SIGKILL)
        wait_for(lambda: log.holds(slow))
    with make(max_kv_tokens=8192, prefix_cache_tokens=4096) as second:  # of other sizes
        log.go_on(second.replay)
        slow.update(paused=False)
        found = slow.result(300)
        assert (found.token_ids, found.text) == (expected.token_ids, expected.text)
        assert came_back(second, (num_prompt + 128) // 64 * 64)


def test_a_supervised_server_goes_on_from_the_file(tmp_path: Path, plain: Plain) -> None:
    new = partial(tiny_engine, kv_dir=str(tmp_path), **SETTINGS)
    with serving(new(), new, restart_backoff_s=0) as served:
        for _ in range(2):
            served.front.engine.reset_prefix_cache()
            engine = served.front.engine
            clients = [Client(served, COMPLETIONS, ask) for ask in ASKS]
            wait_for(lambda clients=clients: all(client.has_begun for client in clients))
            wait_for(lambda engine=engine: pages_in_file(engine) >= 3 * 16)
            assert all(client.is_alive() for client in clients)
            kill(served)
            wait_for(lambda engine=engine: served.front.engine is not engine)
            assert [client.answer()[1:3] for client in clients] == plain.answers
            # BE loads keep pace while LS is there, so what of them is computed is the machine's
            assert came_back(served.front.engine, 16 * 64)
        served.get("/metrics")
        assert served.metric("qllm:kv_file_kept_bytes") > 0
        assert served.metric("qllm:kv_file_up") == 1
        served.front.engine.close()
