"""The head block by block: greedy rows keep one logit each, and get the same tokens."""

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

from qllm.kernels import cpu
from qllm.kernels.cpu import course
from qllm.plan import Plan, Row
from qllm.runner import choosing
from qllm.runner.cpu import cpu_runner
from qllm.runner.heads import HeadState
from qllm.runner.layers.linears import HEAD_BLOCK, Head, HeadBlocks
from qllm.runner.layers.rows import PLAIN
from qllm.runner.protocol import NEVER
from qllm.runner.runner import TorchRunner
from qllm.scheduler.compile import compile_program
from qllm.scheduler.program import START, Index, OpKind, Program
from qllm.types import Grain, Sampled, SamplingParams
from tests.support.sweeps import Ringing, Watched, count_calls

assert cpu.MISSING is None, cpu.MISSING
VOCAB, WIDTH = 2 * HEAD_BLOCK + 7, 32
GREEDY = SamplingParams(temperature=0)
ASKING = (
    SamplingParams(temperature=0.8, seed=3),
    SamplingParams(temperature=0, logprobs=2),
    SamplingParams(temperature=0, logit_bias={5: 3.0}),
)
KINDS = {"ours": True, "torch": False}


def head_of(weight: Tensor, bias: Tensor | None, *, native: bool) -> Head:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    linear.weight.data = weight
    if bias is not None:
        linear.bias.data = bias
    return Head(linear, nn.Identity(), PLAIN, native, cpu.Arena())


def whole(head: Head, x_BD: Tensor) -> Tensor:
    return torch.cat([head(x_BD, i) for i in range(head.num_blocks)], 1)


def best(head: Head, x_BD: Tensor) -> tuple[list[int], list[float]]:
    state, inside = HeadState(x_BD, range(len(x_BD))), course.Course()
    for block in range(head.num_blocks):
        blocks = HeadBlocks(at=block, end=block + 1, course=inside.address, stop_ns=NEVER)
        state.run(head, blocks, None, 1)
    assert state.blocks == []
    rows, ids, peaks = zip(*state.answers(), strict=True)
    assert rows == tuple(range(len(x_BD)))
    return list(ids), list(peaks)


