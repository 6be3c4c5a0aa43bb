"""The engine as routes see it: what a route asks, and the answer while it grows."""
