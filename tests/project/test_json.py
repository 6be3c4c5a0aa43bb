"""JSON that is too deep is no JSON, wherever a text is read."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qllm import spelling
from qllm.errors import ConfigError
from qllm.server.api.messages_protocol import input_of
from qllm.server.tools.response_tools import plain_input
from tests.support.files import ROOT

SOURCES = sorted((ROOT / "qllm").rglob("*.py"))
REFUSED = {"ValueError", "JSONDecodeError"}
DEEP = "[" * 100_000


def names(node: ast.AST) -> set[str]:
    """Every name in a piece of code, and the last of each dotted one."""
    found = (getattr(x, "id", getattr(x, "attr", "")) for x in ast.walk(node))
    return set(found)


def readers(path: Path) -> Iterator[tuple[int, set[str]]]:
    """Yield each `try` of a file that reads JSON: its line, and the errors that it catches."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Try) and any({"loads", "json"} <= names(x) for x in node.body):
            yield node.lineno, {x for handler in node.handlers for x in names(handler)}


def test_who_refuses_what_is_no_json_refuses_what_is_too_deep() -> None:
    found = [(path, *reader) for path in SOURCES for reader in readers(path)]
    assert sum(bool(caught & REFUSED) for *_, caught in found) > 10
    wanted = {"RecursionError", "Exception"}
    assert [x for x in found if x[2] & REFUSED and not x[2] & wanted] == []


@pytest.mark.parametrize("kind", [dict, tuple, dict[str, int], tuple[str, ...]])
def test_a_setting_that_is_too_deep_is_refused(kind: Any) -> None:
    with pytest.raises(ConfigError, match=r"^x='\[\[\["):
        spelling.read("x", DEEP, kind)


def test_arguments_that_are_too_deep_are_no_arguments_and_stay_a_text() -> None:
    assert input_of(DEEP) is None
    assert plain_input(DEEP) == DEEP
