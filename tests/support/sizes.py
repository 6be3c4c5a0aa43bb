"""Sizes of KV that tests name, so that no result depends on a machine's memory."""

from typing import Any

SIZES: dict[str, Any] = {
    "max_kv_tokens": 65536,
    "prefix_cache_tokens": 16384,
    "prefix_states_gib": 2.0,
}
