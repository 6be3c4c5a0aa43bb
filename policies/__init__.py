"""The policies that ship with qllm, found through the entry-point group `qllm.policies`."""
