"""What a route asks of the engine, and the class that it is served with."""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from qllm.errors import InvalidRequestError
from qllm.frontend.detokenizer import MakeReading
from qllm.server.http.fields import Packed
from qllm.types import Priority, Slo

SHORT = 2048
"""Characters, or ids, from which on a text is not short."""
EACH = 32
"""Characters that a prompt or message counts for beside its own."""
TO_FIT = -1
"""`truncate_prompt_tokens`: as many as leave room for the answer."""
_SLOW = frozenset({"structured_outputs", "bad_words"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What one HTTP request or batch line wants of the engine."""

    answer_id: str
    prompts: Sequence[str | list[int]] = ()
    messages: Sequence[Mapping[str, Any]] | Packed | None = None
    """A chat, instead of prompts."""
    template: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template, `tools` among them."""
    reading: MakeReading | None = None
    """Makes what knows the tags of the answers to a chat."""
    n: int = 1
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of SamplingParams; the model's own defaults fill the rest."""
    max_tokens: int | None = None
    """0 asks the engine for one token, which is not shown: for what is said of the prompt."""
    slo: Slo | None = None
    timeout_s: float | None = None
    silence_timeout_s: float | None = None
    """Ends it when no token came for so long."""
    special: bool | None = None
    """Whether the tokens are added that stand around every text; None adds them to prompts."""
    truncate: int | None = None
    """Keep so many of the last tokens of each prompt; `TO_FIT` is as many as leave room."""
    cache_salt: str = ""
    """Kept KV is shared between requests of one salt and one owner."""
    cache_owner: str = ""
    cache_ttl_s: float | None = None
    """Keep its KV so long for the turns that follow."""
    caller: str = ""
    """Who may see and change it while it is open; nobody by default."""
    other_id: str | None = None
    """What the caller calls it beside `answer_id`."""
    opened: Any = None
    """A prompt that came in pieces, instead of prompts: `open_prompts.Opened`. It has its class."""
    replay: bool = True
    """Whether it goes on with a new engine when its engine has ended."""
    num_bytes: int = 0
    """How long the body is that it came in, and the conversation before it; 0 if they are short."""

    @property
    def names(self) -> frozenset[str | None]:
        """What its caller may call it."""
        own = self.answer_id.partition("-")[2]
        return frozenset({self.answer_id, own, self.other_id} - {""})

    @property
    def size(self) -> float:
        """How much work its text is: characters, or ids, and some for each prompt or message.

        A form of the answer is built from a schema or words first, which takes its time. A prompt
        that came in pieces is tokenised whole when it is sent.
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
        """Whether making tokens of its text takes about as long as to hand it to a thread."""
        return self.size < SHORT

    def ttl_s(self, priority: Priority, tool_ttl_s: float) -> float | None:
        """How long its KV is kept for the turns that follow; None if nothing says so.

        Args:
            priority: The class that it has.
            tool_ttl_s: For an LS conversation with tools, which a call's result goes on with.
        """
        has_tools = priority is Priority.LS and bool(self.template.get("tools"))
        return self.cache_ttl_s or (tool_ttl_s if has_tools else 0) or None


class Sends(Protocol):
    """Has prompts that came in pieces; `open_prompts.OpenPrompts` does."""

    def sending(self, caller: str, name: str, *, is_chat: bool) -> AbstractContextManager[Any]:
        """Take one to send it; it stays open if that is refused."""
        ...


@dataclass(frozen=True, slots=True)
class Served:
    """The class a request was given."""

    priority: Priority
    demoted: bool = False

    @property
    def tier(self) -> str:
        """OpenAI's word for it."""
        return "flex" if self.priority == Priority.BE else "default"

    def headers(self) -> dict[str, str]:
        """Say it in the answer's header too."""
        found = {"x-qllm-priority": self.priority.name}
        return {**found, "x-qllm-demoted": "1"} if self.demoted else found


def check_alone(body: Any) -> None:
    """Refuse what makes no sense of a prompt that came in pieces.

    Raises:
        InvalidRequestError: Says which field.
    """
    known = type(body).model_fields
    for name in ("n", "truncate_prompt_tokens", "echo", "add_special_tokens"):
        if name in known and (value := getattr(body, name)) != known[name].default:
            raise InvalidRequestError(
                f"{name}={value!r:.40} cannot be asked of a prompt that comes in pieces; leave it "
                "out"
            )
