"""A pytest plugin: the tests that a run takes, their order, and what each file costs.

`--lane short` (the default, `make test`) leaves out tests marked `slow`, and all but a sample of
the cases of tests marked `sampled`. `--lane all` (`make test-all`) takes every case. Tests that run
programs of other packages are in neither: `--lane outside` (`make test-outside`) takes those alone.
A run says at its end how many tests it left out and why, what this machine lacks, and which files
cost more than their budget. It writes what every file cost to `.benchmarks/durations.json`.
"""

import json
import os
import random
import shutil
import tempfile
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import pytest
from hypothesis import HealthCheck, settings

from qllm.cores import no_collections
from tests.support.files import ROOT

LANES = ("short", "all", "outside")
COMMANDS = {"gpu": "make gpu-check", "peers": "make test-peers", "talk": "make test-talk"}
"""Marks of tests that need what this machine may lack, and the command that runs them."""
OUTSIDE = "tests that run programs of other packages: make test-outside"
BUDGET_S = 20.0
"""Processor time of a file in the short lane, with its set-up. A file that takes more is named."""
MIN_FREE_BYTES = 2 << 30
"""Space that the tests need for models, wheels and KV files at one time."""
KERNELS = ("AMX", "AVX-512 BF16", "AVX-512", "AVX2", "portable", "emulated AMX")
DURATIONS = ROOT / ".benchmarks" / "durations.json"


class Selection(NamedTuple):
    """The tests of a run."""

    collected: list[pytest.Item]
    kept: list[pytest.Item]
    left_out: dict[str, list[pytest.Item]]
    """The others, by the reason."""


