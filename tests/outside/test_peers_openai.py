"""openai-python's own tests, out of its sdist, against our server; `make test-peers` runs them.

They were made for a server that answers anything, with nonsense values. What cannot pass here is
listed with its reason, and one that is listed and passes fails this test.
"""

import importlib.metadata
import os
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

import pytest

from qllm.measure.random_moe import cache_dir
from qllm.server.http.guard import ANYBODY
from tests.support.serving import Serving, serving, tiny_engine

pytestmark = pytest.mark.peers

VERSION = importlib.metadata.version("openai")
HOME = cache_dir() / "peers" / f"openai-python-{VERSION}"
TESTS = HOME / f"openai-{VERSION}"
CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
PLUGINS = Path(__file__).parent / "peers"
PACKAGES = (f"openai[aiohttp]=={VERSION}", "pytest", "pytest-asyncio", "pytest-timeout", "rich")
NAMES = ["tiny", "gpt-3.5-turbo-instruct", "gpt-6-astra"]
"""Models that the tests name, behind our own."""

NO_ROUTE = "no such route: models are not deleted over HTTP"
STORED = "no such route: chat completions are not stored, responses are"
NO_BATCH = "files are lines of batches: purpose must be 'batch'"
NO_INPUT = "it asks for nothing at all: there is no input"
NO_REPLAY = "a response that is kept cannot be streamed"
NO_COMPACT = "no such route: conversations are not compacted"
LIMIT = "limit=0 asks for an empty page; ours are of 1 or more"
WAYS = ("method", "raw_response", "streaming_response")


def _each(file: str, reason: str, *actions: str) -> dict[str, str]:
    return {f"{file}::test_{way}_{name}": reason for way in WAYS for name in actions}


REASONS = {
    **_each("test_models", NO_ROUTE, "delete"),
    "test_completions::test_method_create_with_all_params_overload_1": (
        "it asks for suffix, best_of=0 and a bias of the token 'foo' at once"
    ),
    "test_completions::test_method_create_with_all_params_overload_2": (
        "it asks for suffix, best_of=0 and a bias of the token 'foo' at once"
    ),
    **_each("test_files", NO_BATCH, "create"),
    "test_files::test_method_create_with_all_params": NO_BATCH,
    "test_files::test_method_list_with_all_params": LIMIT,
    "test_batches::test_method_create_with_all_params": "files do not expire",
    "test_batches::test_method_list_with_all_params": LIMIT,
    **_each("test_responses", NO_INPUT, "create_overload_1", "create_overload_2"),
    "test_responses::test_method_create_with_all_params_overload_1": NO_INPUT,
    "test_responses::test_method_create_with_all_params_overload_2": NO_INPUT,
    **_each("test_responses", NO_REPLAY, "retrieve_overload_2"),
    "test_responses::test_method_retrieve_with_all_params_overload_2": NO_REPLAY,
    **_each("test_responses", NO_COMPACT, "compact"),
    "test_responses::test_method_compact_with_all_params": NO_COMPACT,
    "responses.test_input_items::test_method_list_with_all_params": LIMIT,
    **_each("chat.test_completions", STORED, "retrieve", "update", "list", "delete"),
    "chat.test_completions::test_method_list_with_all_params": STORED,
    "chat.test_completions::test_method_create_with_all_params_overload_1": (
        "it asks for audio, functions, web search and max_tokens=0"
    ),
    "chat.test_completions::test_method_create_with_all_params_overload_2": (
        "it asks for audio, functions, web search and max_tokens=0"
    ),
    **_each("chat.completions.test_messages", STORED, "list"),
    "chat.completions.test_messages::test_method_list_with_all_params": STORED,
}
"""Why a test cannot pass, for all clients: sync and async, loose and strict, aiohttp."""


def pip(python: str, *arguments: str) -> None:
    done = subprocess.run(
        [python, "-m", "pip", *arguments], capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="module")
def python() -> str:
    """Python of an environment with what the tests need; they lie beside it, out of the sdist."""
    found = HOME / "bin" / "python"
    ready = HOME / "ready"
    if not ready.exists():
        subprocess.run([sys.executable, "-m", "venv", str(HOME)], check=True)
        install = ["install", "-q", "--disable-pip-version-check", "-c", str(CONSTRAINTS)]
        pip(str(found), *install, *PACKAGES)
        download = ["download", "-q", "--no-binary", ":all:", "--no-deps", "-d", str(HOME)]
        pip(str(found), *download, f"openai=={VERSION}")
        with tarfile.open(HOME / f"openai-{VERSION}.tar.gz") as sdist:
            sdist.extractall(HOME, filter="data")
        ready.touch()
    return str(found)


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def served(state: Path) -> Iterator[Serving]:
    settings = {"max_kv_tokens": 512, "default_max_tokens": 16}
    with (
        tiny_engine(conformance=False, **settings) as engine,
        serving(engine, state_dir=state, served_model_name=NAMES) as made,
    ):
        yield made


def run(python: str, served: Serving, state: Path, report: Path) -> dict[str, set[str]]:
    """Outcomes by test, over all clients."""
    names = ("test_models", "test_completions", "test_files", "test_batches", "test_responses")
    paths = [f"tests/api_resources/{name}.py" for name in names]
    paths += ["tests/api_resources/chat", "tests/api_resources/responses/test_input_items.py"]
    variables = {
        "TEST_API_BASE_URL": f"{served.url}/v1",
        "PYTHONPATH": str(PLUGINS),
        "QLLM_STATE_DIR": str(state),
        "QLLM_CALLER": ANYBODY,
    }
    asyncio = ["asyncio_mode=auto", "asyncio_default_fixture_loop_scope=session"]
    subprocess.run(
        [
            python, "-m", "pytest", "-c", os.devnull, "--rootdir", ".", "-p", "seeded", "-q",
            "--tb", "native",  # the others parse the source, in which Python 3.11 stumbles
            *(f"-o{x}" for x in asyncio), "--timeout", "60", "--junitxml", str(report), *paths,
        ],
        cwd=TESTS, env=os.environ | variables, capture_output=True, timeout=900, check=False,
    )  # fmt: skip
    found: dict[str, set[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.get("classname", "").removeprefix("tests.api_resources.").rpartition(".")[0]
        name = f"{file}::{case.get('name', '').partition('[')[0]}"
        kinds = {child.tag for child in case}
        failed = kinds & {"failure", "error"}
        outcome = "failed" if failed else "skipped" if "skipped" in kinds else "passed"
        found.setdefault(name, set()).add(outcome)
    return found


def test_its_own_tests_pass_but_for_those_with_a_reason(
    python: str, served: Serving, state: Path, tmp_path: Path
) -> None:
    found = run(python, served, state, tmp_path / "report.xml")
    assert len(found) >= 80, "tests were not found"
    assert set(REASONS) <= set(found), "reasons for tests that do not exist"
    wrong = {name for name, outcomes in found.items() if "failed" in outcomes}
    passing = {name for name in REASONS if found[name] != {"failed"}}
    assert passing == set(), "these pass by now for some client: take them off the list"
    assert wrong - set(REASONS) == set()
