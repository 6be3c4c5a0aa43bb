"""State that the prefix cache keeps for each live request."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from qllm.engine.kv.page_source import LoadTarget
from qllm.engine.kv.tier import PageLoad
from qllm.ingress import Submission
from qllm.scheduler.prefix import Chain, Name
from qllm.scheduler.request import Request
from qllm.types import NS_PER_S


class Staged(NamedTuple):
    """A request that has not arrived yet, and its KV so far."""

    load: PageLoad
    target: LoadTarget


@dataclass(slots=True)
class User:
    """The cache's state of a live request."""

    request: Request
    submission: Submission
    chain: Chain
    is_be: bool
    """True if its class is worse than LS."""
    staged: Staged | None = None
    """KV into which its first pages were loaded; it becomes the request's own."""
    pinned: Sequence[Name] = ()
    """Pages after those, found but not copied yet."""
    num_kept: int = 0
    """Number of its pages that were offered to the store."""
    is_deleted: bool = False
    """True if its owner deleted all cached KV: no more of its KV is cached."""
    state: Name | None = None
    """The page after which the request continues from cached states, pinned."""
    marks: frozenset[int] = frozenset()
    """Positions where the request will leave states, for which room is reserved."""
    turn: Name | None = None
    """The page of its answer after which its states were last cached."""

    @property
    def num_staged(self) -> int:
        """Number of pages that were loaded for it."""
        return 0 if self.staged is None else self.staged.load.num_ready

    @property
    def has_kv(self) -> bool:
        """True if it has blocks or is swapped out: then its found pages stay fixed."""
        return self.request.is_admitted or self.request.num_swapped_tokens > 0

    def until_ns(self, now_ns: int) -> int:
        """Return the time until which it asks to keep pages in use now; 0 if it does not ask."""
        ttl_s = self.submission.cache_ttl_s
        return 0 if ttl_s is None else now_ns + int(ttl_s * NS_PER_S)
