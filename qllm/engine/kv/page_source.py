"""Protocols that the prefix cache copies KV with. Implementations copy bytes and decide nothing.

A page is a copy, in main memory, of the KV of some tokens in every layer. The implementation
defines the type of a page, and the time at which its bytes are complete. On a CPU a page is
tensors. On a GPU a page is a place in page-locked memory.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from qllm.types import RequestId


class LoadTarget(Protocol):
    """KV of a request that the runner does not know yet."""

    def put(self, number: int, page: Any) -> None:
        """Store the page of this number. Called from another thread."""
        ...


class Keeper(Protocol):
    """The interface of a runner whose KV can be cached."""

    def load_target(self, num_tokens: int) -> LoadTarget:
        """Allocate KV for a request of at most `num_tokens` tokens."""
        ...

    def adopt(self, request_id: RequestId, target: Any, num_tokens: int) -> None:
        """Give a request without KV the staged KV of `target`."""
        ...

    def kv_of(self, request_id: RequestId) -> Any:
        """Return the KV of a request. It can be copied after the request's end."""
        ...

    def copy_out(self, kv: Any, lo: int, hi: int) -> Any:
        """Return a copy of the committed KV of tokens [lo, hi)."""
        ...

    def refer(self, request_id: RequestId, table: Sequence[int], num_tokens: int) -> None:
        """Give a request without KV its blocks. The first blocks contain KV of other requests.

        Args:
            request_id: The request.
            table: All blocks of the request.
            num_tokens: Number of tokens whose KV is already in the blocks.
        """
        ...

    def copy_in(self, request_id: RequestId, lo: int, hi: int, page: Any) -> None:
        """Copy in the KV of tokens [lo, hi), the first uncommitted tokens of a request."""
        ...

    def mark(self, request_id: RequestId, positions: frozenset[int]) -> None:
        """Let passes of a request store the request's states at these positions, for `lend`."""
        ...

    def lend(self, request_id: RequestId, position: int) -> Mapping[int, Any] | None:
        """Return a request's states at a committed position, by layer.

        Return None without stored states.
        """
        ...

    def borrow(self, request_id: RequestId, position: int, states: Mapping[int, Any]) -> None:
        """Let a request whose KV ends at a position continue from states that `lend` returned."""
        ...

    def kv_regime(self, num_prompt_tokens: int, num_tokens: int) -> str:
        """Return the inputs of a request's KV in addition to its tokens, e.g. long rope factors."""
        ...
