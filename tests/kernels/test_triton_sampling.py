"""Sampling by the Triton kernel: interpreted on a CPU, compiled where there is a GPU."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from triton.runtime.interpreter import InterpreterBuilder

from qllm.kernels import reference
from qllm.kernels.triton import sampling
from qllm.runner.sampling import definition as definition
from qllm.runner.sampling.sampler import Sampler
from qllm.types import SamplingParams
from tests.support.interpret import DEVICES, unwritten
from tests.support.triton_cases import DTYPES, FEW, Noise


def columns(
    params: Sequence[SamplingParams], seeds: list[int], positions: list[int], device: str
) -> tuple[torch.Tensor, ...]:
    def of(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return (
        of([p.temperature for p in params], torch.float64),
        of([p.top_k for p in params], torch.int64),
        of([p.top_p for p in params], torch.float64),
        of([p.min_p for p in params], torch.float64),
        of(seeds, torch.int64),
        of(positions, torch.int64),
    )


def sampled(
    kernels: Any, logits: torch.Tensor, *columns: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.full((len(logits),), -1, device=logits.device)
    peaks = torch.zeros(len(logits), device=logits.device)
    with unwritten(-sampling.KEPT):  # as a place it leads to another row
        kernels.sample(logits, *columns, tokens, peaks)
    return tokens, peaks


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 4, 500]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.4]),
    seed=st.integers(0, 2**62),
)


@DEVICES
@FEW
@given(
    params=st.lists(PARAMS, min_size=1, max_size=3),
    vocabulary=st.sampled_from([5, 97, 130]),
    position=st.integers(0, 2**40),
    coarse=st.booleans(),
    sizes=st.sampled_from(
        [
            {"KEPT": 4, "LIKELY": 2, "CHUNK": 16},
            {"KEPT": 16, "LIKELY": 8, "CHUNK": 32},
            {"KEPT": 32, "LIKELY": 16, "CHUNK": 64},
            {},
        ]
    ),
    dtype=DTYPES,
    seed=st.integers(0, 99),
)
def test_the_device_samples_what_the_cpu_samples(
    device: str,
    params: list[SamplingParams],
    vocabulary: int,
    position: int,
    coarse: bool,
    sizes: dict[str, int],
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Whether a row is one chunk or some, and what stays is few enough to be copied or not."""
    logits = Noise(seed, device)(len(params), vocabulary, dtype=dtype) * 3
    if coarse:  # many ties
        logits = logits.round()
    positions = [position + i for i in range(len(params))]
    cpu = Sampler()
    for i, p in enumerate(params):
        cpu.add(i, p, [])
    rows = list(range(len(params)))
    wanted = [s.token_id for s in cpu.sample(logits, rows, positions, [[]] * len(rows))]
    given_columns = columns(params, [p.seed or 0 for p in params], positions, device)
    for kernels in (sampling, reference):
        with pytest.MonkeyPatch.context() as patch:
            for name, size in sizes.items():
                patch.setattr(sampling, name, size)
            tokens, peaks = sampled(kernels, logits, *given_columns)
        assert tokens.tolist() == wanted
        assert torch.equal(peaks, logits.float().max(1).values)


