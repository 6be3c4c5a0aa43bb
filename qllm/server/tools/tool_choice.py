"""The tools that an answer may call."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from qllm.grammar_schema import LARK
from qllm.server.http.errors import ApiError

ALLOWED_TOOLS = (
    '{"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": '
    '[{"type": "function", "function": {"name": ...}}, ...]}}'
)
"""Shape of a `tool_choice` with `allowed_tools`, shown in error messages."""


class Choice(NamedTuple):
    """A request's choice of tools."""

    tools: Sequence[Mapping[str, Any]]
    """Tools that may be called; none with `tool_choice="none"`."""
    forced: bool
    """True if the answer must consist of calls."""
    parallel: bool


def choice_of(
    tools: Sequence[Mapping[str, Any]] | None, asked: Any, parallel: bool | None
) -> Choice:
    """Return the choice from `tools`, `tool_choice` and `parallel_tool_calls`.

    Raises:
        ApiError: One of these fields is wrong.
    """
    known: dict[str, Mapping[str, Any]] = {}
    for index, tool in enumerate(tools or ()):
        name = _name(tool, index)
        if name in known:
            text = f"two functions are called {name!r:.80}; give each a name of its own"
            raise ApiError(400, text, param="tools")
        known[name] = tool
    if asked == "none" or (asked in (None, "auto") and not known):
        return Choice((), False, False)
    if asked in (None, "auto", "required"):
        if not known:
            raise ApiError(400, "tool_choice='required' needs tools", param="tool_choice")
        return Choice(list(known.values()), asked == "required", parallel is not False)
    function = asked.get("function") if isinstance(asked, Mapping) else None
    wanted = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(wanted, str):
        text = "tool_choice must be 'auto', 'none', 'required' or "
        text += '{"type": "function", "function": {"name": ...}} or ' + ALLOWED_TOOLS
        raise ApiError(400, text, param="tool_choice")
    if wanted not in known:
        names = ", ".join(map(repr, known)) or "none"
        text = f"tool_choice names {wanted!r:.80}, which is not among the tools ({names:.500})"
        raise ApiError(400, text, param="tool_choice")
    return Choice([known[wanted]], True, False)


def allowed_of(
    tools: Sequence[Mapping[str, Any]] | None, asked: Any
) -> tuple[Sequence[Mapping[str, Any]] | None, Any]:
    """Return the tools that `allowed_tools` allows, and the choice among these tools.

    Raises:
        ApiError: The choice is wrong.
    """
    if not isinstance(asked, Mapping) or asked.get("type") != "allowed_tools":
        return tools, asked
    inside = "tool_choice.allowed_tools.tools"
    some, mode, names = asked.get("allowed_tools"), None, set[str]()
    if isinstance(some, Mapping) and isinstance(some.get("tools"), list):
        mode = some.get("mode")
        names = {_name(tool, n, inside) for n, tool in enumerate(some["tools"])}
    if mode not in ("auto", "required") or not names:
        raise ApiError(400, f"tool_choice must be {ALLOWED_TOOLS}", param="tool_choice")
    of_name = [(_name(tool, n), tool) for n, tool in enumerate(tools or ())]
    if unknown := names - {name for name, _ in of_name}:
        text = f"tool_choice allows {min(unknown)!r:.80}, which is not among the tools"
        raise ApiError(400, text, param="tool_choice")
    return [tool for name, tool in of_name if name in names], mode


def _name(tool: Any, index: int, where: str = "tools") -> str:
    tool = tool if isinstance(tool, Mapping) else {}
    function = tool.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if tool.get("type") != "function" or not isinstance(name, str) or not name:
        text = f'{where}[{index}] must be {{"type": "function", "function": {{"name": ...}}}}'
        raise ApiError(400, text, param=where)
    assert isinstance(function, Mapping)
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        text = f"tools[{index}].function.parameters must be a JSON schema"
        raise ApiError(400, text, param="tools")
    return name


def shown(tools: Sequence[Mapping[str, Any]] | None) -> Sequence[Mapping[str, Any]] | None:
    """Return tools for the chat template, without grammars.

    The descriptions contain the grammars.
    """
    return None if tools is None else [_without_grammars(tool) for tool in tools]


def _without_grammars(part: Any) -> Any:
    if isinstance(part, Mapping):
        return {key: _without_grammars(x) for key, x in part.items() if key != LARK}
    return part
