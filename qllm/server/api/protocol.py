"""The bodies of completions and chats. `http.foreign` has the fields that are not listed here."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from qllm.errors import brief
from qllm.grammar_schema import closed
from qllm.server.http.errors import ApiError
from qllm.server.http.fields import Asked, Body, Items, Numbers, Open, Seed
from qllm.server.http.headers import name_of
from qllm.server.requests.ask import TO_FIT, MakeForm
from qllm.server.requests.texts import keywords_of
from qllm.server.tools.forced import form_of_calls
from qllm.server.tools.tool_choice import Choice, allowed_of, choice_of, shown
from qllm.types import MAX_TIME_MS, MAX_TIME_S, MOST_DRAFTS, Priority, Slo, StructuredOutputs

MAX_LOGPROBS = 20

ServiceTier = Literal["auto", "default", "priority", "flex", "fast", "ultrafast", "scale"]
"""OpenAI's names of classes. "flex" is BE, "auto" names none, all others are LS."""
Tier = ServiceTier | Literal["standard_only"]
"""OpenAI's and Anthropic's names."""

_Item = TypeVar("_Item")
TextOr = Annotated[
    Annotated[str, Tag("text")] | Annotated[Items[_Item], Tag("list")],
    Discriminator(lambda value: "text" if isinstance(value, str) else "list"),
]
"""Text, or a list. For a wrong item the error names the item, not the list."""


class StreamOptions(Open):
    """Extra content of a stream."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    """Usage in every chunk (vLLM)."""
    include_obfuscation: bool | None = None
    """Field without effect: nothing is padded here."""


def _kept_tokens(value: int) -> int:
    if value < 1 and value != TO_FIT:
        raise ValueError(f"must be at least 1, or {TO_FIT} for as many as leave room to answer")
    return value


class Targets(Open):
    """Latency targets of one request."""

    ttft_ms: float | None = Field(None, gt=0, le=MAX_TIME_MS, allow_inf_nan=False)
    tpot_ms: float | None = Field(None, gt=0, le=MAX_TIME_MS, allow_inf_nan=False)

    def slo(self) -> Slo:
        """Return the targets in the engine's type."""
        return Slo(self.ttft_ms, self.tpot_ms)


