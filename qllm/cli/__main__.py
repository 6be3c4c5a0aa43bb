"""The command line as a module: `python -m qllm.cli`."""

from qllm.cli import main

main()
