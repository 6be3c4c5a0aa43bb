"""Tools of `/v1/responses`, and the functions that represent these tools in a chat.

A function of a namespace becomes a function of a chat. So does a tool whose input is plain text.
Calls of these functions are converted back for the client. Tools that a server would run are left
out.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Discriminator, Field, PrivateAttr, Tag

from qllm.grammar_schema import LARK, closed
from qllm.server.http.fields import Items, LeftOut, Open, kind_of

INPUT = "input"
"""Argument of the function that stands for a tool whose input is plain text."""


class FunctionTool(Open):
    """A function that may be called."""

    type: Literal["function"]
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def function(self) -> dict[str, Any]:
        """Return the function in a chat's shape, without a name."""
        parameters = closed(self.parameters) if self.strict else self.parameters
        given = {"description": self.description, "parameters": parameters}
        return {name: x for name, x in given.items() if x is not None}


class CustomTool(Open):
    """A tool of the client whose input is plain text.

    A regular expression can constrain the input of every forced call. A grammar in Lark's syntax
    can do so where the model writes the input as it is, without JSON's escapes (`forced`).
    """

    type: Literal["custom"]
    name: str = Field(min_length=1)
    description: str | None = None
    format: dict[str, Any] | None = None

    _is_forced: bool = PrivateAttr(False)

    def force(self) -> None:
        """Record that the answer must call a tool.

        Raises:
            ValueError: The tool has a grammar that cannot constrain its input.
        """
        self._is_forced = True
        if self._has_grammar and not self._keywords:
            said = f"{(self.format or {}).get('syntax')!r:.80}"
            raise ValueError(
                f"the input of the custom tool {self.name!r:.80} is held to no grammar of syntax "
                f"{said}; use syntax 'regex' or 'lark', or tool_choice 'auto' where none is held"
            )

    @property
    def _has_grammar(self) -> bool:
        return self.format is not None and self.format.get("type") != "text"

    @property
    def _keywords(self) -> dict[str, str]:
        """The keywords of a JSON schema that constrain the tool's input."""
        grammar = self.format or {}
        syntax, text = grammar.get("syntax"), grammar.get("definition")
        if not isinstance(text, str):
            return {}
        known = {"regex": {"pattern": f"^(?:{text})$"}, "lark": {LARK: text}}
        return known.get(str(syntax), {})

    def function(self) -> dict[str, Any]:
        """Return the tool as a function with one text argument."""
        grammar = (self.format or {}).get("definition")
        said = [self.description, grammar and f"The input is of this grammar:\n{grammar}"]
        parameters = {
            "type": "object",
            "properties": {INPUT: {"type": "string", **self._keywords}},
            "required": [INPUT],
            "additionalProperties": False,
        }
        return {"description": "\n\n".join(filter(None, said)), "parameters": parameters}

    def unserved(self) -> Iterator[tuple[str, str]]:
        """Yield the tool's format if the model is shown the grammar but need not follow it."""
        if self._has_grammar and not self._is_forced:
            text = "the input of a custom tool is held to a grammar only where a call is forced; "
            yield "format", text + "leave format out"


def _either(kinds: Mapping[str, str]) -> Discriminator:
    """Return a discriminator of the kinds of tools. A tool of any other type is left out."""
    return Discriminator(lambda value: kinds.get(str(kind_of(value)), "left out"))


_CALLED = {"function": "function", "custom": "custom"}
Called = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[LeftOut, Tag("left out")],
    _either(_CALLED),
]


class NamespaceTool(Open):
    """Several tools under one name."""

    type: Literal["namespace"]
    name: str = Field(min_length=1)
    description: str | None = None
    tools: Items[Called] = Field(default_factory=list)


Tool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[LeftOut, Tag("left out")],
    _either({**_CALLED, "namespace": "namespace"}),
]


class Callee(NamedTuple):
    """A tool that the model may call."""

    tool: FunctionTool | CustomTool
    namespace: str | None

    def chat(self, name: str) -> dict[str, Any]:
        """Return the tool in a chat's shape, under the name that the model sees."""
        return {"type": "function", "function": {"name": name, **self.tool.function()}}

    def call(self, call_id: str, arguments: str, *, is_done: bool) -> dict[str, Any]:
        """Return a call of the tool as an output item."""
        where = {} if self.namespace is None else {"namespace": self.namespace}
        item = {"call_id": call_id, "name": self.tool.name, **where}
        if isinstance(self.tool, FunctionTool):
            return {**item, "type": "function_call", "arguments": arguments if is_done else ""}
        said = plain_input(arguments) if is_done else ""
        return {**item, "type": "custom_tool_call", "input": said}


def plain_input(arguments: str) -> str:
    """Return the input of a custom tool's call.

    Arguments of another shape are returned unchanged.
    """
    try:
        found = json.loads(arguments)
        text = found[INPUT] if isinstance(found, dict) and len(found) == 1 else None
        if isinstance(text, str):
            text.encode()  # half a surrogate pair has no bytes
            return text
    except (ValueError, KeyError, RecursionError):
        pass
    return arguments


def callees(tools: Sequence[Any]) -> dict[str, Callee]:
    """Return the tools that may be called, by the names that the model sees.

    If several tools have one name, each of them gets its namespace as a prefix.

    Raises:
        ValueError: Two tools have the same name.
    """
    found = []
    for tool in tools:
        if isinstance(tool, NamespaceTool):
            inside = (x for x in tool.tools if not isinstance(x, LeftOut))
            found += [Callee(x, tool.name) for x in inside]
        elif not isinstance(tool, LeftOut):
            found.append(Callee(tool, None))
    counts = Counter(callee.tool.name for callee in found)
    named: dict[str, Callee] = {}
    for callee in found:
        name, space = callee.tool.name, callee.namespace
        if counts[name] > 1 and space is not None:
            name = f"{space}__{name}"
        if name in named:
            raise ValueError(f"two functions are called {name!r:.80}; give each a name of its own")
        named[name] = callee
    return named


class NamedTool(Open):
    """A reference to a tool by its name."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class AllowedTools(Open):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Items[NamedTool] = Field(min_length=1)


ToolChoice = (
    Literal["auto", "none", "required"]
    | Annotated[NamedTool | AllowedTools, Field(discriminator="type")]
)


class Names:
    """The names of tools that the model sees. These names may differ from the request's names.

    Args:
        named: Tools by the model's names.
    """

    def __init__(self, named: Mapping[str, Callee]) -> None:
        self._known = {(x.namespace, x.tool.name): name for name, x in named.items()}

    def of(self, name: str, namespace: str | None) -> str:
        """Return the model's name for a tool, even if the request has no such tool."""
        return self._known.get((namespace, name), name)

    def forced(self, asked: Any) -> list[str]:
        """Return the names of the tools that a choice forces the answer to call."""
        if not isinstance(asked, NamedTool | AllowedTools):
            return list(self._known.values()) if asked == "required" else []
        some = [asked] if isinstance(asked, NamedTool) else asked.tools
        is_free = isinstance(asked, AllowedTools) and asked.mode == "auto"
        return [] if is_free else [self.of(tool.name, tool.namespace) for tool in some]

    def choice(self, asked: Any) -> Any:
        """Return a choice among the tools in a chat's shape."""
        if isinstance(asked, NamedTool):
            name = self.of(asked.name, asked.namespace)
            return {"type": "function", "function": {"name": name}}
        if isinstance(asked, AllowedTools):
            some = {"mode": asked.mode, "tools": [self.choice(tool) for tool in asked.tools]}
            return {"type": "allowed_tools", "allowed_tools": some}
        return asked
