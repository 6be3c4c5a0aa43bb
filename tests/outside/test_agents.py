"""Clients of agents, unchanged, against one server: each in the environment of the clients."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.serving import Serving, serving, tiny_engine

CLIENTS = Path(sys.prefix) / "clients" / "bin" / "python"
"""Has LangChain, LiteLLM and Anthropic's client; `make test-outside` puts them there."""
FOLDER = Path(__file__).parent / "clients"
FILES = sorted(path.name for path in FOLDER.glob("with_*.py"))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    state = tmp_path_factory.mktemp("state")
    with tiny_engine(conformance=False) as engine, serving(engine, state_dir=state) as made:
        yield made


@pytest.mark.skipif(not CLIENTS.exists(), reason=f"no {CLIENTS}: `make test-outside` makes it")
@pytest.mark.parametrize("file", FILES)
def test_client(served: Serving, file: str) -> None:
    options = ["-c", os.devnull, "-p", "no:cacheprovider", "--confcutdir", str(FOLDER), "-q"]
    command = [str(CLIENTS), "-m", "pytest", *options, file]
    done = subprocess.run(
        command, cwd=FOLDER, env={**os.environ, "QLLM_TEST_URL": served.url},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def test_every_client_is_there() -> None:
    assert FILES == ["with_anthropic.py", "with_langchain.py", "with_litellm.py"]
