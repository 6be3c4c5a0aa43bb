"""The command `qllm doctor`: abilities of this machine and this installation."""

import os
import platform
import sys
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qllm.cli.app import (
    Depth,
    ExpertBytes,
    ExpertDir,
    Memory,
    app,
    clean,
    print_table,
    quiet,
    split_settings,
)
from qllm.cli.fits import before_load
from qllm.types import NS_PER_MS

if TYPE_CHECKING:
    from qllm.config import EngineConfig

LIBRARIES = ("torch", "transformers", "accelerate", "safetensors", "pydantic", "numpy")
DEFAULT_POLICY = "qllm2"
OF_SIZES = (
    "depth", "memory", "max_num_seqs", "max_kv_tokens", "block_size", "prefix_cache",
    "prefix_cache_tokens", "prefix_states_gib", "swap_kv_tokens", "expert_weights", "kernels", "tp",
    "tp_hosts", "tp_secret_file", "rank_deadline_s", "max_expert_bytes", "expert_dir",
    "activations",
)  # fmt: skip
"""Settings on which the sizes of an engine depend."""
OF_REQUEST = 2048
"""Tokens of a request, to tell how many requests KV has room for."""
GIB = 1 << 30
OPTIONAL = ("fastapi", "uvicorn", "matplotlib", "aiohttp", "cupy-cuda13x", "triton", "nixl")


@app.command()
@clean
def doctor(
    fingerprints: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Instead: the parts of a model's layers, their digests, and what runs them.",
        ),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option(help="Run modelling code that comes with MODEL.")
    ] = False,
    model: Annotated[
        str, typer.Option(help="Alias, folder or hub id of the model whose sizes are told.")
    ] = "tiny",
    depth: Depth = None,
    memory: Memory = None,
    max_expert_bytes: ExpertBytes = None,
    expert_dir: ExpertDir = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="NAME=VALUE: of the engine, or policy.NAME of the policy; says which bounds hold.",
        ),
    ] = None,
) -> None:
    """Report what is installed, which kernels compute, and what is missing and why.

    The last rows are those of a model that is loaded with the settings. The small model of this
    package is loaded by default. With --memory or --expert-dir, rows before them say how many of
    its experts fit; this loads no experts. A model that does not fit is not loaded. An --expert-dir
    alone measures its disk with a file of at most 256 MiB, which is removed.
    """
    quiet()
    if fingerprints is not None:
        _fingerprints(fingerprints, trust_remote_code)
        return
    import torch

    from qllm.config import CHOICES, engine_config, spelled
    from qllm.kernels import cpu
    from qllm.kernels.cpu.course import OP_BYTES
    from qllm.models.weights.quantised import FORMATS
    from qllm.plugins import load_policy, spelled_for
    from qllm.server.tools.choose import formats

    of_engine, of_policy = split_settings(
        setting,
        memory=memory,
        depth=depth,
        max_expert_bytes=max_expert_bytes,
        expert_dir=expert_dir,
    )
    folder = of_engine.get("expert_dir")
    if "max_expert_bytes" not in of_engine:
        of_engine.pop("expert_dir", None)
    given = spelled(of_engine)
    config = engine_config(given)
    policy = load_policy(DEFAULT_POLICY, spelled_for(DEFAULT_POLICY, of_policy))
    missing = cpu.MISSING
    kernels = "torch"
    if missing is None:
        known = [name for name in cpu.native.available() if not name.startswith("emulated")]
        kernels = f"{cpu.kind()} ({', '.join(known)})"
    rows = [
        ("qllm-runtime", _version("qllm-runtime")),
        ("python", f"{platform.python_version()} on {platform.machine()}, {sys.platform}"),
        *((name, _version(name)) for name in LIBRARIES),
        *((f"{name} (optional)", _version(name)) for name in OPTIONAL),
        ("cores", f"{len(os.sched_getaffinity(0))}, torch uses {torch.get_num_threads()}"),
        ("CPU kernels", kernels),
        ("memory", _memory()),
        ("memory of one op", f"{OP_BYTES >> 20} MiB, which bounds its rows"),
        (
            "expert weights",
            ", ".join(map(str, CHOICES["expert_weights"])) if missing is None else "auto",
        ),
        ("checkpoints", f"bfloat16, float16, float32, {', '.join(FORMATS)}, GGUF{_gguf()}"),
        ("CUDA", _cuda()),
        ("calls of CUDA", _cuda_calls()),
        ("tool calls", f"in the formats {', '.join(formats())} (--tool-calls)"),
        ("floor for BE", _floor(config)),
        ("gaps of a stream", _gaps(policy)),
        ("drafts", _drafts(config)),
    ]
    if missing is not None:
        rows.append(("why torch", missing))
    told: list[tuple[str, str]] = []
    is_loaded = True
    if config.tp == 1 and (folder is not None or config.memory is not None):
        told, is_loaded = before_load(model, config, folder, trust_remote_code=trust_remote_code)
    sizes = {name: value for name, value in given.items() if name in OF_SIZES}
    rows += told + (_served(model, trust_remote_code, sizes) if is_loaded else [])
    print_table(("what", "found"), rows)


