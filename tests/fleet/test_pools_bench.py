"""The live bench of pools: two real engines behind a front end, and the rows that it judges."""

import json
import sys
from typing import Any

import pytest

from bench.common import Table
from bench.serving import pools
from bench.serving.pools import FULL, LONG, QUICK, SHORT, Served, add_rows, prompts_of


def test_a_quick_run_judges_both_routes_on_two_engines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["pools", "--quick"])
    pools.main()
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    rounds = document["rows"]["load 0.75"]["rounds"]
    for route in pools.ROUTES:
        (one,) = rounds[route]
        assert sum(one["sent"]) == QUICK.count == len(one["short_ms"]) + len(one["long_ms"])
        assert one["tokens_per_s"] > 0
    assert rounds["round-robin"][0]["sent"] == [QUICK.count // 2] * 2
    names = [line["name"].split()[0] for line in document["lines"]]
    assert names[:2] == ["P10", "P11"]
    (rate,) = [line for line in document["lines"] if "tokens/s" in line["name"]]
    assert rate["energy"]
    assert rate["target"] == ">= 0.95"


def test_prompts_are_short_or_long_and_arrive_at_the_rate() -> None:
    made = prompts_of(FULL._replace(count=4000), 20.0, 1)
    assert made == prompts_of(FULL._replace(count=4000), 20.0, 1)
    assert made[-1].at_s == pytest.approx(200, rel=0.1)
    assert sum(p.is_short for p in made) / 4000 == pytest.approx(0.8, abs=0.02)
    for prompt in made:
        low, high = SHORT if prompt.is_short else LONG
        assert low <= len(prompt.token_ids) <= high
    tokens = sum(len(p.token_ids) for p in made) / 4000
    assert tokens == pytest.approx(pools.MEAN, rel=0.05)


def rows(short: list[float], rate: float, base: list[float]) -> dict[str, tuple[str, Any]]:
    """Return the rows of one round, by claim."""
    table = Table()
    found = {
        "round-robin": [Served(base, [9.0], 100.0, [1, 1])],
        "length": [Served(short, [9.0], rate, [1, 1])],
    }
    add_rows(table, 0.75, found, {route: [] for route in found}, 50.0)
    return {line.name.split()[0]: (line.value, line.reached) for line in table.lines[:3]}


def test_targets_are_those_of_the_paper() -> None:
    good = rows([10.0, 20.0, 30.0, 60.0], 96.0, [10.0, 60.0, 80.0, 100.0])
    assert good["P10"][1] is True
    assert good["P11"] == ("0.33 (1 / 3)", True)
    assert good["two"][1] is True
    bad = rows([60.0, 61.0, 62.0, 99.0], 94.0, [10.0, 60.0, 80.0, 100.0])
    assert bad["P10"][1] is False
    assert bad["P11"] == ("1.33 (4 / 3)", False)
    assert bad["two"][1] is False
    calm = rows([1.0, 2.0], 100.0, [1.0, 2.0])
    assert calm["P11"] == ("round-robin missed none (0 / 0)", None)
