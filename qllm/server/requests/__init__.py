"""The routes' access to the engine: requests to it, and answers in progress."""
