"""Fixtures of the page's tests: a server with a state folder, and a browser."""

from collections.abc import Iterator
from typing import Any

import pytest

from qllm.llm import QLLMEngine
from tests.support.browsing import PATIENCE_MS, browser_path
from tests.support.serving import Serving, serving


@pytest.fixture(scope="module")
def served(
    shared_engine: QLLMEngine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    with serving(shared_engine, state_dir=tmp_path_factory.mktemp("state")) as serving_:
        yield serving_


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=browser_path(), args=["--no-sandbox"])
        yield browser
        browser.close()
