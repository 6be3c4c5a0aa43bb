"""The pages name files that exist, and the README is as wide as it says."""

import re
from pathlib import Path

import pytest

from tests.support.files import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = ("", "qllm", "qllm/device", "qllm/kernels/cpu", "tests", "docs", "bench")
"""Where a path of a page may begin."""


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
    assert missing == []
    assert [name for name in linked(text) if not (page.parent / name).exists()] == []


def test_a_file_that_is_gone_is_seen() -> None:
    text = "see `qllm/gone.py` and [this](docs/gone.md#there)"
    assert named(text) == ["qllm/gone.py"]
    assert linked(text) == ["docs/gone.md"]


def test_the_readme_fits_100_columns() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert [line for line in lines if len(line) > 100 and not line.startswith("![")] == []
