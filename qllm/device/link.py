"""The scheduler kernel of one policy for one kind of device: NVRTC, then nvJitLink. Needs no GPU.

Compiled and linked only: no kernel of this has ever run on a GPU.
"""

from pathlib import Path
from typing import Any

from qllm.device.layout import HEADER
from qllm.device.rank import compile_device
from qllm.errors import ConfigError

KERNELS = (
    *("qllm_call", "qllm_server_call", "qllm_ring_read", "qllm_ring_write"),
    *("qllm_before", "qllm_after", "qllm_turn"),
)
"""Entry points of `csrc/scheduler.cu`."""


def link_kernel(policy: Any, capability: tuple[int, int]) -> bytes:
    """Return a cubin with KERNELS and the policy's `rank` in them.

    Args:
        policy: A `RankPolicy`.
        capability: Of the device, like (9, 0).

    Raises:
        ConfigError: The policy cannot be compiled, or a package of the extra `device` is missing.
    """
    rank = compile_device(policy, capability)
    try:
        from cuda.core import Linker, LinkerOptions, ObjectCode, Program, ProgramOptions
    except ImportError as error:
        raise ConfigError(
            f"linking for a device needs cuda-core ({error}); pip install 'qllm-runtime[device]'"
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
        options=LinkerOptions(arch=arch, link_time_optimization=True),
    )
    return bytes(linker.link("cubin").code)
