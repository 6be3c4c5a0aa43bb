"""The bodies of `/v1/messages` in Anthropic's shape, and their conversion to a chat."""

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from qllm.grammar_schema import closed
from qllm.server.api.protocol import ChatRequest, TextOr, Tier, class_of, one_class
from qllm.server.http.errors import ApiError, parse
from qllm.server.http.fields import Asked, Body, Items, LeftOut, Open, SentBack, kind_of
from qllm.types import Priority

CacheControl = dict[str, Any] | None
"""Field without effect: the prefix cache always caches as much as it can."""


class TextPart(SentBack):
    """Text of any role."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl = None
    citations: Any = None

    @field_validator("citations")
    @classmethod
    def _no_citations(cls, value: Any) -> Any:
        if value:
            raise ValueError("citations are not supported; leave them out")
        return value


class ThinkingPart(SentBack):
    """Reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class ToolUsePart(SentBack):
    """A call in an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl = None
    caller: Any = None


class ToolReferencePart(SentBack):
    """The name of a tool that a search for tools found; the model sees all tools anyway."""

    type: Literal["tool_reference"]
    tool_name: str

    @property
    def text(self) -> str:
        """The tool's name, for the model."""
        return self.tool_name


class DocumentSource(Open):
    """The content of a document."""

    type: Literal["text", "content"]
    data: str = ""
    content: TextOr[TextPart] = ""


class DocumentPart(SentBack):
    """A document that is text."""

    type: Literal["document"]
    source: DocumentSource
    title: str | None = None
    context: str | None = None
    cache_control: CacheControl = None

    @property
    def text(self) -> str:
        """The document's text, for the model."""
        source = self.source
        said = source.data if source.type == "text" else _text(source.content)
        return "\n".join(filter(None, (self.title, self.context, said)))


class SearchResultPart(SentBack):
    """A passage that the client found."""

    type: Literal["search_result"]
    source: str
    title: str
    content: Items[TextPart]
    cache_control: CacheControl = None

    @property
    def text(self) -> str:
        """The passage with its title and source, for the model."""
        return "\n".join((self.title, self.source, _text(self.content)))


class CompactionPart(SentBack):
    """The summary of an earlier part of the conversation."""

    type: Literal["compaction"]
    content: str | None = None
    cache_control: CacheControl = None

    @property
    def text(self) -> str:
        """The summary, for the model."""
        return self.content or ""


Readable = TextPart | ToolReferencePart | DocumentPart | SearchResultPart | CompactionPart
Texts = TextOr[Annotated[Readable, Field(discriminator="type")]]


class ToolResultPart(SentBack):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = None
    is_error: bool | None = None
    cache_control: CacheControl = None

    @property
    def text(self) -> str:
        """The result's text, for the model."""
        return _text(self.content or "")


class SkippedPart(SentBack):
    """A block that only Anthropic's servers can use."""

    model_config = ConfigDict(extra="ignore")
    type: Literal[
        "redacted_thinking", "tool_addition", "tool_removal", "mcp_tool_listing", "fallback"
    ]

    def unserved(self) -> Iterator[tuple[str, str]]:
        """Yield its type and what to do about it."""
        yield self.type, f"a {self.type} block cannot be read here; leave it out"


class ServerUsePart(ToolUsePart):
    """A call that a server answered by itself."""

    type: str  # type: ignore[assignment]


class ServerResultPart(SentBack):
    """The result of a call that a server answered by itself."""

    type: str
    tool_use_id: str
    content: Any = None
    is_error: bool | None = None
    cache_control: CacheControl = None
    caller: Any = None

    @property
    def text(self) -> str:
        """The result as JSON for the model, without encrypted fields."""
        return json.dumps(_readable(self.content))


