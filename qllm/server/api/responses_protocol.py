"""The body of `/v1/responses`, its conversion to a chat, and the response before its output."""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import (
    Field,
    PrivateAttr,
    TypeAdapter,
    ValidationInfo,
    field_validator,
    model_validator,
)

from qllm.server.api.protocol import (
    MAX_LOGPROBS,
    ChatRequest,
    ServiceTier,
    Targets,
    TextOr,
    class_of,
)
from qllm.server.api.response_items import Chat, InputItem
from qllm.server.http.errors import ApiError, parse
from qllm.server.http.fields import Asked, Body, Items, Open, Seed, Texts
from qllm.server.tools.response_tools import Callee, CustomTool, Names, Tool, ToolChoice, callees
from qllm.types import Priority

ENDPOINT = "/v1/responses"
LOGPROBS = "message.output_text.logprobs"
"""The only value of `include` that has an effect. Reasoning is always in clear text, and the other
values concern items that this server never makes."""

_ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])


class TextFormat(Body):
    """The format of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> "TextFormat":
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("schema must be given with type='json_schema', and only with it")
        return self

    def chat(self) -> dict[str, Any]:
        """Return the format in a chat's shape."""
        if self.schema_ is None:
            return {"type": self.type}
        named = {"name": self.name, "schema": self.schema_, "strict": self.strict}
        return {"type": self.type, "json_schema": named}


