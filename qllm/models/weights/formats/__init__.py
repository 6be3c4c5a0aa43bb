"""Formats of quantised weights in published checkpoints: one module per method."""
