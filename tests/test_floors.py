"""Who may import whom: the floors of the design, held by a search through the syntax trees."""

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
STDLIB = sys.stdlib_module_names
EFFECTS = {"asyncio", "datetime", "logging", "os", "random", "subprocess", "threading", "time"}
DEVICE = {"accelerate", "cuda", "cupy", "nixl", "numba", "torch", "transformers", "triton"}

F0 = {"types", "errors", "config"}
STRUCTS = {"structs"}
F1 = {"scheduler", "blame", "policy", "shapes", "plan", "request", "blocks", "snapshot"}
F1 |= {
    "compile",
    "costs",
    "decision",
    "ranking",
    "riding",
    "turns",
    "validate",
    "victims",
}
F2 = {"trace", "metrics", "perfetto", "sim", "timeline"}
F3 = {"runner", "kv_cache", "sampler", "models", "kernels", "checkpoint", "cuda"}
NATIVE = {"device"}
F4 = {"engine", "ingress", "check", "virtual"}
F5 = {"__init__", "__main__", "llm", "cli", "server", "transports", "detokenizer"}
F5 |= {"checks", "core", "cores", "cubins", "demo", "differential", "engine_process", "handle"}
F5 |= {"host", "native_loop", "plots", "plugins", "portable", "process_host", "prompts"}
F5 |= {"calibrate", "device_engine", "device_rings", "gpu_engine", "native_engine", "random_moe"}
F5 |= {"open", "remote_door", "remote_host", "request_log", "ring_engine", "ring_host", "scaffold"}
F5 |= {"simulation", "templates", "thread_host", "workloads"}
OURS = F0 | STRUCTS | F1 | F2 | F3 | NATIVE | F4 | F5


class Floor(NamedTuple):
    """The modules that live here and what each may import; `__init__` is `import qllm` itself."""

    modules: set[str]
    ours: set[str]
    others: Callable[[str], bool]


FLOORS = [
    Floor(F0, F0, lambda name: name in STDLIB | {"pydantic"}),
    Floor(STRUCTS, set(), lambda name: name in STDLIB - EFFECTS | {"numpy"}),
    Floor(F1, F0 | F1, lambda name: name in STDLIB - EFFECTS),
    Floor(F2, F0 | F1 | F2, lambda name: name not in DEVICE),
    Floor(F3, F0 | F3 | {"compile", "plan", "snapshot"}, lambda name: True),
    Floor(
        NATIVE,
        F0 | STRUCTS | F1 | NATIVE,
        lambda name: name in STDLIB - EFFECTS | {"cuda", "numba", "numpy"},
    ),
    Floor(F4, F0 | STRUCTS | F1 | F2 | F4, lambda name: name not in DEVICE),
    Floor(F5, OURS, lambda name: True),
]
POLICIES = Floor(
    set(),
    {"policy", "plan", "types", "errors"},
    lambda name: name in {"collections", "dataclasses", "enum", "functools", "math", "typing"},
)
BENCH = Floor(
    set(),
    {
        "__init__",
        "check",
        "config",
        "device",
        "differential",
        "errors",
        "ingress",
        "kernels",  # gpu_kernels measures them one by one
        "metrics",
        "plan",
        "plugins",
        "policy",
        "random_moe",
        "scheduler",
        "simulation",
        "trace",
        "types",
        "workloads",
    },
    lambda name: True,
)

KERNELS = {"compile", "kernels", "kv_cache", "models", "runner"}
KERNEL_BENCH = BENCH._replace(ours=BENCH.ours | KERNELS)
"""bench/cpu_kernels.py and bench/perplexity.py measure what has no public name."""
LOOP_BENCH = BENCH._replace(ours=BENCH.ours | {"core", "models", "native_loop"})
"""bench/native_loop.py puts loops side by side behind the same rings."""
DEVICE_BENCH = BENCH._replace(ours=BENCH.ours | {"cuda", "decision", "device_engine"})
"""bench/gpu_loop.py has a front end of its own before the loop on the device."""


OWN_BENCHES = {
    "bench/cpu_kernels.py": KERNEL_BENCH,
    "bench/perplexity.py": KERNEL_BENCH,
    "bench/native_loop.py": LOOP_BENCH,
    "bench/gpu_loop.py": DEVICE_BENCH,
}


def floor_of(path: str) -> Floor:
    if path in OWN_BENCHES:
        return OWN_BENCHES[path]
    folder, module = Path(path).parts[:2]
    if folder != "qllm":
        return POLICIES if folder == "policies" else BENCH
    homes = [floor for floor in FLOORS if module.removesuffix(".py") in floor.modules]
    assert len(homes) == 1, f"{path} has no floor: add it to one in tests/test_floors.py"
    return homes[0]


def imports(path: str, source: str) -> Iterator[str]:
    package = ".".join(Path(path).parent.parts)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            yield from (f"{base}.{alias.name}" for alias in node.names)


def breaches(path: str, source: str) -> list[str]:
    floor, found = floor_of(path), []
    for name in imports(path, source):
        top, module = f"{name}.".split(".")[:2]
        if top == "qllm":
            allowed = (module if module in OURS else "__init__") in floor.ours
        else:
            is_sibling = top == Path(path).parts[0] == "policies"
            allowed = top not in {"qllm_policies", "policies"} and floor.others(top)
            allowed = allowed or is_sibling
        if not allowed:
            found.append(name)
    return found


