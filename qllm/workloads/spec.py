"""A request of a workload, described by lengths, for simulator, benchmark and trace files."""

from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

from qllm.types import Slo


class PieceSpec(NamedTuple):
    """A piece of a streaming prompt."""

    after_s: float
    """Seconds from the request's arrival to the piece."""
    keep: int
    """Number of tokens at the prompt's start that stay. For an appended piece, all tokens."""
    num_tokens: int
    """Number of the piece's own tokens. These follow the tokens that stay."""


class Turn(NamedTuple):
    """The place of a request after others in a session."""

    after: str
    """Name of the request that has to end first."""
    wait_s: float
    """Seconds from the end of that request to the arrival."""
    extends: str = ""
    """Name of the request whose prompt and answer begin this prompt; empty for a new prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """One request, before its tokens are chosen."""

    at_s: float
    """Seconds from the workload's start to the arrival. A request that follows may arrive later.
    """
    priority: int
    """Class of the request, as in `qllm.types.Priority`."""
    num_prompt_tokens: int
    max_tokens: int
    """Number of output tokens. An end-of-sequence token does not end the answer earlier."""
    name: str = ""
    slo: Slo = field(default_factory=Slo)
    pieces: tuple[PieceSpec, ...] = ()
    """Pieces of a streaming prompt, which is whole with the last piece; empty for other prompts."""

    num_shared: int = 0
    """Number of tokens at the prompt's start that are equal in all requests with shared tokens."""
    follows: Turn | None = None
    """Place of the request in a session; None if the request follows no other."""

    @property
    def longest_prompt(self) -> int:
        """Return the largest number of tokens that the prompt has at any time."""
        return max([self.num_prompt_tokens, *(p.keep + p.num_tokens for p in self.pieces)])

    def whole(self) -> Self:
        """Return the request without pieces, arriving when the last piece would arrive."""
        if not self.pieces:
            return self
        return replace(self, at_s=self.at_s + self.pieces[-1].after_s, pieces=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request of a workload, with its tokens."""

    at_s: float
    """Seconds since the start of the window."""
    name: str
    priority: int
    token_ids: tuple[int, ...]
    max_tokens: int
    slo: Slo = field(default_factory=Slo)
    follows: Turn | None = None
    """Place in a session, or None.

    In a session, `at_s` is the earliest time. `token_ids` are only the tokens after the prompt and
    answer of the request that this one extends.
    """

    @property
    def spec(self) -> RequestSpec:
        """The lengths of the request."""
        return RequestSpec(
            at_s=self.at_s,
            priority=self.priority,
            num_prompt_tokens=len(self.token_ids),
            max_tokens=self.max_tokens,
            name=self.name,
            slo=self.slo,
            follows=self.follows,
        )
