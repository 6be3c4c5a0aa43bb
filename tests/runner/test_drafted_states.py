"""States of rows that verify drafted tokens: of accepted tokens, and never of a rejected one."""

import math
import random
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from qllm.errors import InvariantError
from qllm.kernels import cpu
from qllm.models.hybrid import LightningState
from qllm.plan import Plan, Row
from qllm.runner.runner import TorchRunner
from qllm.runner.states import States
from qllm.scheduler.compile import compile_program
from qllm.scheduler.program import START, Index, Program
from qllm.types import Grain
from tests.support.drafters import poison_rejected
from tests.support.hybrids import NATIVE, VOCAB, make_hybrid
from tests.support.stops import add_prompts, pair, run_in_pieces
from tests.support.sweeps import Asked, Watched, kv_of

assert cpu.MISSING is None, cpu.MISSING
LAYERS = range(2)


@pytest.fixture(autouse=True)
def _rejected_states_are_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_rejected(monkeypatch)


# -- states of numbers: the state after a token is the sum of all positions so far


def new_state() -> LightningState:
    state = LightningState()
    state.value = torch.zeros(1)
    return state


def rerun(before: LightningState, given_TW: Tensor, after: LightningState) -> None:
    assert before is not after
    assert before.value is not None
    assert after.value is not None
    after.value.fill_(float(before.value) + float(given_TW.float().sum()))


def run(states: States, layer: int, lo: int, hi: int, committed: int) -> None:
    """As a kernel that copies the inputs of drafted tokens."""
    before, after = states.advance(layer, lo, committed, new_state)
    inputs = states.inputs(layer, committed, 1, rerun)
    for a, b in pairwise(states.stops(lo, hi)):
        if a > lo:
            before, after = after, new_state()
        if inputs is not None:
            inputs[a - committed : b - committed, 0] = torch.arange(a, b)
        after.value.fill_((0.0 if before is None else float(before.value)) + sum(range(a, b)))
        states.put(layer, b, after, committed)


@pytest.mark.parametrize("seed", range(40))
def test_any_row_leaves_the_state_of_its_last_accepted_token(seed: int) -> None:
    """Rows are cut, dropped and begun again. Some positions are marked, some states are lent."""
    rng, states, lent = random.Random(seed), States(), {}
    states.begin(10, 10)
    for layer in LAYERS:
        run(states, layer, 0, 10, 0)
    committed = 10
    for _ in range(40):
        num_drafts = rng.randrange(6)
        hi = committed + 1 + num_drafts
        states.begin(committed + 1, hi)
        states.marks |= {p for p in range(committed + 1, hi + 2) if rng.random() < 0.2}
        cuts = [committed, *(p for p in range(committed + 1, hi) if rng.random() < 0.2), hi]
        num_done = rng.choice((0, 1, 2, 2, 2))
        for layer, (lo, end) in product(LAYERS[:num_done], pairwise(cuts)):
            run(states, layer, lo, end, committed)
        assert not positions(states) & {*range(committed + 2, hi + 1)} or not num_drafts
        if num_done < 2:  # the row is dropped
            states.commit(committed)
            continue
        committed += 1 + rng.randrange(num_drafts + 1)
        states.commit(committed)
        assert len(states.tensors()) <= len(LAYERS) * (3 + len(states.marks))
        passed = sorted(p for p in states.marks if p <= committed)
        lent |= {p: found for p in passed if (found := states.lend(p)) is not None}
        if rng.random() < 0.3:
            kept = states.export()
            sums = [float(kept[f"state.{layer}.{committed}.value"]) for layer in LAYERS]
            assert sums == [sum(range(committed))] * 2
    assert lent
    for p, found in lent.items():
        assert [float(found[layer].value) for layer in LAYERS] == [sum(range(p))] * 2


def positions(states: States) -> set[int]:
    """Positions of the states that leave the engine."""
    return {int(name.split(".")[2]) for name in states.export()}


@pytest.mark.parametrize("accepted", [6, 8])
def test_a_state_is_lent_also_if_it_is_owed(accepted: int) -> None:
    states = States()
    for layer in LAYERS:
        run(states, layer, 0, 4, 0)
    states.begin(5, 8)
    for layer in LAYERS:
        run(states, layer, 4, 8, 4)
    states.commit(accepted)
    lent = states.lend(accepted)
    assert lent is not None
    assert [float(lent[layer].value) for layer in LAYERS] == [sum(range(accepted))] * 2


def test_a_layer_without_inputs_refuses_to_go_back() -> None:
    states = States()
    states.begin(1, 3)
    states.put(0, 3, new_state(), 0)
    with pytest.raises(InvariantError, match=r"layer 0 cannot go back to position 2 \(I9\)"):
        states.commit(2)


