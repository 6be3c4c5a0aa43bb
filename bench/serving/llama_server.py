"""A server of a Qwen3-MoE folder with llama.cpp, in the environment of that peer.

    python llama_server.py FOLDER PORT THREADS

On first use it writes the weights as GGUF (bfloat16, the same values) next to its environment.
"""

import json
import struct
import sys
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np

NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
EXPERTS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}
SEATS, CONTEXT = 16, 65536


class Weights:
    """Tensors of a safetensors file, as float32."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            size = struct.unpack("<Q", file.read(8))[0]
            self._about = json.loads(file.read(size))
        self._base = 8 + size
        self._bytes = np.memmap(path, dtype=np.uint8, mode="r")

    def __call__(self, name: str) -> np.ndarray:
        """Return one tensor."""
        about = self._about[name]
        lo, hi = (self._base + at for at in about["data_offsets"])
        wide = np.array(self._bytes[lo:hi]).view(np.uint16).astype(np.uint32) << 16
        return wide.view(np.float32).reshape(about["shape"])


def _header(writer: Any, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_expert_count(_experts(config))
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)


def _experts(config: dict[str, Any]) -> int:
    return int(config.get("num_experts") or config["num_local_experts"])


def _tokenizer(writer: Any, folder: Path, config: dict[str, Any]) -> None:
    about = json.loads((folder / "tokenizer.json").read_text())
    tokens = sorted(about["model"]["vocab"], key=about["model"]["vocab"].__getitem__)
    special = {token["id"] for token in about["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i in special else 1 for i in range(len(tokens))])
    merges = about["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_add_bos_token(False)


def write_gguf(folder: Path, out: Path) -> None:
    """Convert the folder's weights."""
    config = json.loads((folder / "config.json").read_text())
    weights = Weights(folder / "model.safetensors")
    writer = gguf.GGUFWriter(str(out), "qwen3moe")
    writer.add_name("moe")
    _header(writer, config)
    _tokenizer(writer, folder, config)

    def add(name: str, values: np.ndarray, wide: bool = False) -> None:
        if wide or values.ndim == 1:
            writer.add_tensor(name, values.astype(np.float32))
        else:
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", weights("model.embed_tokens.weight"))
    add("output_norm.weight", weights("model.norm.weight"))
    if not config.get("tie_word_embeddings"):
        add("output.weight", weights("lm_head.weight"))
    for i in range(config["num_hidden_layers"]):
        theirs, ours = f"model.layers.{i}.", f"blk.{i}."
        for name, short in NAMES.items():
            add(f"{ours}{short}.weight", weights(f"{theirs}{name}.weight"))
        add(f"{ours}ffn_gate_inp.weight", weights(f"{theirs}mlp.gate.weight"), wide=True)
        for name, short in EXPERTS.items():
            parts = [
                weights(f"{theirs}mlp.experts.{e}.{name}.weight") for e in range(_experts(config))
            ]
            add(f"{ours}{short}.weight", np.stack(parts))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_of(folder: Path) -> Path:
    """Return the folder's weights as GGUF; write the file if it is missing."""
    file = Path(sys.prefix) / f"{folder.name}.gguf"
    if not file.exists():
        part = file.with_suffix(".part")
        write_gguf(folder, part)
        part.rename(file)
    return file


def main() -> None:
    """Serve until killed."""
    import xllamacpp

    folder, port, threads = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    file = gguf_of(folder)
    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.model_alias = {"moe"}
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.n_parallel = SEATS
    params.n_ctx = CONTEXT
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main()
