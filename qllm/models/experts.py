"""Routed experts as work units that may stop and go on anywhere, with the same bits.

    ids_TK -> sort the S = T * K slots by expert -> units (expert, rows [a, b) of the sorted slots)
    unit -> rows [a, b) of slots_SD            combine: sum over k of weight * slot, in slot order

One output row per (token, k) makes the result independent of the order and the partition of the
units, and equal to transformers' `grouped_mm` experts: it multiplies the same rows by the same
matrices and sums in the same order. Consecutive units run as one range of about a millisecond.
"""

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from qllm.errors import ConfigError, InvariantError
from qllm.kernels import cpu
from qllm.models.cuts import Costs
from qllm.models.discover import ModelParts
from qllm.models.linear import PLAIN, RowRule
from qllm.models.native_experts import NativeBank, is_covered


class Unit(NamedTuple):
    """Rows [lo, hi) of the sorted slots, all of one expert."""

    expert: int
    lo: int
    hi: int


class Bank(Protocol):
    """The experts of one layer."""

    kernel: str
    """What multiplies, for results."""
    num_experts: int
    out_width: int
    dtype: torch.dtype
    unit_bytes: int
    """Weights of one expert."""

    def run(self, x_TD: Tensor, work: "Work", start: int, stop: int) -> None:
        """Run units [start, stop) into their slots."""
        ...

    def combine(self, slots_SD: Tensor, inverse_S: Tensor, weights_TK: Tensor) -> Tensor:
        """Sum over k of weight times slot, [T, D]; `inverse_S` finds the slot of every (t, k)."""
        ...

    def enter(self) -> None:
        """Take the weights that it computes with, if they are the module's."""
        ...

    def leave(self) -> None:
        """Give them back."""
        ...


class TorchBank:
    """Weights of one layer's experts, as one [in, out] view per expert."""

    def __init__(self, experts: nn.Module, rule: RowRule, *, in_place: bool) -> None:
        module: Any = experts
        gate_up, down = module.gate_up_proj.detach(), module.down_proj.detach()
        if not module.is_transposed:
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        self.up = gate_up.unbind(0)
        self.down = down.unbind(0)
        self.up_bias = module.gate_up_proj_bias.detach().unbind(0) if module.has_bias else None
        self.down_bias = module.down_proj_bias.detach().unbind(0) if module.has_bias else None
        self.gate = module._apply_gate
        self.num_experts = len(self.up)
        own = type(module)._apply_gate.__module__ != "transformers.integrations.moe"
        self._by_row = own and down.shape[1] % 64 != 0
        """A gate over rows that merge: vector and scalar code differ in the last bit at the end
        of a tensor, so odd widths go row by row."""
        self.up_width = gate_up.shape[2]
        self.out_width = down.shape[2]
        self.dtype = gate_up.dtype
        self._rule = rule
        self._in_place = in_place and rule is PLAIN
        """Write matmul results in place. Measured: faster in bf16, slower in fp32."""
        self.kernel = "torch mm"
        self.unit_bytes = (gate_up[0].numel() + down[0].numel()) * gate_up.element_size()

    def _matmul(
        self,
        x_SD: Tensor,
        weights: Sequence[Tensor],
        bias: tuple[Tensor, ...] | None,
        units: list[Unit],
        out_SF: Tensor,
    ) -> None:
        """Rows of `x_SD` and `out_SF` start at the first unit's."""
        base = units[0].lo
        for expert, lo, hi in units:
            x, out = x_SD[lo - base : hi - base], out_SF[lo - base : hi - base]
            if self._in_place:
                torch.mm(x, weights[expert], out=out)
            else:
                out.copy_(self._rule.linear(x, weights[expert].t()))
            if bias is not None:
                out.add_(bias[expert])

    def run(self, x_TD: Tensor, work: "Work", start: int, stop: int) -> None:
        """Run units [start, stop) into their slots."""
        units = work.units[start:stop]
        lo, hi = units[0].lo, units[-1].hi
        x_SD = x_TD.index_select(0, work.token_S[lo:hi])
        h_SF = x_SD.new_empty((hi - lo, self.up_width), dtype=self.dtype)
        self._matmul(x_SD, self.up, self.up_bias, units, h_SF)
        if self._by_row:
            h_SF = torch.cat([self.gate(row) for row in torch.split(h_SF, 1)])
        else:
            h_SF = self.gate(h_SF)
        out_SD = work.slots_SD[lo:hi]
        self._matmul(h_SF, self.down, self.down_bias, units, out_SD)

    def combine(self, slots_SD: Tensor, inverse_S: Tensor, weights_TK: Tensor) -> Tensor:
        """Sum over k of weight times slot."""
        num_tokens, top_k = weights_TK.shape
        weighted = slots_SD.index_select(0, inverse_S) * weights_TK.reshape(-1, 1)
        return weighted.view(num_tokens, top_k, -1).sum(dim=1)

    def enter(self) -> None:
        """Nothing: the weights stay where they are."""

    def leave(self) -> None:
        """Nothing was taken."""


