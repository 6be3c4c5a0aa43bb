"""The rows of `qllm doctor` about a model's experts, which are told before they are loaded."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from qllm.types import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from qllm.config import EngineConfig
    from qllm.measure.fit import Fit

PROMPT = 1_024
"""Tokens of the prompt whose wait is told."""


def before_load(
    model: str, config: "EngineConfig", folder: str | None, **how: Any
) -> tuple[list[tuple[str, str]], bool]:
    """Return rows about the experts of a model, and True if an engine can load it.

    Args:
        model: Name of the model.
        config: Settings of the engine.
        folder: Folder for a file of experts, whose disk is measured; None measures none.
        how: Further arguments of the load.

    Raises:
        ConfigError: The experts cannot be in a file, or the folder cannot be used.
        ModelError: The model cannot be loaded.
    """
    from qllm.measure.fit import fit_of

    fit = fit_of(model, config, **how)
    if not fit.layers:
        return [("its experts", "none")], folder is None
    rows = [
        ("its experts", _experts(fit)),
        ("the rest of its weights", f"{fit.rest_bytes:,} bytes"),
        ("memory beside them", _memory(fit)),
        ("what fits", _what_fits(fit)),
    ]
    if folder is not None:
        rows += _disk(fit, Path(folder))
    has_all = fit.num_slots == fit.num_experts
    return rows, has_all or (fit.given_bytes is not None and config.expert_dir is not None)


def _experts(fit: "Fit") -> str:
    per_layer = {layer.num_experts for layer in fit.layers}
    each = " or ".join(f"{num:,}" for num in sorted(per_layer))
    return (
        f"{fit.expert_bytes:,} bytes: {fit.num_experts:,} in {len(fit.layers)} layers, at most "
        f"{fit.slot_bytes:,} bytes each; a token uses {fit.top_k} of {each} in a layer"
    )


def _memory(fit: "Fit") -> str:
    return (
        f"{fit.free_bytes:,} bytes, of which KV has {fit.kv_bytes:,} "
        f"({fit.token_bytes:,} a token; see max_kv_tokens)"
    )


def _what_fits(fit: "Fit") -> str:
    if fit.num_slots == fit.num_experts:
        return "all experts; max_expert_bytes and expert_dir are not needed"
    how = f"{fit.num_slots:,} of {fit.num_experts:,} experts"
    if fit.budget < fit.least:
        return (
            f"too little: {how}, and an engine needs max_expert_bytes of at least {fit.least:,}, "
            f"and has {max(0, fit.budget):,}"
        )
    if fit.given_bytes is not None:
        return f"{how}, by max_expert_bytes={fit.given_bytes}"
    return f"{how}: --max-expert-bytes {fit.budget} --expert-dir FOLDER"


def _disk(fit: "Fit", folder: Path) -> list[tuple[str, str]]:
    from qllm.measure.disk_rate import disk_rate

    rate = disk_rate(folder, fit.slot_bytes)
    how = "around the page cache" if rate.is_direct else "through the page cache, so too fast"
    rows = [("its disk", f"{rate.bytes_per_s / 1e9:.3g} GB/s of experts in {folder}, {how}")]
    if fit.num_slots == fit.num_experts or fit.budget < fit.least:
        return rows
    for what, num_bytes, bound in (
        ("a decode token waits", fit.decode_bytes, ""),
        (f"a prompt of {PROMPT:,} waits", fit.prompt_bytes(PROMPT), "at most "),
    ):
        wait_ms = num_bytes / rate.bytes_per_s * NS_PER_S / NS_PER_MS
        said = f"{bound}{wait_ms:,.3g} ms for {num_bytes:,.0f} bytes, if a layer's experts are"
        rows.append((what, f"{said} equally likely"))
    return rows
