"""What a native call sees of a stop word."""

import ctypes

from qllm.runner.protocol import Watch


def has_changed(watch: Watch | None) -> bool:
    """Whether the watched word is not the one seen last."""
    assert watch is not None
    seen = ctypes.c_int64(watch.seen).value
    return ctypes.c_int64.from_address(watch.address).value != seen
