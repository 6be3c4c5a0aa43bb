"""Requests whose KV lies in a file arrive at the scheduler once it is loaded, or is late."""

from qllm.engine.holding import HoldingIngress, Inbox
from qllm.engine.prefix import PrefixCache
from qllm.engine.prefix_users import Staged
from qllm.ingress import Submission


class LoadingIngress(HoldingIngress[Staged]):
    """A transport that holds requests back while their pages are read.

    Args:
        inner: The transport.
        prefix: The prefix cache, or None: then nothing is held back.
    """

    def __init__(self, inner: Inbox, prefix: PrefixCache | None) -> None:
        super().__init__(inner)
        self._prefix = prefix

    def _begin(self) -> None:
        if self._prefix is not None:
            self._prefix.turn()

    def _hold(self, item: Submission) -> Staged | None:
        return None if self._prefix is None else self._prefix.coming(item)

    def _is_ready(self, item: Submission, wanted: Staged) -> bool:
        assert self._prefix is not None
        is_late = item.deadline_ns is not None and item.deadline_ns <= self._prefix.now_ns()
        return is_late or self._prefix.is_due(wanted.load)

    def _let_go(self, item: Submission, wanted: Staged) -> Submission:
        assert self._prefix is not None
        self._prefix.came(item.request_id, wanted)
        return item

    def wait(self, timeout_ns: int | None) -> None:
        """Sleep until something arrives, pages are to be looked at, or the time has passed."""
        if self._prefix is not None:
            due = self._prefix.next_turn_ns
            if due is not None:
                left = max(0, due - self._prefix.now_ns())
                timeout_ns = left if timeout_ns is None else min(timeout_ns, left)
        super().wait(timeout_ns)
