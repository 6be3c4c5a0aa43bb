"""How weights are multiplied: by our kernels, or by torch in the matrix library's own layout.

`F.linear` on the CPU reorders its bf16 weights in every call. Measured on one core of a Zen 4
server: with reordered weights one row takes 0.6 of the time, four rows half. The copies cost
their bytes again, so they have a budget; weights that change afterwards are not seen.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Container, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qllm.kernels import cpu
from qllm.models.discover import ModelParts
from qllm.models.linear import PLAIN, RowRule
from qllm.models.native import is_usable

Linear = Callable[[Tensor], Tensor]

PROBE_ROWS = (1, 2, 5, 16, 33, 100)
"""Row counts at which a packed product is compared with the plain one."""
HEAD_BLOCK = 2048
"""Ids per vocabulary block; a multiple of 64 keeps the bits of the whole product."""


def pack(weight_NK: Tensor) -> Tensor | None:
    """Copy one [out, in] weight; None if that is not possible here."""
    ops = torch.ops.mkldnn
    usable = weight_NK.dtype is torch.bfloat16 and weight_NK.device.type == "cpu"
    if not (usable and hasattr(ops, "_reorder_linear_weight")):
        return None
    packed: Tensor = ops._reorder_linear_weight(weight_NK.contiguous(), None)
    return packed


def packed_linear(x: Tensor, packed: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """`F.linear` with a packed weight; x is [..., in]."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias_N, "none", [], "")
    return out


def is_exact(weight_NK: Tensor, packed: Tensor, bias_N: Tensor | None = None) -> bool:
    """Whether the packed product has the bits of the plain one, over a range of row counts."""
    generator = torch.Generator().manual_seed(0)
    for rows in PROBE_ROWS:
        x = torch.randn((rows, weight_NK.shape[1]), generator=generator).to(weight_NK.dtype)
        if not torch.equal(packed_linear(x, packed, bias_N), F.linear(x, weight_NK, bias_N)):
            return False
    return True


def pack_all(weights: Sequence[Tensor]) -> list[Tensor] | None:
    """Pack weights of one shape; None if that is not possible, or the first is not exact."""
    first = pack(weights[0])
    if first is None or not is_exact(weights[0], first):
        return None
    rest = [pack(w) for w in weights[1:]]
    return [first, *(p for p in rest if p is not None)]


class Linears:
    """The `nn.Linear`s of the layers, packed and following the row rule, between `do` and `undo`.

    Only instances are changed. With torch's packed weights and no rule the bits stay.

    Args:
        parts: Of the model.
        rule: In which blocks torch multiplies.
        packs: Copy weights into a faster layout.
        native: That of our kernels, where they can read a weight.
        covered: Modules that are never called.
        arena: Where weights for our kernels lie.
    """

    def __init__(
        self,
        parts: ModelParts,
        rule: RowRule,
        packs: bool,
        native: bool,
        covered: Container[nn.Module],
        arena: cpu.Arena,
    ) -> None:
        self._forwards: list[tuple[nn.Linear, Linear]] = []
        self.kernels: Counter[str] = Counter()
        modules = [m for layer in parts.layers for m in layer.layer.modules()]
        linears = [m for m in modules if type(m) is nn.Linear and "forward" not in vars(m)]
        exact: dict[tuple[tuple[int, ...], bool], bool] = {}
        for module in linears:
            if module in covered:
                continue
            weight = module.weight.detach()
            bias = None if module.bias is None else module.bias.detach()
            kernel = "torch linear"
            forward: Linear | None = None
            if native and is_usable(weight):
                kernel, forward = f"qllm {cpu.kind()}", cpu.Matrix([weight], [bias], arena).linear
            elif packs and (packed := pack(weight)) is not None:
                key = (tuple(weight.shape), bias is not None)
                if key not in exact:
                    exact[key] = is_exact(weight, packed, bias)
                if exact[key]:
                    kernel, forward = "oneDNN packed", _packed_forward(packed, bias, rule)
            if forward is None and rule is not PLAIN:
                forward = partial(rule.linear, weight=weight, bias=bias)
            self.kernels[kernel] += 1
            if forward is not None:
                self._forwards.append((module, forward))

    def do(self) -> None:
        """Give the modules our forward."""
        for module, forward in self._forwards:
            module.forward = forward  # type: ignore[assignment, method-assign]

    def undo(self) -> None:
        """Give the modules back their own."""
        for module, _ in self._forwards:
            vars(module).pop("forward", None)


def _packed_forward(packed: Tensor, bias_N: Tensor | None, rule: RowRule) -> Linear:
    linear = torch.ops.mkldnn._linear_pointwise

    def forward(x: Tensor) -> Tensor:
        out: Tensor = linear(x, packed, bias_N, "none", [], "")
        return out

    return forward if rule is PLAIN else partial(rule.apply, multiply=forward)


class Head:
    """The output head as vocabulary blocks, so that a segment can be a part of it."""

    def __init__(
        self, lm_head: nn.Linear, rule: RowRule, packs: bool, native: bool, arena: cpu.Arena
    ) -> None:
        self._rule = rule
        weight = lm_head.weight.detach()
        bias = None if lm_head.bias is None else lm_head.bias.detach()
        vocab = weight.shape[0]
        starts = range(0, vocab, HEAD_BLOCK)
        self._weights = [weight[a : a + HEAD_BLOCK] for a in starts]
        self._biases = [None if bias is None else bias[a : a + HEAD_BLOCK] for a in starts]
        self.num_blocks = len(self._weights)
        self.kernel = "torch linear"
        self._packed: list[Tensor] | None = None
        self._native: list[cpu.Matrix] | None = None
        if native and is_usable(weight):
            pairs = zip(self._weights, self._biases, strict=True)
            self._native = [cpu.Matrix([w], [b], arena) for w, b in pairs]
            self._addresses = array("q", [matrix.address for matrix in self._native])
            self.kernel = f"qllm {cpu.kind()}"
        elif packs and bias is None:
            packed = pack_all(self._weights[:-1]) if len(self._weights) > 1 else []
            last = pack_all(self._weights[-1:])
            if packed is not None and last is not None:
                self._packed = packed + last
                self.kernel = "oneDNN packed"

    def best(self, x_BD: Tensor, start: int, stop: int, peaks_B: Tensor, ids_B: Tensor) -> bool:
        """Let blocks [start, stop) raise each row's largest logit and its id; False if not ours."""
        if self._native is None:
            return False
        x_BD = x_BD.contiguous()
        addresses = peaks_B.data_ptr(), ids_B.data_ptr(), x_BD.data_ptr()
        cpu.native.head(
            *addresses, len(x_BD), self._addresses.buffer_info()[0], start, stop, HEAD_BLOCK
        )
        return True

    def __call__(self, x_BD: Tensor, block: int) -> Tensor:
        """Logits [B, up to HEAD_BLOCK] of one block."""
        if self._native is not None:
            return self._native[block].linear(x_BD)
        if self._packed is None:
            return self._rule.linear(x_BD, self._weights[block], self._biases[block])
        return self._rule.apply(x_BD, partial(packed_linear, packed=self._packed[block]))
