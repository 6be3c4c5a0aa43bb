"""Last chunk arrival: among prompts that come in pieces, whose last piece came first goes first.

What LS and BE may do to each other is `qllm2`'s. Inside a class whole prompts go before open ones,
as everywhere; a prompt that is revised goes to the end of its line.

Source: LCAS of Stream2LLM, arXiv:2604.16395, in the order of its released code, oldest last piece
first (its docstring says the newest). Differs: classes; a pass stops inside a layer; victims are
chosen from the end of the order, and KV moves out or is computed again by the cost of the victim's
KV (the released code takes the cost of the tokens that the other request adds).
"""

from dataclasses import dataclass
from typing import ClassVar

from .qllm2 import Qllm2


@dataclass(frozen=True, kw_only=True)
class Lcas(Qllm2):
    """Oldest last piece first inside each class, else as `qllm2`."""

    since: ClassVar[str] = "revised_ns"
