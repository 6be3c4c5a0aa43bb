"""Names of KV pages, and which of them are kept. No tensors.

A page is `page_size` tokens of K and V in every layer. Its name is a hash chain over the tokens
up to its end and over everything else that decides the bits, so two pages of one name are equal,
and a page can be lost at any time.

    root    = H(what decides bits, salt)
    name[i] = H(name[i - 1], tokens of page i)
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Generic, TypeVar

from qllm.errors import InvariantError
from qllm.types import NS_PER_S, Priority

Name = bytes
T = TypeVar("T")


def _digest(*parts: bytes) -> Name:
    state = blake2b(digest_size=16)
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.digest()


class Chain:
    """The names of one request's pages, made as its tokens become known.

    Args:
        token_ids: Known tokens.
        page_size: Tokens of a page.
        root: What the first name depends on, beside its tokens.
    """

    __slots__ = ("_names", "page_size", "root", "token_ids")

    def __init__(self, token_ids: Sequence[int], page_size: int, root: Sequence[bytes]) -> None:
        self.token_ids = array("q", token_ids)
        self.page_size = page_size
        self.root = _digest(*root)
        self._names: list[Name] = []

    def upto(self, num_tokens: int) -> Sequence[Name]:
        """The names of the whole pages of the first `num_tokens` tokens."""
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
    """What a store did so far."""

    queries: int = 0
    """Tokens that requests looked for."""
    hits: int = 0
    """Tokens that requests took."""
    evictions: int = 0
    """Pages that others displaced."""
    refused: int = 0
    """Pages that were not kept for want of room."""


@dataclass(slots=True)
class _Page(Generic[T]):
    data: T
    is_ls: bool
    used_ns: int
    pins: int = 0


@dataclass(slots=True)
class PageStore(Generic[T]):
    """Kept pages by name: a bounded store, least recently used first, by class.

    BE work displaces pages of BE and pages that LS has not used for `keep_ls_ns`; LS work
    displaces those first and then any. A pinned page stays.

    Args:
        capacity: Most pages.
        keep_ls_ns: How long LS pages are safe from BE work, in nanoseconds.
    """

    capacity: int
    keep_ls_ns: int = 600 * NS_PER_S
    counts: Counts = field(default_factory=Counts)
    generation: int = 0
    """Moves when a page is added."""
    _pages: dict[Name, _Page[T]] = field(default_factory=dict)
    _orders: tuple[OrderedDict[Name, None], OrderedDict[Name, None]] = field(
        default_factory=lambda: (OrderedDict(), OrderedDict())
    )
    """Names of BE pages and of LS pages, least recently used first, tails of chains first."""

    def __len__(self) -> int:
        """Return the number of pages kept."""
        return len(self._pages)

    def __contains__(self, name: Name) -> bool:
        """Return whether a page is kept."""
        return name in self._pages

    def find(self, names: Sequence[Name], start: int = 0) -> int:
        """How many of the first pages are kept, if the first `start` are."""
        count = start
        while count < len(names) and names[count] in self._pages:
            count += 1
        return count

    def read(self, name: Name) -> T:
        """The data of a kept page."""
        return self._pages[name].data

    def pin(self, names: Sequence[Name]) -> None:
        """Keep pages, which are there, until `unpin`."""
        for name in names:
            self._pages[name].pins += 1

    def unpin(self, names: Sequence[Name]) -> None:
        """Undo `pin`."""
        for name in names:
            page = self._pages[name]
            if not page.pins:
                raise InvariantError("a page is unpinned that nobody pinned")
            page.pins -= 1

    def touch(self, names: Sequence[Name], priority: int, now_ns: int) -> None:
        """Note that a request of a class uses pages; the first page outlives those after it."""
        for name in reversed(names):
            page = self._pages[name]
            del self._orders[page.is_ls][name]
            page.is_ls |= priority <= Priority.LS
            page.used_ns = now_ns
            self._orders[page.is_ls][name] = None

    def make_room(self, priority: int, now_ns: int) -> bool:
        """Have room for one more page; False if this class may displace nothing."""
        if len(self._pages) < self.capacity:
            return True
        victim = self._victim(priority <= Priority.LS, now_ns)
        if victim is None:
            self.counts.refused += 1
            return False
        self._remove(victim)
        self.counts.evictions += 1
        return True

    def add(self, name: Name, data: T, priority: int, now_ns: int) -> None:
        """Keep a new page; there is room."""
        if name in self._pages or len(self._pages) >= self.capacity:
            raise InvariantError("a page is kept twice, or beyond the capacity")
        is_ls = priority <= Priority.LS
        self._pages[name] = _Page(data, is_ls, now_ns)
        self._orders[is_ls][name] = None
        self.generation += 1

    def reset(self) -> None:
        """Drop all pages, of which none is pinned."""
        self.check({})
        self._pages.clear()
        for order in self._orders:
            order.clear()

    def _victim(self, for_ls: bool, now_ns: int) -> Name | None:
        be, ls = (self._first_free(order) for order in self._orders)
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
        del self._orders[page.is_ls][name]

    def check(self, pins: dict[Name, int]) -> None:
        """Compare with the pins of all requests.

        Raises:
            InvariantError: A page leaked, is in two places, or is pinned by nobody.
        """
        names = [name for order in self._orders for name in order]
        if len(names) > self.capacity or sorted(names) != sorted(self._pages):
            raise InvariantError(f"{len(names)} names of {len(self._pages)} pages are in order")
        held = {name: page.pins for name, page in self._pages.items() if page.pins}
        if held != pins:
            raise InvariantError(f"{len(held)} pages are pinned, requests pin {len(pins)}")
