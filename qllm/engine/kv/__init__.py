"""The cached KV in the engine's loop: decisions about the place of each page.

Time is an argument.
"""
