"""Ranks as threads: KV, logits and tokens have the bits of the whole model."""

import math
import threading
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from qllm.errors import ConfigError, InvariantError, ModelError
from qllm.kernels import cpu
from qllm.kernels.cpu.experts import Experts
from qllm.kernels.quantised import Quantised
from qllm.models.weights.formats.rounding import int4
from qllm.runner.layers.native_experts import NativeBank
from qllm.runner.layers.native_parts import Projection
from qllm.sharded.group import Form, Group, Member
from qllm.sharded.layer import RankLayer, refuse_lost_rounding
from qllm.sharded.rank import Best, Rank, SplitModel, best_of, split_model
from tests.support.hybrids import make_hybrid
from tests.support.sharded import (
    SPLIT,
    WEIGHTS,
    Served,
    model_with,
    serve,
    served_whole,
    settings_of,
    wide_model,
)

assert cpu.MISSING is None, cpu.MISSING
pytestmark = pytest.mark.usefixtures("one_thread")
NEVER = 1 << 30
"""More tokens than any step has."""

whole = cache(served_whole)


@cache
def split_of(name: str, weights: str, tp: int) -> SplitModel:
    return split_model(model_with(name, weights), tp, **settings_of(weights))


def served_by_ranks(split: SplitModel, rows_from: int) -> list[Served]:
    """Return the results of every rank."""

    def work(member: Member) -> Served:
        rank = Rank(split, member, rows_from)
        return serve(rank, split.parts.shape.num_layers)

    return Group(len(split.plan.ranks)).run(work)


def is_same(one: Tensor, other: Tensor) -> bool:
    """Compare every bit."""
    return one.shape == other.shape and torch.equal(
        one.contiguous().view(torch.int16), other.contiguous().view(torch.int16)
    )


def assert_same(found: list[Served], expected: Served, split: SplitModel) -> None:
    for served, plan in zip(found, split.plan.ranks, strict=True):
        assert served.tokens == expected.tokens
        assert len(served.logits) == len(expected.logits) > 0
        assert all(map(is_same, served.logits, expected.logits)), "logits differ"
        for request, layers in expected.kv.items():
            for i, (own, other) in enumerate(zip(served.kv[request], layers, strict=True)):
                heads = plan.layers[i].kv_heads
                for x, y in zip(own, other, strict=True):
                    assert is_same(x, y[:, heads.start : heads.stop]), f"KV of layer {i} differs"


@pytest.mark.sampled(20)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("name", SPLIT)
def test_ranks_have_the_bits_of_the_whole_model(name: str, tp: int, weights: str) -> None:
    """Whole rows in all steps, split rows where ranks get one, and both."""
    split, expected = split_of(name, weights, tp), whole(name, weights)
    for rows_from in (NEVER, 1, 10):
        assert_same(served_by_ranks(split, rows_from), expected, split)


STEP_SIZES = (17, 28, 7, 3)
"""Tokens of the steps that are served."""


