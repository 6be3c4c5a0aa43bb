"""The experts of every layer, with torch or with this project's kernels.

`TorchBank` gives the bits of transformers' `grouped_mm` experts. It multiplies the same rows by the
same matrices, and sums in the same order.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qllm.errors import ConfigError
from qllm.kernels import cpu
from qllm.models.discover import ModelParts
from qllm.models.weights.expert_file import in_file
from qllm.models.weights.formats.rounding import ROUNDINGS
from qllm.models.weights.on_demand import on_demand_in
from qllm.models.weights.quantised_experts import (
    WEIGHTS,
    quantised_in,
    round_experts,
    rounded_before,
)
from qllm.runner.layers.file_bank import FileBank
from qllm.runner.layers.native_experts import NativeBank, RankBank, is_covered
from qllm.runner.layers.quantised_bank import OnAccess, QuantisedBank, dequantised
from qllm.runner.layers.rows import PLAIN, RowRule
from qllm.runner.layers.work import Bank, Unit, Work
from qllm.runner.residency import FileResidency


class TorchBank:
    """The weights of one layer's experts, as one [in, out] view per expert."""

    def __init__(
        self, experts: nn.Module, rule: RowRule, file: FileBank | None = None, *, in_place: bool
    ) -> None:
        module: Any = experts
        self._file = file
        self.residency = None if file is None else file.residency
        gate_up, down = module.gate_up_proj.detach(), module.down_proj.detach()
        if not module.is_transposed:
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        held = quantised_in(module)
        self.up: Sequence[Tensor] = gate_up.unbind(0)
        self.down: Sequence[Tensor] = down.unbind(0)
        if held is not None:
            self.up, self.down = (
                OnAccess(len(gate_up), partial(dequantised, held, name, module.is_transposed))
                for name in WEIGHTS
            )
        if file is not None:
            self.up, self.down = (
                OnAccess(len(gate_up), partial(file.values, down)) for down in (False, True)
            )
        self.up_bias = module.gate_up_proj_bias.detach().unbind(0) if module.has_bias else None
        self.down_bias = module.down_proj_bias.detach().unbind(0) if module.has_bias else None
        self.gate = module._apply_gate
        self.num_experts = len(self.up)
        own = type(module)._apply_gate.__module__ != "transformers.integrations.moe"
        self._by_row = own and down.shape[1] % 64 != 0
        """True if the gate runs row by row. Joined rows of odd widths would differ in the last bit,
        because the end of a tensor runs scalar code instead of vector code."""
        self.up_width = gate_up.shape[2]
        self.out_width = down.shape[2]
        self.dtype = gate_up.dtype
        self._rule = rule
        self._in_place = in_place and rule is PLAIN
        """True to write products in place. By measurement this is faster in bf16, and slower in
        fp32."""
        self.kernel = "torch mm" if held is None else f"torch mm, dequantised {held.kind}"
        self.unit_bytes = (gate_up[0].numel() + down[0].numel()) * gate_up.element_size()
        if held is not None:
            self.unit_bytes = held.num_bytes // self.num_experts
        if file is not None:
            self.kernel, self.unit_bytes = f"torch mm, {file.kernel}", file.unit_bytes

    def _matmul(
        self,
        x_SD: Tensor,
        weights: Sequence[Tensor],
        bias: tuple[Tensor, ...] | None,
        units: list[Unit],
        out_SF: Tensor,
    ) -> None:
        """Multiply the rows of work units.

        `x_SD` and `out_SF` start at the row of the first unit.
        """
        base = units[0].lo
        for expert, lo, hi in units:
            x, out = x_SD[lo - base : hi - base], out_SF[lo - base : hi - base]
            if self._in_place:
                torch.mm(x, weights[expert], out=out)
            else:
                out.copy_(self._rule.linear(x, weights[expert].t()))
            if bias is not None:
                out.add_(bias[expert])

    def run(self, x_TD: Tensor, work: Work, start: int, stop: int) -> None:
        """Run work units [start, stop), which write into their slots."""
        while start < stop:  # units whose rows follow each other run together
            end = start + 1
            while end < stop and work.units[end].lo == work.units[end - 1].hi:
                end += 1
            self._run(x_TD, work, work.units[start:end])
            start = end

    def _run(self, x_TD: Tensor, work: Work, units: list[Unit]) -> None:
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
        """Return, per token, the sum over its k experts of weight times slot."""
        num_tokens, top_k = weights_TK.shape
        weighted = slots_SD.index_select(0, inverse_S) * weights_TK.reshape(-1, 1)
        return weighted.view(num_tokens, top_k, -1).sum(dim=1)

    def pack(self) -> None:
        """Allocate the slots of a file. Other weights stay in the module."""
        if self._file is not None:
            self._file.pack()

    def unpack(self) -> None:
        """Free the slots of a file. Other weights are in the module."""
        if self._file is not None:
            self._file.unpack()


