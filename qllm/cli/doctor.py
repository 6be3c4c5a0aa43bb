"""`qllm doctor`: what this machine and this installation can do."""

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Annotated

import typer

from .app import app, clean, print_table, quiet

LIBRARIES = ("torch", "transformers", "accelerate", "safetensors", "pydantic", "numpy")
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
) -> None:
    """Say what is installed, which kernels compute, and what is missing and why."""
    quiet()
    if fingerprints is not None:
        _fingerprints(fingerprints, trust_remote_code)
        return
    import torch

    from qllm.config import CHOICES
    from qllm.kernels import cpu
    from qllm.kernels.cpu.course import OP_BYTES
    from qllm.models.quantised import FORMATS

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
        ("memory of one op", f"{OP_BYTES >> 20} MiB, which bounds its rows"),
        (
            "expert weights",
            ", ".join(map(str, CHOICES["expert_weights"])) if missing is None else "auto",
        ),
        ("checkpoints", f"bfloat16, float16, float32, {', '.join(FORMATS)}, GGUF{_gguf()}"),
        ("CUDA", _cuda()),
    ]
    if missing is not None:
        rows.append(("why torch", missing))
    print_table(("what", "found"), rows)


def _fingerprints(model: str, trust_remote_code: bool) -> None:
    import transformers

    from qllm.models.fingerprints import TESTED_TRANSFORMERS, parts_of
    from qllm.models.loader import skeleton

    rows = [
        (
            part.role,
            part.source,
            part.digest or "no source",
            part.kind or "unknown",
            str(part.num_layers),
        )
        for part in parts_of(skeleton(model, trust_remote_code))
    ]
    print_table(("part", "source", "digest", "known as", "layers"), rows)
    typer.echo(
        f"transformers {transformers.__version__}; the tables are of {TESTED_TRANSFORMERS}. Parts "
        "that are unknown are run by their own modules (docs/families.md)."
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _gguf() -> str:
    """What GGUF files still need."""
    return "" if find_spec("gguf") else " once gguf is installed"


def _cuda() -> str:
    import torch

    if not torch.cuda.is_available():
        return "no device; qllm runs on the CPU"
    return f"{torch.cuda.get_device_name()}; device='cuda' serves on it"
