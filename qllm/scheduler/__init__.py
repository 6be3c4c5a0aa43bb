"""Decisions: which requests run, when, and with which KV. Pure: no torch, clock or randomness."""