@pytest.mark.parametrize("native", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("vocab", [3, 16, 21, HEAD_BLOCK, HEAD_BLOCK + 1, VOCAB])
def test_the_best_is_that_of_all_logits(native: bool, vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    weight = torch.randn((vocab, WIDTH), generator=generator).bfloat16()
    bias = torch.randn((vocab,), generator=generator).bfloat16()
    x = torch.randn((9, WIDTH), generator=generator).bfloat16()
    head = head_of(weight, bias, native=native)
    assert ("qllm" in head.kernel) == native
    expected = whole(head, x).float().numpy()
    ids, peaks = best(head, x)
    assert ids == expected.argmax(1).tolist()
    assert peaks == expected.max(1).tolist()
    assert len(set(ids)) > 1


@pytest.mark.parametrize("native", KINDS.values(), ids=KINDS)
def test_the_lowest_id_wins_a_tie_and_nan_wins_everything(native: bool) -> None:
    for name in cpu.native.available():
        cpu.native.use(name)
        x = torch.eye(7, WIDTH).bfloat16()  # row i has logits weight[:, i]
        weight = torch.zeros((VOCAB, WIDTH)).bfloat16()
        for place in (19, HEAD_BLOCK - 1, HEAD_BLOCK, VOCAB - 1):
            weight[place, 0] = 2.0  # a tie inside a block, and across blocks
        weight[:, 1] = -3.0  # all the same
        weight[VOCAB - 1, 2] = 9.0
        ids, peaks = best(head_of(weight, None, native=native), x)
        assert ids[:3] == [19, 0, VOCAB - 1]
        assert peaks[:3] == [2.0, -3.0, 9.0]
        bias = torch.zeros(VOCAB).bfloat16()
        bias[VOCAB - 2] = torch.nan
        ids, peaks = best(head_of(weight, bias, native=native), x)
        assert ids == [VOCAB - 2] * 7
        assert all(math.isnan(peak) for peak in peaks)
    cpu.native.use(cpu.native.available()[0])


@pytest.mark.parametrize("values", [[-torch.inf] * 40, [1.0, torch.inf, torch.nan, 5.0] * 5])
def test_broken_logits_give_a_peak_that_is_not_finite(values: list[float]) -> None:
    row = torch.tensor([values]).bfloat16()
    peaks, ids = torch.full((1,), -torch.inf), torch.zeros(1, dtype=torch.int64)
    for name in cpu.native.available():
        cpu.native.use(name)
        cpu.native.best(peaks.data_ptr(), ids.data_ptr(), row.data_ptr(), 1, len(values), 100)
        found, expected = peaks.item(), row.float().numpy().max()
        assert found == expected or (found != found and expected != expected)
        if found != found:
            assert ids.item() == 102
            cpu.native.best(peaks.data_ptr(), ids.data_ptr(), row.data_ptr(), 1, 1, 0)
            assert ids.item() == 102, "the first NaN stays"
        peaks.fill_(-torch.inf)
    cpu.native.use(cpu.native.available()[0])


# -- in a runner


def runner_of(**settings: Any) -> TorchRunner:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_local_experts=4,
        tie_word_embeddings=False,
    )
    model = MixtralForCausalLM(config).bfloat16().eval()
    model.lm_head.weight.data = torch.randn(VOCAB, WIDTH).bfloat16()
    return cpu_runner(model, **settings)


class Poll:
    stop_at_ns: int | None = None

    def __init__(self, word: int) -> None:
        self.word = word

    def now_ns(self) -> int:
        return 0


def program_of(
    runner: TorchRunner, asked: list[SamplingParams], grain: Grain = Grain.EXPERT
) -> Program:
    rng, rows = random.Random(1), []
    for request, sampling in enumerate(asked):
        ids = [rng.randrange(VOCAB) for _ in range(5 + request)]
        runner.add(request, ids, sampling, len(ids), len(ids) + 8)
        rows.append(Row(request, 0, len(ids), 0, 1))
    program = compile_program(
        Plan(rows=tuple(rows), grain=grain, stop_below=5),
        frame_id=0,
        samples=[True] * len(rows),
        shape=runner.shape,
        cuts=runner.cuts,
    )
    runner.accept(program)
    return program


def tokens(runner: TorchRunner, asked: list[SamplingParams]) -> list[Sampled]:
    program = program_of(runner, asked)
    assert runner.run(program, START, Poll(99)) == program.end
    return runner.finish(program)


@pytest.mark.parametrize("asked", [[GREEDY] * 3, [GREEDY, *ASKING, GREEDY], [*ASKING]])
@pytest.mark.parametrize("settings", [{}, {"max_packed_bytes": 0}])
def test_tokens_are_those_of_whole_logits(
    asked: list[SamplingParams], settings: dict[str, Any]
) -> None:
    seeing = runner_of(**settings)
    seen: list[Tensor] = []
    seeing.on_logits = lambda request, position, x: seen.append(x)
    expected = tokens(seeing, asked)
    assert [x.shape for x in seen] == [(VOCAB,)] * len(asked)
    assert tokens(runner_of(**settings), asked) == expected
    assert [s.request_id for s in expected] == list(range(len(asked)))


def at_head(runner: TorchRunner, program: Program) -> Index:
    at = START
    while not (program.ops[at.op].kind is OpKind.HEAD and at.pos):
        at = runner.run(program, at, Poll(-1))
    return at


def test_a_frame_parked_in_the_head_goes_on_after_a_checkpoint() -> None:
    asked = [GREEDY, *ASKING, GREEDY]
    expected, runner = tokens(runner_of(), asked), runner_of()
    object.__setattr__(runner.backend.costs, "segment_ns", 0.4 * runner.backend.costs.head_ns)
    program = program_of(runner, asked)
    at = at_head(runner, program)
    state: Any = runner.frames[0].head
    assert state.greedy == (0, 4)
    assert [block.shape for block in state.blocks] == [(3, HEAD_BLOCK)] * at.pos
    while at != program.end:
        tensors = runner.export_frame(program, at)
        runner.drop(program)
        runner.import_frame(program, at, tensors)
        at = runner.run(program, at, Poll(-1))
    tensors = runner.export_frame(program, at)
    runner.drop(program)
    runner.import_frame(program, at, tensors)
    assert runner.finish(program) == expected


@pytest.fixture
def a_row_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "TOKENS_AT_ONCE", 1)


