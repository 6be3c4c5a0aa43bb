"""Forward hooks that a user registered: the modules with hooks, and the hooks that serving calls.

Layers are run part by part, and kernels compute several parts at once from their weights. If a
part, or a module inside it, has a hook, the part is computed by its own modules. So the hook is
called as in `model.forward`, with the rows of an op. Modules that are no part (a layer, a block of
experts, experts, the head) are never called. A warning names the hooks on these modules. Layers
that the model's forward calls are called whole, but modules inside their experts are not called.
"""

import logging
from collections.abc import Iterator

from torch import nn

from qllm.models.discover import ModelParts

_log = logging.getLogger(__name__)


def is_heard(module: nn.Module) -> bool:
    """Return True if a module, or one inside it, has a forward hook or a forward pre-hook."""
    return any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())


def never_called(model: nn.Module, parts: ModelParts) -> list[str]:
    """Return names of modules with hooks that serving never calls, in the order of the model."""
    called = set(_called(parts))
    return [
        name or type(model).__name__
        for name, module in model.named_modules()
        if (module._forward_hooks or module._forward_pre_hooks) and module not in called
    ]


def warn_of_unheard(model: nn.Module, parts: ModelParts) -> None:
    """Warn of hooks that serving never calls."""
    if names := never_called(model, parts):
        _log.warning(
            "hooks on %s are never called: layers are run part by part, and experts and head are "
            "read as weights; hooks of attention, norms, routers and MLPs are called",
            ", ".join(names),
        )


def _called(parts: ModelParts) -> Iterator[nn.Module]:
    """Yield the modules that serving calls when a part's own modules compute the part."""
    yield from parts.embed.modules()
    yield from parts.norm.modules()
    if parts.around is not None:
        experts = [layer.experts for layer in parts.layers if layer.experts is not None]
        within = {m for block in experts for m in block.modules() if m is not block}
        yield from (m for layer in parts.around.layers for m in layer.modules() if m not in within)
    for layer in parts.layers:
        mlp = None if layer.is_moe else layer.mlp
        norms = layer.input_layernorm, layer.post_attention_layernorm
        for part in (*norms, layer.self_attn, layer.router, layer.shared, layer.shared_gate, mlp):
            if part is not None:
                yield from part.modules()