def test_a_long_row_is_read_as_often_as_it_has_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of five chunks of fp32, so of four digits, and a bound that takes eight passes."""
    reads: Counter[int] = Counter()
    load = InterpreterBuilder.create_masked_load

    def counting(self: Any, pointers: Any, *how: Any) -> Any:
        reads[pointers.data.size] += 1
        return load(self, pointers, *how)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counting)
    logits = Noise(5, "cpu")(1, 9000)
    found = []
    for how, scale in (
        ({"temperature": 0.0}, 1),
        ({}, 1),
        ({"top_k": 20}, 1),
        ({"top_k": 20, "top_p": 0.9}, 1),
        ({"top_p": 0.9}, 5),
        ({"top_p": 0.9}, 1),
    ):
        params = [SamplingParams(**{"temperature": 0.8, **how})]
        reads.clear()
        sampled(sampling, logits * scale, *columns(params, [3], [7], "cpu"))
        found.append((reads[2048], reads[1024]))  # chunks; what was copied, and its ids
    assert found == [(5, 0), (11, 0), (26, 0), (30, 2), (30, 2), (36 + 8 * 5, 0)]


@DEVICES
@pytest.mark.parametrize("seed", [0, 1, 2**62 + 12345, 2**63 - 1])
def test_there_is_one_random_number(device: str, seed: int) -> None:
    positions = [0, 1, 77, 2**33 + 5]
    column = torch.tensor([seed] * 4, device=device), torch.tensor(positions, device=device)
    assert reference.uniforms(*column).tolist() == [
        definition.share_of(seed, p) * 2.0**-53 for p in positions
    ]


@DEVICES
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_broken_logits_show_in_the_peak(device: str, wrong: float) -> None:
    logits = Noise(0, device)(3, 50)
    logits[1, 20] = wrong
    given_columns = columns([SamplingParams(temperature=1.0)] * 3, [1, 2, 3], [5, 5, 5], device)
    for kernels in (sampling, reference):
        _, peaks = sampled(kernels, logits, *given_columns)
        assert peaks.isfinite().tolist() == [True, False, True]


FEWER = {"top_k": 13, "top_p": 0.5}
EDGES = (
    # logits of a row of 24 tokens, by their ids, and what is asked of it
    (lambda i: -2.1 + 0 * i, {"top_p": 0.6}),
    (lambda i: 0.0 * (1 - 2 * (i % 2)), {"top_p": 0.3}),
    (lambda i: -1.0 - i % 3, {"top_p": 0.9, "temperature": 2.5}),
    (lambda i: -1.0 - i % 3, {"top_k": 5, "top_p": 0.7}),
    (lambda i: torch.where(i == 14, -1, torch.where(i < 12, -2.1, -3)), FEWER),
    (lambda i: i % 2 - 1.5, {"temperature": 0}),
    (lambda i: i % 2 - 1.5, {"top_p": 0.5, "min_p": 1.0, "temperature": 1e-300}),
    (lambda i: (7 * i % 24) / 4 - 4, {"top_p": 1e-300}),
    (lambda i: (7 * i % 24) / 4 - 4, {"top_k": 16, "top_p": 0.95, "temperature": 4.0}),
    (lambda i: (7 * i % 24) / 4 - 4, {"top_k": 17, "top_p": 0.95, "temperature": 4.0}),
    (lambda i: (7 * i % 24) / 4 - 4, {"top_k": 1000, "top_p": 0.99, "min_p": 0.01}),
    # a bound that top_p reaches without a remainder: weights are 1, keys are not one
    (lambda i: torch.where(i < 8, 0, torch.where(i < 16, -1e-20, -math.inf)), {"top_p": 0.5}),
    (lambda i: torch.where(i < 8, 0, torch.where(i < 16, -1e-20, -math.inf)), FEWER),
    (lambda i: torch.where(i % 5 == 4, -i / 4, -math.inf), {"top_k": 7, "top_p": 0.9}),
)


@DEVICES
@pytest.mark.parametrize(
    ("dtype", "kept"),
    [
        (torch.float32, 4),
        pytest.param(torch.bfloat16, 4, marks=pytest.mark.slow),  # 4 and bf16 are in others
        (torch.bfloat16, 16),
        (torch.float16, 32),
    ],
)
def test_edges_are_those_of_the_cpu(
    device: str, dtype: torch.dtype, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ties below zero and across chunks, as many as are copied, masked tokens, tiny numbers.

    The random numbers are close to 1, so that a token too many or too few is drawn or missed.
    """
    for name, size in {"CHUNK": 16, "KEPT": kept, "LIKELY": kept // 2}.items():
        monkeypatch.setattr(sampling, name, size)
    ids = torch.arange(24)
    logits = torch.stack([row(ids).to(dtype) for row, _ in EDGES]).to(device)
    seeds = [seed for seed in range(999) if definition.share_of(seed, kept) > 0.97 * 2**53]
    params = [SamplingParams(seed=s, **how) for s, (_, how) in zip(seeds, EDGES, strict=False)]
    positions, cpu = [kept] * len(EDGES), Sampler()
    for i, p in enumerate(params):
        cpu.add(i, p, [])
    found = cpu.sample(logits, range(len(params)), positions, [[]] * len(params))
    given_columns = columns(params, [p.seed or 0 for p in params], positions, device)
    for kernels in (sampling, reference):
        tokens, _ = sampled(kernels, logits, *given_columns)
        assert tokens.tolist() == [s.token_id for s in found]


@triton.jit
def _tied(asked: "Any", out: "Any") -> None:
    given_ = (tl.load(asked), tl.load(asked + 1), tl.load(asked + 2), tl.load(asked + 3))
    tl.store(out, sampling._ties(*given_, tl.load(out)))


@DEVICES
@pytest.mark.parametrize(
    ("above", "each", "wanted"),
    [(0.5, 1e-300, 7), (2.0, 1e-300, 1), (0.5, 0.1, 4), (0.5, 0.0, 1)],
)
def test_tiny_weights_tie_as_often_as_they_are_there(
    device: str, above: float, each: float, wanted: int
) -> None:
    """How many are needed may be more than any integer."""
    asked = torch.tensor([0.9, 1.0, above, each], dtype=torch.float64, device=device)
    out = torch.tensor([7], device=device)
    _tied[(1,)](asked, out)
    assert out.tolist() == [wanted]


@DEVICES
@pytest.mark.parametrize(("wrong", "first"), [(math.nan, 63), (math.inf, 63), (-math.inf, 0)])
def test_a_broken_row_writes_into_no_other(
    device: str, wrong: float, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "CHUNK", 32)
    monkeypatch.setattr(sampling, "KEPT", 64)
    logits = Noise(3, device)(2, 64)
    given_columns = columns([SamplingParams(top_p=0.9)] * 2, [1, 2], [5, 6], device)
    wanted, _ = sampled(sampling, logits, *given_columns)
    logits[1, first:] = wrong
    tokens, peaks = sampled(sampling, logits, *given_columns)
    assert tokens[0] == wanted[0]
    assert peaks.isfinite().tolist() == [True, False]
