"""Switch that hides torch in processes without a model: torch takes a second and 200 MB.

transformers and NIXL import torch wherever it is installed, although tokenizers and rings do not
need it. A process that calls `forgo_torch` once hides it from them.
"""

import sys

_is_forgone = False


def forgo_torch() -> None:
    """Declare that this process loads no model. `qllm serve` calls it, a notebook must not."""
    global _is_forgone
    _is_forgone = True


def hide_torch() -> None:
    """Hide torch from the next import of transformers or NIXL, after `forgo_torch`.

    A torch that is imported already stays: a policy may use it.
    """
    if _is_forgone:
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # as the import system says


def show_torch() -> None:
    """Undo `hide_torch` before the first import of transformers, if the tokenizer needs torch."""
    if "torch" in sys.modules and sys.modules["torch"] is None:
        del sys.modules["torch"]
