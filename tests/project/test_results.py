"""The pages of docs/results are what `python -m bench.report` makes of the committed results."""

from typing import Any

import pytest

from bench.report import PAGES, pages, read
from bench.report_check import NOT_AGAIN, SINCE, result_problems
from bench.report_index import HEADLINES
from bench.report_layout import WIDTH, fold

WRITTEN = pages(read())


def test_each_page_is_what_the_generator_writes() -> None:
    assert {path.stem for path in PAGES.glob("*.md")} == WRITTEN.keys()
    for name, text in WRITTEN.items():
        assert (PAGES / f"{name}.md").read_text() == text, f"run `make bench-report` for {name}"


def test_the_index_opens_with_ten_numbers_and_ends_with_what_misses_its_target() -> None:
    head, _, rest = WRITTEN["index"].partition("## Ten numbers")
    numbers = [line for line in rest.split("\n## ")[0].splitlines() if "**" in line]
    assert "## " not in head.removeprefix("# ")
    assert len(numbers) == len(HEADLINES) == 10
    assert WRITTEN["index"].split("\n## ")[-1].startswith("What misses its target\n")


@pytest.mark.parametrize("name", WRITTEN)
def test_lines_of_a_page_have_at_most_100_columns(name: str) -> None:
    assert [line for line in WRITTEN[name].splitlines() if len(line) > WIDTH] == []


def test_a_wide_table_is_split_by_columns_and_keeps_every_cell() -> None:
    cells = [[f"{row}{column}" * 8 for column in "abcdef"] for row in "xyz"]
    table = ["| " + " | ".join(row) + " |" for row in cells]
    out = fold([table[0], "|---|---|---|---|---|---|", *table[1:]])
    assert max(map(len, out)) <= WIDTH
    assert sum(line.startswith("|---") for line in out) > 1
    for row in cells:
        assert all(any(cell in line for line in out) for cell in row)


def test_a_table_of_long_cells_becomes_a_list_with_its_titles() -> None:
    long = " ".join(["word"] * 30)
    out = fold(["| what | measured | target |", "|---|---|---|", f"| this | {long} | >= 2 |"])
    assert out[0].startswith("- this: word word")
    assert " ".join(" ".join(out).split()).endswith("word; target >= 2")
    assert max(map(len, out)) <= WIDTH


def test_fences_headings_and_short_tables_stay_as_they_are() -> None:
    kept = ["# " + "long " * 30, "```", "x" * 120, "```", "| a | b |", "|---|---|", "| 1 | 2 |"]
    assert fold(kept) == kept


# the check


def result(commit: str = "abc", **line: Any) -> dict[str, Any]:
    """Return a result of one row."""
    row = {"name": "ratio", "value": "2", "target": ">= 1", "reached": True, **line}
    return {"lines": [row], "machine": {"commit": commit}}


def found(
    document: dict[str, Any], name: str = "drafts.json", day: str | None = SINCE
) -> list[str]:
    return list(result_problems(name, document, lambda commit: day))


def test_a_result_of_a_tree_that_is_there_passes_the_check() -> None:
    assert found(result()) == []


def test_a_row_without_a_target_fails_the_check() -> None:
    assert found(result(target=""))[0].startswith("the row 'ratio' has no target")
    old = {"parts": {"a": {"rows": [{"claim": "old", "here": "2"}], "commit": "abc"}}}
    assert found(old)[0].startswith("the row 'old' has no target")
    assert found(result(target="printed", reached=None)) == []


def test_a_tree_that_cannot_be_checked_out_fails_the_check() -> None:
    assert "cannot be checked out again" in found(result("abc-dirty"))[0]
    assert found(result("abc"), day=None) == ["commit abc is not in this repository"]
    rows = {"a": {"machine": {"commit": "abc"}}, "b": {"machine": {"commit": "def-dirty"}}}
    assert "def-dirty cannot be checked out again" in found({"rows": rows})[0]


def test_a_result_that_no_bench_makes_fails_the_check() -> None:
    assert "does not name the bench" in found(result(), name="other.json")[0]


def test_an_old_result_needs_a_reason_and_a_new_one_has_none() -> None:
    old = "2026-11-01"
    assert old < SINCE
    assert f"a row is of {old}" in found(result(), day=old)[0]
    name = next(iter(NOT_AGAIN))
    assert found(result(), name=name, day=old) == []
    assert found(result(), name=name) == ["all rows were measured again; take it out of NOT_AGAIN"]


OWED = {
    "cpu_kernels.json", "fleet.json", "kv.json", "on_ray.json", "over_http.json", "papers.json",
    "perplexity.json", "policies-cpu.json", "queueing.json", "streams.json",
}  # fmt: skip
"""Results that fail the check today. This list may only shrink."""


def test_no_other_result_fails_the_check() -> None:
    day = "2026-11-01"  # a shallow clone does not know the days of commits
    days = {name: day if name in NOT_AGAIN else SINCE for name in read()}
    fails = {
        name
        for name, of in read().items()
        if list(result_problems(name, of, lambda _, name=name: days[name]))
    }
    assert fails == OWED


def test_a_page_says_why_a_result_was_not_measured_again() -> None:
    assert f"- older than {SINCE}, and not measured again: a GPU is needed" in WRITTEN["gpu"]
