"""Experts that lie in slots of their own: the bits of experts that lie one after the other."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from qllm.kernels import cpu
from qllm.kernels.cpu.experts import Clamp, Experts, Formats
from qllm.kernels.quantised import Quantised
from qllm.runner.layers.work import Unit, Work
from tests.support.quantised_products import quantised, rand

assert cpu.MISSING is None, cpu.MISSING
E, D, F = 5, 72, 40
LINE = 64


def packed(how: str, clamped: bool) -> Experts:
    """Experts in one format: bf16, int8 with a group of inputs, or codes."""
    group = int(how.removeprefix("int8 g")) if how.startswith("int8") else None

    def made(n: int, k: int, seed: int) -> Tensor | Quantised:
        if how == "bf16" or group is not None:
            return rand(n, k, seed=seed)
        return quantised(how, n, k, 16, offset=how == "u4", powers=how == "e2m1", seed=seed)

    given = [(made(2 * F, D, e), made(D, F, e + E)) for e in range(E)]
    formats = Formats(*(w if isinstance(w, Quantised) else None for w in given[0]))
    biases = (rand(E, 2 * F), rand(E, D)) if clamped else None
    clamp = Clamp(1.7, 7.0) if clamped else None
    experts = Experts(E, F, D, group, biases, clamp, formats)
    for e, weights in enumerate(given):
        experts.pack(e, *weights)
    return experts


def in_slots(experts: Experts, here: list[int], how: str, clamped: bool) -> tuple[Experts, Any]:
    """The same experts, each at a place of its own; those that are not `here` have none."""
    starts, at = dict[str, int](), 0
    for name, part in experts.parts(0).items():
        starts[name] = at
        at += -(-part.numel() // LINE) * LINE
    table = np.zeros((E, 2), dtype=np.int64)
    rooms = {e: cpu.huge_empty(at // 2 + LINE).view(torch.uint8) for e in here}
    for e, room in rooms.items():
        for name, part in experts.parts(e).items():
            room[starts[name] : starts[name] + part.numel()] = part
        table[e, 0] = room.data_ptr()
    placed = packed(how, clamped)  # its own weights are not read
    for e in range(E):
        for part in placed.parts(e).values():
            part.fill_(255)
    placed.place(table.ctypes.data, starts, E)
    return placed, (table, rooms)


def run(experts: Experts, x: Tensor, units: list[Unit], work: Work) -> Tensor:
    """Run units in this order in one call; return all slots, zeros where no unit ran."""
    work.slots_SD.zero_()
    flat = torch.tensor(units)
    experts.run(x, work.token_S, flat.data_ptr(), len(units), work.slots_SD)
    return work.slots_SD.clone()


@pytest.mark.parametrize("kernels", cpu.native.available())
@pytest.mark.parametrize("how", ["bf16", "int8 g0", "int8 g16", "u4", "i4", "i8", "e2m1", "e4m3"])
@pytest.mark.parametrize("clamped", [False, True])
def test_units_in_any_order_have_the_bits_of_packed_experts(
    kernels: str, how: str, clamped: bool
) -> None:
    rng = random.Random(f"{kernels}{how}")
    bank: Any = SimpleNamespace(num_experts=E, out_width=D, dtype=torch.bfloat16, residency=None)
    cpu.native.use(kernels)
    experts = packed(how, clamped)
    for rows, num_threads in ((1, 1), (3, 2), (40, 2)):
        cpu.set_threads(num_threads)
        x = rand(rows, D, seed=rows)
        work = Work(bank, torch.arange(E).repeat(rows, 1), 4)
        whole = run(experts, x, work.units, work)
        here = rng.sample(range(E), 3)
        placed, held = in_slots(experts, here, how, clamped)
        units = [unit for unit in work.units if unit.expert in here]
        rng.shuffle(units)
        found = run(placed, x, units, work)
        for expert, lo, hi in work.units:
            wanted = whole[lo:hi] if expert in here else torch.zeros_like(whole[lo:hi])
            assert torch.equal(found[lo:hi], wanted)
        assert not held[0][:, 1].any(), "the kernel alone notes no use"
        assert torch.equal(run(experts, x, units, work), found), "packed experts in this order"
