"""Items of a conversation as `/v1/responses` has them, and the chat that they come to."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from .fields import Items, SentBack
from .protocol import TextOr


class Item(SentBack):
    """One item."""

    id: str | None = None
    status: str | None = None


class TextPart(Item):
    """Text of a message."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class Refusal(Item):
    """Text that says no."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """What it says."""
        return self.refusal


Parts = TextOr[Annotated[TextPart | Refusal, Field(discriminator="type")]]


def text_of(content: str | Iterable[TextPart | Refusal]) -> str:
    """The text of a message."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


class MessageItem(Item):
    """What somebody says."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts
    phase: str | None = None


class CallItem(Item):
    """A call of a function."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class CallOutputItem(Item):
    """What a call came to."""

    type: Literal["function_call_output"]
    call_id: str
    output: Parts


class ReasoningText(Item):
    """Reasoning, or a summary of some."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Item):
    """Reasoning of an earlier answer."""

    type: Literal["reasoning"]
    summary: Items[ReasoningText] = Field(default_factory=list)
    content: Items[ReasoningText] | None = None
    encrypted_content: str | None = None


def type_or_message(value: Any) -> Any:
    """The type of an item; a message needs to name none."""
    if isinstance(value, Mapping):
        return value.get("type") or "message"
    return getattr(value, "type", "message")


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(type_or_message),
]


class Chat:
    """Puts items together to messages: reasoning, text and calls of one answer are one message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._answer: dict[str, Any] | None = None
        """The assistant's message that is being put together."""

    def add(self, item: InputItem) -> None:
        """Take the next item."""
        if isinstance(item, ReasoningItem):
            texts = [part.text for part in item.content or item.summary]
            if texts:
                self._begin("reasoning_content", "content", "tool_calls")
                self._of_answer()["reasoning_content"] = "\n".join(texts)
        elif isinstance(item, CallItem):
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            self._of_answer().setdefault("tool_calls", []).append(call)
        elif isinstance(item, CallOutputItem):
            self._say("tool", text_of(item.output), tool_call_id=item.call_id)
        elif item.role == "assistant":
            self._begin("content", "tool_calls")
            self._of_answer()["content"] = text_of(item.content)
        else:
            role = "system" if item.role == "developer" else item.role
            self._say(role, text_of(item.content))

    def system(self, text: str) -> None:
        """Add instructions."""
        self._say("system", text)

    def _say(self, role: str, content: str, **more: Any) -> None:
        self._answer = None
        last = self.messages[-1] if self.messages else None
        if role == "system" and len(self.messages) == 1 and last and last["role"] == "system":
            last["content"] += f"\n\n{content}"  # templates know one
        else:
            self.messages.append({"role": role, "content": content, **more})

    def _begin(self, *names: str) -> None:
        """Begin another message where the open one has any of these fields."""
        if self._answer is not None and any(self._answer.get(name) for name in names):
            self._answer = None

    def _of_answer(self) -> dict[str, Any]:
        if self._answer is None:
            self._answer = {"role": "assistant", "content": ""}
            self.messages.append(self._answer)
        return self._answer
