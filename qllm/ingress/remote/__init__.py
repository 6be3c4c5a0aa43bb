"""Transports that need a library of their own."""
