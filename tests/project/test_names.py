"""One word per thing: words that had several meanings have one, where that thing is."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.files import ROOT

HOMES = {
    # the process of a caller is a front end; its object here is a client
    "guest": "",
    # a prompt that arrives in pieces is a streaming prompt; its changes are prompt updates
    "growing": "",
    "revising": "",
    # a lock is a lock; what lets front ends of other machines in is a listener
    "door": "",
    # the CPU beside a device; a machine's name where addresses are
    "host": "cli config cuda device engine.build engine.remote ingress.remote models ray.run "
    "server sharded",
    # the tensors of captured stages
    "lane": "cuda device engine.gpu",
    # some layers captured as one graph; and Triton's own name of a parameter
    "stage": "cuda device kernels.triton",
    # what the request log does with an open request; and CUDA's own word for graphs
    "replay": "cuda fleet frontend llm ray server",
    # one of max_num_seqs
    "seat": "device engine.gpu engine.served fleet frontend ray scheduler server sim "
    "workloads.generators",
}
"""Word -> where identifiers may have it."""


def words(name: str) -> set[str]:
    parts = re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)
    return {part.lower().removesuffix("s") for part in parts}


def identifiers(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        for field in ("id", "attr", "name", "arg"):
            if isinstance(name := getattr(node, field, None), str):
                yield name


def astray(path: str, source: str) -> set[str]:
    """Identifiers of a file with a word that has its home elsewhere."""
    parts = Path(path).with_suffix("").parts[1:]
    here = {".".join(parts[: i + 1]) for i in range(len(parts))}
    found = {parts[-1], *identifiers(source)}
    elsewhere = {word for word, homes in HOMES.items() if not here & set(homes.split())}
    return {name for name in found if words(name) & elsewhere}


def test_a_word_is_used_where_its_meaning_is() -> None:
    paths = sorted(str(file.relative_to(ROOT)) for file in (ROOT / "qllm").rglob("*.py"))
    found = {
        path: astray(path, (ROOT / path).read_text()) for path in paths if "/templates/" not in path
    }
    assert len(found) > 150
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("path", "source", "name"),
    [
        ("qllm/frontend/process.py", "class ProcessHost: ...", "ProcessHost"),
        ("qllm/runner/runner.py", "guest_rows = 3", "guest_rows"),
        ("qllm/ingress/shm.py", "def f(lanes): ...", "lanes"),
        ("qllm/llm.py", "with self._client.door: ...", "door"),
        ("qllm/runner/replay.py", "", "replay"),
        ("qllm/measure/demo.py", "def f(*, next_stage=1): ...", "next_stage"),
        ("qllm/frontend/streaming_prompt.py", "class GrowingPrompt: ...", "GrowingPrompt"),
    ],
)
def test_a_word_astray_is_seen(path: str, source: str, name: str) -> None:
    assert astray(path, source) == {name}


def test_words_have_homes_that_exist() -> None:
    for homes in HOMES.values():
        for home in homes.split():
            path = ROOT / "qllm" / home.replace(".", "/")
            assert path.is_dir() or path.with_suffix(".py").is_file(), home
