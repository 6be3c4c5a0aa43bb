"""Write the pages of docs/reference that are made of the code.

Settings and fields are described by the strings below them, routes by their docstrings, metrics by
their help, and errors by the calls that make them. `python -m scripts.reference` prints
them, `--write` writes them.
"""

import argparse
import ast
import re
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pydantic import BaseModel

from qllm import errors
from qllm.cli.settings import meanings, rows
from qllm.config import EngineConfig
from qllm.plugins import installed_policies, load_factory
from qllm.ray.settings import RaySettings
from qllm.server.app import create_app
from qllm.server.config import ServerConfig, load_config
from qllm.server.http.errors import RESPONSES
from qllm.server.http.fields import Body
from qllm.server.metrics import Metrics
from qllm.server.ops.fleet_metrics import FleetMetrics
from qllm.server.page.docs import fields_of

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "reference"
WIDTH = 100
NOTE = "<!-- Made by `python -m scripts.reference --write`; do not edit. -->"
NO_ENGINE = SimpleNamespace(
    tokenizer=None,
    config=EngineConfig(),
    fleet=None,
    client=SimpleNamespace(engines=list, num_route_errors=0),
    num_route_errors=0,
)
"""In place of an engine: routes and metrics are described before any serves."""


def table(head: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    """Return a table of at most WIDTH columns; a long cell goes on in the rows below."""
    found = [[" ".join(cell.replace("|", "\\|").split()) for cell in row] for row in body]
    room = WIDTH - 3 * len(head) - 1
    widths = [max(map(len, column)) for column in zip(head, *found, strict=True)]
    while sum(widths) > room or max(map(len, _lines(found, widths)), default=0) > WIDTH:
        widths[widths.index(max(widths))] -= 1
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *_lines(found, widths)]


def _lines(rows: Iterable[Sequence[str]], widths: Sequence[int]) -> list[str]:
    """Return the lines of rows whose cells have these widths, or that of a word that is longer."""
    lines = []
    for row in rows:
        cells = [_folded(cell, width) for cell, width in zip(row, widths, strict=True)]
        for at in range(max(map(len, cells))):
            line = [cell[at] if at < len(cell) else "" for cell in cells]
            lines.append(" ".join(f"| {cell}" if cell else "|" for cell in line) + " |")
    return lines


def _folded(text: str, width: int) -> list[str]:
    """Return the lines of a cell; no code between backticks is cut."""
    whole = re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", "\0"), text)
    lines = textwrap.wrap(whole, width, break_on_hyphens=False, break_long_words=False)
    return [line.replace("\0", " ") for line in lines] or [""]


def page(title: str, about: str, parts: Iterable[tuple[str, list[str]]]) -> str:
    """Return the text of a page: a title, sentences about it, and parts with a heading each."""
    lines = [f"# {title}", "", NOTE, "", *textwrap.wrap(about, WIDTH, break_on_hyphens=False)]
    for heading, body in parts:
        lines += ["", f"## {heading}", "", *body]
    return "\n".join(lines) + "\n"


def settings() -> str:
    """Return the page of all settings: of the server, the engine, Ray and each policy."""
    head = ("setting", "default", "meaning")

    def listed(which: type[Any]) -> list[str]:
        return table(
            head, [(f"`{name}`", _default(value), text) for name, value, text in rows(which)]
        )

    parts = [
        ("Server: `--NAME VALUE`, `QLLM_NAME`, or `NAME` in the file", listed(ServerConfig)),
        ("Engine: `--set NAME=VALUE`, or the table `engine`", listed(EngineConfig)),
        ("Ray: `--set ray.NAME=VALUE`, or the table `ray`", listed(RaySettings)),
    ]
    heading = "Policies: `--set policy.NAME=VALUE`, or the table `policy_settings`"
    parts.append((heading, table(("setting", "default per policy", "meaning"), _of_policies())))
    about = (
        "Every setting, its default and its meaning. The guide [serve](../guides/serve.md) says"
        " where settings come from and how values are written. `-` is no value."
    )
    return page("Settings", about, parts)


def _of_policies() -> list[tuple[str, str, str]]:
    """Return name, defaults and meaning of every setting of our policies.

    Settings of one name and one meaning are one row, with the policies of each default.
    """
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for policy, point in sorted(installed_policies().items()):
        if not point.value.startswith("qllm_policies."):
            continue
        factory = load_factory(point)
        said = _said(factory)
        for field in fields(factory):
            if not field.metadata.get("fixed"):
                defaults = found.setdefault((field.name, said.get(field.name, "")), {})
                defaults.setdefault(str(field.default), []).append(f"`{policy}`")
    return [
        (
            f"`{name}`",
            "; ".join(f"`{value}`: {', '.join(policies)}" for value, policies in defaults.items()),
            text,
        )
        for (name, text), defaults in sorted(found.items())
    ]


def _said(factory: type[Any]) -> dict[str, str]:
    """Return the strings below the fields of a class of settings, its base classes included."""
    found: dict[str, str] = {}
    for part in reversed(factory.__mro__[:-1]):
        found |= meanings(part)
    return found


def _default(value: str) -> str:
    return value if value == "-" else f"`{value}`"


def http() -> str:
    """Return the page of all routes and the fields of their bodies."""
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(None, {}, {"model": "tiny", "state_dir": folder})
        schema = create_app(NO_ENGINE, config).openapi()  # type: ignore[arg-type]
    known = {model.__name__: model for model in _subclasses(Body)}
    schemas = schema["components"]["schemas"]
    routes, parts = [], []
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            route = f"{method.upper()} {path}"
            text = operation.get("description") or operation.get("summary") or ""
            routes.append((f"`{route}`", text))
            found = [
                (f"`{name}`", kind.replace("'", '"'), text or _meaning(known, operation, name))
                for name, kind, text in fields_of(operation, schemas)
            ]
            if found:
                parts.append((f"`{route}`", table(("field", "type", "meaning"), found)))
    about = (
        "Every route, and the fields of its body or query. `/docs` of a server shows the same with"
        " an example of each. A field without a meaning here is that of OpenAI or Anthropic."
    )
    return page("HTTP", about, [("Routes", table(("route", "meaning"), routes)), *parts])


