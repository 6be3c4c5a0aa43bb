"""Unmodified transformers in its own process: the other side of every comparison.

The process reads one JSON command per line from stdin and writes one JSON answer per line to
stdout. It never imports qllm; each answer reports that.
"""

import json
import os
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.utils import logging

from bench.common import load_model

PAGE = 64
NUM_BLOCKS = 320
"""Blocks for 20,480 tokens of KV: more than any workload needs at once."""


class Reference:
    """The model, and the logits of its last answer."""

    def __init__(self, folder: str, dtype: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self.model = load_model(folder, dtype)
        self.logits: list[torch.Tensor] = []
        self._managers: dict[tuple[int, int], Any] = {}

    def generate(self, jobs: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """Return each job's greedy tokens, the gap between the top two logits, and the noise.

        The noise is the change of that gap when one forward pass computes the same tokens.
        """
        self.logits = []
        tokens, margins, noise = [], [], []
        for ids, num in jobs:
            prompt = torch.tensor([ids])
            with torch.inference_mode():
                out = self.model.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    max_new_tokens=num,
                    do_sample=False,
                    output_logits=True,
                    return_dict_in_generate=True,
                )
                again = self.model(out.sequences[:, :-1], use_cache=False).logits[0]
            logits = torch.stack([x[0] for x in out.logits]).float()
            again = again[len(ids) - 1 :].float()
            top = logits.topk(2).indices
            here, there = logits.gather(1, top), again.gather(1, top)
            margins.append((here[:, 0] - here[:, 1]).tolist())
            noise += (here[:, 0] - here[:, 1] - there[:, 0] + there[:, 1]).abs().tolist()
            tokens.append(out.sequences[0, len(ids) :].tolist())
            self.logits.append(logits)
        return {"tokens": tokens, "margins": margins, "noise": noise}

    def margin(self, job: int, position: int, token_id: int) -> dict[str, Any]:
        """Return the distance of a token's logit below the best one, as `generate` saw them."""
        row = self.logits[job][position]
        rank = int((row > row[token_id]).sum())
        return {"margin": float(row.max() - row[token_id]), "rank": rank}

    def cb(
        self, jobs: Sequence[Sequence[Any]], max_batch_tokens: int, max_requests: int
    ) -> dict[str, Any]:
        """Run continuous batching with sdpa; loading and start-up are not timed."""
        key = (max_batch_tokens, max_requests)
        if key not in self._managers:
            for manager in self._managers.values():
                manager.stop(block=True)
            self._managers.clear()
            self._managers[key] = self._start(max_batch_tokens, max_requests)
        manager = self._managers[key]
        begin, cpu = time.monotonic(), time.process_time()
        for i, (ids, num) in enumerate(jobs):
            manager.add_request(list(ids), request_id=f"{begin}-{i}", max_new_tokens=num)
        done: dict[str, list[int]] = {}
        while len(done) < len(jobs):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise RuntimeError(result.error)
                done[result.request_id] = list(result.generated_tokens)
            elif not manager.is_running():
                raise RuntimeError("continuous batching stopped")
        return {
            "cpu_s": time.process_time() - cpu,
            "wall_s": time.monotonic() - begin,
            "tokens": [done[f"{begin}-{i}"] for i in range(len(jobs))],
        }

    def _start(self, max_batch_tokens: int, max_requests: int) -> Any:
        self.model.set_attn_implementation("sdpa")
        manager = self.model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=32),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PAGE,
                num_blocks=NUM_BLOCKS,
                max_batch_tokens=max_batch_tokens,
                max_requests_per_batch=max_requests,
                allow_block_sharing=False,
            ),
        )
        manager.start()
        return manager

    def close(self) -> None:
        """Stop background threads."""
        for manager in self._managers.values():
            manager.stop(block=True)


def main() -> None:
    """Serve commands until stdin ends."""
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other output must not look like an answer
    reference = Reference(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    for line in sys.stdin:
        command = json.loads(line)
        name = command.pop("command")
        answer = getattr(reference, name)(**command)
        answer["qllm_imported"] = any(m.split(".")[0] == "qllm" for m in sys.modules)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    reference.close()


if __name__ == "__main__":
    main()
