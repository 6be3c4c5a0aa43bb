"""No body of any route, batch line or background response keeps the event loop or the lock."""

import itertools
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from starlette.routing import Route

from qllm.server.requests.apart import LONG
from tests.support.batches import COMPLETIONS, RESPONSES, ended, start
from tests.support.loop_time import Watched
from tests.support.serving import Serving
from tests.support.waiting import wait_for

SIZE = 2 * LONG
"""How long one value is: what grows with a body is noticed by its size."""
WORST: dict[str, Any] = {
    "lists": [[]] * (SIZE // 3),
    "ids": [1] * (SIZE // 2),
    "lists of ids": [[1]] * (SIZE // 4),
    "objects": [{"role": "user", "content": "a"}] * (SIZE // 34),
    "an object": {str(i): i for i in range(SIZE // 12)},
    "a text": "word " * (SIZE // 5),
    "one letter": "a" * SIZE,
    "texts": ["a"] * (SIZE // 4),
    "nested": json.loads("[" * 150 + "1" + "]" * 150),
}
TRIES = 3
KIND = {"content-type": "application/json", "x-qllm-priority": "BE"}


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    with pytest.MonkeyPatch.context() as patch:
        yield Watched(patch)


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=60) as client:
        yield client


def bodies_of(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """For every field of a schema, and one that it lacks, a body with one of the worst values."""
    kinds = itertools.cycle(WORST)
    needed = {"messages": [{"role": "user", "content": "a"}], "prompt": "a", "input": "a"}
    base = {name: needed.get(name, 1) for name in schema.get("required", ())}
    usual = {"model": "tiny", "max_tokens": 1, "max_output_tokens": 1}
    base |= {name: value for name, value in usual.items() if name in schema["properties"]}
    for name in (*schema["properties"], "unknown"):
        # the fields that hold a prompt get all of them
        some = WORST if name in needed or name in ("tokens", "append") else [next(kinds)]
        for kind in some:
            yield f"{name}: {kind}", {**base, name: WORST[kind]}


def routes_of(served: Serving) -> list[tuple[str, str, dict[str, Any]]]:
    """Method, path and schema of every route that has a JSON body."""
    app: Any = served.server.config.app
    described = app.openapi()
    found = []
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            content = operation.get("requestBody", {}).get("content", {})
            if (schema := content.get("application/json", {}).get("schema")) is None:
                continue
            if (ref := schema.get("$ref")) is not None:
                schema = described["components"]["schemas"][ref.rpartition("/")[2]]
            found.append((method.upper(), path, schema))
    return found


def opened(served: Serving, http: httpx.Client) -> str:
    return str(http.post(f"{served.url}/v1/prompts", json={"prompt": "abc"}).json()["id"])


def test_every_route_with_the_worst_of_every_field(
    served: Serving, watched: Watched, http: httpx.Client
) -> None:
    routes = routes_of(served)
    paths = {path for _, path, _ in routes}
    assert {"/v1/completions", "/tokenize", "/v1/prompts/{name}/append", "/v1/batches"} <= paths
    hurt: dict[str, list[str]] = {}
    for method, path, schema in routes:
        for what, body in bodies_of(schema):
            name = opened(served, http) if "{" in path else ""
            url, raw = served.url + path.replace("{name}", name), json.dumps(body).encode()
            send = partial(http.request, method, url, content=raw, headers=KIND)
            if wrong := least(watched, send):
                hurt[f"{method} {path} {what}"] = wrong
            if name:
                http.delete(f"{served.url}/v1/prompts/{name}")
    assert not hurt


def test_every_route_that_reads_a_body_is_in_the_schema(served: Serving) -> None:
    app: Any = served.server.config.app
    described = {(method, path) for method, path, _ in routes_of(served)}
    read = {
        (method, route.path)
        for route in app.routes
        if isinstance(route, APIRoute) and route.body_field is not None
        for method in route.methods
    }
    assert read <= described
    streamed = {route.path for route in app.routes if type(route).__mro__[1] is Route}
    assert {"/v1/completions", "/v1/chat/completions"} <= streamed


def least(watched: Watched, do: Callable[[], object]) -> list[str]:
    """What hurts whenever something is done: the machine has other work too."""
    for _ in range(TRIES):
        with watched.watch() as watch:
            do()
        if not (wrong := watch.wrong()):
            break
    return wrong


def test_lines_of_a_body_that_streams(
    served: Serving, watched: Watched, http: httpx.Client
) -> None:
    kind = {"content-type": "application/x-ndjson"}
    for path, first in (
        ("/v1/completions", {"prompt": WORST["a text"]}),
        ("/v1/completions", {"prompt": WORST["ids"]}),
        ("/v1/chat/completions", {"messages": WORST["objects"]}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/completions", {"prompt": [1]}),
    ):
        for value in WORST.values():
            rows = [{"max_tokens": 1, **first}, {"append": value}, {"replace": value, "from": 0}]
            raw = "\n".join(map(json.dumps, rows)).encode()
            send = partial(http.post, served.url + path, content=raw, headers=kind)
            assert least(watched, send) == []


def test_lines_of_a_batch(served: Serving, watched: Watched) -> None:
    names = {COMPLETIONS: "prompt", "/v1/chat/completions": "messages", RESPONSES: "input"}
    for path, name in names.items():
        lines = [
            json.dumps({"custom_id": str(i), "method": "POST", "url": path, "body": {name: value}})
            for i, value in enumerate(WORST.values())
        ]

        def work(lines: list[str] = lines, path: str = path) -> None:
            with served.client() as client:
                assert ended(client, start(client, lines, path).id).status == "completed"

        assert least(watched, work) == []


def test_responses_in_the_background(served: Serving, watched: Watched) -> None:
    turn = {"role": "user", "content": "a"}

    def work(given: Any) -> None:
        body = {"input": given, "background": True, "max_output_tokens": 1}
        path = f"/v1/responses/{served.post(RESPONSES, body).json()['id']}"
        wait_for(lambda: served.get(path).json()["status"] not in ("queued", "in_progress"))
        after = {"input": "b", "previous_response_id": path.rpartition("/")[2]}
        served.post(RESPONSES, {**after, "max_output_tokens": 1})
        assert served.get(f"{path}/input_items").status_code == 200

    for given in ("word " * 3800, [turn] * 600, [{**turn, "content": "word " * 3800}]):
        assert len(json.dumps(given)) > LONG
        assert least(watched, partial(work, given)) == []
