"""Ranks in the simulator: the gathers that live ranks count, and the time of the slowest rank."""

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qllm import QLLMEngine, SamplingParams
from qllm.config import EngineConfig
from qllm.errors import ConfigError
from qllm.kernels import cpu
from qllm.plan import NO_CUTS, ModelShape, Plan, Row
from qllm.scheduler.compile import compile_program
from qllm.scheduler.program import START, Index, OpKind, Program
from qllm.sharded.group import Group
from qllm.sharded.runner import sharded_runner
from qllm.sim.calibrate import SimLoad, calibrate
from qllm.sim.costs import CostFile
from qllm.sim.presets import preset
from qllm.sim.rank_sizes import rank_sizes
from qllm.sim.ranks import (
    GLOO_1_GBIT,
    SHARED_MEMORY,
    LayerSizes,
    Link,
    RankPrices,
    RankSizes,
    most_experts,
)
from qllm.sim.run import simulate
from qllm.sim.timeline import Gathers, Prices, SimCosts, Timeline, Work
from qllm.types import Grain, Priority
from qllm.workloads.spec import RequestSpec
from tests.support.hybrids import make_hybrid
from tests.support.programs import add, next_row
from tests.support.sharded import DECODES, PREFILL, PROMPTS, model_with, wide_model
from tests.support.sweeps import Asked, Watched, compiled

assert cpu.MISSING is None, cpu.MISSING
pytestmark = pytest.mark.usefixtures("one_thread")
FREE = Link(0, 0)
"""A link that takes no time."""
NOTHING = SimCosts(**{name: 0 for name in SimCosts.__slots__ if name != "overlap"})

LIVE = [
    ("mixtral", None, 2),
    ("mixtral", None, 3),  # two KV heads on three ranks
    ("olmoe", None, 2),  # norms over all heads
    ("gated", None, 3),  # gates, and shared experts
    ("deepseek_v3", None, 2),  # latents, a dense layer, and shared experts
    ("gpt_oss", 320, 2),  # each expert is shared
    ("qwen3_moe", 128, 2),
    ("deepseek_v3", 320, 3),
]
"""Families, widths of experts that ranks share, and numbers of ranks."""


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "width", "tp"), LIVE)
@pytest.mark.parametrize("num_tasks", [None, 7])
def test_simulated_passes_have_the_gathers_and_the_bytes_of_live_ranks(
    name: str, width: int | None, tp: int, num_tasks: int | None
) -> None:
    """Live passes run at once, or stop after some tasks. Ranks count the bytes that they write."""
    runner = sharded_runner(model_with(name, "bf16", width), tp)
    backend: Any = runner.backend
    group: Group = backend.group
    sizes = rank_sizes(model_with(name, "bf16", width))
    assert sizes is not None
    assert sizes.range_rows == backend.costs.range_rows
    prices = RankPrices(SimCosts(), runner.shape, sizes, tp, SHARED_MEMORY)
    for request, ids in PROMPTS.items():
        add(runner, request, ids)
    num = runner.shape.num_layers
    for step in range(len(PREFILL) + DECODES):
        given = PREFILL[step] if step < len(PREFILL) else []
        rows = [Row(request, lo, hi, 0, num) for request, lo, hi in given]
        program = compiled(runner, rows or [next_row(runner, r) for r in PROMPTS], Grain.EXPERT)
        before = Gathers(group.num_gathers, group.gathered_bytes)
        runner.accept(program)
        at, num_stops = START, 0
        while at != program.end:
            at = runner.run(program, at, Watched() if num_tasks is None else Asked(num_tasks))
            num_stops += 1
        assert (num_stops > 3) == (num_tasks is not None)
        runner.finish(program)
        live = Gathers(group.num_gathers, group.gathered_bytes).plus(before, -1)
        assert Timeline(program, prices).gathers == live
    runner.close()


@pytest.fixture(scope="module")
def tiny_costs() -> CostFile:
    return calibrate("tiny", loads=[SimLoad(1, 40, 4)], rounds=1)


