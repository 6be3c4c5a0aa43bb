"""qllm: a runtime that serves Mixture-of-Experts models to people who wait and jobs that do not."""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qllm.drafters.check import check_drafter
    from qllm.errors import InvalidRequestError, QllmError, QueueFull, QueueFullError
    from qllm.frontend.handle import Handle, Result
    from qllm.llm import QLLMEngine
    from qllm.several import Models
    from qllm.sim.check import check_policy
    from qllm.types import Priority, SamplingParams, Slo

if sys.platform != "linux":
    raise ImportError(
        f"qllm runs on Linux only (memfd, eventfd, pidfd), and this is {sys.platform}: use a "
        "container, a virtual machine or WSL 2"
    )
for _other in Path(__file__).parent.parent.glob("qllm-*.dist-info"):
    raise ImportError(
        f"{_other.stem} lies in one folder with this package, qllm-runtime: both call themselves "
        "'qllm' and have overwritten each other's files. `pip uninstall --yes qllm qllm-runtime`, "
        "then install the one you want, or each in an environment of its own"
    )

__version__ = "0.1.0"
__all__ = [
    "Handle",
    "InvalidRequestError",
    "Models",
    "Priority",
    "QLLMEngine",
    "QllmError",
    "QueueFull",
    "QueueFullError",
    "Result",
    "SamplingParams",
    "Slo",
    "check_drafter",
    "check_policy",
]

_HOME = {
    "QLLMEngine": "qllm.llm",
    "Models": "qllm.several",
    "Handle": "qllm.frontend.handle",
    "Result": "qllm.frontend.handle",
    "InvalidRequestError": "qllm.errors",
    "QllmError": "qllm.errors",
    "QueueFull": "qllm.errors",
    "QueueFullError": "qllm.errors",
    "Priority": "qllm.types",
    "SamplingParams": "qllm.types",
    "Slo": "qllm.types",
    "check_drafter": "qllm.drafters.check",
    "check_policy": "qllm.sim.check",
}


def __dir__() -> list[str]:
    """List the public names."""
    return sorted({*__all__, "__version__"})


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `import qllm` stays cheap."""
    if name not in _HOME:
        raise AttributeError(f"module 'qllm' has no attribute {name!r}; it has {__all__}")
    return getattr(import_module(_HOME[name]), name)
