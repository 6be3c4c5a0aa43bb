"""QLLM as published: four queues, Algorithm 1, preemption at expert boundaries.

The next batch is, in this order: a full batch of LS decodes; LS prefills filled up with BE
prefills; LS decodes filled up with BE decodes; BE decodes; BE prefills. A running batch without LS
requests stops at the next boundary when an LS request arrives, and resumes when no LS work is left.

Source: QLLM, arXiv:2503.09304, Algorithm 1. The order of batches does not differ. So BE prefill
starves behind BE decodes as in the paper, and LS decodes stall while LS prompts wait, whatever the
targets. Differences: KV and token budgets hold; a stopped batch is resumed explicitly, with the
routing weights applied.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from qllm.errors import ConfigError
from qllm.plan import NO_STOP, Plan, Row
from qllm.policy import RequestView, View, next_row
from qllm.types import Cap, Grain, Priority


@dataclass(frozen=True, kw_only=True)
class Qllm:
    """Algorithm 1 of the paper, unchanged."""

    needs = Cap.YIELD_EXPERT | Cap.YIELD_LAYER

    max_batch: int = 32
    """Most requests per batch (B)."""

    def __post_init__(self) -> None:
        if self.max_batch < 1:
            raise ConfigError(f"max_batch={self.max_batch!r} must be an integer >= 1")

    def plan(self, view: View) -> Plan:
        """Return Algorithm 1's next batch, or the parked batch when no LS work is left."""
        free = [r for r in view.requests if r.frame_id is None]
        ls = [r for r in free if r.priority <= Priority.LS]
        for frame in view.frames:
            # a frame with LS rows was stopped by a timeout
            if not ls or self._has_ls(view, frame.rows):
                return self._plan(view, frame.rows)
        be = [r for r in free if r.priority > Priority.LS]
        ls_decode, ls_prefill = _decodes(ls), _prefills(ls)
        be_decode, be_prefill = _decodes(be), _prefills(be)
        order = [
            (ls_prefill, be_prefill),
            (ls_decode, be_decode),
            (be_decode, []),
            (be_prefill, []),
        ]
        if len(ls_decode) >= self.max_batch:
            order.insert(0, (ls_decode, []))
        batches = (self._take(view, first, fill) for first, fill in order if first)
        rows: Sequence[Row] = next((rows for rows in batches if rows), ())
        if not rows and view.frames:
            rows = view.frames[0].rows
        elif not rows:  # the KV is full of prefills: the first prefill continues and evicts
            rows = [next_row(r, view, view.max_step_tokens) for r in free if r.is_admitted][:1]
        return self._plan(view, rows)

    def _plan(self, view: View, rows: Iterable[Row]) -> Plan:
        rows = tuple(rows)
        stop_below = NO_STOP if self._has_ls(view, rows) else Priority.LS + 1
        return Plan(rows=rows, grain=Grain.EXPERT, stop_below=stop_below)

    def _has_ls(self, view: View, rows: Iterable[Row]) -> bool:
        return any(view.by_id[row.request_id].priority <= Priority.LS for row in rows)

    def _take(self, view: View, first: list[RequestView], fill: list[RequestView]) -> list[Row]:
        rows: list[Row] = []
        tokens, room = view.max_step_tokens, view.num_free_blocks
        blocked = False
        held = view.blocks_freed(r for r in view.requests if r.priority > Priority.LS)
        for request in (*first, *fill):
            if len(rows) >= min(self.max_batch, view.max_num_seqs):
                break
            row = next_row(request, view, max(1, tokens))
            need = view.blocks_needed(row)
            spare = room + (held if request.priority <= Priority.LS else 0)
            if not request.is_decoding:
                if rows and (row.num_tokens > tokens or need > spare):
                    break
                if need > spare or (blocked and not request.is_admitted):
                    blocked = True  # requests that hold KV continue
                    continue
            rows.append(row)
            room -= need
            tokens -= 0 if request.is_decoding else row.num_tokens
        return rows


def _decodes(requests: Iterable[RequestView]) -> list[RequestView]:
    return [r for r in requests if r.is_decoding]


def _prefills(requests: Iterable[RequestView]) -> list[RequestView]:
    return [r for r in requests if not r.is_decoding]