def test_inputs_take_no_memory_after_their_row() -> None:
    states = States()
    for layer in LAYERS:
        run(states, layer, 0, 4, 0)
    at_rest = states.num_bytes
    states.begin(5, 8)
    for layer in LAYERS:
        run(states, layer, 4, 8, 4)
    assert states.num_bytes == at_rest + len(LAYERS) * (4 + 4 * 2)
    states.commit(8)
    assert states.num_bytes == 2 * at_rest


# -- models


def verifying(runner: TorchRunner, drafts: dict[int, list[int]]) -> Program:
    """The program of rows that verify drafts."""
    rows, layers = [], runner.shape.num_layers
    for request, ids in drafts.items():
        runner.draft(request, ids)
        lo, known = runner.num_committed(request), len(runner.token_ids(request))
        rows.append(Row(request, lo, known + len(ids), 0, layers))
    plan = Plan(rows=tuple(rows), grain=Grain.EXPERT, stop_below=5)
    samples = [1 + len(ids) for ids in drafts.values()]
    number = max(runner.frames, default=9000) + 1
    made = compile_program(
        plan, frame_id=number, samples=samples, shape=runner.shape, cuts=runner.cuts
    )
    runner.accept(made)
    return made


def streams(runner: TorchRunner, num: int) -> list[dict[int, dict[str, Tensor]]]:
    """Decode without drafts; return the states of each request by the number of its tokens."""
    found: list[dict[int, dict[str, Tensor]]] = [{}, {}]
    for _ in range(num):
        program = verifying(runner, {0: [], 1: []})
        assert runner.run(program, START, Watched()) == program.end
        runner.finish(program)
        for request in (0, 1):
            at = runner.num_committed(request)
            found[request][at] = states_of(runner, request)
    return found


def states_of(runner: TorchRunner, request: int) -> dict[str, Tensor]:
    """The states after the committed tokens."""
    at, tensors = runner.num_committed(request), kv_of(runner, request, runner.shape.num_layers)
    return {
        name: t for name, t in tensors.items() if name.startswith("state.") and f".{at}." in name
    }


def places(runner: TorchRunner, request: int) -> set[int]:
    """Positions of a request's states from the committed one on."""
    at = runner.num_committed(request)
    return {p for p in positions(runner.requests[request].kv.states) if p >= at}


def run_to_layer(runner: TorchRunner, program: Program, layer: int) -> Index:
    """Run task by task, up to the first op of a layer."""
    at = START
    while program.ops[at.op].layer < layer:
        at = runner.run(program, at, Asked(1))
    return at


def guess(rng: random.Random, right: list[int]) -> list[int]:
    """Up to four tokens, of which some are wrong."""
    ids = right[: rng.randrange(5)]
    return [i if rng.random() < 0.7 else (i + 1) % VOCAB for i in ids]


@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize("kernels", cpu.native.available())
@pytest.mark.parametrize("family", NATIVE)
@pytest.mark.usefixtures("one_thread")
def test_states_are_those_without_drafts_whatever_task_a_row_stops_at(
    family: str, kernels: str, fine: bool
) -> None:
    """Every other row is dropped inside, and begun again."""
    plain, runner = pair(make_hybrid(family))
    cpu.native.use(kernels)
    rng = random.Random(5)
    for one in (plain, runner):
        if fine:
            one.backend.cuts = one.cuts._replace(max_cost=3.0, min_block=1, max_block=2)
        add_prompts(one, (21, 6))
    states = streams(plain, 8)
    counts, turn, drops = [0, 0], 0, 0
    while min(len(runner.token_ids(i)) - n for i, n in enumerate((21, 6))) < 4:
        drafts = {}
        for i, n in enumerate((21, 6)):
            known = len(runner.token_ids(i))
            room = max(0, n + 8 - known - 1)
            drafts[i] = guess(rng, plain.token_ids(i)[known:][:room]) if known > n else []
        program = verifying(runner, drafts)
        turn += 1
        if turn % 2 and any(drafts.values()):  # begun, and dropped
            left = run_to_layer(runner, program, 2)
            assert program.end > left > START
            drops += 1
            runner.drop(program)
            program = verifying(runner, {0: [], 1: []})
            for i in (0, 1):
                assert places(runner, i) == {runner.num_committed(i)}
            runner.drop(program)
            continue
        run_in_pieces(runner, program, 1)
        runner.finish(program)
        for i, ids in drafts.items():
            at, known = runner.num_committed(i), runner.token_ids(i)
            assert known == plain.token_ids(i)[: len(known)]
            counts[0] += at - (len(known) - 1) == 0 and bool(ids)
            counts[1] += len(ids)
            if rng.random() < 0.5:
                expected = states[i][at]
                found = states_of(runner, i)
                assert expected
                assert found.keys() == expected.keys()
                assert all(torch.equal(found[name], t) for name, t in expected.items())
                assert not any(math.isnan(float(t.float().sum())) for t in found.values())
    assert min(*counts, drops) > 0
