"""What the prefix cache keeps of a live request."""

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
    """What the cache keeps of a live request."""

    request: Request
    submission: Submission
    chain: Chain
    is_be: bool
    """Its class is worse than LS."""
    staged: Staged | None = None
    """Its first pages were loaded into KV that will be its own."""
    pinned: Sequence[Name] = ()
    """Pages after those, found and not copied yet."""
    num_kept: int = 0
    """Pages of it that were offered to the store."""
    is_deleted: bool = False
    """Its owner had all kept KV deleted: nothing more of it is kept."""
    state: Name | None = None
    """The page after which it goes on from kept states, pinned."""
    marks: frozenset[int] = frozenset()
    """Positions where it will leave states, for which there is room."""
    turn: Name | None = None
    """The page of its answer after which its states were kept last."""

    @property
    def num_staged(self) -> int:
        """Pages that were loaded for it."""
        return 0 if self.staged is None else self.staged.load.num_ready

    @property
    def has_kv(self) -> bool:
        """Whether it has blocks, or is swapped out: then what it has found stays as it is."""
        return self.request.is_admitted or self.request.num_swapped_tokens > 0

    def until_ns(self, now_ns: int) -> int:
        """Until when it asks to keep pages that it uses now; 0 if it does not."""
        ttl_s = self.submission.cache_ttl_s
        return 0 if ttl_s is None else now_ns + int(ttl_s * NS_PER_S)
