"""Who may import whom: the floors of the design, held by a search through the syntax trees."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.files import ROOT, python_files

STDLIB = frozenset(sys.stdlib_module_names)
EFFECTS = {"asyncio", "datetime", "logging", "os", "random", "subprocess", "threading", "time"}
PURE = STDLIB - EFFECTS
"""No clock, no chance, no files."""


class Floor(NamedTuple):
    """What a folder, or a module that has a floor of its own, may import."""

    ours: str
    """Folders and modules of ours; `folder.module` is that one alone."""
    others: frozenset[str] | None
    """Modules of the standard library and packages; None is any."""


WEB = STDLIB | {
    *("fastapi", "httptools", "prometheus_client", "pydantic", "starlette", "uvicorn"),
}
BASE = "errors types config plan policy"
VALUES = "errors types hints spelling floor torchless"
PLANS = "plan policy plugins"
GRAMMARS = "grammar_schema grammar_check grammar_bounds grammar"
LOOP = (
    "engine.costs engine.delayed engine.delivery engine.drafts engine.effects engine.kv "
    "engine.limits engine.loop engine.prompt_updates engine.protocol"
)
ROUTES = "fleet.models fleet.rebalance fleet.router fleet.routes fleet.stats"
GROUPS = {
    # values, and rules without a clock
    VALUES: Floor("errors types", PURE),
    PLANS: Floor("errors types plan policy spelling", PURE),
    "private cores": Floor("errors", PURE | {"os"}),
    "names logs": Floor("", STDLIB),
    "block_file": Floor("errors private", STDLIB | {"xxhash"}),
    "config": Floor("errors hints spelling types floor", PURE | {"pydantic"}),
    GRAMMARS: Floor(f"errors types {GRAMMARS}", STDLIB | {"llguidance", "numpy"}),
    "scheduler": Floor("errors types floor plan policy", PURE),
    "record": Floor("errors types plan policy private scheduler", STDLIB | {"pydantic"}),
    # models and what computes them
    "models": Floor(
        "block_file cores errors types plan models kernels torchless",
        STDLIB | {"gguf", "huggingface_hub", "safetensors", "tokenizers", "torch", "transformers"},
    ),
    "upcycle": Floor("errors models", STDLIB | {"safetensors", "torch", "transformers"}),
    "kernels": Floor("errors", STDLIB | {"torch", "triton"}),
    "runner": Floor(
        "errors types grammar plan scheduler models kernels",
        STDLIB | {"numpy", "torch", "transformers"},
    ),
    "runner.protocol": Floor("errors types plan scheduler.program", PURE),
    "runner.displacing runner.placing": Floor("types runner.displacing", PURE | {"numpy"}),
    "sharded": Floor(
        "errors types plan ingress.remote kernels models runner scheduler.program",
        STDLIB | {"torch"},
    ),
    "sharded.plan": Floor("errors", PURE),
    "cuda": Floor(
        "errors types plan scheduler models kernels runner sharded.plan",
        STDLIB | {"cuda", "cupy", "numpy", "torch"},
    ),
    # requests in, tokens out
    "ingress": Floor(f"{BASE} record runner.protocol", STDLIB | {"numpy"}),
    "ingress.structs": Floor("", PURE | {"numpy"}),
    "ingress.remote": Floor(
        f"{BASE} record runner.protocol ingress torchless", STDLIB | {"nixl", "numpy"}
    ),
    "device": Floor(f"{BASE} scheduler ingress", PURE | {"cuda", "numba", "numpy"}),
    "device.cubins device.graph device.graph_api": Floor(
        "errors ingress device cuda", STDLIB | {"cuda", "numpy", "torch"}
    ),
    "device.launcher": Floor(f"{BASE} scheduler ingress device cuda", STDLIB | {"numpy", "torch"}),
    "device.ring_memory": Floor("errors", STDLIB | {"cuda", "numpy", "torch"}),
    "device.rings": Floor("errors ingress device", STDLIB | {"numpy", "torch"}),
    # the engine, its callers, and what is made of both
    "engine": Floor(
        f"{BASE} block_file cores cuda device drafters grammar ingress kernels.software logs "
        "models plugins private record runner scheduler sharded",
        STDLIB | {"numpy", "safetensors", "torch", "transformers"},
    ),
    LOOP: Floor(f"{BASE} {LOOP} drafters ingress record runner.protocol scheduler", PURE),
    "drafters": Floor("errors types plugins", PURE),
    "drafters.check": Floor("errors types drafters llm", STDLIB),
    "drafters.model": Floor(
        "types plan drafters.protocol ingress.protocol runner.protocol scheduler", PURE
    ),
    "drafters.mtp": Floor(  # reads hidden states of a model
        "types drafters.model drafters.protocol models.mtp runner.inference "
        "runner.runner runner.sampling scheduler",
        PURE | {"torch"},
    ),
    "engine.storage": Floor(
        f"{BASE} block_file engine.costs engine.delayed engine.kv ingress kernels models private "
        "runner scheduler",
        STDLIB | {"numpy", "torch"},
    ),
    "engine.sizes": Floor("errors config", PURE),
    "engine.handover": Floor(
        f"{BASE} block_file engine.costs engine.delayed engine.kv engine.loop engine.remote "
        "engine.storage ingress kernels.software models record runner scheduler",
        STDLIB | {"numpy", "safetensors", "torch"},
    ),
    "frontend": Floor(
        f"{BASE} names cores engine grammar ingress models record", STDLIB | {"rich"}
    ),
    "fleet": Floor(f"{BASE} frontend ingress", STDLIB),
    "fleet.audit fleet.choice": Floor("errors types fleet.audit", PURE),
    ROUTES: Floor("errors types fleet.routes", PURE | {"logging"}),
    "transformers": Floor("errors kernels models runner", STDLIB | {"torch", "transformers"}),
    "llm": Floor(
        f"{BASE} cores engine fleet frontend grammar ingress models plugins record",
        STDLIB | {"rich", "transformers"},
    ),
    "several": Floor(
        f"{BASE} cores fleet frontend.handle llm models.stored",
        STDLIB,
    ),
    "server": Floor(
        f"__init__ {BASE} fleet names cores frontend grammar_check grammar_schema hints ingress "
        "llm logs models.tokenizer plugins private record several spelling",
        WEB,
    ),
    "server.config": Floor("config cores errors fleet.models hints plugins spelling", WEB),
    "server.metrics": Floor("types frontend.handle", WEB),
    "server.http": Floor("errors types frontend names server.config server.metrics", WEB),
    "server.requests": Floor(
        "errors types fleet.audit fleet.choice fleet.lossy fleet.models fleet.routes frontend llm "
        "models.depth_profile server.config server.http server.metrics",
        WEB,
    ),
    "server.tools": Floor(
        "errors types frontend grammar_check grammar_schema plugins server.http", WEB | {"regex"}
    ),
    "server.state": Floor("errors private server.http", WEB),
    "server.api": Floor(
        "errors types fleet.models frontend grammar_schema names server.http server.requests "
        "server.state server.tools",
        WEB,
    ),
    "server.batch": Floor("errors types server.api server.http server.requests server.state", WEB),
    "server.prompts": Floor("errors types frontend server.api server.http server.requests", WEB),
    "workloads": Floor("errors types frontend llm private record", STDLIB | {"aiohttp"}),
    "measure": Floor(
        f"{BASE} engine llm models plugins record workloads",
        STDLIB | {"matplotlib", "rich", "tokenizers", "torch", "transformers"},
    ),
    "measure.depths": Floor(f"{BASE} llm measure models record.metrics", STDLIB | {"torch"}),
    "measure.profile measure.profile_figure": Floor(
        f"{BASE} engine ingress.inproc measure models runner scheduler",
        STDLIB | {"matplotlib", "torch"},
    ),
    "measure.disk_rate measure.fit": Floor(f"{BASE} block_file engine models runner", STDLIB),
    "sim": Floor(
        f"{BASE} cores engine fleet.rebalance fleet.router fleet.routes ingress measure "
        "models plugins record runner.protocol scheduler sharded.plan workloads",
        STDLIB | {"numpy", "pydantic", "transformers"},
    ),
    "sim.rank_sizes": Floor("models runner sharded sim.ranks", STDLIB | {"torch"}),
    "sim.depths": Floor("errors types fleet.audit fleet.choice models.depth_profile", STDLIB),
    "sim.experts": Floor(
        "errors types plan engine.storage runner.placing runner.protocol scheduler.program sim",
        STDLIB | {"numpy"},
    ),
    "sim.calibrate": Floor(
        f"{BASE} engine ingress measure models plugins record runner scheduler sim",
        STDLIB | {"numpy", "torch", "transformers"},
    ),
    "ray": Floor(
        f"__init__ {BASE} fleet frontend ingress llm logs record server spelling torchless",
        STDLIB | {"fastapi", "numpy", "pydantic", "ray"},
    ),
    "ray.load ray.scaling": Floor("types fleet.routes", PURE | {"threading"}),
    "cli": Floor(
        f"__init__ {BASE} cores cuda.calls device.rank drafters fleet.routes hints "
        "ingress.remote kernels llm logs measure models plugins ray record server "
        "sharded.host_rank sharded.hosts sim spelling torchless upcycle workloads",
        STDLIB | {"prometheus_client", "rich", "torch", "transformers", "typer"},
    ),
    "__init__": Floor("errors drafters.check frontend.handle llm several sim.check types", PURE),
}
"""Folders and modules, and what they may import; several of one kind have one floor."""
FLOORS = {name: floor for names, floor in GROUPS.items() for name in names.split()}
POLICIES = Floor(
    "policy plan types errors",
    frozenset({"collections", "dataclasses", "enum", "functools", "math", "typing"}),
)
BENCH = f"__init__ {BASE} ingress kernels llm measure plugins record scheduler sim workloads"
OWN_BENCHES = {
    "engine.drafts": "drafters",  # knows the answers
    "engine.hosts": "runner sharded",
    "engine.ranks": "runner sharded",  # runs runners without an engine
    "kernels.transformers_experts": "transformers",
    "sim.depths": "fleet.choice models.depth_profile",
    "serving.fleet": "fleet.members fleet.router fleet.routes",
    "serving.lossy": "fleet.choice models.depth_profile",
    "serving.rebalancing": "fleet.rebalance fleet.routes",
    "kernels.cpu_kernels": "runner",  # what has no public name
    "kernels.sampling": "runner",
    # captures the stages of models that it only compiles
    "gpu.bits": "models.weights",  # rounds experts
    "gpu.kernels": "models.weights",  # rows of experts that are rounded
    "gpu.prepare": "cuda.backend cuda.lanes device.cubins models.discover "
    "models.weights runner.runner",
    "gpu.gathered": "cuda.calls cuda.gathered_norm",  # no engine launches the kernel
    "gpu.ranks": "cuda.backend",  # compares runners, without an engine
    "gpu.loop": "cuda.backend device runner.runner",  # its own front end before the device
    "kernels.delta_net": "models.discover runner",
    "kernels.perplexity": "models runner",
    "kernels.perplexity_talk": "models runner",
    "models.experts_disk": "runner",  # another choice of experts that stay
    "models.experts_30b": "block_file engine.storage",  # reads a file as an engine does
    "models.memory_limit": "cores",  # the limit as an engine sees it
    "models.real_size": "models",  # counts packed bytes, and the bytes of a token
    "models.shape_floors": "models.weights",  # bits of a weight that was rounded
    "models.simulated_disk": "models",  # runs a model's own routers
    "serving.on_ray": "ray",
    "serving.ttft": "runner.runner",  # lets every pass take so long
    # carries a request from an engine that was killed; has a mover move what it would not
    "kv.file": "frontend.request_log engine.kv",
    "kv.handover": "frontend.saved_request frontend.request_log",
}
"""Benches that import more than the others."""


def floor_of(path: str) -> Floor:
    folder, *inner = Path(path).with_suffix("").parts
    if folder == "policies":
        return POLICIES
    if folder == "bench":
        return Floor(f"{BENCH} {OWN_BENCHES.get('.'.join(inner), '')}", None)
    own = ".".join(inner[:2])
    found = FLOORS.get(own) or FLOORS.get(inner[0])
    assert found is not None, f"{path} has no floor: add it in tests/project/test_floors.py"
    return found._replace(ours=f"{found.ours} {own if own in FLOORS else inner[0]}")


def imports(path: str, source: str) -> Iterator[str]:
    package = ".".join(Path(path).parent.parts)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            yield from (f"{base}.{alias.name}" for alias in node.names)


def is_ours(name: str) -> bool:
    return (name != "" and (ROOT / "qllm" / name).is_dir()) or (
        ROOT / "qllm" / f"{name}.py"
    ).is_file()


def breaches(path: str, source: str) -> list[str]:
    floor, found = floor_of(path), []
    ours = set(floor.ours.split())
    for name in imports(path, source):
        top, folder, module = f"{name}..".split(".")[:3]
        if top == "qllm":
            folder = folder if is_ours(folder) else "__init__"
            allowed = bool({folder, f"{folder}.{module}"} & ours)
        else:
            is_sibling = top == Path(path).parts[0] == "policies"
            allowed = top not in {"qllm_policies", "policies"}
            allowed = is_sibling or (allowed and (floor.others is None or top in floor.others))
        if not allowed:
            found.append(name)
    return found


EVERYWHERE = python_files("qllm", "policies", "bench", "tests", "scripts")


def test_no_module_imports_the_folder_of_policies_by_its_name() -> None:
    """It is installed as `qllm_policies`: its modules import each other relatively."""
    texts = {path: (ROOT / path).read_text() for path in EVERYWHERE}
    absolute = re.compile(r"^\s*(from|import) policies\b", re.MULTILINE)
    assert [path for path, text in texts.items() if absolute.search(text)] == []


def test_a_module_imports_only_what_its_floor_may() -> None:
    paths = python_files("qllm", "policies", "bench")
    assert len(paths) > 250
    found = {path: breaches(path, (ROOT / path).read_text()) for path in paths}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("qllm/types.py", "from qllm.plan import Plan"),
        ("qllm/config.py", "import numpy"),
        ("qllm/scheduler/scheduler.py", "def now():\n    import time"),
        ("qllm/plan.py", "from torch import Tensor"),
        ("qllm/record/trace.py", "from qllm import engine"),
        ("qllm/sim/runner.py", "import torch"),
        ("qllm/sim/runner.py", "from qllm.runner.frame import Frame"),
        ("qllm/device/server.py", "import torch"),
        ("qllm/device/block.py", "from qllm.engine.loop import EngineLoop"),
        ("qllm/device/ring_memory.py", "from qllm.ingress.layout import REASONS"),
        ("qllm/ingress/layout.py", "from qllm.device.serving import SERVING"),
        ("qllm/ingress/shm.py", "import nixl"),
        ("qllm/ingress/structs.py", "from qllm.ingress import layout"),
        ("qllm/runner/layers/drivers.py", "from ...engine.loop import EngineLoop"),
        ("qllm/runner/runner.py", "import qllm.cuda.backend"),
        ("qllm/engine/loop.py", "import qllm.runner.runner"),
        ("qllm/engine/loop.py", "from qllm.engine import process"),
        ("qllm/engine/process.py", "import qllm.frontend"),
        ("qllm/frontend/handle.py", "import torch"),
        ("qllm/ingress/shm.py", "from qllm import QLLMEngine"),
        ("qllm/cli/policies.py", "import qllm_policies.fcfs"),
        ("policies/fcfs.py", "from qllm.scheduler.scheduler import Scheduler"),
        ("policies/fcfs.py", "import os"),
        ("bench/load.py", "from qllm.engine.loop import EngineLoop"),
    ],
)
def test_a_forbidden_import_is_seen(path: str, source: str) -> None:
    assert len(breaches(path, source)) == 1


def test_every_floor_is_lived_in() -> None:
    for name in FLOORS:
        assert (ROOT / "qllm" / name.replace(".", "/")).is_dir() or (
            ROOT / "qllm" / f"{name.replace('.', '/')}.py"
        ).is_file(), f"{name} is gone: take it out of FLOORS"


class _AtRunTime(ast.NodeTransformer):
    """Takes out imports for types alone."""

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        if ast.unparse(node.test) != "TYPE_CHECKING":
            return self.generic_visit(node)
        return [ast.Pass(), *node.orelse]


def import_graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """Module -> the modules of ours that it imports anywhere, in functions and for types too.

    Imports for types alone from the module's own folder are left out: the parts of one folder may
    know each other's types.
    """
    names = {path: path.removesuffix(".py").removesuffix("/__init__") for path in sources}
    modules = {name.replace("/", ".") for name in names.values()}
    graph: dict[str, set[str]] = {}
    for path, source in sources.items():
        at_run_time = set(imports(path, ast.unparse(_AtRunTime().visit(ast.parse(source)))))
        folder = ".".join(Path(path).parts[:-1]) + "."
        wanted = {
            name
            for name in imports(path, source)
            if name in at_run_time or folder == "qllm." or not name.startswith(folder)
        }
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


def test_types_of_the_own_folder_make_no_circle() -> None:
    for_types = "if TYPE_CHECKING:\n    from qllm.b.c import C"
    sources = {"qllm/b/c.py": "from qllm.b.d import f", "qllm/b/d.py": for_types}
    TopologicalSorter(import_graph(sources)).prepare()
    also_later = f"{for_types}\ndef f():\n    from qllm.b.c import C"
    with pytest.raises(CycleError):
        TopologicalSorter(import_graph({**sources, "qllm/b/d.py": also_later})).prepare()


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


def test_a_docstring_names_its_subject() -> None:
    """One that begins with "Of" leaves it to the reader to guess."""
    strings = [
        (f"{path}:{node.lineno}", str(node.value.value))
        for path in EVERYWHERE
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ]
    assert len(strings) > 3000
    assert [place for place, text in strings if text.startswith("Of ")] == []


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
