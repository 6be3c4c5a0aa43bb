"""The engine as routes see it: the request to the engine, and the answer in progress."""
