"""The tiny server of a worker, which all tests here share that neither close nor kill it."""

from collections.abc import Iterator

import openai
import pytest

from qllm import QLLMEngine
from tests.support.serving import Serving, forget_all, serving


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
