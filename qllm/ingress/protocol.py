"""Items that the engine loop takes, and the interface of a transport.

Many threads put items, and the engine loop takes them. A put costs the loop no time. At each
boundary a running program only compares the stop word with its threshold.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from qllm.runner.protocol import Stop
from qllm.types import FinishReason, RequestId, SamplingParams, Slo

CONTROL = -(2**30)
"""The stop word of a cancellation or a call, smaller than every priority."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A request that passed every check of `submit`."""

    request_id: RequestId
    name: str
    priority: int
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    """Sampling parameters with a seed. `submit` draws a seed if the caller gave none."""
    stop_ids: frozenset[int]
    """Ids that end the answer: EOS (unless ignored) and `stop_token_ids`."""
    max_tokens: int
    slo: Slo
    arrival_ns: int
    deadline_ns: int | None
    """Engine time at which `timeout_s` has passed."""
    num_output_tokens: int = 0
    """Number of last `token_ids` that an ended engine had produced. These tokens count towards
    `max_tokens`."""
    cache_salt: bytes = b""
    """Digests of owner and salt, 16 bytes each, or nothing. Requests with equal digests share
    prefixes."""
    cache_ttl_s: float | None = None
    """Seconds for which the request's cached KV is not evicted after its last use. 0 caches
    none."""
    is_open: bool = False
    """True while the prompt is streaming. The request samples no token before the last
    `Revision`."""
    wrong: str | None = None
    """The reason to end the request at once: its record held a value that our front ends never
    write."""

    @property
    def num_prompt_tokens(self) -> int:
        """Number of `token_ids` that are the prompt."""
        return len(self.token_ids) - self.num_output_tokens


@dataclass(frozen=True, slots=True)
class Revision:
    """A change of a streaming prompt: more tokens, other tokens, or the prompt's end.

    The first revision of a request has the request's name and class. The last revision has its
    sampling, limits and targets.
    """

    keep: int
    """Number of first tokens of the old prompt that stay."""
    rest: Submission
    """The tokens after these, as `token_ids` of a submission. Its `is_open` is True if the prompt
    is still streaming. Its arrival time is the revision's."""

    @property
    def request_id(self) -> RequestId:
        """Id of the request."""
        return self.rest.request_id

    @property
    def arrival_ns(self) -> int:
        """Time at which the front end put the revision."""
        return self.rest.arrival_ns

    def put_at(self, request_id: RequestId, now_ns: int) -> "Revision":
        """Return the revision for another request id, with its times counted from now."""
        after_ns = self.rest.deadline_ns
        deadline_ns = None if after_ns is None else now_ns + after_ns
        rest = replace(self.rest, request_id=request_id, arrival_ns=now_ns, deadline_ns=deadline_ns)
        return Revision(self.keep, rest)

    @property
    def word(self) -> int:
        """Value to which the stop word is lowered. A streaming prompt stops only larger classes."""
        return self.rest.priority + self.rest.is_open


class Cancel(NamedTuple):
    """A front end's message to cancel a request."""

    request_id: RequestId
    reason: FinishReason = FinishReason.CANCELLED
    """STOP if the front end found a stop string, ERROR if the front end failed to make text."""


class Update(NamedTuple):
    """A front end's message with a new class for a request, a pause, or a resume."""

    request_id: RequestId
    priority: int | None = None
    """New class of the request; None does not change the class."""
    paused: bool | None = None
    """True to pause, False to resume; None does neither."""


def _ignore(result: Any, error: BaseException | None) -> None:
    """Ignore the answer."""


class Call(NamedTuple):
    """Run a function on the loop's thread, between two programs."""

    function: Callable[[], Any]
    answer: Callable[[Any, BaseException | None], None] = _ignore


LOOK = Call(lambda: None)
"""A call that only makes the loop look for changes."""


Item = Submission | Revision | Cancel | Update | Call


class ArrivalWord(Stop, Protocol):
    """The stop word of a transport, which a running program polls."""

    lowered_ns: int
    """Engine time at which the word was last lowered."""


class Ingress(Protocol):
    """A source of requests for the engine loop."""

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
