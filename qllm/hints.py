"""Settings of vLLM, llama.cpp, Ollama and transformers, and their equivalents in this package."""

from collections.abc import Iterable
from difflib import get_close_matches

HINTS = {
    # vLLM
    "max_model_len": "the model says how long a request may be; max_kv_tokens bounds KV",
    "gpu_memory_utilization": "memory bounds the engine in bytes, and max_kv_tokens bounds KV",
    "kv_cache_memory_bytes": "memory bounds the engine in bytes, and max_kv_tokens bounds KV",
    "num_gpu_blocks_override": "max_kv_tokens bounds KV",
    "max_num_batched_tokens": "set max_step_tokens",
    "enable_chunked_prefill": "leave it out: a pass stops anywhere; max_segment_ms says when",
    "enable_prefix_caching": "set prefix_cache",
    "no_enable_prefix_caching": "set prefix_cache to false",
    "swap_space": "set swap_kv_tokens",
    "scheduling_policy": "set policy",
    "tensor_parallel_size": "set tp",
    "enable_expert_parallel": "set tp: each rank has whole experts",
    "cpu_offload_gb": "set max_expert_bytes, and on a CPU expert_dir",
    "pipeline_parallel_size": "one engine has one device; engine_address takes several engines",
    "data_parallel_size": "one engine has one device; engine_address takes several engines",
    "quantization": "a checkpoint says it itself; expert_weights rounds a bf16 one",
    "kv_cache_dtype": "leave it out: KV has the model's dtype",
    "enforce_eager": "leave it out",
    "allowed_origins": "set cors_origins",
    "disable_log_requests": "set access_log to false",
    "enable_log_requests": "set access_log",
    "uvicorn_log_level": "log_format and access_log say what is logged",
    "tokenizer": "the folder of the model has it",
    "chat_template": "the folder of the model has it",
    "revision": "download that revision, and give its folder as model",
    "download_dir": "set HF_HOME in the environment",
    "tool_call_parser": "leave it out: calls are read as the model's template writes them",
    "enable_auto_tool_choice": "leave it out: tools are always read",
    "reasoning_parser": "leave it out: reasoning is always read",
    "enable_lora": "adapters are not served; merge them into the weights",
    "speculative_config": "set draft to auto, mtp, or model:PATH",
    "speculative_model": "set draft to auto, mtp, or model:PATH",
    "num_speculative_tokens": "set draft_tokens",
    "ngram_prompt_lookup_max": "set draft to lookup",
    # transformers
    "load_in_4bit": "set expert_weights to int4",
    "load_in_8bit": "set expert_weights to int8",
    "quantization_config": "a checkpoint says it itself; expert_weights rounds a bf16 one",
    "torch_dtype": "set dtype",
    "device_map": "set device",
    "attn_implementation": "set kernels",
    "prompt_lookup_num_tokens": "set draft to lookup, and draft_tokens",
    "assistant_model": "set draft to auto, mtp, or model:PATH",
    "max_length": "set default_max_tokens",
    "max_new_tokens": "set default_max_tokens",
    # llama.cpp and Ollama
    "c": "the model says how long a request may be; max_kv_tokens bounds KV",
    "ctx_size": "the model says how long a request may be; max_kv_tokens bounds KV",
    "n_ctx": "the model says how long a request may be; max_kv_tokens bounds KV",
    "num_ctx": "the model says how long a request may be; max_kv_tokens bounds KV",
    "m": "the model is the first argument, without a flag",
    "hf_repo": "the hub id is the first argument, without a flag",
    "ngl": "set device",
    "n_gpu_layers": "set device",
    "num_gpu": "set device",
    "t": "set threads",
    "num_thread": "set threads",
    "np": "set max_num_seqs",
    "parallel": "set max_num_seqs",
    "num_parallel": "set max_num_seqs",
    "b": "set max_step_tokens",
    "batch_size": "set max_step_tokens",
    "ubatch_size": "set max_step_tokens",
    "n": "set default_max_tokens",
    "n_predict": "set default_max_tokens",
    "num_predict": "set default_max_tokens",
    "flash_attn": "leave it out",
    "cont_batching": "leave it out: requests always share steps",
    "model_draft": "set draft to auto, mtp, or model:PATH",
    "draft_max": "set draft_tokens",
    "slot_save_path": "set kv_dir",
    "cache_reuse": "set prefix_cache",
    "cache_type_k": "leave it out: KV has the model's dtype",
    "cache_type_v": "leave it out: KV has the model's dtype",
    "alias": "set served_model_name",
    "timeout": "set request_timeout_s",
    "jinja": "leave it out: the model's template is always used",
    "keep_alive": "leave it out: the model stays loaded",
}
"""Advice by the name of a setting, with underscores."""


def hint_of(name: str, known: Iterable[str]) -> str:
    """Return advice in brackets for an unknown setting; empty without advice.

    Args:
        name: Name of an unknown setting or flag.
        known: Names of all settings. A similar name is proposed.
    """
    plain = name.lstrip("-").replace("-", "_").lower()
    if plain in HINTS:
        return f" ({HINTS[plain]})"
    close = get_close_matches(plain, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""