def expert_banks(
    parts: ModelParts, rule: RowRule, native: bool, expert_weights: str = "auto"
) -> tuple[Bank | None, ...]:
    """The experts of every layer.

    Args:
        parts: Of the model.
        rule: In which blocks torch multiplies.
        native: Our kernels, for experts that they are made for.
        expert_weights: Their format: see `EngineConfig.expert_weights`.

    Raises:
        ConfigError: The format is not "auto" and a layer is not for our kernels.
    """
    modules = [layer.experts for layer in parts.layers]
    if expert_weights != "auto":
        _refuse_others(modules, native, expert_weights)
    weights = [w for m in modules if m is not None for w in m.parameters()]
    in_place = bool(weights) and weights[0].dtype is torch.bfloat16

    def bank(module: nn.Module) -> Bank:
        if native and is_covered(module):
            return NativeBank(module, expert_weights)
        return TorchBank(module, rule, in_place=in_place)

    return tuple(None if m is None else bank(m) for m in modules)


def _refuse_others(modules: Sequence[nn.Module | None], native: bool, expert_weights: str) -> None:
    for layer, module in enumerate(modules):
        if module is None or (native and is_covered(module)):
            continue
        dtype = str(next(module.parameters()).dtype).removeprefix("torch.")
        why = f"layer {layer} has {type(module).__name__} in {dtype}"
        if not native:
            why = cpu.MISSING or "kernels='reference' has no others"
        raise ConfigError(
            f"expert_weights={expert_weights!r} needs bfloat16 experts that our CPU kernels run: "
            f"{why}; use 'auto'"
        )


class Work:
    """The EXPERTS op of one layer: its units, and the slots that are done."""

    __slots__ = ("bank", "done", "flat", "ids_TK", "inverse_S", "slots_SD", "token_S", "units")

    def __init__(self, bank: Bank, ids_TK: Tensor, unit_rows: int) -> None:
        self.bank = bank
        self.ids_TK = ids_TK
        top_k, device = ids_TK.shape[1], ids_TK.device
        flat = ids_TK.reshape(-1).cpu().numpy()
        order = np.argsort(flat, kind="stable")
        inverse = np.empty_like(order)
        inverse[order] = np.arange(len(order))
        self.token_S = torch.from_numpy(order // top_k).to(device)
        self.inverse_S = torch.from_numpy(inverse).to(device)
        self.units = _cut(flat[order].tolist(), unit_rows)
        self.flat = array("q", [value for unit in self.units for value in unit])
        """The units as integers, for kernels that are given an address."""
        shape = (len(order), bank.out_width)
        self.slots_SD = torch.empty(shape, dtype=bank.dtype, device=device)
        self.done = bytearray(len(self.units))

    @classmethod
    def of(
        cls, bank: Bank, ids_TK: Tensor, ints: Tensor, units: list[Unit], slots_SD: Tensor
    ) -> "Work":
        """One that our kernels have sorted already; `ints` is token_S and then inverse_S."""
        work = cls.__new__(cls)
        work.bank, work.ids_TK, work.units, work.slots_SD = bank, ids_TK, units, slots_SD
        work.token_S, work.inverse_S = ints.chunk(2)
        work.flat = array("q", [value for unit in units for value in unit])
        work.done = bytearray(len(units))
        return work

    def rows(self, start: int, stop: int) -> int:
        """Rows of units [start, stop)."""
        return self.units[stop - 1].hi - self.units[start].lo

    def bytes_read(self, start: int, stop: int) -> int:
        """Weights of the experts whose first unit is in [start, stop)."""
        known = {self.units[start - 1].expert} if start else set()
        experts = {unit.expert for unit in self.units[start:stop]}
        return len(experts - known) * self.bank.unit_bytes

    def end_of_range(self, start: int, costs: Costs) -> int:
        """The end of the range of units that begins at `start`: as long as `costs` allow."""
        stop, ns = start, 0.0
        while stop < len(self.units) and ns < costs.range_ns:
            _, lo, hi = self.units[stop]
            ns += costs.unit_ns + (hi - lo) * costs.row_ns
            stop += 1
        return stop

    def run(self, x_TD: Tensor, start: int, stop: int) -> int:
        """Run units [start, stop); return the slots they filled."""
        if self.done.find(1, start, stop) >= 0:
            raise InvariantError(f"an expert unit of [{start}, {stop}) would run twice (I1)")
        self.bank.run(x_TD, self, start, stop)
        self.done[start:stop] = b"\1" * (stop - start)
        return self.rows(start, stop)

    def restore(self, slots_SD: Tensor, done: Tensor) -> None:
        """Take up the slots and the done-mask of a checkpoint."""
        self.slots_SD.copy_(slots_SD)
        self.done[:] = bytes(done.tolist())

    def combine(self, lo: int, hi: int, weights_TK: Tensor, dtype: torch.dtype) -> Tensor:
        """Weighted sum of the slots of tokens [lo, hi)."""
        top_k = self.ids_TK.shape[1]
        inverse_S = self.inverse_S[lo * top_k : hi * top_k]
        return self.bank.combine(self.slots_SD, inverse_S, weights_TK[lo:hi]).to(dtype)


def _cut(sorted_ids: list[int], unit_rows: int) -> list[Unit]:
    units = []
    lo, size = 0, len(sorted_ids)
    while lo < size:
        expert, hi = sorted_ids[lo], lo + 1
        limit = min(size, lo + unit_rows)
        while hi < limit and sorted_ids[hi] == expert:
            hi += 1
        units.append(Unit(expert, lo, hi))
        lo = hi
    return units
