"""Answers `bench.models.four_bits`, in the process of a library that is timed. Needs nothing else.

Scripts beside this file import it by its name alone: they run in environments without qllm.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

Rates = Callable[[list[int], int], tuple[float, float]]
"""Seconds of a prompt, and of a token after the first, given the prompt and how many tokens."""


def answer(rates: Rates, about: dict[str, Any]) -> None:
    """Warm up, say what is timed, and answer until the input ends.

    Reads lines of JSON, {"prompt": [ids], "tokens": number}, and answers each with one:
    {"prompt_s": seconds of the prompt, "token_s": seconds of a token after the first}.
    """
    rates([9] * 16, 4)
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        prompt_s, token_s = rates(asked["prompt"], asked["tokens"])
        print(json.dumps({"prompt_s": prompt_s, "token_s": token_s}), flush=True)