def expert_banks(
    parts: ModelParts,
    rule: RowRule,
    native: bool,
    expert_weights: str = "auto",
    activations: str = "bf16",
) -> tuple[Bank | None, ...]:
    """Return the experts of every layer; None for a dense layer.

    Args:
        parts: Parts of the model.
        rule: Blocks of rows in which torch multiplies.
        native: True to use kernels for the experts that they support.
        expert_weights: Format of the weights: see `EngineConfig.expert_weights`.
        activations: Dtype of the inputs of experts that are rounded here: see
            `EngineConfig.activations`.

    Raises:
        ConfigError: The kernels do not support a layer, and the format is not "auto" or activations
            are not "bf16".
    """
    modules = [layer.experts for layer in parts.layers]
    if expert_weights != "auto":
        _refuse_others(modules, native, expert_weights)
    weights = [w for m in modules if m is not None for w in m.parameters()]
    in_place = bool(weights) and weights[0].dtype is torch.bfloat16
    residency = _residency_of(modules, parts.shape.experts_per_token)

    def bank(module: nn.Module) -> Bank:
        place = in_file(module)
        if place is not None and residency is not None:
            file = FileBank(module, place, residency, activations)
            return file if native else TorchBank(module, rule, file, in_place=in_place)
        apart = on_demand_in(module)
        if apart is not None and native and is_covered(module):
            return RankBank(module, apart, activations)
        held = quantised_in(module)
        if held is None and expert_weights in ROUNDINGS:
            held = round_experts(module, expert_weights)
            held.activations = activations
        if not native or not is_covered(module):
            if held is not None and held.has_integers and activations != "bf16":
                raise ConfigError(
                    f"activations={activations!r} needs experts that our CPU kernels run, and "
                    f"those of {type(module).__name__} ({held.kind}) are none; use 'bf16'"
                )
            return TorchBank(module, rule, in_place=in_place)
        return NativeBank(module, expert_weights) if held is None else QuantisedBank(held, module)

    return tuple(None if m is None else bank(m) for m in modules)


def _residency_of(modules: Sequence[nn.Module | None], top_k: int) -> FileResidency | None:
    """Return the residency of the experts of all layers; None if they are not in a file."""
    place = next((found for module in modules if (found := in_file(module)) is not None), None)
    return None if place is None else FileResidency(place.file, place.max_bytes, top_k)


def _refuse_others(modules: Sequence[nn.Module | None], native: bool, expert_weights: str) -> None:
    for layer, module in enumerate(modules):
        held = quantised_in(module)
        if held is not None and held.rounding != expert_weights:
            raise ConfigError(
                f"expert_weights={expert_weights!r} rounds bfloat16 weights, and the experts of "
                f"layer {layer} are quantised already ({held.kind}); use 'auto'"
            )
        before = rounded_before(module)
        if before not in (None, expert_weights):
            raise ConfigError(
                f"expert_weights={expert_weights!r} rounds bfloat16 weights, and the experts of "
                f"layer {layer} were rounded before ({before}): they would be rounded twice; use "
                "'auto', or load bfloat16 weights"
            )
        place = in_file(module)
        if place is not None and place.file.says["expert_weights"] != expert_weights:
            raise ConfigError(
                f"expert_weights={expert_weights!r} differs from that of the experts in "
                f"{place.file.path}, {place.file.says['expert_weights']!r}; use that one, or load "
                "with another file"
            )
        apart = on_demand_in(module)
        if apart is not None and apart.expert_weights != expert_weights:
            raise ConfigError(
                f"expert_weights={expert_weights!r} differs from that of the load, "
                f"{apart.expert_weights!r}; use that one"
            )
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
