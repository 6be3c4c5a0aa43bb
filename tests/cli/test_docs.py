"""`qllm docs` prints every page of `docs/` and of its folders."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from qllm.cli import app
from qllm.cli.app import FAILED
from qllm.cli.docs import SHOWN, find_pages
from tests.support.files import ROOT


@pytest.fixture
def nested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of docs with two pages of one name."""
    for name in ("architecture", "guides/kv", "guides/serve", "design/kv"):
        page = tmp_path / "docs" / f"{name}.md"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(f"# The page {name}\n")
    monkeypatch.setattr("qllm.cli.docs.files", lambda package: tmp_path)
    return tmp_path / "docs"


def test_every_page_of_this_release_is_found() -> None:
    shown = {path for path in (ROOT / "docs").rglob("*") if path.suffix in SHOWN}
    assert set(find_pages().values()) == shown
    assert find_pages()["architecture"] == ROOT / "docs" / "architecture.md"


@pytest.mark.parametrize("name", ["guides/kv", "guides/kv.md", "docs/guides/kv.md"])
def test_a_page_is_printed_by_its_path(name: str, nested: Path) -> None:
    assert CliRunner().invoke(app, ["docs", name]).stdout == "# The page guides/kv\n"


def test_the_last_part_of_a_path_is_enough_where_one_page_has_it(nested: Path) -> None:
    assert CliRunner().invoke(app, ["docs", "serve"]).stdout == "# The page guides/serve\n"


@pytest.mark.parametrize(
    ("name", "problem", "named"),
    [("kv", "is several pages", ["design/kv", "guides/kv"]),
     ("erve", "there is no page", ["architecture", "design/kv", "guides/kv", "guides/serve"])],
)  # fmt: skip
def test_a_name_of_no_or_of_several_pages_is_refused(
    name: str, problem: str, named: list[str], nested: Path
) -> None:
    done = CliRunner().invoke(app, ["docs", name])
    text = " ".join(done.stderr.replace("│", " ").split())
    assert done.exit_code == FAILED
    assert problem in text
    assert f"use one of {', '.join(named)}" in text


def test_every_page_is_listed_with_its_title(nested: Path) -> None:
    listed = CliRunner().invoke(app, ["docs"]).stdout
    for name in ("architecture", "guides/kv", "guides/serve", "design/kv"):
        assert f"The page {name}" in listed