class Text(Open):
    """The settings of the answer's text."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None

    def unserved(self) -> Iterator[tuple[str, str]]:
        """Yield the verbosity, which has no effect, and what to do about it."""
        if self.verbosity not in (None, "medium"):
            yield "verbosity", f"verbosity={self.verbosity!r} is not served; leave it out"


class Reasoning(Open):
    """The settings of reasoning."""

    effort: str | None = None
    """Variable of the chat template; "none" also turns thinking off if the template can."""
    max_tokens: int | None = Field(None, ge=0)
    """Most tokens of reasoning (OpenRouter's name)."""
    summary: str | None = None
    """Field without effect: reasoning is shown unchanged."""
    generate_summary: str | None = None


class ResponseStreamOptions(Open):
    """The settings of a stream."""

    include_obfuscation: bool | None = None
    """Field without effect: nothing is padded here."""


class ResponsesRequest(Asked):
    """The body of `POST /v1/responses`."""

    packs = ("input",)

    model: str | None = None
    input: TextOr[InputItem]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    """True to store the response; by default it is stored if there is a state folder."""
    background: bool | None = False
    stream: bool | None = False
    stream_options: ResponseStreamOptions | None = None
    tools: Items[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: Text | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    include: Items[str] | None = None
    service_tier: ServiceTier | None = None
    """Class of the request: "flex" is BE, the others are LS."""
    truncation: Literal["auto", "disabled"] | None = None

    max_tool_calls: int | None = None
    metadata: Texts | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    moderation: Any = None

    seed: Seed = None
    """Seed (vLLM, as are the following fields); see chat completions."""
    stop: str | Items[str] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0)
    thinking_token_budget: int | None = Field(None, ge=0)
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = Field(None, max_length=256)
    priority: int | None = None
    slo: Targets | None = None

    _callees: dict[str, Callee] = PrivateAttr(default_factory=dict)

    @field_validator("tools")
    @classmethod
    def _are_distinct(cls, value: list[Tool] | None) -> list[Tool] | None:
        callees(value or ())
        return value

    @field_validator("tool_choice")
    @classmethod
    def _can_be_forced(cls, value: ToolChoice | None, info: ValidationInfo) -> ToolChoice | None:
        known = callees(info.data.get("tools") or ())
        for name in Names(known).forced(value):
            if name in known and isinstance(tool := known[name].tool, CustomTool):
                tool.force()
        return value

    @model_validator(mode="after")
    def _know_tools(self) -> "ResponsesRequest":
        self._callees = callees(self.tools or ())
        return self

    @property
    def callees(self) -> Mapping[str, Callee]:
        """The tools that may be called, by the name that the model sees."""
        return self._callees

    def unserved(self) -> Iterator[tuple[str, str]]:
        """Yield the setting that has no effect, and what to do about it."""
        if self.truncation == "auto":
            yield "truncation", "truncation='auto' is not served: a prompt is never cut"

    @model_validator(mode="after")
    def _can_wait(self) -> "ResponsesRequest":
        if self.background and self.store is False:
            raise ValueError("background needs store: the response is asked for later")
        return self

    def kept(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return the stored parts of the body: its fields, and its input items."""
        return self.model_dump(by_alias=True, exclude_unset=True), self.items()

    def items(self) -> list[dict[str, Any]]:
        """Return the body's own input items, each with an id, for storage."""
        if isinstance(self.input, str):
            parts = [{"type": "input_text", "text": self.input}]
            given: list[dict[str, Any]] = [{"type": "message", "role": "user", "content": parts}]
        else:
            given = [item.model_dump(by_alias=True, exclude_none=True) for item in self.input]
        return [{"id": f"msg_{secrets.token_hex(12)}", **item} for item in given]

    def chat(self, before: Sequence[Mapping[str, Any]] = ()) -> ChatRequest:
        """Return the body as a chat.

        Args:
            before: Items of the conversation that it continues.

        Raises:
            ApiError: A value is wrong.
        """
        made = Chat(Names(self.callees))
        if self.instructions is not None:
            made.system(self.instructions)
        for item in (*_ITEMS.validate_python(list(before)), *self._input()):
            made.add(item)
        if not made.messages:
            raise ApiError(400, "input is empty; give an item or more", param="input")
        names = (
            "model", "temperature", "top_p", "service_tier", "parallel_tool_calls", "seed",
            "stop", "top_k", "min_p", "repetition_penalty", "frequency_penalty",
            "presence_penalty", "thinking_token_budget", "chat_template_kwargs", "cache_salt",
            "priority", "ignore_eos", "min_tokens",
        )  # fmt: skip
        body = {name: getattr(self, name) for name in names}
        body |= {"messages": made.messages, "max_tokens": self.max_output_tokens}
        if self.slo is not None:
            body["slo"] = self.slo.model_dump()
        if self.reasoning is not None:
            body["reasoning_effort"] = self.reasoning.effort
            if self.reasoning.max_tokens is not None:
                body["thinking_token_budget"] = self.reasoning.max_tokens
        if self.text is not None and self.text.format is not None:
            body["response_format"] = self.text.format.chat()
        if self.shows_logprobs:
            body |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        found: ChatRequest = parse(ChatRequest, {**body, **self._choice()})
        return found

    def _input(self) -> list[InputItem]:
        if isinstance(self.input, str):
            return _ITEMS.validate_python([{"role": "user", "content": self.input}])
        return self.input or []

    def _choice(self) -> dict[str, Any]:
        """Return the tools and the choice among them in a chat's shape."""
        return {
            "tools": [callee.chat(name) for name, callee in self.callees.items()] or None,
            "tool_choice": Names(self.callees).choice(self.tool_choice),
        }

    @property
    def shows_logprobs(self) -> bool:
        """True if log-probabilities of the text are requested."""
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    def asked_class(self) -> Priority | None:
        """Return the requested class; None if the body names none."""
        if self.background:
            return Priority.BE
        return class_of(self.service_tier, self.priority)

    def response(self, response_id: str, created_at: int, model: str) -> dict[str, Any]:
        """Return the response before it has any output."""
        choice = self.tool_choice
        text = self.text or Text()
        form = {"type": "text"}
        if text.format is not None:
            form = text.format.model_dump(by_alias=True, exclude_none=True)
        reasoning = self.reasoning or Reasoning(max_tokens=None)
        unset = {
            "temperature": 1.0,
            "top_p": 1.0,
            "parallel_tool_calls": True,
        }
        same = (
            "instructions", "previous_response_id", "max_output_tokens", "max_tool_calls",
            "temperature", "top_p", "parallel_tool_calls", "user", "prompt_cache_key",
            "safety_identifier",
        )  # fmt: skip
        shown = {name: getattr(self, name) for name in same}
        return {
            "id": response_id,
            "object": "response",
            "created_at": created_at,
            "completed_at": None,
            "status": "in_progress",
            "background": bool(self.background),
            "error": None,
            "incomplete_details": None,
            "model": model,
            "output": [],
            **{name: unset.get(name) if value is None else value for name, value in shown.items()},
            "truncation": "disabled",
            "metadata": self.metadata or {},
            "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
            "service_tier": self.service_tier or "default",
            "store": True,
            "text": {"format": form, "verbosity": text.verbosity or "medium"},
            "tool_choice": choice.model_dump() if isinstance(choice, Body) else choice or "auto",
            "tools": [tool.model_dump() for tool in self.tools or ()],
            "top_logprobs": self.top_logprobs or 0,
            "usage": None,
        }


class InputTokensRequest(ResponsesRequest):
    """The body of `POST /v1/responses/input_tokens`: it is counted, not answered."""

    input: TextOr[InputItem] | None = None  # type: ignore[assignment]
