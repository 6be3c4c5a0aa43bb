"""What a row with a mask costs the rows beside it in the step, for vocabularies of 49k and 150k.

A random Qwen3-MoE with a synthetic byte-level BPE answers `--rows` requests at once, each of so
many tokens. In turns one of them has the form of a schema, of a regular expression, or none. The
ratio is the TPOT of the others beside a mask over that without one, turn by turn, and its median;
the resamples give its interval. The last line of stdout is one JSON document.

    python -m bench.serving.beside_mask [--rows 4] [--tokens 48] [--turns 12]
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from bench.common import MODEL, machine
from bench.kernels.grammar_mask import VOCABULARIES, make_tokenizer
from qllm import QLLMEngine, SamplingParams
from qllm.types import StructuredOutputs

REACH = 1.02
NUMBERS = {"type": "array", "items": {"type": "integer"}, "minItems": 1000}
FORMS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "schema": {"json": NUMBERS},
    "regex": {"regex": "([a-z]{1,8} ){1000,2000}"},
}
"""No answer in one of them ends within the tokens that are asked for."""


def make_model(folder: Path, vocab_size: int) -> None:
    """Seeded random weights, bfloat16."""
    tokenizer = make_tokenizer(vocab_size)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **{**MODEL, "vocab_size": vocab_size},
        eos_token_id=tokenizer.eos_token_id, pad_token_id=None, bos_token_id=None,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def tpot_ms(engine: QLLMEngine, form: dict[str, Any] | None, args: argparse.Namespace) -> float:
    """Mean TPOT of the rows without a form."""
    how = {"temperature": 1.0, "ignore_eos": True}
    asked = {"structured_outputs": StructuredOutputs(**form), "ignore_eos": False} if form else {}
    sampling = SamplingParams(**{**how, "seed": 0, **asked})
    first = engine.submit([1] * 16, "LS", args.tokens, sampling=sampling)
    others = [
        engine.submit([2 + n] * 16, "LS", args.tokens, sampling=SamplingParams(**how, seed=n))
        for n in range(1, args.rows)
    ]
    if len(first.result(120).token_ids) != args.tokens:
        raise RuntimeError(f"the row with a form ended after {len(first.token_ids)} tokens")
    found = [handle.result(120).metrics.tpot_ms for handle in others]
    return float(np.mean([ms for ms in found if ms is not None]))


def over_none(times: dict[str, list[float]], name: str) -> dict[str, Any]:
    """The median of the ratios of turns, with its 95 % interval."""
    ratios = np.array(times[name]) / np.array(times["none"])
    draws = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
    low, high = np.percentile(np.median(draws, axis=1), (2.5, 97.5))
    ratio = float(np.median(ratios))
    found = {"ratio": ratio, "low": float(low), "high": float(high)}
    return {**{k: round(v, 4) for k, v in found.items()}, "holds": ratio <= REACH}


def measure(vocab_size: int, args: argparse.Namespace) -> dict[str, Any]:
    """One vocabulary."""
    with tempfile.TemporaryDirectory(prefix="qllm-mask-") as folder:
        make_model(Path(folder), vocab_size)
        with QLLMEngine.from_pretrained(
            folder, threads=1, conformance=False, max_kv_tokens=8192
        ) as engine:
            times: dict[str, list[float]] = {name: [] for name in FORMS}
            for turn in range(args.turns + 1):
                for name, form in FORMS.items():
                    ms = tpot_ms(engine, form, args)
                    if turn:  # the first warms up: grammars are built
                        times[name].append(ms)
    row = {
        "vocabulary": vocab_size,
        "tpot_ms": {name: round(float(np.median(ms)), 3) for name, ms in times.items()},
        "over_none": {name: over_none(times, name) for name in FORMS if name != "none"},
    }
    print(json.dumps(row), file=sys.stderr)
    return row


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vocabularies", nargs="+", type=int, default=list(VOCABULARIES))
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--turns", type=int, default=12)
    args = parser.parse_args()
    rows = [measure(vocab_size, args) for vocab_size in args.vocabularies]
    settings = {"rows": args.rows, "tokens": args.tokens, "turns": args.turns, "reach": REACH}
    print(json.dumps({"bench": "beside_mask", "machine": machine(), **settings, "found": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
