"""A policy package as `qllm new-policy` writes it."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

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
