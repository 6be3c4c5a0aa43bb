"""The page `/docs` shows a body for each route that takes one; the route takes that body."""

from html import escape
from io import BytesIO
from json import dumps, loads
from typing import Any

import httpx
import pytest

from qllm.server.api.requests import Change
from qllm.server.page.docs import EXAMPLES, example
from tests.support.serving import Serving
from tests.support.waiting import wait_for

PLAIN = [name for name in EXAMPLES if "{" not in name and name != "POST /v1/batches"]


def test_each_route_that_takes_json_has_a_body_on_the_page(served: Serving) -> None:
    page, paths = served.get("/docs").text, served.get("/openapi.json").json()["paths"]
    takes_json = {
        f"{method.upper()} {path}"
        for path, operations in paths.items()
        for method, operation in operations.items()
        if "application/json" in operation.get("requestBody", {}).get("content", {})
    }
    assert takes_json == EXAMPLES.keys()
    for name in EXAMPLES:
        assert f"<pre>{escape(example(name, 'tiny'))}</pre>" in page


@pytest.mark.parametrize("name", PLAIN)
def test_a_route_takes_the_body_that_the_page_shows(served: Serving, name: str) -> None:
    answer = served.post(name.partition(" ")[2], loads(example(name, "tiny")))
    assert answer.status_code == 200, answer.text
    if name == "POST /v1/prompts":
        httpx.delete(f"{served.url}/v1/prompts/{answer.json()['id']}")


def test_a_batch_takes_the_body_that_the_page_shows(served: Serving) -> None:
    line: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}
    line["body"] = {**EXAMPLES["POST /v1/chat/completions"], "max_tokens": 1}
    with served.client() as client:
        file = client.files.create(file=BytesIO(dumps(line).encode()), purpose="batch")
        body = {**EXAMPLES["POST /v1/batches"], "input_file_id": file.id}
        answer = served.post("/v1/batches", body)
        wait_for(lambda: client.batches.retrieve(answer.json()["id"]).status == "completed")


def test_an_open_prompt_and_a_request_take_the_bodies_that_the_page_shows(served: Serving) -> None:
    name = served.post("/v1/prompts", EXAMPLES["POST /v1/prompts"]).json()["id"]
    appended = served.post(f"/v1/prompts/{name}/append", EXAMPLES["POST /v1/prompts/{name}/append"])
    place = f"{served.url}/v1/prompts/{name}"
    replaced = httpx.put(place, json=EXAMPLES["PUT /v1/prompts/{name}"])
    httpx.delete(place)
    assert (appended.status_code, replaced.status_code) == (200, 200), replaced.text
    Change.model_validate(EXAMPLES["PATCH /v1/requests/{name}"])
