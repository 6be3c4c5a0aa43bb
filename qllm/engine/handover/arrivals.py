"""An ingress that delays migrated requests until their KV has arrived, or is late."""

import time
from concurrent.futures import Future
from dataclasses import dataclass

from qllm.engine.costs import StepCosts
from qllm.engine.delayed import HoldingIngress, Inbox
from qllm.engine.handover.handover import Brought, HandOver
from qllm.errors import ConfigError
from qllm.ingress import LOOK, Submission
from qllm.ingress.messages import Source
from qllm.types import NS_PER_S, RequestId

SLACK_NS = 2 * NS_PER_S
"""Shortest time until KV counts as late. If computing the KV takes longer, that time is the
limit."""
EXPECT_S = 60.0
"""Seconds after which an announced request is no longer expected."""
MAX_EXPECTED = 4096
"""Limit of announced requests at one time."""


@dataclass(slots=True)
class Coming:
    """The KV of a request while it is fetched."""

    late_ns: int
    """Time at which the request stops waiting."""
    is_wanted: bool = True
    work: Future[Brought] | None = None


class HandedIngress(HoldingIngress[Coming]):
    """A transport that delays requests while their KV is fetched from another engine.

    Args:
        inner: The transport.
        costs: Costs of computing KV, which set the time at which KV is late.
    """

    def __init__(self, inner: Inbox, costs: StepCosts) -> None:
        super().__init__(inner)
        self._costs = costs
        self.handover: HandOver | None = None
        """Fetcher of KV, set before requests arrive. If None, no request comes with KV."""
        self._expected: dict[RequestId, tuple[Source, float]] = {}

    @property
    def giving(self) -> HandOver:
        """The hand-over that migrates requests to other engines.

        Raises:
            ConfigError: This engine has no hand-over (`handover_gib=0`).
        """
        if self.handover is None:
            raise ConfigError("this engine hands nothing over: handover_gib=0")
        return self.handover

    def expect(self, request_id: RequestId, source: Source) -> None:
        """Announce a request and the place of its KV. Callable from any thread.

        Raises:
            ConfigError: This engine fetches no KV.
        """
        if not self.giving.can_fetch:
            raise ConfigError("this engine meets no others to take KV from (listen)")
        now = time.monotonic()
        for number, (_, since_s) in list(self._expected.items()):
            if now - since_s > EXPECT_S or len(self._expected) >= MAX_EXPECTED:
                self._expected.pop(number, None)
        self._expected[request_id] = source, now

    def has_kv(self, request_id: RequestId) -> bool:
        """Return True if the KV of a request that arrives now has come."""
        return self.handover is not None and request_id in self.handover.brought

    def _begin(self) -> None:
        if self.handover is not None:
            self.handover.brought.clear()  # of requests that were refused

    def _hold(self, item: Submission) -> Coming | None:
        source, _ = self._expected.pop(item.request_id, (None, 0.0))
        if source is None or item.wrong is not None:
            return None
        assert self.handover is not None
        now_ns = self.handover.now_ns()
        coming = Coming(now_ns + max(SLACK_NS, self._costs.prefill_ns(len(item.token_ids))))
        coming.work = self.handover.fetch(item, source, lambda: coming.is_wanted)
        coming.work.add_done_callback(lambda _: self._inner.put(LOOK))
        return coming

    def _is_ready(self, item: Submission, wanted: Coming) -> bool:
        assert self.handover is not None
        assert wanted.work is not None
        now_ns = self.handover.now_ns()
        is_late = now_ns >= min(wanted.late_ns, item.deadline_ns or wanted.late_ns)
        return wanted.work.done() or is_late

    def _let_go(self, item: Submission, wanted: Coming) -> Submission:
        assert self.handover is not None
        assert wanted.work is not None
        wanted.is_wanted = False
        if wanted.work.cancel() or not wanted.work.done():
            self.handover.missed("it is late")
        elif (error := wanted.work.exception()) is not None:
            self.handover.missed(f"{type(error).__name__}: {error}")
        else:
            self.handover.brought[item.request_id] = wanted.work.result()
        return item

    def wait(self, timeout_ns: int | None) -> None:
        """Sleep until something arrives, KV is late, or the time has passed."""
        if self._held:
            assert self.handover is not None
            due_ns = min(wanted.late_ns for _, wanted in self._held.values())
            left_ns = max(0, due_ns - self.handover.now_ns())
            timeout_ns = left_ns if timeout_ns is None else min(timeout_ns, left_ns)
        super().wait(timeout_ns)
