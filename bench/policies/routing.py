"""Forced routing: the experts of a token, independent of the router's random weights.

Random weights route neither evenly nor like a trained model, so claims about expert loads are
measured under two known extremes. The choice is a fixed function of the layer and of the token's
hidden state, and so of the token and its position.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

KINDS = ("uniform", "skewed", "model")
SKEW = 1.2
"""Exponent of the Zipf law: the first of 24 experts is used four times as often as the fifth."""


def _noise(x_TD: torch.Tensor, layer: int, num_experts: int) -> torch.Tensor:
    """Return numbers in (0, 1) that look random but follow from the bits of `x_TD`."""
    weights = torch.arange(1, x_TD.shape[1] + 1, dtype=torch.float64)
    key_T = (x_TD.double() * torch.sin(weights * (layer + 1.618))).sum(1)
    turn_E = torch.arange(1, num_experts + 1, dtype=torch.float64) * 78.233
    noise = torch.sin(key_T[:, None] * 12.9898 + turn_E) * 43758.5453
    return (noise - noise.floor()).clamp(1e-9, 1 - 1e-9)


def choose(x_TD: torch.Tensor, layer: int, num_experts: int, top_k: int, kind: str) -> torch.Tensor:
    """Return expert ids [T, K], distinct in each row: Gumbel top-k of a uniform or a Zipf law."""
    scores_TE = -torch.log(-torch.log(_noise(x_TD, layer, num_experts)))
    if kind == "skewed":
        rank_E = (torch.arange(num_experts) + 5 * layer) % num_experts + 1
        scores_TE = scores_TE - SKEW * torch.log(rank_E.double())
    return scores_TE.topk(top_k, dim=1).indices


@contextmanager
def forced(model: Any, kind: str) -> Iterator[None]:
    """Route by `kind` inside the block; "model" leaves the routers alone."""
    if kind not in KINDS:
        raise ValueError(f"routing {kind!r} is unknown; use one of {', '.join(KINDS)}")
    config = model.config
    hooks = []
    routers = [m for name, m in model.named_modules() if name.endswith("mlp.gate")]
    if len(routers) != config.num_hidden_layers:
        raise ValueError(f"{len(routers)} routers in {config.num_hidden_layers} layers")
    for layer, router in enumerate(routers if kind != "model" else ()):

        def hook(_: Any, args: Any, output: Any, layer: int = layer) -> Any:
            logits, weights_TK, _ids = output
            ids_TK = choose(args[0], layer, config.num_experts, config.num_experts_per_tok, kind)
            even = torch.full_like(weights_TK, 1 / config.num_experts_per_tok)
            return logits, even, ids_TK

        hooks.append(router.register_forward_hook(hook))
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()
