"""The simulator against queueing theory; `tests/long/queueing.py` says what is compared and why."""

import numpy as np
import pytest

from tests.long import queueing

COUNT, LONG, SEED = 600, 2_000_000, 3
BOUND = 0.05


def test_erlang_c_has_its_known_values() -> None:
    assert queueing.erlang_c(1, 0.3) == pytest.approx(0.3)
    assert queueing.erlang_c(2, 1.0) == pytest.approx(1 / 3)
    assert queueing.erlang_c(3, 2.0) == pytest.approx(4 / 9)
    with pytest.raises(ValueError, match="between 0 and the 2 servers"):
        queueing.erlang_c(2, 2.0)


def test_two_classes_share_the_waits_of_one() -> None:
    rates, service_s = (30.0, 50.0), 0.01
    ls, be = queueing.waits_of_two_classes(rates, service_s)
    assert ls == pytest.approx(queueing.wait_of_one_class(rates[0], service_s))
    mean = (rates[0] * ls + rates[1] * be) / sum(rates)  # any order serves M/M/1 equally
    assert mean == pytest.approx(queueing.wait_of_one_class(sum(rates), service_s))


def test_the_recursion_serves_by_hand_what_it_says() -> None:
    unit = queueing.TOKEN_S
    at, tokens = np.array([0.0, 2, 3, 4, 20]) * unit, np.array([6, 3, 2, 1, 5])
    is_be = np.array([True, False, True, False, True])
    sample = queueing.Sample(at, tokens, is_be)
    # BE 0-2, LS 2-5, LS 5-6, BE 6-10, BE 10-12; idle; BE 20-25
    assert sample.waits() / unit == pytest.approx([4, 0, 7, 1, 0])


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_one_class_waits_as_erlang_says(load: float) -> None:
    found = queueing.compare(load, COUNT, SEED, 0.0, LONG)
    assert found.apart_s < 0.002 * queueing.MEAN_TOKENS * queueing.TOKEN_S
    (mean,) = found.means
    assert abs(mean.long_s / mean.theory_s - 1) < BOUND
    assert abs(mean.controlled_error) < BOUND


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_two_classes_wait_as_preemptive_resume_says(load: float) -> None:
    found = queueing.compare(load, COUNT, SEED, 0.5, LONG)
    assert found.apart_s < 0.02 * queueing.MEAN_TOKENS * queueing.TOKEN_S
    assert [mean.what for mean in found.means] == ["LS", "BE"]
    for mean in found.means:
        assert abs(mean.long_s / mean.theory_s - 1) < BOUND
        assert abs(mean.controlled_error) < BOUND
