"""Every flag, setting, variable, command and package that a page or a message names exists."""

import ast
import re
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from itertools import chain
from typing import Any

import pytest
import typer
from packaging.markers import Marker
from packaging.requirements import Requirement
from typer.testing import CliRunner

from qllm import __version__
from qllm.cli import app
from qllm.cli.app import FAILED
from qllm.cli.settings import rows
from qllm.config import EngineConfig, engine_config
from qllm.errors import ConfigError, pip_install
from qllm.hints import HINTS
from qllm.plugins import installed_policies, load_factory
from qllm.ray.settings import RaySettings
from qllm.server.config import ServerConfig
from tests.support.files import ROOT, python_files

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    *(str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs").rglob("*.md"))),
)
OTHERS = {
    "--no-deps", "--no-binary", "--target", "--inplace", "--no-isolation", "--yes", "--merge",
    "--name", "--auth-type", "--provider", "--cpu-shares",
}  # fmt: skip
"""Flags of pip, Docker, setuptools, gguf-split and agents; and NAME, which stands for any."""


def strings(path: str) -> Iterator[str]:
    """Texts in a module: messages, help and docstrings."""
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def text_of(where: str) -> str:
    """A page, or the texts in a module."""
    return "\n".join(strings(where)) if where.endswith(".py") else (ROOT / where).read_text()


SCRIPTS = [*python_files("bench", "scripts", "tests/long"), "tests/conftest.py"]


def known_flags() -> set[str]:
    ours = {opt for c in COMMANDS.values() for p in c.params for opt in p.opts + p.secondary_opts}
    ours |= {"--help", "--version"} | COMMANDS["serve"]._names().keys()
    scripts = [*map(ROOT.joinpath, SCRIPTS), *(ROOT / "scripts").iterdir()]
    for path in scripts:
        if path.is_file():
            ours |= set(re.findall(r"--[a-z][a-z-]+", path.read_text()))
    return ours | OTHERS


def known_settings() -> set[str]:
    names = {field.name for field in fields(EngineConfig)}
    names |= ServerConfig.model_fields.keys() | RaySettings.model_fields.keys()
    for point in installed_policies().values():
        names |= set(getattr(load_factory(point), "__dataclass_fields__", ()))
    return names


def unknown_flags(text: str, known: set[str]) -> set[str]:
    return set(re.findall(r"(?<![\w<|-])--[a-z][a-z-]*[a-z](?![\w-])", text)) - known


def unknown_settings(text: str, known: set[str]) -> set[str]:
    """What `--set NAME=`, `--server NAME=`, `policy.NAME=` and `QLLM_NAME=` name."""
    named = re.findall(r"--(?:set|server) (?:policy\.|ray\.)?([a-z]\w*)=", text)
    named += re.findall(r"\b(?:policy|ray)\.([a-z]\w*)=", text)
    named += [name.lower() for name in re.findall(r"\bQLLM_([A-Z][A-Z_]*[A-Z])=", text)]
    return set(named) - known - {"name"}


def unknown_commands(text: str) -> set[str]:
    return set(re.findall(r"(?:`|^\$ |^\.venv/bin/)qllm ([a-z][\w-]*)", text, re.M)) - set(COMMANDS)


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


def packages() -> set[str]:
    """What this package and its extras need, and what the benches compare with."""
    needs = [*PROJECT["dependencies"], *chain(*EXTRAS.values()), "llama-cpp-python"]
    return {Requirement(need).name for need in needs} - {PROJECT["name"]}


def unknown_packages(text: str, known: set[str]) -> set[str]:
    """Names that pip would look for on an index: paths and options are none."""
    found = set()
    for line in re.findall(r"pip install ([^`\n#;]*)", text):
        words = iter(line.replace("'", " ").replace('"', " ").split())
        for word in words:
            if word in ("-r", "-c", "-e", "--no-binary"):
                next(words, None)
            elif re.match(r"[A-Za-z]", word) and "/" not in word and not word.endswith(".whl"):
                found.add(re.split(r"[\[=<>,)]", word)[0])
    return found - known


FLAGS, SETTINGS, PACKAGES = known_flags(), known_settings(), packages()


@pytest.mark.parametrize("where", [*PAGES, *python_files("qllm", "policies")])
def test_what_a_text_names_exists(where: str) -> None:
    text = text_of(where)
    assert unknown_flags(text, FLAGS) == set()
    assert unknown_settings(text, SETTINGS) == set()
    assert unknown_commands(text) == set()
    assert unknown_packages(text, PACKAGES) == set()


def metadata() -> list[str]:
    """Return the requirements that an installation of this tree declares."""
    found = list(PROJECT["dependencies"])
    for extra, needs in EXTRAS.items():
        for need in map(Requirement, needs):
            given = f"{need.marker} and " if need.marker else ""
            need.marker = Marker(f'{given}extra == "{extra}"')
            found.append(str(need))
    return found


@pytest.mark.parametrize("extra", EXTRAS)
def test_what_an_extra_needs_is_on_an_index(extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own name is on none: whoever registered it would run code at our users."""
    monkeypatch.setattr("importlib.metadata.requires", lambda name: metadata())
    assert pip_install(extra).startswith("pip install ")
    assert unknown_packages(pip_install(extra), PACKAGES) == set()
    assert "qllm" not in pip_install(extra)


@pytest.mark.parametrize("name", HINTS)
def test_a_hint_names_settings_that_exist(name: str) -> None:
    said = set(re.findall(r"\b(?:set (\w+)|(\w+_\w+))\b", HINTS[name]))
    named = {word for pair in said for word in pair if word} - {"HF_HOME"}
    assert named <= SETTINGS | {"model"}
    if name not in SETTINGS:
        with pytest.raises(ConfigError, match=re.escape(HINTS[name])):
            engine_config({name: 1})


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("serve tiny --max-model-len 5", "max_kv_tokens bounds KV"),
        ("serve tiny -ngl 99", "set device"),
        ("run tiny --load-in-4bit", "expert_weights"),
        ("bench tiny --tensor-parallel-size=2", "set tp"),
        ("serve tiny --max-num-seqs 4", "--set max_num_seqs=VALUE"),
        ("run tiny --activations int8", "--set activations=VALUE"),
        ("serve tiny --set max_model_len=5", "max_kv_tokens bounds KV"),
        ("serve tiny --server allowed_origins=x", "cors_origins"),
    ],
)
def test_a_flag_of_another_server_is_answered_with_ours(words: str, says: str) -> None:
    done = CliRunner().invoke(app, words.split())
    assert done.exit_code == FAILED
    assert says in " ".join(re.sub(r"[\u2500-\u257f]", " ", done.stderr).split())


def test_help_shows_settings_and_nothing_else() -> None:
    for settings in (ServerConfig, EngineConfig):
        shown = [name for name, _, _ in rows(settings)]
        assert set(shown) <= SETTINGS
        assert [name for name in shown if name.startswith("_")] == []


def test_the_release_is_printed() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == f"qllm {__version__}\n"


def test_what_is_not_there_is_seen() -> None:
    text = "`qllm srve MODEL --activations int8 --set recrd=1`, QLLM_MODLE=x, policy.nothing=1"
    assert unknown_flags(text, FLAGS) == {"--activations"}
    assert unknown_settings(text, SETTINGS) == {"recrd", "modle", "nothing"}
    assert unknown_commands(text) == {"srve"}
    assert unknown_packages("`pip install 'qllm-runtime[server]'`", packages()) == {"qllm-runtime"}
