"""An event, and a line of a file, is one line for whatever reads lines."""

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from qllm import QLLMEngine
from tests.support import batches
from tests.support.script import END, byte_level, follower, id_of
from tests.support.serving import Serving, serving

ENDS = [chr(c) for c in range(0x110000) if len(f"a{chr(c)}b".splitlines()) == 2]
"""All that Python takes for the end of a line."""
TEXT = "a" + "b".join(ENDS) + "c"


@pytest.fixture(scope="module")
def lined(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Serve a model that answers with `TEXT` to all that ends with the end of a line."""
    tokenizer = byte_level([TEXT], [END, "<|im_start|>"])
    answer = [id_of(tokenizer, text) for text in ("\n", TEXT, END)]
    model = follower(tokenizer, dict(itertools.pairwise(answer)))
    how: dict[str, Any] = {"conformance": False, "threads": 1, "max_kv_tokens": 2048}
    with (
        QLLMEngine.from_model(model, tokenizer, **how) as engine,
        serving(engine, state_dir=tmp_path_factory.mktemp("lined")) as made,
    ):
        yield made


def routes(served: Serving) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each route that streams, and a body that it streams an answer to."""
    schema = served.get("/openapi.json").json()
    prompts = {"input": TEXT, "messages": [{"role": "user", "content": TEXT}], "prompt": "\n"}
    for path, methods in schema["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {})
        for reference in re.findall(r"schemas/(\w+)", json.dumps(content)):
            fields = schema["components"]["schemas"][reference].get("properties", {})
            if "stream" in fields and not path.endswith(("/input_tokens", "/count_tokens")):
                asked = next({name: x} for name, x in prompts.items() if name in fields)
                more = {"temperature": 0, "echo": True, "max_tokens": 9, "max_output_tokens": 9}
                more = {name: value for name, value in more.items() if name in fields}
                yield path, {"model": "tiny", "stream": True, **asked, **more}


def data_of(answer: httpx.Response) -> list[Any]:
    """What is said in a stream, read by lines as Python has them."""
    assert answer.status_code == 200, answer.text
    found = []
    for line in answer.text.splitlines():
        name, colon, value = line.partition(": ")
        assert not line or (name in ("data", "event", "id") and colon), line
        if name == "data" and value != "[DONE]":
            found.append(json.loads(value))
    return found


def texts_in(said: Any) -> Iterator[str]:
    """Yield all texts in a piece of JSON."""
    if isinstance(said, str):
        yield said
    elif isinstance(said, dict | list):
        for value in said.values() if isinstance(said, dict) else said:
            yield from texts_in(value)


def test_every_event_of_every_route_is_one_line(lined: Serving) -> None:
    seen = dict(routes(lined))
    assert len(seen) >= 4
    for path, body in seen.items():
        said = data_of(lined.post(path, body))
        assert any(TEXT in text for text in texts_in(said)), path


def test_every_event_that_was_kept_is_one_line(lined: Serving) -> None:
    body = {"model": "tiny", "input": TEXT, "stream": True, "background": True, "store": True}
    said = data_of(lined.post("/v1/responses", body))
    kept = data_of(lined.get(f"/v1/responses/{said[0]['response']['id']}", params={"stream": True}))
    assert kept == said
    assert any(TEXT in text for text in texts_in(said))


@pytest.mark.parametrize("is_wrong", [False, True])
def test_every_record_of_a_batch_is_one_line(lined: Serving, is_wrong: bool) -> None:
    record = json.loads(batches.line(0, prompt="\n"))
    record["custom_id"] = TEXT
    if is_wrong:
        record["body"]["max_tokens"] = -1
    with lined.client() as client:
        batch = batches.ended(client, batches.start(client, [json.dumps(record)]).id)
        file_id = batch.error_file_id if is_wrong else batch.output_file_id
        (found,) = batches.records(client, file_id)
    assert found["custom_id"] == TEXT
    if not is_wrong:
        assert found["response"]["body"]["choices"][0]["text"] == TEXT
