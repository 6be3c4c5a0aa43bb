"""The versions of the software that decides bits."""

from functools import cache
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path

import torch


@cache
def software() -> str:
    """Return the versions of the software that decides bits: this package, its kernels, torch."""
    digest = blake2b(digest_size=16)
    package = Path(__file__).parent
    for path in sorted(package.rglob("*")):
        if path.suffix in (".so", ".py"):
            digest.update(path.read_bytes())
    return (
        f"qllm {version('qllm-runtime')}, kernels {digest.hexdigest()}, torch {torch.__version__}"
    )
