import random
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from schemathesis.generation import GenerationMode

from tests.support.fuzzing import fuzz
from tests.support.serving import Serving, serving, tiny_engine
from tests.support.waiting import wait_for

POSTS = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/batches"]
POSTS += ["/v1/responses", "/v1/messages", "/v1/messages/count_tokens"]


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Serve short sequences, so that no generated request runs for long, and no prompt waits."""
    state = tmp_path_factory.mktemp("state")
    settings: dict[str, Any] = {"max_kv_tokens": 256, "default_max_tokens": 4}
    with (
        tiny_engine(conformance=False, **settings) as made,
        serving(made, state_dir=state, max_choices=8, prompt_idle_s=1) as serving_,
    ):
        yield serving_


def fuzz_ours(served: Serving, path: str, method: str, mode: GenerationMode, num: int) -> set[int]:
    """Statuses of requests made from the schema that the server itself gives."""
    found = served.get("/openapi.json").json()
    for name in ("MessagesRequest", "CountRequest"):  # a model must be named there
        found["components"]["schemas"][name]["properties"]["model"] = {"enum": ["tiny"]}
    schema = schemathesis.openapi.from_dict(found)
    return {status for status, _ in fuzz(served, schema, path, method, mode, num)}


@pytest.mark.sampled
@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("mode", list(GenerationMode), ids=str)
def test_no_body_breaks_the_server(short: Serving, path: str, mode: GenerationMode) -> None:
    seen = fuzz_ours(short, path, "POST", mode, 40)
    assert seen, "nothing was sent"
    if mode is GenerationMode.NEGATIVE:
        assert 400 in seen


def test_no_path_or_query_breaks_the_server(short: Serving) -> None:
    paths = short.get("/openapi.json").json()["paths"]
    rest = [(p, m) for p, found in paths.items() for m in found if p not in POSTS]
    assert {"/v1/files", "/v1/batches/{batch_id}/cancel", "/metrics"} <= {p for p, _ in rest}
    for path, method in rest:
        fuzz_ours(short, path, method, GenerationMode.POSITIVE, 8)
    assert short.get("/ready").status_code == 200


class Load:
    """One client that does what clients do, and what they should not."""

    def __init__(self, url: str, seed: int) -> None:
        self.url = url
        self.random = random.Random(seed)
        self.seen: Counter[str] = Counter()
        self.ended = 0
        """Requests that said that they have ended."""

    def body(self) -> dict[str, Any]:
        return {
            "prompt": ["a" * self.random.randint(1, 60)] * self.random.randint(1, 2),
            "max_tokens": self.random.randint(1, 60),
            "n": self.random.randint(1, 2),
            "ignore_eos": True,
            "priority": self.random.randint(0, 1),
            "stream": self.random.random() < 0.6,
            "stream_options": {"include_usage": True},
        }

    def whole(self) -> None:
        body = self.body()
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code in (200, 429), answer.text
        if answer.status_code == 200:
            choices = body["n"] * len(body["prompt"])
            assert answer.text.count('"finish_reason":"length"') == choices
            assert answer.text.count("data: [DONE]") == body["stream"]
            usage = f'"completion_tokens":{choices * body["max_tokens"]}'
            assert usage in answer.text
            self.ended += choices

    def leave(self) -> None:
        body = {**self.body(), "stream": True, "max_tokens": 190}
        with (
            httpx.Client(timeout=60) as client,
            client.stream("POST", f"{self.url}/v1/completions", json=body) as answer,
        ):
            for _ in zip(range(self.random.randint(0, 9)), answer.iter_lines(), strict=False):
                pass

    def malformed(self) -> None:
        junk = self.random.randbytes(self.random.randint(0, 200))
        answer = httpx.post(f"{self.url}/v1/completions", content=junk, timeout=60)
        assert answer.status_code == 400

    def half(self) -> None:
        host, port = self.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as sock:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"
            sock.sendall(head[: self.random.randint(1, len(head))])

    def run(self, num_acts: int) -> None:
        for _ in range(num_acts):
            act = self.random.choice(
                [self.whole, self.whole, self.leave, self.malformed, self.half]
            )
            act()
            self.seen[act.__name__] += 1


def soak(served: Serving, num_acts: int, clients: int) -> Counter[str]:
    engine = served.front.engine
    name = "qllm:request_success_total"
    loads = [Load(served.url, seed) for seed in range(clients)]
    submitted: list[Any] = []
    submit = engine.submit

    def counted(*args: Any, **keywords: Any) -> Any:
        handle = submit(*args, **keywords)
        submitted.append(handle)
        return handle

    failures: list[BaseException] = []

    def run(load: Load) -> None:
        try:
            load.run(num_acts)
        except BaseException as error:  # noqa: BLE001 - shown by the test
            failures.append(error)

    def by_reason(reason: str) -> float:
        return sum(
            served.metric(name, **{"class": c, "finished_reason": reason}) for c in ("LS", "BE")
        )

    reasons = ("length", "stop", "cancelled", "timeout", "error")
    before = {reason: by_reason(reason) for reason in reasons}
    engine.submit = counted  # type: ignore[method-assign]
    try:
        threads = [threading.Thread(target=run, args=(load,)) for load in loads]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
    finally:
        del engine.submit
    assert failures == []
    assert not any(thread.is_alive() for thread in threads), "a client hangs"
    wait_for(lambda: engine.stats()["num_live"] == 0 and not served.front.answers)
    wait_for(lambda: not served.front._settling)
    assert served.front._num_ls == 0
    assert all(handle.finish_reason is not None for handle in submitted)
    new = {reason: by_reason(reason) - before[reason] for reason in reasons}
    ends = Counter(handle.finish_reason.value for handle in submitted)
    assert ends["length"] >= sum(load.ended for load in loads) > 0
    # a request whose client left before its answer was opened is cancelled and not counted
    assert 0 <= ends["cancelled"] - new["cancelled"] <= sum(x.seen["leave"] for x in loads)
    assert new["length"] == ends["length"]
    assert new["error"] == new["timeout"] == 0
    return sum((load.seen for load in loads), Counter())


def test_a_short_soak(short: Serving) -> None:
    done = soak(short, 10, 4)
    assert set(done) == {"whole", "leave", "malformed", "half"}


@pytest.mark.slow  # as the short soak above it
def test_a_longer_soak(short: Serving) -> None:
    assert sum(soak(short, 60, 12).values()) == 720
