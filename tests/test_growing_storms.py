"""Prompts that grow and change beside others, on a virtual clock: every policy keeps every rule."""
