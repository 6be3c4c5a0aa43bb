"""The lanes of the tests: `make test` holds a part of everything that `make test-all` tests."""

import inspect
import json
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from qllm import QLLMEngine
from qllm.kernels import cpu
from qllm.models.fingerprints import FAMILIES
from tests.support.files import ROOT
from tests.support.lanes import (
    BUDGET_S,
    KERNELS,
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
        return iter([SimpleNamespace(name=name, args=args) for name, args in self.marks])

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
        "tests of other packages: make test-outside": 2,
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


def test_a_full_disk_ends_the_run_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
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
    """Return what this run collected. Skip if that is a part of the suite."""
    found = request.config.stash[SELECTION]
    files = {item.path for item in found.collected}
    if len(files) < len(list((ROOT / "tests").rglob("test_*.py"))):
        pytest.skip("this run collected a part of the suite")
    return found


def test_every_test_is_in_the_lane_by_a_case(suite: Selection) -> None:
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


def test_every_family_is_in_the_lane_under_many_laws(suite: Selection) -> None:
    laws: dict[str, set[str]] = defaultdict(set)
    for test, _, value in values(suite):
        if isinstance(value, str) and value in FAMILIES:
            laws[value].add(test)
    assert {family: len(laws[family]) for family in FAMILIES if len(laws[family]) < 10} == {}


def test_every_kind_of_kernel_is_in_the_lane_for_every_kernel(suite: Selection) -> None:
    kinds: dict[str, set[str]] = defaultdict(set)
    here = set(cpu.native.available())
    for test, _, value in values(suite):
        if "tests/kernels" in test and isinstance(value, str) and value in here:
            kinds[test].add(value)
    assert len(kinds) > 40
    assert {test: here - found for test, found in kinds.items() if found != here} == {}


def test_every_route_is_in_the_lane(suite: Selection, engine: QLLMEngine, tmp_path: Path) -> None:
    modules = {inspect.getmodule(item.function) for item in suite.kept if "server" in item.nodeid}
    source = "\n".join(inspect.getsource(module) for module in modules if module)
    with serving(engine, state_dir=tmp_path) as served:
        paths = set(served.server.config.app.openapi()["paths"])
    assert len(paths) > 25
    fixed = {path.partition("{")[0].rstrip("/") for path in paths}
    by_client = {path: path.removeprefix("/v1/").replace("/", ".") for path in fixed}
    missing = [path for path in fixed if path not in source and by_client[path] not in source]
    assert missing == []
