"""Order of requests: each with its policy's verdict, best first."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from qllm.errors import InvariantError
from qllm.policy import NO_DEADLINE, RankPolicy, Reads, RequestView
from qllm.types import RequestId


class Ranked(NamedTuple):
    """A request with its policy's verdict.

    Values sort best first, and the older request wins a tie.

    Streaming prompts come after the other requests of their tier, whatever the key is.
    """

    tier: int
    is_open: bool
    key: int
    request_id: RequestId
    request: RequestView


class Ranking:
    """The order of all requests, updated from one decision to the next.

    The scheduler reports when a request arrives, gets KV or loses KV (`touch`), and when the
    request is removed (`forget`). Each time, the policy is called for a verdict. It is called again
    when a value that the policy reads (`RankPolicy.reads`) may have changed: the progress of
    requests with KV, or the time.
    """

    def __init__(self, policy: RankPolicy, requests: Iterable[RequestView] = ()) -> None:
        self.policy = policy
        self.admitted: list[Ranked] = []
        """Requests that hold KV, best first."""
        self.waiting: list[Ranked] = []
        """Requests that hold no KV, best first."""
        self.swapped: dict[RequestId, Ranked] = {}
        """Waiting requests whose KV is swapped out."""
        self.num_own_tiers = 0
        """Number of requests whose tier differs from their priority."""
        self._where: dict[RequestId, Ranked] = {}
        """Waiting requests by id."""
        self._unranked = list(requests)
        self.asking: RequestId | None = None
        """Request for which the policy is called. The value stays if the policy raises."""

    def touch(self, request: RequestView) -> None:
        """Rank a request again, because it arrived, or got or lost KV."""
        self.forget(request.request_id)
        self._unranked.append(request)

    def forget(self, request_id: RequestId) -> None:
        """Remove a request."""
        place = self._where.pop(request_id, None)
        self.swapped.pop(request_id, None)
        if place is None:
            place = next((x for x in self.admitted if x.request_id == request_id), None)
            self.admitted = [x for x in self.admitted if x is not place]
            self._unranked = [r for r in self._unranked if r.request_id != request_id]
        else:
            del self.waiting[bisect_left(self.waiting, place)]
        if place is not None:
            self.num_own_tiers -= place.tier != place.request.priority

    def update(self, now_ns: int) -> None:
        """Rank each request again whose rank may have changed.

        Raises:
            TypeError: The policy did not return two ints.
        """
        if self.policy.reads >= Reads.TIME:
            self._unrank(self.waiting)
            self.waiting, self._where, self.swapped = [], {}, {}
        if self.policy.reads >= Reads.PROGRESS:
            self._unrank(self.admitted)
            self.admitted = []
        while self._unranked:
            x = self.rank(self._unranked[-1], now_ns)
            self._unranked.pop()
            self.num_own_tiers += x.tier != x.request.priority
            if x.request.block_table:
                insort(self.admitted, x)
            else:
                insort(self.waiting, x)
                self._where[x.request_id] = x
                if x.request.num_swapped_tokens:
                    self.swapped[x.request_id] = x

    def _unrank(self, order: Sequence[Ranked]) -> None:
        self._unranked += [x.request for x in order]
        self.num_own_tiers -= sum([x.tier != x.request.priority for x in order])

    def rank(self, request: RequestView, now_ns: int) -> Ranked:
        """Ask the policy for the rank of a request.

        Raises:
            TypeError: The policy did not return two ints.
        """
        self.asking = request.request_id
        deadline = request.deadline_ns
        tier, key = self.policy.rank(
            getattr(request, self.policy.since),
            request.priority,
            NO_DEADLINE if deadline is None else deadline,
            request.num_prompt_tokens,
            request.num_computed_tokens,
            request.served_ns,
            now_ns,
        )
        if not (isinstance(tier, int) and isinstance(key, int)):
            raise TypeError(f"rank returned {(tier, key)!r}; it must return two ints")
        self.asking = None
        return Ranked(tier, request.is_open, key, request.request_id, request)

    def waiting_of(self, tier: int) -> list[Ranked]:
        """Return requests of one tier that hold no KV, best first."""
        return self.waiting[_first(self.waiting, tier) : _first(self.waiting, tier + 1)]

    @property
    def tiers(self) -> list[int]:
        """All tiers, best first."""
        return sorted({*_tiers(self.admitted), *_tiers(self.waiting)})

    def check(self, requests: Iterable[RequestView]) -> None:
        """Check that the lists have exactly these requests, each in the right list.

        Raises:
            InvariantError: A request is missing, unknown, or in the wrong list.
        """
        found = {r.request_id: r for r in self._unranked}
        places = [(x, True) for x in self.admitted] + [(x, False) for x in self.waiting]
        for x, holds in places:
            if x.request.is_admitted is not holds or x.request_id in found:
                raise InvariantError(f"request {x.request_id} is ranked in the wrong place")
            found[x.request_id] = x.request
            if bool(x.request.num_swapped_tokens) is not (x.request_id in self.swapped):
                raise InvariantError(f"request {x.request_id} is not ranked as swapped out")
        if found != {r.request_id: r for r in requests}:
            raise InvariantError(f"ranked are {sorted(found)}, others are live")
        own = sum(x.tier != x.request.priority for x, _ in places)
        if self.num_own_tiers != own:
            raise InvariantError(
                f"{own} requests have tiers of their own, not {self.num_own_tiers}"
            )


def _first(order: Sequence[Ranked], tier: int) -> int:
    """Return the index at which a tier begins."""
    return bisect_left(order, tier, key=attrgetter("tier"))


def _tiers(order: Sequence[Ranked]) -> Iterator[int]:
    at = 0
    while at < len(order):
        yield order[at].tier
        at = _first(order, order[at].tier + 1)


def rank_all(requests: Iterable[RequestView], now_ns: int, policy: RankPolicy) -> list[Ranked]:
    """Rank requests anew, best first. An updated `Ranking` must give the same order."""
    ranking = Ranking(policy, requests)
    ranking.update(now_ns)
    return sorted(ranking.admitted + ranking.waiting)
