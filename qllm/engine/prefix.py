"""The prefix cache: KV pages that outlive their request, and are copied into others.

A page is kept as soon as its tokens are committed, so what happens to its request later (its
end, a cancellation, an eviction) does not matter. A hit changes one thing: how many tokens are
computed already. Pages of a hit are pinned when it is found, and copied when its request is
first planned and has blocks: before that it costs no memory.

    arrival, eviction --> waits with `num_found_tokens` --> planned: blocks, copies --> computes
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Protocol

from qllm.errors import InvariantError
from qllm.ingress import Submission
from qllm.scheduler.prefix import Chain, Name, PageStore
from qllm.scheduler.request import Request
from qllm.types import Priority, RequestId

MOST_SOUGHT = 32
"""Waiting requests of a class, the oldest, that look for new pages in a turn of the loop."""


class Keeper(Protocol):
    """What a runner has whose KV can be kept."""

    def copy_out(self, request_id: RequestId, lo: int, hi: int) -> Any:
        """A copy of the committed KV of tokens [lo, hi)."""
        ...

    def copy_in(self, request_id: RequestId, lo: int, hi: int, page: Any) -> None:
        """Give a request KV of its tokens [lo, hi), which are its first not committed."""
        ...

    def kv_regime(self, num_prompt_tokens: int, num_tokens: int) -> str:
        """What the KV of a request depends on beside its tokens, e.g. long rope factors."""
        ...


@dataclass(slots=True)
class _User:
    """What the cache keeps of a live request."""

    request: Request
    submission: Submission
    chain: Chain
    is_be: bool
    """Its class is worse than LS."""
    pinned: Sequence[Name] = ()
    """Pages found and not copied yet."""
    num_kept: int = 0
    """Pages of it that were offered to the store."""


class PrefixCache:
    """Pages by name, and the requests that read and fill them. Lives on the engine's thread.

    Args:
        runner: Copies KV.
        identity: Everything that decides the bits of KV beside tokens, salt and rope.
        store: Which pages are kept.
        page_size: Tokens of a page.
        found: Told how many tokens of a waiting request are there.
        now_ns: The engine's clock.
        copy_bytes: Most bytes copied before an LS arrival is looked for; None is no limit. BE
            requests that wait find no more than this together, and of the pages of a step no more
            are kept at once.
    """

    def __init__(
        self,
        runner: Keeper,
        identity: str,
        store: PageStore[Any],
        page_size: int,
        found: Callable[[RequestId, int], None],
        now_ns: Callable[[], int],
        copy_bytes: int | None = None,
    ) -> None:
        self.store, self.page_size = store, page_size
        self._copy_bytes = copy_bytes
        self._runner, self._identity = runner, identity
        self._found, self._now_ns = found, now_ns
        self._users: dict[RequestId, _User] = {}
        self._waiting: tuple[dict[RequestId, None], ...] = ({}, {})
        """Those that hold no KV and may read, LS and others, oldest first."""
        self._seen = store.generation
        self._page_bytes = 0
        self._num_be_pages = 0
        """Pages that BE requests have found and not copied yet."""
        self._num_copied_out = 0
        """Pages kept since the loop's last turn began."""

    @property
    def _most_pages(self) -> int:
        """Most pages that are copied at once; one until it is known how large a page is."""
        if self._copy_bytes is None:
            return self.store.capacity
        return max(1, self._copy_bytes // self._page_bytes) if self._page_bytes else 1

    def _chain(self, item: Submission, request: Request, ids: Sequence[int]) -> Chain:
        regime = self._runner.kv_regime(request.num_prompt_tokens, request.num_tokens)
        root = (self._identity.encode(), regime.encode(), item.cache_salt)
        return Chain(ids, self.page_size, root)

    def add(self, item: Submission, request: Request) -> None:
        """A request arrived; the scheduler knows it."""
        chain = self._chain(item, request, item.token_ids)
        self._users[request.request_id] = _User(
            request, item, chain, request.priority > Priority.LS
        )
        self._wait(request.request_id)

    def lost(self, request_id: RequestId) -> None:
        """A request lost its KV and starts again."""
        user = self._users.get(request_id)
        if user is not None:
            self._unpin(user)
            user.chain = self._chain(user.submission, user.request, user.chain.token_ids)
            user.num_kept = 0
            self._wait(request_id)

    def remove(self, request_id: RequestId) -> None:
        """A request ended."""
        for waiting in self._waiting:
            waiting.pop(request_id, None)
        user = self._users.pop(request_id, None)
        if user is not None:
            self._unpin(user)

    def reclass(self, request_id: RequestId) -> None:
        """A request may have another class."""
        user = self._users.get(request_id)
        if user is None or (is_be := user.request.priority > Priority.LS) is user.is_be:
            return
        self._num_be_pages += len(user.pinned) if is_be else -len(user.pinned)
        if request_id in self._waiting[user.is_be]:
            del self._waiting[user.is_be][request_id]
            self._waiting[is_be][request_id] = None
        user.is_be = is_be

    def _unpin(self, user: _User) -> None:
        self.store.unpin(user.pinned)
        if user.is_be:
            self._num_be_pages -= len(user.pinned)
            self._seen = -1  # there is room for others to find more
        user.pinned = ()

    def _wait(self, request_id: RequestId) -> None:
        user = self._users[request_id]
        if user.submission.sampling.prompt_logprobs is None:
            self._waiting[user.is_be][request_id] = None
            self._seek(user)

    def seek(self) -> None:
        """A turn of the loop begins: look again for those that wait, if there are new pages."""
        self._num_copied_out = 0
        if self._seen != self.store.generation:
            self._seen = self.store.generation
            for waiting in self._waiting:
                for request_id in islice(waiting, MOST_SOUGHT):
                    if not self._users[request_id].request.is_admitted:
                        self._seek(self._users[request_id])

    def _seek(self, user: _User) -> None:
        request = user.request
        # a request with output owes two tokens or more: without KV nobody is decoding
        owed = 1 if request.num_tokens == request.num_prompt_tokens else 2
        names = user.chain.upto(max(0, request.num_tokens - owed))
        before = len(user.pinned)
        count = self.store.find(names, before)
        if user.is_be:
            count = min(count, before + max(0, self._most_pages - self._num_be_pages))
        if count > before:
            self._num_be_pages += (count - before) * user.is_be
            self.store.pin(names[before:count])
            user.pinned = names[:count]
            self._found(request.request_id, count * self.page_size)

    def load(self, request_id: RequestId) -> int:
        """A request has its blocks: copy what was found; return how many tokens."""
        user, size = self._users.get(request_id), self.page_size
        if user is None:
            return 0
        waiting = self._waiting[user.is_be]
        if request_id not in waiting:
            return 0
        names = user.pinned
        for i, name in enumerate(names):
            self._runner.copy_in(request_id, i * size, (i + 1) * size, self.store.read(name))
        del waiting[request_id]
        self._unpin(user)
        self.store.touch(names, user.request.priority, self._now_ns())
        user.num_kept = len(names)
        counts = self.store.counts
        counts.queries += user.request.num_tokens
        counts.hits += len(names) * size
        return len(names) * size

    def keep(self, request_id: RequestId) -> None:
        """Keep the pages of a request that were committed just now."""
        user = self._users.get(request_id)
        if user is None or user.request.num_computed_tokens // self.page_size <= user.num_kept:
            return
        store, size, now = self.store, self.page_size, self._now_ns()
        priority = user.request.priority
        names = user.chain.upto(user.request.num_computed_tokens)
        there = store.find(names)
        store.touch(names[:there], priority, now)
        store.pin(names[:there])
        kept, ends = there, len(names)
        for i in range(there, len(names)):
            if self._num_copied_out >= self._most_pages:
                ends = i  # the rest is kept after a later step
                break
            if not store.make_room(priority, now):
                break
            self._num_copied_out += 1
            page = self._runner.copy_out(request_id, i * size, (i + 1) * size)
            self._page_bytes = sum(getattr(part, "nbytes", 0) for part in page)
            store.add(names[i], page, priority, now)
            store.pin(names[i : i + 1])
            kept = i + 1
        store.unpin(names[:kept])
        store.touch(names[:kept], priority, now)
        user.num_kept = ends

    def took(self, request_id: RequestId, token_id: int) -> None:
        """A request has one more token."""
        user = self._users.get(request_id)
        if user is not None:
            user.chain.token_ids.append(token_id)

    def stats(self) -> dict[str, int]:
        """Counts for statistics. Callable from any thread."""
        counts = self.store.counts
        return {
            "queried_tokens": counts.queries,
            "hit_tokens": counts.hits,
            "evicted_pages": counts.evictions,
            "refused_pages": counts.refused,
            "kept_tokens": len(self.store) * self.page_size,
            "kept_bytes": len(self.store) * self._page_bytes,
            "max_tokens": self.store.capacity * self.page_size,
        }

    def reset(self) -> None:
        """Forget all pages; requests that found some and wait compute theirs."""
        for request_id in chain.from_iterable(self._waiting):
            user = self._users[request_id]
            if user.pinned:
                self._unpin(user)
                self._found(request_id, 0)
        self.store.reset()

    def check(self) -> None:
        """Compare the store with its users (see `PageStore.check`).

        Raises:
            InvariantError: They differ.
        """
        users = self._users.values()
        found = sum(len(u.pinned) for u in users if u.is_be)
        if found != self._num_be_pages:
            raise InvariantError(f"BE requests found {found} pages, not {self._num_be_pages}")
        self.store.check(dict(Counter(n for user in self._users.values() for n in user.pinned)))
