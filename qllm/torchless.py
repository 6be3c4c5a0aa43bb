"""A process that holds no model does without torch, which takes a second and 200 MB.

transformers and NIXL import torch wherever it is installed, although no tokenizer and no ring
needs it. A process that says so once (`forgo_torch`) hides it from them.
"""

import sys

_is_forgone = False


def forgo_torch() -> None:
    """Say that no model is loaded in this process: `qllm serve` does, a notebook must not."""
    global _is_forgone
    _is_forgone = True


def hide_torch() -> None:
    """Call before an import of transformers or NIXL: they find no torch, if it was forgone.

    Torch that is here already stays: a policy may have imported it.
    """
    if _is_forgone:
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # as the import system says


def show_torch() -> None:
    """Call before the first import of transformers where the tokenizer itself needs torch."""
    if "torch" in sys.modules and sys.modules["torch"] is None:
        del sys.modules["torch"]
