"""The debt of time to BE while LS has work, and the plan that pays the debt (`qllm.floor`).

    LS has work, BE could run       the debt grows with the time
    BE ran                          the debt shrinks, not below zero
    BE ran to pay the debt          the debt shrinks by the whole run, if necessary below zero
    BE cannot run, or LS is idle    the debt stays

So runs of BE while LS is idle pay nothing. The debt does not grow while BE is paused, waits for its
prompt, or lacks KV. A slice of BE evicts no request; only the policy's plans evict. A class is BE
if its number is larger than that of LS, whatever tier the policy gives the class.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from qllm.floor import MILLION, Floor
from qllm.plan import NO_STOP, Plan, Row
from qllm.policy import FrameView, RequestView, View, next_row
from qllm.scheduler.batch import Batch, fitting_tokens
from qllm.scheduler.compile import align_rows
from qllm.types import Cap, Grain, Priority


class Owed(NamedTuple):
    """The debt of time to BE, and the times that both classes have had."""

    owed_ns: int = 0
    since_ns: int = 0
    """Time of the last decision."""
    ls_has_work: bool = False
    """True if LS had work at the last decision."""
    grows: bool = False
    """True if BE could run at that decision too. The debt then grows until the next decision."""
    pays: bool = False
    """True if the BE floor chose the present run."""
    ls_ns: int = 0
    be_ns: int = 0
    """Time of both classes so far. A run that both classes share is divided by their tokens."""
    paid_ns: int = 0
    """Time of the runs that the BE floor chose."""


class BeShare:
    """The account of BE's time.

    It counts the debt, and returns a plan of BE when a slice is due.
    """

    def __init__(self, floor: Floor) -> None:
        self.floor = floor
        self.now = Owed()

    def rest(self, now_ns: int) -> None:
        """Count a decision at which no request has work."""
        self._pass(now_ns)
        self.now = self.now._replace(ls_has_work=False, grows=False)

    def turn(self, view: View, policy: Any) -> Plan | None:
        """Count the time up to a decision; return a plan of BE if a slice is owed.

        Args:
            view: State as policies see it.
            policy: Policy of the other plans. If this policy never stops a step, BE's steps run
                whole too.
        """
        if not self.floor.rate:
            return None
        self._pass(view.now_ns)
        ls_has_work = any(r.priority <= Priority.LS for r in view.requests)
        turn = _Turn(view, policy.needs, self.floor.slice_ns)
        grows = ls_has_work and turn.is_possible
        self.now = self.now._replace(ls_has_work=ls_has_work, grows=grows)
        if self.now.owed_ns > 0 and not any(map(_is_be, view.by_id.values())):
            self.now = self.now._replace(owed_ns=0)  # no request of BE is left
        return turn.a_slice() if grows and self.now.owed_ns >= self.floor.slice_ns else None

    def cut(self, plan: Plan, view: View) -> Plan:
        """Shorten a plan of the policy, so that it ends when a slice of BE is due."""
        if not self.now.grows:
            return plan
        left_ns = -((self.now.owed_ns - self.floor.slice_ns) * MILLION // self.floor.rate)
        if plan.is_empty and plan.wait_until_ns is not None:
            return replace(plan, wait_until_ns=min(plan.wait_until_ns, view.now_ns + left_ns))
        if plan.grain == Grain.STEP or all(map(_is_be, _planned(plan, view))):
            return plan
        slices = [left_ns] if plan.slice_ns is None else [left_ns, plan.slice_ns]
        return replace(plan, slice_ns=max(1, min(slices)))

    def starts(self, *, pays: bool) -> None:
        """Record that a run starts. `pays` is True if the run is the plan of `turn`."""
        self.now = self.now._replace(pays=pays)

    def ran(self, requests: Sequence[tuple[RequestView, Row]], elapsed_ns: int) -> None:
        """Count a run in which these rows, with their requests, took part."""
        tokens = sum(row.num_tokens for _, row in requests)
        be_tokens = sum(row.num_tokens for r, row in requests if _is_be(r))
        be_ns = elapsed_ns * be_tokens // tokens if tokens else 0
        now, owed_ns = self.now, self.now.owed_ns
        if now.pays:
            owed_ns -= elapsed_ns
        elif now.ls_has_work:
            owed_ns = max(owed_ns - be_ns, min(owed_ns, 0))
        self.now = now._replace(
            owed_ns=owed_ns,
            pays=False,
            ls_ns=now.ls_ns + (elapsed_ns - be_ns if tokens else 0),
            be_ns=now.be_ns + be_ns,
            paid_ns=now.paid_ns + elapsed_ns * now.pays,
        )

    def _pass(self, now_ns: int) -> None:
        """Count the time since the last decision, at most one window of the floor."""
        now, (rate, window_ns, _) = self.now, self.floor
        elapsed_ns = now_ns - now.since_ns
        lost_ns = elapsed_ns if now.pays else 0  # the run raised
        owed_ns = now.owed_ns - lost_ns
        if now.grows:
            owed_ns += min(elapsed_ns, window_ns) * rate // MILLION
        self.now = now._replace(
            owed_ns=min(owed_ns, window_ns * rate // MILLION),
            since_ns=now_ns,
            pays=False,
            paid_ns=now.paid_ns + lost_ns,
        )


def _is_be(request: RequestView) -> bool:
    return request.priority > Priority.LS


def is_be_alone(plan: Plan, view: View) -> bool:
    """Return True if a plan has rows, and all of them are of BE."""
    planned = _planned(plan, view)
    return bool(planned) and all(map(_is_be, planned))


def _planned(plan: Plan, view: View) -> list[RequestView]:
    """Return the requests of a plan, without unknown requests."""
    return [view.by_id[row.request_id] for row in plan.rows if row.request_id in view.by_id]


class _Turn:
    """The work that BE could do now: a parked frame of BE, else BE's decodes and prefills."""

    def __init__(self, view: View, needs: Cap, slice_ns: int) -> None:
        self.view = view
        self.slice_ns = slice_ns
        self.grain = min(_grain_of(needs), view.finest_grain)
        self.by_layers = bool(needs & Cap.LAYER_RANGE)

    @property
    def is_possible(self) -> bool:
        """True if BE could run now."""
        return bool(self._frames()) or next(self._loose(), None) is not None

    def a_slice(self) -> Plan:
        """Return the plan of one slice of BE. No arrival stops the slice."""
        frames = self._frames()
        own = next((f for f in frames if all(map(self._is_be, f.rows))), None)
        rows = own.rows if own is not None else tuple(self._loose()) or frames[0].rows
        return Plan(rows=rows, grain=self.grain, stop_below=NO_STOP, slice_ns=self.slice_ns)

    def _is_be(self, row: Row) -> bool:
        return _is_be(self.view.by_id[row.request_id])

    def _frames(self) -> list[FrameView]:
        """Return parked frames with rows of BE, oldest first."""
        return [f for f in self.view.frames if any(map(self._is_be, f.rows))]

    def _loose(self) -> Iterator[Row]:
        """Yield rows of BE outside of frames, as far as there are seats, tokens and free KV.

        Decodes come first, least recent progress first. Prefills follow: first those of requests
        with KV, then the oldest of the best class. After a prefill that lacks KV, no further
        request without KV follows.
        """
        view, be = self.view, [r for r in self.view.requests if _is_be(r) and r.frame_id is None]
        batch = Batch(view, fitting_tokens(view, self.grain, self.slice_ns))
        decodes = [r for r in be if r.is_decoding]
        for r in sorted(decodes, key=lambda r: (r.last_progress_ns, r.request_id)):
            row = next_row(r, view)
            if batch.seats and batch.need(r, row) <= batch.free_blocks:
                batch.take(r, row)
                yield row
        others = [r for r in be if not r.is_decoding]
        others.sort(key=lambda r: (not r.is_admitted, r.priority, r.arrival_ns, r.request_id))
        for r in others:
            if not batch.seats or batch.tokens <= 0:
                break
            row = self._piece(next_row(r, view, batch.tokens))
            (aligned,) = align_rows([row], view.by_id, view.cuts)
            need = batch.need(r, aligned)
            if need <= batch.free_blocks:
                batch.take_prefill(r, row)
                batch.free_blocks -= need - batch.need(r, row)
                yield row
            elif not r.is_admitted:
                break

    def _piece(self, row: Row) -> Row:
        """Return a row with as many layers as fit a slice, if no slice can stop the row's step."""
        num_layers = self.view.shape.num_layers
        if self.grain > Grain.STEP or not self.by_layers or not row.start_layer:
            return row
        whole_ns = max(1, row.num_tokens * self.view.costs.prefill_token_ns)
        layers = max(1, self.slice_ns * num_layers // whole_ns)
        return row._replace(end_layer=min(row.end_layer, row.start_layer + layers))


def _grain_of(needs: Cap) -> Grain:
    """Return the finest grain of a policy's plans."""
    if needs & Cap.YIELD_EXPERT:
        return Grain.EXPERT
    return Grain.LAYER if needs & Cap.YIELD_LAYER else Grain.STEP
