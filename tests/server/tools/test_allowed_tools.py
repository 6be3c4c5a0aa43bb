"""A choice among some of the tools of a chat; `tests/server/api/test_responses.py` asks a
server."""

from typing import Any

import pytest

from qllm.server.api.protocol import ChatRequest
from qllm.server.http.errors import ApiError

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("one", "two", "three")
]


def asked(mode: Any, tools: Any, **more: Any) -> ChatRequest:
    some = {"mode": mode, "tools": tools}
    choice = {"type": "allowed_tools", "allowed_tools": some}
    messages = [{"role": "user", "content": "x"}]
    return ChatRequest(messages=messages, tools=TOOLS, tool_choice=choice, **more)


def named(*names: str) -> list[Any]:
    return [{"type": "function", "function": {"name": name}} for name in names]


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_they_are_offered_and_may_be_called(mode: str) -> None:
    body = asked(mode, named("three", "one"))
    wanted = [TOOLS[0], TOOLS[2]]
    assert body.choice() == (wanted, mode == "required", True)
    assert body.template_options()["tools"] == wanted
    assert (body.calls_form("auto") is not None) == (mode == "required")
    assert not asked(mode, named("one"), parallel_tool_calls=False).choice().parallel


@pytest.mark.parametrize(
    ("mode", "tools", "says"),
    [
        ("none", named("one"), '"mode": "auto" or "required"'),
        (["auto"], named("one"), '"mode": "auto" or "required"'),
        ("auto", [], '"mode": "auto" or "required"'),
        ("auto", "one", '"mode": "auto" or "required"'),
        ("auto", ["one"], r"tool_choice.allowed_tools.tools[0] must be"),
        ("auto", named("one", ""), r"tool_choice.allowed_tools.tools[1] must be"),
        ("auto", named("one", "four"), "allows 'four', which is not among the tools"),
    ],
)
def test_what_is_wrong(mode: Any, tools: Any, says: str) -> None:
    body = asked(mode, tools)
    for look in (body.choice, body.template_options, lambda: body.calls_form("auto")):
        with pytest.raises(ApiError) as found:
            look()
        assert says in str(found.value.message)
        assert found.value.status_code == 400
        assert str(found.value.param).startswith("tool_choice")