class NamedSchema(Body):
    """A JSON schema with OpenAI's fields; the answer always conforms to it."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The field `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema must be given with type='json_schema', and only with it")
        if self.json_schema is not None and self.json_schema.schema_ is None:
            raise ValueError("json_schema.schema is missing")
        return self

    def form(self) -> dict[str, Any] | None:
        """Return keywords of StructuredOutputs; None for text."""
        if self.json_schema is not None:
            schema = self.json_schema.schema_
            return {"json": closed(schema) if self.json_schema.strict else schema}
        return {"json": {"type": "object"}} if self.type == "json_object" else None


class PredictedText(Open):
    """A part of a prediction."""

    type: Literal["text"] = "text"
    text: str


class Prediction(Open):
    """The field `prediction` of OpenAI: text that the answer may repeat in part."""

    type: Literal["content"] = "content"
    content: str | Items[PredictedText]

    def text(self) -> str:
        """Return the whole text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class Structured(Body):
    """The field `structured_outputs` (vLLM)."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = None

    def form(self) -> dict[str, Any]:
        """Return keywords of StructuredOutputs."""
        found: dict[str, Any] = {"json": self.json_, "regex": self.regex}
        found |= {"choice": self.choice, "grammar": self.grammar}
        found = {name: value for name, value in found.items() if value is not None}
        if self.json_object:
            if found:
                raise ApiError(
                    400,
                    "structured_outputs: give json_object or another",
                    param="structured_outputs",
                )
            return {"json": {"type": "object"}}
        return found


class Generation(Asked):
    """The fields that completions and chats share."""

    may_be_lossy = True

    @model_validator(mode="before")
    @classmethod
    def _is_there(cls, data: Any) -> Any:
        """Fill in a blank prompt if `prompt_id` names one that came in pieces."""
        if not isinstance(data, dict) or data.get("prompt_id") is None:
            return data
        name, blank = cls._blank_prompt()
        if name in data:
            raise ValueError(f"prompt_id names the prompt; leave {name} out")
        return {**data, name: blank}

    @classmethod
    def _blank_prompt(cls) -> tuple[str, Any]:
        """Return the field of the prompt, and its blank value for one that came in pieces."""
        raise NotImplementedError

    model: str | None = None
    n: int = Field(1, ge=1, le=128)
    seed: Seed = None
    """Seed. -1 is none, as in vLLM; other negative ones are valid seeds, as in OpenAI's API."""
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    stop: str | Items[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Numbers | None = None
    service_tier: ServiceTier | None = None
    """Class of the request: "flex" is BE, the others are LS."""

    top_k: int | None = None
    """Number of most likely tokens to choose from; 0 and -1 allow all (vLLM)."""
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: Items[int] | None = None
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0)
    """Least number of tokens in the answer; nothing ends it earlier (vLLM)."""
    thinking_token_budget: int | None = Field(None, ge=0)
    """Most tokens of reasoning (vLLM)."""
    prediction: Prediction | None = None
    """Text that the answer may repeat in part. It changes no token, and may make the answer
    faster."""
    draft_tokens: int | None = Field(None, ge=0, le=MOST_DRAFTS)
    """Most drafted tokens that a step verifies for this request (qllm)."""
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: Annotated[int, AfterValidator(_kept_tokens)] | None = None
    """Number of last tokens of the prompt to keep; -1 leaves room for the answer (vLLM)."""
    return_token_ids: bool | None = False
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    """Number of alternatives per token of the prompt (vLLM). Not in a stream."""
    request_id: Annotated[str, AfterValidator(name_of)] | None = Field(None, max_length=256)
    """Last part of the answer's id (vLLM). ASCII without spaces, for a header and the log."""
    bad_words: Items[str] | None = None
    allowed_token_ids: Items[int] | None = None
    priority: int | None = None
    """Class of the request: 0 or less is LS, more is BE (vLLM)."""
    cache_salt: str | None = Field(None, max_length=256)
    """Salt of the cached KV: only requests of one salt and one API key share it (vLLM)."""
    cache_ttl_s: float | None = Field(None, gt=0, le=MAX_TIME_S, allow_inf_nan=False)
    """Seconds for which this request's cached KV is not displaced, for later turns (qllm)."""
    slo: Targets | None = None
    """Latency targets (qllm); by default the engine's `ls_slo`."""

    response_format: ResponseFormat | None = None
    structured_outputs: Structured | None = None
    """Constraint of the answer (vLLM). The following four are its older names."""
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Items[str] | None = None
    guided_grammar: str | None = None

    metadata: dict[str, Any] | None = None
    prompt_id: str | None = None
    """Id of a streaming prompt from `/v1/prompts`, which is now whole (qllm)."""
    user: str | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    moderation: Any = None

    @model_validator(mode="after")
    def _prompt_not_streamed(self) -> "Generation":
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs is not streamed; use stream=false, or echo")
        return self

    @model_validator(mode="after")
    def _one_class(self) -> "Generation":
        one_class(self.service_tier, self.priority)
        return self

    def most_tokens(self) -> int | None:
        """Return the most tokens of the answer; None leaves it to the engine."""
        raise NotImplementedError

    def sampling(self) -> dict[str, Any]:
        """Return the keywords of SamplingParams that the request sets.

        Raises:
            ApiError: A value is wrong.
        """
        names = (
            "seed", "temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty",
            "repetition_penalty", "stop_token_ids", "top_k", "stop", "min_tokens", "bad_words",
            "allowed_token_ids", "include_stop_str_in_output", "thinking_token_budget",
            "prompt_logprobs", "draft_tokens",
        )  # fmt: skip
        given = {name: getattr(self, name) for name in names}
        found = {name: value for name, value in given.items() if value is not None}
        if found.get("top_k") == -1:
            found["top_k"] = 0
        if self.seed == -1:
            del found["seed"]
        elif self.seed is not None and -(2**63) <= self.seed < 0:
            found["seed"] = self.seed % 2**63
        if self.prediction is not None:
            found["prediction"] = self.prediction.text()
        if self.logit_bias:
            found["logit_bias"] = _bias(self.logit_bias)
        if (form := self.form()) is not None:
            found["structured_outputs"] = form
        return {**found, "ignore_eos": self.ignore_eos}

    def form(self) -> StructuredOutputs | None:
        """Return the constraint of the answer; None for none.

        Raises:
            ApiError: Two are given.
        """
        asked: dict[str, dict[str, Any]] = {}
        if self.response_format is not None and (form := self.response_format.form()) is not None:
            asked["response_format"] = form
        if self.structured_outputs is not None:
            asked["structured_outputs"] = self.structured_outputs.form()
        for kind in ("json", "regex", "choice", "grammar"):
            if (value := getattr(self, f"guided_{kind}")) is not None:
                asked[f"guided_{kind}"] = {kind: value}
        if len(asked) > 1:
            names = list(asked)
            text = f"{names[0]} and {names[1]} are both given; give one of them"
            raise ApiError(400, text, param=names[1])
        return StructuredOutputs(**next(iter(asked.values()))) if asked else None

    def asked_class(self) -> Priority | None:
        """Return the requested class; None if the body names none."""
        return class_of(self.service_tier, self.priority)


