"""Answers of llama.cpp with its drafts `ngram-simple`, or without drafts.

    python llama_drafts.py < question.json

Runs in the environment of that peer (`llama_server.py`). The question is JSON: the folder of the
model, `prompts` of token ids, the number of `new` tokens of each answer, the most `drafts` of a
step (0 is none), and `threads`. The last line of stdout is JSON: per prompt the seconds and the
text of the answer, and how many drafts were verified and accepted.
"""

import json
import sys
from pathlib import Path
from typing import Any

from llama_server import gguf_of

CONTEXT = 4096
LEAST = 2
"""Last tokens that must come before for a draft, as in the row of vLLM."""


def main() -> None:
    """Answer all prompts, one by one."""
    import xllamacpp

    asked = json.loads(sys.stdin.read())
    params = xllamacpp.CommonParams()
    params.model.path = str(gguf_of(Path(asked["model"])))
    params.n_ctx, params.n_parallel = CONTEXT, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = asked["threads"]
    if asked["drafts"]:
        kinds = xllamacpp.common_speculative_type
        params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        params.speculative.ngram_simple.size_n = LEAST
        params.speculative.ngram_simple.size_m = asked["drafts"]
    server = xllamacpp.Server(params)
    how = {"temperature": 0.0, "cache_prompt": False, "ignore_eos": True}
    found: dict[str, list[Any]] = {"times": [], "tokens": [], "drafted": [], "accepted": []}
    for prompt in (asked["prompts"][0], *asked["prompts"]):  # the first one warms up
        told = server.handle_completions({"prompt": prompt, "n_predict": asked["new"], **how})
        told = json.loads(told) if isinstance(told, str) else told
        spent = told["timings"]
        found["times"].append((spent["prompt_ms"] + spent["predicted_ms"]) / 1e3)
        found["tokens"].append(told["choices"][0]["text"])
        found["drafted"].append(spent.get("draft_n", 0))
        found["accepted"].append(spent.get("draft_n_accepted", 0))
    print(json.dumps({name: values[1:] for name, values in found.items()}))


if __name__ == "__main__":
    main()
