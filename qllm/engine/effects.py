"""Effects of a decision on the runner before its program runs, and the events that record them."""

from collections.abc import Callable, Sequence
from typing import Any

from qllm.engine.kv.prefix import PrefixCache
from qllm.record import trace
from qllm.runner.protocol import Runner
from qllm.scheduler.decision import (
    Accept,
    Drop,
    Effect,
    EvictKv,
    Kill,
    Leave,
    Split,
    SwapIn,
    SwapOut,
)
from qllm.scheduler.program import Program


class Effects:
    """The executor of effects on a runner. It also notifies the prefix cache and the record.

    Args:
        runner: Owner of KV and frames.
        prefix: The prefix cache, or None.
        emit: Receiver of events.
        now_ns: The engine's clock.
    """

    def __init__(
        self,
        runner: Runner,
        prefix: PrefixCache | None,
        emit: Callable[[trace.Event], Any],
        now_ns: Callable[[], int],
    ) -> None:
        self._runner, self._prefix, self._emit, self._now_ns = runner, prefix, emit, now_ns
        self.tokens_out = 0
        """Tokens whose KV was swapped out so far."""
        self.tokens_in = 0
        """Tokens whose KV was swapped in so far."""

    def apply(self, effect: Effect, reason: str = "dead") -> None:
        """Apply one effect. `reason` is recorded if the effect drops a frame."""
        if isinstance(effect, Accept):
            self._accept(effect)
        elif isinstance(effect, SwapOut | SwapIn | EvictKv):
            self._move(effect)
        else:
            self._frame(effect, reason)

    def _accept(self, effect: Accept) -> None:
        now, program = self._now_ns(), effect.program
        self._load(program, effect.tables)
        self._runner.accept(program, effect.tables)
        for old in effect.from_frames:
            self._emit(trace.Replaced(at_ns=now, frame_id=old, by_frame_id=program.frame_id))
        self._emit(trace.planned(program, effect.from_frames, now))

    def _load(self, program: Program, tables: Sequence[Sequence[int]]) -> None:
        """Load the KV that the prefix cache has for requests that got their first blocks."""
        if self._prefix is None:
            return
        for request_id, table in zip(program.request_ids, tables, strict=True):
            if count := self._prefix.load(request_id, table):
                now = self._now_ns()
                self._emit(trace.Reused(at_ns=now, request_id=request_id, num_tokens=count))

    def _move(self, effect: SwapOut | SwapIn | EvictKv) -> None:
        now, request_id = self._now_ns(), effect.request_id
        event: trace.Event
        if isinstance(effect, SwapIn):
            self._runner.swap_in(request_id, effect.table)
            self.tokens_in += effect.num_tokens
            event = trace.SwappedIn(at_ns=now, request_id=request_id, num_tokens=effect.num_tokens)
        elif isinstance(effect, SwapOut):
            self._runner.swap_out(request_id)
            self.tokens_out += effect.num_tokens
            event = trace.SwappedOut(
                at_ns=now,
                request_id=request_id,
                num_tokens=effect.num_tokens,
                for_request=effect.for_request,
            )
        else:
            self._runner.evict(request_id)
            if self._prefix is not None:
                self._prefix.lost(request_id)
            event = trace.Evicted(
                at_ns=now,
                request_id=request_id,
                num_tokens_lost=effect.num_tokens_lost,
                for_request=effect.for_request,
            )
        self._emit(event)

    def _frame(self, effect: Split | Kill | Leave | Drop, reason: str) -> None:
        now, frame_id = self._now_ns(), effect.program.frame_id
        if isinstance(effect, Split):
            self._runner.split(effect.program, effect.at)
            self._emit(trace.Split(at_ns=now, frame_id=frame_id, index=effect.at))
        elif isinstance(effect, Leave):
            who, at = effect.request_id, effect.at
            self._runner.leave(effect.program, who, at)
            self._emit(trace.Left(at_ns=now, frame_id=frame_id, request_id=who, index=at))
        elif isinstance(effect, Kill):
            self._runner.kill(effect.program, effect.request_id)
            killed = trace.Killed(at_ns=now, frame_id=frame_id, request_id=effect.request_id)
            self._emit(killed)
        else:
            self._runner.drop(effect.program)
            self._emit(trace.Dropped(at_ns=now, frame_id=frame_id, reason=reason))
