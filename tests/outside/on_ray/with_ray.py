"""Engines as replicas of Ray Serve, on a cluster of this machine: `make test-ray` runs this.

One cluster and one application with two replicas serve all tests but the last ones. Answers are
compared with those of an engine alone, so it does not matter who has given them, and when.
"""

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from clusters import (
    ARGS,
    EXACT,
    PORT,
    URL,
    FrontEnd,
    answer_of,
    ask_http,
    engine_of,
    long,
    paused,
    processes,
    replicas,
    states,
    until,
    whole,
)
from ray import serve
from safetensors.torch import load_file, save_file

import qllm.ray
from qllm.errors import ConfigError, InvalidRequestError
from qllm.frontend.handle import Handle
from qllm.llm import QLLMEngine
from qllm.ray.data import map_batches
from qllm.ray.run import start_here
from qllm.types import FinishReason, RequestStatus
from tests.support.engines import save_model


@pytest.fixture(scope="session", autouse=True)
def cluster() -> Iterator[None]:
    start_here(num_cpus=4)
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    yield
    serve.shutdown()
    ray.shutdown()


@pytest.fixture(scope="session")
def app(cluster: None) -> None:
    run()


def run(**more: Any) -> None:
    args = {**ARGS, "ray.min_replicas": 2, "ray.max_replicas": 2, **more}
    serve.run(qllm.ray.app(args), name="qllm")


@pytest.fixture(scope="session")
def engines(app: None) -> Iterator[QLLMEngine]:
    with qllm.ray.connect() as found:
        yield found


@pytest.fixture(scope="session")
def alone() -> Iterator[QLLMEngine]:
    with QLLMEngine.from_pretrained("tiny", threads=1, exactness=EXACT) as engine:
        yield engine


def test_http_answers_as_an_engine_alone(app: None, alone: QLLMEngine) -> None:
    assert httpx.get(f"{URL}/ready", timeout=60).status_code == 200
    for prompt, more in (("One day", {}), ("The sea", {"temperature": 0.9, "seed": 5})):
        expected = alone.generate([prompt], max_tokens=20, **{"temperature": 0.0, **more})[0]
        answer = ask_http(prompt, 20, **more)
        assert answer["choices"][0]["text"] == expected.text
        assert answer["usage"]["completion_tokens"] == len(expected.token_ids)


