"""Sampling: the choice of a row's next token, its limits, and its log-probabilities."""
