"""No content of one request may end or change another's, whichever way it comes in."""

from collections.abc import Iterator

import pytest

from qllm import QLLMEngine
from qllm.config import MAX_COUNT, EngineConfig, parse_slo
from qllm.errors import ConfigError, InvalidRequestError
from qllm.types import MAX_TIME_MS, MAX_TIME_S, Slo
from tests.support.poison import Outcome, in_rings, over_http, through_python
from tests.support.serving import Serving, serving, tiny_engine


@pytest.fixture(scope="module")
def narrow() -> Iterator[QLLMEngine]:
    """Make an engine with little KV and short answers."""
    with tiny_engine(max_kv_tokens=4096, default_max_tokens=4, conformance=False) as made:
        yield made


def assert_harmless(outcome: Outcome) -> None:
    assert (outcome.lost, outcome.changed, outcome.raw) == (0, 0, 0), outcome
    assert outcome.poison // 5 < outcome.refused < outcome.poison, outcome


def test_no_request_of_python_harms_another(narrow: QLLMEngine) -> None:
    assert_harmless(through_python(narrow, 120, seed=1))


def test_no_request_over_http_harms_another(narrow: QLLMEngine) -> None:
    with serving(narrow, max_choices=8) as served:
        assert_harmless(over_http(served, narrow, 60, seed=1))


@pytest.mark.parametrize("native", [False, True], ids=["python", "native"])
@pytest.mark.parametrize("seed", range(9))
def test_no_record_harms_another_request_of_its_front_end(native: bool, seed: int) -> None:
    outcome = in_rings(native, 30, seed)
    assert_harmless(outcome)


# -- times and counts at the door


def short(value: object) -> str:
    return repr(value)[:12]


TIMES = [0, -0.0, -1, 5e-324, 1e9, MAX_TIME_MS + 1, 1e13, 1e308, 10**400, 10**5000]
TIMES += [float("nan"), float("inf"), float("-inf"), True, "5", None]
MESSAGE = r"must be a number of (milli)?seconds in \(0, 10+\], or None"


@pytest.mark.parametrize("name", ["ttft_ms", "tpot_ms", "timeout_s"])
def test_times_are_bounded_in_python(engine: QLLMEngine, name: str) -> None:
    most = MAX_TIME_S if name == "timeout_s" else MAX_TIME_MS
    for value in TIMES:
        given = {"timeout_s": value} if name == "timeout_s" else {"slo": Slo(**{name: value})}
        is_number = isinstance(value, int | float) and value is not True
        if value is None or (is_number and 0 < value <= most):
            handle = engine.submit([5], max_tokens=1, **given)  # type: ignore[arg-type]
            assert handle.result(300).finish_reason is not None
            continue
        with pytest.raises(InvalidRequestError, match=MESSAGE):
            engine.submit([5], max_tokens=1, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["ttft_ms", "tpot_ms"])
def test_times_are_bounded_over_http(served: Serving, name: str) -> None:
    for value in (0, -0.0, -1, MAX_TIME_MS + 1, 1e13, 1e308, 10**400):
        body = {"prompt": "x", "max_tokens": 1, "slo": {name: value}}
        answer = served.post("/v1/completions", body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == f"slo.{name}"
    for value in (5e-324, MAX_TIME_MS):
        body = {"prompt": "x", "max_tokens": 1, "slo": {name: value}}
        assert served.post("/v1/completions", body).status_code == 200


@pytest.mark.parametrize("text", ["ttft=1e308ms", "tpot=1000000.1s", "ttft=inf", "ttft=nan"])
def test_times_of_settings_are_bounded(text: str) -> None:
    with pytest.raises(ConfigError, match=r"with times in \(0, 1000000000\] ms"):
        parse_slo(text)
    with pytest.raises(ConfigError, match="with times"):
        EngineConfig(ls_slo=text)


@pytest.mark.parametrize("value", [0, -1, MAX_COUNT + 1, 10**400, 1.5, True, "8"], ids=short)
@pytest.mark.parametrize("name", ["max_num_seqs", "max_kv_tokens", "max_step_tokens"])
def test_counts_of_settings_are_bounded(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"{name}=.* must be an integer in \[1, 2147483647\]"):
        EngineConfig(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), 1e10, 10**400, True, "5"], ids=short)
def test_a_segment_is_a_time_or_infinite(value: object) -> None:
    with pytest.raises(ConfigError, match=r"max_segment_ms=.* number in \(0, 1000000000\]"):
        EngineConfig(max_segment_ms=value)  # type: ignore[arg-type]
    assert EngineConfig(max_segment_ms=float("inf")).max_segment_ms == float("inf")
