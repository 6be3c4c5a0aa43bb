"""The page `/docs`, made from OpenAPI: routes with fields and an example body. It has no script."""

import asyncio
import json
from collections.abc import Iterator
from html import escape
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

from qllm.server.page.ui import HEADERS

STYLE = "docs.css"
MODEL = "MODEL"
"""Placeholder in an example body. The page replaces it by the name of the served model."""
_CHAT = {"messages": [{"role": "user", "content": "What does json.dumps do?"}]}
EXAMPLES: dict[str, dict[str, Any]] = {
    "POST /v1/chat/completions": {**_CHAT, "max_tokens": 64},
    "POST /v1/completions": {"prompt": "def parse(text):", "max_tokens": 64, "stop": ["\n\n"]},
    "POST /v1/responses": {"input": "What does json.dumps do?", "max_output_tokens": 64},
    "POST /v1/responses/input_tokens": {"input": "What does json.dumps do?"},
    "POST /v1/messages": {"model": MODEL, **_CHAT, "max_tokens": 64},
    "POST /v1/messages/count_tokens": {"model": MODEL, **_CHAT},
    "POST /v1/batches": {
        "input_file_id": "file-...",
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    },
    "POST /v1/prompts": {"prompt": "Sources:\n", "priority": 0},
    "POST /v1/prompts/{name}/append": {"append": "- one more\n"},
    "PUT /v1/prompts/{name}": {"from": 0, "replace": "Better sources:\n"},
    "PATCH /v1/requests/{name}": {"priority": 1, "paused": False},
    "POST /tokenize": {"prompt": "def parse(text):"},
    "POST /detokenize": {"tokens": [1, 2, 3]},
    "POST /delete_kv": {"cache_salt": "session-7"},
}
"""An example body for each operation that takes JSON."""


def routes() -> APIRouter:
    """Return the routes of the page."""
    router = APIRouter(tags=["docs"])
    style = (files("qllm.server.page") / "static" / STYLE).read_bytes()

    @router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def root() -> Response:
        """Redirect to the live page."""
        return RedirectResponse("/ui")

    @router.api_route("/docs", methods=["GET", "HEAD"], include_in_schema=False)
    async def docs(request: Request) -> Response:
        """Serve the page."""
        model = request.app.state.front.config.model_name
        text = page(await asyncio.to_thread(request.app.openapi), model)
        return Response(text, media_type="text/html", headers=HEADERS)

    @router.get(f"/docs/static/{STYLE}", include_in_schema=False)
    async def styled() -> Response:
        """Serve the page's style."""
        return Response(style, media_type="text/css", headers=HEADERS)

    return router


def example(route: str, model: str) -> str:
    """Return an operation's example body as JSON, with the model's name.

    Return "" if there is no example.
    """
    body = EXAMPLES.get(route, {})
    return json.dumps({**body, "model": model} if "model" in body else body) if body else ""


def page(schema: dict[str, Any], model: str) -> str:
    """Return the HTML for an OpenAPI schema, with example bodies for a model."""
    info = schema["info"]
    parts = schema.get("components", {}).get("schemas", {})
    body = "".join(
        _operation(f"{method.upper()} {path}", operation, parts, model)
        for path, methods in schema["paths"].items()
        for method, operation in methods.items()
    )
    title = f"{escape(info['title'])} {escape(info['version'])}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="stylesheet" href="/docs/static/{STYLE}"></head><body><main><h1>{title}</h1>'
        '<p>The <a href="/openapi.json">OpenAPI schema</a> is for programs, the '
        '<a href="/ui">live page</a> shows what the engine does. The pages of the project: '
        "<code>qllm docs</code>.</p>"
        f"{body}</main></body></html>"
    )


def _operation(route: str, operation: dict[str, Any], parts: dict[str, Any], model: str) -> str:
    text = escape(operation.get("description") or operation.get("summary") or "")
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(kind)}</td><td>{escape(said)}</td>"
        "</tr>"
        for name, kind, said in fields_of(operation, parts)
    )
    table = (
        f"<table><thead><tr><th>field</th><th>type</th><th></th></tr></thead><tbody>{rows}</tbody>"
        "</table>"
    )
    body = f"<pre>{escape(shown)}</pre>" if (shown := example(route, model)) else ""
    answers = "".join(
        f"<li><code>{escape(status)}</code> {escape(answer.get('description', ''))}</li>"
        for status, answer in operation.get("responses", {}).items()
    )
    return (
        f"<details><summary><code>{escape(route)}</code> {text}</summary>"
        f"{body}{table if rows else ''}<ul>{answers}</ul></details>"
    )


def fields_of(operation: dict[str, Any], parts: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield name, type and meaning of each parameter and each field of the body."""
    for found in operation.get("parameters", ()):
        yield found["name"], _kind(found.get("schema", {})), f"in the {found['in']}"
    for content in operation.get("requestBody", {}).get("content", {}).values():
        body = _resolved(content.get("schema", {}), parts)
        needed = body.get("required", ())
        for name, field in body.get("properties", {}).items():
            said = " ".join(str(field.get("description", "")).split())
            default = f" Default: {field['default']!r:.80}." if field.get("default") else ""
            yield name, _kind(field), f"{'Required. ' * (name in needed)}{said}{default}".strip()


def _resolved(schema: dict[str, Any], parts: dict[str, Any]) -> dict[str, Any]:
    name = str(schema.get("$ref", "")).rpartition("/")[2]
    return dict(parts.get(name, schema))


def _kind(schema: dict[str, Any]) -> str:
    """Return a type in words. Of alternatives, null is left out."""
    if "$ref" in schema:  # `module__of__Class` if two classes have one name
        return str(schema["$ref"]).rpartition("/")[2].rpartition("__")[2]
    if "enum" in schema:
        return " or ".join(map(repr, schema["enum"]))
    if "const" in schema:
        return repr(schema["const"])
    if alternatives := schema.get("anyOf") or schema.get("oneOf"):
        kinds = dict.fromkeys(_kind(x) for x in alternatives if x.get("type") != "null")
        return " or ".join(kinds)
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    return str(schema.get("type", "any"))