def test_a_stream_over_http_is_the_same_text(app: None, alone: QLLMEngine) -> None:
    expected = alone.generate(["A ship"], max_tokens=30, temperature=0.0)[0]
    body = {"prompt": "A ship", "max_tokens": 30, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{URL}/v1/completions", json=body, timeout=300) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1] if line.startswith("{")]
    text = "".join(c["text"] for event in events for c in event["choices"])
    assert text == expected.text


def test_wrong_requests_are_refused_in_front(app: None, engines: QLLMEngine) -> None:
    answer = httpx.post(f"{URL}/v1/completions", json={"prompt": "x", "max_tokens": -1}, timeout=60)
    assert answer.status_code == 400
    with pytest.raises(InvalidRequestError, match="max_tokens"):
        engines.submit("x", max_tokens=0)
    with pytest.raises(ConfigError, match="replicas of Ray"):
        engines.checkpoint("x")


def test_log_probabilities_and_stop_strings_come_through(
    engines: QLLMEngine, alone: QLLMEngine
) -> None:
    text = alone.generate(["Once"], max_tokens=24, temperature=0.0)[0].text
    stop = text[len(text) // 2 :][:3]
    for more in ({"logprobs": 2, "prompt_logprobs": 1}, {"stop": stop}):
        found, expected = (
            engine.generate(["Once"], max_tokens=24, temperature=0.0, progress=False, **more)[0]
            for engine in (engines, alone)
        )
        assert found.token_ids == expected.token_ids
        assert (found.text, found.finish_reason) == (expected.text, expected.finish_reason)
        assert (found.logprobs, found.prompt_logprobs) == (
            expected.logprobs,
            expected.prompt_logprobs,
        )
        assert found.metrics.num_prompt_tokens == expected.metrics.num_prompt_tokens


def busy(engines: QLLMEngine) -> int:
    return int(engines.stats()["num_live"])


def test_who_gives_up_frees_the_engine(engines: QLLMEngine) -> None:
    handles = [long(engines, seed) for seed in range(3)]
    until(lambda: all(handle.token_ids for handle in handles))
    assert busy(engines) == 3
    for handle in handles:
        handle.cancel()
        assert handle.result(timeout=60).finish_reason is FinishReason.CANCELLED
    until(lambda: busy(engines) == 0)


def test_a_deadline_ends_a_request(engines: QLLMEngine) -> None:
    handle = long(engines, 1, timeout_s=0.3)
    assert handle.result(timeout=120).finish_reason is FinishReason.TIMEOUT
    until(lambda: busy(engines) == 0)


def test_who_waits_too_short_is_told_where_the_request_is(engines: QLLMEngine) -> None:
    """It asks the replica with the handle's lock, which tokens take too."""
    handle = long(engines, 2)
    until(lambda: handle.token_ids)
    with pytest.raises(TimeoutError, match=r"is running after 0\.01 s"):
        handle.result(timeout=0.01)
    handle.cancel()


def test_a_request_is_paused_and_goes_on(engines: QLLMEngine, alone: QLLMEngine) -> None:
    expected = long(alone, 4, 300).result(timeout=300).token_ids
    handle = long(engines, 4, 300)
    until(lambda: handle.token_ids)
    handle.pause()
    until(lambda: handle.status is RequestStatus.PAUSED)
    count = len(handle.token_ids)
    assert count < 300
    handle.update(priority="LS")
    handle.resume()
    assert handle.result(timeout=300).token_ids == expected
    assert handle.result().metrics.priority == 0


def test_a_batch_has_an_answer_to_every_row(engines: QLLMEngine, alone: QLLMEngine) -> None:
    prompts = [f"Row {i}" for i in range(12)]
    expected = alone.generate(prompts, max_tokens=8, temperature=0.0, progress=False)
    dataset = ray.data.from_items([{"prompt": p, "id": i} for i, p in enumerate(prompts)])
    found = map_batches(dataset, batch_size=5, max_tokens=8, temperature=0.0).take_all()
    rows = sorted(found, key=lambda row: row["id"])
    assert [row["answer"] for row in rows] == [result.text for result in expected]
    assert [row["answer_tokens"] for row in rows] == [len(r.token_ids) for r in expected]
    assert {row["answer_end"] for row in rows} <= {"length", "stop"}


MIXED = 200


def mixed(engine: QLLMEngine, seed: int) -> Handle:
    """LS and BE in turn, longer and shorter."""
    is_ls = bool(seed % 2)
    return long(engine, seed, 12 + seed % 5 if is_ls else 40, priority="LS" if is_ls else "BE")


def test_a_replica_killed_under_200_mixed_requests_loses_and_doubles_nothing(
    app: None, engines: QLLMEngine, alone: QLLMEngine
) -> None:
    whole(2)
    expected = [mixed(alone, seed) for seed in range(MIXED)]
    for handle in expected:
        handle.result(timeout=600)
    handles = [mixed(engines, seed) for seed in range(MIXED)]
    until(lambda: sum(handle.has_ended for handle in handles) >= MIXED // 4)
    dead = sorted(replicas())[0]
    os.kill(dead, signal.SIGKILL)
    results = [handle.result(timeout=600) for handle in handles]
    assert [r.token_ids for r in results] == [handle.token_ids for handle in expected]
    assert {r.finish_reason for r in results} == {FinishReason.LENGTH}
    until(lambda: busy(engines) == 0)


def test_an_engine_killed_under_streams_loses_and_doubles_nothing(
    app: None, engines: QLLMEngine, alone: QLLMEngine
) -> None:
    """Its replica lives on without it, until Ray asks whether it is well and makes a new one."""
    whole(2)
    seeds = list(range(10))
    expected = [long(alone, seed, 200) for seed in seeds]
    texts = [handle.result(timeout=600).text for handle in expected]
    handles = [long(engines, seed, 200) for seed in seeds]
    served = [Streamed(seed) for seed in seeds[:4]]
    until(lambda: all(handle.token_ids for handle in handles[:2]) and any(s.text for s in served))
    dead = sorted(replicas())[0]
    os.kill(engine_of(dead), signal.SIGKILL)
    results = [handle.result(timeout=600) for handle in handles]
    assert [r.token_ids for r in results] == [handle.token_ids for handle in expected]
    assert {r.finish_reason for r in results} == {FinishReason.LENGTH}
    assert [stream.wait() for stream in served] == texts[:4]
    until(lambda: busy(engines) == 0)
    until(lambda: dead not in replicas())
    whole(2)


class Streamed(threading.Thread):
    """A client of HTTP that reads the stream of `long`."""

    def __init__(self, seed: int, max_tokens: int = 200) -> None:
        super().__init__()
        self.text, self.done = "", False
        self.body = {"prompt": f"Story {seed}:", "max_tokens": max_tokens, "seed": seed}
        self.body |= {"temperature": 1.0, "ignore_eos": True, "stream": True}
        self.start()

    def run(self) -> None:
        with suppress(httpx.HTTPError):  # `done` says whether it was whole
            self.read()

    def read(self) -> None:
        with httpx.stream("POST", f"{URL}/v1/completions", json=self.body, timeout=600) as answer:
            for line in answer.iter_lines():
                said = line.removeprefix("data: ")
                if said.startswith("{"):
                    self.text += "".join(c["text"] for c in json.loads(said)["choices"])
                self.done = self.done or said == "[DONE]"

    def wait(self) -> str:
        self.join(600)
        assert self.done, self.text
        return self.text


def test_an_update_rolls_through_without_a_loss(
    app: None, engines: QLLMEngine, alone: QLLMEngine
) -> None:
    """Other options, the same engine: old replicas end what they have, new ones take the rest."""
    before, expected = replicas(), [long(alone, seed, 150) for seed in range(4)]
    handles = [long(engines, seed, 150) for seed in range(4)]
    until(lambda: all(handle.token_ids for handle in handles))
    run(**{"max_ls": 99})  # is the server's, and new arguments make new replicas
    more = [long(engines, seed, 150) for seed in range(4)]
    for both in zip([*handles, *more], [*expected, *expected], strict=True):
        found, wanted = (handle.result(timeout=600).token_ids for handle in both)
        assert found == wanted
    until(lambda: not replicas() & before)


def test_when_a_front_end_dies_engines_do_its_work_no_longer(
    app: None, engines: QLLMEngine, alone: QLLMEngine
) -> None:
    """Ray lets streams go on whose reader is gone; who lives keeps what it has."""
    whole(2)
    kept = paused(engines, 9)
    other = FrontEnd.remote()
    os.kill(ray.get(other.hold.remote(3)), signal.SIGKILL)
    assert busy(engines) == 4
    until(lambda: busy(engines) == 1)
    kept.resume()
    assert kept.result(timeout=600).token_ids == long(alone, 9).result(timeout=600).token_ids


def test_when_the_http_replica_dies_there_is_another(app: None, engines: QLLMEngine) -> None:
    whole(2)
    (front_end,) = processes(b"ray::ServeReplica:qllm:http")
    os.kill(front_end, signal.SIGKILL)
    until(lambda: processes(b"ray::ServeReplica:qllm:http") - {front_end})
    until(lambda: answer_of("One day", 3).status_code == 200)
    whole(2)


def test_late_ls_requests_bring_another_replica(cluster: None) -> None:
    serve.delete("qllm")
    slow = {"ray.min_replicas": 1, "ray.ls_ttft_ms": 0.01, "ray.up_after_s": 0, "ray.window_s": 5}
    run(**slow)
    assert len(replicas()) == 1
    stop = threading.Event()

    def asks() -> None:
        while not stop.wait(0.2):
            ask_http("Hi", 2)

    thread = threading.Thread(target=asks)
    thread.start()
    try:
        until(lambda: len(replicas()) == 2)
    finally:
        stop.set()
        thread.join(300)


def test_be_work_brings_replicas_that_end_it_before_they_go(
    cluster: None, alone: QLLMEngine
) -> None:
    """From none to two and back, with requests that stand still at both when one is to go."""
    serve.delete("qllm")
    scaled = {"ray.min_replicas": 0, "ray.be_tokens": 2000, "ray.window_s": 11, "drain_s": 300}
    run(**scaled, **{"ray.up_after_s": 0, "ray.down_after_s": 0})
    whole(0)  # it was up to say what it is
    with qllm.ray.connect() as engines:
        first = [paused(engines, seed) for seed in range(6)]
        until(lambda: states()["RUNNING"] == 2 and len(engines.client.engines()) == 2)
        second = [paused(engines, seed) for seed in range(6, 9)]
        assert sorted(found["BE"] for found in engines.client.engines()) == [3, 6]
        for handle in (*first[1:], *second[1:]):
            handle.cancel()
        until(lambda: states()["STOPPING"] == 1)
        late = long(engines, 20, 8)
        assert late.result(timeout=600).token_ids == long(alone, 20, 8).result().token_ids
        assert states() == {"RUNNING": 1, "STOPPING": 1}, "it waits for what it has"
        for handle, seed in ((first[0], 0), (second[0], 6)):
            handle.resume()
            expected = long(alone, seed).result(timeout=600).token_ids
            assert handle.result(timeout=600).token_ids == expected
        whole(0)


def test_without_a_replica_it_is_503_and_other_weights_are_no_replica(
    cluster: None, tmp_path: Path
) -> None:
    """A model that has changed where it lies: the front end serves the one that it has met."""
    serve.delete("qllm")
    model = Path(save_model(tmp_path / "model"))
    run(**{"model": str(model), "ray.min_replicas": 1, "ray.max_replicas": 1})
    before = ask_http("One day", 8)["choices"]
    (only,) = replicas()
    os.kill(only, signal.SIGKILL)
    # a request that comes before its end is known waits for the next replica, and is answered
    until(lambda: httpx.get(f"{URL}/ready", timeout=60).status_code == 503)
    answer = answer_of("One day", 1)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_restarting"
    assert int(answer.headers["Retry-After"]) >= 1
    assert httpx.get(f"{URL}/health", timeout=60).json()["status"] == "restarting"
    until(lambda: httpx.get(f"{URL}/ready", timeout=60).status_code == 200)
    assert ask_http("One day", 8)["choices"] == before
    found = httpx.get(f"{URL}/health", timeout=60).json()
    assert [engine["up"] for engine in found["engines"]] == [True]
    change_weights(model / "model.safetensors")
    (only,) = replicas()
    os.kill(only, signal.SIGKILL)
    until(lambda: any("weights is" in (e["why"] or "") for e in health()["engines"]))
    assert answer_of("One day", 1).status_code == 503
    assert not health()["engines"][0]["up"]


def change_weights(file: Path) -> None:
    """As after more training, under the same name."""
    weights = load_file(file)
    weights["model.norm.weight"] += 0.25
    save_file(weights, file, {"format": "pt"})


def health() -> Any:
    return httpx.get(f"{URL}/health", timeout=60).json()


def test_no_application_of_that_name(cluster: None) -> None:
    with pytest.raises(ConfigError, match="no application 'other' runs"):
        qllm.ray.connect("other")
