"""Engines of hybrid models whose states the prefix cache keeps."""

import random
from typing import Any

from qllm import QLLMEngine, SamplingParams
from qllm.frontend.handle import Result
from tests.support.hybrids import VOCAB

GREEDY = SamplingParams(temperature=0, ignore_eos=True)

MANY = 1 << 17
"""Tokens of KV: the states of tiny models are large beside their KV."""


def prompt_of(n: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(n)]


def engine_of(model: Any, **settings: Any) -> QLLMEngine:
    usual = {"conformance": False, "threads": 1, "max_kv_tokens": MANY}
    return QLLMEngine.from_model(model, **{**usual, **settings})


def run(engine: QLLMEngine, ids: list[int], n: int = 8, **how: Any) -> Result:
    return engine.submit(ids, how.pop("priority", "LS"), n, sampling=GREEDY, **how).result(300)
