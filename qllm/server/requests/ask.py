"""A route's request to the engine, and the class that the request is served with."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from qllm.errors import InvalidRequestError
from qllm.frontend.detokenizer import MakeReading
from qllm.frontend.handle import Handle
from qllm.server.http.fields import Packed
from qllm.types import Priority, SamplingParams, Slo, StructuredOutputs

MakeForm = Callable[[Any], StructuredOutputs]
"""Function that makes the grammar of an answer from the model's tokenizer."""
SHORT = 2048
"""Limit in characters or ids. A text below this limit is short."""
EACH = 32
"""Characters that are added for each prompt or message."""
TO_FIT = -1
"""Value of `truncate_prompt_tokens` that shortens the prompt just enough for the answer."""
_SLOW = frozenset({"structured_outputs", "bad_words"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """The engine request that one HTTP request or batch line makes."""

    answer_id: str
    prompts: Sequence[str | list[int]] = ()
    messages: Sequence[Mapping[str, Any]] | Packed | None = None
    """A chat, instead of prompts."""
    template: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template, `tools` among them."""
    reading: MakeReading | None = None
    """Factory of the parser for the tags in the answers to a chat."""
    n: int = 1
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of SamplingParams. The model's own defaults fill the rest."""
    form: MakeForm | None = None
    """Factory of the grammar of an answer that may call tools. It replaces a grammar in `sampling`.
    """
    max_tokens: int | None = None
    """Most tokens of the answer. For 0 the engine makes one token that the answer hides."""
    slo: Slo | None = None
    timeout_s: float | None = None
    silence_timeout_s: float | None = None
    """Longest time without a token, in seconds. Then the answer ends with an error."""
    special: bool | None = None
    """True to add the special tokens around each text; None adds special tokens only to prompts."""
    truncate: int | None = None
    """Number of last tokens to keep of each prompt. `TO_FIT` leaves room for the answer."""
    cache_salt: str = ""
    """Salt of the cached KV. Only requests with the same salt and the same owner share KV."""
    cache_owner: str = ""
    cache_ttl_s: float | None = None
    """Seconds that the request's KV stays cached for later turns."""
    caller: str = ""
    """Caller that may see and change the open request; empty for none."""
    other_id: str | None = None
    """Second id of the request, next to `answer_id`, that the caller may use."""
    opened: Any = None
    """A streaming prompt (`prompts.store`), instead of prompts. Its class is already known."""
    lossy: "LossyAnswers | None" = None
    """Owner of the request's answer if it may lose; None computes it exactly."""
    replay: bool = True
    """True to resubmit the request to a new engine after a failure of the engine."""
    num_bytes: int = 0
    """Bytes of the body and of the earlier conversation; 0 if both are short."""

    @property
    def num_choices(self) -> int:
        """Number of answers: prompts times `n`."""
        return max(1, len(self.prompts)) * self.n

    @property
    def names(self) -> frozenset[str | None]:
        """Ids by which the caller may refer to the request."""
        own = self.answer_id.partition("-")[2]
        return frozenset({self.answer_id, own, self.other_id} - {""})

    @property
    def size(self) -> float:
        """Amount of text work: characters or ids, plus `EACH` for each prompt or message.

        The size is infinite for work that takes long: a long body, template variables, a grammar or
        `bad_words`. A streaming prompt counts with all its text, because it is tokenised when it is
        sent.
        """
        if self.num_bytes or self.template or not _SLOW.isdisjoint(self.sampling):
            return math.inf
        if self.opened is not None:
            return float(self.opened.num_bytes)
        chat: Any = self.messages
        texts = self.prompts if chat is None else [m.get("content") for m in chat]
        return self.n * sum(EACH + len(x) if isinstance(x, str | list) else math.inf for x in texts)

    @property
    def is_short(self) -> bool:
        """True if tokenising the text takes no longer than passing the text to a thread."""
        return self.size < SHORT

    def ttl_s(self, priority: Priority, tool_ttl_s: float) -> float | None:
        """Return the seconds that the request's KV stays cached; None if unspecified.

        Args:
            priority: Class of the request.
            tool_ttl_s: Seconds for an LS conversation with tools, until a tool's result arrives.
        """
        has_tools = priority is Priority.LS and bool(self.template.get("tools"))
        return self.cache_ttl_s or (tool_ttl_s if has_tools else 0) or None


class LossyAnswers(Protocol):
    """Interface of the owner of lossy answers. `requests.lossy` implements it."""

    @property
    def longest(self) -> int:
        """Most tokens of a prompt and an answer."""
        ...

    def pick(self, max_tokens: int) -> Any:
        """Return the front of the candidate that gets a request now."""
        ...

    def check(self, params: SamplingParams, ask: "Ask") -> None:
        """Refuse a request whose answer no audit could judge."""
        ...

    def lines(self) -> list[str]:
        """Return the lines for the log at start."""
        ...

    def told(self) -> dict[str, Any]:
        """Return the standing of each candidate by name, for the live page."""
        ...

    def begin(self, handle: Handle, ask: "Ask", front: Any) -> None:
        """Follow an answer that was submitted just now."""
        ...


class Sends(Protocol):
    """Interface of the store of streaming prompts. `prompts.store` implements it."""

    def sending(
        self, front: Any, caller: str, name: str, *, is_chat: bool
    ) -> AbstractContextManager[Any]:
        """Take a prompt in order to send it. The prompt stays open if sending is refused."""
        ...


@dataclass(frozen=True, slots=True)
class Served:
    """The class that a request was given."""

    priority: Priority
    demoted: bool = False

    @property
    def tier(self) -> str:
        """OpenAI's name for the class."""
        return "flex" if self.priority == Priority.BE else "default"

    def headers(self) -> dict[str, str]:
        """Return the headers that report the class."""
        found = {"x-qllm-priority": self.priority.name}
        return {**found, "x-qllm-demoted": "1"} if self.demoted else found


def check_alone(body: Any) -> None:
    """Refuse fields that cannot apply to a streaming prompt.

    Raises:
        InvalidRequestError: A field has another value than its default.
    """
    known = type(body).model_fields
    for name in ("n", "truncate_prompt_tokens", "echo", "add_special_tokens"):
        if name in known and (value := getattr(body, name)) != known[name].default:
            raise InvalidRequestError(
                f"{name}={value!r:.40} cannot be asked of a prompt that comes in pieces; leave it "
                "out"
            )
