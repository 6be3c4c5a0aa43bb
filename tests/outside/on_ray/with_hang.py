"""An engine that hangs in its replica, and a route of the user's, on a cluster."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import ray
from clusters import (
    ARGS,
    EXACT,
    PORT,
    URL,
    ask_http,
    engine_of,
    long,
    paused,
    replicas,
    until,
    whole,
)
from ray import serve

import qllm.ray
from qllm.llm import QLLMEngine
from qllm.ray.run import start_here
from qllm.types import FinishReason
from tests.support.engines import freeze

HANG_S = 3
ROUTE = '''
def to_the_last(request, engines):
    """Of two engines the later one by name; fails for BE, and in another way for short prompts."""
    if not request.is_ls:
        raise LookupError("nothing for BE")
    if request.num_prompt_tokens < 4:
        return engines[0].name
    return max(engines, key=lambda engine: engine.name)
'''


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Two replicas; the route lies where every worker finds modules."""
    folder: Path = tmp_path_factory.mktemp("modules")
    (folder / "our_route.py").write_text(ROUTE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        patch.syspath_prepend(str(folder))
        start_here(num_cpus=4)
        serve.start(http_options={"host": "127.0.0.1", "port": PORT})
        run()
        yield
        serve.shutdown()
        ray.shutdown()


def run() -> None:
    two = {"ray.min_replicas": 2, "ray.max_replicas": 2, "hang_s": HANG_S}
    args = {**ARGS, **two, "ray.route": "our_route:to_the_last"}
    serve.run(qllm.ray.app(args), name="qllm")


@pytest.fixture(scope="module")
def alone() -> Iterator[QLLMEngine]:
    with QLLMEngine.from_pretrained("tiny", threads=1, exactness=EXACT) as engine:
        yield engine


def route_errors() -> int:
    lines = httpx.get(f"{URL}/metrics", timeout=60).text.splitlines()
    (found,) = [line for line in lines if line.startswith("qllm:fleet_route_errors_total{")]
    return int(float(found.split()[-1]))


def sent() -> dict[str, int]:
    engines = httpx.get(f"{URL}/health", timeout=60).json()["engines"]
    return {engine["engine"]: engine["sent"] for engine in engines}


def test_a_route_of_the_users_chooses_and_one_that_fails_costs_no_answer(
    alone: QLLMEngine,
) -> None:
    whole(2)
    until(lambda: len(sent()) == 2)
    before = sent()
    assert route_errors() == 0
    for number in range(4):
        prompt = f"One day {number}"
        expected = alone.generate([prompt], max_tokens=8, temperature=0.0)[0]
        assert ask_http(prompt, 8)["choices"][0]["text"] == expected.text
    more = {name: count - before[name] for name, count in sent().items()}
    assert more == {min(more): 0, max(more): 4}
    assert route_errors() == 0
    for prompt, tier in (("One day", "flex"), ("a", "default")):  # it raises; it returns a name
        expected = alone.generate([prompt], max_tokens=8, temperature=0.0)[0]
        found = ask_http(prompt, 8, service_tier=tier)
        assert found["choices"][0]["text"] == expected.text
    assert route_errors() == 2


def test_an_engine_that_hangs_is_killed_and_its_requests_go_on(alone: QLLMEngine) -> None:
    """Those that it had when it stood still, and those that came while nobody knew."""
    whole(2)
    before = replicas()
    stuck = engine_of(replica := min(before))
    with qllm.ray.connect() as engines:
        held = [paused(engines, seed) for seed in range(4)]
        assert [found["BE"] for found in engines.client.engines()] == [2, 2]
        freeze(stuck)
        try:
            for handle in held:
                handle.resume()
            late = [long(engines, seed, 40) for seed in range(4, 8)]
            found = [handle.result(timeout=200) for handle in (*held, *late)]
        finally:
            with suppress(ProcessLookupError):  # it was killed
                os.kill(stuck, signal.SIGCONT)
        expected = [long(alone, seed) for seed in range(4)]
        expected += [long(alone, seed, 40) for seed in range(4, 8)]
        assert [r.token_ids for r in found] == [h.result(timeout=200).token_ids for h in expected]
        assert {r.finish_reason for r in found} == {FinishReason.LENGTH}
    until(lambda: replica not in replicas())
    whole(2)
    assert before - {replica} <= replicas(), "the other one lives"
