"""A policy package of one's own: what `qllm new-policy` writes, and its guide followed."""

import os
import re
import runpy
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qllm.cli import app
from qllm.cli.new_policy import KINDS, new_policy
from qllm.errors import ConfigError
from qllm.sim.check import check_policy
from tests.support.files import ROOT
from tests.support.new_policy import made, seem_installed

runner = CliRunner()


@pytest.mark.parametrize(
    "seeds",
    [1, pytest.param(3, marks=pytest.mark.slow)],  # the smaller number in the short lane
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_new_policy_passes_check_policy(kind: str, seeds: int, tmp_path: Path) -> None:
    policy = made(tmp_path, kind)
    for seed in range(seeds):
        assert check_policy(policy(), num_states=2000, seed=seed).evictions
    check_policy(policy(tokens_per_ms=1000), num_states=500)
    with pytest.raises(ConfigError, match="tokens_per_ms=-1 must be an integer >= 0"):
        policy(tokens_per_ms=-1)


def test_a_new_rank_is_arithmetic_on_integers(tmp_path: Path) -> None:
    policy = made(tmp_path, "rank")
    assert policy.compilable
    numbers = {"arrival_ns": 5_000_000, "priority": 10, "deadline_ns": 2**62, "prompt_tokens": 70}
    numbers |= {"done_tokens": 0, "served_ns": 0, "now_ns": 8_999_999}
    answer = policy().rank(**numbers)
    assert answer == (10, 67)
    assert [type(number) for number in answer] == [int, int]


@pytest.mark.parametrize("kind", KINDS)
def test_the_package_is_whole(kind: str, tmp_path: Path) -> None:
    folder = new_policy("slow-first", kind, tmp_path / "somewhere")
    assert folder == tmp_path / "somewhere" / "slow_first"
    files = {str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()}
    assert files == {
        "README.md",
        "pyproject.toml",
        "slow_first.py",
        "tests/test_slow_first.py",
    }
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    points = project["project"]["entry-points"]["qllm.policies"]
    assert points == {"slow-first": "slow_first:SlowFirst"}
    assert not [f for f in files if "$" in (folder / f).read_text()]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("", "must be lower-case words"),
        ("My", "must be lower-case words"),
        ("1st", "must be lower-case words"),
        ("a__b", "must be lower-case words"),
        ("../up", "must be lower-case words"),
        ("fcfs", "a policy 'fcfs' is installed already"),
        ("ls_first", "a policy 'ls-first' is installed already"),
        ("class", "would hide a word or a module"),
        ("json", "would hide a word or a module"),
        ("rank_policy", "would hide a word or a module"),
        ("world", "would hide a word or a module"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused(name: str, text: str, tmp_path: Path) -> None:
    done = runner.invoke(app, ["new-policy", name, "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert text in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "my_policy").mkdir()
    (tmp_path / "my_policy" / "my_policy.py").write_text("mine")
    done = runner.invoke(app, ["new-policy", "my_policy", "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert "exists and is left as it is" in done.stderr
    assert [f.read_text() for f in tmp_path.rglob("*.py")] == ["mine"]
    done = runner.invoke(app, ["new-policy", "other", "--kind", "best", "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert "kind='best' must be one of: rank, plan" in done.stderr


# -- as a new user would


class Place:
    """A folder with an environment of its own, which sees what is installed here, and no index."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        venv = folder / ".venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
        self.python = venv / "bin" / "python"
        ours = Path(sysconfig.get_path("purelib", vars={"base": str(venv)}))
        here = sysconfig.get_path("purelib")
        others = [p for p in sys.path if p.endswith("-packages") and p != here]
        lines = [f"import site; site.addsitedir({here!r})", *others]
        (ours / "here.pth").write_text("\n".join(lines) + "\n")
        script = venv / "bin" / "qllm"
        script.write_text(f"#!{self.python}\nfrom qllm.cli import main\n\nmain()\n")
        script.chmod(0o755)
        self.env = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PIP_"))},
            "PATH": f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PIP_NO_INDEX": "1",
            "PIP_NO_BUILD_ISOLATION": "0",  # pip reads it as build_isolation=0: no download
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "200",
        }

    def run(self, script: str) -> str:
        """Run a script of bash and return what it printed."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=self.folder,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("new-user"))


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """The code blocks of a page: their language and text."""
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.M | re.S):
        yield match[1], match[2]


@pytest.mark.slow  # without pip: test_a_plan_policy_is_found_and_serves
def test_the_page_leads_a_new_user_to_a_working_package(place: Place) -> None:
    found = list(blocks(ROOT / "docs" / "guides" / "policies.md"))
    assert {language for language, _ in found} == {"bash", "python"}
    lines = [
        text if language == "bash" else f"python - <<'END'\n{text}END\n" for language, text in found
    ]
    out = place.run("\n".join(lines))
    assert "4 passed" in out
    assert re.search(r"^ *my-policy +Shortest prompt first", out, re.M), out
    assert out.count("Report(policy=") == 3
    assert "[8, 8, 8, 8]" in out
    assert re.search(r"^ +fcfs +my-policy *$", out, re.M), out
    assert re.search(r"^ +output tokens/s +\d[\d.]* +\d[\d.]* *$", out, re.M), out


def test_a_plan_policy_is_found_and_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder is on the path, with the entry points of its project; nothing is installed."""
    folder = new_policy("best_plan", "plan", tmp_path)
    seem_installed(folder, monkeypatch)
    monkeypatch.setenv("COLUMNS", "200")
    try:
        tests = runpy.run_path(str(folder / "tests" / "test_best_plan.py"))
        mine = [name for name in tests if name.startswith("test_")]
        assert len(mine) == 3
        for name in mine:
            if name != "test_it_keeps_every_rule":  # test_a_new_policy_passes_check_policy
                tests[name]()
        listed = runner.invoke(app, ["policies"])
        assert re.search(r"^ *best-plan +Shortest prompt first", listed.stdout, re.M), listed.stdout
        line = ["run", "tiny", "Hi", "--max-tokens", "4", "--policy", "best-plan"]
        done = runner.invoke(app, line)
        assert done.exit_code == 0, done.stderr
    finally:
        sys.modules.pop("best_plan", None)


@pytest.mark.slow  # the package as pip installs it; without pip: test_a_plan_policy_is_found_...
def test_a_plan_policy_works_in_the_same_way(place: Place) -> None:
    out = place.run(
        "qllm new-policy best_plan --kind plan\ncd best_plan\n"
        "python -m pip install --no-deps --no-build-isolation .\npython -m pytest\n"
        "cd /\nqllm policies\nqllm run tiny Hi --max-tokens 4 --policy best-plan\n"
    )
    assert "3 passed" in out
    assert re.search(r"^ *best-plan +Shortest prompt first", out, re.M), out
