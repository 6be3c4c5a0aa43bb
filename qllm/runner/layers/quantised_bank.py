"""Experts of a quantised checkpoint, for this project's kernels or for torch."""

from collections.abc import Callable, Sequence

from torch import Tensor

from qllm.errors import InvariantError
from qllm.kernels import cpu
from qllm.kernels.cpu.experts import Cut, Experts
from qllm.models.weights.quantised_experts import WEIGHTS, QuantisedExperts
from qllm.models.weights.quantised_weights import Weights
from qllm.runner.layers.native_experts import NativeBank


class QuantisedBank(NativeBank):
    """Experts of one layer that compute on packed codes.

    The weights were packed when they were read. The weights stay packed when the runner is closed,
    so another runner can use them. The module's own forward computes with the packed values at any
    time.

    Args:
        held: Weights of a module that `is_covered`.
        module: Module of the experts.
    """

    def __init__(self, held: QuantisedExperts, module: object) -> None:
        super().__init__(module)
        self._held, self._reads = held, held.activations
        self.kernel = f"qllm {cpu.kind()} {held.reads}"
        self.unit_bytes = held.num_bytes // self.num_experts

    def pack(self) -> None:
        """Use the weights that are packed already."""
        self._packed = self.packed(range(self.num_experts))

    def packed(self, experts: range, cut: Cut | None = None) -> Experts:
        """Return consecutive experts, which share the memory of all, or copies of a share."""
        weights = [self._held.weights[name] for name in WEIGHTS]
        up, down = (w.stack if isinstance(w, Weights) else None for w in weights)
        if up is None or down is None:
            raise InvariantError("these experts were read where our kernels were not there")
        shape = len(experts), self._width, self.out_width
        both = up.part(experts), down.part(experts)
        if cut is not None:
            first, num = cut.inner.start, self._width
            halves = cut.inner, range(num + first, num + cut.inner.stop)
            both = both[0].outputs(*halves), both[1].outputs(cut.columns)
        biases, reads = self._biases(experts, cut), self._reads
        return Experts(*shape, None, biases, self._clamp, packed=both, activations=reads, cut=cut)

    def unpack(self) -> None:
        """Stop computing. The weights stay packed."""
        self._packed = None


class OnAccess(Sequence[Tensor]):
    """The matrices [in, out] of experts for torch. Each matrix is made on access.

    Args:
        num: Number of experts.
        make: Function that returns the matrix of an expert.
    """

    def __init__(self, num: int, make: Callable[[int], Tensor]) -> None:
        self._num, self._make = num, make

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, expert: int) -> Tensor:  # type: ignore[override]
        return self._make(expert)


def dequantised(held: QuantisedExperts, name: str, is_transposed: bool, expert: int) -> Tensor:
    """Return the matrix [in, out] of one expert's weight."""
    weight: Tensor = held.as_parameter(name, expert)
    return weight if is_transposed else weight.t()
