"""A package as `qllm new-policy` or `qllm new-drafter` writes it."""

import importlib.util
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from qllm.cli.new_policy import new_policy


def made(folder: Path, kind: str) -> Any:
    """The policy class of a new package, without installing it."""
    file = new_policy("my_policy", kind, folder) / "my_policy.py"
    spec = importlib.util.spec_from_file_location("my_policy", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["my_policy"] = module  # where dataclasses look its annotations up
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules["my_policy"]
    return module.MyPolicy


def seem_installed(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Put the folder of a package on the path, with the entry points of its project."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    name, version = project["name"], project["version"]
    info = folder / f"{folder.name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    ((group, points),) = project["entry-points"].items()
    lines = [f"[{group}]", *(f"{name} = {what}" for name, what in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))
    patch.syspath_prepend(folder)
