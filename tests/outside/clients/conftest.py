"""For tests that run in the environment of the clients, against a server that is there already."""

import os

import pytest


@pytest.fixture(scope="session")
def url() -> str:
    return os.environ["QLLM_TEST_URL"]
