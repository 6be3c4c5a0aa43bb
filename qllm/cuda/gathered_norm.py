"""Compilation of the kernel that ends an op on ranks of GPUs (`csrc/gathered_norm.h`).

The owner of a row gathers its parts, adds the residual, norms the row, and stores it on all ranks.
No engine launches it yet, because ranks compute on CPUs. `make gpu-check` runs it with all ranks on
one GPU.
"""

import re
from pathlib import Path

from qllm.cuda.calls import Compiled, cuda_calls
from qllm.errors import ConfigError, pip_install

CSRC = Path(__file__).parent / "csrc"
"""Folder of the kernel's sources."""
KERNEL = "qllm_gathered_norm"
"""Name of the kernel in a cubin."""
NETS = ("Virtual", "Loads", "Multimem")
"""Ways to store on all ranks, as in `csrc/nets.h`."""
RANKS = (2, 4, 8)
"""Numbers of ranks for which a kernel can be compiled."""
OVERLAPS = ("exact", "lossy-fused")
"""Forms of the kernel. "lossy-fused" lets the fabric add partial sums, in no specified order."""
FIRST_MULTICAST = 90
"""First architecture with multicast addresses, as a number: sm_90."""


def compile_norm(net: str, ranks: int, arch: str, overlap: str = "exact") -> Compiled:
    """Compile the kernel.

    Args:
        net: One of NETS.
        ranks: One of RANKS.
        arch: Architecture, like "sm_90" or "sm_100a".
        overlap: One of OVERLAPS. "lossy-fused" must be asked for, because its bits depend on the
            fabric. It needs "Multimem".

    Raises:
        ConfigError: An argument has no such value, or the compiler (NVRTC) is missing.
    """
    for name, value, known in (
        ("net", net, NETS),
        ("ranks", ranks, RANKS),
        ("overlap", overlap, OVERLAPS),
    ):
        if value not in known:
            raise ConfigError(f"{name}={value!r} must be one of {', '.join(map(str, known))}")
    if net != "Multimem" and overlap != "exact":
        raise ConfigError(
            f"overlap={overlap!r} needs net='Multimem', and net={net!r} adds nothing on the way; "
            "use overlap='exact'"
        )
    number = re.fullmatch(r"sm_(\d+)[af]?", arch)
    if number is None:
        raise ConfigError(f"arch={arch!r} must be like 'sm_90' or 'sm_100a'")
    if net == "Multimem" and int(number[1]) < FIRST_MULTICAST:
        raise ConfigError(
            f"arch={arch!r} has no multicast addresses, which net='Multimem' needs; use "
            f"sm_{FIRST_MULTICAST} or later, or net='Loads'"
        )
    is_lossy = "true" if overlap == "lossy-fused" else "false"
    return _compile(arch, f"-DQLLM_NET={net}<{ranks}>", f"-DQLLM_IS_LOSSY={is_lossy}")


def _compile(arch: str, *defines: str) -> Compiled:
    source = (CSRC / "gathered_norm.cu").read_bytes()
    # Contracted products would have other bits than the host's.
    options = [f"-arch={arch}", "-std=c++17", "-fmad=false", f"-I{CSRC}", *defines]
    try:
        return cuda_calls().compile(source, KERNEL, options)
    except RuntimeError as error:  # NVRTC's library is missing
        raise ConfigError(
            f"compiling for a device needs NVRTC ({error}); {pip_install('device')}"
        ) from error
    except ConfigError as error:
        raise ConfigError(f"arch={arch!r}: {error}") from error