def class_of(tier: Tier | None, priority: int | None) -> Priority | None:
    """Return the class that a body names in one of two fields; None if it names none."""
    if priority is not None:
        return Priority.LS if priority <= 0 else Priority.BE
    if tier in (None, "auto", "standard_only"):
        return None
    return Priority.BE if tier == "flex" else Priority.LS


def one_class(tier: Tier | None, priority: int | None) -> None:
    """Check that two fields do not name different classes.

    Raises:
        ValueError: They do.
    """
    named = {class_of(tier, None), class_of(None, priority)} - {None}
    if len(named) > 1:
        raise ValueError(
            f"service_tier={tier!r} and priority={priority} name different classes; give one of "
            "them"
        )


def _bias(bias: dict[str, float]) -> dict[int, float]:
    wrong = [key for key in bias if not (key.isascii() and key.isdigit() and len(key) < 12)]
    if wrong:
        raise ApiError(
            400, f"logit_bias key {wrong[0]!r:.40} must be a token id", param="logit_bias"
        )
    return {int(key): value for key, value in bias.items()}


def _is_left_out(tool: Mapping[str, Any]) -> bool:
    """Return True if a server would have to run the tool."""
    kind = tool.get("type", "function")
    return isinstance(kind, str) and kind not in ("function", "custom") and "function" not in tool


class CompletionRequest(Generation):
    """The body of `POST /v1/completions`."""

    ids = ("prompt",)

    prompt: str | Items[str] | Items[int] | Items[Items[int]]
    add_special_tokens: bool = True
    """True to add the special tokens around each text, such as BOS (vLLM)."""
    skip_special_tokens: bool = True
    """True to leave special tokens out of the answer's text (vLLM)."""
    max_tokens: int | None = Field(16, ge=0)
    """Most tokens of the answer; 0 only with echo."""
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    """Number of alternatives per token."""
    echo: bool | None = False
    """True to begin the answer with the prompt, and its log-probabilities if requested."""
    best_of: int | None = None

    def unserved(self) -> Iterator[tuple[str, str]]:
        """Yield the number of candidates, if more are asked for than are returned."""
        if self.best_of not in (None, self.n):
            text = f"best_of={self.best_of} is not served; it must equal n={self.n}"
            yield "best_of", text

    @model_validator(mode="after")
    def _answers_something(self) -> "CompletionRequest":
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens=0 needs echo=true; ask for at least one token without it")
        return self

    @classmethod
    def _blank_prompt(cls) -> tuple[str, Any]:
        return "prompt", ""

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts as a list."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise ApiError(400, "prompt is an empty list; give one prompt or more", param="prompt")
        if isinstance(prompt[0], int):
            return [prompt]
        return list(prompt)

    def sampling(self) -> dict[str, Any]:
        found = {**super().sampling(), "logprobs": self.logprobs}
        found["skip_special_tokens"] = self.skip_special_tokens
        if self.echo and self.logprobs is not None:
            if self.prompt_logprobs not in (None, self.logprobs):
                text = "with echo, prompt_logprobs must equal logprobs; give one of them"
                raise ApiError(400, text, param="prompt_logprobs")
            found["prompt_logprobs"] = self.logprobs
        return found

    def most_tokens(self) -> int:
        """Return the most tokens of the answer."""
        return 16 if self.max_tokens is None else self.max_tokens


