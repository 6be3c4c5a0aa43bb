"""The command line. What needs torch is imported by the command that needs it."""

from qllm.cli import (  # noqa: F401 - each adds its commands
    bench,
    demo,
    docs,
    doctor,
    policies,
    run,
    serve,
    sim,
    top,
    trace,
    upcycle,
)
from qllm.cli.app import app

__all__ = ["app", "main"]


def main() -> None:
    """The console script `qllm`."""
    app()
