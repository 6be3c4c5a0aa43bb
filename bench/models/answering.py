"""Answers the benches that time libraries in turn, in the process of one. Needs nothing else.

Scripts beside this file import it by its name alone: they run in environments without qllm.
"""

import json
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

Rates = Callable[[list[int], int], tuple[float, float]]
"""Seconds of a prompt, and of a token after the first, given the prompt and how many tokens."""
Answer = Callable[[dict[str, Any]], dict[str, Any]]
"""An answer to a question, both as JSON."""


def answer(
    rates: Rates,
    about: dict[str, Any],
    many: Answer | None = None,
    mixed: Answer | None = None,
) -> None:
    """Warm up, say what is timed, and answer until the input ends.

    Reads lines of JSON and answers each with one, {"error": text} where a question is none that the
    library is asked.

        {"prompt": [ids], "tokens": number}
            {"prompt_s": seconds of the prompt, "token_s": seconds of a token after the first}
        {"prompts": [[ids], ...], "tokens": number}
            `many`: "prompt_s" until each has its first token, "token_s" of a step that has them
            all; null where there was no such step. Without `many`, one prompt alone.
        {"be": [[ids], ...], "ls": [[ids], ...], "at": [seconds], "tokens": number}
            `mixed`: prompts of BE at once, of which one token is wanted, and of LS at their times:
            {"ttft_s": [of every prompt of LS], "be_s": seconds until BE is done}
    """
    rates([9] * 16, 4)
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if "prompts" in asked and many is None and len(asked["prompts"]) == 1:
            asked["prompt"] = asked.pop("prompts")[0]
        if "prompts" in asked:
            found = {"error": "is asked one prompt at a time"} if many is None else many(asked)
        elif "be" in asked:
            found = {"error": "has no mixed trace here"} if mixed is None else mixed(asked)
        else:
            prompt_s, token_s = rates(asked["prompt"], max(2, asked["tokens"]))
            found = {"prompt_s": prompt_s, "token_s": token_s}
        print(json.dumps(found), flush=True)


def of_rows(times: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Make the answer of `many` from when each row had its tokens, in seconds since the start."""
    first, last = max(row[0] for row in times), min(row[-1] for row in times)
    gaps = [
        after - before
        for row in times
        for before, after in pairwise(row)
        if before >= first - 1e-4 and after <= last + 1e-4
    ]
    return {"prompt_s": first, "token_s": median(gaps) if gaps else None}
