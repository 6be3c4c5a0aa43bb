"""Token ids for the lengths of a `RequestSpec`, needed by a run of a real engine."""

import random
from collections.abc import Iterable, Sequence

from qllm.errors import ConfigError
from qllm.workloads.spec import Arrival, RequestSpec


def with_tokens(
    requests: Iterable[RequestSpec], corpus: Sequence[int], seed: int = 0
) -> tuple[Arrival, ...]:
    """Cut every prompt from a corpus, at a place that depends only on the seed and the name.

    For a request that extends another, only the new tokens are cut.

    Args:
        requests: Requests in order of time. A request that extends another comes after the other.
        corpus: Token ids. A prompt that reaches the corpus's end continues at the first id.
        seed: Seed of the places.
    """
    if not corpus:
        raise ConfigError("the corpus is empty; prompts are cut from it")

    def cut(name: str, num: int) -> tuple[int, ...]:
        start = random.Random(f"{seed} {name}").randrange(len(corpus))
        return tuple(corpus[(start + i) % len(corpus)] for i in range(num))

    arrivals, said = [], dict[str, int]()
    for r in requests:
        before = said.get(r.follows.extends, 0) if r.follows is not None else 0
        shared = 0 if before else r.num_shared
        ids = cut("shared", shared) + cut(r.name, r.num_prompt_tokens - before - shared)
        said[r.name] = r.num_prompt_tokens + r.max_tokens
        arrivals.append(
            Arrival(
                at_s=r.at_s,
                name=r.name,
                priority=r.priority,
                token_ids=ids,
                max_tokens=r.max_tokens,
                slo=r.slo,
                follows=r.follows,
            )
        )
    return tuple(arrivals)
