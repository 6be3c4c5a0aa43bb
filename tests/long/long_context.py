"""One context of 100,000 tokens on a model of two layers: positions, KV, sampling, grammar, SSE.

    python -m tests.long.long_context [--tokens 100000]

The answers over HTTP are compared with others that have to be equal:

- positions and KV: the first token with that of transformers' own forward pass in fp32; the whole
  answer with one whose KV came from the cache, and with one whose prompt grew in turns of sessions
- preemption: LS requests stop the pass of the long prompt; its answer stays the same
- sampling: the same seed gives the same tokens, streamed or not, and another seed others
- grammar: an answer that has to fit a schema does
- SSE: the pieces of a stream are the whole answer; its usage counts every token

Anything else ends the program with exit status 1. The last line of stdout is one JSON document.
"""

import argparse
import json
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np

from bench.common import Table, machine, plain
from bench.serving.qllm_serve import serving
from qllm.measure.random_moe import SIZES, train_tokenizer

TOKENS, ANSWER, TURNS = 100_000, 24, 8
LEAST_CHECKED_GAP = 0.2
"""Least distance of the two largest logits at which fp32 and our kernels have to choose alike."""
SHAPE = SIZES["1m"] | {"num_hidden_layers": 2, "head_dim": 32}
"""A head of 32 is the least that our kernels run, and only then is KV cached."""
SCHEMA = {
    "type": "object",
    "properties": {"found": {"type": "boolean"}, "place": {"type": "integer"}},
    "required": ["found", "place"],
    "additionalProperties": False,
}


def make_model(folder: Path, positions: int) -> Any:
    """Write a model of two layers in fp32 with a tokenizer; return it."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer = train_tokenizer(SHAPE["vocab_size"])
    tokenizer.model_max_length = positions
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    make: Any = Qwen3MoeConfig
    config = make(
        **{**SHAPE, "vocab_size": len(tokenizer)},
        intermediate_size=128,
        max_position_embeddings=positions,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        norm_topk_prob=True,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        dtype="bfloat16",
    )
    model: Any = Qwen3MoeForCausalLM(config)
    for ends in (model.get_input_embeddings(), model.get_output_embeddings()):
        torch.nn.init.normal_(ends.weight, std=1.0)  # far apart, so that no rounding chooses
    model = model.to(torch.bfloat16)
    model.save_pretrained(folder)
    return model.float().eval()


def first_token(model: Any, ids: list[int]) -> tuple[int, float]:
    """Return transformers' next token after a prompt, and the distance to the second one."""
    import torch

    with torch.inference_mode():
        logits = model(torch.tensor([ids]), logits_to_keep=1).logits[0, -1]
    top = logits.topk(2)
    return int(top.indices[0]), float(top.values[0] - top.values[1])


class Answer(NamedTuple):
    """An answer, and what the server counted."""

    token_ids: tuple[int, ...]
    text: str
    usage: dict[str, Any]


