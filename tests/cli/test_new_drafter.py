"""A drafter package of one's own: what `qllm new-drafter` writes."""

import runpy
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qllm.cli import app
from qllm.cli.new_drafter import new_drafter
from qllm.drafters.choose import drafters
from tests.support.new_policy import seem_installed

runner = CliRunner()


def test_a_drafter_is_found_and_passes_its_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder is on the path, with the entry points of its project; nothing is installed."""
    done = runner.invoke(app, ["new-drafter", "best-guess", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.stderr
    folder = tmp_path / "best_guess"
    seem_installed(folder, monkeypatch)
    try:
        assert drafters()[-1] == "best-guess"
        tests = runpy.run_path(str(folder / "tests" / "test_best_guess.py"))
        mine = [name for name in tests if name.startswith("test_")]
        assert len(mine) == 3
        for name in mine:
            tests[name]()
    finally:
        sys.modules.pop("best_guess", None)


def test_the_package_is_whole(tmp_path: Path) -> None:
    folder = new_drafter("best_guess", tmp_path)
    files = {str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()}
    assert files == {"README.md", "pyproject.toml", "best_guess.py", "tests/test_best_guess.py"}
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    points = project["project"]["entry-points"]["qllm.drafters"]
    assert points == {"best-guess": "best_guess:BestGuess"}
    assert not [f for f in files if "$" in (folder / f).read_text()]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("", "must be lower-case words of letters and digits with _ or - between them, a letter "
             "first, like my_drafter"),
        ("lookup", "a drafter 'lookup' is installed already"),
        ("none", "a drafter 'none' is installed already"),
        ("draft_request", "would hide a word or a module"),
        ("json", "would hide a word or a module"),
    ],
)  # fmt: skip
def test_a_name_that_cannot_be_used_is_refused(name: str, text: str, tmp_path: Path) -> None:
    done = runner.invoke(app, ["new-drafter", name, "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert text in done.stderr
    assert not list(tmp_path.iterdir())
