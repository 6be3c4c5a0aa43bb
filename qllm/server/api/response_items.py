"""The items of a conversation in `/v1/responses`, and the conversion of items to a chat."""

import json
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, field_validator

from qllm.server.api.protocol import TextOr
from qllm.server.http.fields import Items, SentBack, kind_of
from qllm.server.tools.response_tools import INPUT, Names


class Item(SentBack):
    """One item of a conversation."""

    id: str | None = None
    status: str | None = None


class TextPart(Item):
    """Text of a message."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class Refusal(Item):
    """Text of a refusal."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """The refusal's text."""
        return self.refusal


Parts = TextOr[Annotated[TextPart | Refusal, Field(discriminator="type")]]


def text_of(content: str | Iterable[TextPart | Refusal]) -> str:
    """Return the text of a message."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


class MessageItem(Item):
    """A message of any role."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts
    phase: str | None = None


class AnyCallItem(Item):
    """A call of a tool."""

    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None

    @property
    def called(self) -> str:
        """The name of the tool."""
        return self.name or ""

    def given(self) -> str:
        """Return the call's arguments as JSON."""
        raise NotImplementedError

    def result(self) -> str | None:
        """Return the call's result, if the item has one; else None."""
        return None


class CallItem(AnyCallItem):
    """A call of a function."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str

    def given(self) -> str:
        return self.arguments


class CustomCallItem(AnyCallItem):
    """A call of a tool whose input is plain text."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str

    def given(self) -> str:
        return json.dumps({INPUT: self.input})


class OtherCallItem(AnyCallItem):
    """A call of another kind of tool (a shell, a search): its fields are its arguments."""

    shows_all: ClassVar[bool] = True
    type: str

    @property
    def called(self) -> str:
        return self.name or self.type.removesuffix("_call")

    def given(self) -> str:
        return json.dumps({name: x for name, x in self._own() if name not in OUTPUTS})

    def result(self) -> str | None:
        found = {name: x for name, x in self._own() if name in OUTPUTS}
        return json.dumps(found) if found else None

    def _own(self) -> Iterator[tuple[str, Any]]:
        """Yield the item's fields, except fields that only the item's server can read."""
        for name, x in (self.model_extra or {}).items():
            if x is not None and not name.startswith("encrypted"):
                yield name, x


OUTPUTS = ("output", "outputs", "result", "results")
"""Fields with the result of a call that a server answered itself."""


class AnyOutputItem(Item):
    """The result of a call."""

    call_id: str | None = None

    def text(self) -> str:
        """Return the result as text."""
        raise NotImplementedError


class CallOutputItem(AnyOutputItem):
    """The result of a function's call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Parts

    def text(self) -> str:
        return text_of(self.output)


class OtherOutputItem(AnyOutputItem):
    """The result of a call of another kind of tool."""

    type: str
    output: Any = None

    @field_validator("output")
    @classmethod
    def _has_no_image(cls, value: Any) -> Any:
        for part in value if isinstance(value, list) else [value]:
            if str(kind_of(part)).endswith(("_image", "_screenshot")):
                raise ValueError("images are not served; leave them out")
        return value

    def text(self) -> str:
        return self.output if isinstance(self.output, str) else json.dumps(self.output)


class SkippedItem(Item):
    """An item that only a server that runs tools can use."""

    model_config = ConfigDict(extra="ignore")
    type: str

    def unserved(self) -> Iterator[tuple[str, str]]:
        """Yield the item's type, and advice for the client."""
        yield self.type, f"items of type {self.type!r} say nothing to a model; leave it out"


class ReasoningText(Item):
    """A text of reasoning, or of its summary."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Item):
    """Reasoning of an earlier answer."""

    type: Literal["reasoning"]
    summary: Items[ReasoningText] = Field(default_factory=list)
    content: Items[ReasoningText] | None = None
    encrypted_content: str | None = None


_SKIPPED = ("mcp_list_tools", "mcp_approval_request", "mcp_approval_response")


def _tag(value: Any) -> Any:
    """Return the tag of the item's model. A message may omit its type."""
    kind = kind_of(value) or "message"
    if not isinstance(kind, str) or kind in ("function_call", "custom_tool_call"):
        return kind
    if kind in _SKIPPED:
        return "mcp_..."
    if kind in ("function_call_output", "custom_tool_call_output"):
        return "function_call_output"
    return next((f"...{end}" for end in ("_call", "_call_output") if kind.endswith(end)), kind)


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[OtherCallItem, Tag("..._call")]
    | Annotated[OtherOutputItem, Tag("..._call_output")]
    | Annotated[SkippedItem, Tag("mcp_...")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_tag),
]


class Chat:
    """A builder of messages from items. Reasoning, text and calls of one answer become one message.

    Args:
        names: Names of the tools that may be called.
    """

    def __init__(self, names: Names) -> None:
        self.messages: list[dict[str, Any]] = []
        self._names = names
        self._answer: dict[str, Any] | None = None
        """Assistant's message under construction."""

    def add(self, item: InputItem) -> None:
        """Add the next item."""
        if isinstance(item, ReasoningItem):
            texts = [part.text for part in item.content or item.summary]
            if texts:
                self._begin("reasoning_content", "content", "tool_calls")
                self._of_answer()["reasoning_content"] = "\n".join(texts)
        elif isinstance(item, AnyCallItem):
            self._call(item)
            if (result := item.result()) is not None:
                self._say("tool", result, tool_call_id=item.call_id or item.id or "")
        elif isinstance(item, AnyOutputItem):
            self._say("tool", item.text(), tool_call_id=item.call_id or item.id or "")
        elif isinstance(item, MessageItem):
            self._add_message(item)

    def _add_message(self, item: MessageItem) -> None:
        if item.role == "assistant":
            self._begin("content", "tool_calls")
            self._of_answer()["content"] = text_of(item.content)
        else:
            role = "system" if item.role == "developer" else item.role
            self._say(role, text_of(item.content))

    def _call(self, item: AnyCallItem) -> None:
        name = self._names.of(item.called, item.namespace)
        function = {"name": name, "arguments": item.given()}
        call = {"id": item.call_id or item.id or "", "type": "function", "function": function}
        self._of_answer().setdefault("tool_calls", []).append(call)

    def system(self, text: str) -> None:
        """Add instructions."""
        self._say("system", text)

    def _say(self, role: str, content: str, **more: Any) -> None:
        self._answer = None
        last = self.messages[-1] if self.messages else None
        if role == "system" and len(self.messages) == 1 and last and last["role"] == "system":
            last["content"] += f"\n\n{content}"  # chat templates allow only one system message
        else:
            self.messages.append({"role": role, "content": content, **more})

    def _begin(self, *names: str) -> None:
        """Begin a new message if the current one already has any of these fields."""
        if self._answer is not None and any(self._answer.get(name) for name in names):
            self._answer = None

    def _of_answer(self) -> dict[str, Any]:
        if self._answer is None:
            self._answer = {"role": "assistant", "content": ""}
            self.messages.append(self._answer)
        return self._answer
