"""A model on several ranks: KV, logits and tokens have the bits of the whole model."""

import copy
import math
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from qllm.errors import ConfigError, ModelError
from qllm.kernels import cpu
from qllm.kernels.cpu.experts import Cut, Experts
from qllm.kernels.quantised import Quantised
from qllm.models.discover import base_model
from qllm.models.weights.formats.rounding import int4
from qllm.plan import Row
from qllm.runner.cpu import cpu_runner
from qllm.runner.layers.native_experts import NativeBank
from qllm.runner.layers.native_parts import Projection
from qllm.runner.runner import TorchRunner
from qllm.scheduler.program import START, Index, OpKind, Program
from qllm.sharded.head import is_better
from qllm.sharded.layer import refuse_lost_rounding
from qllm.sharded.rank import RankWeights, SplitModel, refuse_mixed, split_model
from qllm.sharded.runner import sharded_runner
from qllm.types import Grain
from tests.support.hybrids import make_hybrid
from tests.support.sharded import (
    CUT,
    SPLIT,
    WEIGHTS,
    Served,
    assert_same,
    model_with,
    served,
    served_whole,
    settings_of,
    wide_model,
)
from tests.support.stops import add_prompts, assert_same_answers, whole_program
from tests.support.sweeps import GREEDY, Asked, Watched, compiled, kv_of, next_row, qwen3

assert cpu.MISSING is None, cpu.MISSING
pytestmark = pytest.mark.usefixtures("one_thread")
NEVER = 1 << 30
"""More rows than any op has."""

whole = cache(served_whole)


def served_by_ranks(
    name: str, weights: str, tp: int, rows_from: int = 16, width: int | None = None
) -> Served:
    model = model_with(name, weights, width)
    return served(sharded_runner(model, tp, rows_from=rows_from, **settings_of(weights)))


@pytest.mark.sampled(24)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("name", SPLIT)
def test_ranks_have_the_bits_of_the_whole_model(name: str, tp: int, weights: str) -> None:
    """Output projections are split by columns in all ops, by rows in all that can, and both."""
    expected = whole(name, weights)
    for rows_from in (NEVER, 1, 10):
        assert_same(served_by_ranks(name, weights, tp, rows_from), expected)


SHARED = [(2, 128), (2, 320), (3, 320), (4, 256)]
"""Ranks, and widths of experts of which each has a share: one panel, or two or three."""


@pytest.mark.sampled(12)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize(("tp", "width"), SHARED)
@pytest.mark.parametrize("name", CUT)
def test_ranks_that_share_each_expert_have_the_bits_of_the_whole_model(
    name: str, tp: int, width: int, weights: str
) -> None:
    assert_same(served_by_ranks(name, weights, tp, width=width), whole(name, weights, width))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize(("tp", "num_tasks"), [(2, 1), (3, 1), (2, 13)])
@pytest.mark.parametrize("name", CUT)
def test_ranks_that_share_each_expert_stop_at_every_task_and_go_on(
    name: str, tp: int, num_tasks: int, weights: str
) -> None:
    """Several ranges of experts run in an op, with a gather in each."""
    expected = cpu_runner(model_with(name, weights, 320), **settings_of(weights))
    found = sharded_runner(model_with(name, weights, 320), tp, **settings_of(weights))
    for runner in (expected, found):
        add_prompts(runner, (21, 5))
    assert assert_same_answers(expected, found, num_tasks) > 100 / num_tasks
    for runner in (expected, found):
        runner.close()


STEP_SIZES = (17, 28, 7, 3)
"""Tokens of the steps that are served."""


@pytest.mark.sampled(6)
@pytest.mark.parametrize("tp", [3, 4])
@pytest.mark.parametrize("rows_from", [1, *sorted({n + i for n in STEP_SIZES for i in (0, 1)})])
def test_every_threshold_gives_the_same_bits(rows_from: int, tp: int) -> None:
    """An op with fewer rows than ranks is split by columns."""
    assert_same(served_by_ranks("qwen2_moe", "bf16", tp, rows_from), whole("qwen2_moe", "bf16"))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize(("tp", "num_tasks"), [(2, 1), (3, 1), (4, 2), (2, 13)])
@pytest.mark.parametrize("name", SPLIT)
def test_ranks_stop_at_every_task_and_go_on(
    name: str, tp: int, num_tasks: int, weights: str
) -> None:
    """Other requests run at some of the stops. The frame and KV are those of the whole model."""
    expected = cpu_runner(
        model_with(name, weights), max_segment_ms=math.inf, **settings_of(weights)
    )
    found = sharded_runner(
        model_with(name, weights), tp, max_segment_ms=math.inf, **settings_of(weights)
    )
    for runner in (expected, found):
        add_prompts(runner, (21, 5))
    assert assert_same_answers(expected, found, num_tasks) > 100 / num_tasks
    for runner in (expected, found):
        runner.close()