def python_files(*folders: str) -> list[str]:
    files = (file for folder in folders for file in (ROOT / folder).rglob("*.py"))
    return sorted(str(file.relative_to(ROOT)) for file in files)


@pytest.mark.parametrize("path", python_files("qllm", "policies", "bench"))
def test_a_module_imports_only_what_its_floor_may(path: str) -> None:
    assert breaches(path, (ROOT / path).read_text()) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("qllm/types.py", "from qllm.plan import Plan"),
        ("qllm/config.py", "import numpy"),
        ("qllm/scheduler/scheduler.py", "def now():\n    import time"),
        ("qllm/plan.py", "from torch import Tensor"),
        ("qllm/sim/runner.py", "from qllm import engine"),
        ("qllm/device/scheduler.py", "import torch"),
        ("qllm/device/block.py", "from qllm.engine.loop import EngineLoop"),
        ("qllm/device/server.py", "from qllm.ingress.layout import REASONS"),
        ("qllm/ingress/layout.py", "from qllm.device.serving import SERVING"),
        ("qllm/ingress/structs.py", "from qllm.ingress import layout"),
        ("qllm/models/driver.py", "from ..scheduler import plan_step"),
        ("qllm/engine/loop.py", "import qllm.runner.runner"),
        ("qllm/engine/loop.py", "from . import transports"),
        ("qllm/ingress/shm.py", "from qllm import QLLMEngine"),
        ("qllm/cli/policies.py", "import qllm_policies.fcfs"),
        ("policies/fcfs.py", "from qllm.scheduler.scheduler import plan_step"),
        ("policies/fcfs.py", "import os"),
        ("bench/load.py", "from qllm.engine.loop import Engine"),
    ],
)
def test_a_forbidden_import_is_seen(path: str, source: str) -> None:
    assert len(breaches(path, source)) == 1


def import_graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """Module -> the modules of ours that it imports anywhere, in functions and for types too."""
    names = {path: path.removesuffix(".py").removesuffix("/__init__") for path in sources}
    modules = {name.replace("/", ".") for name in names.values()}
    graph: dict[str, set[str]] = {}
    for path, source in sources.items():
        wanted = set(imports(path, source))
        wanted |= {name.rpartition(".")[0] for name in wanted - modules}
        own = names[path].replace("/", ".")
        graph[own] = (wanted & modules) - {own}
    return graph


def test_no_imports_go_in_a_circle() -> None:
    paths = [path for path in python_files("qllm") if "/templates/" not in path]
    graph = import_graph({path: (ROOT / path).read_text() for path in paths})
    assert sum(map(len, graph.values())) > 400
    TopologicalSorter(graph).prepare()  # raises a CycleError that names the circle


@pytest.mark.parametrize(
    "later",
    [
        "import qllm.a",
        "from qllm import a",
        "from .a import x",
        "def f():\n    from qllm.a import x",
        "if TYPE_CHECKING:\n    from qllm.a import X",
    ],
)
def test_a_circle_is_seen(later: str) -> None:
    sources = {"qllm/a.py": "from qllm.b.c import y", "qllm/b/__init__.py": "", "qllm/b/c.py": ""}
    TopologicalSorter(import_graph(sources)).prepare()
    circle = {**sources, "qllm/b/c.py": later.replace("from .a", "from ..a")}
    with pytest.raises(CycleError):
        TopologicalSorter(import_graph(circle)).prepare()


def test_everything_in_qllm_has_a_floor() -> None:
    for entry in (ROOT / "qllm").iterdir():
        if entry.name not in {"__pycache__", "py.typed"}:
            floor_of(f"qllm/{entry.name}")


def test_plan_has_one_caller() -> None:
    callers = [
        f"{path}:{node.lineno}"
        for path in python_files("qllm")
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "plan"
    ]
    assert len(callers) == 1 or not (callers or (ROOT / "qllm/engine/loop.py").exists()), callers
    assert all(
        caller.startswith(("qllm/engine/loop.py", "qllm/scheduler/scheduler.py"))
        for caller in callers
    )


@pytest.mark.parametrize("path", python_files("qllm", "policies", "bench", "tests", "scripts"))
def test_a_file_over_500_lines_says_why(path: str) -> None:
    lines = (ROOT / path).read_text().splitlines()
    assert len(lines) <= 500 or lines[0].startswith("# "), f"{len(lines)} lines, no reason on top"


@pytest.mark.parametrize("path", python_files("qllm", "policies", "bench", "tests", "scripts"))
def test_a_docstring_names_its_subject(path: str) -> None:
    """One that begins with "Of" leaves it to the reader to guess."""
    strings = (
        (node.lineno, node.value.value)
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    )
    assert [line for line, text in strings if str(text).startswith("Of ")] == []


def test_import_takes_nothing_but_the_standard_library() -> None:
    """So it is quick: numpy alone takes longer than all of it."""
    code = (
        "import sys; before = set(sys.modules); import qllm;"
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()) - sys.stdlib_module_names == {"qllm"}