def _memory() -> str:
    """Return how much memory is free."""
    from qllm.cores import free_bytes, memory_bytes

    return (
        f"{free_bytes() / GIB:.1f} GiB of {memory_bytes() / GIB:.1f} are free, as far as control "
        "groups allow; an engine without sizes gives three quarters of that to KV "
        "(docs/guides/reuse-kv.md)"
    )


def _floor(config: "EngineConfig") -> str:
    """Return the part of the time that BE gets, and the longest time that LS waits for BE."""
    floor = config.floor
    if not floor.rate:
        return "none; --set min_be_share=0.05 says here what one costs LS"
    examples = ", ".join(
        f"{wait_ms:,} ms to {floor.delayed_ms(wait_ms):,.0f}" for wait_ms in (0, 100, 1_000)
    )
    held = (
        "where a pass or a step is not cut (preempt_at, a policy of whole steps), up to one more"
        if config.preempt_at == "expert"
        else f"and up to a {config.preempt_at} of BE more (preempt_at)"
    )
    return (
        f"BE has {config.min_be_share:.3g} of every {config.be_share_window_ms:,g} ms in which LS "
        f"has work and BE can run. A TTFT of LS, or a gap between two of its tokens, grows from "
        f"{examples} at most, in pieces of {2 * floor.slice_ns / NS_PER_MS:g} ms; {held}"
    )


def _gaps(policy: Any) -> str:
    """Return the longest gap between two tokens that prompts of the same class cause."""
    bound_ms = policy.max_prompt_gap_ms
    if bound_ms is None:
        return (
            f"no bound: under {DEFAULT_POLICY} with max_prompt_gap_ms=none prompts of its own "
            "class hold a stream up for as long as their step takes, whatever its target is"
        )
    return (
        f"under {DEFAULT_POLICY} prompts of its own class hold a stream up until its TPOT target, "
        f"without one for {bound_ms:,} ms or four decode steps (--set policy.max_prompt_gap_ms=50)"
    )


def _drafts(config: "EngineConfig") -> str:
    """Return the drafter of the settings and the known ones."""
    from qllm.drafters.choose import MTP, drafters, load_drafter, model_path
    from qllm.models.folders import locate

    if not config.has_drafts:
        return f"none; --set draft=auto proposes tokens (drafters: {', '.join(drafters())})"
    said = f"{config.draft}, at most {config.draft_tokens} tokens per step and request"
    if (path := model_path(config.draft)) is not None:
        name, _ = locate(path, weights=False, code=False)
        return f"{said}; the draft model {name} is compared with the model at start"
    if config.draft == MTP:
        return f"{said}; the model's checkpoint is searched for the layer at start"
    load_drafter(config.draft)
    return said


