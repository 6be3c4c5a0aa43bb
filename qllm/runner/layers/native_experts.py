"""Experts with this project's CPU kernels, their weights packed in place of the module's.

    pack     layer by layer: pack into new memory on huge pages, free the module's weights
    unpack   layer by layer: allocate, restore every bit, free the packed weights

Rounding to int8 is not undone: `unpack` restores the rounded weights.

The experts are in memory once. While a layer is packed, its experts are in memory twice. Packing
into the module's own memory would avoid that. But the module's memory is on pages of 4 KiB, where a
product with one row runs at half the speed (see `cpu.huge_empty`). While packed, the module's
parameters keep shape and dtype on the meta device, and the module's forward raises.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from qllm.errors import InvariantError, ModelError
from qllm.kernels import cpu
from qllm.kernels.cpu import is_usable
from qllm.kernels.cpu.experts import Clamp, Cut, Experts
from qllm.models.discover import PACKED
from qllm.models.parts.known import experts as known_experts
from qllm.models.weights.expert_file import in_file
from qllm.models.weights.formats.rounding import INT8_GROUPS
from qllm.models.weights.on_demand import OnDemand, on_demand_in
from qllm.models.weights.quantised_experts import WEIGHTS, quantised_in, say_rounded
from qllm.runner.layers.work import Work
from qllm.runner.residency import LayerResidency

GROUPS = {"auto": None, **INT8_GROUPS}
"""Number of inputs per scale, by format of expert weights. None is bf16 without scales, 0 is all
inputs."""


def is_covered(experts: Any) -> bool:
    """Return True if the kernels support experts: SwiGLU, or gpt_oss's clamped gate."""
    weights = [getattr(experts, name) for name in WEIGHTS]
    is_packed = any(find(experts) is not None for find in (quantised_in, in_file, on_demand_in))
    return (
        known_experts(experts).kind is not None
        and (is_packed or all(map(is_usable, weights)))
        and all(size % 2 == 0 for w in weights for size in w.shape[1:])
        and (not experts.has_bias or is_usable(experts.gate_up_proj_bias))
    )


