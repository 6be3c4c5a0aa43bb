"""Who runs, when and with which KV: pure decisions, no torch, no clock, no randomness."""
