"""What holds for all tests: Triton's interpreter where no GPU is; settings end with their test.

Which tests run is chosen in `tests/support/lanes.py`.

A failure is printed when it happens, so that a run that is stopped has said what failed. A test
that leaves a setting of the server (QLLM_...) in the environment fails itself, not those after it.
"""

import functools
import gc
import importlib
import os
import ssl
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import TYPE_CHECKING, Any

import pytest
import torch

from qllm.kernels import cpu

pytest_plugins = ["tests.support.lanes"]
pytest.register_assert_rewrite("tests.support")

from tests.support.warm import Nurseries  # noqa: E402 - its asserts are rewritten, too

if TYPE_CHECKING:
    from qllm import QLLMEngine

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton's own library is imported


@pytest.fixture(autouse=True, scope="session")
def _loaded_modules_are_not_collected() -> Iterator[None]:
    """Freeze the heap once instead of at the start of every engine.

    An engine that starts on a thread collects garbage and freezes what is left, and unfreezes it
    when it is closed. With torch, transformers and all tests loaded that takes 0.3 s of CPU.
    """
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "freeze", lambda: None)
        patch.setattr(gc, "unfreeze", lambda: None)
        yield


_freeze = gc.freeze


@pytest.fixture(autouse=True, scope="module")
def _what_earlier_files_left_is_not_collected(_loaded_modules_are_not_collected: None) -> None:
    """Freeze the heap before each file: modules that were imported since, and models kept.

    Each load of a model collects garbage; without this a fifth of the suite's CPU went there.
    """
    gc.collect()
    _freeze()


@pytest.fixture(autouse=True, scope="session")
def _engines_start_warm(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fork engines from a process that has imported torch; `--lane outside` starts them cold."""
    if request.config.getoption("--lane") == "outside":
        yield
        return
    nurseries = Nurseries()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qllm.frontend.process.start_process", nurseries.start_process)
        yield
    nurseries.close()


@pytest.fixture(autouse=True, scope="session")
def _sizes_do_not_depend_on_the_machine() -> Iterator[None]:
    """Name the sizes of KV of every engine that a test makes; None in a test leaves one open."""
    from qllm import llm
    from tests.support.sizes import SIZES

    make = llm.engine_config
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm, "engine_config", lambda settings: make(SIZES | settings))
        yield


@pytest.fixture(autouse=True, scope="session")
def _ca_certificates_are_read_once() -> Iterator[None]:
    """Read the certificates of authorities once, not for each client: that takes 30 ms of CPU.

    Clients are made of httpx here, and of httpx2 in the package openai.
    """
    kept: list[ssl.SSLContext] = []
    with pytest.MonkeyPatch.context() as patch:
        for library in ("httpx", "httpx2"):
            try:
                module = importlib.import_module(f"{library}._transports.default")
            except ImportError:  # on a machine that has a GPU and no server
                continue
            patch.setattr(module, "create_ssl_context", _shared(module.create_ssl_context, kept))
        yield


def _shared(make: Callable[..., ssl.SSLContext], kept: list[ssl.SSLContext]) -> Any:
    """Make contexts with what a client asks for; those with the usual settings are one."""

    def create(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
        if verify is not True or cert is not None:
            return make(verify=verify, cert=cert, trust_env=trust_env)
        if not kept:
            kept.append(make(trust_env=trust_env))
        return kept[0]

    return create


@pytest.fixture(autouse=True, scope="session")
def _schemas_of_answers_are_made_once() -> Iterator[None]:
    """Make the fields of what routes answer once, not for each server: that takes 40 ms of CPU."""
    try:
        from fastapi import routing
    except ImportError:  # on a machine that has a GPU and no server
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "create_model_field", functools.cache(routing.create_model_field))
        yield


@pytest.fixture(autouse=True, scope="session")
def _packages_are_searched_once() -> Iterator[None]:
    """Search the installed packages for policies once per search path: that takes 7 ms of CPU."""
    search = functools.cache(lambda path, group: metadata.entry_points(group=group))
    with pytest.MonkeyPatch.context() as patch:
        find = "qllm.plugins.entry_points"
        patch.setattr(find, lambda group: search(tuple(map(_state, sys.path)), group))
        yield


def _state(folder: str) -> tuple[str, int]:
    """Return a folder, and when a package was last added to it or removed."""
    try:
        return folder, os.stat(folder or ".").st_mtime_ns
    except OSError:
        return folder, 0


@pytest.fixture(autouse=True)
def _settings_end_with_their_test() -> Iterator[None]:
    before = _settings()
    yield
    after = _settings()
    if after == before:
        return
    for name in after:
        del os.environ[name]
    os.environ.update(before)
    pytest.fail(f"this test leaves {after} in the environment, which was {before}")


@pytest.fixture(autouse=True)
def _numbers_and_threads_are_as_before() -> Iterator[None]:
    """Seed torch, and put back its threads, those of our kernels, and their kind."""
    torch.default_generator.manual_seed(0)  # `torch.manual_seed` formats three stacks: 0.5 ms
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)
    before = torch.get_num_threads(), cpu._threads
    yield
    if torch.get_num_threads() != before[0]:
        torch.set_num_threads(before[0])
    if cpu.native is not None:
        cpu.native.use(cpu.kind())
        if cpu._threads != before[1]:
            cpu.set_threads(1 if before[1] is None else before[1][1])


def _settings() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key.startswith("QLLM_")}


@pytest.fixture
def one_thread() -> None:
    """Let torch compute with one thread in a test; the fixture above puts its number back."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shared_engine() -> "Iterator[QLLMEngine]":
    """Make the engine that a worker's tests share.

    Fixtures of a module or session may use it, if they leave the engine idle.
    """
    from tests.support.serving import tiny_engine

    with tiny_engine() as made:
        yield made


@pytest.fixture
def engine(shared_engine: "QLLMEngine") -> "Iterator[QLLMEngine]":
    """Yield the shared engine: "tiny" in a process, one thread, all other settings as by default.

    A test must not close or kill it. After the test it has to be idle. What is kept of prompts is
    forgotten, so that no test depends on those before it.
    """
    from tests.support.engines import assert_idle

    yield shared_engine
    assert_idle(shared_engine)


BEGAN = time.monotonic()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print a failure at once; the process that has the workers sees each report once."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        seconds = time.monotonic() - BEGAN
        said = f"\nFAILED after {seconds:.0f} s: {report.nodeid} ({report.when})\n"
        sys.stdout.write(said + report.longreprtext[-3000:] + "\n")
        sys.stdout.flush()
