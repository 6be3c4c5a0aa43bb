"""Switch that hides torch in processes without a model. Torch takes a second and 200 MB.

transformers and NIXL import torch if it is installed, although tokenizers and rings do not need
torch. A process that calls `forgo_torch` once hides torch from these packages.
"""

import sys

_is_forgone = False


def forgo_torch() -> None:
    """Declare that this process loads no model. `qllm serve` calls this; a notebook must not."""
    global _is_forgone
    _is_forgone = True


def hide_torch() -> None:
    """Hide torch from the next import of transformers or NIXL, after `forgo_torch`.

    If torch is imported already, it stays, because a policy may use it.
    """
    if _is_forgone:
        # as the import system defines
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]


def show_torch() -> None:
    """Undo `hide_torch` for a tokenizer that needs torch, before transformers is first imported."""
    if "torch" in sys.modules and sys.modules["torch"] is None:
        del sys.modules["torch"]
