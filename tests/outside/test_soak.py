"""The checks of `tests/long/soak.py` and `bench/serving/over_http.py`, and a short run of each."""

import json
import subprocess
import sys
from typing import Any

import pytest

from bench.serving import over_http
from tests.support import soak_cases
from tests.support.files import ROOT


def chunk(text: str, reason: str | None = None, tokens: int | None = None) -> str:
    usage = None if tokens is None else {"completion_tokens": tokens}
    return json.dumps({"choices": [{"text": text, "finish_reason": reason}], "usage": usage})


GOOD = [chunk("a"), chunk("bc"), chunk("", "length", 3), "[DONE]"]


@pytest.mark.parametrize(
    ("events", "says"),
    [
        (GOOD, None),
        ([*GOOD[:1], *GOOD[:1], *GOOD[1:]], "is no beginning"),
        ([GOOD[0], *GOOD[2:]], "text 'a' is not 'abc'"),
        ([chunk("b"), *GOOD[1:]], "is no beginning"),
        ([*GOOD[:2], *GOOD[3:]], r"ends \[\]"),
        ([*GOOD[:3], *GOOD[2:]], r"ends \['length', 'length'\]"),
        (GOOD[:3], "no .DONE."),
        ([*GOOD, chunk("c")], "after .DONE."),
        ([*GOOD[:3], chunk("c"), GOOD[3]], "text after the end"),
        ([GOOD[0], json.dumps({"error": {"message": "the engine died"}})], "the engine died"),
        ([*GOOD[:2], chunk("", "length", 2), "[DONE]"], "2 tokens, not 3"),
    ],
)
def test_the_soak_sees_what_is_wrong(events: list[str], says: str | None) -> None:
    import re

    check = soak_cases.StreamCheck(soak_cases.Case("p", 3, "abc"))
    for data in events:
        check.take(data)
    wrong = check.whole()
    assert bool(wrong) == (says is not None), wrong
    if says is not None:
        assert any(re.search(says, text) for text in wrong), wrong


@pytest.mark.parametrize("row", ["overhead", "small"])
def test_a_delayed_ack_would_be_seen(row: str) -> None:
    def minus(ms: float) -> dict[str, Any]:
        both = {"over_python": {"p50": ms, "p99": ms}}
        return {"http_ms": both, "http_whole_ms": both, "kept_alive_ms": {"p50": ms, "p99": ms}}

    ttft = {"ttft_ms": {"python": {"p50": 4.0, "p99": 5.0}}}
    good = over_http.holds({row: {**minus(0.4), **ttft}})
    assert len(good) >= 5
    assert all(good.values())
    bad = over_http.holds({row: {**minus(40.4), **ttft}})
    assert {name for name, holds in bad.items() if holds} <= {"small_ttft"}
    slow = over_http.holds({"small": {**minus(0.4), "ttft_ms": {"python": {"p50": 60.0}}}})
    assert not slow["small_ttft"], "a long prefill would hide it"


def run(module: str, *arguments: str) -> dict[str, Any]:
    command = ["nice", sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def test_a_short_soak_finds_nothing() -> None:
    report = run(
        "tests.long.soak", "--seconds", "8", "--calm-seconds", "2", "--calibrate-seconds", "2",
    )  # fmt: skip
    assert report["ok"], report["problems"]
    counts = report["counts"]
    assert counts["accepted"] == counts["ended"] > 0
    assert counts["front_ends_killed"] >= 1
    assert counts["attached_ended"] > 0
    assert {counts[f"sent_{way}"] > 0 for way in ("leave", "vanish", "malformed", "whole")} == {
        True
    }
    assert report["memory"]["engine_rss_mb"] > 0


@pytest.mark.slow
def test_what_http_costs_is_measured() -> None:
    report = run(
        "bench.serving.over_http", "--model", "tiny", "--rounds", "4", "--seconds", "2",
        "--turns", "1", "--rate", "4", "--hogs", "1", "--streams", "40", "--idle-seconds", "1",
        "--rows", "overhead,small,interference,streams",
    )  # fmt: skip
    for row in ("overhead", "small"):
        for what in ("ttft_ms", "whole_ms"):
            assert set(report[row][what]) == {"python", "python_over_rings", "http"}
        assert set(report[row]["version_ms"]) == {"kept_alive", "fresh"}
    assert report["interference"]["p99_ratio"] > 0
    assert (report["streams"]["open"], report["streams"]["ended"]) == (40, 40)
    assert set(report["holds"]) == {
        "overhead_p50", "overhead_p99", "overhead_whole_p50", "overhead_whole_p99",
        "overhead_kept_alive", "small_p50", "small_p99", "small_whole_p50", "small_whole_p99",
        "small_kept_alive", "small_ttft", "interference", "streams", "idle",
    }  # fmt: skip
