"""Names of KV pages, and the store of cached pages. This module has no tensors.

A page is `page_size` tokens of K and V in every layer. The name of a page is a hash chain over the
tokens up to the page's end, and over everything else that decides the page's bits. So two pages
with one name are equal. A page can be dropped at any time and computed again.

    root    = H(everything else that decides bits, salt)
    name[i] = H(name[i - 1], tokens of page i)
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Generic, Self, TypeVar

from qllm.errors import InvariantError
from qllm.types import NS_PER_S, Priority

Name = bytes
Tag = bytes
"""Owner of KV: digests of the owner's name and of the salt, 16 bytes each."""
_NOBODY = 2 * blake2b(b"", digest_size=16).digest()
T = TypeVar("T")


def _digest(*parts: bytes) -> Name:
    state = blake2b(digest_size=16)
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.digest()


def tag_of(cache_salt: bytes) -> Tag:
    """Return the tag of a request's KV. A missing owner or salt counts as an empty text."""
    return cache_salt or _NOBODY


class Chain:
    """The names of one request's pages, made when the request's tokens become known.

    Args:
        token_ids: Known tokens.
        page_size: Tokens of a page.
        root: Value on which the first name depends, in addition to the tokens of the first page.
    """

    __slots__ = ("_names", "page_size", "root", "token_ids")

    def __init__(self, token_ids: Sequence[int], page_size: int, root: Sequence[bytes]) -> None:
        self.token_ids = array("q", token_ids)
        self.page_size = page_size
        self.root = _digest(*root)
        self._names: list[Name] = []

    def following(self, other: "Chain", num_tokens: int) -> Self:
        """Copy names from a chain whose first `num_tokens` tokens are the same."""
        if other.root == self.root:
            self._names = other._names[: num_tokens // self.page_size]
        return self

    def usable(self, num_prompt_tokens: int) -> Sequence[Name]:
        """Return the pages of all tokens, except tokens that a request without KV must compute."""
        # with output, at least two tokens are computed, because a request without KV is not
        # decoding
        num_tokens = len(self.token_ids)
        return self.upto(max(0, num_tokens - (1 if num_tokens == num_prompt_tokens else 2)))

    def upto(self, num_tokens: int) -> Sequence[Name]:
        """Return the names of the whole pages of the first `num_tokens` tokens."""
        names, size = self._names, self.page_size
        count = num_tokens // size
        if num_tokens > len(self.token_ids):
            raise InvariantError(f"{num_tokens} tokens of {len(self.token_ids)} are to be named")
        while len(names) < count:
            at = len(names) * size
            last = names[-1] if names else self.root
            names.append(_digest(last, self.token_ids[at : at + size].tobytes()))
        return names[:count]


@dataclass(slots=True)
class Counts:
    """Counters of a page store."""

    queries: int = 0
    """Tokens that requests looked up."""
    hits: int = 0
    """Tokens that requests found and used."""
    evictions: int = 0
    """Pages that were dropped to make room for other pages."""
    refused: int = 0
    """Pages that were not cached because the store was full."""


@dataclass(slots=True)
class _Page(Generic[T]):
    data: T
    is_ls: bool
    used_ns: int
    tag: Tag = b""
    until_ns: int = 0
    """Time until which a request asked to keep the page; 0 without such a request."""
    pins: int = 0


@dataclass(slots=True)
class PageStore(Generic[T]):
    """A bounded store of cached pages by name.

    It drops the least recently used page of a class first.

    BE work displaces pages of BE and pages that LS has not used for `keep_ls_ns`. LS work displaces
    these pages first, and then any page. A pinned page stays. A page that a request asked to keep
    stays too, if such pages are at most half of the store.

    Args:
        capacity: Largest number of pages, not counting pinned pages that `lend` added.
        keep_ls_ns: Time in nanoseconds for which LS pages are safe from BE work.
        gone: Function that is called with the data of each page that is dropped.
    """

    capacity: int
    keep_ls_ns: int = 600 * NS_PER_S
    gone: Callable[[T], object] = lambda _: None
    counts: Counts = field(default_factory=Counts)
    generation: int = 0
    """Counter that increases when a page is added."""
    _pages: dict[Name, _Page[T]] = field(default_factory=dict)
    _orders: tuple[OrderedDict[Name, None], ...] = field(
        default_factory=lambda: (OrderedDict(), OrderedDict(), OrderedDict())
    )
    """Names of BE pages, of LS pages, and of pages that requests asked to keep. Each list has the
    least recently used page first, and the end of a chain before the chain's start."""
    _next_release_ns: int = 0
    """Earliest time at which a page that a request asked to keep may be dropped again."""

    def __len__(self) -> int:
        """Return the number of cached pages."""
        return len(self._pages)

    def __contains__(self, name: Name) -> bool:
        """Return True if a page is cached."""
        return name in self._pages

    def find(self, names: Sequence[Name], start: int = 0) -> int:
        """Return how many of the first pages are cached.

        The first `start` pages are known to be cached.
        """
        count = start
        while count < len(names) and names[count] in self._pages:
            count += 1
        return count

    def read(self, name: Name) -> T:
        """Return the data of a cached page."""
        return self._pages[name].data

    def is_pinned(self, name: Name) -> bool:
        """Return True if a cached page stays until `unpin`."""
        return self._pages[name].pins > 0

    def is_ls(self, name: Name) -> bool:
        """Return True if an LS request has used a cached page."""
        return self._pages[name].is_ls

    def until_ns(self, name: Name) -> int:
        """Return the time until which requests asked to keep a page."""
        return self._pages[name].until_ns

    def tag(self, name: Name) -> Tag:
        """Return the tag of a cached page."""
        return self._pages[name].tag

    def pin(self, names: Sequence[Name]) -> None:
        """Keep cached pages until `unpin`."""
        for name in names:
            self._pages[name].pins += 1

    def unpin(self, names: Sequence[Name]) -> None:
        """Undo `pin`. A page beyond the capacity is dropped with its last pin."""
        for name in names:
            page = self._pages[name]
            if not page.pins:
                raise InvariantError("a page is unpinned that nobody pinned")
            page.pins -= 1
            if not page.pins and len(self._pages) > self.capacity:
                self._remove(name)

    def touch(self, names: Sequence[Name], priority: int, now_ns: int, until_ns: int = 0) -> None:
        """Record that a request uses pages. A page outlives the later pages of the prefix.

        Args:
            names: Cached pages from the start of a prefix.
            priority: Class of the request.
            now_ns: The engine's clock.
            until_ns: Time until which the request asks to keep the pages; 0 if it does not ask.
        """
        self._release(now_ns)
        for name in reversed(names):
            page = self._pages[name]
            del self._order(page)[name]
            page.is_ls |= priority <= Priority.LS
            page.used_ns = now_ns
            self._hold(page, until_ns, now_ns)
            self._order(page)[name] = None

    def make_room(self, priority: int, now_ns: int) -> bool:
        """Make room for one more page; return False if this class may displace no page."""
        while len(self._pages) >= self.capacity:
            if not self.displace(priority, now_ns):
                return False
        return True

    def displace(self, priority: int, now_ns: int) -> bool:
        """Drop the page that this class may displace first.

        Return False if there is no such page.
        """
        self._release(now_ns)
        victim = self._victim(priority <= Priority.LS, now_ns)
        if victim is None:
            self.counts.refused += 1
            return False
        self._remove(victim)
        self.counts.evictions += 1
        return True

    def may_displace(self, priority: int, now_ns: int) -> bool:
        """Return True if work of this class may displace a page."""
        return self._victim(priority <= Priority.LS, now_ns) is not None

    def add(
        self,
        name: Name,
        data: T,
        priority: int,
        now_ns: int,
        tag: Tag = b"",
        until_ns: int = 0,
    ) -> None:
        """Cache a new page. The store must have room for the page."""
        if len(self._pages) >= self.capacity:
            raise InvariantError("a page is kept beyond the capacity")
        self._add(name, _Page(data, priority <= Priority.LS, now_ns, tag), until_ns, now_ns)

    def lend(self, name: Name, data: T, priority: int, now_ns: int, tag: Tag = b"") -> None:
        """Cache a new page, pinned once, even if the store is full."""
        self._add(name, _Page(data, priority <= Priority.LS, now_ns, tag, pins=1), 0, now_ns)

    def _add(self, name: Name, page: _Page[T], until_ns: int, now_ns: int) -> None:
        if name in self._pages:
            raise InvariantError("a page is kept twice")
        self._hold(page, until_ns, now_ns)
        self._pages[name] = page
        self._order(page)[name] = None
        self.generation += 1

    def drop(self, name: Name) -> None:
        """Drop one page, which must not be pinned."""
        if self._pages[name].pins:
            raise InvariantError("a page is dropped that is pinned")
        self._remove(name)

    def reset(self) -> None:
        """Drop all pages. No page may be pinned."""
        self.check({})
        for name in list(self._pages):
            self._remove(name)

    def names(self) -> list[Name]:
        """Return the names of all cached pages."""
        return list(self._pages)

    def tagged(self, tag: Tag) -> list[Name]:
        """Return the pages of an owner (tag of 16 bytes) or of one of its salts (32 bytes)."""
        return [name for name, page in self._pages.items() if page.tag.startswith(tag)]

    def unused_since(self, ns: int) -> list[Name]:
        """Return the pages that are not pinned and were last used at or before `ns`."""
        found: list[Name] = []
        for order in self._orders:
            for name in order:
                page = self._pages[name]
                if page.used_ns > ns:
                    break
                if not page.pins:
                    found.append(name)
        return found

    @property
    def oldest_use_ns(self) -> int | None:
        """Time of the last use of the least recently used page; None without pages."""
        firsts = (next(iter(order), None) for order in self._orders)
        return min((self._pages[n].used_ns for n in firsts if n is not None), default=None)

    def _hold(self, page: _Page[T], until_ns: int, now_ns: int) -> None:
        """Keep a page until a request's time, if fewer than half of the pages are kept this way.

        The page is in none of the ordered lists yet.
        """
        num_held = len(self._orders[-1])
        if until_ns > max(now_ns, page.until_ns) and num_held < self.capacity // 2:
            page.until_ns = until_ns
            self._next_release_ns = min(self._next_release_ns or until_ns, until_ns)

    def _release(self, now_ns: int) -> None:
        """Return pages to the lists of their classes when their requested time is over."""
        held = self._orders[-1]
        if not held or now_ns < self._next_release_ns:
            return
        for name in [name for name in held if self._pages[name].until_ns <= now_ns]:
            del held[name]
            page = self._pages[name]
            page.until_ns = 0
            order = self._order(page)
            order[name] = None
        for order in self._orders[:-1]:
            for name in sorted(order, key=lambda name: self._pages[name].used_ns):
                order.move_to_end(name)
        self._next_release_ns = min((self._pages[n].until_ns for n in held), default=0)

    def _order(self, page: _Page[T]) -> OrderedDict[Name, None]:
        return self._orders[2 if page.until_ns else page.is_ls]

    def _victim(self, for_ls: bool, now_ns: int) -> Name | None:
        be, ls = (self._first_free(order) for order in self._orders[:-1])
        is_stale = ls is not None and now_ns - self._pages[ls].used_ns >= self.keep_ls_ns
        if be is None:
            return ls if for_ls or is_stale else None
        if is_stale and ls is not None and self._pages[ls].used_ns < self._pages[be].used_ns:
            return ls
        return be

    def _first_free(self, order: OrderedDict[Name, None]) -> Name | None:
        return next((name for name in order if not self._pages[name].pins), None)

    def _remove(self, name: Name) -> None:
        page = self._pages.pop(name)
        del self._order(page)[name]
        self.gone(page.data)

    def check(self, pins: dict[Name, int]) -> None:
        """Compare with the pins of all requests.

        Raises:
            InvariantError: A page leaked, is in two places, or is pinned without a request.
        """
        names = [name for order in self._orders for name in order]
        held = {name: page.pins for name, page in self._pages.items() if page.pins}
        if len(names) > self.capacity + len(held) or sorted(names) != sorted(self._pages):
            raise InvariantError(f"{len(names)} names of {len(self._pages)} pages are in order")
        if held != pins:
            raise InvariantError(f"{len(held)} pages are pinned, requests pin {len(pins)}")
