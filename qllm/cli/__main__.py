"""`python -m qllm.cli`."""

from qllm.cli import main

main()
