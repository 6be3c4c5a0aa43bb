"""Prompts that arrive in pieces: streaming prompts."""