def between_rows(runner: TorchRunner, program: Program) -> Index:
    """Where a pass stands of which some rows have their tokens and others have none."""
    at = START
    while True:
        at = runner.run(program, at, Poll(-1))
        assert at != program.end
        head = runner.frames[0].head
        if head is not None and head.chosen is not None:
            assert program.ops[at.op].kind is OpKind.HEAD
            return at


@pytest.mark.usefixtures("a_row_at_a_time")
def test_a_pass_stops_between_two_rows_that_are_sampled() -> None:
    asked = [GREEDY, *ASKING, GREEDY]
    expected, runner = tokens(runner_of(), asked), runner_of()
    program = program_of(runner, asked)
    at = between_rows(runner, program)
    stops = [at]
    while at != program.end:
        at = runner.run(program, at, Poll(-1))
        stops.append(at)
    assert len(stops) == len(ASKING)
    assert runner.finish(program) == expected


@pytest.mark.usefixtures("a_row_at_a_time")
def test_a_row_may_die_between_rows_that_are_sampled() -> None:
    asked = [GREEDY, *ASKING, GREEDY]
    expected, runner = tokens(runner_of(), asked), runner_of()
    program = program_of(runner, asked)
    at = between_rows(runner, program)
    for dead in (0, len(ASKING)):  # one that has its token, and the last that has none
        runner.kill(program, dead)
    assert runner.run(program, at, Poll(99)) == program.end
    assert runner.finish(program) == [expected[i] for i in (1, 2, 4)]


@pytest.mark.usefixtures("a_row_at_a_time")
def test_a_checkpoint_between_rows_samples_them_again() -> None:
    asked = [GREEDY, *ASKING, GREEDY]
    expected, runner = tokens(runner_of(), asked), runner_of()
    program = program_of(runner, asked)
    at = between_rows(runner, program)
    frame = runner.export_frame(program, at)
    runner.drop(program)
    runner.import_frame(program, at, frame)
    assert runner.run(program, at, Poll(99)) == program.end
    assert runner.finish(program) == expected


def test_greedy_rows_hold_no_logits_and_dead_rows_get_no_token() -> None:
    asked = [GREEDY] * 4
    expected, runner = tokens(runner_of(), asked), runner_of()
    object.__setattr__(runner.backend.costs, "segment_ns", 0.4 * runner.backend.costs.head_ns)
    program = program_of(runner, asked)
    at = at_head(runner, program)
    state: Any = runner.frames[0].head
    assert [x.nbytes for x in state.tensors()] == [state.x_BD.nbytes]
    runner.kill(program, 2)
    assert runner.run(program, at, Poll(99)) == program.end
    assert runner.finish(program) == [expected[i] for i in (0, 1, 3)]


def test_a_row_that_died_before_the_head_needs_no_settings() -> None:
    asked = [GREEDY, ASKING[0], GREEDY]
    expected, runner = tokens(runner_of(), asked), runner_of()
    program = program_of(runner, asked)
    at = runner.run(program, START, Poll(-1))
    runner.kill(program, 0)
    runner.remove(0)
    assert runner.run(program, at, Poll(99)) == program.end
    assert runner.finish(program) == expected[1:]


@pytest.mark.parametrize("asked", [[GREEDY, GREEDY], [GREEDY, ASKING[0]]])
def test_broken_logits_name_the_request(asked: list[SamplingParams]) -> None:
    runner = runner_of()
    bad = torch.full((WIDTH,), torch.nan).bfloat16()
    runner.model.lm_head.weight.data[HEAD_BLOCK + 3] = bad  # type: ignore[union-attr, operator]
    runner.close()
    broken = cpu_runner(runner.model)
    program = program_of(broken, asked)
    with pytest.raises(ValueError, match=r"request 0: the largest logit is nan.*position 5"):
        broken.run(program, START, Poll(99))


