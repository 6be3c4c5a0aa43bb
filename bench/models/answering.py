"""Answers to benches that time libraries in turns, in the process of one library.

It needs no package. Scripts in this folder import it by its name alone: they run in environments
without qllm.
"""

import json
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

Rates = Callable[[list[int], int], tuple[float, float]]
"""Function from a prompt and a number of tokens to seconds of the prompt, and of a later token."""
Answer = Callable[[dict[str, Any]], dict[str, Any]]
"""Function from a question to its answer, both as JSON."""


def answer(
    rates: Rates,
    about: dict[str, Any],
    many: Answer | None = None,
    mixed: Answer | None = None,
) -> None:
    """Warm up, report what is timed, and answer until the input ends.

    The process reads lines of JSON and answers each with one, or with {"error": text} if the
    library cannot answer the question.

        {"prompt": [ids], "tokens": number}
            {"prompt_s": seconds of the prompt, "token_s": seconds of a token after the first}
        {"prompts": [[ids], ...], "tokens": number}
            `many`: "prompt_s" until each has its first token, "token_s" of a step that has them
            all; null without such a step. Without `many`, one prompt alone.
        {"be": [[ids], ...], "ls": [[ids], ...], "at": [seconds], "tokens": number}
            `mixed`: prompts of BE at once, with one token each, and of LS at their times:
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
    """Make the answer of `many` from the token times of each row, in seconds since the start."""
    first, last = max(row[0] for row in times), min(row[-1] for row in times)
    gaps = [
        after - before
        for row in times
        for before, after in pairwise(row)
        if before >= first - 1e-4 and after <= last + 1e-4
    ]
    return {"prompt_s": first, "token_s": median(gaps) if gaps else None}
