"""Log-probabilities of prompts: those of `model.forward`, however the prompt was computed."""

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

from qllm.cuda.backend import cuda_runner
from qllm.cuda.lanes import Bucket
from qllm.errors import InvalidRequestError, RequestFailedError
from qllm.ingress import codec
from qllm.ingress.ring import Record
from qllm.llm import QLLMEngine
from qllm.plan import Plan, Row
from qllm.runner.cpu import cpu_runner
from qllm.runner.layers.linears import HEAD_BLOCK
from qllm.runner.runner import TorchRunner
from qllm.runner.sampling.scores import Score
from qllm.scheduler.compile import compile_program
from qllm.scheduler.program import START, Index, OpKind, Program
from qllm.types import Grain, Logprobs, PromptLogprobs, Sampled, SamplingParams
from tests.support.fake_cuda import FakeCuda
from tests.support.families import make_model
from tests.support.sweeps import Poll, prompt_of

ASKED = SamplingParams(temperature=0, prompt_logprobs=3)
GREEDY = SamplingParams(temperature=0)
PROMPT = prompt_of(40, 1)
PATHS = [("mixtral", "reference", torch.float32), ("mixtral", "fast", torch.bfloat16),
         ("qwen2_moe", "fast", torch.bfloat16), ("granitemoe", "fast", torch.bfloat16)]  # fmt: skip


def by_forward(model: nn.Module, ids: list[int]) -> list[Logprobs]:
    """What `model.forward` says of all tokens but the first, with three alternatives."""
    with torch.inference_mode():
        logits_PV = model(torch.tensor([ids])).logits[0].float()
    found = []
    for logits_V, token in zip(logits_PV, ids[1:], strict=False):
        values = torch.log_softmax(logits_V.double(), -1).float()
        best = values.topk(3)
        top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        found.append(Logprobs(float(values[token]), top))
    return found


# -- in a runner


class World:
    """A runner whose rows are moved on by hand."""

    def __init__(self, runner: TorchRunner, *, cut: float | None = None) -> None:
        self.runner = runner
        if cut is not None:
            object.__setattr__(
                runner.backend.costs, "segment_ns", cut * runner.backend.costs.head_ns
            )
        self.layers = runner.shape.num_layers
        self.tables = runner.backend.new_tables()
        self.num_frames = 0
        self.first: dict[int, Sampled] = {}
        self.num_tokens: dict[int, int] = {}
        self.at_stop: Callable[[Program, Index], None] = lambda program, at: None

    def add(self, request: int, sampling: SamplingParams = ASKED, prompt: Any = PROMPT) -> None:
        self.runner.add(request, prompt, sampling, len(prompt), len(prompt) + 8)

    def row(self, request: int, lo: int, hi: int, start: int = 0, end: int | None = None) -> Row:
        return Row(request, lo, hi, start, self.layers if end is None else end)

    def sweep(self, *rows: Row, stops: bool = False) -> None:
        known = [len(self.runner.token_ids(row.request_id)) for row in rows]
        self.num_frames += 1
        program = compile_program(
            Plan(rows=rows, grain=Grain.EXPERT, stop_below=5),
            frame_id=self.num_frames,
            samples=[row.hi == n for row, n in zip(rows, known, strict=True)],
            shape=self.runner.shape,
            cuts=self.runner.cuts,
        )
        self.runner.accept(program, self.tables.cover(rows))
        poll, at = Poll(0, float(stops)), START
        while at != program.end:
            at = self.runner.run(program, at, poll)
            self.at_stop(program, at)
        for sampled in self.runner.finish(program):
            self.first.setdefault(sampled.request_id, sampled)
            count = self.num_tokens.get(sampled.request_id, 0)
            self.num_tokens[sampled.request_id] = count + 1
            assert (sampled.prompt is not None) == (count == 0 and self.asks(sampled.request_id)), (
                "reported with the first token, and never again"
            )

    def asks(self, request: int) -> bool:
        return self.runner.requests[request].num_top is not None

    def found(self, request: int = 0) -> list[Logprobs]:
        prompt = self.first[request].prompt
        assert prompt is not None
        return list(prompt.tokens())


def runner_of(family: str, kernels: str, dtype: torch.dtype, **settings: Any) -> TorchRunner:
    return cpu_runner(make_model(family, dtype), kernels=kernels, **settings)


@cache
def whole(family: str, kernels: str, dtype: torch.dtype) -> list[Logprobs]:
    """Log-probabilities of one pass that nothing stops."""
    world = World(runner_of(family, kernels, dtype, max_segment_ms=float("inf")))
    world.add(0)
    world.sweep(world.row(0, 0, 40))
    return world.found()


