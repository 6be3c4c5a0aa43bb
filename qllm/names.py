"""Numbers nobody else has, without a call of the system for each."""

import os
import random

_draw = random.Random()
"""Our own: a program that seeds Python's gets other seeds and names all the same."""
os.register_at_fork(after_in_child=_draw.seed)


def token_hex(num_bytes: int) -> str:
    """So many bytes in hex, to tell things apart. It keeps nothing secret."""
    return f"{_draw.getrandbits(8 * num_bytes):0{2 * num_bytes}x}"


def new_seed() -> int:
    """A seed in [0, 2**62)."""
    return _draw.getrandbits(62)
