"""The prefix cache: KV pages that outlive a request and are copied into later requests.

Pages are cached after their tokens are committed, a bounded number after each step. Those of a
request that ended follow (`qllm.engine.kv.rests`). A hit changes one thing: how many tokens are
already computed. Pages of a hit are pinned when it is found. They are copied when its request is
first planned and has blocks; before that they cost no memory.

    arrival, eviction --> waits with `num_found_tokens` --> planned: blocks, copies --> computes

Pages that are only in a file are loaded before the request arrives at the scheduler
(`qllm.engine.kv.loading`).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain, islice
from typing import Any

from qllm.engine.kv.page_source import Keeper
from qllm.engine.kv.rests import Blocks, Rest, Rests
from qllm.engine.kv.states import KeptStates
from qllm.engine.kv.tier import FileTier, PageLoad
from qllm.engine.kv.users import Staged, User
from qllm.errors import InvariantError
from qllm.ingress import Submission
from qllm.scheduler.prefix import Chain, Name, PageStore, Tag, tag_of
from qllm.scheduler.request import Request
from qllm.types import NS_PER_MS, NS_PER_S, Priority, RequestId

MOST_SOUGHT = 32
"""Number of waiting requests per class, oldest first, that search new pages in a loop iteration.
"""


POLL_NS = 5 * NS_PER_MS
"""Interval at which an idle loop checks the pages that are being written or read."""
TTL_NS = NS_PER_S // 10
"""Minimum time between two searches of an idle loop for expired KV."""


class PrefixCache:
    """Pages by name, and the requests that read or fill pages. Lives on the engine's thread.

    The class is large because every use of a page needs a pin, and all pins have one owner.

    Args:
        runner: Copier of KV.
        identity: Everything that decides the bits of KV, except tokens, salt and rope.
        store: The cached pages.
        page_size: Tokens of a page.
        found: Callback: number of cached tokens of a waiting request; the pages of these tokens if
            requests share blocks.
        now_ns: The engine's clock.
        blocks: The blocks of the scheduler.
        copy_bytes: Most bytes copied between two checks for LS arrivals; None is no limit. All
            waiting BE requests together find no more than this, and one step caches no more pages.
        tier: Pages in a file, or None.
        ttl_ns: Time after which unused KV is deleted; None keeps it.
        named: Callback: the first pages of a request's blocks, and the size of a page. After the
            call other requests may share the blocks by reference. None if every request has a copy.
        states: Cached states; None for a model whose layers have no states.
    """

    def __init__(
        self,
        runner: Keeper,
        identity: str,
        store: PageStore[Any],
        page_size: int,
        found: Callable[[RequestId, int, Sequence[Name]], None],
        now_ns: Callable[[], int],
        blocks: Blocks,
        copy_bytes: int | None = None,
        tier: FileTier | None = None,
        ttl_ns: int | None = None,
        named: Callable[[RequestId, Sequence[Name], int], None] | None = None,
        states: KeptStates | None = None,
    ) -> None:
        self.states = states
        self.store, self.page_size, self.tier = store, page_size, tier
        self._ttl_ns = ttl_ns
        self._copy_bytes = copy_bytes
        self._runner, self._identity = runner, identity
        self._told, self._named, self.now_ns = found, named, now_ns
        self._users: dict[RequestId, User] = {}
        self.rests = Rests(blocks)
        self._waiting: tuple[dict[RequestId, None], ...] = ({}, {})
        """Requests without KV that may read pages: LS requests and others, oldest first."""
        self._seen = store.generation
        self._page_bytes = 0
        self._num_be_pages = 0
        """Pages that BE requests have found but not copied yet."""
        self._arriving: dict[RequestId, Staged] = {}
        """KV loaded for requests that the loop admits in this iteration."""
        self._unkept: set[RequestId] = set()
        """Requests that have not arrived yet and whose KV will not be cached."""
        self._num_copied_out = 0
        """Pages cached since the loop's last iteration began."""
        self._num_shared_tokens = 0

    @property
    def _most_pages(self) -> int:
        """Return the most pages that are copied at once: one, until the size of a page is known."""
        if self._copy_bytes is None:
            return self.store.capacity
        return max(1, self._copy_bytes // self._page_bytes) if self._page_bytes else 1

    def chain(self, item: Submission, ids: Sequence[int]) -> Chain:
        """Return the names of the pages of a request with the tokens `ids`."""
        regime = self._runner.kv_regime(item.num_prompt_tokens, len(ids))
        root = (self._identity.encode(), regime.encode(), item.cache_salt)
        return Chain(ids, self.page_size, root)

    def add(self, item: Submission, request: Request) -> None:
        """Add a request that arrived. The scheduler already has the request."""
        user = User(request, item, self.chain(item, item.token_ids), request.priority > Priority.LS)
        staged = self._arriving.get(request.request_id)
        if staged is not None and not staged.load.is_given_up:
            user.staged = staged
        user.is_unkept = item.request_id in self._unkept or item.cache_ttl_s == 0
        self._users[request.request_id] = user
        self._pace()  # before a step: the request's prefill runs at the same time as the mover
        self._wait(request.request_id)

    def lost(self, request_id: RequestId) -> None:
        """Reset a request that lost its KV and will be computed again."""
        user = self._users.get(request_id)
        if user is not None:
            self._begin_again(user, user.chain.token_ids)

    def _begin_again(self, user: User, token_ids: Sequence[int]) -> None:
        self._unpin(user)
        if self.states is not None:
            self.states.forget(user)
        user.staged = None
        user.chain = self.chain(user.submission, token_ids)
        user.num_kept = 0
        self._wait(user.request.request_id)

    def revised(self, request_id: RequestId, item: Submission, num_kept: int) -> None:
        """Update a request whose prompt changed after its first `num_kept` tokens."""
        user = self._users.get(request_id)
        if user is None:
            return
        user.submission = item
        if user.has_kv:
            user.num_kept = min(user.num_kept, num_kept // self.page_size)
            user.chain = self.chain(item, item.token_ids).following(user.chain, num_kept)
            self._mark(user)
        else:
            self._waiting[user.is_be].pop(request_id, None)
            self._begin_again(user, item.token_ids)

    def remove(self, request_id: RequestId) -> None:
        """Remove a request that ends. It still has its blocks, if it had any."""
        user = self._users.pop(request_id, None)
        if user is None:
            return
        if not any(request_id in waiting for waiting in self._waiting):
            self._leave(user)
        for waiting in self._waiting:
            waiting.pop(request_id, None)
        self._unpin(user)
        if self.states is not None:
            self.states.forget(user)

    def _leave(self, user: User) -> None:
        """Let the pages of a request that are not cached yet be cached after its end."""
        request = user.request
        names = user.chain.upto(request.num_computed_tokens)
        if request.is_admitted and not user.is_unkept and user.num_kept < len(names):
            user.num_kept = self.store.find(names)
            kv = self._runner.kv_of(request.request_id)
            self.rests.add(Rest(user, kv, names, self.now_ns()))

    def updated(self, request_id: RequestId) -> None:
        """Update a request that changed its class, was paused, or continues."""
        user = self._users.get(request_id)
        if user is None:
            return
        self._reclass(user)
        self._pace()
        if request_id not in self._waiting[user.is_be] or user.has_kv:
            return
        if not user.request.is_paused:
            self._seek(user)
        elif user.pinned:  # others may need the pages, and BE requests find a bounded number
            self._unpin(user)
            self._found(user, user.num_staged)

    def _reclass(self, user: User) -> None:
        request_id = user.request.request_id
        if (is_be := user.request.priority > Priority.LS) is user.is_be:
            return
        self._num_be_pages += len(user.pinned) if is_be else -len(user.pinned)
        if request_id in self._waiting[user.is_be]:
            del self._waiting[user.is_be][request_id]
            self._waiting[is_be][request_id] = None
        user.is_be = is_be

    def _unpin(self, user: User) -> None:
        self.store.unpin(user.pinned)
        if self.states is not None:
            self.states.unpin(user)
        if user.is_be:
            self._num_be_pages -= len(user.pinned)
            self._seen = -1  # there is room for other requests to find more
        user.pinned = ()

    def _wait(self, request_id: RequestId) -> None:
        user = self._users[request_id]
        if user.submission.sampling.prompt_logprobs is None:
            self._waiting[user.is_be][request_id] = None
            self._seek(user)

    def seek(self) -> None:
        """Begin an iteration: if there are new pages, search again for waiting requests."""
        self._num_copied_out = 0
        if self._seen != self.store.generation:
            self._seen = self.store.generation
            for waiting in self._waiting:
                users = (self._users[request_id] for request_id in waiting)
                able = (user for user in users if not user.request.is_paused)
                for user in list(islice(able, MOST_SOUGHT)):
                    self._seek(user)

    def _seek(self, user: User) -> None:
        request = user.request
        if request.is_paused or user.has_kv:
            return
        names = user.chain.usable(request.num_prompt_tokens)
        first = user.num_staged
        before = first + len(user.pinned)
        count = self.store.find(names, before)
        if user.is_be and not (self.states is not None and self._num_be_pages == 0):
            count = min(count, before + max(0, self._most_pages - self._num_be_pages))
        if self.states is not None:  # states are found at one position, not piece by piece
            count = max(before, self.states.reach(names[:count]))
        if count > before:
            if self.states is not None:
                self.states.pin(user, names[count - 1])
            self._num_be_pages += (count - before) * user.is_be
            self.store.pin(names[before:count])
            user.pinned = names[first:count]
        if count > request.num_found_tokens // self.page_size:
            self._found(user, count)

    def _found(self, user: User, num_pages: int) -> None:
        num_tokens = num_pages * self.page_size
        pages = user.chain.upto(num_tokens) if self._named is not None else ()
        self._told(user.request.request_id, num_tokens, pages)

    def load(self, request_id: RequestId, table: Sequence[int]) -> int:
        """Copy found pages into a request that now has its blocks. Return the number of tokens.

        Pages in blocks that the request shares by reference need no copy.
        """
        user, size = self._users.get(request_id), self.page_size
        if user is None:
            return 0
        waiting = self._waiting[user.is_be]
        if request_id not in waiting:
            return 0
        first = user.num_staged
        if first:
            assert user.staged is not None
            self._runner.adopt(request_id, user.staged.target, first * size)
        num_there = self._refer(user, table) if user.pinned else 0
        for i, name in enumerate(user.pinned, first):
            if (i + 1) * size > num_there:
                self._runner.copy_in(request_id, i * size, (i + 1) * size, self.store.read(name))
        names = user.chain.upto((first + len(user.pinned)) * size)
        self._name(user, names)
        if self.states is not None:
            self.states.give(user, len(names))
        self._mark(user)
        del waiting[request_id]
        self._unpin(user)
        priority, now = user.request.priority, self.now_ns()
        until = user.until_ns(now)
        self.store.touch([name for name in names if name in self.store], priority, now, until)
        if self.tier is not None:
            self.tier.touch(names, priority, now, until)
        user.num_kept = 0 if first else len(names)
        user.staged = None
        counts = self.store.counts
        counts.queries += user.request.num_tokens
        counts.hits += len(names) * size
        return len(names) * size

    def _mark(self, user: User) -> None:
        """Let a request with KV store states during its passes."""
        if self.states is not None:
            names = user.chain.usable(user.request.num_prompt_tokens)
            self.states.mark(user, self.store.find(names))

    def _refer(self, user: User, table: Sequence[int]) -> int:
        """Use the blocks that a request shares by reference.

        Return the number of tokens in them.
        """
        if self._named is None:
            return 0
        num_tokens = user.request.num_shared_tokens
        self._runner.refer(user.request.request_id, table, num_tokens)
        self._num_shared_tokens += num_tokens
        return num_tokens

    def _name(self, user: User, names: Sequence[Name]) -> None:
        if self._named is not None:
            self._named(user.request.request_id, names, self.page_size)

    def keep(self, request_id: RequestId) -> None:
        """Cache the committed pages of a request that was in a program.

        If it left the program, because it was swapped out, it has no blocks to copy from.
        """
        user = self._users.get(request_id)
        if user is None or user.is_unkept or not user.request.is_admitted:
            return
        if self.states is not None:
            self.states.keep(user)
        if user.request.num_computed_tokens // self.page_size <= user.num_kept:
            return
        names = user.chain.upto(user.request.num_computed_tokens)
        self._keep(user, names, self._runner.kv_of(request_id))
        self._name(user, names)

    def keep_rests(self) -> bool:
        """Cache more pages of ended requests; return True if there were any.

        No page is copied twice: pages that others displaced meanwhile, and what follows them, are
        left out.
        """
        before = self._num_copied_out
        for rest in self.rests:
            if self._num_copied_out >= self._most_pages:
                break
            user, names = rest.user, rest.names
            if self._has(names[: user.num_kept]):
                self._keep(user, names, rest.kv)
            else:
                user.num_kept = len(names)
            if user.num_kept == len(names):
                self.rests.forget(rest)
        return self._num_copied_out > before

    def _has(self, names: Sequence[Name]) -> bool:
        """Return True if all these pages are cached, in RAM or in the file."""
        index = () if self.tier is None else self.tier.index
        return all(name in self.store or name in index for name in names)

    def _keep(self, user: User, names: Sequence[Name], kv: Any) -> None:
        store, tier, now = self.store, self.tier, self.now_ns()
        priority, until = user.request.priority, user.until_ns(now)
        here, user.num_kept = self._keep_pages(user, names, kv, now)
        store.unpin(here)
        store.touch([name for name in here if name in store], priority, now, until)
        if tier is not None:
            for name in here:
                tier.offer(name, priority <= Priority.LS)
            tier.touch(names, priority, now, until)

    def _keep_pages(
        self, user: User, names: Sequence[Name], kv: Any, now: int
    ) -> tuple[list[Name], int]:
        """Cache pages of a request; return those in RAM, pinned, and the number handled."""
        here: list[Name] = []
        for i, name in enumerate(names):
            if name not in self.store:
                if self._num_copied_out >= self._most_pages:
                    return here, i  # the rest is cached after a later step
                if not self._keep_page(user, i, name, kv, now):
                    tier = self.tier
                    if tier is not None and name in tier.index:
                        continue
                    may_wait = tier is not None and tier.would_take(user.request.priority, now)
                    return here, i if may_wait else len(names)
                self._num_copied_out += 1
            self.store.pin([name])
            here.append(name)
        return here, len(names)

    def _keep_page(self, user: User, i: int, name: Name, kv: Any, now: int) -> bool:
        """Cache one more page of a request; return False if there is no room for it."""
        store, size, tier = self.store, self.page_size, self.tier
        request, tag = user.request, tag_of(user.submission.cache_salt)
        has_room = store.make_room(request.priority, now)
        if not has_room and (tier is None or name in tier.index or not tier.has_room()):
            return False
        page = self._runner.copy_out(kv, i * size, (i + 1) * size)
        if page is None:
            return False
        self._page_bytes = sum(getattr(part, "nbytes", 0) for part in page)
        if has_room:
            store.add(name, page, request.priority, now, tag, user.until_ns(now))
        else:
            assert tier is not None
            store.lend(name, page, request.priority, now, tag)
            tier.take_lent(name, request.priority <= Priority.LS)
        return True

    def took(self, request_id: RequestId, token_id: int) -> None:
        """Append a sampled token to a request."""
        user = self._users.get(request_id)
        if user is not None:
            user.chain.token_ids.append(token_id)

    # -- the file, and deletion

    def turn(self) -> None:
        """Begin an iteration: accept pages that were read, store more, delete expired ones."""
        now = self.now_ns()
        self._arriving.clear()
        if self.tier is not None:
            self._pace()
            self.tier.turn(self.store, now)
        if self._ttl_ns is not None:
            before = now - self._ttl_ns
            self.rests.forget_before(before)
            for store in self._stores:
                for name in store.unused_since(before):
                    store.drop(name)
            if self.tier is not None:
                self.tier.expire(before)

    @property
    def _stores(self) -> list[PageStore[Any]]:
        return [self.store, *([] if self.states is None else [self.states.store])]

    def _pace(self) -> None:
        """Slow down the file's threads if there are LS requests that are not paused."""
        if self.tier is not None:
            live = (user.request for user in self._users.values())
            self.tier.be_gentle(any(r.priority <= Priority.LS and not r.is_paused for r in live))

    @property
    def next_turn_ns(self) -> int | None:
        """Return the time of the next iteration, even without an arrival.

        Return None if no iteration is due.
        """
        now = self.now_ns()
        if self.tier is not None and self.tier.is_busy:
            return now + POLL_NS
        if self._ttl_ns is None:
            return None
        stores = [*self._stores, *([] if self.tier is None else [self.tier.index])]
        used = [ns for ns in (store.oldest_use_ns for store in stores) if ns is not None]
        return max(now + TTL_NS, min(used) + self._ttl_ns) if used else None

    def coming(self, item: Submission) -> Staged | None:
        """Start to load a request's pages from the file.

        Return None if the request need not wait.
        """
        if self.tier is None or item.sampling.prompt_logprobs is not None or item.wrong is not None:
            return None
        names = self.chain(item, item.token_ids).usable(item.num_prompt_tokens)
        used = [user.num_staged for user in self._users.values() if not user.request.is_admitted]
        room = self.store.capacity - self.tier.num_coming - sum(used)
        target = self._runner.load_target(item.num_prompt_tokens + item.max_tokens)
        load = self.tier.load(
            names[: max(0, room)],
            self.store,
            target.put,
            item.priority <= Priority.LS,
            tag_of(item.cache_salt),
            self.now_ns(),
        )
        return None if load is None else Staged(load, target)

    def is_due(self, load: PageLoad) -> bool:
        """Return True if a request need not wait for the load any more."""
        assert self.tier is not None
        return load.is_over or not self.tier.is_open or self.now_ns() >= load.late_ns

    def came(self, request_id: RequestId, staged: Staged) -> None:
        """End the wait of a request. Next, the loop calls `add` or refuses the request."""
        if staged.load.is_over:
            self._arriving[request_id] = staged
        else:
            staged.load.is_given_up = True
            assert self.tier is not None
            self.tier.counts.late += self.is_due(staged.load)

    def delete(self, tag: Tag, held: Sequence[Submission]) -> int:
        """Delete the cached KV of an owner (16 bytes) or of one salt of an owner (32 bytes).

        Requests in flight and delayed requests (`held`) continue, but no more of their KV is
        cached. Returns the number of pages.
        """
        names = self._let_go(tag)
        for user in self._users.values():
            user.is_unkept |= tag_of(user.submission.cache_salt).startswith(tag)
        theirs = {x.request_id for x in held if tag_of(x.cache_salt).startswith(tag)}
        self._unkept = theirs | {x.request_id for x in held if x.request_id in self._unkept}
        return names

    def _let_go(self, tag: Tag) -> int:
        self.rests.forget_tagged(tag)
        for staged in self._arriving.values():
            staged.load.is_given_up |= staged.load.tag.startswith(tag)
        for request_id in chain.from_iterable(self._waiting):
            user = self._users[request_id]
            if not tag_of(user.submission.cache_salt).startswith(tag):
                continue
            if user.pinned or user.staged:
                self._unpin(user)
                user.staged = None
                self._found(user, 0)
        num_in_file = 0 if self.tier is None else self.tier.delete(tag, self.store)
        names = self.store.tagged(tag)
        for store in self._stores:
            for name in store.tagged(tag):
                store.drop(name)
        return max(len(names), num_in_file)

    def reset(self) -> None:
        """Delete all pages. Waiting requests that had found pages compute their KV."""
        self._let_go(b"")
        for store in self._stores:
            store.reset()
        if self.tier is not None:
            self.tier.erase_all()

    def stats(self) -> dict[str, int]:
        """Return counts for statistics. Callable from any thread."""
        counts = self.store.counts
        return {
            "queried_tokens": counts.queries,
            "hit_tokens": counts.hits,
            "shared_tokens": self._num_shared_tokens,
            "evicted_pages": counts.evictions,
            "refused_pages": counts.refused,
            "kept_tokens": len(self.store) * self.page_size,
            "kept_bytes": len(self.store) * self._page_bytes,
            "max_tokens": self.store.capacity * self.page_size,
            **({} if self.states is None else self.states.stats()),
        }

    def check(self) -> None:
        """Compare the store with its users (see `PageStore.check`).

        Raises:
            InvariantError: The store and its users differ.
        """
        users = self._users.values()
        found = sum(len(u.pinned) for u in users if u.is_be)
        if found != self._num_be_pages:
            raise InvariantError(f"BE requests found {found} pages, not {self._num_be_pages}")
        pinned = chain.from_iterable(user.pinned for user in users)
        if self.states is not None:
            self.states.check(users)
        if self.tier is not None:
            self.tier.check()
            pinned = chain(pinned, self.tier.pins())
        self.store.check(dict(Counter(pinned)))
