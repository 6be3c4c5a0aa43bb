"""Batches, and the worker that answers their lines."""