class ChatRequest(Generation):
    """The body of `POST /v1/chat/completions`."""

    packs = ("messages",)

    messages: Items[dict[str, Any]] = Field(min_length=1)
    add_special_tokens: bool = False
    """True to add special tokens around the rendered chat template (vLLM)."""
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    """Newer name of max_tokens."""
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: Items[dict[str, Any]] | None = None
    """Functions that may be called; the chat template gets them."""
    tool_choice: str | dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """True to continue the last message (vLLM). Needs add_generation_prompt=false."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the chat template (vLLM)."""
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None

    @property
    def callable_tools(self) -> list[dict[str, Any]] | None:
        """The tools, without those that a server would have to run."""
        return None if self.tools is None else [x for x in self.tools if not _is_left_out(x)]

    def unserved(self) -> Iterator[tuple[str, str]]:
        for tool in self.tools or ():
            if _is_left_out(tool):
                kind = tool["type"]
                yield f"tools.{kind}", f"tools of type {brief(kind)} are not run here; leave it out"

    @model_validator(mode="after")
    def _logprobs_together(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message needs add_generation_prompt=false")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise ValueError(
                f"max_tokens={both[0]} and max_completion_tokens={both[1]} differ; give one"
            )
        return self

    @classmethod
    def _blank_prompt(cls) -> tuple[str, Any]:
        return "messages", [{"role": "user", "content": ""}]

    def num_logprobs(self) -> int | None:
        """Return the number of alternatives per token; None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def most_tokens(self) -> int | None:
        """Return the most tokens of the answer; None leaves it to the engine."""
        return self.max_completion_tokens or self.max_tokens

    def choice(self) -> Choice:
        """Return the tools that may be called.

        Raises:
            ApiError: The tools, or the choice, are wrong.
        """
        tools, asked = allowed_of(self.callable_tools, self.tool_choice)
        return choice_of(tools, asked, self.parallel_tool_calls)

    def calls_form(self, tool_calls: str) -> MakeForm | None:
        """Return the constraint if it depends on how the model writes calls; else None.

        It is calls if they are forced, and calls or the schema if the answer may be either.

        Args:
            tool_calls: Name of the format of the model's answers, or `auto`.

        Raises:
            ApiError: The tools, or the choice, are wrong, or another form is asked for, too.
        """
        asked, choice = self.form(), self.choice()
        if choice.forced and asked is not None:
            text = "tool_choice forces a call, so the answer can have no other form; give one"
            raise ApiError(400, text, param="tool_choice")
        if choice.forced:
            return partial(form_of_calls, choice, None, tool_calls)
        if choice.tools and asked is not None and isinstance(asked.json, Mapping):
            return partial(form_of_calls, choice, asked.json, tool_calls)
        return None

    def template_options(self) -> dict[str, Any]:
        """Return the variables of the chat template, and its options."""
        tools, asked = allowed_of(self.callable_tools, self.tool_choice)
        tools = None if asked == "none" else tools
        given = {**(self.chat_template_kwargs or {}), **({"tools": shown(tools)} if tools else {})}
        if self.reasoning_effort is not None:
            given.setdefault("reasoning_effort", self.reasoning_effort)
            if self.reasoning_effort == "none":
                given.setdefault("enable_thinking", False)
        if not self.add_generation_prompt:
            given["add_generation_prompt"] = False
        if self.continue_final_message:
            given["continue_final_message"] = True
        return given


class Templated(Body):
    """The body with a prompt, or with messages and options of the chat template."""

    of_chats: ClassVar[tuple[str, ...]] = ("tools", "chat_template_kwargs", "reasoning_effort")
    """Fields that are only allowed with messages."""

    model: str | None = None
    prompt: Any = None
    messages: Items[dict[str, Any]] | None = Field(None, min_length=1)
    tools: Items[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.prompt is not None and self.messages is not None:
            raise ValueError("give either prompt or messages")
        given = [name for name in self.of_chats if name in self.model_fields_set]
        if self.messages is None and any(getattr(self, name) is not None for name in given):
            names = f"{', '.join(self.of_chats[:-1])} and {self.of_chats[-1]}"
            raise ValueError(f"{names} go with messages")
        return self

    def template(self) -> dict[str, Any]:
        """Return the keywords of `render_chat`."""
        if self.messages is None:
            return {}
        given = {name: getattr(self, name) for name in self.of_chats}
        return keywords_of(ChatRequest(messages=[{}], **given).template_options())
