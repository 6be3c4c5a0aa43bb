"""Fuzz the server with a schema made from openai-python's types, not from our own models.

Bodies come from its `..._params` types, answers are held against its response models, errors
against its `ErrorObject`.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from openai.types import (
    Batch,
    Completion,
    ErrorObject,
    FileDeleted,
    FileObject,
    Model,
    batch_create_params,
    completion_create_params,
)
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat import completion_create_params as chat_create_params
from pydantic import TypeAdapter, ValidationError
from schemathesis.generation import GenerationMode

from tests.support.fuzzing import fuzz
from tests.support.serving import Serving, serving, tiny_engine

schema_of = schemathesis.openapi.from_dict

COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, Any] = {
    COMPLETE: completion_create_params.CompletionCreateParamsNonStreaming,
    CHAT: chat_create_params.CompletionCreateParamsNonStreaming,
    "/v1/batches": batch_create_params.BatchCreateParams,
}
ANSWERS: dict[tuple[str, str], Any] = {
    (COMPLETE, "post"): Completion,
    (CHAT, "post"): ChatCompletion,
    ("/v1/batches", "post"): Batch,
    ("/v1/batches", "get"): list[Batch],
    ("/v1/batches/{id}", "get"): Batch,
    ("/v1/batches/{id}/cancel", "post"): Batch,
    ("/v1/files", "get"): list[FileObject],
    ("/v1/files/{id}", "get"): FileObject,
    ("/v1/files/{id}", "delete"): FileDeleted,
    ("/v1/models", "get"): list[Model],
    ("/v1/models/{id}", "get"): Model,
}
BOUNDS: dict[str, Any] = {
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "frequency_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "presence_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "n": {"enum": [1, 2]},
    "max_tokens": {"enum": [1, 2, 6]},
    "seed": {"enum": [0, 7, 2**40]},
    "stop": {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": 4},
}
"""Ranges that OpenAI's types tell in prose only; fewer tokens and choices, for time. Integers are
enumerated: 1.0 is one for a schema, and not for us."""
PROMPTS = {"prompt": ["a", "The json module", ["a", "bc"], [5, 6, 7], [[5], [6, 7]]]}
ECHO = {"echo": {"type": "boolean"}, "logprobs": {"enum": [0, 1, 5]}}
MESSAGES = {"messages": [[{"role": "user", "content": "a"}], [{"role": "user", "content": []}]]}
SERVED: dict[str, dict[str, Any]] = {
    COMPLETE: {**BOUNDS, **ECHO, **{k: {"enum": v} for k, v in PROMPTS.items()}},
    CHAT: {
        **BOUNDS,
        **{k: {"enum": v} for k, v in MESSAGES.items()},
        "logprobs": {"const": True},
        "top_logprobs": {"enum": [0, 1, 5]},
    },
}
"""What we serve of a body, in range, so that most answers are 200."""


class Document:
    """An OpenAPI document that grows by the types it is given."""

    def __init__(self) -> None:
        self.parts: dict[str, Any] = {}

    def schema(self, kind: Any, prefix: str) -> Any:
        where = f"#/components/schemas/{prefix}{{model}}"
        found = TypeAdapter(kind).json_schema(ref_template=where)
        for name, part in found.pop("$defs", {}).items():
            self.parts[f"{prefix}{name}"] = part
        return found

    def answer(self, kind: Any) -> Any:
        if getattr(kind, "__origin__", None) is not list:
            return self.schema(kind, "Answer")
        data = {"object": {"const": "list"}, "data": self.schema(kind, "Answer")}
        return {"type": "object", "properties": data, "required": list(data)}

    def made(self, served: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """All routes; of those in `served`, bodies have these fields alone."""
        error = {"type": "object", "required": ["error"]}
        error["properties"] = {"error": self.schema(ErrorObject, "Error")}
        paths: dict[str, Any] = {}
        for (path, method), kind in ANSWERS.items():
            operation: dict[str, Any] = {
                "responses": {
                    "200": _json(self.answer(kind), "It worked"),
                    "4XX": _json(error, "It is wrong"),
                }
            }
            if "{id}" in path:
                name = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
                operation["parameters"] = [name]
            if method == "post" and path in BODIES:
                body = self.schema(BODIES[path], f"Body{list(BODIES).index(path)}")
                if path in served:
                    body["properties"] = {**served[path]}
                    body["additionalProperties"] = False
                    body["dependentRequired"] = {"top_logprobs": ["logprobs"]}
                if "model" in body["required"]:
                    body["properties"]["model"] = {"enum": ["tiny"]}
                operation["requestBody"] = {**_json(body, "A body"), "required": True}
            paths.setdefault(path, {})[method] = operation
        _first_of_an_echo_may_be_null(self.parts)
        return {
            "openapi": "3.1.0",
            "info": {"title": "openai-python", "version": "1"},
            "paths": paths,
            "components": {"schemas": self.parts},
        }


def _json(schema: Any, text: str) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": schema}}}


def _first_of_an_echo_may_be_null(parts: dict[str, Any]) -> None:
    """OpenAI's server and vLLM answer null for the first token; the types do not say so."""
    properties = parts["AnswerLogprobs"]["properties"]
    for name in ("token_logprobs", "top_logprobs"):
        arrays = [part for part in properties[name]["anyOf"] if part.get("type") == "array"]
        (array,) = arrays
        array["items"] = {"anyOf": [array["items"], {"type": "null"}]}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    state = tmp_path_factory.mktemp("state")
    with (
        tiny_engine(max_kv_tokens=256, default_max_tokens=4, conformance=False) as engine,
        serving(engine, state_dir=state, max_choices=8) as made,
    ):
        yield made


