"""Coding agents and clients of npm, unchanged, in sessions of several turns against one server."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.scripted_answers import COMMANDS, END, Requests, scripted
from tests.support.serving import Serving

FOLDER = Path(sys.prefix) / "agents"
"""Folder that scripts/agents fills. `make test-outside` runs this script."""
CLIENTS = Path(sys.prefix) / "clients" / "bin" / "python"
BIN = FOLDER / "node_modules" / ".bin"
PROMPT = "Write one to made-1, then two to made-2."

pytestmark = pytest.mark.skipif(not BIN.exists(), reason=f"no {BIN}: scripts/agents fills it")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Serving, Requests]]:
    with scripted(tmp_path_factory.mktemp("agents"), max_body_bytes="16MiB") as made:
        yield made


def run(home: Path, *command: str, **variables: str) -> str:
    """Return the output of a program, run in an empty folder that is also its home."""
    path = f"{FOLDER / 'node' / 'bin'}:{os.environ['PATH']}"
    kept = {name: os.environ[name] for name in ("LANG", "TMPDIR") if name in os.environ}
    done = subprocess.run(
        command, cwd=home, env={**kept, "HOME": str(home), "PATH": path, **variables},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def claude(url: str, home: Path) -> str:
    return run(
        home, str(BIN / "claude"), "-p", PROMPT, "--model", "tiny", "--allowedTools", "Bash",
        ANTHROPIC_BASE_URL=url, ANTHROPIC_AUTH_TOKEN="none", ANTHROPIC_MODEL="tiny",
        ANTHROPIC_DEFAULT_HAIKU_MODEL="tiny", CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )  # fmt: skip


def codex(url: str, home: Path) -> str:
    provider = f'{{name="qllm", base_url="{url}/v1", wire_api="responses"}}'
    return run(
        home, str(BIN / "codex"), "exec", "--skip-git-repo-check", "--model", "tiny",
        "--dangerously-bypass-approvals-and-sandbox", "-c", "model_provider=qllm",
        "-c", f"model_providers.qllm={provider}", PROMPT,
    )  # fmt: skip


def qwen(url: str, home: Path) -> str:
    return run(
        home, str(BIN / "qwen"), "--yolo", "--auth-type", "openai", "-p", PROMPT,
        OPENAI_BASE_URL=f"{url}/v1", OPENAI_API_KEY="none", OPENAI_MODEL="tiny",
    )  # fmt: skip


def pi(url: str, home: Path, api: str = "openai-completions") -> str:
    at = url if api == "anthropic-messages" else f"{url}/v1"
    own = {"vllmPriority": 5} if api == "openai-completions" else {}
    model = {"id": "tiny", "reasoning": True, "compat": own}
    provider = {"baseUrl": at, "api": api, "apiKey": "none", "models": [model]}
    settings = home / ".pi" / "agent"
    settings.mkdir(parents=True)
    (settings / "models.json").write_text(json.dumps({"providers": {"qllm": provider}}))
    return run(
        home, str(BIN / "pi"), "-p", "--provider", "qllm", "--model", "tiny", PROMPT,
        PI_OFFLINE="1", PI_CODING_AGENT_DIR=str(settings),
    )  # fmt: skip


AGENTS = {
    "claude": claude,
    "codex": codex,
    "pi on chats": pi,
    "pi on messages": lambda url, home: pi(url, home, "anthropic-messages"),
    "pi on responses": lambda url, home: pi(url, home, "openai-responses"),
    "qwen": qwen,
}
BACKGROUND = {"pi on chats"}
"""Agents that ask for BE here."""


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_works_through_its_turns(
    served: tuple[Serving, Requests], name: str, tmp_path: Path
) -> None:
    serving, seen = served
    seen.all.clear()
    said = AGENTS[name](serving.url, tmp_path)
    assert END in said
    assert [(tmp_path / f"made-{n}").read_text() for n in (1, 2)] == ["one\n", "two\n"]
    asked = [x for x in seen.all if x["request"].startswith("POST /v1/")]
    assert len(asked) > len(COMMANDS)
    assert {x["status"] for x in asked} == {200}, asked
    wanted = "BE" if name in BACKGROUND else "LS"
    assert {x["class"] for x in asked if "class" in x} == {wanted}


@pytest.mark.parametrize("where", ["npm", "pypi"])
def test_clients_work_through_their_turns(
    served: tuple[Serving, Requests], where: str, tmp_path: Path
) -> None:
    serving, seen = served
    seen.all.clear()
    command = {
        "npm": ("node", str(FOLDER / "sdks.mjs")),
        "pypi": (str(CLIENTS), str(Path(__file__).parent / "clients" / "turns.py")),
    }[where]
    said = run(tmp_path, *command, QLLM_TEST_URL=serving.url)
    found = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert len(found) == {"npm": 11, "pypi": 9}[where]
    for one in found:
        assert (one["calls"], one["text"]) == (2, END), one
    assert len(seen.all) == 3 * len(found)
    assert {x["status"] for x in seen.all} == {200}
