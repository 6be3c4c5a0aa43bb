"""Split plans of random sizes and of every family: each part is computed once, on whole panels."""

import math
import random
import re
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
import torch

from qllm.errors import ConfigError, ModelError
from qllm.kernels import cpu
from qllm.models.discover import discover
from qllm.sharded.plan import (
    PANEL,
    UNEVEN,
    LayerShape,
    LayerShare,
    RankPlan,
    ShardPlan,
    ShardShape,
    even,
    in_panels,
    plan_of,
    split_heads,
)
from qllm.sharded.weights import refuse_unsplit, shape_of
from tests.support import tiny_configs
from tests.support.all_families import DENSE, MOE
from tests.support.families import FAMILIES, make_model
from tests.support.files import ROOT
from tests.support.sharded import wide_model

SIZES = {"hidden_size": 128, "head_dim": 32, "qk_rope_head_dim": 32, "qk_head_dim": 48}
"""Sizes of heads that the CPU kernels support, in addition to those of `tiny_configs`."""
OTHER_HEADS = {"qwen4_exp", "qwen4_exp_text"}
"""Families whose configs refuse these sizes."""
SPLIT = {
    *FAMILIES,
    *("aria_text", "cwm", "deepseek_v2", "dots1", "emu3", "glm4_moe_lite", "granite", "internlm3"),
    *("iquestcoder", "llama", "ministral", "mistral", "qwen2", "qwen3", "seed_oss", "solar_open"),
    "youtu",
}
"""Families whose tiny models can be split. The others are refused."""
SHAPE = ShardShape(
    (
        LayerShape(4, 2, 100, 60, 8, 1000, 96, 96, 7, 5, 11),
        LayerShape(4, 2, 100, 60, 0, 0, 0, 96, 7, 5, 1),
    ),
    hidden=130,
    vocab_size=300,
    token_bytes=9,
    whole_bytes=3,
)


