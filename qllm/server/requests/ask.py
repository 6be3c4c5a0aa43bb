"""A route's request to the engine, and the class with which it is served."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from qllm.errors import InvalidRequestError
from qllm.frontend.detokenizer import MakeReading
from qllm.server.http.fields import Packed
from qllm.types import Priority, Slo, StructuredOutputs

MakeForm = Callable[[Any], StructuredOutputs]
"""Function that makes the form of an answer, from the model's tokenizer."""
SHORT = 2048
"""Limit in characters or ids; a text below it is short."""
EACH = 32
"""Extra characters that each prompt or message counts for."""
TO_FIT = -1
"""Value of `truncate_prompt_tokens` that leaves just enough room for the answer."""
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
    """Keywords of SamplingParams; the model's own defaults fill the rest."""
    form: MakeForm | None = None
    """Factory of the form of an answer that may call tools, in the place of one in `sampling`."""
    max_tokens: int | None = None
    """Most tokens of the answer. For 0 the engine makes one token, and the answer hides it."""
    slo: Slo | None = None
    timeout_s: float | None = None
    silence_timeout_s: float | None = None
    """Longest seconds without a token; then the answer ends with an error."""
    special: bool | None = None
    """True to add the special tokens around each text; None adds them to prompts only."""
    truncate: int | None = None
    """Number of last tokens to keep of each prompt; `TO_FIT` keeps as many as leave room."""
    cache_salt: str = ""
    """Salt of the cached KV: only requests of one salt and one owner share it."""
    cache_owner: str = ""
    cache_ttl_s: float | None = None
    """Seconds that its KV stays cached for later turns."""
    caller: str = ""
    """Caller that may see and change it while it is open; empty for none."""
    other_id: str | None = None
    """Another id, in addition to `answer_id`, that the caller uses."""
    opened: Any = None
    """A prompt that came in pieces (`prompts.store`), instead of prompts. It has its class."""
    replay: bool = True
    """True to resubmit it to a new engine when its engine fails."""
    num_bytes: int = 0
    """Bytes of its body and of the conversation before it; 0 if they are short."""

    @property
    def names(self) -> frozenset[str | None]:
        """Ids by which the caller may refer to it."""
        own = self.answer_id.partition("-")[2]
        return frozenset({self.answer_id, own, self.other_id} - {""})

    @property
    def size(self) -> float:
        """Amount of text work: characters or ids, plus some for each prompt or message.

        Infinite for a long body, template variables, a grammar or `bad_words`, which take long. A
        streaming prompt counts as a whole, because it is tokenised when it is sent.
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
        """True if tokenising its text takes no longer than passing it to a thread."""
        return self.size < SHORT

    def ttl_s(self, priority: Priority, tool_ttl_s: float) -> float | None:
        """Return the seconds that its KV stays cached for later turns; None if unspecified.

        Args:
            priority: Class of the request.
            tool_ttl_s: Seconds for an LS conversation with tools, until a tool's result arrives.
        """
        has_tools = priority is Priority.LS and bool(self.template.get("tools"))
        return self.cache_ttl_s or (tool_ttl_s if has_tools else 0) or None


class Sends(Protocol):
    """A store of streaming prompts; implemented in `prompts.store`."""

    def sending(self, caller: str, name: str, *, is_chat: bool) -> AbstractContextManager[Any]:
        """Take a prompt in order to send it; it stays open if sending is refused."""
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
    """Refuse fields that cannot apply to a prompt that came in pieces.

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
