"""Execution of programs on the CPU: frames, KV, attention, experts, sampling."""
