"""An ingress that delays a request with KV in a file until the KV is loaded, or is late."""

from collections.abc import Callable

from qllm.engine.delayed import HoldingIngress, Inbox
from qllm.engine.kv.prefix import PrefixCache
from qllm.engine.kv.users import Staged
from qllm.ingress import Submission
from qllm.types import RequestId


class LoadingIngress(HoldingIngress[Staged]):
    """A transport that delays requests while the pages of their KV are read.

    Args:
        inner: The transport.
        prefix: The prefix cache; None delays nothing.
        has_kv: Predicate: the request arrives with its KV and needs no pages.
    """

    def __init__(
        self,
        inner: Inbox,
        prefix: PrefixCache | None,
        has_kv: Callable[[RequestId], bool] = lambda _: False,
    ) -> None:
        super().__init__(inner)
        self._prefix, self._has_kv = prefix, has_kv

    def _begin(self) -> None:
        if self._prefix is not None:
            self._prefix.turn()

    def _hold(self, item: Submission) -> Staged | None:
        if self._prefix is None or self._has_kv(item.request_id):
            return None
        return self._prefix.coming(item)

    def _is_ready(self, item: Submission, wanted: Staged) -> bool:
        assert self._prefix is not None
        is_late = item.deadline_ns is not None and item.deadline_ns <= self._prefix.now_ns()
        return is_late or self._prefix.is_due(wanted.load)

    def _let_go(self, item: Submission, wanted: Staged) -> Submission:
        assert self._prefix is not None
        self._prefix.came(item.request_id, wanted)
        return item

    def wait(self, timeout_ns: int | None) -> None:
        """Sleep until a message arrives, pages must be checked, or the timeout has passed."""
        if self._prefix is not None:
            due = self._prefix.next_turn_ns
            if due is not None:
                left = max(0, due - self._prefix.now_ns())
                timeout_ns = left if timeout_ns is None else min(timeout_ns, left)
        super().wait(timeout_ns)
