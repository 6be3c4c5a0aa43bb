"""Kernels of a policy, compiled once: cubins (GPU programs) in the user's cache.

A cubin's file name is made of its inputs: the sources of `csrc`, the policy's rank with its
numbers, and the architecture. The compiler is not part of the name. So a cubin that was linked on a
machine without a GPU is also found on a machine with one. A damaged file is compiled again.
"""

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

from qllm.device.layout import HEADER
from qllm.device.rank import compile_device, rank_text
from qllm.errors import ConfigError, pip_install
from qllm.ingress.layout import RECORDS

_DIGEST_BYTES = 32
KERNELS = (
    *("qllm_call", "qllm_server_call", "qllm_ring_read", "qllm_ring_write"),
    *("qllm_before", "qllm_after", "qllm_turn"),
)
"""Entry points of `csrc/scheduler.cu`."""


def cache_folder() -> Path:
    """Return the folder of cubins, in $XDG_CACHE_HOME, else in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "qllm" / "cubins"


def kernel_of(policy: Any, capability: tuple[int, int], folder: Path | None = None) -> bytes:
    """Return the scheduler's kernels with a policy's rank, from the cache if it has them.

    Args:
        policy: A `RankPolicy`.
        capability: Compute capability of the device, like (9, 0).
        folder: Folder of the cache; None is `cache_folder()`.

    Raises:
        ConfigError: The policy cannot be compiled, or a package of the extra `device` is missing.
    """
    folder = folder or cache_folder()
    file = folder / f"{_key(policy, capability)}.cubin"
    try:
        data = file.read_bytes()
        if hashlib.sha256(data[_DIGEST_BYTES:]).digest() == data[:_DIGEST_BYTES]:
            return data[_DIGEST_BYTES:]
    except OSError:
        pass  # not compiled yet
    cubin = link_kernel(policy, capability)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as part:
        part.write(hashlib.sha256(cubin).digest() + cubin)
    os.replace(part.name, file)  # atomic, so a reader sees the whole file or none
    return cubin


def _key(policy: Any, capability: tuple[int, int]) -> str:
    digest = hashlib.sha256(rank_text(policy).encode())
    for source in (*sorted(Path(HEADER).parent.iterdir()), *sorted(RECORDS.parent.iterdir())):
        if source.suffix in (".h", ".cu"):
            digest.update(source.name.encode() + source.read_bytes())
    digest.update(repr(capability).encode())
    return digest.hexdigest()[:32]


def link_kernel(policy: Any, capability: tuple[int, int]) -> bytes:
    """Return a cubin with KERNELS and the policy's `rank` (see `link_verbosely`)."""
    return link_verbosely(policy, capability)[0]


def link_verbosely(policy: Any, capability: tuple[int, int]) -> tuple[bytes, str]:
    """Return a cubin with KERNELS and the policy's `rank`, and the output of `ptxas -v`.

    Args:
        policy: A `RankPolicy`.
        capability: Compute capability of the device, like (9, 0).

    Raises:
        ConfigError: The policy cannot be compiled, or a package of the extra `device` is missing.
    """
    rank = compile_device(policy, capability)
    try:
        from cuda.core import Linker, LinkerOptions, ObjectCode, Program, ProgramOptions
    except ImportError as error:
        raise ConfigError(
            f"linking for a device needs cuda-core ({error}); {pip_install('device')}"
        ) from error
    folder = Path(HEADER).parent
    arch = "sm_{}{}".format(*capability)
    options = ProgramOptions(
        arch=arch,
        std="c++17",
        include_path=str(folder),
        relocatable_device_code=True,
        link_time_optimization=True,
    )
    scheduler = Program((folder / "scheduler.cu").read_text(), "c++", options).compile("ltoir")
    linker = Linker(
        scheduler,
        ObjectCode.from_ltoir(rank),
        options=LinkerOptions(
            arch=arch, link_time_optimization=True, ptxas_options=["-v"], verbose=True
        ),
    )
    cubin = bytes(linker.link("cubin").code)
    return cubin, linker.get_info_log()
