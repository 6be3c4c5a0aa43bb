"""Every guide begins with a block that can be run, and every block of a guide is run or parsed."""

import ast
import importlib.util
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
import typer

from qllm import QLLMEngine
from qllm.cli import app
from qllm.fleet.members import OF_ONE_ENGINE
from tests.support.files import ROOT
from tests.support.serving import Serving

GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
PAGES = [ROOT / "docs" / "quickstart.md", *GUIDES]
FIRST_LINES = 15
ADDRESS = "http://127.0.0.1:8000"
"""The server of the guides. The shared one answers in its place."""
RUN_ELSEWHERE = {"policies.md": "tests/cli/test_new_policy.py"}
"""Guides whose Python is run by another test, in an environment of its own."""
ASKED_ELSEWHERE = {"depths.md": "tests/server/test_lossy.py"}
"""Guides whose requests another test sends, because their server has further models."""
CLIENTS = ("anthropic", "langchain_openai", "litellm", "ray")
"""Packages of other environments: `tests/outside` has tests with each of them."""
WORDS = (
    "cat", "cd", "chmod", "docker", "echo", "export", "kubectl", "make", "nice", "pip", "python",
    "serve", "systemctl",
)  # fmt: skip
"""Commands of others. The files and targets that they name must exist."""
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


class Block(NamedTuple):
    """A fenced block of a page: its place, language and text."""

    place: str
    language: str
    text: str


def blocks(page: Path, language: str) -> Iterator[Block]:
    """Yield the blocks of a page in one language."""
    source = page.read_text()
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", source, re.M | re.S):
        if match[1] == language:
            line = source[: match.start()].count("\n") + 1
            yield Block(f"{page.name}:{line}", match[1], match[2])


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command of a block of bash, without variables set before it."""
    for line in re.sub(r"\\\n", " ", text).splitlines():
        words = shlex.split(line, comments=True)
        while words and re.match(r"[A-Z_]+=", words[0]):
            del words[0]
        if words:
            yield words


def joined(text: str) -> str:
    """Return a block with the lines of a quoted text joined, so that a line is a command."""
    return re.sub(r"'[^']*'", lambda quoted: quoted[0].replace("\n", " "), text)


PYTHON = [block for page in PAGES for block in blocks(page, "python")]
BASH = [block for page in PAGES for block in blocks(page, "bash")]


def imported(block: Block) -> Iterator[str]:
    """Yield the modules that a block imports."""
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom):
            yield str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def of_clients(block: Block) -> bool:
    return any(name.partition(".")[0] in CLIENTS for name in imported(block))


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_a_guide_begins_with_a_block_that_can_be_run(page: Path) -> None:
    first = "\n".join(page.read_text().splitlines()[:FIRST_LINES])
    assert re.search(r"^```(python|bash)$", first, re.M)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_says_how_to_see_that_it_works(page: Path) -> None:
    assert "See that" in page.read_text()


@pytest.mark.parametrize(
    "page",
    [*PAGES, *sorted((ROOT / "docs" / "reference").glob("*.md"))],
    ids=lambda page: page.name,
)
def test_a_page_of_users_fits_100_columns(page: Path) -> None:
    assert [line for line in page.read_text().splitlines() if len(line) > 100] == []


def test_the_guide_of_a_fleet_names_each_setting_that_may_differ() -> None:
    page = (ROOT / "docs" / "guides" / "several-engines.md").read_text()
    may_differ = page.partition("These may differ:")[2].partition("| what happens")[0]
    settings = may_differ.partition("- sizes of KV")[0]
    assert set(re.findall(r"`(\w+)`", settings)) == OF_ONE_ENGINE


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.place)
def test_the_python_of_a_guide_runs(
    block: Block,
    engine: QLLMEngine,
    served: Serving,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine with settings is made; without any, the shared one is lent in its place."""
    page = block.place.partition(":")[0]
    for name in imported(block):
        assert name.partition(".")[0] in CLIENTS or importlib.util.find_spec(name), name
    if of_clients(block) or page in RUN_ELSEWHERE:
        return
    make = QLLMEngine.from_pretrained
    monkeypatch.setattr(
        QLLMEngine,
        "from_pretrained",
        lambda model, **settings: make(model, **settings) if settings else nullcontext(engine),
    )
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(block.text.replace(ADDRESS, served.url), block.place, "exec"), names)
    for client in [value for value in names.values() if isinstance(value, openai.OpenAI)]:
        client.close()  # a guide leaves that to the end of its program


@pytest.mark.parametrize("block", BASH, ids=lambda block: block.place)
def test_the_commands_of_a_guide_are_those_there_are(block: Block) -> None:
    for words in commands(joined(block.text)):
        check(words)


def check(words: list[str]) -> None:
    """Raise if a command, an option, a target or a file of a command is not there."""
    command, *rest = words
    if command == "qllm":
        rest = rest[: rest.index(">")] if ">" in rest else rest
        with COMMANDS[rest[0]].make_context(rest[0], rest[1:]):
            return
    assert command in (*WORDS, "curl", "openssl"), command
    if command == "make":
        assert rest[0] in TARGETS, rest[0]
    for name in rest:
        if re.match(r"(deploy|locks|scripts)/", name):
            assert (ROOT / name).exists(), name


@pytest.mark.parametrize(
    "block",
    [
        block
        for block in BASH
        if "curl" in block.text and block.place.partition(":")[0] not in ASKED_ELSEWHERE
    ],
    ids=lambda block: block.place,
)
def test_the_requests_of_a_guide_are_answered(block: Block, served: Serving) -> None:
    script = "".join(
        f"{line}\n"
        for line in re.sub(r"\\\n", " ", joined(block.text)).splitlines()
        if line.startswith("curl")
    )
    asked = script.replace("curl -s", "curl -sS --fail-with-body").replace(ADDRESS, served.url)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", asked],
        env={**os.environ, "NO_PROXY": "*"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, (done.stdout, done.stderr)


def test_a_command_that_is_gone_is_seen() -> None:
    for text in ("qllm serve tiny --gone 1", "make gone", "docker build -f deploy/gone", "gone x"):
        (words,) = commands(text)
        with pytest.raises(Exception, match="gone"):
            check(words)
