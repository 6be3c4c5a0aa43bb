"""The kernel that samples, against its definition: the same token and log-probabilities, always."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from qllm.kernels import cpu
from qllm.runner.sampling import definition as sampling
from qllm.runner.sampling.definition import Choice, SampledRow, choose, choose_all
from qllm.runner.sampling.limits import NO_IDS, Ids, Rules
from qllm.types import SamplingParams

KINDS = [] if cpu.native is None else cpu.native.available()
SIZES = (1, 2, 3, 7, 8, 63, 64, 65, 500, 513, 1023, 1024, 1500, 5000)


@pytest.fixture(params=KINDS, scope="module")
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    before = cpu.kind()
    cpu.native.use(request.param)
    yield request.param
    cpu.native.use(before)


class Rows:
    """Draws rows of every kind from one seed."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def _of(self, *values: float) -> float:
        return float(self._rng.choice(values))

    def _ids(self, size: int, most: int) -> Ids:
        return np.unique(self._rng.integers(0, size, self._rng.integers(0, most + 1)))

    def _logits(self, size: int) -> torch.Tensor:
        x_V = self._rng.standard_normal(size).astype(np.float32) * self._of(0, 0.1, 1, 3, 30)
        if self._of(0, 1):
            x_V = x_V.round()  # many are equal
        if self._of(0, 0, 0, 1):
            x_V[self._rng.random(size) < 0.5] = -np.inf
            x_V[self._rng.integers(size)] = 1
        logits_V = torch.from_numpy(x_V.astype(np.float32))
        return logits_V.bfloat16() if self._of(0, 1) else logits_V

    def _rules(self, size: int) -> Rules | None:
        if self._of(0, 1):
            return None
        words = self._rng.integers(-(2**31), 2**31, -(-size // 32)).astype(np.int32)
        return Rules(
            forced=int(self._rng.integers(size)) if self._of(0, 0, 0, 0, 1) else None,
            words=words if self._of(0, 1) else None,
            allowed=self._ids(size, 5) if self._of(0, 1) else NO_IDS,
            banned=self._ids(size, 3),
            ends=self._ids(size, 3),
        )

    def row(self) -> SampledRow:
        """Return the next row."""
        size = int(self._rng.choice(SIZES))
        bias_ids = self._ids(size, 4)
        logprobs = int(self._of(-1, 0, 3, 20))
        return SampledRow(
            logits_V=self._logits(size),
            sampling=SamplingParams(
                temperature=self._of(0, 5e-324, 1e-300, 0.01, 0.7, 1, 1.5, 100),
                top_p=self._of(1, 1, 0.999, 0.95, 0.5, 1e-6),
                top_k=int(self._of(0, 0, 1, 5, 50, 700)),
                min_p=self._of(0, 0, 0.1, 1),
                repetition_penalty=self._of(1, 1, 1.3, 1e-3),
                frequency_penalty=self._of(0, 0.5),
                presence_penalty=self._of(0, -0.5),
                logprobs=None if logprobs < 0 else logprobs,
            ),
            share=int(self._rng.integers(0, 2**53))
            if self._of(0, 1)
            else int(self._of(0, 2**53 - 1)),
            bias_ids=bias_ids,
            bias=self._rng.standard_normal(len(bias_ids)),
            prompt_ids=self._ids(size, 5),
            outputs=self._rng.integers(0, size, 6),
            rules=self._rules(size),
        )


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_the_kernel_chooses_what_the_definition_chooses(kernels: str, seed: int) -> None:
    rows = Rows(seed)
    asked = [rows.row() for _ in range(12)]
    for row, found in zip(asked, choose_all(asked), strict=True):
        assert found == choose(row), (kernels, row)


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_rows_side_by_side_have_the_tokens_of_each_alone(threads: int) -> None:
    rows = Rows(threads)
    asked = [rows.row() for _ in range(40)]
    cpu.set_threads(threads)
    assert choose_all(asked) == [choose_all([row])[0] for row in asked]


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_large_vocabulary_of_equal_logits_is_drawn_from_evenly(
    kernels: str, top_p: float
) -> None:
    size = 151_936
    logits_V, last = torch.zeros(size), int(size * top_p)
    settings_ = SamplingParams(temperature=1.0, top_p=top_p)
    for share in (0, 2**52, 2**53 - 1):
        row = SampledRow(logits_V, settings_, share)
        [found] = choose_all([row])
        assert found == choose(row), kernels
        assert found.token_id is not None
        assert abs(found.token_id - share / 2**53 * last) <= 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_row_leaves_the_others_alone(kernels: str, bad: float) -> None:
    rows = Rows(3)
    asked = [rows.row() for _ in range(6)]
    broken = asked[2].logits_V.clone()
    broken[-1] = bad
    asked[2] = asked[2]._replace(logits_V=broken)
    found = choose_all(asked)
    assert found[2].token_id is None, kernels
    assert not np.isfinite(found[2].peak)
    assert [c for i, c in enumerate(found) if i != 2] == [
        choose(row) for i, row in enumerate(asked) if i != 2
    ]


def test_no_token_is_chosen_where_none_may_come(kernels: str) -> None:
    row = SampledRow(torch.zeros(5), SamplingParams(), 0, rules=Rules(banned=np.arange(5)))
    assert choose_all([row]) == [choose(row)] == [Choice(0.0, None, None)], kernels


@example(z=-32.0)
@example(z=0.0)
@given(z=st.floats(-32, 0))
def test_exponentials_are_those_of_the_library(z: float) -> None:
    bits = sampling.weight_bits(151_936)
    [found] = sampling.exponentials(np.array([z]), bits)
    assert found == pytest.approx(np.exp(z) * 2.0**bits, rel=2e-14)
    assert (found == 2.0**bits) == (z == 0) or z > -1e-15


@pytest.mark.parametrize("size", [1, 2**17, 2**18, 2**24])
def test_the_weights_of_any_vocabulary_have_a_sum_in_64_bits(size: int) -> None:
    assert size * 2 ** sampling.weight_bits(size) < 2**62


@pytest.mark.parametrize("size", [8, 1024])
def test_a_nucleus_ends_at_the_token_that_fills_it(kernels: str, size: int) -> None:
    """Half of the tokens have the share exactly, and one weight more takes another token."""
    logits_V = torch.tensor([0.0, -3.0] * (size // 2))
    w_V = sampling.weights(logits_V.double().numpy(), SamplingParams())
    mass, total = int(w_V[0]) * size // 2, int(w_V.sum())
    top_p = mass / total
    while math.ceil(top_p * total) > mass:
        top_p = math.nextafter(top_p, 0)
    assert math.ceil(top_p * total) == mass
    above = math.nextafter(top_p, 1)
    while math.ceil(above * total) == mass:
        above = math.nextafter(above, 1)
    for share in (top_p, above):
        for drawn in np.linspace(0, 2**53 - 1, 400, dtype=np.int64).tolist():
            row = SampledRow(logits_V, SamplingParams(top_p=share), drawn)
            assert choose_all([row]) == [choose(row)], kernels
    kept = [
        np.count_nonzero(sampling.weights(logits_V.double().numpy(), SamplingParams(top_p=p)))
        for p in (top_p, above)
    ]
    assert kept == [size // 2, size // 2 + 1]
