"""`bench/soak.py` and `bench/over_http.py`: what they check, and a short run of each."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parent.parent / "bench"


@pytest.fixture(scope="module")
def soak_cases() -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCH))
    try:
        import soak_cases

        yield soak_cases
    finally:
        sys.path.remove(str(BENCH))


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
def test_the_soak_sees_what_is_wrong(
    soak_cases: ModuleType, events: list[str], says: str | None
) -> None:
    import re

    check = soak_cases.StreamCheck(soak_cases.Case("p", 3, "abc"))
    for data in events:
        check.take(data)
    wrong = check.whole()
    assert bool(wrong) == (says is not None), wrong
    if says is not None:
        assert any(re.search(says, text) for text in wrong), wrong


def run(script: str, *arguments: str) -> dict[str, Any]:
    command = ["nice", sys.executable, str(BENCH / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


@pytest.mark.slow
def test_a_short_soak_finds_nothing() -> None:
    report = run(
        "soak.py", "--seconds", "8", "--calm-seconds", "2", "--calibrate-seconds", "2",
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
        "over_http.py", "--model", "tiny", "--rounds", "4", "--seconds", "2", "--turns", "1",
        "--rate", "4", "--hogs", "1", "--streams", "40", "--idle-seconds", "1",
    )  # fmt: skip
    assert set(report["overhead"]["ttft_ms"]) == {"python", "python_over_rings", "http"}
    assert report["interference"]["p99_ratio"] > 0
    assert (report["streams"]["open"], report["streams"]["ended"]) == (40, 40)
    assert set(report["holds"]) == {
        "overhead_p50", "overhead_p99", "interference", "streams", "idle",
    }  # fmt: skip
