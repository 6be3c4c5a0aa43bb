"""Prompts that arrive in pieces."""