def shape_of_family(family: str) -> tuple[ShardShape, int]:
    """Return the sizes of a tiny model in bf16, and the bytes of its weights."""
    if family in FAMILIES:
        model = make_model(family, torch.bfloat16)
    else:
        kind = tiny_configs.transformers.CONFIG_MAPPING[family]
        own = ({} if family in OTHER_HEADS else SIZES) | tiny_configs.OWN.get(family, {})
        config = tiny_configs.tiny_config(kind, own)
        auto: Any = tiny_configs.transformers.AutoModelForCausalLM
        model = auto.from_config(config, dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        parts = discover(model)
        refuse_unsplit(family, parts)
        sizes = {id(p): p.nbytes for p in model.parameters()}
        return shape_of(parts), sum(sizes.values())


def assert_covers(ranges: list[range], num: int, multiple: int = 1) -> None:
    """Ranges follow each other from 0 to `num`, and start at multiples."""
    assert (ranges[0].start, ranges[-1].stop) == (0, num)
    assert all(a.stop == b.start for a, b in pairwise(ranges))
    assert all(r.start % multiple == 0 or r.start == num for r in ranges)


def assert_is_split(plan: ShardPlan) -> None:
    """Every head, column, expert, inner value and token id belongs to one rank."""
    shape, ranks = plan.shape, plan.ranks
    assert_covers([rank.vocabulary for rank in ranks], shape.vocab_size, PANEL)
    for i, layer in enumerate(shape.layers):
        shares = [rank.layers[i] for rank in ranks]
        assert_covers([share.heads for share in shares], layer.num_heads)
        assert_experts_are_split(shares, layer, shape.hidden)
        assert_covers([share.columns for share in shares], shape.hidden, PANEL)
        assert_covers([share.inner for share in shares], layer.mlp_width, PANEL)
        per = layer.num_heads // layer.num_kv_heads
        for share in shares:
            assert {head // per for head in share.heads} == set(share.kv_heads)
            assert len(share.heads) % len(share.kv_heads) == 0
            assert share.experts or not layer.num_experts


def assert_experts_are_split(shares: list[LayerShare], layer: LayerShape, hidden: int) -> None:
    """Ranks share each expert about evenly, or have whole experts."""
    cuts = [share.cut for share in shares if share.cut is not None]
    if not cuts:
        assert_covers([share.experts for share in shares], layer.num_experts)
        sizes = [len(share.experts) for share in shares]
        assert max(sizes) - min(sizes) <= 1
        return
    assert len(cuts) == len(shares)
    assert all(share.experts == range(layer.num_experts) for share in shares)
    assert_covers([cut.inner for cut in cuts], layer.expert_width, PANEL)
    assert_covers([cut.columns for cut in cuts], hidden, PANEL)
    for parts, num in (
        ([c.inner for c in cuts], layer.expert_width),
        ([c.columns for c in cuts], hidden),
    ):
        most, mean = max(map(len, parts)), num / len(parts)
        assert min(map(len, parts)) > 0
        assert most <= UNEVEN * mean + PANEL


def bytes_of(shape: ShardShape, rank: RankPlan) -> int:
    """Return the bytes of a rank, counted head by head and column by column."""
    total = shape.whole_bytes + sum(shape.token_bytes for _ in rank.vocabulary)
    for layer, share in zip(shape.layers, rank.layers, strict=True):
        total += layer.whole_bytes + sum(layer.head_bytes for _ in share.heads)
        total += sum(layer.kv_head_bytes for _ in share.kv_heads)
        whole = sum(layer.expert_bytes for _ in share.experts)
        if share.cut is None:
            total += whole
        else:
            inner, columns = len(share.cut.inner), len(share.cut.columns)
            part = Fraction(2 * inner, 3 * layer.expert_width) + Fraction(columns, 3 * shape.hidden)
            total += math.floor(whole * part)
        total += sum(layer.inner_bytes for _ in share.inner)
        total += sum(layer.down_bytes for _ in share.columns) if layer.mlp_width else 0
    return total


def drawn(rng: random.Random) -> ShardShape:
    """Return random sizes."""
    num_kv, hidden = rng.randint(1, 6), rng.randint(1, 2000)
    num = num_kv * rng.randint(1, 5)
    layers = tuple(
        LayerShape(
            num,
            num_kv,
            *(rng.randint(1, 99) for _ in range(2)),
            rng.choice([0, num, rng.randint(num, 40)]),
            rng.randint(1, 99),
            rng.choice([rng.randint(1, 500), PANEL * rng.randint(1, 40)]),
            rng.choice([0, rng.randint(1, 500)]),
            *(rng.randint(1, 99) for _ in range(3)),
        )
        for _ in range(rng.randint(1, 3))
    )
    return ShardShape(layers, hidden, rng.randint(1, 900), rng.randint(1, 9), rng.randint(1, 9))


@pytest.mark.parametrize(
    ("width", "hidden", "tp", "cut"),
    [
        (128, 128, 2, (range(64), range(64))),
        (128, 100, 2, (range(64), range(64))),
        (2880, 2880, 2, (range(1472), range(1472))),
        (1408, 2048, 4, (range(384), range(512))),
        (64, 128, 2, None),  # one rank would have no inner value
        (128, 64, 2, None),
        (320, 320, 5, (range(64), range(64))),
        (256, 320, 5, None),
        (192, 256, 2, None),  # one rank would do twice the work of the other
        (256, 192, 2, None),
        (384, 384, 4, None),
        (96, 128, 2, None),  # the gate would end inside a panel
        (128, 128, 1, None),
    ],
)
def test_each_expert_is_shared_if_ranks_get_about_the_same(
    width: int, hidden: int, tp: int, cut: tuple[range, range] | None
) -> None:
    layer = SHAPE.layers[0]._replace(expert_width=width, num_heads=8)
    shares = [r.layers[0] for r in plan_of(ShardShape((layer,), hidden, 300, 9, 3), tp).ranks]
    assert shares[0].cut == cut
    assert_experts_are_split(shares, layer, hidden)


@pytest.mark.parametrize("seed", range(40))
def test_random_sizes_are_covered_once_on_whole_panels(seed: int) -> None:
    shape = drawn(random.Random(seed))
    for tp in range(1, shape.layers[0].num_heads + 1):
        plan = plan_of(shape, tp)
        assert len(plan.ranks) == tp
        assert_is_split(plan)
        assert [rank.num_bytes for rank in plan.ranks] == [bytes_of(shape, r) for r in plan.ranks]


@pytest.mark.sampled(14)
@pytest.mark.parametrize("family", [*FAMILIES, *MOE, *DENSE])
def test_every_family_is_split_or_refused_by_the_name_of_a_part(family: str) -> None:
    if family not in SPLIT:
        with pytest.raises(ModelError) as error:
            shape_of_family(family)
        assert re.match(rf"model '{family}' cannot be split over ranks: ", str(error.value))
        return
    shape, num_bytes = shape_of_family(family)
    assert plan_of(shape, 1).ranks[0].num_bytes == num_bytes
    for tp in range(1, shape.layers[0].num_heads + 1):
        assert_is_split(plan_of(shape, tp))


def test_the_gate_of_a_head_is_split_with_its_queries() -> None:
    """The width is 192, and a head has 64 queries and 64 gates, 64 keys and 64 values."""
    with torch.inference_mode():
        layer = shape_of(discover(wide_model("gated"))).layers[0]
    assert (layer.head_bytes, layer.kv_head_bytes) == (192 * 128 * 2, 192 * 128 * 2)


def test_neighbouring_ranks_share_a_kv_head_if_there_are_fewer_than_ranks() -> None:
    assert split_heads(4, 2, 3) == [
        (range(1), range(1)),
        (range(1, 2), range(1)),
        (range(2, 4), range(1, 2)),
    ]
    latents = split_heads(4, 1, 2)
    assert latents == [(range(2), range(1)), (range(2, 4), range(1))]
    assert split_heads(12, 4, 3)[0] == (range(6), range(2))


def test_ranges_are_even_and_end_inside_a_panel_only_at_the_end() -> None:
    assert even(8, 3) == [range(3), range(3, 6), range(6, 8)]
    assert in_panels(300, 3) == [range(128), range(128, 256), range(256, 300)]
    assert in_panels(64, 2) == [range(64), range(64, 64)]
    assert cpu.PANEL == PANEL


@pytest.mark.parametrize("tp", [0, -1, 5, 2.0, "2", True, None])
def test_a_number_of_ranks_that_is_wrong_is_refused_with_those_that_can_be(tp: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"tp={tp!r} is")) as error:
        plan_of(SHAPE, tp)
    assert str(error.value).endswith("use a whole number from 1 to 4")


def test_too_many_ranks_are_refused_by_the_part_that_has_too_few() -> None:
    few = SHAPE._replace(layers=(SHAPE.layers[0]._replace(num_experts=3), SHAPE.layers[1]))
    with pytest.raises(ConfigError, match="layer 0 has 3 experts, and each rank needs one"):
        plan_of(few, 4)
    few = SHAPE._replace(layers=(SHAPE.layers[0], SHAPE.layers[1]._replace(num_heads=2)))
    with pytest.raises(ConfigError, match="layer 1 has 2 query heads, and each rank needs one"):
        plan_of(few, 3)
    one = SHAPE._replace(layers=(SHAPE.layers[0]._replace(num_heads=1, num_kv_heads=1),))
    with pytest.raises(ConfigError, match=r"use tp=1$"):
        plan_of(one, 2)


def test_query_heads_that_are_no_multiple_of_the_kv_heads_stay_on_one_rank() -> None:
    odd = SHAPE._replace(layers=(SHAPE.layers[0]._replace(num_heads=3),))
    with pytest.raises(ConfigError, match=r"layer 0: its 3 query heads .* 2 KV heads; use tp=1"):
        plan_of(odd, 2)
    assert plan_of(odd, 1).ranks[0].layers[0].heads == range(3)


def test_a_plan_is_printed_with_the_bytes_of_each_rank() -> None:
    lines = str(plan_of(SHAPE._replace(token_bytes=10_000), 3)).splitlines()
    names = "rank heads KV heads columns experts of each vocabulary MB"
    assert lines[0].split() == names.split()
    assert lines[1].split() == ["0", "0-0", "0-0", "0-63", "0-2", "0-95", "0-127", "1.3"]
    assert lines[3].split() == ["2", "2-3", "1-1", "128-129", "6-7", "0-95", "256-299", "0.4"]
    assert str(plan_of(SHAPE._replace(hidden=64), 2)).splitlines()[2].split()[3] == "none"
    wide = SHAPE._replace(layers=(SHAPE.layers[0]._replace(expert_width=128),), hidden=128)
    assert str(plan_of(wide, 2)).splitlines()[2].split()[4:6] == ["0-7", "64-127"]


def test_the_page_shows_the_plan_of_the_tiny_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "design" / "sharded.md").read_text()
    found = re.search(r"```python\n((?:(?!```).)*)```\n\n```\n(.*?)```", page, re.DOTALL)
    assert found is not None
    monkeypatch.chdir(ROOT)
    exec(found[1], {})
    assert capsys.readouterr().out == found[2]
