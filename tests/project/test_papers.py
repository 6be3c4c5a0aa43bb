"""The page of the papers' claims names files and tests that exist, and counts what it lists."""

import re
from typing import Any

import pytest

from bench.report import read
from bench.report_claims import missing, names_files, names_tests, with_rows
from tests.support.files import ROOT

PAGE = (ROOT / "docs" / "papers.md").read_text()
PAPERS = ("QLLM", "Blink", "Layered prefill", "SuperInfer", "Stream2LLM", "PLA-Serve", "HELIOS",
          "TokenWeave")  # fmt: skip
CLAIM = re.compile(r"^- \*\*(\w+)\*\*(.*?)(?=^- |\n\n|\Z)", re.M | re.S)
STATUS = re.compile(r"\*\*(Holds|Differs|Missing)\*\*")


def sections() -> dict[str, str]:
    return dict(part.split("\n", 1) for part in PAGE.split("\n## ")[1:])


def test_files_and_tests_that_the_page_names_exist() -> None:
    assert missing(PAGE) == []
    assert len(names_tests(PAGE)) == len(re.findall(r"`test_\w+`", PAGE)) > 0


def test_a_name_that_is_gone_is_seen() -> None:
    assert missing("`qllm/gone.py`, `a name`") == ["qllm/gone.py"]
    text = "`tests/project/test_papers.py`:\n  `test_gone`"
    assert missing(text) == ["tests/project/test_papers.py: test_gone"]


def test_the_page_has_the_statuses_and_numbers_of_the_results() -> None:
    assert with_rows(PAGE, read()) == PAGE, "run `make bench-report`"


def row(name: str, here: str | None, target: str, reached: bool | None) -> dict[str, Any]:
    return {
        "name": name, "claim": "a ratio", "here": here, "target": target, "reached": reached,
        "way": "live",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([row("X1", "2.0", ">= 1", True)], "**Holds**. a ratio: 2.0, >= 1 asked (live)."),
        ([row("X1", "0.5", ">= 1", False)], "**Differs**. a ratio: 0.5, >= 1 asked (live)."),
        (
            [row("X1", "2.0", ">= 1", True), row("X1", "0.5", ">= 1", False)],
            "**Differs**. a ratio: 2.0, >= 1 asked (live); a ratio: 0.5, >= 1 asked (live).",
        ),
        (
            [row("X1", "2.0", ">= 1", True), row("X1", "7", "printed", None)],
            "**Holds**. a ratio: 2.0, >= 1 asked (live).",
        ),
        ([row("X1", "7", "printed", None)], "**Differs**. a ratio: 7 (live)."),
        ([row("X1", None, ">= 1", None)], "**Missing**. Words."),
        ([row("X2", "2.0", ">= 1", True)], "**Missing**. Words."),
    ],
)
def test_a_status_follows_from_the_rows_of_its_claim(rows: list[Any], text: str) -> None:
    counts = "| a paper | 1 | 0 | 0 | 1 |\n| all | 1 | 0 | 0 | 1 |\n\n## a paper\n\n"
    page = f"# Page\n\n{counts}- **X1** It is so. **Missing**. Words.\n  `qllm/llm.py`\n"
    made = with_rows(page, {"papers.json": {"parts": {"rates": {"rows": rows}}}})
    assert " ".join(made.split("- **X1** ")[1].split()) == f"It is so. {text} `qllm/llm.py`"
    status = re.findall(r"\*\*(Holds|Differs|Missing)\*\*", text)[0]
    counted = " | ".join(str(int(status == word)) for word in ("Holds", "Differs", "Missing"))
    assert f"| a paper | 1 | {counted} |\n| all | 1 | {counted} |\n" in made
    assert max(map(len, made.splitlines())) <= 100


@pytest.mark.parametrize("paper", PAPERS)
def test_each_claim_has_one_status_and_what_holds_is_shown(paper: str) -> None:
    (text,) = (text for title, text in sections().items() if title.startswith(paper))
    claims = CLAIM.findall(text)
    assert claims
    for name, claim in claims:
        (status,) = STATUS.findall(claim)
        shown = [f for f in names_files(claim) if f.startswith(("tests/", "bench/results/"))]
        assert shown or (status != "Holds" and name[0] in "HT"), name
    counted = [str(len(claims))]
    counted += [str(text.count(f"**{status}**")) for status in ("Holds", "Differs", "Missing")]
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| {paper}"))
    assert row.endswith(f"| {' | '.join(counted)} |")
