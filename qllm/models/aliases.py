"""Short names of models and their hub ids. The id of a local model is empty."""

from collections.abc import Mapping

ALIASES: Mapping[str, str] = {
    "tiny": "",  # the folder qllm/models/tiny of this package
    "talk": "",  # a folder in the user's cache, written by `make talk`
    "mixtral": "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "qwen2-moe": "Qwen/Qwen1.5-MoE-A2.7B-Chat",
    "qwen3-moe": "Qwen/Qwen3-30B-A3B",
    "olmoe": "allenai/OLMoE-1B-7B-0924-Instruct",
    "gpt-oss": "openai/gpt-oss-20b",
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
    "granite-moe": "ibm-granite/granite-3.1-3b-a800m-instruct",
    "phi-moe": "microsoft/Phi-3.5-MoE-instruct",
}
