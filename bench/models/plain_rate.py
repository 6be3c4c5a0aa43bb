"""Transformers itself on a folder of bf16 weights, timed in its own process.

    python -m bench.models.plain_rate FOLDER THREADS

`AutoModelForCausalLM.from_pretrained` and `generate`, unchanged.
Questions and answers: `answering.py`.
"""

import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

from bench.models.answering import answer, of_rows


class Times(StoppingCriteria):
    """A stopwatch: `generate` calls it after every step, and it notes the time."""

    def __init__(self) -> None:
        self.at_s: list[float] = []

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        self.at_s.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Asked:
    """A model, and the questions that it answers."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def rates(self, prompt: list[int], tokens: int) -> tuple[float, float]:
        """Return the seconds of a prompt, and of a token after the first."""
        found = self.many({"prompts": [prompt], "tokens": tokens})
        return found["prompt_s"], found["token_s"]

    def many(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Answer different prompts of one length at once."""
        ids, times, num = torch.tensor(asked["prompts"]), Times(), asked["tokens"]
        stopping = StoppingCriteriaList([times])
        how = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
        how |= {"max_new_tokens": num, "min_new_tokens": num, "stopping_criteria": stopping}
        start = time.perf_counter()
        self._model.generate(ids, **how)
        row = [at - start for at in times.at_s]
        return of_rows([row] * len(ids))


def main() -> None:
    """Answer until the input ends."""
    folder, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    start = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    about = {"name": "transformers", "load_s": round(time.perf_counter() - start, 1)}
    asked = Asked(model)
    answer(asked.rates, about, asked.many)


if __name__ == "__main__":
    main()
