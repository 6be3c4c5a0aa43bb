"""Functions that the rows of `bench.kv` share."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.common import MODEL, SPECIAL
from qllm import QLLMEngine, SamplingParams
from qllm.measure.variants import KV_SIZES

GREEDY = SamplingParams(temperature=0, ignore_eos=True)
PAGE, THREADS = 64, 2


def make_engine(model: str, **settings: Any) -> QLLMEngine:
    """Start an engine of `THREADS` threads."""
    return QLLMEngine.from_pretrained(
        model, **{**KV_SIZES, "threads": THREADS, "conformance": False, **settings}
    )


def make_ids(rng: np.random.Generator | int, count: int) -> list[int]:
    """Return random tokens; a number is a seed."""
    rng = np.random.default_rng(rng)
    return [int(i) for i in rng.integers(SPECIAL, MODEL["vocab_size"], count)]


def wait_until(condition: Callable[[], Any], seconds: float = 600) -> None:
    """Wait until a condition is true.

    Raises:
        TimeoutError: The condition stayed false.
    """
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.002)
