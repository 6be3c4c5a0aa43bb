"""The lanes of the tests: `make test` holds a part of everything that `make test-all` tests."""

import ast
import inspect
import json
import random
import re
import ssl
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import httpx
import openai
import pytest

from qllm import QLLMEngine
from qllm.kernels import cpu
from qllm.models.parts.fingerprints import FAMILIES
from tests.support.files import ROOT
from tests.support.lanes import (
    BUDGET_S,
    KERNELS,
    OUTSIDE,
    SELECTION,
    Report,
    Selection,
    kernels,
    named_in,
    pytest_sessionstart,
    sample,
    select,
    shuffled,
)
from tests.support.serving import serving


def test_clients_of_either_library_read_the_certificates_of_authorities_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def again(*_: Any, **__: Any) -> None:
        raise AssertionError("they are read again")

    httpx.Client().close()
    monkeypatch.setattr(ssl, "create_default_context", again)
    for make in (httpx.Client, openai.DefaultHttpxClient):
        make().close()


class Case(NamedTuple):
    """A test as the plugin sees it."""

    nodeid: str
    marks: tuple[tuple[str, tuple[int, ...]], ...] = ()
    params: tuple[tuple[str, int], ...] = ()

    @property
    def path(self) -> Path:
        return ROOT / self.nodeid.partition("::")[0]

    @property
    def callspec(self) -> Any:
        return SimpleNamespace(params=dict(self.params))

    def iter_markers(self) -> Iterator[Any]:
        return iter([SimpleNamespace(name=name, args=args, kwargs={}) for name, args in self.marks])

    def get_closest_marker(self, name: str) -> Any:
        return next((mark for mark in self.iter_markers() if mark.name == name), None)


def cases_of(*sampled: int) -> list[Any]:
    """Make the cases of one test with two parameters."""
    marks = (("sampled", sampled),)
    return [
        Case(f"tests/a.py::test_a[{i}-{j}]", marks, (("family", i), ("kind", j)))
        for i in range(8)
        for j in range(3)
    ]


def marked(name: str, *marks: str) -> Any:
    return Case(f"tests/b.py::{name}", tuple((mark, ()) for mark in marks))


def ids(items: Sequence[pytest.Item]) -> list[str]:
    return [item.nodeid for item in items]


def test_a_sample_is_the_same_in_every_run_and_another_with_a_seed() -> None:
    cases = cases_of(5)
    found = select(cases, "short")
    assert len(found.kept) == 5
    assert found == select(cases, "short")
    assert select(cases, "all").kept == cases
    others = [set(ids(select(cases, "short", seed).kept)) for seed in range(4)]
    assert all(len(other) == 5 for other in others)
    assert any(other != set(ids(found.kept)) for other in others)


def test_a_sample_without_a_number_has_every_value_of_every_parameter() -> None:
    for seed in range(20):
        kept = sample(cases_of(), random.Random(seed))
        assert {case.callspec.params["family"] for case in kept} == set(range(8))
        assert {case.callspec.params["kind"] for case in kept} == set(range(3))
        assert len(kept) <= 10


def test_a_sample_with_a_number_takes_every_value_before_it_takes_one_again() -> None:
    for seed in range(50):
        for num in (8, 10, 24):
            kept = sample(cases_of(num), random.Random(seed))
            assert len(kept) == num
            assert {case.callspec.params["family"] for case in kept} == set(range(8))
            assert {case.callspec.params["kind"] for case in kept} == set(range(3))
        three = sample(cases_of(3), random.Random(seed))
        assert len({case.callspec.params["family"] for case in three}) == 3


def test_marks_say_in_which_lane_a_test_is() -> None:
    plain, slow, outside = marked("plain"), marked("slow", "slow"), marked("out", "outside")
    items = [plain, slow, outside, marked("gpu", "gpu"), marked("slow_out", "slow", "outside")]
    assert ids(select(items, "short").kept) == ids([plain])
    assert ids(select(items, "all").kept) == ids([plain, slow])
    assert ids(select(items, "outside").kept) == ids([outside, items[-1]])
    assert select(items, "short", by_mark=True).kept == items, "-m chooses"
    left = {why: len(tests) for why, tests in select(items, "short").left_out.items()}
    assert left == {
        "slow tests: make test-all": 1,
        "tests marked gpu: make gpu-check": 1,
        OUTSIDE: 2,
    }


def test_a_test_that_is_named_runs_with_all_its_cases() -> None:
    cases, slow = cases_of(2), marked("slow", "slow")
    found = select([*cases, slow, marked("other", "slow")], "short", named=[slow.nodeid])
    assert len(found.kept) == 3
    assert slow in found.kept
    assert select(cases, "short", named=["tests/a.py::test_a"]).kept == cases
    assert named_in(["tests", "tests/a.py::test_a[0-1]"]) == ("tests/a.py::test_a[0-1]",)


def test_a_seed_changes_the_order_and_keeps_cases_of_a_test_together() -> None:
    items = [*cases_of(), marked("one"), marked("two"), marked("three")]
    orders = [ids(shuffled(items, seed)) for seed in range(6)]
    assert len(set(map(tuple, orders))) > 1
    for order in orders:
        assert sorted(order) == sorted(ids(items))
        places = [order.index(case.nodeid) for case in cases_of()]
        assert max(places) - min(places) == len(places) - 1


