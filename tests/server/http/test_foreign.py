"""The class of every field of every route: served, or accepted, told or refused by its name."""

import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import openai.types.responses.response_create_params as of_responses
import pytest
from openai.types import completion_create_params as of_completions
from openai.types.chat import completion_create_params as of_chat
from pydantic import BaseModel

from qllm.server.api.messages_protocol import CountRequest, MessagesRequest
from qllm.server.api.protocol import ChatRequest, CompletionRequest
from qllm.server.api.responses_protocol import InputTokensRequest, ResponsesRequest
from qllm.server.http.errors import ApiError, parse
from qllm.server.http.fields import Body, Open
from qllm.server.http.foreign import CHANGES, HOLDS, NEUTRAL, NONE, SCHEMAS, Effect, effect_of
from qllm.server.http.unknown import ALIKE, HEADER, Told
from tests.support.serving import Serving

CHAT = [{"role": "user", "content": "a"}]
ROUTES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "/v1/chat/completions": (ChatRequest, {"messages": CHAT, "max_tokens": 1}),
    "/v1/completions": (CompletionRequest, {"prompt": "a", "max_tokens": 1}),
    "/v1/messages": (MessagesRequest, {"model": "tiny", "messages": CHAT, "max_tokens": 1}),
    "/v1/responses": (ResponsesRequest, {"input": "a", "max_output_tokens": 16}),
}
COUNTS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "/v1/messages/count_tokens": (CountRequest, {"model": "tiny", "messages": CHAT}),
    "/v1/responses/input_tokens": (InputTokensRequest, {"input": "a"}),
}
ALL = {*HOLDS, *CHANGES, *NONE}
FORMS = {"ResponseFormat", "NamedSchema", "Structured", "TextFormat", "OutputFormat"}
"""Parts that hold the answer's form: an unknown field of one is refused."""


def own(model: type[BaseModel]) -> set[str]:
    """The fields that a route serves."""
    return {field.alias or name for name, field in model.model_fields.items()}


def judged(model: type[Any], body: dict[str, Any]) -> dict[str, Effect]:
    return {one.place: one.effect for one in parse(model, body).all_unserved}


def ignored(served: Serving, path: str, body: dict[str, Any]) -> set[str]:
    answer = served.post(path, body)
    assert answer.status_code == 200, answer.text
    return set(filter(None, answer.headers.get(HEADER, "").split(", ")))


def test_a_name_has_one_class() -> None:
    assert len(ALL) == len(HOLDS) + len(CHANGES) + len(NONE)
    assert set(NEUTRAL) | SCHEMAS <= ALL
    assert NONE.isdisjoint(NEUTRAL)


def test_what_constrains_or_ends_an_answer_is_never_left_out() -> None:
    """The names that a mistake in the table would harm most; the other tests read the table."""
    ends = "stop stop_sequences stop_token_ids stop_regex max_tokens max_output_tokens n_predict"
    forms = "response_format text output_config format json_schema structured_outputs grammar ebnf"
    forms += " guided_json guided_regex guided_choice guided_grammar regex logit_bias bad_words"
    others = "n tools tool_choice functions function_call suffix custom_logit_processor messages"
    assert set(f"{ends} {forms} {others}".split()) <= set(HOLDS)
    assert {"best_of", "use_beam_search", "verbosity", "typical_p", "context_management"} <= CHANGES
    assert {"user", "metadata", "store", "prompt_cache_key", "client_metadata"} <= NONE


