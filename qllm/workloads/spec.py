"""A request of a workload by its lengths: what simulator, benchmark and trace files share."""

from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

from qllm.types import Slo


class PieceSpec(NamedTuple):
    """A piece of a prompt that comes while it is retrieved."""

    after_s: float
    """When, since the request arrived."""
    keep: int
    """Tokens, of the first, that stay as they were; all of them where it is appended."""
    num_tokens: int
    """Its own tokens, which follow those."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """One request, before anybody chose its tokens."""

    at_s: float
    """Arrival since the start of the workload, in seconds."""
    priority: int
    """Its class, as `qllm.types.Priority`."""
    num_prompt_tokens: int
    max_tokens: int
    """Output tokens; fixed, the end of a sequence is ignored."""
    name: str = ""
    slo: Slo = field(default_factory=Slo)
    pieces: tuple[PieceSpec, ...] = ()
    """How its prompt comes, if it does not come whole; with the last one it is whole."""

    @property
    def longest_prompt(self) -> int:
        """Most tokens that its prompt has at any time."""
        return max([self.num_prompt_tokens, *(p.keep + p.num_tokens for p in self.pieces)])

    def whole(self) -> Self:
        """The same request if nobody sees its prompt before that is whole."""
        if not self.pieces:
            return self
        return replace(self, at_s=self.at_s + self.pieces[-1].after_s, pieces=())
