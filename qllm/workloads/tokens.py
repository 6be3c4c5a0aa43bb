"""Token ids for the lengths of a `RequestSpec`, which a live run needs."""

import random
from collections.abc import Iterable, Sequence

from qllm.errors import ConfigError
from qllm.workloads.mix import Arrival
from qllm.workloads.spec import RequestSpec


def with_tokens(
    requests: Iterable[RequestSpec], corpus: Sequence[int], seed: int = 0
) -> tuple[Arrival, ...]:
    """Cut every prompt from a corpus at a place that depends on the seed and the name alone.

    Args:
        requests: Requests in order of time.
        corpus: Token ids; a longer prompt starts again at the first one.
        seed: Seed of the places.
    """
    if not corpus:
        raise ConfigError("the corpus is empty; prompts are cut from it")
    arrivals = []
    for r in requests:
        start = random.Random(f"{seed} {r.name}").randrange(len(corpus))
        ids = tuple(corpus[(start + i) % len(corpus)] for i in range(r.num_prompt_tokens))
        arrivals.append(
            Arrival(
                at_s=r.at_s,
                name=r.name,
                priority=r.priority,
                token_ids=ids,
                max_tokens=r.max_tokens,
                slo=r.slo,
            )
        )
    return tuple(arrivals)
