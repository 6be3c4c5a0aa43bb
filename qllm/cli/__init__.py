"""The command line. A command imports torch only if it needs it."""

from qllm.cli import (  # noqa: F401 - each adds its commands
    bench,
    demo,
    docs,
    doctor,
    drafters,
    policies,
    profile,
    rank,
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
    """Run the console script `qllm`."""
    app()
