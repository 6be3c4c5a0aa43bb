"""The code in the caller's process: handles, prompts, and the clients that reach an engine."""
