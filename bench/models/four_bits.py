"""Against llama.cpp: one GGUF file in Q4_0 of the shape of Qwen3-30B-A3B, some of its layers.

Both load the same file, of seeded noise, and compute with the same number of threads, in turn: the
one that is not asked waits. llama.cpp rounds activations to 8 bits, ours stay bf16.

    decode      one stream: our tokens per second over theirs
    prefill     a prompt of 512 tokens: the same

Needs the package gguf, and an environment with xllamacpp: `--llama VENV/bin/python`. A table, then
one JSON line.
"""

import argparse
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from bench.common import ROOT, Table, machine, paired, plain
from bench.models.checkpoint_30b import SEED, SHAPE, STEP
from qllm import QLLMEngine, SamplingParams

PROMPT, TOKENS = 512, 24
REACH = {"decode": 1.0, "prefill": 0.6}
BLOCK, BLOCK_BYTES = 32, 18
GREEDY = SamplingParams(temperature=0, ignore_eos=True)


class Writer:
    """Writes a file of noise."""

    def __init__(self, path: Path, num_layers: int) -> None:
        self._rng = np.random.Generator(np.random.PCG64DXSM(SEED))
        self._writer = writer = gguf.GGUFWriter(str(path), "qwen3moe")
        vocab = SHAPE["vocab_size"]
        writer.add_block_count(num_layers)
        writer.add_context_length(SHAPE["max_position_embeddings"])
        writer.add_embedding_length(SHAPE["hidden_size"])
        writer.add_feed_forward_length(SHAPE["intermediate_size"])
        writer.add_head_count(SHAPE["num_attention_heads"])
        writer.add_head_count_kv(SHAPE["num_key_value_heads"])
        writer.add_key_length(SHAPE["head_dim"])
        writer.add_value_length(SHAPE["head_dim"])
        writer.add_layer_norm_rms_eps(SHAPE["rms_norm_eps"])
        writer.add_rope_freq_base(SHAPE["rope_theta"])
        writer.add_expert_count(SHAPE["num_experts"])
        writer.add_expert_used_count(SHAPE["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(SHAPE["moe_intermediate_size"])
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        letters = [chr(33 + i) for i in range(94)]
        rest = (f"<{i}>" for i in range(vocab - 96))
        writer.add_token_list([*letters, "ab", *rest, "<|endoftext|>"])  # a tokenizer would add it
        writer.add_token_types([1] * vocab)
        writer.add_token_merges(["a b"])
        writer.add_eos_token_id(vocab - 1)

    def packed(self, name: str, *shape: int) -> None:
        """A weight in Q4_0, inputs last."""
        blocks = (*shape[:-1], shape[-1] // BLOCK)
        raw = self._rng.integers(0, 256, (*blocks, BLOCK_BYTES), dtype=np.uint8)
        scale = ((self._rng.random(blocks, dtype=np.float32) + 0.5) * STEP).astype(np.float16)
        raw[..., :2] = scale[..., None].view(np.uint8)
        kind = gguf.GGMLQuantizationType.Q4_0
        self._writer.add_tensor(name, raw.reshape(*shape[:-1], -1), raw_dtype=kind)

    def plain(self, name: str, values: np.ndarray) -> None:
        """A weight in fp32."""
        self._writer.add_tensor(name, values.astype(np.float32))

    def layer(self, index: int) -> None:
        """The tensors of a layer."""
        d, h, f = SHAPE["hidden_size"], SHAPE["head_dim"], SHAPE["moe_intermediate_size"]
        num, at = SHAPE["num_experts"], f"blk.{index}"
        queries, keys = SHAPE["num_attention_heads"] * h, SHAPE["num_key_value_heads"] * h
        for name, width in (
            ("attn_norm", d),
            ("ffn_norm", d),
            ("attn_q_norm", h),
            ("attn_k_norm", h),
        ):
            self.plain(f"{at}.{name}.weight", np.ones(width))
        for name, n in (("attn_q", queries), ("attn_k", keys), ("attn_v", keys)):
            self.packed(f"{at}.{name}.weight", n, d)
        self.packed(f"{at}.attn_output.weight", d, queries)
        gate = self._rng.standard_normal((num, d), np.float32) * 0.02
        self.plain(f"{at}.ffn_gate_inp.weight", gate)
        self.packed(f"{at}.ffn_gate_exps.weight", num, f, d)
        self.packed(f"{at}.ffn_up_exps.weight", num, f, d)
        self.packed(f"{at}.ffn_down_exps.weight", num, d, f)

    def whole(self, num_layers: int) -> None:
        """All of it."""
        d, vocab = SHAPE["hidden_size"], SHAPE["vocab_size"]
        self.packed("token_embd.weight", vocab, d)
        self.plain("output_norm.weight", np.ones(d))
        self.packed("output.weight", vocab, d)
        for index in range(num_layers):
            self.layer(index)
        self._writer.write_header_to_file()
        self._writer.write_kv_data_to_file()
        self._writer.write_tensors_to_file()
        self._writer.close()


class Llama:
    """llama.cpp in a process of its own."""

    def __init__(self, python: str, file: Path, threads: int) -> None:
        command = [python, str(ROOT / "bench/models/llama_rate.py"), str(file), str(threads)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.about = self._next()

    def _next(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise SystemExit("llama.cpp ended; run bench/models/llama_rate.py to see why")

    def rates(self, prompt: list[int], tokens: int) -> tuple[float, float]:
        """Seconds of a prompt, and of a token after the first."""
        assert self._process.stdin is not None
        print(
            json.dumps({"prompt": prompt, "tokens": tokens}), file=self._process.stdin, flush=True
        )
        found = self._next()
        return found["prompt_s"], found["token_s"]

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


def our_rates(engine: QLLMEngine, prompt: list[int], tokens: int) -> tuple[float, float]:
    """Seconds of a prompt, and of a token after the first."""
    start = time.perf_counter()
    handle = engine.submit(prompt, "LS", tokens, sampling=GREEDY)
    times = [time.perf_counter() for _ in handle]
    return times[0] - start, (times[-1] - times[0]) / (len(times) - 1)


def main() -> None:
    """Write the file, and measure both in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--llama", required=True, help="python of an environment with xllamacpp")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    table, rng = Table(), np.random.default_rng(SEED)
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "noise.gguf"
        Writer(file, args.layers).whole(args.layers)
        settings = {"threads": args.threads, "max_kv_tokens": 4096, "prefix_cache": False}
        with QLLMEngine.from_pretrained(file, run_in="thread", **settings) as engine:
            weights, kernels = engine.kernels["weights"], engine.kernels["experts"]
            llama = Llama(args.llama, file, args.threads)
            found: dict[str, list[float]] = {"decode": [], "prefill": [], "ours": [], "theirs": []}
            for at in range(args.rounds + 1):  # the first one warms up
                prompt = [int(i) for i in rng.integers(8, SHAPE["vocab_size"] - 8, PROMPT)]
                ours, theirs = our_rates(engine, prompt, TOKENS), llama.rates(prompt, TOKENS)
                if at:
                    found["prefill"].append(theirs[0] / ours[0])
                    found["decode"].append(theirs[1] / ours[1])
                    found["ours"].append(ours[1] * 1e3)
                    found["theirs"].append(theirs[1] * 1e3)
            about = llama.about
            llama.close()
    rows = {name: paired(values) for name, values in found.items()}
    for name, least in REACH.items():
        reached = rows[name].value >= least
        table.add(f"{name}, ours over llama.cpp's rate", rows[name].text(), f">= {least}", reached)
    table.add(
        "ms per token, ours and llama.cpp's", f"{rows['ours'].text(1)}, {rows['theirs'].text(1)}"
    )
    config = {"threads": args.threads, "layers": args.layers, "rounds": args.rounds, "seed": SEED}
    config |= {"format": "Q4_0", "weights": weights, "kernels": kernels, "llama": about}
    result = {"bench": "four_bits", "machine": machine(), "config": config, "rows": plain(rows)}
    table.finish(result, args.out)


if __name__ == "__main__":
    main()