def test_a_run_does_not_start_with_less_than_2_gib_free(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(free=5 << 20)
    monkeypatch.setattr("tests.support.lanes.shutil.disk_usage", lambda path: usage)
    with pytest.raises(pytest.exit.Exception, match="has 5 MiB free; the tests need 2048: free"):
        pytest_sessionstart()


def test_a_run_ends_with_what_it_left_out_and_what_cost_too_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    durations = tmp_path / "made" / "durations.json"
    monkeypatch.setattr("tests.support.lanes.DURATIONS", durations)
    config = SimpleNamespace(getoption={"--lane": "short"}.get, stash=pytest.Stash())
    config.stash[SELECTION] = select([marked("a", "slow"), marked("b")], "short")
    report = Report(config)  # type: ignore[arg-type]
    skipped = {"skipped": True, "longrepr": ("a.py", 1, "Skipped: no browser"), "when": "setup"}
    for nodeid, phase in (
        ("tests/a.py::x", {"when": "call", "duration": 3.0, "cpu_s": BUDGET_S + 1}),
        ("tests/b.py::y", {"when": "call", "duration": 2.0, "cpu_s": 1.0}),
        ("tests/b.py::z", {"duration": 0.0, **skipped}),
    ):
        found = {"nodeid": nodeid, "skipped": False, **phase}
        report.pytest_runtest_logreport(SimpleNamespace(**found))  # type: ignore[arg-type]
    report.pytest_sessionfinish()
    lines = list(report.lines())
    assert lines[:2] == ["left out: 1 slow tests: make test-all", "skipped: 1 no browser"]
    assert lines[-1] == "over its budget of 20 s: tests/a.py, 21 s"
    kinds = {*cpu.native.available(), *kernels()["no_kernels"]}
    assert kinds == set(KERNELS), "each is either run here or named as not run"
    written = json.loads(durations.read_text())
    assert written["lane"] == "short"
    assert written["files"]["tests/b.py"] == {"tests": 1, "seconds": 2.0, "cpu_seconds": 1.0}


@pytest.fixture
def suite(request: pytest.FixtureRequest) -> Selection:
    """Return what this run collected. Skip if the command line asks for a part of the suite."""
    config = request.config
    asked = {Path(arg).resolve() for arg in config.args}
    narrowed = config.option.keyword or config.option.markexpr or config.option.deselect
    if narrowed or not asked & {ROOT, ROOT / "tests"}:
        pytest.skip("the command line asks for a part of the suite")
    found: Selection = config.stash[SELECTION]
    return found


def test_every_file_of_tests_has_a_test(suite: Selection) -> None:
    files = {item.path for item in suite.collected}
    assert [p for p in sorted((ROOT / "tests").rglob("test_*.py")) if p not in files] == []


def test_tests_that_lie_in_support_are_taken_by_a_test_file(suite: Selection) -> None:
    """Files of several laws share them by importing them."""
    there = {
        (node.name, path)
        for path in (ROOT / "tests" / "support").glob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    taken = {
        (item.function.__name__, Path(inspect.getfile(inspect.unwrap(item.function))))
        for item in suite.collected
        if isinstance(item, pytest.Function)
    }
    assert len(there) > 20
    names = {name for name, path in taken if path.parent.name == "support"}
    assert {name for name, _ in there} - names - {name for name, _ in taken} == set()


def test_no_file_imports_a_test_file() -> None:
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                assert ".test_" not in node.module, path


def test_every_test_without_the_mark_of_another_lane_has_a_case_that_runs(
    suite: Selection,
) -> None:
    """Every test that is not marked: so no law, route or policy is left to other lanes."""
    tests: dict[str, set[bool]] = defaultdict(set)
    kept = set(ids(suite.kept))
    for item in suite.collected:
        marks = {mark.name for mark in item.iter_markers()}
        if not marks & {"slow", "outside", "gpu", "peers", "talk"}:
            tests[item.nodeid.partition("[")[0]].add(item.nodeid in kept)
    assert [name for name, found in tests.items() if True not in found] == []


def values(suite: Selection) -> Iterator[tuple[str, str, Any]]:
    """Yield test, parameter and value of each case that runs."""
    for item in suite.kept:
        call = getattr(item, "callspec", None)
        for name, value in call.params.items() if call else ():
            yield item.nodeid.partition("[")[0], name, value


def test_each_of_the_eight_families_is_a_parameter_of_ten_tests_that_run(suite: Selection) -> None:
    laws: dict[str, set[str]] = defaultdict(set)
    for test, _, value in values(suite):
        if isinstance(value, str) and value in FAMILIES:
            laws[value].add(test)
    assert {family: len(laws[family]) for family in FAMILIES if len(laws[family]) < 10} == {}


def test_each_test_of_kernels_runs_with_every_kind_of_this_processor(
    suite: Selection,
) -> None:
    kinds: dict[str, set[str]] = defaultdict(set)
    here = set(cpu.native.available())
    for test, _, value in values(suite):
        if "tests/kernels" in test and isinstance(value, str) and value in here:
            kinds[test].add(value)
    assert len(kinds) > 40
    assert {test: here - found for test, found in kinds.items() if found != here} == {}


def test_the_test_files_that_run_call_every_route(
    suite: Selection, engine: QLLMEngine, tmp_path: Path
) -> None:
    modules = {inspect.getmodule(item.function) for item in suite.kept if "server" in item.nodeid}
    source = "\n".join(inspect.getsource(module) for module in modules if module)
    with serving(engine, state_dir=tmp_path) as served:
        paths = set(served.server.config.app.openapi()["paths"])
    assert len(paths) > 25
    missing = [path for path in sorted(paths) if not re.search(call_of(path), source)]
    assert missing == []


def call_of(path: str) -> str:
    """Return a pattern of how a test calls a route: by its path, or by a client's method."""
    by_path = re.sub(r"\\{[^}]*\\}", r"[^\\s\"'/]+", re.escape(path)) + r"/?[\"'?]"
    words = [word for word in path.split("/") if word and word != "v1" and word[0] != "{"]
    return rf"{by_path}|\.{re.escape('.'.join(words))}[.(]"
