"""Who goes first: every request with its policy's verdict, best first."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from qllm.policy import RankPolicy, RequestView
from qllm.types import RequestId

NO_DEADLINE = 1 << 62


class Ranked(NamedTuple):
    """A request with its policy's verdict; sorts best first, ties go to the older request."""

    tier: int
    key: int
    request_id: RequestId
    request: RequestView


class Ranking:
    """The order of all requests, kept from one decision to the next.

    What a rank is made of changes only while a request holds KV (apart from the time, and a
    policy says whether it reads that: `RankPolicy.ages`). So those who hold KV are ranked at
    every decision, and those who wait are ranked once in each life, a life ending in an eviction.
    """

    def __init__(self, policy: RankPolicy) -> None:
        self.policy = policy
        self.admitted: list[Ranked] = []
        """Those who hold KV, best first."""
        self.waiting: list[Ranked] = []
        """Those who hold none, best first."""
        self._lives: dict[RequestId, int] = {}
        """For each of `waiting`, its evictions when it was ranked."""

    def update(self, requests: Sequence[RequestView], now_ns: int) -> None:
        """Bring the order up to date with these requests."""
        if self.policy.ages:
            self.waiting, self._lives = [], {}
        lives = self._lives
        held, fresh = [], []
        for request in requests:
            if request.block_table:
                held.append(request)
            elif lives.get(request.request_id) != request.evictions:
                fresh.append(request)
        self.admitted = sorted([self.rank(request, now_ns) for request in held])
        if fresh or len(lives) + len(held) != len(requests):
            gone = {r.request_id for r in held}.union(r.request_id for r in fresh)
            stay = {r.request_id for r in requests} - gone
            waiting = [x for x in self.waiting if x.request_id in stay]
            waiting += [self.rank(request, now_ns) for request in fresh]
            self.waiting = sorted(waiting)
            self._lives = {x.request_id: x.request.evictions for x in waiting}

    def rank(self, request: RequestView, now_ns: int) -> Ranked:
        """Ask the policy.

        Raises:
            TypeError: It did not return two ints.
        """
        deadline = request.deadline_ns
        tier, key = self.policy.rank(
            request.arrival_ns,
            request.priority,
            NO_DEADLINE if deadline is None else deadline,
            request.num_prompt_tokens,
            request.num_computed_tokens,
            request.served_ns,
            now_ns,
        )
        if not (isinstance(tier, int) and isinstance(key, int)):
            raise TypeError(f"rank returned {(tier, key)!r}; it must return two ints")
        return Ranked(tier, key, request.request_id, request)

    def waiting_of(self, tier: int) -> list[Ranked]:
        """Those of one tier who hold no KV, best first."""
        return self.waiting[_first(self.waiting, tier) : _first(self.waiting, tier + 1)]

    @property
    def tiers(self) -> list[int]:
        """All tiers, best first."""
        return sorted({*_tiers(self.admitted), *_tiers(self.waiting)})


def _first(order: list[Ranked], tier: int) -> int:
    """Where a tier begins."""
    return bisect_left(order, tier, key=attrgetter("tier"))


def _tiers(order: list[Ranked]) -> Iterator[int]:
    at = 0
    while at < len(order):
        yield order[at].tier
        at = _first(order, order[at].tier + 1)


def rank_all(requests: Sequence[RequestView], now_ns: int, policy: RankPolicy) -> list[Ranked]:
    """Rank requests from nothing: what a `Ranking` must agree with."""
    ranking = Ranking(policy)
    ranking.update(requests, now_ns)
    return sorted(ranking.admitted + ranking.waiting)