def _subclasses(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for found in model.__subclasses__():
        yield found
        yield from _subclasses(found)


def _meaning(known: dict[str, type[BaseModel]], operation: dict[str, Any], name: str) -> str:
    """Return the string below a field of a body, in its class or in one that it extends."""
    for content in operation.get("requestBody", {}).get("content", {}).values():
        schema = content["schema"]
        model = known.get(schema.get("title") or schema.get("$ref", "").rpartition("/")[2])
        for part in model.__mro__ if model else ():
            if issubclass(part, Body) and part is not Body:
                found = meanings(part)
                if text := found.get(name) or found.get(f"{name}_"):
                    return text
    return ""


def metrics() -> str:
    """Return the page of all metrics: of a server, and of a fleet."""
    own = Metrics("m")
    names = {metric.name for metric in own.registry.collect()}
    FleetMetrics(own, "m", NO_ENGINE.client)
    server: list[tuple[str, str, str, str]] = []
    fleet: list[tuple[str, str, str, str]] = []
    for collector in own.registry._collector_to_names:  # the registry has no public list
        for metric in collector.collect():
            name = f"{metric.name}{'_total' * (metric.type == 'counter')}"
            labels = ", ".join(getattr(collector, "_labelnames", ())[1:])
            row = (f"`{name}`", metric.type, labels, metric.documentation)
            (server if metric.name in names else fleet).append(row)
    head = ("metric", "type", "labels", "meaning")
    about = (
        "Every metric of `/metrics`. Each metric of ours has the label `model_name` as well. Names"
        " that vLLM also has mean the same there. For an engine on the same host the metrics of the"
        " process exist again, with `qllm_engine_` in front. To add a metric, see"
        " [CONTRIBUTING](../../CONTRIBUTING.md#add-a-metric)."
    )
    return page(
        "Metrics",
        about,
        [("Server", table(head, server)), ("Several engines, by address", table(head, fleet))],
    )


def errors_page() -> str:
    """Return the page of all errors: HTTP statuses, codes, and exceptions of Python."""
    statuses = [(f"`{status}`", answer["description"]) for status, answer in RESPONSES.items()]
    codes: dict[str, tuple[set[str], set[str]]] = {}
    for file in sorted((ROOT / "qllm" / "server").rglob("*.py")):
        for code, status, text in _coded(ast.parse(file.read_text())):
            found = codes.setdefault(code, (set(), set()))
            found[0].add(status)
            found[1].add(text)
    listed = [
        (f"`{code}`", ", ".join(sorted(s for s in found[0] if s)), "; or: ".join(sorted(found[1])))
        for code, found in sorted(codes.items())
    ]
    kinds = [
        (f"`{name}`", f"`{kind.__base__.__name__}`", (kind.__doc__ or "").strip())
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.QllmError) and name == kind.__name__
    ]
    about = (
        "Every error that a caller can meet. An HTTP error has OpenAI's body: `message`, `type`,"
        " `param` and `code`; below `/v1/messages` it has Anthropic's. In the messages below `...`"
        " stands for a value."
    )
    parts = [
        ("HTTP statuses", table(("status", "meaning"), statuses)),
        ("Codes", table(("code", "status", "message"), listed)),
        ("Exceptions of Python (`qllm.errors`)", table(("class", "base", "meaning"), kinds)),
    ]
    return page("Errors", about, parts)


def _coded(tree: ast.Module) -> Iterator[tuple[str, str, str]]:
    """Yield code, status and message of every `ApiError` that a module makes.

    A message may be a local text, and `text += more` may lengthen it.
    """
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        local = {
            target.id: node.value
            for node in ast.walk(function)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(function):
            match node:
                case ast.AugAssign(target=ast.Name(id=name), op=ast.Add()) if name in local:
                    local[name] = ast.BinOp(local[name], node.op, node.value)
        for node in ast.walk(function):
            match node:
                case ast.Call(func=ast.Name(id="ApiError"), args=[status, message, *_]):
                    given = next((k.value for k in node.keywords if k.arg == "code"), None)
                    for code in _texts(local.get(getattr(given, "id", ""), given)):
                        text = _template(local.get(getattr(message, "id", ""), message))
                        yield code, str(getattr(status, "value", "")), text
                case ast.Dict(keys=[ast.Constant(value="code"), ast.Constant(value="message"), *_]):
                    for code in _texts(node.values[0]):
                        yield code, "", _template(node.values[1])


def _texts(node: ast.expr | None) -> list[str]:
    """Return the texts that an expression may become."""
    if isinstance(node, ast.IfExp):
        return _texts(node.body) + _texts(node.orelse)
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


def _template(node: ast.expr) -> str:
    """Return a message with `...` in place of its values."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_template(part) for part in parts)
        case ast.BinOp(left=left, right=right):
            return _template(left) + _template(right)
        case ast.IfExp(body=body):
            return _template(body)
    return "..."


def pages() -> dict[str, str]:
    """Return the text of each page by its name."""
    return {
        "settings.md": settings(),
        "http.md": http(),
        "metrics.md": metrics(),
        "errors.md": errors_page(),
    }


def main() -> int:
    """Print the pages, or write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    for name, text in pages().items():
        if write:
            (PAGES / name).write_text(text)
        else:
            print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
