"""Protocols of the loop's neighbours: a sink for tokens, and a scheduler."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from qllm.errors import PolicyError
from qllm.ingress import Submission
from qllm.policy import CostTable
from qllm.record.metrics import RequestMetrics
from qllm.scheduler.be_share import BeShare
from qllm.scheduler.blame import Blame
from qllm.scheduler.blocks import SwapSpace
from qllm.scheduler.decision import (
    Decision,
    Effect,
    Limits,
    Parked,
)
from qllm.scheduler.program import Index, Program
from qllm.scheduler.request import Request
from qllm.scheduler.rules import Pool
from qllm.types import FinishReason, FrameId, RequestId, Sampled


class Sink(Protocol):
    """The receiver of tokens. Called on the loop's thread, so it must be quick."""

    def on_token(self, sampled: Sampled, at_ns: int) -> bool:
        """Take one token; return True if the answer is complete (a stop string)."""
        ...

    def on_finish(
        self,
        request_id: RequestId,
        reason: FinishReason,
        error: str | None,
        metrics: RequestMetrics | None,
    ) -> None:
        """End a request. Called exactly once per request."""
        ...


class Newcomers(Protocol):
    """The KV of requests that come from another engine."""

    def enter(self, item: Submission, request: Request) -> bool:
        """Add a request with its KV to the runner and the scheduler; return False if no KV came.

        Args:
            item: The request, which the runner has without KV.
            request: The request, which the scheduler does not have yet.
        """
        ...


class Neighbourly(Protocol):
    """The other engines on the same cores, and the pressure that they put on BE."""

    def turn(self, has_ls: bool, now_ns: int) -> None:
        """Tell the others whether this engine has LS work, and apply what they said."""
        ...


class Waits(Protocol):
    """The frames that wait for experts, of a model whose experts are in a file."""

    def ran(self, program: Program, end: Index, start_ns: int, end_ns: int) -> bool:
        """Count the experts that the running program used, and park it if it misses others.

        Args:
            program: Program that ran.
            end: Boundary where the run ended.
            start_ns: Time when the run began.
            end_ns: Time when the run ended.

        Returns:
            True if the program is parked, False if it ended for another reason.
        """
        ...

    def turn(self, now_ns: int) -> Iterator[tuple[Parked, Exception]]:
        """Take finished reads, start others, and offer frames that can run to policies.

        Yields:
            Each frame whose experts cannot be read, with the error. The frame is then the
            scheduler's running frame, which has failed.
        """
        ...

    def sleep(self) -> bool:
        """Wake the loop after the next read; return False if one has ended already."""
        ...

    def next_turn_ns(self, now_ns: int) -> int | None:
        """Return the time of the next turn if no read ends; None if nothing is read."""
        ...


class Deciding(Protocol):
    """The scheduler as the loop uses it: `Scheduler`, or in some tests a scheduler in C++.

    It has many members because the loop uses no other part of the scheduler.
    """

    policy: Any
    costs: CostTable
    limits: Limits

    @property
    def pool(self) -> Pool: ...
    @property
    def swap(self) -> SwapSpace: ...
    @property
    def num_spared(self) -> int: ...
    @property
    def be_share(self) -> BeShare: ...
    @property
    def running(self) -> Parked | None: ...
    @property
    def frames(self) -> dict[FrameId, Parked]: ...
    @property
    def away(self) -> dict[RequestId, Parked]: ...
    @property
    def requests(self) -> dict[RequestId, Request]: ...
    def add(self, request: Request, now_ns: int) -> None: ...
    def remove(self, request_id: RequestId, now_ns: int) -> list[Effect]: ...
    def update(
        self, request_id: RequestId, priority: int | None, paused: bool | None, now_ns: int
    ) -> list[Effect]: ...
    @property
    def open(self) -> set[RequestId]: ...
    def revise(
        self, request_id: RequestId, num_kept: int, num_tokens: int, now_ns: int
    ) -> list[Effect]: ...
    def found(self, request_id: RequestId, num_tokens: int, pages: Sequence[bytes]) -> None: ...
    def adopt(self, request: Request, *, swapped: bool = False) -> None: ...
    def adopt_frame(
        self, program: Program, index: Index, dead: set[RequestId], now_ns: int
    ) -> None: ...
    def new_frame_id(self) -> FrameId: ...
    def draft(self, request_id: RequestId, num_tokens: int, exit_layer: int = 0) -> int: ...
    def add_draft(self, request_id: RequestId) -> bool: ...
    def decide(self, now_ns: int) -> Decision: ...
    def blame(self, error: PolicyError, now_ns: int) -> Blame: ...
    def done(
        self, end: Index, sampled: Sequence[RequestId], start_ns: int, end_ns: int
    ) -> None: ...
    def stopped(self, end: Index, start_ns: int, end_ns: int, *, preempted: bool) -> bool: ...
    def failed(self) -> tuple[list[Effect], list[Request]]: ...
    def evict(self, request_id: RequestId, for_request: RequestId) -> list[Effect]: ...
    def check(self) -> None: ...