@pytest.mark.usefixtures("one_thread")
def test_one_pass_has_the_bits_of_forward() -> None:
    """The bits of torch's products depend on the number of its threads."""
    whole.cache_clear()
    found = whole("mixtral", "reference", torch.float32)
    assert len(found) == 39
    assert found == by_forward(make_model("mixtral"), PROMPT)


@pytest.mark.parametrize(("family", "kernels", "dtype"), PATHS)
def test_every_path_is_close_to_forward(family: str, kernels: str, dtype: torch.dtype) -> None:
    expected = by_forward(make_model(family), PROMPT)  # in fp32
    close = 1e-5 if dtype is torch.float32 else 0.35
    for ours, theirs in zip(whole(family, kernels, dtype), expected, strict=True):
        assert abs(ours.chosen - theirs.chosen) < close
        tops = zip(ours.top, theirs.top, strict=True)
        assert all(abs(a - b) < close for (_, a), (_, b) in tops)


def chunked(world: World) -> None:
    world.add(0)
    for lo, hi in ((0, 7), (7, 8), (8, 31), (31, 40)):
        world.sweep(world.row(0, lo, hi))


def by_layers(world: World) -> None:
    world.add(0)
    for lo, hi in ((0, 25), (25, 40)):
        world.sweep(world.row(0, lo, hi, 0, 1))
        world.sweep(world.row(0, lo, hi, 1))


def stopped(world: World) -> None:
    world.add(0)
    world.sweep(world.row(0, 0, 40), stops=True)


def evicted(world: World) -> None:
    world.add(0)
    world.sweep(world.row(0, 0, 30))
    world.runner.evict(0)
    world.sweep(world.row(0, 0, 10))
    world.sweep(world.row(0, 10, 40))
    world.runner.evict(0)
    world.sweep(world.row(0, 0, 41))  # recomputed, with the token it has got
    world.sweep(world.row(0, 41, 42))


def in_company(world: World) -> None:
    world.add(0)
    world.add(1, GREEDY, prompt_of(5, 2))
    world.add(2, ASKED, prompt_of(9, 3))
    world.add(3, ASKED, prompt_of(1, 4))
    world.sweep(world.row(1, 0, 5), world.row(0, 0, 12), world.row(2, 0, 4))
    world.sweep(world.row(1, 5, 6), world.row(0, 12, 40), world.row(2, 4, 9), world.row(3, 0, 1))
    assert len(world.found(2)) == 8
    assert world.found(3) == []


def checkpointed(world: World) -> None:
    def again(program: Program, at: Index) -> None:
        tensors = world.runner.export_frame(program, at)
        world.runner.drop(program)
        world.runner.import_frame(program, at, tensors)

    world.add(0)
    world.sweep(world.row(0, 0, 17))
    state, meta = world.runner.export_request(0)
    world.runner.remove(0)
    world.runner.import_request(0, ASKED, state, meta)
    world.at_stop = again
    world.sweep(world.row(0, 17, 40), stops=True)


WAYS = [chunked, by_layers, stopped, evicted, in_company, checkpointed]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("family", "kernels", "dtype"), PATHS[1:3])
@pytest.mark.parametrize("cut", [None, 0.3], ids=["uncut", "cut"])
def test_native_kernels_give_the_same_bits_in_every_way(
    family: str, kernels: str, dtype: torch.dtype, way: Callable[[World], None], cut: float | None
) -> None:
    world = World(runner_of(family, kernels, dtype), cut=cut)
    way(world)
    assert world.found() == whole(family, kernels, dtype)


@pytest.mark.parametrize("way", [stopped, checkpointed])
def test_the_reference_gives_the_bits_of_one_pass_where_it_is_one(
    way: Callable[[World], None],
) -> None:
    world = World(runner_of("mixtral", "reference", torch.float32), cut=0.3)
    way(world)
    expected = whole("mixtral", "reference", torch.float32)
    assert [x.chosen for x in world.found()] == pytest.approx(
        [x.chosen for x in expected], abs=1e-5
    )


def test_a_row_that_dies_takes_its_prompt_along() -> None:
    world = World(runner_of(*PATHS[1]), cut=0.3)
    world.add(0)
    world.add(1, ASKED, prompt_of(9, 3))

    def kill(program: Program, at: Index) -> None:
        inside = program.ops[at.op].kind is OpKind.HEAD and at.pos if at != program.end else 0
        if inside and not world.runner.frames[program.frame_id].dead:
            world.runner.kill(program, 1)
            world.runner.remove(1)

    world.at_stop = kill
    world.sweep(world.row(1, 0, 9), world.row(0, 0, 40), stops=True)
    assert set(world.first) == {0}
    assert world.found() == whole(*PATHS[1])


