"""Weights from files to tensors: checkpoints, formats, and modules that hold rounded weights."""
