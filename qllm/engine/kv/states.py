"""Recurrent states, cached in addition to pages, for a model whose layers carry states.

Pages do not contain states. States are large, so few are cached, each under the name of the page
before. They are cached at four places:

- at the end of a prompt
- at the start of a prompt's last `ANSWER_HEAD` tokens
- at the end of the cached pages that a prompt shares with others (after a system prompt)
- after the last page of an answer

A hit ends at the last cached states among its pages.

    pages    [0][1][2][3][4][5][6]       cached under one chain of names
    states            *        *         a request that shares pages 0 to 4 continues after page 2,
                                                                                  and also leaves
                                                                                  states after page
                                                                                  4

States are lent and not copied, because cached states are read-only. Room for the states that a pass
will leave is reserved before the pass. So cached and expected states never exceed the store.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from qllm.engine.kv.page_source import Keeper
from qllm.engine.kv.users import User
from qllm.errors import InvariantError
from qllm.scheduler.prefix import Name, PageStore, tag_of

ANSWER_HEAD = 16
"""Most tokens at the end of a chat's prompt that already belong to the answer, such as `<think>`.

A client may remove an answer's reasoning. Then its next prompt lacks some of these tokens.
"""


class KeptStates:
    """The cached states, by the name of the page before. Lives on the engine's thread.

    Args:
        runner: Owner of the states of requests.
        store: The cached states.
        page_size: Tokens of a page.
        state_bytes: Bytes of the states of all layers at one position.
        now_ns: The engine's clock.
    """

    def __init__(
        self,
        runner: Keeper,
        store: PageStore[Mapping[int, Any]],
        page_size: int,
        state_bytes: int,
        now_ns: Callable[[], int],
    ) -> None:
        self.store, self.state_bytes = store, state_bytes
        self._runner, self._page_size, self._now_ns = runner, page_size, now_ns
        self._num_coming = 0
        """Number of states that passes will leave. Room for these is reserved."""

    # -- states that a request finds

    def reach(self, names: Sequence[Name]) -> int:
        """Return the number of pages up to and including the last page with cached states."""
        return next((i for i in range(len(names), 0, -1) if names[i - 1] in self.store), 0)

    def pin(self, user: User, name: Name) -> None:
        """Pin the states that a waiting request will continue from. Unpin states pinned earlier."""
        self.unpin(user)
        self.store.pin([name])
        user.state = name

    def unpin(self, user: User) -> None:
        """Unpin the states that a request found, once they are copied or will not be used."""
        if user.state is not None:
            self.store.unpin([user.state])
            user.state = None

    def give(self, user: User, num_pages: int) -> None:
        """Let a request with KV of its first pages continue from the states after these pages."""
        if user.state is None:
            return
        request, now = user.request, self._now_ns()
        tokens = num_pages * self._page_size
        self._runner.borrow(request.request_id, tokens, self.store.read(user.state))
        self.store.touch([user.state], request.priority, now, user.until_ns(now))
        self.unpin(user)

    # -- states that a request leaves

    def mark(self, user: User, branch: int) -> None:
        """Let a request store states during its next passes.

        Args:
            user: Request that already has its KV.
            branch: Number of the request's cached pages.
        """
        request, size = user.request, self._page_size
        # as in `Chain.usable`: a repeat of the same request could use KV up to here
        owed = [1, ANSWER_HEAD] if request.num_tokens == request.num_prompt_tokens else [2]
        ends = {max(0, request.num_tokens - num) // size * size for num in owed} | {branch * size}
        wanted = {p for p in ends if p > request.num_computed_tokens}
        self.forget(user)
        for position in sorted(wanted, reverse=True):
            if user.chain.upto(position)[-1] not in self.store and self._make_room(user):
                user.marks |= {position}
                self._num_coming += 1
        self._runner.mark(request.request_id, user.marks)

    def forget(self, user: User) -> None:
        """Free the reserved room for states of a request that starts again or ends."""
        self._num_coming -= len(user.marks)
        user.marks = frozenset()

    def keep(self, user: User) -> None:
        """Cache the states that a request left after its last committed tokens."""
        reached = user.request.num_computed_tokens
        passed = sorted(p for p in user.marks if p <= reached)
        for position in passed:
            self._num_coming -= 1
            user.marks -= {position}
            self._keep(user, position)
        if passed:
            self._runner.mark(user.request.request_id, user.marks)
        if reached % self._page_size or reached in passed:
            return
        if reached >= user.request.num_prompt_tokens and self._keep(user, reached):
            before, user.turn = user.turn, user.chain.upto(reached)[-1]
            if before is not None and before in self.store and not self.store.is_pinned(before):
                self.store.drop(before)

    def _keep(self, user: User, position: int) -> bool:
        name, request = user.chain.upto(position)[-1], user.request
        if name in self.store or not self._make_room(user):
            return False
        states = self._runner.lend(request.request_id, position)
        if states is None:
            return False
        now, tag = self._now_ns(), tag_of(user.submission.cache_salt)
        self.store.add(name, states, request.priority, now, tag, user.until_ns(now))
        return True

    def _make_room(self, user: User) -> bool:
        store, now = self.store, self._now_ns()
        while len(store) + self._num_coming >= store.capacity:
            if not store.displace(user.request.priority, now):
                return False
        return True

    def stats(self) -> dict[str, int]:
        """Return counts for statistics. Callable from any thread."""
        return {
            "kept_states": len(self.store),
            "max_states": self.store.capacity,
            "kept_state_bytes": len(self.store) * self.state_bytes,
            "evicted_states": self.store.counts.evictions,
        }

    def check(self, users: Iterable[User]) -> None:
        """Compare the reserved room and the pins with the users.

        Raises:
            InvariantError: The reserved room or the pins differ from the users.
        """
        users = list(users)
        self.store.check(dict(Counter(u.state for u in users if u.state is not None)))
        coming = sum(len(user.marks) for user in users)
        if coming != self._num_coming or len(self.store) + coming > self.store.capacity:
            raise InvariantError(
                f"{len(self.store)} states are kept and {coming} are coming, not "
                f"{self._num_coming}, of {self.store.capacity}"
            )
