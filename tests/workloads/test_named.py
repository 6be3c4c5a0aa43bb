"""Named workloads: seeded, scaled, with the lengths and bursts of the traces they stand for."""

import random
from dataclasses import replace
from statistics import fmean, pvariance

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qllm.errors import ConfigError
from qllm.types import Priority, Slo
from qllm.workloads import lengths
from qllm.workloads.arrivals import Bursts, Even, Gamma, Modulated
from qllm.workloads.capacity import Capacity
from qllm.workloads.generators import SCENARIOS, Backlog, Workload, named_workload, offered_rates
from qllm.workloads.lengths import Lengths, lognormal
from qllm.workloads.spec import RequestSpec

SMALL = Capacity(prefill_tokens_per_s=2000.0, output_tokens_per_s=150.0)


def of(requests: list[RequestSpec], priority: Priority) -> list[RequestSpec]:
    return [r for r in requests if r.priority == priority]


# -- lengths


@pytest.mark.parametrize(
    ("name", "mean", "longest"),
    [
        ("AZURE_CODE_PROMPT", 2047.8, 7437),
        ("AZURE_CODE_OUTPUT", 27.9, 1899),
        ("AZURE_CONV_PROMPT", 1154.7, 14050),
        ("AZURE_CONV_OUTPUT", 211.1, 1000),
    ],
)
def test_a_table_has_the_mean_of_its_trace(name: str, mean: float, longest: int) -> None:
    table: Lengths = getattr(lengths, name)
    assert table.mean == pytest.approx(mean, rel=0.05)
    assert table.longest == longest


def test_a_length_lies_between_its_quantiles_in_the_logarithm() -> None:
    table = Lengths(values=(10, 100, 1000), percentiles=(0.0, 50.0, 100.0))
    assert [table.at(p) for p in (0, 25, 50, 75, 100)] == [10, 32, 100, 316, 1000]
    assert table.scaled(0.1).at(50) == 10
    assert table.scaled(0.001).at(0) == 1


def test_a_lognormal_has_its_mean() -> None:
    assert lognormal(350.0, 1.0).mean == pytest.approx(350.0, rel=0.01)
    assert lognormal(350.0, 1.0).at(50) < 250


@pytest.mark.parametrize("values", [(5, 4), (0, 4), (1, 2, 3)])
def test_a_table_that_falls_is_refused(values: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError):
        Lengths(values=values, percentiles=(0.0, 100.0))


# -- arrivals


def counts(times: list[float], width: float, seconds: float) -> list[int]:
    out = [0] * int(seconds / width)
    for t in times:
        out[min(len(out) - 1, int(t / width))] += 1
    return out


def dispersion(times: list[float], width: float, seconds: float) -> float:
    found = counts(times, width, seconds)
    return pvariance(found) / fmean(found)


@pytest.mark.parametrize(
    "process", [Gamma(), Gamma(cv=3.0), Modulated(window_s=20.0), Bursts(), Even()]
)
def test_a_process_has_its_rate(process: Gamma | Modulated | Bursts | Even) -> None:
    times = process.times(random.Random(1), 2.0, 20_000.0)
    assert len(times) == pytest.approx(40_000, rel=0.1)
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] < 20_000


@pytest.mark.parametrize("process", [Gamma(), Modulated(), Bursts(), Even()])
def test_no_rate_is_no_arrivals(process: Gamma | Modulated | Bursts | Even) -> None:
    assert process.times(random.Random(1), 0.0, 100.0) == []


def test_only_a_modulated_rate_makes_minutes_differ() -> None:
    seconds = 60_000.0
    poisson = Gamma().times(random.Random(1), 2.567, seconds)
    gamma = Gamma(cv=2.0).times(random.Random(1), 2.567, seconds)
    modulated = Modulated().times(random.Random(1), 2.567, seconds)
    assert dispersion(poisson, 60.0, seconds) < 1.3
    assert 3 < dispersion(gamma, 60.0, seconds) < 5
    assert dispersion(modulated, 60.0, seconds) > 100


def test_a_burst_is_five_times_the_rest_and_comes_last() -> None:
    times = Bursts().times(random.Random(1), 5.0, 6000.0)
    late = sum(t % 60 >= 50 for t in times) / 1000
    early = sum(t % 60 < 50 for t in times) / 5000
    assert late / early == pytest.approx(5.0, rel=0.1)


def test_a_short_run_sees_several_windows() -> None:
    times = Bursts().times(random.Random(1), 50.0, 30.0)
    found = counts(times, 10 / 6, 30.0)
    assert min(found[5], found[11], found[17]) > 2 * max(found[:5])


