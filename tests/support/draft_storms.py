"""Storms of requests whose answers are known, for drafts that are right or wrong on purpose."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qllm import SamplingParams
from tests.support.storms import Storm, prompt_of

Spec = dict[str, Any]
"""Arguments of `QLLMEngine.submit`, but for the class."""


def spec_of(rng: random.Random) -> Spec:
    sampling = SamplingParams(
        temperature=rng.choice((0.0, 0.0, 0.8, 1.5)),
        seed=rng.randrange(1000),
        logprobs=rng.randrange(3),
        repetition_penalty=rng.choice((1.0, 1.0, 1.2)),
    )
    prompt = prompt_of(rng.choice((3, 9, 17, 40)), rng.randrange(10**6))
    return {"prompt": prompt, "max_tokens": rng.randrange(8, 24), "sampling": sampling}


def some_specs(num: int) -> list[Spec]:
    """The first requests of a fixed list."""
    return [spec_of(random.Random(seed)) for seed in range(num)]


@dataclass
class DraftStorm(Storm):
    """A storm of requests that are drawn from a list, so that their answers are known."""

    drawn: Sequence[Spec] = ()

    def submit(self, priority: str) -> None:
        spec = self.rng.choice(self.drawn)
        handle = self.engine.submit(priority=priority, **spec)
        self.handles.append((handle, priority))
        self.specs[handle.number] = spec
