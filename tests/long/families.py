"""Every causal language model of the installed transformers, tiny and random, against `generate`.

An engine with default settings (fp32, one thread, start-up check on) loads each model. It must
serve the greedy tokens of `generate` with close log-probabilities, its prompts whole and cut into
chunks, or be refused with a ModelError. The last line is JSON; `--out` writes it to a file as well.
"""

import argparse
import copy
import importlib.util
import json
import math
import os
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from transformers.models.auto.configuration_auto import (
    SPECIAL_MODEL_TYPE_TO_MODULE_NAME as MODULES,
)

from bench.common import result_file, write_result
from qllm import QLLMEngine, SamplingParams
from qllm.errors import ModelError
from tests.support.tiny_configs import VOCAB, CannotMakeError, model_types, tiny_model

LENGTHS = (40, 7, 23)
NEW = 12
CLOSE = 1e-3
"""Largest difference of log-probabilities: chunks sum in another order than one pass."""
MANY = 1 << 18
"""Tokens of KV: the states of tiny models take as much memory as the KV of many tokens."""
GREEDY = SamplingParams(temperature=0, ignore_eos=True, logprobs=0)
EXPERTS = re.compile(r"use_experts_implementation|class \w*(Experts|SparseMoe|MoE|Moe)\w*\(nn")
ARMS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunked": {"policy": "chunked", "max_step_tokens": 16},
}
"""Settings of the engines that run every model."""


def prompts() -> list[list[int]]:
    """Return seeded random ids, none of them special."""
    made = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB, (n,), generator=made).tolist() for n in LENGTHS]


class Stream(NamedTuple):
    """Greedy tokens of one prompt, and the log-probability of each."""

    tokens: list[int]
    logprobs: list[float]


def generated(model: Any) -> list[Stream]:
    """Return the answers of transformers to each prompt."""
    model.generation_config.eos_token_id = None
    out = []
    for ids in prompts():
        given = torch.tensor([ids])
        found = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=NEW,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        tokens = found.sequences[0, len(ids) :].tolist()
        logprobs = torch.log_softmax(torch.cat(found.logits).float(), -1)
        out.append(Stream(tokens, [logprobs[i, t].item() for i, t in enumerate(tokens)]))
    return out


def served(model: Any, **settings: Any) -> tuple[list[Stream], list[str]]:
    """Return the engine's answers to each prompt, and the drivers of its layers."""
    settings = {"threads": 1, "max_kv_tokens": MANY, **settings}
    with QLLMEngine.from_model(model, **settings) as engine:
        handles = [engine.submit(ids, "BE", NEW, sampling=GREEDY) for ids in prompts()]
        results = [handle.result(120) for handle in handles]
        drivers = sorted(set(engine.drivers))
    streams = [
        Stream(list(result.token_ids), [x.chosen for x in result.logprobs]) for result in results
    ]
    return streams, drivers


def difference(streams: list[Stream], expected: list[Stream]) -> float:
    """Return the largest difference of two log-probabilities; infinite if a token differs."""
    if [s.tokens for s in streams] != [s.tokens for s in expected]:
        return math.inf
    pairs = zip(streams, expected, strict=True)
    return max(abs(a - b) for s, e in pairs for a, b in zip(s.logprobs, e.logprobs, strict=True))


def has_experts(model_type: str) -> bool:
    """Return True if a family's file defines experts."""
    module = MODULES.get(model_type, model_type).replace("-", "_")
    found = importlib.util.find_spec(f"transformers.models.{module}")
    if found is None or not found.submodule_search_locations:
        return False
    file = Path(found.submodule_search_locations[0]) / f"modeling_{module}.py"
    return file.is_file() and EXPERTS.search(file.read_text()) is not None


def support(model: Any) -> dict[str, Any]:
    """Return how a model runs in bf16: its stops, our kernels, its exactness."""
    model = copy.deepcopy(model).bfloat16()
    how: dict[str, Any] = {"threads": 1, "max_kv_tokens": MANY, "conformance": False}
    with QLLMEngine.from_model(model, **how) as engine:
        kernels = engine.kernels
    levels = ["order"]
    try:
        QLLMEngine.from_model(model, exactness="batch-invariant", **how).close()
        levels.append("batch-invariant")
    except ModelError:
        pass
    names = ("experts", "router", "linear", "head", "attention", "state")
    return {
        "grain": "expert" if kernels["experts"] else "layer",
        "native": [name for name in names if kernels.get(name, "").startswith("qllm")],
        "exactness": levels,
    }


def outcome(
    model_type: str, arms: Sequence[str] = tuple(ARMS), *, kernels: bool = True
) -> dict[str, Any]:
    """Try one family: `result` is one of equal, refused, not made, WRONG, RAISED.

    Args:
        model_type: Name of the family.
        arms: Names of the settings.
        kernels: False to skip `support`.
    """
    try:
        model = tiny_model(model_type)
    except CannotMakeError as error:
        return {"result": "not made", "reason": str(error)}
    try:
        found = {arm: served(model, **ARMS[arm]) for arm in arms}
    except ModelError as error:
        return {"result": "refused", "reason": str(error)}
    except Exception as error:  # noqa: BLE001 - this is what the bench looks for
        return {"result": "RAISED", "reason": f"{type(error).__name__}: {error}"[:300]}
    expected = generated(model)
    far = {arm: difference(streams, expected) for arm, (streams, _) in found.items()}
    wrong = [arm for arm, largest in far.items() if largest > CLOSE]
    return {
        "result": "WRONG" if wrong else "equal",
        "reason": f"differs from generate: {', '.join(wrong)}" if wrong else "",
        "drivers": found[arms[0]][1],
        **(support(model) if kernels and has_experts(model_type) else {}),
        "distinct_tokens": min(len(set(stream.tokens)) for stream in expected),
        "logprobs_vary_by": min(max(s.logprobs) - min(s.logprobs) for s in expected),
        "largest_logprob_difference": max(far.values()),
    }


def main() -> None:
    """Try every family, or the named ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", help="model types; all by default")
    parser.add_argument("--out", type=result_file, help="also write all results to this file")
    parser.add_argument("--experts", action="store_true", help="families with experts only")
    parser.add_argument("--update", type=result_file, help="put the results into this file")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    table: dict[str, Any] = {}
    chosen = args.families or [x for x in model_types() if not args.experts or has_experts(x)]
    if args.update:
        table = json.loads(args.update.read_text())["families"]
    for model_type in chosen:
        table[model_type] = row = outcome(model_type)
        print(f"{model_type:26} {row['result']:9} {row['reason']}", flush=True)
    report = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "counts": dict(Counter(row["result"] for row in table.values())),
        "families": dict(sorted(table.items())),
    }
    if out := args.out or args.update:
        write_result(out, json.dumps(report, indent=1))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