def wide_model(dtype: torch.dtype) -> Any:
    """Four vocabulary blocks."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=3 * HEAD_BLOCK + 5, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, head_dim=32, num_local_experts=4,
        tie_word_embeddings=False,
    )  # fmt: skip
    return MixtralForCausalLM(config).to(dtype).eval()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["native", "torch"])
def test_no_segment_of_the_head_does_more_than_it_may(dtype: torch.dtype) -> None:
    world = World(cpu_runner(wide_model(dtype)))
    runner, costs = world.runner, world.runner.backend.costs
    per_row = 15.0 * runner.shape.vocab_size
    object.__setattr__(costs, "head_ns", per_row)
    object.__setattr__(costs, "head_row_ns", per_row / 2)
    object.__setattr__(costs, "segment_ns", 2.5 * per_row)
    assert costs.rows_at_once(4, runner.shape.vocab_size) == 16
    work: list[tuple[int, int, int]] = []

    def looked(program: Program, at: Index) -> None:
        head = runner.frames[program.frame_id].head
        if head is not None and head.scores.each:
            score = head.scores.each[0]
            rows = score.blocks[0].shape[0] if score.blocks else 0
            work.append((len(score.blocks), rows, len(score.found.chosen)))

    world.at_stop = looked
    world.add(0)
    world.sweep(world.row(0, 0, 40), stops=True)
    assert max(rows for _, rows, _ in work) == 16
    for (blocks, _, read), (more, rows, then) in pairwise(work):
        assert max(0, more - blocks) * (1 + rows / 2) / 4 <= 2.5, "of the vocabulary"
        assert then - read <= 2, "two rows of logits are all that can be read"
    assert [x[2] for x in work if x[0] == 0][-1] == 39


@pytest.mark.parametrize("way", [chunked, in_company])
@pytest.mark.parametrize("is_captured", [False, True])
def test_prompts_in_pages_are_scored_and_captured_heads_are_left_alone(
    is_captured: bool, way: Callable[[World], None]
) -> None:
    graphs = FakeCuda() if is_captured else False
    how: dict[str, Any] = {"buckets": [Bucket(64, True)], "layers_per_stage": 1, "graphs": graphs}
    sizes = {"num_pages": 64, "page_size": 4, "max_num_seqs": 4, "max_total_tokens": 96}
    world = World(cuda_runner(make_model("mixtral"), **sizes, **how))
    way(world)
    expected = whole("mixtral", "reference", torch.float32)
    assert [x.chosen for x in world.found()] == pytest.approx(
        [x.chosen for x in expected], abs=1e-4
    )


def test_broken_logits_fail_the_request_and_name_the_token() -> None:
    runner = runner_of(*PATHS[1])
    runner.model.lm_head.weight.data[7] = torch.nan  # type: ignore[union-attr, operator]
    runner.close()
    world = World(cpu_runner(runner.model))
    world.add(0)
    with pytest.raises(ValueError, match="prompt token 1 is not a number"):
        world.sweep(world.row(0, 0, 40))


# -- on the way to the front end


def prompt_logprobs(num: int, num_top: int) -> PromptLogprobs:
    found = PromptLogprobs.empty(num_top)
    for i in range(num):
        found.add(Logprobs(-i / 4, tuple((i + k, -k / 8) for k in range(num_top))))
    return found


@pytest.mark.parametrize(("num", "num_top"), [(0, 3), (1, 0), (500, 20), (9000, 0), (700, 5)])
def test_log_probabilities_of_a_prompt_survive_their_records(num: int, num_top: int) -> None:
    whole_ = prompt_logprobs(num, num_top)
    bodies = list(codec.encode_prompt(5, whole_))
    assert max(map(len, bodies)) <= codec.PART_BYTES + 100
    parts = [codec.decode_prompt(Record(5, 0, body + bytes(20))) for body in bodies]
    assert {part.request_id for part in parts} == {5}
    found = PromptLogprobs.empty(num_top)
    for part in parts:
        assert part.first == len(found.chosen)
        found.extend(part.logprobs)
    assert found == whole_
    assert len(list(found.tokens())) == num


def test_an_engine_that_takes_over_begins_again(scoring: QLLMEngine) -> None:
    handle = scoring._handle(1 << 50, None, (1, 2, 3), GREEDY)
    parts = prompt_logprobs(6, 2)
    handle.on_prompt(0, parts.part(0, 2))
    handle.on_prompt(2, parts.part(2, 4))
    handle.on_prompt(0, parts.part(0, 3))
    handle.on_prompt(3, parts.part(3, 6))
    assert handle._prompt == parts


@pytest.fixture(scope="module")
def scoring() -> Any:
    with QLLMEngine.from_pretrained("tiny", threads=1, max_step_tokens=64) as made:
        yield made


def test_through_rings_a_prompt_comes_whole_and_in_parts(scoring: QLLMEngine) -> None:
    ids = [i % 200 + 3 for i in range(700)]
    asked = SamplingParams(temperature=0, prompt_logprobs=20)
    result = scoring.submit(ids, "BE", 1, sampling=asked).result(300)
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None
    assert len(result.prompt_logprobs) == len(ids)
    assert result.logprobs is None
    for found in result.prompt_logprobs[1:]:
        assert found is not None
        assert len(found.top) == 20
        assert found.chosen <= found.top[0][1]
    again = scoring.submit(ids, "LS", 3, sampling=asked)
    pieces = list(again)
    assert [piece.prompt is not None for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert again.result(300).prompt_logprobs == result.prompt_logprobs
    assert scoring.submit(ids[:9], max_tokens=2).result(300).prompt_logprobs is None


def test_a_broken_prompt_fails_alone() -> None:
    model = make_model("mixtral")
    model.model.embed_tokens.weight.data[9] = torch.nan
    with QLLMEngine.from_model(model, kernels="reference", conformance=False) as engine:
        with pytest.raises(RequestFailedError, match="not a number"):
            engine.submit([1, 9, 5], max_tokens=1, sampling=ASKED).result(300)
        fine = engine.submit([1, 8, 5], max_tokens=1, sampling=ASKED).result(300)
        assert fine.prompt_logprobs is not None


@pytest.mark.parametrize("value", [-1, 21, 1.5, True])
def test_a_wrong_number_of_alternatives_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"prompt_logprobs.*\[0, 20\]"):
        SamplingParams(prompt_logprobs=value)


# -- what else it may not cost


def test_hidden_states_of_a_prompt_are_not_copied_at_once() -> None:
    world = World(runner_of(*PATHS[1]))
    runner = world.runner
    asked = world.row(0, 39, 40)
    world.add(0)
    world.sweep(world.row(0, 0, 39))
    hidden = runner.requests[0].hidden[0].data_ptr()
    seen: set[int] = set()

    def looked(program: Program, at: Index) -> None:
        head = runner.frames[program.frame_id].head
        if head is not None:
            seen.update(x.data_ptr() for x in head.scores.tensors())

    world.at_stop = looked
    world.sweep(asked, stops=True)
    assert hidden in seen
    assert world.found() == whole(*PATHS[1])


def test_more_alternatives_than_the_vocabulary_has_are_all_of_it() -> None:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=11, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, head_dim=32, num_local_experts=4,
        tie_word_embeddings=False,
    )  # fmt: skip
    world = World(cpu_runner(MixtralForCausalLM(config).eval()))
    world.add(0, SamplingParams(temperature=0, prompt_logprobs=20), (1, 2, 3, 4))
    world.sweep(world.row(0, 0, 4))
    assert [sorted(i for i, _ in x.top) for x in world.found()] == [list(range(11))] * 3


def test_a_commit_that_fails_commits_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(runner_of(*PATHS[1]))
    world.add(0)
    world.add(1, ASKED, prompt_of(9, 3))
    clone, calls = torch.Tensor.clone, []

    def failing(x: torch.Tensor, **how: Any) -> torch.Tensor:
        calls.append(x)
        if len(calls) == 2:
            raise MemoryError("no room for a copy")
        return clone(x, **how)

    finish = world.runner.finish

    def finished(program: Program) -> list[Sampled]:
        monkeypatch.setattr(torch.Tensor, "clone", failing)
        return finish(program)

    monkeypatch.setattr(world.runner, "finish", finished)
    with pytest.raises(MemoryError):
        world.sweep(world.row(0, 0, 7), world.row(1, 0, 5))
    assert [world.runner.num_committed(i) for i in (0, 1)] == [0, 0]
    assert [held.hidden for held in world.runner.requests.values()] == [[], []]


def test_hidden_states_are_found_across_chunks() -> None:
    x_PD = torch.arange(24.0).view(12, 2)
    score = Score(0, x_PD.split([3, 1, 6, 2]), range(11), 0, (1, 4))
    for start in range(11):
        for stop in range(start + 1, 12):
            assert torch.equal(score._hidden(start, stop), x_PD[start:stop])
