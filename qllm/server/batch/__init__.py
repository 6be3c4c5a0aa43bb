"""Batches: their lines, and the worker that has them answered."""
