"""The default simulation of the tests."""

from typing import Any

from typer.testing import CliRunner

from qllm.cli import app


def qllm(*args: str) -> Any:
    return CliRunner().invoke(app, list(args))
