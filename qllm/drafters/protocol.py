"""The interface of drafters, which plug-ins of the entry-point group `qllm.drafters` have too.

class Repeat:
    \"\"\"The last token once more.\"\"\"

    def __init__(self, request):
        pass

    def propose(self, token_ids, most):
        return token_ids[-1:]
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, overload

from qllm.types import RequestId, SamplingParams


class TokenIds(Sequence[int]):
    """A read-only view of the tokens of a request, which grows with the answer."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._ids = token_ids

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: Any) -> Any:
        return self._ids[index]


class DraftRequest(NamedTuple):
    """A request as its drafter sees it."""

    request_id: RequestId
    num_prompt_tokens: int
    sampling: SamplingParams
    """Settings, with the tokens of `prediction` if the client sent one."""
    forced: Callable[[Sequence[int], int], Sequence[int]]
    """Function that returns the tokens that the request's grammar forces next: it takes the tokens
    of the answer so far, and the most tokens to return. Without a grammar it returns none."""


class Drafter(Protocol):
    """A source of drafted tokens for one request. Each request has a drafter of its own.

    The engine calls it between two steps, so a call must take less than 2 ms. A proposal changes
    how many tokens a step gives, and never which tokens. Nothing that a drafter does ends a
    request.
    """

    def propose(self, token_ids: Sequence[int], most: int) -> Iterable[int]:
        """Return tokens that may come next, in order.

        Args:
            token_ids: Prompt and answer so far, read-only. The tokens of a call are those of the
                call before, and more.
            most: Most tokens that the engine takes of the proposal, at least 1.
        """
        ...


MakeDrafter = Callable[[DraftRequest], Drafter]
"""A function, or a class of drafters, that makes the drafter of a request."""
