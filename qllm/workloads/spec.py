"""A request of a workload by its lengths: simulator, benchmark and trace files share it."""

from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

from qllm.types import Slo


class PieceSpec(NamedTuple):
    """A piece of a streaming prompt."""

    after_s: float
    """Seconds from the request's arrival to the piece."""
    keep: int
    """Number of tokens at the prompt's start that the piece keeps; all if it is appended."""
    num_tokens: int
    """Number of the piece's own tokens, which follow the kept ones."""


class Turn(NamedTuple):
    """The place of a request behind others in a session."""

    after: str
    """Name of the request that has to end first."""
    wait_s: float
    """Seconds from that end to the arrival."""
    extends: str = ""
    """Name of the request whose prompt and answer begin the prompt; empty if none does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """One request, before its tokens are chosen."""

    at_s: float
    """Seconds from the start of the workload to the arrival; the least, if it follows another."""
    priority: int
    """Class, see `qllm.types.Priority`."""
    num_prompt_tokens: int
    max_tokens: int
    """Number of output tokens; an end of sequence does not shorten it."""
    name: str = ""
    slo: Slo = field(default_factory=Slo)
    pieces: tuple[PieceSpec, ...] = ()
    """Pieces of a streaming prompt; it is whole with the last one. Empty if it arrives whole."""

    num_shared: int = 0
    """Number of tokens at the prompt's start that are the same in all requests with shared ones."""
    follows: Turn | None = None
    """Place of the request in a session; None if nothing has to end before it arrives."""

    @property
    def longest_prompt(self) -> int:
        """Return the largest number of tokens that the prompt has at any time."""
        return max([self.num_prompt_tokens, *(p.keep + p.num_tokens for p in self.pieces)])

    def whole(self) -> Self:
        """Return the request as it is if its prompt arrives whole, with the last piece."""
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
    """Place in a session: then `at_s` is its least value, and `token_ids` are only those that come
    after the prompt and answer of the request that it extends."""

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
