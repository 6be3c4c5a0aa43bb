import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from qllm.cli import app
from qllm.cli.top import Sample, Scrape, head, quantile, table
from tests.support.serving import Serving
from tests.support.waiting import wait_for


def test_top_shows_a_running_server(served: Serving) -> None:
    served.post("/v1/completions", {"prompt": "a", "max_tokens": 2})
    wait_for(lambda: served.metric("qllm:generation_tokens_total", **{"class": "LS"}))
    result = CliRunner().invoke(app, ["top", served.url + "/", "--once", "--every", "0.1"])
    assert result.exit_code == 0
    assert "tiny: KV 0%" in result.output
    assert "TTFT p50 / p99, ms" in result.output


@pytest.mark.parametrize("path", ["/health", ":1"])
def test_top_says_when_no_server_answers(served: Serving, path: str) -> None:
    url = "http://127.0.0.1:1" if path == ":1" else served.url + path
    result = CliRunner().invoke(app, ["top", url, "--once"])
    assert result.exit_code == 2
    assert "no qllm server answers" in result.output


def sample(name: str, value: float, **labels: str) -> Sample:
    return Sample(f"qllm:{name}", {"model_name": "m", **labels}, value)


def test_rates_and_percentiles_are_of_the_time_between() -> None:
    ls = {"class": "LS"}

    def scrape(at_s: float, tokens: float, fast: float, slow: float) -> Scrape:
        ttft = "time_to_first_token_seconds_bucket"
        return Scrape(
            [
                sample("generation_tokens_total", tokens, **ls),
                sample(ttft, fast, le="0.01", **ls),
                sample(ttft, fast + slow, le="0.5", **ls),
                sample(ttft, fast + slow, le="+Inf", **ls),
                sample("preemptions_total", 7),
                Sample("python_info", {}, 1.0),
            ],
            at_s,
        )

    made = table(scrape(0, 100, 1000, 0), scrape(2, 150, 1000, 8))
    rows = {cells[0]: cells[1:] for cells in zip(*(c.cells for c in made.columns), strict=True)}
    assert rows["output tokens/s"] == ("25.0", "0.0")
    assert rows["TTFT p50 / p99, ms"] == ("<= 500.0 / <= 500.0", "- / -")
    assert "7 preemptions" in head(scrape(0, 0, 0, 0))


def rows_of(*scrapes: Scrape) -> dict[str, tuple[str, ...]]:
    made = table(*scrapes)
    return {cells[0]: cells[1:] for cells in zip(*(c.cells for c in made.columns), strict=True)}


def test_drafts_have_rows_where_an_engine_drafts() -> None:
    def scrape(at_s: float, drafter: str, drafted: float, accepted: float) -> Scrape:
        made = [
            sample(f"spec_decode_num_{what}_tokens_total", n, drafter=drafter, **{"class": name})
            for what, number in (("draft", drafted), ("accepted", accepted))
            for name, n in (("LS", number), ("BE", 0))
        ]
        return Scrape(made, at_s)

    found = rows_of(scrape(0, "lookup", 100, 90), scrape(4, "lookup", 180, 110))
    assert found["drafted tokens/s"] == ("20.0", "0.0")
    assert found["of these accepted"] == ("25%", "-")
    assert head(scrape(0, "lookup", 1, 1)).endswith("0 demoted, drafts by lookup")
    none = rows_of(scrape(0, "none", 0, 0), scrape(4, "none", 0, 0))
    assert not {"drafted tokens/s", "of these accepted"} & set(none)
    assert head(scrape(0, "none", 0, 0)).endswith("0 demoted")


@given(st.lists(st.floats(0.001, 99), min_size=1), st.sampled_from([0.5, 0.9, 0.99]))
def test_a_quantile_is_an_upper_bound(values: list[float], p: float) -> None:
    bounds = [0.01, 0.1, 1.0, 10.0, 100.0]
    found = quantile({b: sum(v <= b for v in values) for b in bounds}, p)
    assert found is not None
    assert sum(v <= found for v in values) >= p * len(values)
    smaller = [b for b in bounds if b < found]
    assert not smaller or sum(v <= smaller[-1] for v in values) < p * len(values)
    assert quantile({}, p) is quantile({1.0: 0}, p) is None
