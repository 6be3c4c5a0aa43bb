"""Unique names and seeds, without a system call for each."""

import os
import random

_draw = random.Random()
"""Own generator of random numbers. A program may seed Python's generator, and still gets different
names and seeds."""
os.register_at_fork(after_in_child=_draw.seed)


def token_hex(num_bytes: int) -> str:
    """Return random bytes in hex, for unique names. The bytes are no secret."""
    return f"{_draw.getrandbits(8 * num_bytes):0{2 * num_bytes}x}"


def new_seed() -> int:
    """Return a seed in [0, 2**62)."""
    return _draw.getrandbits(62)
