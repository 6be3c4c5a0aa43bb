"""Time llama.cpp on a GGUF file. Runs in an environment with xllamacpp, which has no qllm.

    python llama_rate.py FILE THREADS

Reads lines of JSON from its input, {"prompt": [ids], "tokens": number}, and answers each with one:
{"prompt_s": seconds of the prompt, "token_s": seconds of a token after the first}.
"""

import json
import sys
from typing import Any

import xllamacpp

CONTEXT = 4096


def main() -> None:
    """Answer until the input ends."""
    params = xllamacpp.CommonParams()
    params.model.path = sys.argv[1]
    params.n_ctx, params.n_parallel = CONTEXT, 1
    params.n_batch = params.n_ubatch = 512
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[2])
    params.warmup = True
    server = xllamacpp.Server(params)
    print(
        json.dumps({"llama": xllamacpp.BUILD_INFO, "system": xllamacpp.get_system_info()}),
        flush=True,
    )
    for line in sys.stdin:
        asked = json.loads(line)
        given: dict[str, Any] = {"prompt": asked["prompt"], "n_predict": asked["tokens"]}
        given |= {"cache_prompt": False, "ignore_eos": True, "temperature": 0.0}
        found = server.handle_completions(given)
        found = json.loads(found) if isinstance(found, str) else found
        times = found["timings"]
        answer = {
            "prompt_s": times["prompt_ms"] / 1e3,
            "token_s": times["predicted_per_token_ms"] / 1e3,
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
