"""Experts whose weights a checkpoint holds quantised: packed for our kernels, or for torch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from qllm.errors import ModelError
from qllm.kernels import cpu
from qllm.kernels.cpu.experts import Experts, Formats
from qllm.kernels.quantised import Quantised
from qllm.models.quantised_experts import WEIGHTS, QuantisedExperts
from qllm.runner.layers.native_experts import NativeBank


class QuantisedBank(NativeBank):
    """Experts of one layer that compute on packed codes.

    Packing moves the codes: each expert's are freed as soon as they are packed, and stay packed
    when the runner is closed, where another runner finds them. The module's own forward computes
    with their values all the while (`QuantisedExperts`).

    Args:
        held: The weights of a module that `is_covered`.
        module: It.
    """

    def __init__(self, held: QuantisedExperts, module: object) -> None:
        super().__init__(module)
        self._held = held
        self.kernel = f"qllm {cpu.kind()} {held.kind}"
        self.unit_bytes = held.num_bytes // self.num_experts

    def pack(self) -> None:
        """Pack the weights, or take those that are packed.

        Raises:
            ModelError: The kernels have no such weights.
        """
        if self._packed is not None:
            return
        if self._held.packed is None:
            with torch.inference_mode():
                self._held.packed = self._pack_all()
            self._held.read = self._read
        assert isinstance(self._held.packed, Experts)
        self._packed = self._held.packed
        self.unit_bytes = self._packed.num_bytes
        self._held.num_bytes = self._packed.num_bytes * self.num_experts

    def unpack(self) -> None:
        """Compute no more; nobody gets anything back."""
        self._packed = None

    def _pack_all(self) -> Experts:
        like = [self._held.like[name] for name in WEIGHTS]
        shape = self.num_experts, self._width, self.out_width
        try:
            packed = Experts(*shape, None, self._biases(), self._clamp, Formats(*like))
            for expert in range(self.num_experts):
                up, down = self._held.take(expert)
                packed.pack(expert, self._gate_first_of(up), down)
        except ValueError as error:
            raise ModelError(f"quantised experts cannot be packed: {error}") from error
        return packed

    def _gate_first_of(self, up: Quantised) -> Quantised:
        """Outputs of the gate before those of up, whatever the order in the module."""
        offset = None if up.offset_NG is None else self._gate_first(up.offset_NG)
        return up._replace(
            codes=self._gate_first(up.codes),
            scale_NG=self._gate_first(up.scale_NG),
            offset_NG=offset,
        )

    def _read(self, name: str, expert: int) -> Tensor:
        """bf16 values of a packed weight, outputs in the order of the module."""
        packed = self._held.packed
        assert isinstance(packed, Experts)
        up = torch.empty((2 * self._width, self.out_width), dtype=torch.bfloat16)
        down = torch.empty((self.out_width, self._width), dtype=torch.bfloat16)
        packed.unpack(expert, up, down)
        return down if name == WEIGHTS[1] else self._module_order(up)


class Dequantising(Sequence[Tensor]):
    """Matrices [in, out] of experts for torch; each is made when it is asked for."""

    def __init__(self, held: QuantisedExperts, name: str, num: int, is_transposed: bool) -> None:
        self._held, self._name, self._num, self._is_transposed = held, name, num, is_transposed

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, expert: int) -> Tensor:  # type: ignore[override]
        weight = self._held.as_parameter(self._name, expert)
        return weight if self._is_transposed else weight.t()
