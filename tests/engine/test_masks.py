"""What a grammar allows, found out beside the model's pass: the tokens of the plain way."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qllm.grammar import Vocabulary
from qllm.kernels import cpu
from qllm.kernels.cpu.masks import by_hand, keep_allowed
from qllm.models.tokenizer import load_tokenizer
from qllm.runner.sampling.definition import draw, share_of, weights
from qllm.runner.sampling.sampler import Sampler
from qllm.types import SamplingParams, StructuredOutputs

VOCAB, ENDS = 3072, frozenset({2, 0})
FORMS: tuple[dict[str, Any], ...] = (
    {"regex": "([a-z]{1,6} ){3,9}"},
    {"json": {"type": "object", "maxProperties": 3}},
    {"choice": ["red", "green", "blue sky"]},
)


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(load_tokenizer("tiny"), VOCAB, ENDS)


@pytest.mark.parametrize("kind", [] if cpu.native is None else cpu.native.available())
@given(num=st.integers(1, 400), seed=st.integers(0, 2**32 - 1), share=st.sampled_from([0, 0.1, 1]))
@settings(max_examples=40, deadline=None)
def test_the_kernel_sets_what_torch_sets(kind: str, num: int, seed: int, share: float) -> None:
    draws = np.random.default_rng(seed)
    bits = draws.random(-(-num // 32) * 32) < share
    words = torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32).copy())
    want = torch.from_numpy(draws.standard_normal(num))
    whole = torch.full((num + 2,), 7.0, dtype=torch.float64)
    whole[1:-1] = want
    by_hand(want, words)
    before = cpu.kind()
    try:
        cpu.native.use(kind)
        keep_allowed(whole[1:-1], words)
    finally:
        cpu.native.use(before)
    assert torch.equal(whole[1:-1], want)
    assert whole[0] == whole[-1] == 7, "nothing beside them is touched"


def plain_token(
    vocabulary: Vocabulary, sampling: SamplingParams, logits: Any, outputs: list[int]
) -> int:
    """The token by numpy, from a grammar that begins anew."""
    assert sampling.structured_outputs is not None
    matcher = vocabulary.matcher(sampling.structured_outputs)
    assert matcher.allow(outputs) is None
    bits = np.unpackbits(matcher.words.view(np.uint8), count=VOCAB, bitorder="little")
    x = np.where(bits == 1, logits.astype(np.float64), -np.inf)
    if sampling.greedy:
        return int(x.argmax())
    return draw(weights(x, sampling), share_of(sampling.seed or 0, 10 + len(outputs)))


@given(
    seed=st.integers(0, 2**62),
    form=st.sampled_from(FORMS),
    how=st.sampled_from(
        [
            {"temperature": 0},
            {"temperature": 1.0},
            {"temperature": 0.7, "top_p": 0.9},
            {"temperature": 1.3, "top_k": 7, "min_p": 0.01},
        ]
    ),
    again=st.lists(st.integers(0, 11), max_size=4),
)
@settings(max_examples=25, deadline=None)
def test_tokens_are_those_of_the_plain_way(
    vocabulary: Vocabulary, seed: int, form: dict[str, Any], how: dict[str, Any], again: list[int]
) -> None:
    """Also when a step is repeated, and when an answer begins again."""
    form = {"structured_outputs": StructuredOutputs(**form)}
    sampling = SamplingParams(seed=seed, **how, **form)
    sampler = Sampler()
    sampler.vocabulary = vocabulary
    sampler.add(1, sampling, [5])
    outputs: list[int] = []

    def ask(outputs: list[int]) -> int:
        draws = np.random.default_rng(seed % 2**32 + len(outputs))
        logits = draws.standard_normal(VOCAB).astype(np.float32) * 4
        found = sampler.sample(torch.from_numpy(logits)[None], [1], [10 + len(outputs)], [outputs])
        assert found[0].error is None
        assert found[0].token_id == plain_token(vocabulary, sampling, logits, outputs)
        return found[0].token_id

    for _ in range(12):
        token = ask(outputs)
        if token in ENDS:
            break
        outputs = [*outputs, token]
    for length in again:
        if length <= len(outputs):
            ask(outputs[:length])


def test_the_next_mask_is_there_before_it_is_asked_for(vocabulary: Vocabulary) -> None:
    """The thread has done the work, and what it did is used."""
    sampler = Sampler()
    sampler.vocabulary = vocabulary
    form = StructuredOutputs(regex="[a-z]{9}")
    sampler.add(1, SamplingParams(seed=1, structured_outputs=form), [5])
    logits = torch.zeros((1, VOCAB))
    outputs: list[int] = []
    for _ in range(3):
        outputs.append(sampler.sample(logits, [1], [1], [outputs])[0].token_id)
        sampler.look_ahead(1, outputs)
    assert sampler._builder is not None
    sampler._builder.submit(int).result()  # one thread: all before it is done
    limits = sampler._requests[1].limits
    assert limits is not None
    matcher = limits._matcher
    assert matcher is not None
    assert matcher._is_known

    class Refuses:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"{name} was called on the loop's thread")

    matcher._matcher = Refuses()  # type: ignore[assignment]
    assert sampler.sample(logits, [1], [2], [outputs])[0].error is None
