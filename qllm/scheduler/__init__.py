"""Decisions: which requests run, when, and with which KV.

No code here uses torch, a clock or randomness.
"""
