"""The engine's side: the loop, what it is built of, and the process it runs in."""
