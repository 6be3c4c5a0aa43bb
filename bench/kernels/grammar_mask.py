"""What a grammar costs per token, for vocabularies of 49k and 150k: a table, then one JSON line.

Two times per token: `ahead`, what the engine's loop does when the bits were found out beside the
model's last pass (`Matcher.go_ahead`; here the loop sleeps until they are there), and `alone`, all
of it at once. Both end with the logits of what may not come at -inf. The vocabularies are
byte-level BPE with random merges of the characters of JSON and of words; the tokens are drawn at
random from those that may come, which wanders more than a model does. Times are CPU times of the
loop's thread in microseconds: a machine with other work takes it away for milliseconds.
"""

import argparse
import json
import random
import time
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from bench.common import Table, machine
from qllm.grammar import Vocabulary
from qllm.kernels.cpu.masks import keep_allowed
from qllm.types import StructuredOutputs

VOCABULARIES = (49_152, 151_936)
REACH = {"mean": 100.0, "p99": 1000.0}
ADDRESS = {
    "type": "object",
    "properties": {
        "street": {"type": "string", "maxLength": 50},
        "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
    },
    "required": ["street", "zip"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["a", "bb", "ccc"]}},
        "address": ADDRESS,
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
FORMS: dict[str, dict[str, Any]] = {
    "schema": {"json": SCHEMA},
    "any JSON": {"json": {"type": "object"}},
    "regex": {"regex": "([a-z]{1,8} ){40,80}"},
}


def make_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of so many tokens; the last but one is EOS."""
    rng = random.Random(0)
    base = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab, merges = {c: i for i, c in enumerate(base)}, []
    pool = [c for c in base if c.isascii() and (c.isalnum() or c in '",:{}[]_-./')] + ["Ġ"]
    while len(vocab) < size - 2:
        a, b = rng.choice(pool), rng.choice(pool)
        if len(a + b) <= 12 and a + b not in vocab:
            vocab[a + b] = len(vocab)
            merges.append((a, b))
            pool.append(a + b)
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<eos>", "<pad>"])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>")


def measure(
    vocabulary: Vocabulary, what: dict[str, Any], num_answers: int, builder: Executor | None
) -> list[float]:
    """Microseconds of every token of so many answers of at most 100 tokens."""
    found, draw = [], np.random.default_rng(0)
    for _ in range(num_answers):
        matcher = vocabulary.matcher(StructuredOutputs(**what))
        outputs: list[int] = []
        while len(outputs) < 100:
            x_V = draw.standard_normal(vocabulary.vocab_size)
            begin = time.thread_time()
            if builder is not None and outputs:
                matcher.go_ahead(builder, outputs)
            handed = time.thread_time()
            if builder is not None:
                builder.submit(int).result()  # the pass: longer than the bits take
            passed = time.thread_time()
            why = matcher.allow(outputs)
            keep_allowed(torch.from_numpy(x_V), torch.from_numpy(matcher.words))
            found.append(1e6 * (time.thread_time() - passed + handed - begin))
            assert why is None, why
            outputs.append(int(draw.choice(np.flatnonzero(x_V > -np.inf))))
            if outputs[-1] in vocabulary.eos_token_ids:
                break
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=int, default=40)
    args = parser.parse_args()
    table = Table()
    rows, builder = [], ThreadPoolExecutor(1)
    for size in VOCABULARIES:
        tokenizer = make_tokenizer(size)
        begin = time.thread_time()
        vocabulary = Vocabulary(tokenizer, size, frozenset({tokenizer.eos_token_id}))
        vocabulary.prepare()
        prepare_s = time.thread_time() - begin
        for name, what in FORMS.items():
            begin = time.thread_time()
            vocabulary.matcher(StructuredOutputs(**what))
            build_ms = 1e3 * (time.thread_time() - begin)
            for how, thread in (("ahead", builder), ("alone", None)):
                us = np.array(measure(vocabulary, what, args.answers, thread))
                row = {"mean": us.mean(), "p50": np.median(us), "p99": np.percentile(us, 99)}
                row = {**row, "max": us.max()}
                row = {key: round(float(value), 1) for key, value in row.items()}
                shown = ", ".join(f"{key} {value}" for key, value in row.items())
                ok = all(row[key] <= most for key, most in REACH.items())
                title = f"{name}, {size} tokens, {how}: us per token"
                table.add(title, shown, "100 / p99 1000", ok)
                rows.append(
                    {"vocabulary": size, "form": name, "how": how, "tokens": len(us), **row}
                    | {"prepare_s": round(prepare_s, 2), "build_ms": round(build_ms, 2)}
                )
    print(json.dumps({"bench": "grammar_mask", "machine": machine(), "reach": REACH, "rows": rows}))


if __name__ == "__main__":
    main()
