"""Perplexity of the bundled model `tiny` per format of its expert weights, through our kernels.

The text is the held-out part of `scripts/train_tiny.py`: modules of the standard library that
training did not see, in windows of 256 tokens without earlier context. So the Python that collects
it should be the one of the training (see its README). The reference is the model's own forward. The
bench prints one JSON line; it times nothing.
"""

import argparse
import math
import sys
from collections.abc import Iterator
from typing import Any

import torch

from bench.common import ROOT, Line, machine, print_result, result_file, with_lines
from qllm.models.loader import load
from qllm.plan import Plan, Row
from qllm.runner.cpu import cpu_runner
from qllm.runner.runner import TorchRunner
from qllm.scheduler.compile import compile_program
from qllm.scheduler.program import START
from qllm.types import Grain, SamplingParams

sys.path.append(str(ROOT / "scripts"))
import train_tiny

WINDOW = 256
ROWS = 32
"""Number of windows that are scored together."""
FORMATS = ("auto", "int8", "int8-g64")
GREEDY = SamplingParams(temperature=0)


class Never:
    """A stop word that is never lowered."""

    word = 1 << 30
    stop_at_ns: int | None = None

    def now_ns(self) -> int:
        """Return 0; the time is unused."""
        return 0


def windows(tokenizer: Any, texts: list[str]) -> Iterator[list[int]]:
    """Yield ids of at most WINDOW tokens, the first one a beginning of text."""
    for text in texts:
        ids = train_tiny.encode(tokenizer, text)
        for start in range(0, len(ids), WINDOW - 1):
            yield [0, *ids[start : start + WINDOW - 1]]


def nats(runner: TorchRunner, rows: list[list[int]], frames: Iterator[int]) -> float:
    """Return the negative log likelihood of every token but the first, one position per step."""
    total = 0.0

    def take(request: int, num_tokens: int, logits_V: torch.Tensor) -> None:
        nonlocal total
        if num_tokens < len(rows[request]):
            scores = logits_V.float().log_softmax(-1)
            total -= float(scores[rows[request][num_tokens]])

    runner.on_logits = take
    for request, ids in enumerate(rows):
        runner.add(request, ids, GREEDY, len(ids), 2 * WINDOW)
    for at in range(max(map(len, rows)) - 1):
        live = [request for request, ids in enumerate(rows) if at < len(ids) - 1]
        program = compile_program(
            Plan(
                rows=tuple(Row(r, at, at + 1, 0, runner.shape.num_layers) for r in live),
                grain=Grain.STEP,
                stop_below=0,
            ),
            frame_id=next(frames),
            samples=[True] * len(live),
            shape=runner.shape,
            cuts=runner.cuts,
        )
        runner.accept(program)
        runner.run(program, START, Never())
        runner.finish(program)
    for request in range(len(rows)):
        runner.remove(request)
    return total


def score(texts: list[str], expert_weights: str | None) -> dict[str, Any]:
    """Return perplexity per token, and bits per byte; None scores `model.forward`."""
    loaded = load("tiny")
    cut = list(windows(loaded.tokenizer, texts))
    tokens, size = sum(len(ids) - 1 for ids in cut), sum(len(text.encode()) for text in texts)
    kernel, per_expert = "model.forward", 0
    if expert_weights is None:
        with torch.inference_mode():
            found = train_tiny.model_bits(loaded.model, loaded.tokenizer, texts, WINDOW)
        found *= math.log(2)
    else:
        runner = cpu_runner(loaded.model, max_segment_ms=math.inf, expert_weights=expert_weights)
        frames = iter(range(1 << 30))
        cut.sort(key=len)  # windows of similar length run together
        found = sum(nats(runner, cut[i : i + ROWS], frames) for i in range(0, len(cut), ROWS))
        kernel = runner.names["experts"]
        per_expert = next(
            bank.unit_bytes for bank in runner.backend.compute.banks if bank is not None
        )
    return {
        "kernel": kernel,
        "expert_bytes": per_expert,
        "tokens": tokens,
        "perplexity": round(math.exp(found / tokens), 4),
        "bits_per_byte": round(found / math.log(2) / size, 5),
    }


def lines_of(document: dict[str, Any]) -> list[Line]:
    """Return the rows of a result."""
    lines: list[Line] = []
    for name, found in document["formats"].items():
        text = f"{found['perplexity']:.3f} ({found['bits_per_byte']:.4f} bits per byte)"
        what = "`model.forward`" if name == "reference" else f'`expert_weights="{name}"`'
        size = found["expert_bytes"]
        lines.append(Line(f"{what}" + (f", {size:,} bytes per expert" if size else ""), text))
    return lines


def main() -> None:
    """Score every format on the same text."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two documents")
    parser.add_argument("--out", type=result_file)
    args = parser.parse_args()
    recipe = train_tiny.Recipe()
    _, test = train_tiny.split(train_tiny.collect(), recipe.held_out, recipe.seed)
    texts = list(test.texts())[: 2 if args.quick else None]
    formats: dict[str, Any] = {"reference": score(texts, None)}
    formats.update({name: score(texts, name) for name in FORMATS})
    config = {
        "model": "tiny",
        "window": WINDOW,
        "documents": len(texts),
        "bytes": sum(len(text.encode()) for text in texts),
    }
    document = {"bench": "perplexity", "machine": machine(), "config": config, "formats": formats}
    print_result(with_lines(document, lines_of(document)), args.out)


if __name__ == "__main__":
    main()
