"""Level L2: matrix products whose rows do not depend on the number of rows.

Libraries choose a kernel by the number of rows, so the bits of a row may change with the other rows
of the batch. A `RowRule` sets blocks in which rows are multiplied, so that the bits do not change.
The rule is found at start, per dtype, by tests on the model's own weights.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qllm.errors import ModelError


class RowRule(NamedTuple):
    """A rule: multiply in blocks of at most `max_rows`, padded with zeros to `multiple` rows."""

    max_rows: int
    multiple: int

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute `F.linear`, block by block."""
        return self.apply(x, lambda block: _linear(block, weight, bias))

    def apply(self, x: Tensor, multiply: Callable[[Tensor], Tensor]) -> Tensor:
        """Compute a product of the rows of x [..., in], block by block."""
        rows = x.numel() // x.shape[-1]
        if rows <= self.max_rows and rows % self.multiple == 0:
            return multiply(x)
        flat = x.reshape(rows, x.shape[-1])
        parts = [self._block(part, multiply) for part in torch.split(flat, self.max_rows)]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.view(*x.shape[:-1], out.shape[-1])

    def _block(self, x: Tensor, multiply: Callable[[Tensor], Tensor]) -> Tensor:
        rows = x.shape[0]
        short = -rows % self.multiple
        if short:
            x = F.pad(x, (0, 0, 0, short))
        return multiply(x)[:rows]


_linear = F.linear
PLAIN = RowRule(1 << 30, 1)
RULES = (RowRule(1 << 30, 4), RowRule(1 << 30, 16), RowRule(32, 4), RowRule(16, 16))
"""Rules in the order in which they are tried. The last rule has one shape only. No rule multiplies
single rows. A single row differs from the same row among others so rarely (0.1 % of rows in bf16)
that a test may miss the difference."""
PROBE_ROWS = 1024
"""Rows of the self-test. Each row is computed alone and among others."""


CURVES = {torch.sigmoid, Tensor.sigmoid, F.sigmoid, F.silu, F.gelu, torch.exp, Tensor.exp}
"""Functions whose vector and scalar code differ in the last bit. The end of a tensor runs scalar
code."""
VECTOR = 64
"""Most values that a vector loop handles at once."""


class RowBlocks(TorchFunctionMode):
    """A context in which products of this thread follow a rule, and curves end on whole vectors.

    Other threads are not affected.
    """

    def __init__(self, rule: RowRule) -> None:
        super().__init__()
        self.rule = rule
        self.padded = False
        """True if a curve had to be padded."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is _linear and self.rule is not PLAIN:
            return self.rule.linear(*args, **(kwargs or {}))
        if func in CURVES and args[0].shape[-1] % VECTOR:
            self.padded = True
            width = args[0].shape[-1]
            padded = F.pad(args[0], (0, -width % VECTOR))
            return func(padded, *args[1:], **(kwargs or {}))[..., :width]
        return func(*args, **(kwargs or {}))


def _holds(rule: RowRule, weight: Tensor, x_TD: Tensor) -> bool:
    alone = torch.cat([rule.linear(x_TD[i : i + 1], weight) for i in range(x_TD.shape[0])])
    for rows in (2, 3, 5, 8, 16, 17, 33, 64, 100, 257, 512, x_TD.shape[0]):
        if not torch.equal(rule.linear(x_TD[:rows], weight), alone[:rows]):
            return False
        if not torch.equal(rule.linear(x_TD[-rows:], weight), alone[-rows:]):
            return False
    return True


_held: dict[object, bool] = {}
"""Test results of this process. Kernels are chosen by shape, dtype, device and threads."""


def _holds_here(rule: RowRule, weight: Tensor, x_TD: Tensor) -> bool:
    place = (weight.dtype, weight.device, torch.get_num_threads())
    key = (rule, tuple(weight.shape), weight.stride(), *place)
    if key not in _held:
        _held[key] = _holds(rule, weight, x_TD)
    return _held[key]


def matrices(model: nn.Module, but: Container[int] = ()) -> Iterator[Tensor]:
    """Yield every matrix of a model as [out, in]. For stacked experts it is the first expert's.

    Quantised matrices are on the meta device.

    Args:
        model: Model of transformers.
        but: Parameters to leave out, as values of `id`.
    """
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) in but:
                continue
            weight = parameter.detach()
            if weight.dim() == 3:
                yield weight[0].t() if getattr(module, "is_transposed", False) else weight[0]
            elif weight.dim() == 2 and not isinstance(module, nn.Embedding):
                yield weight


def find_rule(weights: Iterable[Tensor], rules: Sequence[RowRule] = RULES) -> RowRule:
    """Return the first rule that makes rows independent, tested with one weight per shape.

    Raises:
        ModelError: No rule holds on this machine.
    """
    shapes: dict[object, Tensor] = {}
    for weight in weights:
        shapes.setdefault((tuple(weight.shape), weight.stride(), weight.dtype), weight)
    cases = []
    for weight in shapes.values():
        generator = torch.Generator().manual_seed(weight.shape[1])
        x = torch.randn((PROBE_ROWS, weight.shape[1]), generator=generator, dtype=torch.float32)
        cases.append((weight, x.to(weight.dtype).to(weight.device)))
    for rule in rules:
        if all(_holds_here(rule, weight, x) for weight, x in cases):
            return rule
    raise ModelError(
        "batch-invariant results are not possible here: the rows of a matrix product depend on "
        "their number under every known rule; use exactness='order'"
    )
