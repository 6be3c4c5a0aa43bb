"""Most computed first: the prompt of which most is computed goes on, and loses KV last.

What LS and BE may do to each other is `qllm2`'s. Inside a class whole prompts go before open ones,
as everywhere. Where KV is short this throws away least, and lets young prompts wait for old ones.

Source: MCPS of Stream2LLM, arXiv:2604.16395. Differs as `lcas` does.
"""

from dataclasses import dataclass

from qllm.policy import Reads

from .qllm2 import Qllm2


@dataclass(frozen=True, kw_only=True)
class Mcps(Qllm2):
    """Most computed first inside each class, else as `qllm2`."""

    reads = Reads.PROGRESS

    def rank(
        self,
        arrival_ns: int,
        priority: int,
        deadline_ns: int,
        prompt_tokens: int,
        done_tokens: int,
        served_ns: int,
        now_ns: int,
    ) -> tuple[int, int]:
        """The class is the tier; most computed tokens first inside it."""
        return priority, -done_tokens
