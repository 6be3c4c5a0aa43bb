"""Import of the extension that is built from `csrc`."""

from importlib import import_module
from typing import Any

from qllm.device import lanes, layout, serving
from qllm.errors import ConfigError


def load_native() -> Any:
    """Import the native scheduler.

    Raises:
        ConfigError: The extension was not built, or was built from another version of the layout.
    """
    try:
        native = import_module("qllm.device._scheduler")
    except ImportError as error:
        raise ConfigError(
            f"the native scheduler was not built ({error}); install qllm where a C++ compiler is, "
            "or use loop='host'"
        ) from error
    for what, module in (("STATE", layout), ("SERVING", serving), ("LANES", lanes)):
        built = getattr(native, f"{what}_VERSION", "?")
        if built != module.VERSION:
            raise ConfigError(
                f"the native scheduler was built from version {built} of its {what.lower()}, not "
                f"{module.VERSION}; install qllm again"
            )
    return native