class Client:
    """Requests to one server.

    Args:
        url: Address of the server.
    """

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=3600)

    def ask(self, ids: list[int], **more: Any) -> Answer:
        """Ask without streaming."""
        answer = self._http.post("/v1/completions", json=self._body(ids, more))
        answer.raise_for_status()
        found = answer.json()
        (choice,) = found["choices"]
        return Answer(tuple(choice["token_ids"]), choice["text"], found["usage"])

    def stream(self, ids: list[int], **more: Any) -> Answer:
        """Ask with a stream of server-sent events."""
        tokens, text, usage = list[int](), "", dict[str, Any]()
        for event in self._events(self._body(ids, more) | STREAM):
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                tokens += choice.get("token_ids") or []
                text += choice["text"]
        return Answer(tuple(tokens), text, usage)

    def _events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with self._http.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                data = line.removeprefix("data:").strip()
                if data.startswith("{"):
                    yield json.loads(data)

    def _body(self, ids: list[int], more: dict[str, Any]) -> dict[str, Any]:
        fixed = {"prompt": ids, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
        return fixed | {"return_token_ids": True} | more

    def forget(self) -> None:
        """Delete the KV of earlier prompts."""
        self._http.post("/reset_prefix_cache").raise_for_status()


STREAM = {"stream": True, "stream_options": {"include_usage": True}}


def beside_ls(client: Client, ids: list[int]) -> tuple[Answer, int]:
    """Answer a BE prompt while LS requests arrive; return the answer and how many came."""
    over, num = threading.Event(), 0

    def disturb() -> None:
        nonlocal num
        while not over.wait(0.2):
            client.ask(ids[:100], max_tokens=2, priority=0)
            num += 1

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        return client.ask(ids, priority=10), num
    finally:
        over.set()
        thread.join()


def in_turns(client: Client, ids: list[int]) -> Answer:
    """Answer a prompt that grows: every turn sends all earlier tokens and new ones."""
    for turn in range(1, TURNS):
        client.ask(ids[: len(ids) * turn // TURNS], max_tokens=1)
    return client.ask(ids)


def check(client: Client, model: Any, ids: list[int], table: Table) -> None:
    """Ask in every way, and add a line for each."""

    def add(what: str, found: Any, ok: bool) -> None:
        table.add(what, str(found), "yes", ok)

    cold, warm = client.ask(ids), client.ask(ids)
    token, gap = first_token(model, ids)
    found = f"{token} and {cold.token_ids[0]}, the next logit {gap:.3f} below"
    is_clear = gap >= LEAST_CHECKED_GAP
    add("the first token is that of transformers", found, is_clear and token == cold.token_ids[0])
    cached = warm.usage["prompt_tokens_details"]["cached_tokens"]
    same = warm.token_ids == cold.token_ids
    add("KV from the cache: the same tokens", f"{cached} found", same and cached > 0.99 * len(ids))
    client.forget()
    same = in_turns(client, ids).token_ids == cold.token_ids
    add(f"grown in {TURNS} turns: the same tokens", same, same)
    client.forget()
    parked, num = beside_ls(client, ids)
    same = parked.token_ids == cold.token_ids
    add("stopped by LS requests: the same tokens", f"{num} requests", same and num > 0)
    sampled = {"temperature": 1.0, "seed": 7}
    whole, streamed = client.ask(ids, **sampled), client.stream(ids, **sampled)
    other = client.ask(ids, **sampled | {"seed": 8})
    same = whole.token_ids == streamed.token_ids != other.token_ids
    add("sampling: a seed repeats its tokens, another has others", same, same)
    counts = streamed.usage["prompt_tokens"], streamed.usage["completion_tokens"]
    same = whole.text == streamed.text and counts == (len(ids), ANSWER)
    add("SSE: the pieces are the whole answer, and usage counts it", counts, same)
    held = client.stream(
        ids, max_tokens=200, temperature=1.0, seed=1, ignore_eos=False,
        structured_outputs={"json": SCHEMA},
    )  # fmt: skip
    add("grammar: the answer fits its schema", held.text[:60], fits(held.text))


def fits(text: str) -> bool:
    """Return True if a text fits `SCHEMA`."""
    import jsonschema_rs

    try:
        return bool(jsonschema_rs.is_valid(SCHEMA, json.loads(text)))
    except ValueError:
        return False


def main() -> int:
    """Run every check; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    table, positions = Table(), 1 << (args.tokens + 1024).bit_length()
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(prefix="qllm-long-") as folder:
        model = make_model(Path(folder), positions)
        ids = [int(i) for i in rng.integers(8, model.config.vocab_size, args.tokens)]
        flags = [f"--set=max_kv_tokens={2 * positions}", f"--set=prefix_cache_tokens={positions}"]
        flags += ["--set=exactness=batch-invariant", f"--threads={args.threads}"]
        with serving(folder, *flags) as server:
            check(Client(server.url), model, ids, table)
    result = {"bench": "long_context", "machine": machine(), "tokens": args.tokens}
    table.finish(plain(result), None)
    return 1 if table.missed else 0


if __name__ == "__main__":
    sys.exit(main())