def test_every_field_of_any_route_has_a_class_at_the_routes_that_do_not_serve_it(
    served: Serving,
) -> None:
    schema = served.get("/openapi.json").json()
    fields: dict[str, set[str]] = {}
    for path, methods in schema["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {})
        for reference in re.findall(r"schemas/(\w+)", json.dumps(content)):
            names = set(schema["components"]["schemas"][reference].get("properties", {}))
            if path in ROUTES:
                fields[path] = names
    assert set(fields) == set(ROUTES)
    for path, names in fields.items():
        assert names == own(ROUTES[path][0])
        assert set.union(*fields.values()) - names <= ALL, path


def test_every_field_of_openai_is_served_or_has_a_class() -> None:
    params: dict[type[Any], Any] = {
        CompletionRequest: of_completions.CompletionCreateParamsBase,
        ChatRequest: of_chat.CompletionCreateParamsBase,
        ResponsesRequest: of_responses.ResponseCreateParamsBase,
    }
    for model, found in params.items():
        assert {"model", "user"} <= set(found.__annotations__)
        assert set(found.__annotations__) - own(model) <= ALL


@pytest.mark.parametrize("path", ROUTES)
def test_a_field_that_cannot_change_the_answer_is_accepted_without_a_word(
    served: Serving, path: str
) -> None:
    model, body = ROUTES[path]
    names = NONE - own(model)
    assert judged(model, body | dict.fromkeys(names, "x")) == dict.fromkeys(names, Effect.NONE)
    assert ignored(served, path, body | dict.fromkeys(names, "x")) == set()


@pytest.mark.parametrize("path", ROUTES)
def test_a_field_that_could_change_the_answer_is_told(served: Serving, path: str) -> None:
    model, body = ROUTES[path]
    names = sorted((CHANGES - own(model)) | {"zzz_new", "Zzz"})
    assert len(names) > 80
    for at in range(0, len(names), 40):  # the header has a limit
        some = names[at : at + 40]
        assert ignored(served, path, body | {name: {"x": 5} for name in some}) == set(some)


@pytest.mark.parametrize("path", [*ROUTES, *COUNTS])
def test_a_field_that_holds_the_answer_is_refused_by_name(served: Serving, path: str) -> None:
    model, body = (ROUTES | COUNTS)[path]
    for name in set(HOLDS) - own(model):
        for value in (5, [{"a": 1}]):
            answer = served.post(path, {**body, name: value})
            assert answer.status_code == 400, name
            assert f"unknown field {name!r}" in answer.text.replace('\\"', '"')
        instead = [x for x in HOLDS[name] if x in own(model)]
        assert all(f"use {x}" in answer.text for x in instead[:1])


@pytest.mark.parametrize("path", ROUTES)
def test_a_value_that_asks_for_nothing_is_accepted_without_a_word(
    served: Serving, path: str
) -> None:
    model, body = ROUTES[path]
    names = sorted(ALL - own(model))
    for at in range(0, len(names), 100):  # an object may have 200 fields
        some = names[at : at + 100]
        asked = {name: NEUTRAL.get(name, (None,))[-1] for name in some}
        assert judged(model, body | asked) == {}
        assert ignored(served, path, body | asked) == set()
        for nothing in (None, "", [], {}):
            held = judged(model, body | {name: nothing for name in some})
            assert set(held) == (SCHEMAS & set(some) if isinstance(nothing, list | dict) else set())


@pytest.mark.parametrize("path", ROUTES)
def test_strict_fields_refuse_all_that_is_not_served(path: str) -> None:
    model, body = ROUTES[path]
    strict = Told(logging.getLogger("test"), is_strict=True)
    for name in (ALL | {"zzz_new"}) - own(model):
        with pytest.raises(ApiError, match=f"unknown field '{name}'") as caught:
            strict.headers(parse(model, {**body, name: 5}).all_unserved)
        assert (caught.value.status_code, caught.value.param) == (400, name)
        neutral = {name: NEUTRAL.get(name, (None,))[0]}
        assert strict.headers(parse(model, body | neutral).all_unserved) == {}


@pytest.mark.parametrize("path", ROUTES)
def test_a_misspelt_field_is_refused_if_it_would_hold_the_answer_and_told_else(path: str) -> None:
    model, body = ROUTES[path]
    known = own(model) | set(HOLDS)
    for name in known:
        camel = re.sub("_(.)", lambda found: found[1].upper(), name)
        for wrong in {name.upper(), camel, name[:3] + name[4:] if len(name) > 7 else camel}:
            if wrong in known | ALL:
                continue
            (one,) = parse(model, {**body, wrong: 5}).all_unserved
            wanted = Effect.HOLDS if name in HOLDS else Effect.CHANGES
            assert one.effect in (wanted, Effect.HOLDS), (name, wrong)
            assert "did you mean" in one.why or "not served here" in one.why, (wrong, ALIKE)


def parts(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """Yield each kind of part that a body may have."""
    seen: set[type[BaseModel]] = set()

    def walk(hint: Any) -> Iterator[type[BaseModel]]:
        if isinstance(hint, type) and issubclass(hint, BaseModel) and hint not in seen:
            seen.add(hint)
            yield hint
            for field in hint.model_fields.values():
                yield from walk(field.annotation)
        for inside in getattr(hint, "__args__", ()):
            yield from walk(inside)

    yield from walk(model)


def test_only_what_holds_the_form_of_an_answer_has_no_other_fields() -> None:
    closed = {
        kind.__name__
        for model, _ in (ROUTES | COUNTS).values()
        for kind in parts(model)
        if issubclass(kind, Body) and kind.model_config.get("extra") == "forbid"
    }
    assert closed == FORMS
    assert all(effect_of(name) is Effect.HOLDS for name in ("response_format", "text"))
    assert issubclass(ResponsesRequest, Open)
