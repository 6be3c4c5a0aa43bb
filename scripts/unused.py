"""Fail if a name of the product is unused in it, its tests, benches and scripts.

Names that other libraries call are allowed, each with its reason.
"""

import sys
import tomllib
from pathlib import Path

from vulture import Vulture

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("qllm", "policies", "tests", "bench", "scripts")
DECORATORS = ["@*router.*", "@*validator*", "@clean"]
"""Decorators of functions that FastAPI, pydantic and the command line call."""
ALLOWED = {
    "Python": ["__dir__", "__getattr__"],
    "FastAPI": ["middleware_stack"],
    "Ray Serve": ["check_health", "record_*"],
    "ast": ["visit_*", "returns"],
    "tokenizers": ["normalizer"],
    "the messages of the engine's process": ["_op_*"],
    "arguments of a policy's and a tokenizer's interface": [
        "need_blocks",
        "skip_special_tokens",
        "clean_up_tokenization_spaces",
    ],
    "fields that users read": [
        "longest_stall_ms",
        "p90",
        "be_stall_ms",
        "by_frame_id",
        "found_tokens",
    ],
    "fields of requests and files": [
        "model_config",
        "qllm_costs",
        "completion_window",
        "output_expires_after",
        "include_obfuscation",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "moderation",
        "response_format",
        "modalities",
        "audio",
        "function_call",
        "web_search_options",
        "parallel_tool_calls",
        "prediction",
        "description",
        "strict",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "reasoning_effort",
        "verbosity",
        "annotations",
        "phase",
        "encrypted_content",
        "generate_summary",
        "truncation",
        "max_tool_calls",
        "context_management",
        "cache_control",
        "citations",
        "eager_input_streaming",
        "input_examples",
        "display",
    ],
    "other libraries": [
        "row_factory",
        "pre_tokenizer",
        "decoder",
        "blockDim?",
        "gridDim?",
        "kernelParams",
        "settings_customise_sources",
        "settings_cls",
        "_load_env_vars",
        "keep_alive",
        "eof_received",
        "formatTime",
        "datefmt",
    ],
    "transformers": [
        "model_max_length",
        "is_initialized",
        "output_router_logits",
        "router_aux_loss_coef",
        "quant_method",
        "_Kept",
        "requires_calibration",
        "_process_model_before_weight_loading",
        "_is_hf_initialized",
        "is_trainable",
        "is_serializable",
        "get_mask_sizes",
        "get_seq_length",
        "get_linear_cache",
        "set_linear_cache",
    ],
    "types in quotes": ["Axes"],
    "native code": ["tasks_left", "look_ns", "num_changed"],
    "values of a setting": ["ORDER"],
}


def main() -> None:
    """Print unused names; the exit status is 1 if there is any."""
    names = [name for group in ALLOWED.values() for name in group]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    points = project["entry-points"].values()
    names += [path.partition(":")[2] for group in points for path in group.values()]
    vulture = Vulture(ignore_names=names, ignore_decorators=DECORATORS)
    vulture.scavenge([str(ROOT / folder) for folder in FOLDERS])
    product = [ROOT / "qllm", ROOT / "policies"]
    found = [
        item.get_report()
        for item in vulture.get_unused_code(min_confidence=60)
        if any(folder in Path(item.filename).resolve().parents for folder in product)
    ]
    print("\n".join(found) or "Everything is used.")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
