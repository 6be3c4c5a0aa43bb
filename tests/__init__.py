"""The tests. Their folders are those of `qllm/`; `support/` has what several files use."""