def runner_on(tp: int, model: Any) -> TorchRunner:
    """Return a runner of a copy of a model. A runner on one rank has no processes."""
    if tp == 1:
        return cpu_runner(copy.deepcopy(model), max_segment_ms=math.inf)
    return sharded_runner(copy.deepcopy(model), tp, max_segment_ms=math.inf)


@pytest.mark.parametrize(
    ("name", "width"),
    [("gated", None), ("olmoe", None), ("deepseek_v3", None), ("qwen3_moe", 320)],
)
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3)])
def test_a_frame_that_is_parked_goes_on_with_another_number_of_ranks(
    before: int, after: int, name: str, width: int | None
) -> None:
    """It is parked after ever more tasks, so in every kind of op."""
    model = wide_model(name, width=width)
    whole_run, one, other = runner_on(1, model), runner_on(before, model), runner_on(after, model)
    for runner in (whole_run, one):
        add_prompts(runner, (21, 5))
    program = whole_program(whole_run)
    assert whole_run.run(program, START, Watched()) == program.end
    tokens = [s.token_id for s in whole_run.finish(program)]
    kinds: Counter[OpKind] = Counter()
    for num_tasks in sorted({int(1.15**i) for i in range(70)}):
        program = whole_program(one)
        at = START
        for _ in range(1 + (name == "deepseek_v3")):  # the embedding, and a layer without experts
            at = one.run(program, at, Asked(1 << 20))
        at = one.run(program, at, Asked(num_tasks))
        if at == program.end:
            break
        kinds[program.ops[at.op].kind] += 1
        for request in program.request_ids:
            state, meta = one.export_request(request)
            other.import_request(request, GREEDY, state, meta)
        other.import_frame(program, at, one.export_frame(program, at))
        assert other.run(program, at, Watched()) == program.end
        assert [s.token_id for s in other.finish(program)] == tokens
        for request in program.request_ids:
            expected = kv_of(whole_run, request, whole_run.shape.num_layers)
            found = kv_of(other, request, other.shape.num_layers)
            assert expected.keys() == found.keys()
            assert all(torch.equal(found[x], expected[x]) for x in expected)
            other.remove(request)
        one.drop(program)
    assert len(kinds) >= 3, kinds
    for runner in (whole_run, one, other):
        runner.close()


def at_head(runner: TorchRunner, request: int) -> tuple[Program, Index]:
    """Run a request up to its head."""
    program, at = compiled(runner, [next_row(runner, request)], Grain.EXPERT), START
    runner.accept(program)
    while program.ops[at.op].kind is not OpKind.HEAD:
        at = runner.run(program, at, Asked(1 << 20))
    return program, at


def test_a_head_begins_anew_where_a_dropped_frame_had_stopped() -> None:
    """The next frame has its head alone, gets the desk of the dropped one, and other logits."""
    model, found = wide_model("mixtral"), list[tuple[int, Tensor]]()
    for runner in (runner_on(1, model), runner_on(2, model)):
        runner.on_logits = lambda request, position, x: found.append((request, x.clone()))
        add_prompts(runner, (21, 5))
        runner.split(*at_head(runner, 1))
        program, at = at_head(runner, 0)
        runner.run(program, at, Asked(1))
        runner.drop(program)
        num = runner.shape.num_layers
        head = compiled(runner, [Row(1, 0, 5, num, num)], Grain.EXPERT)
        runner.accept(head)
        assert runner.run(head, START, Watched()) == head.end
        runner.finish(head)
        runner.close()
    one, other = [x for request, x in found if request == 1]
    assert torch.equal(one, other)


def test_a_call_has_room_for_the_widest_of_its_layers() -> None:
    """Two dense layers run in one call, and the second MLP is 40 times as wide."""
    torch.manual_seed(0)
    model = qwen3(mlp_only_layers=[0, 1], intermediate_size=96)
    layers: Any = model.get_submodule("model.layers")
    layers[1].mlp = type(layers[0].mlp)(base_model(model).config, intermediate_size=3840)
    model = model.bfloat16().eval()
    runners = runner_on(1, model), runner_on(2, model)
    for runner in runners:
        add_prompts(runner, (21, 5))
    assert_same_answers(*runners, num_tasks=7)
    for runner in runners:
        runner.close()


def test_shared_experts_in_some_layers_are_refused() -> None:
    split = split_model(wide_model("gated"), 2)
    layers = RankWeights(split, 0).layers
    layers[1].mlp_width = 0
    with pytest.raises(ModelError, match=r"shared experts in some layers only; use one rank"):
        refuse_mixed(layers)


