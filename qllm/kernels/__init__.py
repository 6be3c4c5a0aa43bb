"""Kernels of our own, by device."""
