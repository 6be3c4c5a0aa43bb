"""Confidence: the largest probability of each token, of the row it belongs to, if asked for."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from qllm import QLLMEngine, SamplingParams
from qllm.errors import InvalidRequestError
from qllm.ingress import codec
from qllm.kernels import cpu
from qllm.kernels.cpu import course
from qllm.runner import heads
from qllm.runner.heads import HeadState
from qllm.runner.layers.linears import HEAD_BLOCK, Head, HeadBlocks
from qllm.runner.layers.rows import PLAIN
from qllm.runner.protocol import NEVER
from qllm.runner.sampling import sampler
from qllm.types import Logprobs, Sampled
from tests.support.serving import tiny_engine

TEXTS = ("def parse(", "import os\n", "class A:\n    def", "x = [1, 2, 3")
THREAD: dict[str, Any] = {"run_in": "thread", "conformance": False}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.2, "seed": 3},
    "biased": {"temperature": 0.0, "logit_bias": {5: 3.0}},
}


def answers(engine: QLLMEngine, **how: Any) -> list[Any]:
    """Answer to all texts at once."""
    sampling = SamplingParams(ignore_eos=True, **how)
    handles = [engine.submit(text, "BE", 20, sampling=sampling) for text in TEXTS]
    return [handle.result(60) for handle in handles]


@pytest.mark.parametrize("kind", KINDS)
def test_confidence_equals_the_best_log_probability(kind: str) -> None:
    """Log-probabilities are fp32, and weights below e^-32 count as 0 for them."""
    with tiny_engine(**THREAD) as engine:
        asked = answers(engine, confidence=True, **KINDS[kind])
        known = answers(engine, logprobs=1, **KINDS[kind])
        both = answers(engine, confidence=True, logprobs=1, **KINDS[kind])
    for one, other, third in zip(asked, known, both, strict=True):
        assert one.token_ids == other.token_ids == third.token_ids
        best = [math.exp(x.top[0][1]) for x in other.logprobs]
        assert one.confidences == pytest.approx(best, rel=1e-6)
        assert third.confidences == pytest.approx(best, rel=1e-6)
        assert (one.logprobs, other.confidences, third.logprobs) == (None, None, other.logprobs)
        assert 0 < min(one.confidences) < max(one.confidences) <= 1


def test_rows_that_did_not_ask_get_none_and_the_same_tokens() -> None:
    with tiny_engine(**THREAD) as engine:
        alone = answers(engine, temperature=0.0)
        handles = [
            engine.submit(
                text, "BE", 20,
                sampling=SamplingParams(temperature=0, ignore_eos=True, confidence=n % 2 == 1),
            )
            for n, text in enumerate(TEXTS)
        ]  # fmt: skip
        mixed = [handle.result(60) for handle in handles]
        asked = answers(engine, temperature=0.0, confidence=True)
    for n, (one, other, third) in enumerate(zip(alone, mixed, asked, strict=True)):
        assert one.token_ids == other.token_ids == third.token_ids
        assert one.confidences is None
        assert other.confidences == (third.confidences if n % 2 else None)


def test_without_a_request_for_it_nothing_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(logits: Any) -> Any:
        calls.append(len(logits))
        return log_total(logits)

    log_total = heads.log_total
    for module in heads, sampler:
        monkeypatch.setattr(module, "log_total", counted)
    with tiny_engine(**THREAD) as engine:
        for kind in KINDS.values():
            answers(engine, **kind)
        answers(engine, temperature=0.0, logprobs=2)
        assert calls == []
        answers(engine, temperature=0.0, confidence=True)
        assert sum(calls) >= 20 * len(TEXTS)


def test_confidence_crosses_the_rings_and_survives_drafts_and_swaps() -> None:
    with tiny_engine(**THREAD) as engine:
        expected = answers(engine, temperature=0.0, confidence=True)
    for how in {"draft": "lookup"}, {"max_kv_tokens": 64, "prefix_cache": False}:
        with tiny_engine(conformance=False, **how) as engine:
            found = answers(engine, temperature=0.0, confidence=True)
        for one, other in zip(expected, found, strict=True):
            assert one.token_ids == other.token_ids
            assert other.confidences == pytest.approx(one.confidences, rel=1e-6)
            assert len(other.confidences) == 20


@pytest.mark.parametrize("native", [True, False])
def test_each_row_has_its_own_and_a_restored_head_goes_on(native: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    vocab = 2 * HEAD_BLOCK + 7
    weight = torch.randn((vocab, 32), generator=generator).bfloat16()
    x = torch.randn((6, 32), generator=generator).bfloat16()
    linear = nn.Linear(32, vocab, bias=False)
    linear.weight.data = weight
    head = Head(linear, nn.Identity(), PLAIN, native, cpu.Arena())
    expected = (
        torch.cat([head(x, i) for i in range(head.num_blocks)], 1)
        .float()
        .double()
        .softmax(-1)
        .max(-1)
        .values
    )
    greedy, confident, inside = (0, 2, 3, 5), (2, 5), course.Course()
    state = HeadState(x, greedy, confident=confident)
    for block in range(head.num_blocks):
        blocks = HeadBlocks(at=block, end=block + 1, course=inside.address, stop_ns=NEVER)
        state.run(head, blocks, None, 1)
        state = HeadState.restored(dict(state.export()))
    found = state.confidence()
    assert sorted(found) == [2, 5]
    for row, confidence in found.items():
        assert confidence == pytest.approx(float(expected[row]), rel=1e-5)
    assert found[2] != pytest.approx(found[5], rel=1e-3)
    assert [row for row, _, _ in state.answers()] == list(greedy)


def test_a_token_keeps_its_confidence_in_a_record() -> None:
    for logprobs in None, Logprobs(-0.5, ()), Logprobs(-0.5, ((3, -0.5), (4, -2.0))):
        for confidence in None, 0.0, 0.625:
            token = Sampled(7, 3, logprobs, confidence=confidence)
            flags, body = codec.encode_token(token, 99)
            record = type("Record", (), {"flags": flags, "body": body})()
            assert codec.decode_token(record) == (token, 99)


def test_a_wrong_value_is_refused() -> None:
    wrong: Any = 1
    with pytest.raises(InvalidRequestError, match="confidence=1 must be a bool"):
        SamplingParams(confidence=wrong)