class NativeBank:
    """The experts of one layer. They compute between `pack` and `unpack`.

    Args:
        experts: Module that `is_covered`.
        weights: Format "auto", "int8" or "int8-g64": see `EngineConfig.expert_weights`.
    """

    residency: LayerResidency | None = None

    def __init__(self, experts: Any, weights: str = "auto") -> None:
        self._module = experts
        self._packed: Experts | None = None
        self._parameters: dict[str, nn.Parameter] = {}
        """The module's own parameters, without memory while the weights are packed."""
        up, down = experts.gate_up_proj, experts.down_proj
        self._weights, self._group = weights, GROUPS[weights]
        self.kernel = f"qllm {cpu.kind()}" + ("" if weights == "auto" else f" {weights}")
        self.num_experts, self.dtype = up.shape[0], up.dtype
        self._width, self.out_width = down.shape[1:] if experts.is_transposed else down[0].t().shape
        self._clamp = Clamp(experts.alpha, experts.limit) if not experts.is_concatenated else None
        self.unit_bytes = (up[0].numel() + down[0].numel()) * up.element_size()

    def pack(self) -> None:
        """Pack the weights and free the module's weights."""
        if self._packed is not None:
            return
        module = self._module
        if self._group is not None:
            say_rounded(module, self._weights)
        with torch.inference_mode(mode=module.down_proj.is_inference()):
            packed = self.packed(range(self.num_experts))
            for name in WEIGHTS:
                own = module._parameters[name]
                kept = torch.empty_like(own, device="meta")
                module._parameters[name] = nn.Parameter(kept, requires_grad=own.requires_grad)
                own.data = own.data.new_empty(0)
                self._parameters[name] = own
        self._packed, self.unit_bytes = packed, packed.num_bytes
        # the method holds the bank, so the weights outlive the runner
        module.forward = self._refuse
        setattr(module, PACKED, True)

    def packed(self, experts: range, cut: Cut | None = None) -> Experts:
        """Return packed copies of consecutive experts. The module keeps its weights.

        Args:
            experts: Numbers of the experts.
            cut: Share of a rank in each of them; None is all.
        """
        module, shape = self._module, (len(experts), self._width, self.out_width)
        biases = self._biases(experts, cut)
        packed = Experts(*shape, self._group, biases, self._clamp, cut=cut)
        up, down = (getattr(module, name).detach() for name in WEIGHTS)
        for i, e in enumerate(experts):
            both = self._gate_first(self._outputs(up[e])), self._outputs(down[e])
            own = both if cut is None else (cut.of_up(both[0]), cut.of_down(both[1]))
            packed.pack(i, *own)
        return packed

    def unpack(self) -> None:
        """Restore the module's weights."""
        packed, module = self._packed, self._module
        if packed is None:
            return
        self._packed = None
        with torch.inference_mode(mode=module.down_proj.is_inference()):
            up, down = (_memory_of(module._parameters[name]) for name in WEIGHTS)
            for e in range(self.num_experts):
                gates, out = self._outputs(up[e]), self._outputs(down[e])
                first = gates if module.is_concatenated else torch.empty_like(gates)
                packed.unpack(e, first, out)
                if not module.is_concatenated:
                    gates.copy_(self._module_order(first))
            for name, weight in zip(WEIGHTS, (up, down), strict=True):
                own = self._parameters.pop(name)
                own.data = weight
                module._parameters[name] = own
        vars(module).pop("forward", None)
        delattr(module, PACKED)

    def _outputs(self, weight: Tensor) -> Tensor:
        """Return a view with a row per output."""
        return weight.t() if self._module.is_transposed else weight

    def _gate_first(self, rows: Tensor) -> Tensor:
        """Return [2F, ...] with the rows of the gate before the rows of the up projection."""
        return rows if self._module.is_concatenated else torch.cat([rows[0::2], rows[1::2]])

    def _module_order(self, rows: Tensor) -> Tensor:
        """Return rows [2F, ...] in the module's order, from rows with the gate first."""
        if self._module.is_concatenated:
            return rows
        return torch.stack(rows.chunk(2), dim=1).flatten(0, 1)

    def _biases(self, experts: range, cut: Cut | None = None) -> tuple[Tensor, Tensor] | None:
        module, which = self._module, slice(experts.start, experts.stop)
        if not module.has_bias:
            return None
        both = module.gate_up_proj_bias, module.down_proj_bias
        up, down = (bias.detach()[which].t() for bias in both)
        up = self._gate_first(up)
        own = (up, down) if cut is None else (cut.of_up(up), cut.of_down(down))
        return own[0].t().contiguous(), own[1].t().contiguous()

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise ModelError(
            "the experts of this model are packed for the runner that serves it, so its own "
            "forward cannot run; close that runner (or its engine) first, or serve with "
            "kernels='reference'"
        )

    @property
    def address(self) -> int:
        """Address of `Experts` in kernels.h; valid until `unpack`."""
        return self._entered().address

    def _entered(self) -> Experts:
        if self._packed is None:
            raise InvariantError("these experts were given back to their module")
        return self._packed

    def run(self, x_TD: Tensor, work: Work, start: int, stop: int) -> None:
        """Run work units [start, stop), which write into their slots."""
        units = work.flat.buffer_info()[0] + start * 3 * work.flat.itemsize
        self._entered().run(x_TD, work.token_S, units, stop - start, work.slots_SD)

    def combine(self, slots_SD: Tensor, inverse_S: Tensor, weights_TK: Tensor) -> Tensor:
        """Return, per token, the sum over its k experts of weight times slot."""
        return cpu.combine(slots_SD, inverse_S, weights_TK)


class RankBank(NativeBank):
    """The experts of one layer, of which each rank reads and packs its share.

    Args:
        experts: Module that `is_covered`, whose weights are read on demand.
        weights: Weights of the module.
        activations: Dtype of the rows that products with integer weights read.
    """

    def __init__(self, experts: Any, weights: OnDemand, activations: str) -> None:
        super().__init__(experts)
        weights.activations, self._all = activations, weights
        self.kernel = f"qllm {cpu.kind()} {weights.reads}".removesuffix(" bf16")
        self.unit_bytes = weights.num_bytes // self.num_experts

    def pack(self) -> None:
        """Raise an error: the bank of all experts does not compute."""
        raise InvariantError("experts that ranks read were packed as a whole")

    def packed(self, experts: range, cut: Cut | None = None) -> Experts:
        """Read consecutive experts, or a share of each, and return them packed."""
        return self._all.packed(experts, self._biases(experts, cut), self._clamp, cut)


def _memory_of(kept: Tensor) -> Tensor:
    return torch.empty_strided(kept.shape, kept.stride(), dtype=kept.dtype, device="cpu")
