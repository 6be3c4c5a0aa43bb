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
    """KV that is loaded for a request before the request arrives."""

    load: PageLoad
    target: LoadTarget


@dataclass(slots=True)
class User:
    """The cache's state of a live request."""

    request: Request
    submission: Submission
    chain: Chain
    is_be: bool
    """True if the request's class is worse than LS."""
    staged: Staged | None = None
    """KV into which the request's first pages were loaded. It becomes the request's own KV."""
    pinned: Sequence[Name] = ()
    """Pages after the staged ones, found but not copied yet."""
    num_kept: int = 0
    """Number of the request's pages that were offered to the store."""
    is_unkept: bool = False
    """True if no more of the request's KV is cached: its owner deleted all cached KV, or the
    request has `cache_ttl_s=0`.
    """
    state: Name | None = None
    """Page after which the request continues from cached states. The states are pinned."""
    marks: frozenset[int] = frozenset()
    """Positions where the request will leave states. Room for these is reserved."""
    turn: Name | None = None
    """Page of the answer after which the request's states were last cached."""

    @property
    def num_staged(self) -> int:
        """Number of pages that were loaded for the request."""
        return 0 if self.staged is None else self.staged.load.num_ready

    @property
    def has_kv(self) -> bool:
        """True if the request has blocks or is swapped out.

        Then the request finds no more pages.
        """
        return self.request.is_admitted or self.request.num_swapped_tokens > 0

    def until_ns(self, now_ns: int) -> int:
        """Return the time until which the request's pages shall stay cached, if used now.

        0 if unset.
        """
        ttl_s = self.submission.cache_ttl_s
        return 0 if ttl_s is None else now_ns + int(ttl_s * NS_PER_S)