def _served(model: str, trust_remote_code: bool, sizes: dict[str, Any]) -> list[tuple[str, str]]:
    """Load a model, and return its depth, its sizes, its kernels and drivers.

    An engine in a process of its own has the sizes of an engine that serves.
    """
    from qllm import QLLMEngine

    how: dict[str, Any] = {"trust_remote_code": trust_remote_code, "conformance": False, **sizes}
    with QLLMEngine.from_pretrained(model, **how) as engine:
        stats = engine.stats()
        off, free = stats["prefix_cache"].get("off"), stats["memory"]["free_bytes"] / GIB
        counts = Counter(engine.drivers)
        depth, whole = stats["depth"], stats["whole_depth"]
        more, experts = [], stats["experts"]
        if stats["ranks"]:
            each = ", ".join(f"{rank['weight_bytes']:,}" for rank in stats["ranks"])
            more.append(("its ranks", f"{len(stats['ranks'])}, with {each} bytes of weights"))
        if experts:
            held = f"room for {experts['slots']:,} of {experts['experts']:,} experts in memory"
            more.append(("its slots", held))
        states = engine.client.info.shape.state_tokens
        room = engine.config.pool_tokens // (OF_REQUEST + states)
        cut = "" if depth == whole else "; answers differ from those of the whole model"
        return [
            ("its depth", f"{depth} of {whole} layers{cut}"),
            ("its weights", f"{stats['weight_bytes']:,} bytes"),
            *more,
            (f"drivers of {model}", ", ".join(f"{name} ({num})" for name, num in counts.items())),
            ("its kernels", f"{engine.kernels['attention']}; experts: {engine.kernels['experts']}"),
            ("its parts", f"known {engine.kernels['parts']}"),
            ("its stops", f"{engine.kernels['stops']}; a server logs those of its model"),
            ("its KV", f"{engine.config.pool_tokens:,} tokens of {free:.1f} GiB for it"),
            (
                "its seats",
                f"{engine.config.max_num_seqs:,} (max_num_seqs), whatever the memory is; KV has "
                f"room for {room:,} requests of {OF_REQUEST:,} tokens",
            ),
            (
                "its prefix cache",
                f"off, because {off}" if off else f"{engine.config.kept_tokens:,} tokens",
            ),
        ]


def _fingerprints(model: str, trust_remote_code: bool) -> None:
    import transformers

    from qllm.models.loader import skeleton
    from qllm.models.parts.inventory import parts_of
    from qllm.models.tokenizer import load_tokenizer
    from qllm.server.tools.choose import AUTO, told

    parts = parts_of(skeleton(model, trust_remote_code))
    rows = [
        (
            part.role,
            part.source,
            part.digest or "no source",
            part.known.kind or "its own module",
            f"by {part.known.how}" if part.known.kind else "see below",
            str(part.num_layers),
        )
        for part in parts
    ]
    print_table(("part", "source", "digest", "known as", "how", "layers"), rows)
    for part in parts:
        if part.known.kind is None:
            typer.echo(f"{part.source}: {part.known.how}")
    tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code)
    typer.echo(f"tool calls and reasoning: {told(tokenizer, AUTO)}")
    typer.echo(
        f"transformers {transformers.__version__}. A part is known by what it computes: its source "
        "is one that was tested, or its forward was tried (docs/guides/families.md)."
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _gguf() -> str:
    """Return what is missing for GGUF files."""
    return "" if find_spec("gguf") else " once gguf is installed"


def _cuda() -> str:
    import torch

    if not torch.cuda.is_available():
        return "no device; qllm runs on the CPU"
    return f"{torch.cuda.get_device_name()}; device='cuda' serves on it"


def _cuda_calls() -> str:
    """Return the package that makes CUDA's calls, and what it cannot do."""
    from qllm.cuda.calls import BindingsCalls, cuda_calls
    from qllm.errors import ConfigError

    try:
        name = cuda_calls().name
    except ConfigError as error:
        return str(error)
    if name == BindingsCalls.name:
        return f"by {name}"
    return f"by {name}: stages are not checked, and loop='conditional' needs {BindingsCalls.name}"
