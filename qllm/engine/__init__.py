"""The engine's side: the loop, its parts, and its process."""
