"""The secret of two hosts that meet."""

from qllm.ingress.remote.meeting import (
    MIN_SECRET_BYTES,
)

SECRET = b"s" * MIN_SECRET_BYTES
