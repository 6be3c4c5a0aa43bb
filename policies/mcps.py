"""Most computed first: the prompt with the most computed tokens continues, and loses KV last.

Between LS and BE the rules of `qllm2` hold. As in every policy, whole prompts of a class go before
streaming prompts. If KV is short, this order drops the least KV, and young prompts wait for old
prompts.

Source: MCPS of Stream2LLM, arXiv:2604.16395. Differences: those of `lcas`.
"""

from dataclasses import dataclass

from qllm.policy import Reads

from .qllm2 import Qllm2


@dataclass(frozen=True, kw_only=True)
class Mcps(Qllm2):
    """Most computed tokens first inside each class, otherwise `qllm2`."""

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
        """Return the class as the tier. The key puts requests with most computed tokens first."""
        return priority, -done_tokens