@pytest.mark.parametrize("mode", list(GenerationMode), ids=str)
@pytest.mark.parametrize("path", BODIES)
def test_no_body_of_their_types_breaks_the_server(
    served: Serving, path: str, mode: GenerationMode
) -> None:
    seen = fuzz(served, schema_of(Document().made({})), path, "post", mode, 20)
    assert any(status >= 400 for status, _ in seen)


@pytest.mark.parametrize("path", SERVED)
def test_what_we_serve_is_answered_in_their_types(served: Serving, path: str) -> None:
    document = Document().made(SERVED)
    seen = fuzz(served, schema_of(document), path, "post", GenerationMode.POSITIVE, 20)
    answered = [body for status, body in seen if status == 200]
    assert len(answered) > len(seen) / 2
    assert {name for body in answered for name in body} >= set(SERVED[path])
    if path == COMPLETE:
        assert any(body.get("echo") and body.get("logprobs") is not None for body in answered)


@pytest.mark.parametrize(("path", "method"), [x for x in ANSWERS if x[0] not in BODIES])
def test_no_lookup_breaks_the_server(served: Serving, path: str, method: str) -> None:
    served.client().files.create(file=b"{}\n", purpose="batch")
    seen = fuzz(served, schema_of(Document().made({})), path, method, GenerationMode.POSITIVE, 4)
    assert {status for status, _ in seen} <= {200, 400, 404, 405}
    assert ("{id}" in path) or {status for status, _ in seen} == {200}


@pytest.mark.parametrize(("path", "chunk"), [(COMPLETE, Completion), (CHAT, ChatCompletionChunk)])
def test_every_event_of_a_stream_is_of_their_types(served: Serving, path: str, chunk: Any) -> None:
    allowed = Document().made(SERVED)
    whole = fuzz(served, schema_of(allowed), path, "post", GenerationMode.POSITIVE, 6)
    bodies = [body for status, body in whole if status == 200]
    num_events = 0
    for body in bodies:
        asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
        answer = served.post(path, asked)
        assert answer.status_code == 200
        events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        for event in map(json.loads, events[:-1]):
            for choice in event["choices"]:
                if path == COMPLETE and choice["finish_reason"] is None:
                    choice["finish_reason"] = "stop"  # null until the end; the types say never
                for name in ("token_logprobs", "top_logprobs"):
                    values = (choice.get("logprobs") or {}).get(name)
                    if values and values[0] is None:
                        del values[0]
            TypeAdapter(chunk).validate_python(event, strict=True)
            num_events += 1
    assert num_events > len(bodies)


def test_the_judge_sees_an_answer_that_is_wrong() -> None:
    answer = {"id": "x", "choices": [], "created": "now", "model": "m", "object": "text_completion"}
    with pytest.raises(ValidationError, match="created"):
        TypeAdapter(Completion).validate_python(answer, strict=True)
