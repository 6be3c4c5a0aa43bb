"""The caller's side: handles, prompts, and the clients that reach an engine."""
