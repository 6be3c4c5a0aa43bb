"""The pages name files that exist, the log has its form and its index, the README its width."""

import re
from pathlib import Path

import pytest

from tests.support.files import ROOT

LOGS = sorted((ROOT / "docs" / "log").glob("20*.md"))
"""Files of entries, which name the files of their day."""
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = ("", "qllm", "qllm/device", "qllm/kernels/cpu", "tests", "docs", "bench")
"""Folders in which a path of a page may begin."""


def named(text: str) -> list[str]:
    """Return the files that a text names in backticks, with a slash."""
    return re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|cpp|h|inc|cu|md|json))`", text)


def linked(text: str) -> list[str]:
    """Return the files that the links of a text go to."""
    return re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_files_that_exist(page: Path) -> None:
    text, places = page.read_text(), [page.parent, *map(ROOT.joinpath, FOLDERS)]
    missing = [name for name in named(text) if not any((p / name).exists() for p in places)]
    assert missing == [] or page in LOGS
    assert [name for name in linked(text) if not (page.parent / name).exists()] == []


def anchors(text: str) -> set[str]:
    """Return the names by which links reach the headings of a text, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def missing_anchors(page: Path, text: str) -> list[str]:
    """Return the links of a page's text that name a heading which no page has."""
    links = re.findall(r"\]\(([\w./-]*)#([\w-]+)\)", text)
    pages = [(name, anchor, page.parent / name if name else page) for name, anchor in links]
    return [
        f"{name}#{anchor}"
        for name, anchor, to in pages
        if to.suffix == ".md" and anchor not in anchors(to.read_text())
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_link_names_a_heading_that_exists(page: Path) -> None:
    assert missing_anchors(page, page.read_text()) == []


def test_a_heading_that_is_gone_is_seen() -> None:
    text = "[a](architecture.md#the-sweep), [b](architecture.md#gone), [c](#gone-too)"
    page = ROOT / "docs" / "architecture.md"
    assert missing_anchors(page, text) == ["architecture.md#gone", "#gone-too"]


def test_a_file_that_is_gone_is_seen() -> None:
    text = "see `qllm/gone.py` and [this](docs/gone.md#there)"
    assert named(text) == ["qllm/gone.py"]
    assert linked(text) == ["docs/gone.md"]


def test_the_readme_fits_100_columns() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert [line for line in lines if len(line) > 100 and not line.startswith("![")] == []


FORM_SINCE = "2026-11-30"
"""The day from which entries of the log have the form of CONTRIBUTING.md; older ones stay."""
FIELDS = ("Question:", "Result:", "Numbers", "Kept:")


def entries(text: str) -> list[tuple[str, str, str]]:
    """Return the date, the title and the body of each entry of a month, as they stand."""
    found = (part.partition("\n") for part in text.split("\n## ")[1:])
    return [(*head.split(" ", 1), body) for head, _, body in found]  # type: ignore[misc]


def breaches(date: str, title: str, body: str) -> list[str]:
    """Return what an entry lacks of the form."""
    fields = (
        [f for f in FIELDS if not re.search(rf"^{f}", body, re.M)] if date >= FORM_SINCE else []
    )
    return [*fields, *(["title"] if date >= FORM_SINCE and len(title) > 90 else [])]


def test_entries_of_the_log_are_newest_first_and_have_the_form() -> None:
    for month in LOGS:
        found = entries(month.read_text())
        dates = [date for date, _, _ in found]
        assert dates == sorted(dates, reverse=True)
        assert {date[:7] for date in dates} == {month.stem}
        assert {
            title: bad for date, title, body in found if (bad := breaches(date, title, body))
        } == {}


def test_an_entry_without_the_form_is_seen() -> None:
    assert breaches("2026-12-01", "t" * 91, "Question: a\nResult: b\n") == [
        "Numbers", "Kept:", "title",
    ]  # fmt: skip
    assert breaches("2026-12-01", "t", "Question: a\n\nResult:\nNumbers (c):\nKept: no\n") == []


def test_each_entry_of_the_log_has_one_line_in_its_index() -> None:
    index = (ROOT / "docs" / "log" / "index.md").read_text()
    lines = re.findall(r"^\| (\d\S+) \| (?:kept|not kept|numbers) \| (.*) \|$", index, re.M)
    titles = [(date, title) for month in LOGS for date, title, _ in entries(month.read_text())]
    assert len(lines) == len(titles)
    for date, title in titles:
        named = [text for day, text in lines if day == date and title.startswith(text.rstrip("…"))]
        assert len(named) == 1, title
