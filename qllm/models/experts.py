"""Routed experts as work units that may stop and go on anywhere, with the same bits.

    ids_TK -> sort the S = T * K slots by expert -> units (expert, rows [a, b) of the sorted slots)
    unit -> rows [a, b) of slots_SD            combine: sum over k of weight * slot, in slot order

One output row per (token, k) makes the result independent of the order and the partition of the
units, and equal to transformers' `grouped_mm` experts: it multiplies the same rows by the same
matrices and sums in the same order. Consecutive units run as one range of about a millisecond.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qllm.errors import InvariantError
from qllm.models.discover import ModelParts
from qllm.models.linear import PLAIN, RowRule
from qllm.models.packed import pack_all, packed_linear


class Unit(NamedTuple):
    """Rows [lo, hi) of the sorted slots, all of one expert."""

    expert: int
    lo: int
    hi: int


class ExpertBank:
    """Weights of one layer's experts, as one [in, out] view per expert, and packed if asked."""

    def __init__(
        self, experts: nn.Module, rule: RowRule, *, in_place: bool, packed: bool = False
    ) -> None:
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
        self._packed_up = pack_all([w.t() for w in self.up]) if packed else None
        self._packed_down = pack_all([w.t() for w in self.down]) if packed else None
        self._in_place = in_place and rule is PLAIN
        """Write matmul results in place. Measured: faster in bf16, slower in fp32."""
        one = gate_up[0].numel() + down[0].numel()
        self.unit_bytes = one * gate_up.element_size()
        self.row_flops = 2 * one

    @property
    def is_packed(self) -> bool:
        """Whether its weights were copied in the matrix library's layout."""
        return self._packed_up is not None

    def _matmul(
        self,
        x_SD: Tensor,
        weights: Sequence[Tensor],
        packed: Sequence[Tensor] | None,
        bias: tuple[Tensor, ...] | None,
        units: list[Unit],
        out_SF: Tensor,
    ) -> None:
        """Rows of `x_SD` and `out_SF` start at the first unit's."""
        base = units[0].lo
        rule = self._rule
        for expert, lo, hi in units:
            x, out = x_SD[lo - base : hi - base], out_SF[lo - base : hi - base]
            if packed is not None and rule is PLAIN:
                out.copy_(packed_linear(x, packed[expert]))
            elif packed is not None:
                out.copy_(rule.apply(x, partial(packed_linear, packed=packed[expert])))
            elif self._in_place:
                torch.mm(x, weights[expert], out=out)
            else:
                out.copy_(rule.linear(x, weights[expert].t()))
            if bias is not None:
                out.add_(bias[expert])

    def run(self, x_SD: Tensor, units: list[Unit], out_SD: Tensor) -> None:
        """Run units whose gathered rows are `x_SD` into `out_SD`."""
        h_SF = x_SD.new_empty((x_SD.shape[0], self.up_width), dtype=self.dtype)
        self._matmul(x_SD, self.up, self._packed_up, self.up_bias, units, h_SF)
        if self._by_row:
            h_SF = torch.cat([self.gate(row) for row in torch.split(h_SF, 1)])
        else:
            h_SF = self.gate(h_SF)
        self._matmul(h_SF, self.down, self._packed_down, self.down_bias, units, out_SD)


def expert_banks(
    parts: ModelParts, rule: RowRule, max_packed_bytes: int
) -> tuple[ExpertBank | None, ...]:
    """The experts of every layer, packed if the copies of all take at most so many bytes."""
    modules = [layer.experts for layer in parts.layers]
    weights = [w for m in modules if m is not None for w in m.parameters()]
    packed = sum(w.numel() * w.element_size() for w in weights) <= max_packed_bytes
    in_place = bool(weights) and weights[0].dtype is torch.bfloat16
    return tuple(
        None if m is None else ExpertBank(m, rule, in_place=in_place, packed=packed)
        for m in modules
    )


class Work:
    """The EXPERTS op of one layer: its units, and the slots that are done."""

    __slots__ = ("_inverse", "bank", "done", "ids_TK", "slots_SD", "token_S", "top_k", "units")

    def __init__(self, bank: ExpertBank, ids_TK: Tensor, unit_rows: int) -> None:
        self.bank = bank
        self.ids_TK = ids_TK
        num_tokens, self.top_k = ids_TK.shape
        size = num_tokens * self.top_k
        self.token_S: Tensor | None = None
        self._inverse: Tensor | None = None
        if num_tokens == 1:
            ids = ids_TK[0].tolist()
            order = sorted(range(size), key=ids.__getitem__)
            self.units = [Unit(ids[k], k, k + 1) for k in order]
        else:
            sorted_ids, perm = torch.sort(ids_TK.reshape(-1), stable=True)
            self.token_S = perm // self.top_k
            self._inverse = torch.empty_like(perm)
            self._inverse[perm] = torch.arange(size, device=perm.device)
            self.units = _cut(sorted_ids.tolist(), unit_rows)
        self.slots_SD = torch.empty((size, bank.out_width), dtype=bank.dtype, device=ids_TK.device)
        self.done = bytearray(len(self.units))

    def run(self, x_TD: Tensor, start: int, stop: int) -> int:
        """Run units [start, stop); return the slots they filled."""
        units = self.units[start:stop]
        if self.done.find(1, start, stop) >= 0:
            raise InvariantError(f"an expert unit of [{start}, {stop}) would run twice (I1)")
        rows = 0
        if self.token_S is None:  # one token: its slots are written in place, in any order
            for unit in units:
                self.bank.run(x_TD, [unit], self.slots_SD[unit.lo : unit.hi])
            rows = len(units)
        else:
            lo, hi = units[0].lo, units[-1].hi
            x_SD = x_TD.index_select(0, self.token_S[lo:hi])
            self.bank.run(x_SD, units, self.slots_SD[lo:hi])
            rows = hi - lo
        self.done[start:stop] = b"\1" * (stop - start)
        return rows

    def combine(self, lo: int, hi: int, weights_TK: Tensor, dtype: torch.dtype) -> Tensor:
        """Weighted sum of the slots of tokens [lo, hi)."""
        a, b = lo * self.top_k, hi * self.top_k
        if self._inverse is None:
            slots = self.slots_SD
        else:
            slots = self.slots_SD.index_select(0, self._inverse[a:b])
        weighted = slots * weights_TK[lo:hi].reshape(-1, 1)
        return weighted.view(hi - lo, self.top_k, -1).sum(dim=1).to(dtype)


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
