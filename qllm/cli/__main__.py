"""`python -m qllm.cli`."""

from . import main

main()
