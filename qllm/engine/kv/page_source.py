"""What the prefix cache asks of whoever has the KV: bytes move here, and nothing is decided.

A page is a copy, in main memory, of the KV of some tokens in every layer. What it is, and when its
bytes are there, is its maker's business: tensors on a CPU, a place in page-locked memory on a GPU.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from qllm.types import RequestId


class LoadTarget(Protocol):
    """KV of a request that the runner does not know yet."""

    def put(self, number: int, page: Any) -> None:
        """Take up a page, by its number. Called from another thread."""
        ...


class Keeper(Protocol):
    """What a runner has whose KV can be kept."""

    def load_target(self, num_tokens: int) -> LoadTarget:
        """Room for the KV of a request of at most so many tokens."""
        ...

    def adopt(self, request_id: RequestId, target: Any, num_tokens: int) -> None:
        """Give a request without KV what was staged for it."""
        ...

    def copy_out(self, request_id: RequestId, lo: int, hi: int) -> Any:
        """A copy of the committed KV of tokens [lo, hi)."""
        ...

    def refer(self, request_id: RequestId, table: Sequence[int], num_tokens: int) -> None:
        """Give a request without KV its blocks, of which the first hold KV that others computed.

        Args:
            request_id: Whose.
            table: All its blocks.
            num_tokens: How many tokens are there.
        """
        ...

    def copy_in(self, request_id: RequestId, lo: int, hi: int, page: Any) -> None:
        """Give a request KV of its tokens [lo, hi), which are its first not committed."""
        ...

    def mark(self, request_id: RequestId, positions: frozenset[int]) -> None:
        """Have passes of a request leave its states at these positions, for `lend`."""
        ...

    def lend(self, request_id: RequestId, position: int) -> Mapping[int, Any] | None:
        """The states of a request at a committed position, by layer; None if it has none there."""
        ...

    def borrow(self, request_id: RequestId, position: int, states: Mapping[int, Any]) -> None:
        """Let a request, whose KV ends at a position, go on from states that `lend` gave."""
        ...

    def kv_regime(self, num_prompt_tokens: int, num_tokens: int) -> str:
        """What the KV of a request depends on beside its tokens, e.g. long rope factors."""
        ...
