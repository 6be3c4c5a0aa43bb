"""The pages name files that exist, and the README is as wide as it says."""

import re
from pathlib import Path

import pytest

from tests.support.files import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = ("", "qllm", "qllm/device", "qllm/kernels/cpu", "tests", "docs", "bench")
"""Where a path of a page may begin."""


def paths(text: str) -> list[str]:
    """Files that a text names: with a slash, or what a link goes to."""
    named = re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|cpp|h|inc|cu|md|json))`", text)
    linked = re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", text)
    return [*named, *linked]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_files_that_exist(page: Path) -> None:
    missing = [
        name
        for name in paths(page.read_text())
        if not any((place / name).exists() for place in (page.parent, *map(ROOT.joinpath, FOLDERS)))
    ]
    assert missing == []


def test_a_file_that_is_gone_is_seen() -> None:
    assert paths("see `qllm/gone.py` and [this](docs/gone.md#there)") == [
        "qllm/gone.py",
        "docs/gone.md",
    ]


def test_the_readme_fits_100_columns() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert [line for line in lines if len(line) > 100 and not line.startswith("![")] == []