# -- named workloads


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_workload_is_a_function_of_its_seed(name: str) -> None:
    one = named_workload(name, seed=3, capacity=SMALL, max_len=4096)
    assert one == named_workload(name, seed=3, capacity=SMALL, max_len=4096)
    assert one != named_workload(name, seed=4, capacity=SMALL, max_len=4096)
    assert [r.at_s for r in one] == sorted(r.at_s for r in one)
    assert len({r.name for r in one}) == len(one)
    assert all(0 <= r.at_s < 60 and r.num_prompt_tokens > 0 and r.max_tokens > 0 for r in one)
    assert all(r.num_prompt_tokens + r.max_tokens <= 4096 for r in one)


def test_the_names_are_s1_to_s15() -> None:
    assert list(SCENARIOS) == [f"S{i}" for i in range(1, 16)]
    with pytest.raises(ConfigError, match=r"unknown workload 'S16'; known: S1, S2, .*, S15"):
        named_workload("S16")


@pytest.mark.parametrize("name", ["S2", "S3", "S7"])
def test_ls_does_not_depend_on_be(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mixed = named_workload(name, seed=1, capacity=SMALL)
    monkeypatch.setitem(SCENARIOS, name, replace(SCENARIOS[name], backlog=Backlog()))
    alone = named_workload(name, seed=1, capacity=SMALL)
    assert of(alone, Priority.BE) == []
    assert of(alone, Priority.LS) == of(mixed, Priority.LS) != []


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["S2", "S3", "S7", "S11"]),
    st.floats(0.1, 1.5),
    st.floats(500, 50_000),
    st.floats(50, 5_000),
)
def test_the_load_is_a_part_of_the_capacity(
    name: str, load: float, prefill: float, output: float
) -> None:
    capacity = Capacity(prefill_tokens_per_s=prefill, output_tokens_per_s=output)
    workload = Workload(name=name, capacity=capacity, load=load, seconds=10.0)
    ls = workload.scenario.ls
    busy_s = ls.prompt.mean / prefill + ls.output.mean / output
    assert workload.nominal_rates()[Priority.LS] * busy_s == pytest.approx(load)


@pytest.mark.parametrize("share", [0.0, 0.05, 0.4, 1.0])
def test_a_share_splits_one_load(share: float) -> None:
    workload = Workload(name="S8", capacity=SMALL, ls_share=share, seconds=4000.0)
    rates = workload.nominal_rates()
    both = sum(rates.values())
    assert rates[Priority.LS] == pytest.approx(share * both)
    assert both == pytest.approx(0.9 * workload.scenario.ls.per_s(SMALL))
    offered = offered_rates(workload.requests(1), 4000.0)
    for priority, rate in rates.items():
        assert offered.get(priority, 0.0) == pytest.approx(rate, rel=0.2)


def test_a_class_that_is_too_long_is_shrunk_alone() -> None:
    found = Workload(name="S3", max_len=8192).scenario
    assert found.be.prompt.longest + found.be.output.longest <= 8192
    assert found.be.prompt.at(0) == pytest.approx(8192 / 4, rel=0.02)
    assert found.ls.prompt.longest == pytest.approx(7437 * 8190 / 9336, rel=0.01)


def test_the_backlog_fills_what_its_name_says() -> None:
    assert len(of(named_workload("S7", capacity=SMALL), Priority.BE)) == 64
    seats = [r for r in named_workload("S5", capacity=SMALL) if r.at_s == 0]
    assert len(seats) == 2 * SMALL.max_num_seqs
    kv = [r for r in named_workload("S6", capacity=SMALL) if r.at_s == 0]
    assert sum(r.num_prompt_tokens + r.max_tokens for r in kv) > SMALL.max_kv_tokens
    for name in ("S2", "S3", "S11"):  # more work than the machine can do
        be = of(named_workload(name, capacity=SMALL, seconds=600.0), Priority.BE)
        busy_s = sum(r.num_prompt_tokens / 2000 + r.max_tokens / 150 for r in be)
        assert busy_s > 600


def test_ls_carries_its_targets() -> None:
    requests = named_workload("S2", capacity=SMALL, ls_slo=Slo(500.0, 100.0))
    assert {r.slo for r in of(requests, Priority.LS)} == {Slo(500.0, 100.0)}
    assert {r.slo for r in of(requests, Priority.BE)} == {Slo()}


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "S2", "ls_share": 0.5},
        {"name": "S8", "ls_share": 1.5},
        {"name": "S3", "cv": 2.0},
        {"name": "S2", "cv": 0.0},
        {"name": "S2", "seconds": 0.0},
        {"name": "S2", "load": -1.0},
        {"name": "S2", "ls_scale": 0.0},
        {"name": "S2", "max_len": 4},
    ],
)
def test_what_means_nothing_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Workload(**wrong).requests(0)  # type: ignore[arg-type]


def test_a_capacity_is_positive() -> None:
    with pytest.raises(ConfigError, match="output_tokens_per_s=0"):
        Capacity(prefill_tokens_per_s=1.0, output_tokens_per_s=0.0)
    assert SMALL.requests_per_s(2000, 150) == pytest.approx(0.5)
