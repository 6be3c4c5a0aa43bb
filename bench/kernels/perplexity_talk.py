"""Perplexity of `talk` per format of its weights, through our kernels.

The text is that of `bench.kernels.perplexity`; engines return the log-probabilities of its windows
(`prompt_logprobs`). The first rows are `expert_weights=`, which round at load. The other rows are
the formats in which models are published, for experts and linear modules (MXFP4 of gpt-oss equals
"mxfp4"; there are no GGUF files). The other side of a row is the model in bf16 with the values of
the codes: it must score the same, bit by bit. If codes are integers, a row shows the effect of
rounding activations to int8. The reference is the model's own forward in fp32. The output is a
table, then one JSON line; nothing is timed.
"""

import argparse
import math
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.common import ROOT, Table, machine, result_file
from bench.kernels import published_talk
from bench.kernels.perplexity import WINDOW
from qllm import QLLMEngine
from qllm.models.folders import locate
from qllm.models.loader import load
from qllm.models.weights.quantised_experts import WEIGHTS, all_quantised
from qllm.types import SamplingParams

sys.path.append(str(ROOT / "scripts"))
import train_tiny

FORMATS = ("auto", "int8", "int8-g64", "int4", "mxfp4")
PACKED = ("int4", "mxfp4")


def windows(tokenizer: Any, texts: list[str], most: int) -> list[list[int]]:
    """Return windows of at most WINDOW tokens each, up to a number of tokens."""
    found: list[list[int]] = []
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        found += [ids[at : at + WINDOW] for at in range(0, len(ids) - 1, WINDOW)]
    return sorted(found[: most // WINDOW], key=len)


def expanded(how: str) -> Any:
    """Return the model in bf16 with the values of a format."""
    model, packed = load("talk").model, load("talk", expert_weights=how).model
    for name, held in all_quantised(packed).items():
        module = model.get_submodule(name)
        for parameter in WEIGHTS:
            values = [held.as_parameter(parameter, e) for e in range(held.num_experts)]
            getattr(module, parameter).data.copy_(torch.stack(values))
    return model


def score(source: Any, rows: list[list[int]], **settings: Any) -> float:
    """Return the negative log likelihood per token, for a name, a folder or a model."""
    is_named = isinstance(source, str | Path)
    make: Any = QLLMEngine.from_pretrained if is_named else QLLMEngine.from_model
    asked = SamplingParams(temperature=0, prompt_logprobs=0)
    with make(source, conformance=False, **settings) as engine:
        handles = [engine.submit(ids, sampling=asked, max_tokens=1) for ids in rows]
        scored = [handle.result(600).prompt_logprobs for handle in handles]
    return -math.fsum(x.chosen for one in scored for x in one[1:]) / tokens_of(rows)


def tokens_of(rows: list[list[int]]) -> int:
    """Return the number of scored tokens: every one but a row's first."""
    return sum(len(ids) - 1 for ids in rows)


def reference(rows: list[list[int]]) -> float:
    """Return the same for the model's own forward in fp32."""
    model, total = load("talk", dtype="float32").model, 0.0
    with torch.inference_mode():
        for ids in rows:
            logits = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
            total -= float(logits.gather(1, torch.tensor(ids[1:]).unsqueeze(1)).sum())
    return total / tokens_of(rows)


@dataclass(frozen=True, slots=True)
class Say:
    """Rows of the table, and the nats behind them."""

    table: Table
    found: dict[str, float]
    exact: float
    """Nats per token of the reference."""

    def row(self, form: str, nats_each: float) -> None:
        """Add the score of a format, over fp32."""
        self.found[form] = nats_each
        over = math.exp(nats_each - self.exact)
        self.table.add(f"perplexity, {form}; over fp32", f"{math.exp(nats_each):.4f}; {over:.4f}")

    def equal(self, form: str, of_values: float) -> None:
        """Add whether the bf16 model with the format's values has the same score."""
        same = of_values == self.found[form]
        self.table.add(f"  {form} scores what its values in bf16 score", str(same), "equal", same)

    def rounded(self, form: str, nats_each: float) -> None:
        """Add the score with activations in int8, over the score without."""
        self.found[f"{form} on int8 rows"] = nats_each
        over = f"{math.exp(nats_each):.4f}; {math.exp(nats_each - self.found[form]):.4f}"
        self.table.add(f"  {form} on int8 rows; over itself", over)


def main() -> None:
    """Score every format on the same text."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    (ROOT / ".benchmarks").mkdir(exist_ok=True)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--out", type=result_file)
    args = parser.parse_args()
    recipe, table = train_tiny.Recipe(), Table()
    _, test = train_tiny.split(train_tiny.collect(), recipe.held_out, recipe.seed)
    tokenizer = load("talk").tokenizer
    rows = windows(tokenizer, list(test.texts()), args.tokens)
    exact = reference(rows)
    table.add("perplexity, `model.forward` in fp32", f"{math.exp(exact):.4f}")
    found = {"float32": exact}
    say = Say(table, found, exact)
    for how in FORMATS:
        say.row(how, score("talk", rows, expert_weights=how))
        if how in PACKED:
            say.equal(how, score(expanded(how), rows))
    say.rounded("int4", score("talk", rows, expert_weights="int4", activations="int8"))
    _, plain = locate("talk", weights=True, code=False)
    for form, (_, _, is_integer) in published_talk.FORMATS.items():
        with tempfile.TemporaryDirectory(dir=ROOT / ".benchmarks") as place:
            codes, values = published_talk.publish(plain, form, Path(place))
            say.row(form, score(codes, rows))
            say.equal(form, score(values, rows))
            if is_integer:
                say.rounded(form, score(codes, rows, activations="int8"))
    config = {"model": "talk", "window": WINDOW, "tokens": tokens_of(rows)}
    result = {"bench": "perplexity_talk", "machine": machine(), "config": config, "nats": found}
    table.finish(result, args.out)


if __name__ == "__main__":
    main()