# -- one call does many blocks, and polls between their tasks


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry per native call of the head."""
    return count_calls(monkeypatch, "head")


def in_blocks(grain: Grain, **settings: Any) -> tuple[TorchRunner, Program, Index]:
    """A runner whose head takes three segments, with a program that stands before it."""
    runner = runner_of(**settings)
    object.__setattr__(runner.backend.costs, "segment_ns", 0.4 * runner.backend.costs.head_ns)
    program = program_of(runner, [GREEDY] * 3, grain)
    at = START
    while program.ops[at.op].kind is not OpKind.HEAD:
        stop = Watched()
        stop.word = 0
        at = runner.run(program, at, stop)
    return runner, program, at


def ends_of(runner: TorchRunner, program: Program, at: Index, stop: Watched) -> list[Index]:
    ends = []
    while at != program.end:
        at = runner.run(program, at, stop)
        ends.append(at)
    return ends


def test_one_call_does_all_blocks_without_a_poll(calls: list[int]) -> None:
    expected = tokens(runner_of(), [GREEDY] * 3)
    runner, program, at = in_blocks(Grain.EXPERT)
    del calls[:]
    assert ends_of(runner, program, at, Watched()) == [program.end]
    assert len(calls) == 1
    assert runner.finish(program) == expected


@pytest.mark.parametrize("grain", [Grain.EXPERT, Grain.LAYER])
def test_a_stop_that_is_due_ends_the_head_after_a_task_at_the_grain_of_experts(
    grain: Grain, calls: list[int]
) -> None:
    expected = tokens(runner_of(), [GREEDY] * 3)
    asked, late = Watched(), Watched()
    asked.word, late.stop_at_ns, late.at_ns = 0, 5, 6
    for stop in (asked, late):
        runner, program, at = in_blocks(grain)
        del calls[:]
        ends = ends_of(runner, program, at, stop)
        assert ends.pop() == program.end
        assert len(calls) == len(ends) + 1
        if grain is Grain.EXPERT:  # three blocks of many tasks each
            assert {*ends} == {Index(at.op, block) for block in range(3)}
            assert len(ends) > 20
            assert ends == sorted(ends)
        else:
            assert ends == []
        assert runner.finish(program) == expected


def test_after_each_false_alarm_it_goes_on(calls: list[int]) -> None:
    runner, program, at = in_blocks(Grain.EXPERT)
    del calls[:]
    assert ends_of(runner, program, at, Ringing()) == [program.end]
    assert len(calls) > 20


def test_time_is_looked_at_between_tasks(calls: list[int]) -> None:
    runner, program, at = in_blocks(Grain.EXPERT)
    stop = Watched()
    stop.stop_at_ns = 1  # the clock stands at 0, one nanosecond before: the call sees it pass
    del calls[:]
    assert ends_of(runner, program, at, stop) == [program.end]
    assert len(calls) > 20


def test_nothing_is_polled_in_the_head_at_grain_step(calls: list[int]) -> None:
    runner, stop = runner_of(), Watched()
    object.__setattr__(runner.backend.costs, "segment_ns", 0.4 * runner.backend.costs.head_ns)
    program = program_of(runner, [GREEDY] * 3, Grain.STEP)
    stop.word, stop.stop_at_ns, stop.at_ns = -1, 0, 1
    assert runner.run(program, START, stop) == program.end
    assert len(calls) == 1


def test_segments_of_one_call_are_told_apart(calls: list[int]) -> None:
    """A watcher sees each of them; without one, the longest is the call's own, not all of it."""
    runner, program, at = in_blocks(Grain.EXPERT)
    seen: list[Index] = []
    runner.on_segment = lambda program, at, begin, end: seen.append(at)
    del calls[:]
    ends_of(runner, program, at, Watched())
    assert seen == [at, Index(at.op, 1), Index(at.op, 2)]
    assert len(calls) == 3
    ticks = iter(range(1 << 30))
    runner, program, at = in_blocks(Grain.EXPERT, clock=lambda: next(ticks))
    runner.segments.longest_ns = 0
    ends_of(runner, program, at, Watched())
    assert runner.segments.longest_ns > 100  # the call has a clock of its own; ours is at a few
    assert runner.segments.longest_op is OpKind.HEAD
