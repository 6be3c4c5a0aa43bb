"""`qllm.measure.depths`: agreement with the whole model is that of transformers' cut models."""

from typing import Any

import pytest
import torch

from qllm.config import engine_config
from qllm.errors import ConfigError
from qllm.measure.depths import SPREAD, TEXTS, bins_of, candidates, default_texts, profile_depths
from qllm.models.depth_profile import EDGES, Bin, DepthProfile
from qllm.models.loader import load
from tests.support.files import ROOT, python_files
from tests.support.serving import tiny_engine

BUDGET = {"memory": "2GiB", "conformance": False}
DTYPE = "float32"
"""In bf16 our kernels and transformers' round near ties apart."""
NUM = 90


@pytest.fixture(scope="module")
def found() -> DepthProfile:
    config = engine_config(dict(BUDGET))
    texts = {name: default_texts()[name] for name in ("code", "prose")}
    return profile_depths(
        "tiny", texts, config, dict(BUDGET), named=[3, 1], tokens=NUM, threads=1, dtype=DTYPE
    )


def test_agreement_and_confidence_are_those_of_models_that_transformers_cuts(
    found: DepthProfile,
) -> None:
    whole = load("tiny", dtype=DTYPE)
    assert whole.tokenizer is not None
    assert [one.depth for one in found.depths] == [1, 3, 4]
    for one in found.depths:
        cut, bins = load("tiny", dtype=DTYPE, depth=one.depth).model, torch.zeros(len(EDGES), 2)
        for name, agreement in one.agreement.items():
            text = default_texts()[name]
            ids = whole.tokenizer(text, add_special_tokens=False)["input_ids"][:NUM]
            bos = whole.tokenizer("a")["input_ids"][:-1]
            given = torch.tensor([[*bos, *ids]])
            with torch.inference_mode():
                answers = whole.model(given).logits[0, len(bos) :].argmax(-1)
                logits = cut(given).logits[0, len(bos) :].float()
            agreed = logits.argmax(-1) == answers
            assert agreement == pytest.approx(float(agreed.float().mean()), abs=1e-6)
            places = torch.bucketize(
                logits.softmax(-1).max(-1).values, torch.tensor(EDGES), right=True
            )
            for place, right in zip(places.tolist(), agreed.tolist(), strict=True):
                bins[place - 1] += torch.tensor([1, right])
        moved = (torch.tensor(one.bins) - bins).abs().sum()
        assert int(moved) <= 4, "a position may lie at an edge"
        assert one.num == 2 * NUM
    assert found.depths[-1].agreed == 1
    assert 0 < found.depths[0].agreed < found.depths[1].agreed < 1


def test_sizes_are_those_of_an_engine_that_serves(found: DepthProfile) -> None:
    sizes = []
    for one in found.depths:
        with tiny_engine(depth=one.depth, dtype=DTYPE, **BUDGET) as engine:
            stats = engine.stats()
            assert one.weight_bytes == stats["weight_bytes"]
            assert one.kv_tokens == engine.config.pool_tokens
            sizes.append(one.weight_bytes)
        assert one.alone_per_s > 0
        assert one.batch_per_s > 0
        assert one.prompt_per_s > 0
    assert sizes == sorted(set(sizes))
    assert found.memory == 2 << 30


def test_candidates_are_all_layers_of_a_shallow_model_and_some_of_a_deep_one() -> None:
    assert candidates(4, None) == (1, 2, 3, 4)
    assert candidates(12, None) == tuple(range(1, 13))
    assert candidates(48, None) == (6, 12, 18, 24, 30, 36, 42, 48)
    assert len(candidates(13, None)) == SPREAD
    assert candidates(9, [5, 2, 5]) == (2, 5, 9)
    for wrong in (0, 10):
        with pytest.raises(ConfigError, match=rf"depth {wrong} must be in \[1, 9\]"):
            candidates(9, [wrong])


def test_a_position_is_counted_in_the_bin_of_its_own_confidence() -> None:
    confidence = torch.tensor([0.0, 0.09, 0.1, 0.3, 0.95, 0.99, 1.0])
    agreed = torch.tensor([True, False, True, False, True, False, True])
    expected = [(2, 1), (1, 1), (1, 0), (0, 0), (0, 0), (1, 1), (2, 1)]
    assert bins_of(agreed, confidence) == [Bin(*pair) for pair in expected]


def windows(text: str, width: int = 48) -> set[str]:
    plain = " ".join(text.split())
    return {plain[at : at + width] for at in range(len(plain) - width + 1)}


def test_no_bench_and_no_test_reads_the_texts_of_the_package() -> None:
    own = set().union(*map(windows, default_texts().values()))
    assert len(own) > 6000
    others = [ROOT / path for path in python_files("bench", "scripts", "qllm", "tests")]
    others += [*ROOT.glob("docs/**/*.md"), ROOT / "README.md", *ROOT.glob("bench/**/*.json")]
    assert len(others) > 300
    assert [path for path in others if own & windows(path.read_text(errors="replace"))] == []


def test_the_texts_are_of_four_kinds_and_belong_to_the_package() -> None:
    texts = default_texts()
    assert tuple(texts) == TEXTS
    assert min(map(len, texts.values())) > 1500


def test_a_candidate_above_the_layers_and_a_short_text_are_refused() -> None:
    config = engine_config(dict(BUDGET))

    def refused(why: str, texts: dict[str, str], **more: Any) -> None:
        with pytest.raises(ConfigError, match=why):
            profile_depths("tiny", texts, config, dict(BUDGET), threads=1, **more)

    refused(r"depth 5 must be in \[1, 4\]", default_texts(), named=[5], tokens=40)
    refused("has 1 token; a profile needs 32", {"x": "a"})
