"""The parts of `bench/` that decide what a number means."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

BENCH = Path(__file__).resolve().parent.parent / "bench"


@pytest.fixture(scope="module")
def pareto() -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCH))
    try:
        import pareto

        yield pareto
    finally:
        sys.path.remove(str(BENCH))


@pytest.fixture(scope="module")
def routing() -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCH))
    try:
        import routing

        yield routing
    finally:
        sys.path.remove(str(BENCH))


def points(module: ModuleType, *pairs: tuple[float, float]) -> list[Any]:
    return [module.Point(f"rival:step_tokens={i}", be, ms) for i, (be, ms) in enumerate(pairs)]


def test_the_frontier_has_what_nobody_beats(pareto: ModuleType) -> None:
    found = pareto.frontier(points(pareto, (10, 100), (20, 90), (30, 300), (25, 400), (30, 310)))
    assert [(p.be_tokens_per_s, p.ls_ttft_p99_ms) for p in found] == [(20, 90), (30, 300)]


@pytest.mark.parametrize(
    ("ours", "rivals", "rival_ms", "how"),
    [
        ((100, 10), [(98, 40), (50, 20)], 40, "measured"),
        ((100, 10), [(102, 40), (50, 20)], 40, "measured"),
        ((100, 10), [(96, 40), (50, 20)], 40, "rival gives BE less"),
        ((100, 10), [(104, 40)], 40, "rival gives BE more"),
        ((100, 10), [(150, 80), (50, 20)], 40, "interpolated"),
        ((100, 10), [(150, 15), (98, 40)], 15, "rival gives BE more"),
    ],
)
def test_the_rival_is_taken_at_our_throughput(
    pareto: ModuleType,
    ours: tuple[float, float],
    rivals: list[tuple[float, float]],
    rival_ms: float,
    how: str,
) -> None:
    found = pareto.match(pareto.Point("ours", *ours), points(pareto, *rivals))
    assert found.how == how
    assert found.rival_ms == pytest.approx(rival_ms)
    assert found.ratio == pytest.approx(rival_ms / 10)


def test_no_rival_is_no_match(pareto: ModuleType) -> None:
    assert pareto.match(pareto.Point("ours", 1, 1), []) is None


def test_forced_routing_is_even_or_skewed_and_follows_the_token(routing: ModuleType) -> None:
    x_TD = torch.randn(4000, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    counts = {}
    for kind in ("uniform", "skewed"):
        ids_TK = routing.choose(x_TD, 3, 24, 4, kind)
        assert ids_TK.shape == (4000, 4)
        assert all(len(set(row)) == 4 for row in ids_TK[:200].tolist())
        assert torch.equal(ids_TK[7:9], routing.choose(x_TD[7:9], 3, 24, 4, kind))
        counts[kind] = torch.bincount(ids_TK.flatten(), minlength=24).sort(descending=True)[0]
    even = 4000 * 4 / 24
    assert counts["uniform"][0] < 1.2 * even
    assert counts["uniform"][-1] > 0.8 * even
    assert counts["skewed"][0] > 3 * even
    assert counts["skewed"][-1] < 0.5 * even


@pytest.mark.slow
def test_routing_is_forced_inside_the_block_alone(routing: ModuleType, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from qllm.random_moe import make_random_moe

    model = AutoModelForCausalLM.from_pretrained(make_random_moe(tmp_path / "m", size="1m")).eval()
    ids = torch.arange(40)[None]
    with torch.inference_mode():
        before = model(ids).logits
        with routing.forced(model, "uniform"):
            uniform = model(ids).logits
            assert torch.equal(uniform, model(ids).logits)
        assert not torch.equal(uniform, before)
        assert torch.equal(model(ids).logits, before)
    with pytest.raises(ValueError, match="routing 'x' is unknown"), routing.forced(model, "x"):
        pass
