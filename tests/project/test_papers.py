"""The page of the papers' claims names files and tests that exist, and counts what it lists."""

import re

import pytest

from tests.support.files import ROOT

PAGE = (ROOT / "docs" / "papers.md").read_text()
PAPERS = ("QLLM", "Blink", "Layered prefill", "SuperInfer", "Stream2LLM", "PLA-Serve", "HELIOS",
          "TokenWeave")  # fmt: skip
CLAIM = re.compile(r"^- \*\*(\w+)\*\*(.*?)(?=^- |\n\n|\Z)", re.M | re.S)
STATUS = re.compile(r"\*\*(Holds|Differs|Missing)\*\*")


def sections() -> dict[str, str]:
    return dict(part.split("\n", 1) for part in PAGE.split("\n## ")[1:])


def files(text: str) -> list[str]:
    """Return the paths that a text names in backticks."""
    return re.findall(r"`([\w.-]+/[\w./-]+)`", text)


def named_tests(text: str) -> list[tuple[str, str]]:
    """Return the file and the name of each test that a text names."""
    return re.findall(r"`([\w./-]+\.py)`:\s+`(test_\w+)`", text)


def test_files_that_the_page_names_exist() -> None:
    assert [name for name in files(PAGE) if not (ROOT / name).exists()] == []


def test_tests_that_the_page_names_exist() -> None:
    named = named_tests(PAGE)
    assert len(named) == len(re.findall(r"`test_\w+`", PAGE)) > 0
    missing = [t for file, t in named if f"def {t}(" not in (ROOT / file).read_text()]
    assert missing == []


def test_a_name_that_is_gone_is_seen() -> None:
    assert files("`qllm/gone.py`, `a name`") == ["qllm/gone.py"]
    assert named_tests("`tests/gone.py`:\n  `test_gone`") == [("tests/gone.py", "test_gone")]


@pytest.mark.parametrize("paper", PAPERS)
def test_each_claim_has_one_status_and_what_holds_is_shown(paper: str) -> None:
    (text,) = (text for title, text in sections().items() if title.startswith(paper))
    claims = CLAIM.findall(text)
    assert claims
    for name, claim in claims:
        (status,) = STATUS.findall(claim)
        shown = [f for f in files(claim) if f.startswith(("tests/", "bench/results/"))]
        assert shown or (status != "Holds" and name[0] in "HT"), name
    counted = [str(len(claims))]
    counted += [str(text.count(f"**{status}**")) for status in ("Holds", "Differs", "Missing")]
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| {paper}"))
    assert row.endswith(f"| {' | '.join(counted)} |")
