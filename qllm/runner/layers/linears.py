"""The linear modules and the head, with this project's kernels for weights that they can read."""

import ctypes
from array import array
from collections import Counter
from collections.abc import Callable, Container
from ctypes import c_int64, c_void_p
from functools import partial

from torch import Tensor, nn

from qllm.kernels import cpu, rounded
from qllm.kernels.cpu.quantised import matrix_of
from qllm.kernels.quantised import Quantised
from qllm.models.discover import ModelParts
from qllm.models.weights.quantised_linears import (
    QuantisedLinear,
    is_read,
    linear_in,
    values_of,
    weight_of,
)
from qllm.runner.layers.rows import PLAIN, RowRule

Linear = Callable[[Tensor], Tensor]

HEAD_BLOCK = 2048
"""Token ids per block of the output head, a multiple of 64. So the logits of the blocks have the
bits of one product over the whole vocabulary."""


class Linears:
    """The layers' `nn.Linear` modules, with kernels or the row rule between `do` and `undo`.

    Only instances of modules are changed, not their classes.

    Args:
        parts: Parts of the model.
        rule: Blocks of rows in which torch multiplies.
        native: True to copy weights for the kernels that can read them.
        covered: Modules that are never called.
        arena: Allocator of the kernels' weights.
    """

    def __init__(
        self,
        parts: ModelParts,
        rule: RowRule,
        native: bool,
        covered: Container[nn.Module],
        arena: cpu.Arena,
    ) -> None:
        self._forwards: list[tuple[nn.Linear, Linear]] = []
        self.kernels: Counter[str] = Counter()
        modules = [m for layer in parts.layers for m in layer.layer.modules()]
        linears = [m for m in modules if type(m) is nn.Linear and _is_its_own(m)]
        for module in linears:
            if module in covered:
                continue
            bias = None if module.bias is None else module.bias.detach()
            held = linear_in(module)
            kernel = _torch_name(held)
            forward: Linear | None = None
            if native and is_read(module):
                kernel = _named(weight_of(module))
                forward = matrix_of([weight_of(module)], [bias], arena).linear
            elif rule is not PLAIN and not (held is not None and held.rounds):
                forward = partial(_by_rule, rule, module)
            self.kernels[kernel] += 1
            if forward is not None:
                ours = partial(forward)
                ours.is_ours = True  # type: ignore[attr-defined]
                self._forwards.append((module, ours))

    def do(self) -> None:
        """Replace the modules' forward."""
        for module, forward in self._forwards:
            module.forward = forward  # type: ignore[assignment, method-assign]

    def undo(self) -> None:
        """Restore the modules' forward."""
        for module, _ in self._forwards:
            held = linear_in(module)
            if held is None:
                vars(module).pop("forward", None)
            else:
                held.restore()


def _is_its_own(module: nn.Linear) -> bool:
    return "forward" not in vars(module) or linear_in(module) is not None


def _by_rule(rule: RowRule, module: nn.Linear, x: Tensor) -> Tensor:
    return rule.linear(x, values_of(module), module.bias)


def _torch_name(held: QuantisedLinear | None) -> str:
    if held is None:
        return "torch linear"
    how = "rounded" if held.rounds else "dequantised"
    return f"torch linear, {how} {held.weight.kind}"


def _named(weight: Tensor | Quantised) -> str:
    """Return the name of a weight's kernel, as readable text."""
    kind = f" {weight.kind}" if isinstance(weight, Quantised) else ""
    return f"qllm {cpu.kind()}{kind}"


class HeadBlocks(ctypes.Structure):
    """Blocks of the head, from `at` to `end`: see sweep.h."""

    _fields_ = (
        ("peaks", c_void_p),
        ("ids", c_void_p),
        ("x", c_void_p),
        ("rows", c_int64),
        ("blocks", c_void_p),
        ("width", c_int64),
        ("end", c_int64),
        ("course", c_void_p),
        ("grain", c_int64),
        ("watch", c_void_p),
        ("seen", c_int64),
        ("stop_ns", c_int64),
        ("tasks_left", c_int64),
        ("single", c_int64),
        ("at", c_int64),
        ("call_ns", c_int64),
        ("longest_ns", c_int64),
    )


class Head:
    """The output head as vocabulary blocks, so that a segment can be a few blocks.

    Args:
        lm_head: Module of the head.
        norm: Norm of the head's input, [B, D] to [B, D].
        rule: Blocks of rows in which torch multiplies.
        native: True if kernels multiply, see `is_read`.
        arena: Allocator of packed weights.
    """

    def __init__(
        self,
        lm_head: nn.Linear,
        norm: Callable[[Tensor], Tensor],
        rule: RowRule,
        native: bool,
        arena: cpu.Arena,
    ) -> None:
        self._rule, self.norm = rule, norm
        weight = weight_of(lm_head)
        bias = None if lm_head.bias is None else lm_head.bias.detach()
        self.vocab_size = num = int(weight.shape[0])
        self.block_size = size = HEAD_BLOCK
        blocks = [slice(a, min(a + size, num)) for a in range(0, num, size)]
        self._biases = [None if bias is None else bias[block] for block in blocks]
        self._weights = [_rows(weight, block) for block in blocks]
        self.num_blocks = len(self._weights)
        held = linear_in(lm_head)
        self.kernel = _torch_name(held)
        self._native: list[cpu.Matrix] | None = None
        if native:
            pairs = zip(self._weights, self._biases, strict=True)
            self._native = [matrix_of([w], [b], arena) for w, b in pairs]
            self._addresses = array("q", [matrix.address for matrix in self._native])
            self.kernel = _named(weight)

    def best(
        self, x_BD: Tensor, blocks: HeadBlocks, peaks_B: "array[float]", ids_B: "array[int]"
    ) -> bool:
        """Update each row's largest logit and its id with some blocks.

        Returns:
            False if there are no kernels for the head.
        """
        if self._native is None:
            return False
        x_BD = x_BD.contiguous()
        blocks.peaks, blocks.ids = peaks_B.buffer_info()[0], ids_B.buffer_info()[0]
        blocks.x, blocks.rows, blocks.width = x_BD.data_ptr(), x_BD.shape[0], self.block_size
        blocks.blocks = self._addresses.buffer_info()[0]
        cpu.native.head(ctypes.addressof(blocks))
        return True

    def ready(self, x_BD: Tensor, blocks: HeadBlocks, step: int) -> range:
        """Return the next blocks whose logits can be computed, and count them as done.

        Args:
            x_BD: Rows, of which `__call__` computes logits.
            blocks: Range of blocks, and a stop.
            step: Most blocks.
        """
        start, blocks.at = blocks.at, min(blocks.at + step, blocks.end)
        return range(start, blocks.at)

    def __call__(self, x_BD: Tensor, block: int) -> Tensor:
        """Return the logits [B, up to block_size] of one block."""
        if self._native is not None:
            return self._native[block].linear(x_BD)
        weight = self._weights[block]
        if isinstance(weight, Quantised) and weight.activations != "bf16":
            return rounded.linear(x_BD, weight, self._biases[block])
        values = weight.dequantised() if isinstance(weight, Quantised) else weight
        return self._rule.linear(x_BD, values, self._biases[block])


def _rows(weight: Tensor | Quantised, which: slice) -> Tensor | Quantised:
    return weight.rows(which) if isinstance(weight, Quantised) else weight[which]
