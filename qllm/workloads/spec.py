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


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """One request, before its tokens are chosen."""

    at_s: float
    """Seconds from the start of the workload to the arrival."""
    priority: int
    """Class, see `qllm.types.Priority`."""
    num_prompt_tokens: int
    max_tokens: int
    """Number of output tokens; an end of sequence does not shorten it."""
    name: str = ""
    slo: Slo = field(default_factory=Slo)
    pieces: tuple[PieceSpec, ...] = ()
    """Pieces of a streaming prompt; it is whole with the last one. Empty if it arrives whole."""

    @property
    def longest_prompt(self) -> int:
        """Return the largest number of tokens that the prompt has at any time."""
        return max([self.num_prompt_tokens, *(p.keep + p.num_tokens for p in self.pieces)])

    def whole(self) -> Self:
        """Return the request as it is if its prompt arrives whole, with the last piece."""
        if not self.pieces:
            return self
        return replace(self, at_s=self.at_s + self.pieces[-1].after_s, pieces=())
