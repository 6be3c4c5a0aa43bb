"""One EXPERTS op: the rows of each expert, in work units. The op may stop after any unit.

    ids_TK -> sort the S = T * K slots by expert -> units (expert, rows [a, b) of the sorted slots)
    unit -> rows [a, b) of slots_SD            combine: sum over k of weight * slot, in slot order

Each pair (token, k) has an output row of its own. So the result does not depend on the order of the
units, nor on the rows in each unit. Consecutive units run as one range of about a millisecond.

Experts in a file may be absent. Then units of present experts run first: the units that are not
done are put into another order, which is part of the state of the op.
"""

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from qllm.errors import InvariantError
from qllm.runner.cuts import CutCosts
from qllm.runner.residency import LayerResidency, Missing


class Unit(NamedTuple):
    """A work unit: the rows [lo, hi) of the sorted slots, all of one expert."""

    expert: int
    lo: int
    hi: int


class Bank(Protocol):
    """The experts of one layer."""

    kernel: str
    """Name of the implementation that multiplies, for benchmark results."""
    num_experts: int
    out_width: int
    dtype: torch.dtype
    unit_bytes: int
    """Bytes of one expert's weights."""
    residency: LayerResidency | None
    """Experts that may be absent; None if all are in memory."""

    def run(self, x_TD: Tensor, work: "Work", start: int, stop: int) -> None:
        """Run work units [start, stop), which write into their slots."""
        ...

    def combine(self, slots_SD: Tensor, inverse_S: Tensor, weights_TK: Tensor) -> Tensor:
        """Return, per token, the sum over its k experts of weight times slot, [T, D].

        `inverse_S` contains the slot of every pair (token, k).
        """
        ...

    def pack(self) -> None:
        """Take the weights from the module and pack them, unless they are packed already."""
        ...

    def unpack(self) -> None:
        """Return the weights to the module."""
        ...


class Work:
    """The EXPERTS op of one layer: its work units, and a mask of the units that are done."""

    __slots__ = (
        *("bank", "done", "flat", "ids_TK", "inverse_S", "residency", "slots_SD", "token_S"),
        "units",
    )

    def __init__(self, bank: Bank, ids_TK: Tensor, unit_rows: int) -> None:
        self.bank, self.residency = bank, bank.residency
        self.ids_TK = ids_TK
        top_k, device = ids_TK.shape[1], ids_TK.device
        flat = ids_TK.reshape(-1).cpu().numpy()
        order = np.argsort(flat, kind="stable")
        inverse = np.empty_like(order)
        inverse[order] = np.arange(len(order))
        self.token_S = torch.from_numpy(order // top_k).to(device)
        self.inverse_S = torch.from_numpy(inverse).to(device)
        self._order(_cut(flat[order].tolist(), unit_rows))
        shape = (len(order), bank.out_width)
        self.slots_SD = torch.empty(shape, dtype=bank.dtype, device=device)
        self.done = bytearray(len(self.units))

    @classmethod
    def of(
        cls, bank: Bank, ids_TK: Tensor, ints: Tensor, units: list[Unit], slots_SD: Tensor
    ) -> "Work":
        """Return work that kernels have sorted already. `ints` has token_S and then inverse_S."""
        work = cls.__new__(cls)
        work.bank, work.residency = bank, bank.residency
        work.ids_TK, work.slots_SD = ids_TK, slots_SD
        work.token_S, work.inverse_S = ints.chunk(2)
        work._order(units)
        work.done = bytearray(len(units))
        return work

    def _order(self, units: list[Unit]) -> None:
        self.units = units
        self.flat = array("q", [value for unit in units for value in unit])
        """Units as integers, for kernels that read them from an address."""

    def missing(self, start: int) -> Missing | None:
        """Return the experts without which unit `start` cannot run; None if it can.

        From unit `start` on, units of present experts move to the front.
        """
        if self.residency is None:
            return None
        rest = self.units[start:]
        here = [unit for unit in rest if self.residency.has(unit.expert)]
        gone = [unit for unit in rest if not self.residency.has(unit.expert)]
        if gone and here:
            self._order([*self.units[:start], *here, *gone])
        if here:
            return None
        experts = tuple(dict.fromkeys(unit.expert for unit in gone))
        return Missing(self.residency, experts, is_range=False)

    @contextmanager
    def in_memory(self, start: int, missing: Missing | None) -> Iterator[None]:
        """Hold the experts of the next range in memory inside the `with` block.

        Args:
            start: First unit of the range.
            missing: Absent experts, which are read first, as many as fit; see `missing`.
        """
        if self.residency is None:
            yield
            return
        has = self.residency.has
        present = [unit.expert for unit in self.units[start:] if has(unit.expert)]
        with self.residency.pinned(present) if missing is None else missing.in_memory():
            yield

    def rows(self, start: int, stop: int) -> int:
        """Return the number of rows of work units [start, stop)."""
        return sum(hi - lo for _, lo, hi in self.units[start:stop])

    def bytes_read(self, start: int, stop: int) -> int:
        """Return the bytes of the experts whose first unit is in [start, stop)."""
        known = {self.units[start - 1].expert} if start else set()
        experts = {unit.expert for unit in self.units[start:stop]}
        return len(experts - known) * self.bank.unit_bytes

    def end_of_range(self, start: int, costs: CutCosts) -> int:
        """Return the end of the range from unit `start` on.

        The range is as long as `costs` allow, and ends before an absent expert.
        """
        stop, ns, residency = start, 0.0, self.residency
        while stop < len(self.units) and ns < costs.range_ns:
            expert, lo, hi = self.units[stop]
            if residency is not None and not residency.has(expert):
                break
            ns += costs.unit_ns + (hi - lo) * costs.row_ns
            stop += 1
        return stop

    def run(self, x_TD: Tensor, start: int, stop: int) -> int:
        """Run work units [start, stop); return the number of slots that the units filled."""
        if self.done.find(1, start, stop) >= 0:
            raise InvariantError(f"an expert unit of [{start}, {stop}) would run twice (I1)")
        self.bank.run(x_TD, self, start, stop)
        if self.residency is not None:
            self.residency.use(unit.expert for unit in self.units[start:stop])
        self.done[start:stop] = b"\1" * (stop - start)
        return self.rows(start, stop)

    def restore(self, slots_SD: Tensor, done: Tensor, units: Tensor | None) -> None:
        """Restore a checkpoint: slots, the mask of the units that are done, and their order.

        Raises:
            InvariantError: The units are not those of this op.
        """
        if units is not None:
            order = [Unit(*unit) for unit in units.tolist()]
            if sorted(order) != sorted(self.units):
                raise InvariantError("a checkpoint has other expert units than its op (I1)")
            self._order(order)
        self.slots_SD.copy_(slots_SD)
        self.done[:] = bytes(done.tolist())

    def results(self) -> Tensor:
        """Return a copy of the slots, [S, D]."""
        return self.slots_SD.clone()

    def combine(self, lo: int, hi: int, weights_TK: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weighted sum of the slots of tokens [lo, hi)."""
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