@pytest.mark.parametrize("tp", [3, 4])
@pytest.mark.parametrize("rows_from", [1, *sorted({n + i for n in STEP_SIZES for i in (0, 1)})])
def test_every_threshold_gives_the_same_bits(
    rows_from: int, tp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step with fewer tokens than ranks has whole rows."""
    split, expected = split_of("qwen2_moe", "bf16", tp), whole("qwen2_moe", "bf16")
    forms: list[tuple[int, bool]] = []
    call = RankLayer.__call__

    def recorded(self: RankLayer, x: Tensor, rope: Any, step: Any, form: Form) -> Tensor:
        forms.append((len(x), form.split))
        return call(self, x, rope, step, form)

    monkeypatch.setattr(RankLayer, "__call__", recorded)
    assert_same(served_by_ranks(split, rows_from), expected, split)
    assert set(forms) == {(num, num >= max(tp, rows_from)) for num in STEP_SIZES}


def test_a_split_by_inputs_fails_the_same_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual tensor parallelism: a rank multiplies its heads, and the products are added."""

    def added(self: RankLayer, part: Tensor, form: Form) -> Tensor:
        member = form.member
        sizes = member.gather(part.shape[1], list)
        before = sum(sizes[: member.rank])
        padded = part.new_zeros((len(part), sum(sizes)))
        padded[:, before : before + part.shape[1]] = part
        own = self._out.linear(padded).float()
        return member.gather(own, lambda parts: sum(parts[1:], parts[0]).bfloat16())

    monkeypatch.setattr(RankLayer, "_project", added)
    split, expected = split_of("mixtral", "bf16", 2), whole("mixtral", "bf16")
    with pytest.raises(AssertionError):
        assert_same(served_by_ranks(split, NEVER), expected, split)
    alone = split_of("mixtral", "bf16", 1)
    assert_same(served_by_ranks(alone, NEVER), expected, alone)


def test_sums_of_slots_that_ranks_make_and_add_fail_the_same_comparison(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The usual expert parallelism: a rank combines its own slots, and the sums are added."""
    combine = cpu.combine

    def by_rank(slots: Tensor, inverse: Tensor, weights: Tensor) -> Tensor:
        is_first = inverse.view(weights.shape) < len(slots) // 2
        parts = [combine(slots, inverse, weights * own) for own in (is_first, ~is_first)]
        return parts[0] + parts[1]

    monkeypatch.setattr(cpu, "combine", by_rank)
    split, expected = split_of("mixtral", "bf16", 2), whole("mixtral", "bf16")
    with pytest.raises(AssertionError):
        assert_same(served_by_ranks(split, NEVER), expected, split)


# -- the choice of tokens


def test_equal_logits_on_several_ranks_give_the_lowest_id() -> None:
    """Each row of the head occurs in every panel, so each logit occurs on every rank."""
    model = model_with("mixtral", "bf16")
    with torch.no_grad():
        head = model.lm_head.weight
        head.copy_(head[:64].repeat(5, 1)[: len(head)])
    split = split_model(model, 3)
    found = served_by_ranks(split, NEVER)
    assert all(served.tokens == found[0].tokens for served in found)
    assert len(found[0].tokens) > 4
    for token, logits in zip(found[0].tokens, found[0].logits, strict=True):
        assert token < 64
        assert (logits == logits.max()).sum() >= 4
        assert token == int((logits == logits.max()).nonzero()[0])


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
def test_the_best_of_ranks_is_the_largest_logit_and_then_the_lowest_rank(
    logits: list[float], chosen: int
) -> None:
    assert best_of([Best(x, 100 * i) for i, x in enumerate(logits)]).token_id == 100 * chosen


# -- memory


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_a_rank_packs_the_bytes_of_its_plan(tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms, routers and the embedding are not packed. The head's outputs are padded to 16."""
    split, taken, take = split_of("mixtral", "bf16", tp), Counter[int](), cpu.Arena.take
    experts, packed = Counter[int](), NativeBank.packed

    def counted(self: cpu.Arena, *shape: int) -> Tensor:
        taken[threading.get_ident()] += 2 * math.prod(shape)
        return take(self, *shape)

    def counted_experts(self: NativeBank, own: range) -> Experts:
        found = packed(self, own)
        experts[threading.get_ident()] += found.num_bytes * len(own)
        return found

    monkeypatch.setattr(cpu.Arena, "take", counted)
    monkeypatch.setattr(NativeBank, "packed", counted_experts)

    def work(member: Member) -> int:
        Rank(split, member, NEVER)
        return taken[threading.get_ident()] + experts[threading.get_ident()]

    width, num_experts = split.plan.shape.hidden, split.parts.shape.num_experts
    unpacked = (2 + num_experts) * len(split.parts.layers) * width + width
    for plan, found in zip(split.plan.ranks, Group(tp).run(work), strict=True):
        num_ids = len(plan.vocabulary)
        padding = (-num_ids % 16 - num_ids) * width
        assert found == plan.num_bytes + 2 * (padding - unpacked)


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


def test_a_split_over_other_ranks_than_the_group_has_is_refused() -> None:
    split = split_of("mixtral", "bf16", 2)
    with pytest.raises(InvariantError, match="a split over 2 ranks runs on 3 ranks"):
        Group(3).run(lambda member: Rank(split, member, NEVER))


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
