"""The law of the torch side, and mutants of it: each must turn the law red.

The law: a long prompt is parked inside EXPERTS of random layers while other requests run, one
program raises on the way, and every stream keeps the bits that it has alone.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from qllm import QLLMEngine, QllmError, SamplingParams
from qllm.plan import CutRule
from qllm.runner.layers import attention, experts
from qllm.runner.runner import TorchRunner
from qllm.scheduler.program import Index, Op, OpKind, Program
from tests.support.families import DTYPES, TOP_K, VOCAB, make_model
from tests.support.inside import loop_of, runner_of

CUTS = CutRule(
    max_cost=16.0,
    attn_cost_per_kv=0.01,
    min_block=4,
    max_block=8,
    glue_block=8,
    dense_block=8,
    expert_block=4,
)
GREEDY = SamplingParams(temperature=0, logprobs=0, ignore_eos=True)
NUM_LS = 3
Streams = list[tuple[tuple[int, ...], tuple[float, ...]]]


def prompt_of(n: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (n,), generator=generator).tolist()


LONG = prompt_of(50, 1)
SHORT = [prompt_of(6, 2 + i) for i in range(NUM_LS)]


class InjectedError(RuntimeError):
    """Raised on purpose."""


def run(*, disturbed: bool) -> Streams:
    """The streams of the long prompt and the short ones; one program at a time holds each."""
    model = make_model("mixtral", DTYPES["fp32"])
    with QLLMEngine.from_model(
        model, conformance=False, threads=1, policy_settings={"ride_frac": 0.0}
    ) as engine:
        runner = runner_of(engine)
        runner.backend.cuts = loop_of(engine).scheduler.cuts = CUTS
        object.__setattr__(runner.backend.costs, "range_ns", 0.5)
        handles = []
        count = 0

        def disturb(program: Program, index: Index, begin: int, end: int) -> None:
            nonlocal count
            count += 1
            if 0 not in program.request_ids:
                return
            inside = program.ops[index.op].kind is OpKind.EXPERTS and index.pos > 0
            if inside and len(handles) <= NUM_LS and count > 40 * len(handles):
                handles.append(engine.submit(SHORT[len(handles) - 1], "LS", 3, sampling=GREEDY))
            # in a decode pass: a retried prefill would hide what went wrong before
            if inside and program.num_tokens == 1 and program.rows[0].lo > len(LONG) and count > 0:
                count = -(10**9)
                raise InjectedError

        if disturbed:
            engine.call(lambda: setattr(runner, "on_segment", disturb))
        handles.append(engine.submit(LONG, "BE", 6, sampling=GREEDY))
        if not disturbed:
            for ids in SHORT:
                handles[-1].result(300)
                handles.append(engine.submit(ids, "LS", 3, sampling=GREEDY))
        results = [handles[0].result(300)]
        results += [h.result(300) for h in handles[1:]]
    if disturbed:
        assert count < 0, "the fault was never injected"
        assert results[0].metrics.preemptions >= 2
        assert len(results) == 1 + NUM_LS
        redone = [r.metrics.retry_recomputed_tokens for r in results]
        if redone != [1, 0, 0, 0]:  # I1 was noticed, and a retry healed it
            raise QllmError(f"recomputed {redone} tokens")
    return [(r.token_ids, tuple(x.chosen for x in r.logprobs or ())) for r in results]


@pytest.fixture(scope="module")
def alone() -> Streams:
    return run(disturbed=False)


def law_holds(alone: Streams) -> bool:
    try:
        return run(disturbed=True) == alone
    except QllmError:
        return False


def test_the_law_holds_unmutated(alone: Streams) -> None:
    assert run(disturbed=True) == alone
    assert all(len(set(tokens)) > 1 for tokens, _ in alone)


Patch = Callable[[pytest.MonkeyPatch], None]
MUTANTS: list[Patch] = []


def mutant(patch: Patch) -> Patch:
    MUTANTS.append(patch)
    return patch


@mutant
def drop_an_expert(patch: pytest.MonkeyPatch) -> None:
    real = experts.TorchBank._matmul

    def matmul(self: Any, *args: Any) -> None:
        real(self, *args)
        units, out = args[-2:]
        for unit in units:
            if unit.expert == 3:
                out[unit.lo - units[0].lo : unit.hi - units[0].lo] = 0

    patch.setattr(experts.TorchBank, "_matmul", matmul)


@mutant
def count_an_expert_as_done_without_running_it(patch: pytest.MonkeyPatch) -> None:
    real = experts.Work.run

    def skip(self: Any, x_TD: Tensor, start: int, stop: int) -> int:
        rows = real(self, x_TD, start, stop)
        if start == 2:
            self.slots_SD[self.units[start].lo : self.units[stop - 1].hi] = 0
        return rows

    patch.setattr(experts.Work, "run", skip)


@mutant
def swap_two_rows(patch: pytest.MonkeyPatch) -> None:
    real = experts.Work.__init__

    def init(self: Any, bank: Any, ids_TK: Tensor, unit_rows: int) -> None:
        real(self, bank, ids_TK, unit_rows)
        if self._inverse is not None:
            a, b = TOP_K, 2 * TOP_K
            order = torch.arange(self._inverse.shape[0])
            order[0:a], order[a:b] = torch.arange(a, b), torch.arange(a)
            self._inverse = self._inverse[order]

    patch.setattr(experts.Work, "__init__", init)


@mutant
def skip_the_routing_weight(patch: pytest.MonkeyPatch) -> None:
    real = experts.Work.combine

    def combine(self: Any, lo: int, hi: int, weights_TK: Tensor, dtype: torch.dtype) -> Tensor:
        return real(self, lo, hi, torch.full_like(weights_TK, 1 / TOP_K), dtype)

    patch.setattr(experts.Work, "combine", combine)


@mutant
def sum_the_slots_in_another_order(patch: pytest.MonkeyPatch) -> None:
    def combine(self: Any, lo: int, hi: int, weights_TK: Tensor, dtype: torch.dtype) -> Tensor:
        a, b = lo * self.top_k, hi * self.top_k
        slots = self.slots_SD if self._inverse is None else self.slots_SD[self._inverse[a:b]]
        weighted = (slots * weights_TK[lo:hi].reshape(-1, 1)).view(hi - lo, self.top_k, -1)
        return weighted.flip(1).sum(dim=1).to(dtype)

    patch.setattr(experts.Work, "combine", combine)


def _resume_late(patch: pytest.MonkeyPatch, *, hide: bool) -> None:
    real_run, real_experts = TorchRunner.run, TorchRunner._experts

    def run_(self: Any, program: Program, start: Index, stop: Any) -> Index:
        self.resumed_at = start if start.pos else None
        return real_run(self, program, start, stop)

    def experts_(self: Any, frame: Any, op: Op, pos: int) -> int:
        if self.resumed_at is not None and pos == self.resumed_at.pos:
            self.resumed_at = None
            units = frame.layer.work.units
            if pos + 1 < len(units):
                if hide:
                    _, lo, hi = units[pos]
                    frame.slots_done += hi - lo
                    frame.layer.work.done[pos] = 1
                    # else the memory may hold what an equal stream put there before
                    frame.layer.work.slots_SD[lo:hi] = 7.0
                pos += 1
        return real_experts(self, frame, op, pos)

    patch.setattr(TorchRunner, "run", run_)
    patch.setattr(TorchRunner, "_experts", experts_)


@mutant
def resume_one_expert_unit_late(patch: pytest.MonkeyPatch) -> None:
    _resume_late(patch, hide=False)


@mutant
def resume_one_expert_unit_late_and_hide_it(patch: pytest.MonkeyPatch) -> None:
    _resume_late(patch, hide=True)


@mutant
def commit_kv_early(patch: pytest.MonkeyPatch) -> None:
    real = TorchRunner._attn

    def attn(self: Any, frame: Any, op: Op, *rest: Any) -> Any:
        out = real(self, frame, op, *rest)
        for r in frame.program.groups[op.group]:
            row = frame.program.rows[r]
            self.requests[row.request_id].kv.committed = row.hi
        return out

    patch.setattr(TorchRunner, "_attn", attn)


@mutant
def lose_the_last_query_block_of_a_cut(patch: pytest.MonkeyPatch) -> None:
    real = TorchRunner._attn

    def attn(self: Any, frame: Any, op: Op, *rest: Any) -> Any:
        out = real(self, frame, op, *rest)
        if op.lo and frame.x_TD is not None and op.hi == frame.x_TD.shape[0]:
            frame.layer.mid_TD[op.lo : op.hi] = frame.x_TD[op.lo : op.hi]
        return out

    patch.setattr(TorchRunner, "_attn", attn)


@mutant
def attend_one_token_too_few(patch: pytest.MonkeyPatch) -> None:
    real = attention._one

    def one(module: Any, step: Any, q: Tensor, kv: Any, span: Any, *rest: Any) -> Tensor:
        if span.hi - span.lo == 1 and span.hi > 2:
            kv = (kv[0][:, :, 1:], kv[1][:, :, 1:])
        return real(module, step, q, kv, span, *rest)

    patch.setattr(attention, "_one", one)


@pytest.mark.parametrize("patch", MUTANTS, ids=lambda p: p.__name__)
def test_a_mutant_turns_the_law_red(
    patch: Patch, alone: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch(monkeypatch)
    assert not law_holds(alone)