def test_equal_logits_on_several_ranks_give_the_lowest_id() -> None:
    """Each row of the head occurs in every panel, so each logit occurs on every rank."""
    model = model_with("mixtral", "bf16")
    with torch.no_grad():
        head = model.lm_head.weight
        head.copy_(head[:64].repeat(5, 1)[: len(head)])
    runners = runner_on(1, model), runner_on(3, model)
    found = []
    for runner in runners:
        add_prompts(runner, (21, 5))
        program = whole_program(runner)
        runner.run(program, START, Watched())
        found.append([s.token_id for s in runner.finish(program)])
        runner.close()
    assert found[0] == found[1]
    assert max(found[0]) < 64


@pytest.mark.parametrize(
    ("logits", "chosen"),
    [
        ([1.0, 2.0, 2.0], 1),
        ([2.0, 1.0, 2.0], 0),
        ([1.0, math.nan, 5.0], 1),
        ([math.nan, math.nan, 5.0], 0),
        ([-math.inf, -math.inf, -math.inf], 0),
        ([-math.inf, math.inf, math.nan], 2),
    ],
)
def test_the_best_of_ranks_is_the_largest_logit_and_then_the_lowest_id(
    logits: list[float], chosen: int
) -> None:
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        best = (logits[order[0]], order[0])
        for i in order[1:]:
            best = (logits[i], i) if is_better((logits[i], i), best) else best
        assert best[1] == chosen


# -- memory


@pytest.mark.parametrize("width", [None, 320])
@pytest.mark.parametrize("tp", [1, 2, 3])
def test_a_rank_packs_the_bytes_of_its_plan(
    tp: int, width: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms, routers and the embedding are not packed. The head's outputs are padded to 16."""
    split, taken, take = split_of("mixtral", tp, width), 0, cpu.Arena.take
    packed = NativeBank.packed

    def counted(self: cpu.Arena, *shape: int) -> Tensor:
        nonlocal taken
        taken += 2 * math.prod(shape)
        return take(self, *shape)

    def counted_experts(self: NativeBank, own: range, cut: Cut | None) -> Experts:
        nonlocal taken
        found = packed(self, own, cut)
        taken += found.num_bytes * len(own)
        return found

    monkeypatch.setattr(cpu.Arena, "take", counted)
    monkeypatch.setattr(NativeBank, "packed", counted_experts)
    assert any(layer.cut for layer in split.plan.ranks[0].layers) == (tp > 1 and width is not None)
    hidden, num_experts = split.plan.shape.hidden, split.parts.shape.num_experts
    unpacked = (2 + num_experts) * len(split.parts.layers) * hidden + hidden
    for rank, plan in enumerate(split.plan.ranks):
        taken = 0
        RankWeights(split, rank)
        num_ids = len(plan.vocabulary)
        padding = (-num_ids % 16 - num_ids) * hidden
        assert taken == plan.num_bytes + 2 * (padding - unpacked)


@cache
def split_of(name: str, tp: int, width: int | None) -> SplitModel:
    return split_model(model_with(name, "bf16", width), tp)


# -- refusals


def test_models_without_kernels_are_refused_by_the_name_of_a_part() -> None:
    for model, why in (
        (wide_model("mixtral", torch.float32), r"layer 0 has attention .*Attention, float32"),
        (make_hybrid("qwen3_next"), r"layer 0 carries a state \(Qwen3NextGatedDeltaNet\)"),
    ):
        kind = model.config.model_type
        refusal = rf"model '{kind}' cannot be split over ranks: {why}.*; use one rank"
        with pytest.raises(ModelError, match=refusal):
            split_model(model, 2)


def test_hooked_layers_are_refused_by_name() -> None:
    model = wide_model("mixtral")
    model.model.layers[1].self_attn.register_forward_hook(lambda *_: None)
    with pytest.raises(ModelError, match=r"layer 1 has attention .*MixtralAttention"):
        split_model(model, 2)


def test_a_number_of_ranks_that_the_model_cannot_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="tp=5 is too many ranks: layer 0 has 4 query heads"):
        split_model(wide_model("mixtral"), 5)


def test_a_share_that_rounds_other_activations_than_the_whole_is_refused() -> None:
    """A rank's 32 queries in 4 bits fill no panel, so bf16 keys would make bf16 of them."""
    other = Projection(torch.zeros(64, 64))

    def stacked(num: int, activations: str) -> list[Projection]:
        queries: Quantised = int4(torch.ones(num, 64).bfloat16()).reading(activations)
        return [Projection(queries), other]

    whole, share = stacked(128, "int8"), stacked(32, "int8")
    with pytest.raises(ModelError, match="share of them has 32 queries, no multiple of 64"):
        refuse_lost_rounding(whole, share)
    refuse_lost_rounding(whole, whole)
    refuse_lost_rounding(stacked(128, "bf16"), stacked(32, "bf16"))
