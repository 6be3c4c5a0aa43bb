"""The runner's loop with polling compiled out, in addition to the one that polls.

This module is imported before qllm and changes the source of `qllm.runner.runner` at its import.
`_run` gets a twin without the clock, the segment record and every check of the stop word. Both
twins use the same weights in one process, because two processes differ by more than polling costs.
"""

import ast
import copy
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

TARGET = "qllm.runner.runner"
CLASS, METHOD = "TorchRunner", "_run"
FLAG = "BENCH_SILENT"
POLLING = {"stop", "below", "grain", "segments", "clock", "begin", "end", "here"}


def _names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} | {
        n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)
    }


def _is_polling(node: ast.stmt) -> bool:
    if isinstance(node, ast.If):
        return bool(_names(node.test) & (POLLING | {"on_segment"}))
    if isinstance(node, ast.Assign):
        return any(isinstance(t, ast.Name) and t.id in POLLING for t in node.targets)
    return False


def _twin(tree: ast.Module) -> ast.Module:
    """Add the silent twin and the switch in front of `_run`.

    Raises:
        RuntimeError: The runner's source is not as this file expects.
    """
    classes = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == CLASS]
    if len(classes) != 1:
        raise RuntimeError(f"{TARGET} has no class {CLASS}; adapt bench/engine/silent.py")
    owner = classes[0]
    found = [n for n in owner.body if isinstance(n, ast.FunctionDef) and n.name == METHOD]
    loops = [n for f in found for n in f.body if isinstance(n, ast.While)]
    if len(found) != 1 or len(loops) != 1:
        raise RuntimeError(f"{CLASS}.{METHOD} has no single loop; adapt bench/engine/silent.py")
    twin = copy.deepcopy(found[0])
    twin.name = f"{METHOD}_silent"
    loop = next(n for n in twin.body if isinstance(n, ast.While))
    kept = [n for n in loop.body if not _is_polling(n)]
    if len(kept) == len(loop.body):
        raise RuntimeError(f"{CLASS}.{METHOD} polls nothing; adapt bench/engine/silent.py")
    loop.body = kept
    args = ", ".join(a.arg for a in found[0].args.args[1:])
    switch = ast.parse(f"if {FLAG}:\n    return self.{twin.name}({args})").body
    found[0].body[:0] = switch
    owner.body.append(twin)
    tree.body.append(ast.parse(f"{FLAG} = False").body[0])
    return ast.fix_missing_locations(tree)


class _Loader(importlib.machinery.SourceFileLoader):
    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> Any:
        return compile(_twin(ast.parse(data)), path, "exec", optimize=_optimize)

    def get_code(self, fullname: str) -> Any:  # the byte-code cache is neither read nor written
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


class _Finder:
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != TARGET:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.origin is None:
            return None
        return importlib.util.spec_from_loader(name, _Loader(name, spec.origin))


def install() -> None:
    """Prepare the import hook; call this before qllm's runner is imported."""
    if TARGET in sys.modules:
        raise RuntimeError(f"{TARGET} is imported already")
    sys.meta_path.insert(0, _Finder())


def enable(on: bool) -> None:
    """Choose the twin without polling, or the loop that polls."""
    setattr(sys.modules[TARGET], FLAG, on)
