"""Last chunk arrival: the streaming prompt whose last piece is oldest goes first.

Between LS and BE the rules of `qllm2` hold. As in every policy, whole prompts of a class go before
streaming prompts. A revised prompt goes to the end of its line.

Source: LCAS of Stream2LLM, arXiv:2604.16395, in the order of its released code, oldest last piece
first (its docstring says the newest). Differences: classes; a pass stops inside a layer; victims
are chosen from the end of the order; the cost of the victim's KV decides whether KV is swapped out
or computed again (in the released code, the cost of the other request's new tokens decides).
"""

from dataclasses import dataclass
from typing import ClassVar

from .qllm2 import Qllm2


@dataclass(frozen=True, kw_only=True)
class Lcas(Qllm2):
    """Oldest last piece first inside each class, otherwise `qllm2`."""

    since: ClassVar[str] = "revised_ns"
