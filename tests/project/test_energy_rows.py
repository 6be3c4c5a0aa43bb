"""Every row of throughput of a bench carries its energy, or says that none can be read."""

import ast
import subprocess
from collections.abc import Iterator, Set
from pathlib import Path

import pytest

from bench import energy
from bench.common import Line, Table, at_least, with_lines
from bench.energy import NO_COUNTER, answered_tokens, metered
from bench.papers import rotation
from bench.report_lines import table as printed
from bench.serving.capacity import tabulate
from qllm import QLLMEngine
from qllm.types import Priority
from qllm.workloads.measure import Served
from qllm.workloads.spec import RequestSpec
from tests.support.files import ROOT

MEASURED = {"add", "Line", "at_least", "at_most", "_least"}
"""Calls that make a row."""
OTHERS = {
    "bench/sim/depths.py": "simulated",
}
"""Benches whose rows of tokens/s have no energy, and why."""


def rows_of(path: Path) -> Iterator[ast.Call]:
    """Yield the calls that make a row with tokens per second."""
    tree = ast.parse(path.read_text())
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        rates = {
            name.id
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and _says_rate(node.value)
            for name in node.targets
            if isinstance(name, ast.Name)
        }
        for call in ast.walk(function):
            if not isinstance(call, ast.Call):
                continue
            name = getattr(call.func, "attr", getattr(call.func, "id", ""))
            if name in MEASURED and any(_says_rate(arg, rates) for arg in call.args[:3]):
                yield call


def _says_rate(node: ast.AST, names: Set[str] = frozenset()) -> bool:
    found = [
        n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)
    ]
    used = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return any("tokens/s" in text or "tokens/CPU-s" in text for text in found) or bool(used & names)


def has_energy(call: ast.Call) -> bool:
    """Return True if a row is given its energy."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    return (name == "_least" and len(call.args) > 4) or "energy" in {k.arg for k in call.keywords}


def test_every_row_of_throughput_is_given_its_energy() -> None:
    named = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "bench/*.py"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    bare, count = [], 0
    for name in named:
        if name in OTHERS or name.startswith("bench/report"):
            continue
        for call in rows_of(ROOT / name):
            count += 1
            if not has_energy(call):
                bare.append(f"{name}:{call.lineno}")
    assert not bare
    assert count >= 20


def test_the_check_sees_a_row_without_energy(tmp_path: Path) -> None:
    bench = tmp_path / "bench.py"
    bench.write_text(
        "def main(table):\n"
        "    table.add('decode, tokens/s', '3')\n"
        "    text = f'{1} tokens/s'\n"
        "    table.add('decode', text, energy=[])\n"
        "    table.add('TTFT, ms', '3')\n"
    )
    found = list(rows_of(bench))
    assert [(call.lineno, has_energy(call)) for call in found] == [(2, False), (4, True)]


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[float]:
    """A GPU's counter, which gains 6 joules per reading."""
    read = [0.0]

    def joules() -> float:
        read[0] += 6.0
        return read[0]

    monkeypatch.setattr(energy, "nvml_joules", joules)
    monkeypatch.setattr(energy.Meter.__init__, "__defaults__", (tmp_path,))
    return read


def test_a_row_has_the_energy_of_its_runs(counter: list[float]) -> None:
    runs: list[energy.Run] = []
    for tokens in (1000, 2000):
        with metered(runs) as computed:
            computed.append(tokens)
    table = Table()
    table.add("decode, tokens/s", "3", energy=runs)
    (line,) = with_lines({}, table.lines)["lines"]
    assert line["energy"] == "4 J per 1,000 computed tokens"
    assert "| 3; 4 J per 1,000 computed tokens |" in printed([line])[-1]


def test_a_row_without_a_counter_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(energy, "nvml_joules", lambda: None)
    monkeypatch.setattr(energy.Meter.__init__, "__defaults__", (tmp_path,))
    runs: list[energy.Run] = []
    with metered(runs) as computed:
        computed.append(5)
    assert at_least("tokens/s, ratio", 1.0, 1.0, energy=runs).energy == NO_COUNTER
    assert at_least("KV tokens/s of old results", 1.0, 1.0, energy=()).energy == NO_COUNTER
    assert "energy" not in Line("TTFT, ms", "3").as_json()


def test_tokens_of_answers_are_those_that_were_computed(engine: QLLMEngine) -> None:
    """The last token of an answer is never computed on, and a cached prompt is not computed."""
    ids = [5 + i % 90 for i in range(64)]
    first = engine.submit(ids, "LS", 4).result(60)
    assert answered_tokens([first]) == 64 - first.metrics.num_cached_tokens + 3
    spec = RequestSpec(at_s=0.0, priority=Priority.LS, num_prompt_tokens=50, max_tokens=8)
    whole = Served(spec=spec, sent_s=0.0, token_s=[1.0, 2.0, 3.0], num_cached=16)
    assert answered_tokens([whole, Served(spec=spec, sent_s=0.0)]) == 50 - 16 + 2


def test_rows_of_capacity_and_of_the_papers_have_it(counter: list[float]) -> None:
    one = {"joules": 5.0, "computed_tokens": 1000.0}
    run = {"value": 2.0, "output_tokens_per_s": 2.0, "prefill_tokens_per_s": 1.0, "energy": [one]}
    table = Table()
    tabulate(table, {"BE": {"qllm": [run], "vllm": [run | {"energy": [one | {"joules": 9.0}]}]}})
    assert [line.energy for line in table.lines] == [
        "5 J per 1,000 computed tokens",
        "9 J per 1,000 computed tokens",
        "5 J per 1,000 computed tokens",
    ]
    numbers = {"met": 0.5, "tpot_p50_ms": 3.0, "tokens_per_s": 9.0}
    arms = {"rota with swap": [numbers], "fcfs": [numbers]}
    rows = list(rotation._compared(arms, "fcfs", "how", "7 J"))
    assert [str(row.here).endswith("; 7 J") for row in rows] == [False, False, True]
