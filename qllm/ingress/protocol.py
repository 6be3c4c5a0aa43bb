"""What the engine loop takes, and what it asks of a transport.

Many put, the engine loop takes. A put costs the loop nothing until it looks: a running program
only compares the stop word with its threshold at each boundary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from qllm.runner.protocol import Stop
from qllm.types import FinishReason, RequestId, SamplingParams, Slo

CONTROL = -(2**30)
"""The stop word of a cancellation or a call: smaller than every priority."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A request that passed every check of `submit`."""

    request_id: RequestId
    name: str
    priority: int
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    """With a seed: `submit` draws one where the caller gave none."""
    stop_ids: frozenset[int]
    """Ids that end it: EOS (unless ignored) and `stop_token_ids`."""
    max_tokens: int
    slo: Slo
    arrival_ns: int
    deadline_ns: int | None
    """`timeout_s` as engine time."""
    num_output_tokens: int = 0
    """The last of `token_ids` are output: an engine that is gone had produced them. They count
    towards `max_tokens`."""
    cache_salt: bytes = b""
    """Digests of owner and salt, 16 bytes each, or nothing: whose prefixes it shares."""
    cache_ttl_s: float | None = None
    """How long its kept KV is not displaced after it used it."""
    is_open: bool = False
    """More of its prompt may come, as `Revision`s: it samples nothing before one closes it."""
    wrong: str | None = None
    """Why it must end at once: its record held what no front end of ours writes."""

    @property
    def num_prompt_tokens(self) -> int:
        """The first of `token_ids`."""
        return len(self.token_ids) - self.num_output_tokens


@dataclass(frozen=True, slots=True)
class Revision:
    """The prompt of an open request goes on in another way: more of it, a change, or its end.

    The first of each request names it and its class; how it is sampled, its limits and its targets
    are those of the one that closes it.
    """

    keep: int
    """Tokens, of the first of what it had, that stay."""
    rest: Submission
    """Its `token_ids` come behind those; it says whether more may come. Its arrival is now."""

    @property
    def request_id(self) -> RequestId:
        """Whose prompt it is."""
        return self.rest.request_id

    @property
    def arrival_ns(self) -> int:
        """When it was put."""
        return self.rest.arrival_ns

    def put_at(self, request_id: RequestId, now_ns: int) -> "Revision":
        """The same for a request that is called so now, its times counted from now on."""
        after_ns = self.rest.deadline_ns
        deadline_ns = None if after_ns is None else now_ns + after_ns
        rest = replace(self.rest, request_id=request_id, arrival_ns=now_ns, deadline_ns=deadline_ns)
        return Revision(self.keep, rest)

    @property
    def word(self) -> int:
        """What it lowers the stop word to: while more may come, classes behind its own stop."""
        return self.rest.priority + self.rest.is_open


class Cancel(NamedTuple):
    """The front end no longer wants this request."""

    request_id: RequestId
    reason: FinishReason = FinishReason.CANCELLED
    """STOP where the front end found a stop string, ERROR where its text failed."""


class Update(NamedTuple):
    """The front end wants another class for this request, or pauses it, or lets it go on."""

    request_id: RequestId
    priority: int | None = None
    """Its class from now on; None leaves it."""
    paused: bool | None = None
    """Whether it stops or goes on; None leaves it."""


def _ignore(result: Any, error: BaseException | None) -> None:
    """Nobody waits for the answer."""


class Call(NamedTuple):
    """Run a function on the loop's thread, between two programs."""

    function: Callable[[], Any]
    answer: Callable[[Any, BaseException | None], None] = _ignore


LOOK = Call(lambda: None)
"""Has the loop look at what has changed."""


Item = Submission | Revision | Cancel | Update | Call


class ArrivalWord(Stop, Protocol):
    """The stop word of a transport: what a running program polls, and since when it is down."""

    lowered_ns: int
    """When the word last went down, in engine time."""


class Ingress(Protocol):
    """What the engine loop takes requests from."""

    @property
    def stop(self) -> ArrivalWord:
        """The word that arrivals lower."""
        ...

    def drain(self) -> list[Item]:
        """Take everything that has arrived, in order of arrival within a class."""
        ...

    def wait(self, timeout_ns: int | None) -> None:
        """Sleep until something arrives or the time has passed."""
        ...
