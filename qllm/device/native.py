"""The extension that `kernels/csrc` is built into, or why it is not there."""

from importlib import import_module
from typing import Any

from qllm.device import layout
from qllm.errors import ConfigError


def load_native() -> Any:
    """Import it.

    Raises:
        ConfigError: It was not built, or from another version of the layout.
    """
    try:
        native = import_module("qllm.device._scheduler")
    except ImportError as error:
        raise ConfigError(
            f"the native scheduler was not built ({error}); install qllm where a C++ compiler is, "
            "or use scheduler='python'"
        ) from error
    if native.VERSION != layout.VERSION:
        raise ConfigError(
            f"the native scheduler was built from version {native.VERSION} of its state, not "
            f"{layout.VERSION}; install qllm again"
        )
    return native
