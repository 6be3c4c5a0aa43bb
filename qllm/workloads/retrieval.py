"""Streaming prompts of retrieved text. Pieces are appended, or replace earlier text.

Source: Stream2LLM, arXiv:2604.16395, and the description of its traces. A crawler takes 9.9 s for
9,100 tokens, a page every 0.7 s. Nearest-neighbour search takes 4.5 s for 13,000 tokens, in 1 to 26
steps (median 4). Most of these steps are close together. Means and medians are from the source.
Spreads are ours.
"""

import random
from dataclasses import dataclass, replace

from qllm.workloads.lengths import Lengths, between, lognormal
from qllm.workloads.spec import PieceSpec, RequestSpec

TOKENS_ASKED = 64
"""Tokens of the question, which arrives first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retrieval:
    """A rule that cuts prompts into pieces."""

    pieces: Lengths
    """Number of pieces after the question."""
    ms: Lengths
    """Milliseconds from the question to the last piece."""
    bunched: float = 1.0
    """Exponent of uniform random numbers for the gaps. Above 1 most gaps are short and a few long.
    """
    replaces: bool = False
    """True if a piece replaces the prompt from a random place on; False if it is appended."""

    def scaled(self, factor: float) -> "Retrieval":
        """Return the same rule with scaled times."""
        return self if factor == 1 else replace(self, ms=self.ms.scaled(factor))

    def cut(self, whole: RequestSpec, rng: random.Random) -> RequestSpec:
        """Return the request with its prompt in pieces."""
        asked = min(TOKENS_ASKED, whole.num_prompt_tokens - 1)
        left = whole.num_prompt_tokens - asked
        count = min(left, self.pieces.at(rng.uniform(0, 100)))
        gaps = [rng.random() ** self.bunched for _ in range(count)]
        total_s = self.ms.at(rng.uniform(0, 100)) / 1000
        found, at_s, known = [PieceSpec(0.0, 0, asked)], 0.0, asked
        for i, gap in enumerate(gaps, 1):
            at_s += total_s * gap / sum(gaps)
            upto = asked + left * i // count  # retrieved text is refined while it grows
            keep = rng.randint(asked, known) if self.replaces else known
            found.append(PieceSpec(at_s, min(keep, upto), upto - min(keep, upto)))
            known = upto
        return replace(whole, pieces=tuple(found))


CRAWLER = Retrieval(pieces=between(8, 22), ms=lognormal(9900, 0.4))
ANNS = Retrieval(pieces=between(1, 26), ms=lognormal(4500, 0.8), bunched=4.0, replaces=True)