def _readable(value: Any) -> Any:
    if isinstance(value, list):
        return [_readable(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {k: _readable(x) for k, x in value.items() if not k.startswith("encrypted")}


def _tag(value: Any) -> Any:
    """Return the tag of the block's model."""
    kind = kind_of(value)
    if not isinstance(kind, str) or kind in ("tool_use", "tool_result"):
        return kind
    if kind in get_args(SkippedPart.model_fields["type"].annotation):
        return "skipped"
    return next((f"...{end}" for end in ("_tool_use", "_tool_result") if kind.endswith(end)), kind)


Part = Annotated[
    Annotated[TextPart, Tag("text")]
    | Annotated[ThinkingPart, Tag("thinking")]
    | Annotated[SkippedPart, Tag("skipped")]
    | Annotated[CompactionPart, Tag("compaction")]
    | Annotated[DocumentPart, Tag("document")]
    | Annotated[SearchResultPart, Tag("search_result")]
    | Annotated[ToolUsePart, Tag("tool_use")]
    | Annotated[ToolResultPart, Tag("tool_result")]
    | Annotated[ServerUsePart, Tag("..._tool_use")]
    | Annotated[ServerResultPart, Tag("..._tool_result")],
    Discriminator(_tag),
]
_OF_ROLES = {
    "user": (TextPart, DocumentPart, SearchResultPart, ToolResultPart, SkippedPart, CompactionPart),
    "assistant": (
        TextPart,
        ThinkingPart,
        ToolUsePart,
        ServerResultPart,
        SkippedPart,
        CompactionPart,
    ),
    "system": (TextPart, SkippedPart),
}
"""Blocks that a message of each role may contain."""


class Message(Open):
    """One turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: TextOr[Part]

    @model_validator(mode="after")
    def _fits_its_role(self) -> "Message":
        parts = [] if isinstance(self.content, str) else self.content
        wrong = next((part for part in parts if not isinstance(part, _OF_ROLES[self.role])), None)
        if wrong is not None:
            raise ValueError(f"a message of role {self.role!r} cannot hold a {wrong.type} block")
        return self

    def chat(self) -> Iterator[dict[str, Any]]:
        """Yield the messages of the chat that it becomes; each tool result is its own message."""
        if isinstance(self.content, str):
            yield {"role": self.role, "content": self.content}
            return
        said: list[Part] = []
        for part in self.content:
            if not isinstance(part, ToolResultPart | ServerResultPart):
                said.append(part)
                continue
            if said:
                yield self._said(said)
                said = []
            yield {"role": "tool", "tool_call_id": part.tool_use_id, "content": part.text}
        if said or not self.content:
            yield self._said(said)

    def _said(self, parts: Sequence[Part]) -> dict[str, Any]:
        """Return one message of a chat, made of blocks."""
        text = "\n".join(part.text for part in parts if isinstance(part, Readable))
        made: dict[str, Any] = {"role": self.role, "content": text}
        if thought := "\n".join(p.thinking for p in parts if isinstance(p, ThinkingPart)):
            made["reasoning_content"] = thought
        calls = [
            {"id": p.id, "type": "function", "function": {"name": p.name, "arguments": p.input}}
            for p in parts
            if isinstance(p, ToolUsePart)
        ]
        return {**made, "tool_calls": calls} if calls else made


def _text(content: str | Sequence[Readable]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


class FunctionTool(Open):
    """A function that may be called."""

    type: Literal["custom"] | None = None
    name: str = Field(min_length=1)
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl = None
    eager_input_streaming: bool | None = None
    input_examples: Items[dict[str, Any]] | None = None

    def chat(self) -> dict[str, Any]:
        """Return the tool in a chat's shape."""
        schema = closed(self.input_schema) if self.strict else self.input_schema
        function = {"name": self.name, "parameters": schema}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function}


Tool = Annotated[
    Annotated[FunctionTool, Tag("function")] | Annotated[LeftOut, Tag("left out")],
    Discriminator(lambda tool: "function" if kind_of(tool) in (None, "custom") else "left out"),
]


class ToolChoice(Open):
    """The choice among the tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _has_name(self) -> "ToolChoice":
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name must be given with type='tool', and only with it")
        return self

    def chat(self) -> Any:
        """Return the choice in a chat's shape."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class ThinkingConfig(Open):
    """The settings of reasoning."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(None, ge=1)
    display: str | None = None

    @model_validator(mode="after")
    def _may_have_budget(self) -> "ThinkingConfig":
        if self.type != "enabled" and self.budget_tokens is not None:
            raise ValueError("budget_tokens goes with type='enabled' alone")
        return self

    def unserved(self) -> Iterator[tuple[str, str]]:
        """Yield each setting that has no effect, and what to do about it."""
        if self.display not in (None, "summarized"):
            text = f"thinking.display={self.display!r:.80} is not served; leave it out"
            yield "display", text
        if self.type == "between_tools":
            yield "type", "thinking.type='between_tools' is not served; use 'adaptive'"


class OutputFormat(Body):
    """The schema of the answer."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Open):
    """The settings of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Conversation(Asked):
    """The fields that a message and a count of its tokens share."""

    packs = ("messages",)

    model: str
    messages: Items[Message] = Field(min_length=1)
    system: TextOr[TextPart] | None = None
    tools: Items[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """Older name of `output_config.format`."""
    cache_control: CacheControl = None

    @model_validator(mode="after")
    def _has_tools(self) -> "Conversation":
        if self.tool_choice and self.tool_choice.type in ("any", "tool") and not self.functions:
            raise ValueError(f"tool_choice.type={self.tool_choice.type!r} needs tools")
        return self

    @property
    def functions(self) -> list[FunctionTool]:
        """The tools that the model sees."""
        return [tool for tool in self.tools or () if isinstance(tool, FunctionTool)]

    def chat(self) -> ChatRequest:
        """Return the conversation as a chat.

        Raises:
            ApiError: A value is wrong.
        """
        messages = [] if self.system is None else [_system(_text(self.system))]
        for message in self.messages:
            for made in message.chat():
                if made["role"] == "system" and len(messages) == 1 and messages[0] != made:
                    made = _merged(messages, made)
                messages.append(made)
        body: dict[str, Any] = {"messages": messages, **self.options()}
        if messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
            body |= {"add_generation_prompt": False, "continue_final_message": True}
        found: ChatRequest = parse(ChatRequest, body)
        return found

    def options(self) -> dict[str, Any]:
        """Return the fields of the chat except its messages."""
        found: dict[str, Any] = {"model": self.model}
        if self.functions:
            found["tools"] = [tool.chat() for tool in self.functions]
        if (choice := self.tool_choice) is not None:
            found["tool_choice"] = choice.chat()
            found["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        if (thinking := self.thinking) is not None:
            found["thinking_token_budget"] = thinking.budget_tokens
            found["chat_template_kwargs"] = {"enable_thinking": thinking.type != "disabled"}
        if (output := self.output_config) is not None:
            found["reasoning_effort"] = output.effort
        form = self.output_format or (output.format if output is not None else None)
        if form is not None:
            named = {"name": "answer", "strict": True, "schema": form.schema_}
            found["response_format"] = {"type": "json_schema", "json_schema": named}
        return found


def _system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def _merged(messages: list[dict[str, Any]], more: dict[str, Any]) -> dict[str, Any]:
    """Return the first two system messages as one: chat templates allow only one."""
    first = messages.pop()
    if first["role"] != "system":
        messages.append(first)
        return more
    return _system(f"{first['content']}\n\n{more['content']}")


class MessagesRequest(Conversation):
    """The body of `POST /v1/messages`."""

    max_tokens: int = Field(ge=1)
    stream: bool | None = False
    stop_sequences: Items[str] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Tier | None = None
    """Class of the request: "flex" is BE, the others are LS."""
    priority: int | None = None
    """Class of the request: 0 or less is LS, more is BE (vLLM)."""

    @model_validator(mode="after")
    def _one_class(self) -> "MessagesRequest":
        one_class(self.service_tier, self.priority)
        return self

    def check_budget(self) -> None:
        """Check that some of the answer is left after the most tokens of reasoning.

        Raises:
            ApiError: 400.
        """
        budget = None if self.thinking is None else self.thinking.budget_tokens
        if budget is not None and budget >= self.max_tokens:
            text = f"thinking.budget_tokens={budget} must be less than max_tokens={self.max_tokens}"
            raise ApiError(400, text, param="thinking.budget_tokens")

    def options(self) -> dict[str, Any]:
        names = ("max_tokens", "temperature", "top_k", "top_p")
        found = {name: getattr(self, name) for name in names}
        return {**super().options(), **found, "stop": self.stop_sequences}

    def asked_class(self) -> Priority | None:
        """Return the requested class; None if the body names none."""
        return class_of(self.service_tier, self.priority)


class CountRequest(MessagesRequest):
    """The body of `POST /v1/messages/count_tokens`: it is counted, not answered."""

    max_tokens: int | None = Field(None, ge=1)  # type: ignore[assignment]


def input_of(arguments: str) -> dict[str, Any] | None:
    """Return a call's arguments as an object; None if they are not one, or not valid JSON."""
    try:
        found = json.loads(arguments or "{}")
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
