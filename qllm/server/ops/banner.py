"""The log lines at start: the model, its kernels, and the allowed callers."""

import ipaddress
from collections.abc import Mapping
from typing import Any

from qllm.llm import QLLMEngine
from qllm.server.config import ENGINE_ROLES, ServerConfig
from qllm.server.tools.choose import told
from qllm.types import Priority

UNITS = ("B", "kB", "MB", "GB", "TB")


def banner(engine: QLLMEngine, config: ServerConfig, load_s: float) -> list[str]:
    """Return the lines that describe a loaded engine."""
    settings, kernels = engine.config, engine.kernels
    drivers = {name: engine.drivers.count(name) for name in dict.fromkeys(engine.drivers)}
    layers = ", ".join(f"{count} {name}" for name, count in drivers.items())
    targets = settings.ls_slo or "no latency targets"
    classes = " and ".join(Priority.__members__)
    has_http = config.role not in ENGINE_ROLES
    if not has_http:
        taken = f"from front ends at {config.listen}"
    else:
        stored = config.state_dir or "none, give --state-dir"
        taken = f"at most {config.max_ls} in flight ({config.ls_overflow}); batches: {stored}"
    stats = engine.stats()
    size = shown_bytes(stats.get("weight_bytes", 0))
    no_prefix = stats.get("prefix_cache", {}).get("off")
    kept = f"{settings.kept_tokens:,} tokens"
    return [
        f"model    {engine.model_name}: {size} of weights "
        f"({kernels.get('weights', 'as they were stored')}), layers: {layers}; loaded in "
        f"{load_s:.1f} s",
        *([f"depth    {depth_line(engine)}"] if settings.depth is not None else []),
        f"kernels  experts: {kernels.get('experts')}; attention: {kernels.get('attention')}; "
        f"head: {kernels.get('head')}",
        f"parts    known {kernels.get('parts')}",
        f"KV       {settings.pool_tokens:,} tokens in blocks of {settings.block_size}, "
        f"{settings.max_num_seqs} requests per step; prefix cache: "
        f"{f'off, because {no_prefix}' if no_prefix else kept}",
        f"memory   {memory_line(engine, stats)}",
        *([f"ranks    {ranks_line(stats)}"] if stats.get("ranks") else []),
        *([f"experts  {experts_line(stats)}"] if stats.get("experts") else []),
        f"policy   {config.policy}, preempts at: {settings.preempt_at}, longest segment "
        f"{settings.max_segment_ms:g} ms; it stops {kernels.get('stops', 'between stages')}",
        *(
            [
                f"drafts   {settings.draft}, at most {settings.draft_tokens} tokens per step"
                f"{draft_model(stats)}"
            ]
            * settings.has_drafts
        ),
        f"classes  {classes}; LS: {targets}, {taken}",
        *(
            [f"tools    calls and reasoning: {told(engine.tokenizer, config.tool_calls)}"]
            * has_http
        ),
    ]


def ranks_line(stats: Mapping[str, Any]) -> str:
    """Return the number of ranks, and the bytes of weights, the process and the host of each."""
    each = [f"{shown_bytes(r['weight_bytes'])} (pid {r['pid']}{_on(r)})" for r in stats["ranks"]]
    return f"{len(each)} processes with weights of {', '.join(each)}"


def _on(rank: Mapping[str, Any]) -> str:
    return f" on {rank['host']}" if "host" in rank else ""


def experts_line(stats: Mapping[str, Any]) -> str:
    """Return how many experts have room where they compute, and the place of all."""
    told = stats["experts"]
    return (
        f"room for {told['slots']:,} of {told['experts']:,} at a time "
        f"({shown_bytes(told['slot_bytes'])}); all are in {told['file']} "
        f"({shown_bytes(told['file_bytes'])})"
    )


def depth_line(engine: QLLMEngine) -> str:
    """Return how many layers a cut model has, and what this means for its answers."""
    depth, whole = engine.config.depth, engine.client.info.whole_layers
    return f"the first {depth} of {whole} layers; answers differ from those of the whole model"


def draft_model(stats: Mapping[str, Any]) -> str:
    """Return what the draft model takes, for the line of drafts; nothing without one."""
    told = stats.get("drafts", {}).get("model")
    if told is None:
        return ""
    return (
        f"; draft model: {shown_bytes(told['weight_bytes'])} of weights, "
        f"KV at most {shown_bytes(told['max_kv_tokens'] * told['token_bytes'])}"
    )


def memory_line(engine: QLLMEngine, stats: Mapping[str, Any]) -> str:
    """Return a line with the memory that an engine's KV may take, and the sizes that it chose."""
    told = stats["memory"]
    limits = f"KV at most {shown_bytes(told['kv_bytes'])}"
    if told["kept_bytes"]:
        limits += f", cached KV {shown_bytes(told['kept_bytes'])}"
    of = (
        f"of the budget of {shown_bytes(told['budget_bytes'])} (memory)"
        if told["budget_bytes"]
        else f"{shown_bytes(told['free_bytes'])} were free after loading (see --memory)"
    )
    chosen = ", ".join(engine.client.info.chosen) or "no size"
    return f"{limits}; {of}; chosen by the engine: {chosen}"


def shown_bytes(count: float) -> str:
    """Return a number of bytes as text with three digits and a unit."""
    for unit in UNITS[:-1]:
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} {UNITS[-1]}"


def warnings(config: ServerConfig, num_keys: int) -> list[str]:
    """Return warnings if other hosts can use the server, or read its traffic."""
    if is_loopback(config.host):
        return []
    found = []
    if not num_keys:
        found.append(
            f"everybody who reaches {config.host} may use this server: give --api-key-file, or "
            "--host 127.0.0.1"
        )
    elif config.ssl_certfile is None:
        found.append(
            f"API keys come to {config.host} in clear text: give --ssl-certfile, or put a proxy "
            "that speaks TLS in front"
        )
    return found


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
