"""The sampler: its distribution, its laws, and transformers as the reference of what is kept."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from qllm.errors import InvariantError
from qllm.runner.sampling.definition import draw, philox4x32, share_of, weights
from qllm.runner.sampling.sampler import Sampler
from qllm.types import Sampled, SamplingParams


def words(text: str) -> tuple[int, ...]:
    return tuple(int(word, 16) for word in text.split())


def sample_one(
    logits: list[float] | torch.Tensor,
    sampling: SamplingParams,
    prompt: tuple[int, ...] = (),
    outputs: tuple[int, ...] = (),
    position: int = 0,
) -> Sampled:
    sampler = Sampler()
    sampler.add(7, sampling, prompt)
    row = torch.as_tensor(logits, dtype=torch.float32)
    [sampled] = sampler.sample(row[None], [7], [position], [outputs])
    return sampled


def kept(x: torch.Tensor, sampling: SamplingParams) -> set[int]:
    return set(np.flatnonzero(weights(x.double().numpy(), sampling)).tolist())


def finite(x: torch.Tensor) -> set[int]:
    return set(torch.isfinite(x[0]).nonzero()[:, 0].tolist())


def rows(num: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num, width, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize(
    ("counter", "key", "block"),
    [  # Random123, tests/kat_vectors
        ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (
            "ffffffff ffffffff ffffffff ffffffff",
            "ffffffff ffffffff",
            "408f276d 41c83b0e a20bc7c6 6d5451fd",
        ),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_published_words(counter: str, key: str, block: str) -> None:
    assert philox4x32(words(counter), words(key)) == words(block)  # type: ignore[arg-type]


def test_uniform_is_made_of_the_first_53_bits_of_seed_and_position() -> None:
    assert share_of(0, 0) == 0x6627E8D5E169C58D >> 11
    seed, position = 0x299F31D0A4093822, 5
    high, low, _, _ = philox4x32((5, 0, 0, 0), (0xA4093822, 0x299F31D0))
    assert share_of(seed, position) == (high << 32 | low) >> 11
    assert share_of(seed, 2**32 + 5) != share_of(seed, position)


def test_draw_inverts_the_cumulative_weight_in_id_order() -> None:
    w = np.array([0.0, 1.0, 0.0, 2.0, 1.0, 0.0])
    shares = (0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-53)
    assert [draw(w, int(u * 2**53)) for u in shares] == [1, 1, 3, 3, 4, 4]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_follow_the_softmax(temperature: float) -> None:
    logits, num = torch.tensor([1.0, -1.0, 0.5, 2.0, -math.inf, 0.0]), 8000
    sampler = Sampler()
    sampler.add(0, SamplingParams(temperature=temperature, seed=11), [])
    counts = Counter(
        sampled.token_id
        for sampled in sampler.sample(logits.expand(num, -1), [0] * num, range(num), [()] * num)
    )
    expected = (torch.softmax(logits.double() / temperature, 0) * num).tolist()
    assert counts[4] == 0
    chi2 = sum((counts[i] - e) ** 2 / e for i, e in enumerate(expected) if e > 0)
    assert chi2 < 18.5  # 4 degrees of freedom: exceeded once in 1000 seeds


def test_seeds_are_independent_of_one_another() -> None:
    num, logits = 4000, torch.zeros(1, 4)
    sampler = Sampler()
    for seed in range(num):
        sampler.add(seed, SamplingParams(seed=seed), [])
    got = sampler.sample(logits.expand(num, -1), range(num), [3] * num, [()] * num)
    counts = Counter(sampled.token_id for sampled in got)
    assert sum((counts[i] - num / 4) ** 2 / (num / 4) for i in range(4)) < 16.3


SETTINGS = [
    SamplingParams(seed=1),
    SamplingParams(temperature=0),
    SamplingParams(seed=1, top_p=0.8, temperature=0.7),
    SamplingParams(seed=2, top_k=5, logprobs=3),
    SamplingParams(seed=3, min_p=0.05, repetition_penalty=1.3),
    SamplingParams(temperature=0, presence_penalty=1.0, frequency_penalty=0.5),
    SamplingParams(seed=4, logit_bias={3: 4.0, 5: -100.0}),
]


@settings(deadline=None, max_examples=40)
@given(order=st.permutations(range(len(SETTINGS))), cut=st.integers(0, len(SETTINGS)))
def test_a_token_depends_on_nothing_but_its_own_row(order: list[int], cut: int) -> None:
    logits = rows(len(SETTINGS), 101)
    outputs = [tuple(range(i)) for i in range(len(SETTINGS))]
    sampler = Sampler()
    for i, sampling in enumerate(SETTINGS):
        sampler.add(i, sampling, [1, 2, 3])
    alone = [
        sampler.sample(logits[i : i + 1], [i], [10 + i], [outputs[i]])[0]
        for i in range(len(SETTINGS))
    ]
    together: list[Sampled] = []
    for batch in (order[:cut], order[cut:]):
        positions = [10 + i for i in batch]
        together += sampler.sample(logits[batch], batch, positions, [outputs[i] for i in batch])
    assert together == [alone[i] for i in order]


def test_a_seed_repeats_its_tokens_and_leaves_the_global_generators_alone() -> None:
    logits = rows(20, 50)
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    answers = []
    for seed in (5, 5, 6):
        sampler = Sampler()
        sampler.add(0, SamplingParams(seed=seed), [])
        got = sampler.sample(logits, [0] * 20, range(20), [()] * 20)
        answers.append([sampled.token_id for sampled in got])
    assert answers[0] == answers[1] != answers[2]
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert (np.random.get_state()[1] == numpy_state).all()


def test_requests_without_a_seed_differ() -> None:
    sampler = Sampler()
    for i in range(2):
        sampler.add(i, SamplingParams(), [])
    logits = torch.zeros(64, 1000)
    got = [
        [s.token_id for s in sampler.sample(logits, [i] * 64, range(64), [()] * 64)] for i in (0, 1)
    ]
    assert got[0] != got[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_lowest_id_of_a_tie(dtype: torch.dtype) -> None:
    row = [0.0, 2.0, 1.0, 2.0]
    for sampling in (
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, logprobs=4),
        SamplingParams(temperature=0, presence_penalty=1.0),
    ):
        sampler = Sampler()
        sampler.add(0, sampling, [])
        [sampled] = sampler.sample(torch.tensor([row], dtype=dtype), [0], [0], [()])
        assert sampled.token_id == 1
        assert (sampled.logprobs is None) == (sampling.logprobs is None)
        if sampled.logprobs:
            assert [i for i, _ in sampled.logprobs.top] == [1, 3, 2, 0]


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    k=st.integers(1, 40),
    p=st.floats(0.05, 0.99),
    min_p=st.floats(0.001, 0.9),
)
def test_what_is_kept_is_what_transformers_keeps(seed: int, k: int, p: float, min_p: float) -> None:
    x, ids = rows(1, 64, seed), torch.zeros(1, 1, dtype=torch.long)
    assert kept(x[0], SamplingParams(top_k=k)) == finite(TopKLogitsWarper(k)(ids, x))
    assert kept(x[0], SamplingParams(min_p=min_p)) == finite(MinPLogitsWarper(min_p)(ids, x))
    nucleus = finite(TopPLogitsWarper(p)(ids, x.double()))
    assert kept(x[0], SamplingParams(top_p=p)) == nucleus
    both = TopPLogitsWarper(p)(ids, TopKLogitsWarper(k)(ids, x.double()))
    assert kept(x[0], SamplingParams(top_k=k, top_p=p)) == finite(both)


@pytest.mark.parametrize("spread", [0.0, 0.1, 3.0, 30.0])
@pytest.mark.parametrize("p", [1e-6, 0.3, 0.9, 0.999])
def test_the_nucleus_is_the_smallest_set_and_lowest_ids_win_ties(spread: float, p: float) -> None:
    x = (rows(1, 500)[0] * spread).round().double().numpy()
    w = np.exp(x - x.max())
    order = sorted(range(500), key=lambda i: (-w[i], i))
    mass, chosen = 0.0, set()
    for i in order:
        if mass >= p * w.sum():
            break
        mass += w[i]
        chosen.add(i)
    got = kept(torch.tensor(x), SamplingParams(top_p=p))
    assert len(got ^ chosen) <= (spread == 0)  # there p * 500 is whole, up to rounding


def test_top_k_and_min_p_keep_ties() -> None:
    x = torch.tensor([1.0, 3.0, 2.0, 2.0])
    assert kept(x, SamplingParams(top_k=2)) == {1, 2, 3}
    assert kept(x, SamplingParams(top_k=9)) == {0, 1, 2, 3}
    assert kept(x[:3], SamplingParams(top_k=2)) == {1, 2}
    assert kept(x, SamplingParams(top_k=3, min_p=0.9)) == {1}
    assert kept(torch.tensor([2.0, 1.0, 2.0]), SamplingParams(min_p=1.0)) == {0, 2}


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-5])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    x = rows(1, 300)[0]
    sampled = sample_one(x, SamplingParams(temperature=temperature, seed=0, top_p=0.9))
    assert sampled.token_id == int(x.argmax())


@settings(deadline=None, max_examples=60)
@given(
    prompt=st.lists(st.integers(0, 11), max_size=8),
    outputs=st.lists(st.integers(0, 11), max_size=8),
    r=st.floats(0.5, 2.0),
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
    bias=st.dictionaries(st.integers(0, 11), st.floats(-5, 5), max_size=3),
)
@example(prompt=[], outputs=[], r=1.0, presence=0.0, frequency=0.0, bias={11: 99.0})
def test_penalties_equal_a_plain_reference(
    prompt: list[int],
    outputs: list[int],
    r: float,
    presence: float,
    frequency: float,
    bias: dict[int, float],
) -> None:
    x = rows(1, 12, 3)[0]
    expected = [float(v) for v in x]
    for i in range(12):
        expected[i] += bias.get(i, 0.0)
        if i in prompt or i in outputs:
            expected[i] = expected[i] / r if expected[i] > 0 else expected[i] * r
        expected[i] -= frequency * outputs.count(i) + presence * (i in outputs)
    sampling = SamplingParams(
        temperature=0,
        repetition_penalty=r,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=bias,
    )
    got = sample_one(x, sampling, tuple(prompt), tuple(outputs)).token_id
    assert expected[got] >= max(expected) - 1e-9


def test_each_penalty_works_alone() -> None:
    for sampling in (
        SamplingParams(temperature=0, presence_penalty=1.5),
        SamplingParams(temperature=0, frequency_penalty=0.75),
        SamplingParams(temperature=0, repetition_penalty=3.0),
    ):
        assert sample_one([1.0, 0.5], sampling).token_id == 0
        assert sample_one([1.0, 0.5], sampling, outputs=(0, 0)).token_id == 1
        by_prompt = sampling.repetition_penalty != 1
        assert sample_one([1.0, 0.5], sampling, prompt=(0, 0)).token_id == by_prompt


def test_the_repetition_penalty_is_that_of_transformers() -> None:
    x, prompt, outputs = rows(1, 40, 1), (3, 9, 9, 30), (4, 9)
    ids = torch.tensor([[*prompt, *outputs]])
    penalized = RepetitionPenaltyLogitsProcessor(1.7)(ids, x.double())
    probabilities = torch.softmax(penalized[0], 0).cumsum(0)
    for position in range(200):
        sampling = SamplingParams(repetition_penalty=1.7, seed=8)
        got = sample_one(x[0], sampling, prompt, outputs, position).token_id
        assert got == int(
            torch.searchsorted(probabilities, share_of(8, position) / 2**53, right=True)
        )


def test_logprobs_are_of_the_raw_distribution() -> None:
    x = rows(1, 30, 2)[0]
    sampling = SamplingParams(temperature=3.0, top_k=2, seed=0, logprobs=5, logit_bias={0: 100.0})
    token_id, logprobs = sample_one(x, sampling)[1:3]
    expected = torch.log_softmax(x.double(), 0).float()
    assert token_id == 0
    assert logprobs is not None
    assert logprobs.chosen == float(expected[0])
    values, ids = expected.topk(5)
    assert logprobs.top == tuple(zip(ids.tolist(), values.tolist(), strict=True))


@pytest.mark.parametrize(("asked", "given_"), [(0, 0), (4, 4), (20, 4)])
def test_logprobs_list_at_most_the_vocabulary(asked: int, given_: int) -> None:
    logprobs = sample_one([0.0, 1.0, 2.0, 3.0], SamplingParams(seed=0, logprobs=asked)).logprobs
    assert logprobs is not None
    assert len(logprobs.top) == given_


@pytest.mark.parametrize("sampling", SETTINGS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_row_names_its_request(sampling: SamplingParams, bad: float) -> None:
    logits = rows(3, 50)
    logits[1, 20] = bad
    sampler = Sampler()
    for i in (70, 71, 72):
        sampler.add(i, sampling, [1])
    with pytest.raises(ValueError, match=r"request 71: .*nan|request 71: .*inf"):
        sampler.sample(logits, [70, 71, 72], [4] * 3, [()] * 3)
    assert len(sampler.sample(logits[[0, 2]], [70, 72], [4] * 2, [()] * 2)) == 2


def test_equal_logits_are_listed_by_rising_id() -> None:
    logits = torch.arange(500.0) % 7
    logprobs = sample_one(logits, SamplingParams(seed=0, logprobs=20)).logprobs
    assert logprobs is not None
    assert [i for i, _ in logprobs.top] == list(range(6, 140, 7))


def test_a_row_without_any_allowed_token_is_broken_and_single_bans_are_not() -> None:
    with pytest.raises(ValueError, match="request 7"):
        sample_one([-math.inf] * 4, SamplingParams(seed=0))
    for sampling in SETTINGS[:5]:
        banned = [-math.inf, 1.0, -math.inf, -math.inf, -math.inf, -math.inf]
        assert sample_one(banned, sampling, (1, 2)).token_id == 1


def test_ids_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(ValueError, match=r"request 7: logit_bias token id 4 must be in \[0, 4\)"):
        sample_one([0.0] * 4, SamplingParams(logit_bias={4: 1.0}))
    with pytest.raises(ValueError, match="request 7: prompt token id 9"):
        sample_one([0.0] * 4, SamplingParams(repetition_penalty=1.1), prompt=(1, 9))


def test_huge_biases_stay_finite() -> None:
    sampling = SamplingParams(
        seed=0, logit_bias={2: 1e308, 1: -1e308}, repetition_penalty=10.0, temperature=100
    )
    assert sample_one([0.0] * 4, sampling, prompt=(1,)).token_id == 2


def test_requests_are_added_and_removed_once_and_shapes_must_agree() -> None:
    sampler, logits = Sampler(), torch.zeros(1, 4)
    sampler.add(1, SamplingParams(), [])
    with pytest.raises(InvariantError, match="already"):
        sampler.add(1, SamplingParams(), [])
    with pytest.raises(InvariantError, match="equally many"):
        sampler.sample(logits, [1], [0, 1], [()])
    sampler.remove(1)
    with pytest.raises(InvariantError, match="not in"):
        sampler.remove(1)
    with pytest.raises(InvariantError, match="not in"):
        sampler.sample(logits, [1], [0], [()])
    assert sampler.sample(logits[:0], [], [], []) == []


def test_the_logits_are_left_as_they_were() -> None:
    logits = rows(len(SETTINGS), 64).requires_grad_()
    before, sampler = logits.detach().clone(), Sampler()
    for i, sampling in enumerate(SETTINGS):
        sampler.add(i, sampling, [1, 2])
    num = len(SETTINGS)
    sampler.sample(logits, range(num), [9] * num, [(3, 4)] * num)
    assert torch.equal(logits, before)


@pytest.mark.gpu
def test_cuda_chooses_what_the_cpu_chooses() -> None:
    for group in (SETTINGS, [SamplingParams(temperature=0)] * 3):
        sampler, num = Sampler(), len(group)
        for i, sampling in enumerate(group):
            sampler.add(i, sampling, [1, 2])
        logits = rows(num, 5000).round()  # many ties
        arguments = (range(num), [9] * num, [(3, 4)] * num)
        assert sampler.sample(logits.cuda(), *arguments) == sampler.sample(logits, *arguments)


@pytest.mark.parametrize("penalty", [1e-320, 1e-300, 1e-30])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_tiny_penalty_gives_a_token_of_the_vocabulary(penalty: float, top_p: float) -> None:
    asked = SamplingParams(temperature=1, top_p=top_p, repetition_penalty=penalty, seed=1)
    asked_more = SamplingParams(
        temperature=1, top_p=top_p, repetition_penalty=penalty, seed=1, logprobs=2
    )
    for sampling in (asked, asked_more):
        token = sample_one([1.0, 2.0, -3.0, 0.5], sampling, prompt=(0, 1), outputs=(1,)).token_id
        assert token in (0, 1)


GUESSED = {
    "greedy": SamplingParams(temperature=0),
    "seeded": SamplingParams(temperature=0.9, seed=3),
    "cut": SamplingParams(temperature=1.2, top_k=9, top_p=0.8, min_p=0.02, seed=4, logprobs=3),
    "penalties": SamplingParams(temperature=0.7, seed=5, repetition_penalty=1.4, logprobs=0),
    "bias": SamplingParams(temperature=0, logit_bias={7: 9.0}),
}


@pytest.mark.parametrize("kind", GUESSED)
def test_a_draft_is_the_token_that_the_same_logits_would_give(kind: str) -> None:
    """It has the random number of its position, and sees the answer so far."""
    sampler = Sampler()
    sampler.add(7, GUESSED[kind], (1, 2, 3))
    for n in range(40):
        logits, outputs = rows(1, 50, n), [[(5 * n + k) % 50 for k in range(n % 7)]]
        (token,) = sampler.sample(logits, [7], [n], outputs)
        assert sampler.guess(logits, [7], [n], outputs) == [token.token_id]


def test_broken_logits_give_no_draft() -> None:
    sampler = Sampler()
    sampler.add(7, GUESSED["seeded"], ())
    logits = rows(1, 50)
    logits[0, 4] = math.nan
    assert sampler.guess(logits, [7], [0], [[]]) == [None]
