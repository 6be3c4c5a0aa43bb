"""The tiny server of a worker, which all tests here share that neither close nor kill it."""

from collections.abc import Iterator

import openai
import pytest

from qllm import QLLMEngine
from tests.support.engines import Holding, Holds, assert_idle
from tests.support.serving import Serving, forget_all, serving, tiny_engine


@pytest.fixture(scope="session")
def shared_server(
    shared_engine: QLLMEngine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    """Serve the shared engine, with a folder for files and responses and no keys.

    A test takes `served`, which leaves the server as it was.
    """
    with serving(shared_engine, state_dir=tmp_path_factory.mktemp("shared")) as made:
        yield made


@pytest.fixture
def served(engine: QLLMEngine, shared_server: Serving) -> Iterator[Serving]:
    """Yield the shared server. After the test it is idle and has no files."""
    yield shared_server
    forget_all(shared_server)


@pytest.fixture
def client(served: Serving) -> Iterator[openai.OpenAI]:
    """Yield a client of the shared server."""
    with served.client() as made:
        yield made


@pytest.fixture(scope="session")
def shared_invariant() -> Iterator[QLLMEngine]:
    """Make an engine whose answers do not depend on what is computed beside them.

    A fixture of wider scope than one test may use it, if it leaves the engine idle.
    """
    with tiny_engine(exactness="batch-invariant", conformance=False) as made:
        yield made


@pytest.fixture
def invariant_engine(shared_invariant: QLLMEngine) -> Iterator[QLLMEngine]:
    """Yield that engine. After the test it is idle and keeps nothing of prompts."""
    yield shared_invariant
    assert_idle(shared_invariant)


@pytest.fixture(scope="session")
def shared_holding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Holding]:
    """Make an engine whose requests stop at their 20th token until a file exists."""
    gate = tmp_path_factory.mktemp("holding") / "gate"
    how = {"exactness": "batch-invariant", "conformance": False}
    with tiny_engine(policy=Holds(str(gate)), **how) as made:
        yield Holding(made, gate)


@pytest.fixture
def holding(shared_holding: Holding) -> Iterator[Holding]:
    """Yield that engine, with its gate closed. After the test it is open, and the engine idle."""
    shared_holding.gate.unlink(missing_ok=True)
    yield shared_holding
    shared_holding.gate.touch()
    assert_idle(shared_holding.engine)
