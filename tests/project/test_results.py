"""The pages of docs/results are what `python -m bench.report` makes of the committed results."""

import pytest

from bench.report import PAGES, pages, read
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