def test_a_simulated_run_has_the_gathers_of_a_live_engine(
    tiny_costs: CostFile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A prompt in chunks, then decode steps, under the same policy."""
    tiny_costs.write(tmp_path / "costs.json")
    costs, groups = CostFile.read(tmp_path / "costs.json"), list[Group]()

    def made(*given: Any) -> Group:
        groups.append(Group(*given))
        return groups[-1]

    monkeypatch.setattr("qllm.sharded.runner.Group", made)
    settings: dict[str, Any] = {
        "policy": "fcfs", "policy_settings": {"chunk_tokens": 32}, "max_kv_tokens": 4096
    }  # fmt: skip
    with QLLMEngine.from_pretrained(
        "tiny", tp=2, run_in="thread", conformance=False, threads=1, **settings
    ) as engine:
        before = Gathers(groups[0].num_gathers, groups[0].gathered_bytes)
        greedy = SamplingParams(temperature=0, ignore_eos=True)
        assert len(engine.submit(list(range(1, 101)), "BE", 6, sampling=greedy).result().token_ids)
        live = Gathers(groups[0].num_gathers, groups[0].gathered_bytes).plus(before, -1)
    spec = RequestSpec(at_s=0.0, priority=Priority.BE, num_prompt_tokens=100, max_tokens=6)
    found = simulate(
        [spec], "fcfs", costs, policy_settings={"chunk_tokens": 32},
        config=EngineConfig(tp=2, max_kv_tokens=4096),
    )  # fmt: skip
    assert found.gathers == live
    assert live.num == 9 * 5 * costs.shape.num_layers + 6, "nine passes, six of them with a head"


SHAPE = ModelShape(4, 8, 2, (False, True, True, True), 256, 4096)
LAYER = LayerSizes(
    num_heads=4, num_kv_heads=2, head_bytes=100, kv_head_bytes=50, num_experts=0, expert_bytes=0,
    expert_width=0, mlp_width=128, inner_bytes=4, down_bytes=2, whole_bytes=0, heads_width=256,
    normed_width=0, out_bytes=500, router_bytes=0,
)  # fmt: skip
MOE = LAYER.model_copy(
    update={"num_experts": 8, "expert_bytes": 3000, "expert_width": 48, "router_bytes": 256}
)
CUT = MOE.model_copy(update={"expert_width": 128})
SIZES = RankSizes(hidden=128, choice_bytes=10, range_rows=1000, moe=MOE, dense=LAYER)
EVEN = SIZES.model_copy(update={"moe": CUT})


def program_of(*rows: Row) -> Program:
    return compile_program(
        Plan(rows=rows, grain=Grain.EXPERT),
        frame_id=1,
        samples=[True] * len(rows),
        shape=SHAPE,
        cuts=NO_CUTS,
    )


PROMPT = Row(1, 0, 40, 0, 4)


def test_gathers_count_when_their_op_has_ended() -> None:
    timeline = Timeline(program_of(PROMPT), RankPrices(SimCosts(), SHAPE, SIZES, 2, SHARED_MEMORY))
    assert timeline.gathers_at(START) == Gathers(0, 0)
    assert timeline.gathers_at(Index(timeline.num_ops, 0)) == timeline.gathers
    found = [timeline.gathers_at(Index(i, 0)) for i in range(timeline.num_ops + 1)]
    steps = [b.plus(a, -1).num for a, b in itertools.pairwise(found)]
    # the embedding; heads and sum, and the dense MLP; heads, sum, router, shared, experts, sum
    assert steps == [0, 2, 3, *[2, 3, 1, 1] * 3, 1]
    assert timeline.gathers_at(Index(4, 1)) == found[4], "inside an op"


@pytest.mark.parametrize("sizes", [SIZES, EVEN])
@pytest.mark.parametrize("tp", [2, 4])
def test_a_link_adds_the_time_of_all_gathers(tp: int, sizes: RankSizes) -> None:
    if tp == 4:
        sizes = SIZES.model_copy(update={"hidden": 256})
    link = Link(5000, 0.5)
    both = [
        Timeline(program_of(PROMPT), RankPrices(SimCosts(), SHAPE, sizes, tp, each))
        for each in (FREE, link)
    ]
    gathers = both[0].gathers
    assert gathers == both[1].gathers
    expected = (tp - 1) * (gathers.num * 5000 + gathers.num_bytes / tp * 0.5)
    assert both[1].total_ns - both[0].total_ns == pytest.approx(expected, abs=200)  # rounded units
    assert SHARED_MEMORY.ns(Gathers(10, 1 << 20), 2) == 6100
    assert GLOO_1_GBIT.ns(Gathers(1, 6 << 20), 2) / 1e6 == pytest.approx(30, abs=0.5)


def ns_of(costs: SimCosts, kind: OpKind, work: Work, sizes: RankSizes, tp: int = 2) -> float:
    """Return the time of an op of a layer with experts, with gathers that take no time."""
    is_moe = kind is not OpKind.COMBINE or bool(costs.combine_token_ns)
    prices = RankPrices(costs, SHAPE, sizes, tp, FREE)
    whole = Prices(costs, SHAPE)
    return prices._time(kind, work, is_moe) / whole._time(kind, work, is_moe)


ONE, MANY = Work(1, 1, 50, 0), Work(40, 1, 0, 820)
ROUTER = 256 / (256 + 128 * 4 + 128 * 2)
PARTS = [
    ({"attn_ns": 1.0}, OpKind.ATTN, ONE, 0.5),
    ({"attn_ns": 1.0}, OpKind.ATTN, MANY, 0.75),  # half of the weight is `out`, which is read whole
    ({"attn_token_ns": 1.0}, OpKind.ATTN, MANY, 0.5),
    ({"kv_token_ns": 1.0}, OpKind.ATTN, ONE, 0.5),
    ({"pair_ns": 1.0}, OpKind.ATTN, MANY, 0.5),
    ({"route_ns": 1.0}, OpKind.ROUTE, ONE, ROUTER + (1 - ROUTER) / 2),
    ({"route_token_ns": 1.0}, OpKind.ROUTE, ONE, ROUTER + (1 - ROUTER) / 2),
    ({"route_token_ns": 1.0}, OpKind.ROUTE, MANY, 0.5),
    ({"combine_token_ns": 1.0}, OpKind.COMBINE, ONE, 1.0),
    ({"combine_token_ns": 1.0}, OpKind.COMBINE, Work(3, 1, 0, 0), 2 / 3),
    ({"dense_ns": 1.0}, OpKind.COMBINE, ONE, 0.5),
    ({"dense_token_ns": 1.0}, OpKind.COMBINE, ONE, 0.5),
    ({"head_ns": 1.0}, OpKind.HEAD, ONE, 0.5),
    ({"head_row_ns": 1.0}, OpKind.HEAD, ONE, 0.5),
    ({"embed_token_ns": 1.0}, OpKind.EMBED, ONE, 0.5),
    ({"experts_ns": 1.0}, OpKind.EXPERTS, ONE, 1.0),
]
"""Costs, an op of two ranks, and the part of the time of one process that it takes."""


@pytest.mark.parametrize(("given", "kind", "work", "part"), PARTS)
def test_an_op_takes_the_time_of_the_largest_share(
    given: dict[str, float], kind: OpKind, work: Work, part: float
) -> None:
    assert ns_of(replace(NOTHING, **given), kind, work, SIZES) == pytest.approx(part)


@pytest.mark.parametrize("name", ["expert_ns", "expert_token_ns"])
def test_whole_experts_take_longer_than_shared_ones(name: str) -> None:
    """Two distinct experts of eight: both are of one rank in 3 of 7 cases."""
    costs = replace(NOTHING, **{name: 1.0})
    assert ns_of(costs, OpKind.EXPERTS, ONE, EVEN) == pytest.approx(0.5)
    assert ns_of(costs, OpKind.EXPERTS, ONE, SIZES) == pytest.approx((2 * 3 + 1 * 4) / 7 / 2)


def test_ranks_that_share_a_kv_head_read_all_of_it() -> None:
    """Each of four ranks has one of four query heads, and one of two KV heads."""
    costs = replace(NOTHING, pair_ns=1.0)
    assert ns_of(costs, OpKind.ATTN, MANY, SIZES, 4) == pytest.approx(0.25)
    costs = replace(NOTHING, kv_token_ns=1.0)
    assert ns_of(costs, OpKind.ATTN, ONE, SIZES, 4) == pytest.approx(0.5)


@pytest.mark.parametrize("sizes", [(2, 2), (3, 2), (2, 2, 1), (4, 1, 1)])
def test_the_most_experts_of_a_rank_are_the_mean_over_all_choices(sizes: tuple[int, ...]) -> None:
    owners = [rank for rank, size in enumerate(sizes) for _ in range(size)]
    for num in range(len(owners) + 1):
        chosen = list(itertools.combinations(owners, num))
        most = [max(map(one.count, range(len(sizes)))) for one in chosen]
        assert most_experts(num, sizes) == pytest.approx(sum(most) / len(most))


def test_large_numbers_of_experts_do_not_overflow() -> None:
    assert 256 < most_experts(512, (512, 512)) < 280


def test_a_range_of_shared_experts_has_a_gather_of_its_own() -> None:
    prices = RankPrices(SimCosts(), SHAPE, EVEN, 2, SHARED_MEMORY)
    found = [prices.gathers(OpKind.EXPERTS, Work(n, 1, 0, 0), True) for n in (1, 500, 501, 2000)]
    assert [one.num for one in found] == [2, 2, 3, 5]
    assert found[1].num_bytes == 500 * 2 * (128 + 128) * 2


# -- what is refused


@pytest.mark.parametrize("value", [-1, math.inf, math.nan, "1", True, None])
@pytest.mark.parametrize("name", ["latency_ns", "byte_ns"])
def test_a_link_without_a_time_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}=.* is no time of a gather; use a finite num"):
        Link(**{"latency_ns": 1, "byte_ns": 1, name: value})


def test_costs_without_the_sizes_of_ranks_are_refused() -> None:
    costs = preset("cpu", "1m")
    with pytest.raises(
        ConfigError, match=r"^tp=2 needs the sizes by which ranks share '1m'.* tp=1"
    ):
        simulate([], "fcfs", costs, config=EngineConfig(tp=2, max_kv_tokens=4096))


def test_more_ranks_than_heads_are_refused(tiny_costs: CostFile) -> None:
    assert tiny_costs.ranks is not None
    with pytest.raises(ConfigError, match=r"^tp=64 is too many ranks: layer 0 has 8 "):
        tiny_costs.prices(64, SHARED_MEMORY)
    lacking = tiny_costs.model_copy(update={"ranks": SIZES.model_copy(update={"moe": None})})
    with pytest.raises(ConfigError, match="have no layer with experts, and the model has one"):
        lacking.prices(2, SHARED_MEMORY)


def test_models_that_cannot_be_split_have_no_sizes() -> None:
    assert rank_sizes(make_hybrid("qwen3_next")) is None
    model = wide_model("mixtral")
    assert rank_sizes(model) is not None
    model.model.layers[1].self_attn.register_forward_hook(lambda *_: None)
    assert rank_sizes(model) is None
