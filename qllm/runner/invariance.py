"""The start-up self-test of level L2, with the model's own weights and layer structure."""

from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qllm.errors import ModelError
from qllm.models.discover import ModelParts
from qllm.runner.layers.drivers import LayerDriver
from qllm.runner.layers.rows import PLAIN, VECTOR, RowBlocks, RowRule, find_rule, matrices
from qllm.types import Driver

ROWS = 37


def find_invariance(
    model: nn.Module,
    parts: ModelParts,
    drivers: Sequence[LayerDriver],
    ours: Container[int] = (),
) -> tuple[RowRule, bool]:
    """Find the rule for products, then check routers, norms, sums and gates under it.

    In layers that are driven by hooks, only the matrices are checked.

    Args:
        model: Model of transformers.
        parts: Parts of the model.
        drivers: Driver of each layer.
        ours: Parameters, as values of `id`, whose kernels already compute each row independently.

    Returns:
        The rule, and True if `RowBlocks` must be entered. It is False if products are invariant
        without `RowBlocks` and every curve ends on a whole vector.

    Raises:
        ModelError: No rule holds on this machine, or another op of a layer violates it.
    """
    with torch.inference_mode():
        rule = find_rule(_filled(w) for w in matrices(model, ours))
        mode = RowBlocks(rule)
        odd = any(_odd_gate(layer.experts) for layer in parts.layers)
        hooked = any(layer.driver is Driver.HOOKED for layer in parts.layers)
        with mode:
            for layer, driver in zip(parts.layers, drivers, strict=True):
                if layer.driver is not Driver.HOOKED:
                    glue = _glue(parts, driver, layer.is_moe)
                    check_rows(f"layer {layer.index}", glue, parts.lm_head.in_features)
    return rule, rule is not PLAIN or mode.padded or odd or hooked


def _filled(weight: Tensor) -> Tensor:
    """Return a weight with values. A quantised weight has values only while it is multiplied."""
    if not weight.is_meta:
        return weight
    made = torch.randn(
        weight.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32
    )
    return made.to(weight.dtype)


def _odd_gate(experts: Any) -> bool:
    if experts is None:
        return False
    width = experts.down_proj.shape[1 if experts.is_transposed else 2]
    return bool(width % VECTOR)


def _glue(parts: ModelParts, driver: LayerDriver, is_moe: bool) -> Callable[[Tensor], list[Tensor]]:
    like = parts.like

    def glue(x_TD: Tensor) -> list[Tensor]:
        x = x_TD.to(like.device, like.dtype)
        if not is_moe:
            return [driver.dense(x, x)]
        routed = driver.route(x, x)
        out = driver.combine(x, x, routed, x)
        return [routed.x_TD, routed.ids_TK, routed.weights_TK, out, parts.norm(x)]

    return glue


def check_rows(name: str, function: Callable[[Tensor], Sequence[Tensor]], width: int) -> None:
    """Compare a row-wise function of many rows with the same function of each row alone.

    Raises:
        ModelError: A row depends on the other rows.
    """
    x_TD = torch.randn(
        (ROWS, width), generator=torch.Generator().manual_seed(0), dtype=torch.float32
    )
    together = function(x_TD)
    for row in range(0, ROWS, 4):
        for whole, one in zip(together, function(x_TD[row : row + 1]), strict=True):
            if not torch.equal(whole[row : row + 1], one):
                raise ModelError(
                    f"batch-invariant results are not possible here: {name} of a row depends on "
                    "the rows beside it; use exactness='order'"
                )