# no example fails because the machine is slow, or stood still
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
SELECTION = pytest.StashKey[Selection]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("lanes")
    group.addoption("--lane", choices=LANES, default="short", help="which tests run (short)")
    group.addoption(
        "--seed", type=int, help="draw other samples, and run files and tests in another order"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Let Hypothesis draw the same examples in every run, or others with `--seed`."""
    config.pluginmanager.register(Report(config), "lanes-report")
    seed = config.getoption("--seed")
    settings.register_profile("lane", settings.get_profile("any machine"), derandomize=seed is None)
    settings.load_profile("lane")
    if seed is not None:
        hypothesis.core.global_force_seed = seed


def pytest_sessionstart() -> None:
    """Refuse a disk that is too full: each test would fail with an error of its own."""
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if free < MIN_FREE_BYTES:
        pytest.exit(
            f"{tempfile.gettempdir()} has {free >> 20} MiB free; the tests need "
            f"{MIN_FREE_BYTES >> 20}: free some, or set TMPDIR to another disk",
            returncode=pytest.ExitCode.USAGE_ERROR,
        )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import and collect all tests without collections: nothing that is made then is garbage."""
    with no_collections():
        return (yield)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the lane. One that the command line names as `FILE::name` always runs."""
    files = {Path(name).resolve() for name in config.args}
    lane, seed = config.getoption("--lane"), config.getoption("--seed")
    for item in items:
        is_named = item.path in files and lane != "outside"
        if "outside" in item.path.relative_to(ROOT).parts and not is_named:
            item.add_marker("outside")
    by_mark = bool(config.option.markexpr)
    found = select(items, lane, seed, by_mark=by_mark, named=named_in(config.args))
    config.stash[SELECTION] = found
    config.hook.pytest_deselected(items=[i for left in found.left_out.values() for i in left])
    items[:] = found.kept


def named_in(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the ids of the tests that a command line names, such as `tests/test_a.py::test_b`."""
    parts = [argument.partition("::") for argument in arguments if "::" in argument]
    return tuple(f"{Path(path).resolve().relative_to(ROOT)}::{name}" for path, _, name in parts)


def select(
    items: Sequence[pytest.Item],
    lane: str,
    seed: int | None = None,
    *,
    by_mark: bool = False,
    named: Sequence[str] = (),
) -> Selection:
    """Choose the tests of a lane.

    Args:
        items: All tests, in the order of their collection.
        lane: One of `LANES`.
        seed: Number that samples and order are drawn from. Without one, samples are the same in
            every run and the order is that of the collection.
        by_mark: True if `-m` chooses tests: no test is left out for its marks, cases are sampled.
        named: Ids of tests that run with all their cases, whatever their marks are.
    """
    named_ids = set(named)
    left: dict[str, list[pytest.Item]] = defaultdict(list)
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    kept = set()
    for item in items:
        is_named = not named_ids.isdisjoint({item.nodeid, item.nodeid.partition("[")[0]})
        why = None if by_mark or is_named else reason_to_leave(item, lane)
        if is_named:
            kept.add(item)
        elif why:
            left[why].append(item)
        elif lane == "short" and item.get_closest_marker("sampled"):
            cases[item.nodeid.partition("[")[0]].append(item)
        else:
            kept.add(item)
    for name, found in cases.items():
        kept |= set(sample(found, random.Random(name if seed is None else f"{name} {seed}")))
        left["cases beyond a sample: make test-all"] += [i for i in found if i not in kept]
    ordered = [item for item in items if item in kept]
    ordered = ordered if seed is None else shuffled(ordered, seed)
    return Selection(list(items), ordered, dict(left))


def reason_to_leave(item: pytest.Item, lane: str) -> str | None:
    """Return why a lane leaves a test out, or None if it takes it."""
    marks = {mark.name for mark in item.iter_markers()}
    for mark, command in COMMANDS.items():
        if mark in marks:
            return f"tests marked {mark}: {command}"
    if (lane == "outside") != ("outside" in marks):
        return OUTSIDE if lane != "outside" else "tests of qllm itself: make test-all"
    if lane == "short" and "slow" in marks:
        return "slow tests: make test-all"
    return None


def sample(cases: Sequence[pytest.Item], rng: random.Random) -> list[pytest.Item]:
    """Draw some cases of one test.

    `sampled` keeps a small set in which every value of every parameter occurs, such as each family
    and each kind of kernel. `sampled(count)` keeps so many: of that set first, then others.
    """
    marker = cases[0].get_closest_marker("sampled")
    assert marker is not None
    assert not marker.kwargs, "write sampled(8), without a keyword"
    drawn = rng.sample(cases, len(cases))
    kept = covering(drawn)
    if not marker.args:
        return kept
    return [*kept, *(case for case in drawn if case not in kept)][: marker.args[0]]


def covering(drawn: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Choose cases in which every value of every parameter occurs."""
    missing = {value for case in drawn for value in values_of(case)}
    kept: list[pytest.Item] = []
    while missing:
        best = max(drawn, key=lambda case: len(missing & values_of(case)))
        missing -= values_of(best)
        kept.append(best)
    return kept


def values_of(case: pytest.Item) -> set[tuple[str, str]]:
    """Return the parameters of a case, each with its value.

    pytest's numbers of values differ in each case of a test whose fixture has parameters.
    """
    call = getattr(case, "callspec", None)
    return {(name, repr(value)) for name, value in call.params.items()} if call else set()


def shuffled(items: Sequence[pytest.Item], seed: int) -> list[pytest.Item]:
    """Order files, and the tests of each file, by chance. Cases of one test stay together."""
    rng = random.Random(seed)
    files: dict[str, dict[str, list[pytest.Item]]] = defaultdict(lambda: defaultdict(list))
    for item in items:
        files[str(item.path)][item.nodeid.partition("[")[0]].append(item)
    tests = [
        cases
        for path in rng.sample(sorted(files), len(files))
        for cases in rng.sample(list(files[path].values()), len(files[path]))
    ]
    return [item for cases in tests for item in cases]


class Report:
    """What a run's files cost and what the run left out; printed at its end.

    With several workers each measures its own tests, and the process that started them has the
    reports of all.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.tests: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()
        self.cpu_seconds: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()
        self.found: dict[str, Any] = {}
        """What a worker reported: counts of tests that it left out, and kinds of kernels."""
        self._began = 0.0

    def pytest_collection_finish(self) -> None:
        self._began = processor_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Add the processor time since the last report of this process to the next."""
        report = yield
        now = processor_s()
        report.cpu_s = now - self._began  # type: ignore[attr-defined]
        self._began = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add one phase of a test: its set-up, its call or its teardown."""
        path = report.nodeid.partition("::")[0]
        self.tests[path] += report.when == "call"
        self.seconds[path] += report.duration
        self.cpu_seconds[path] += getattr(report, "cpu_s", 0.0)
        if report.skipped and isinstance(report.longrepr, tuple):
            self.skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        """Hand over what a worker found out. The process that prints keeps what each file cost."""
        output = getattr(self.config, "workeroutput", None)
        if SELECTION in self.config.stash:
            left = self.config.stash[SELECTION].left_out
            self.found = {"left_out": {w: len(items) for w, items in left.items()}} | kernels()
        if output is not None:
            output["lanes"] = self.found
        elif self.seconds:
            self.write()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take what a worker found out: all of them found the same."""
        self.found = getattr(node, "workeroutput", {}).get("lanes") or self.found

    def write(self) -> None:
        """Write what each file cost."""
        files = {
            path: {
                "tests": self.tests[path],
                "seconds": round(seconds, 2),
                "cpu_seconds": round(self.cpu_seconds[path], 2),
            }
            for path, seconds in self.seconds.most_common()
        }
        DURATIONS.parent.mkdir(exist_ok=True)
        found = {"lane": self.config.getoption("--lane"), "files": files}
        DURATIONS.write_text(json.dumps(found, indent=1))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section(f"lane {self.config.getoption('--lane')}")
        for line in self.lines():
            terminalreporter.line(line)

    def lines(self) -> Iterator[str]:
        """Say what was left out and why, and which files are over their budget."""
        for why, count in sorted(self.found.get("left_out", {}).items()):
            yield f"left out: {count} {why}"
        for why, count in sorted(self.skipped.items()):
            yield f"skipped: {count} {why}"
        if "kernels" in self.found:
            yield f"kernels of this processor: {', '.join(self.found['kernels'])}"
        if self.found.get("no_kernels"):
            yield f"kernels that this processor cannot run: {', '.join(self.found['no_kernels'])}"
        if self.config.getoption("--lane") == "short":
            for path, seconds in self.cpu_seconds.most_common():
                if seconds > BUDGET_S:
                    yield f"over its budget of {BUDGET_S:.0f} s: {path}, {seconds:.0f} s"


def processor_s() -> float:
    """Return the processor time of this process and of its children that have ended."""
    return sum(os.times()[:4])


def kernels() -> dict[str, list[str]]:
    """Return the kinds of kernels that this processor runs, and those that it cannot run."""
    from qllm.kernels import cpu

    here = cpu.native.available() if cpu.native else []
    return {"kernels": here, "no_kernels": [kind for kind in KERNELS if kind not in here]}
