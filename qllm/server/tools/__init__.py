"""Tools in a prompt, and calls and reasoning in an answer."""
