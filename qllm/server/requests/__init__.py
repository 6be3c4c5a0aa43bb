"""The routes' access to the engine: requests to the engine, and answers in progress."""
