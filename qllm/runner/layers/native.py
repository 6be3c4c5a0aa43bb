"""The driver with this project's CPU kernels for known modules. The fast driver runs other modules.

Torch runs a module that is not known (`qllm.models.parts.known`), that has a hook, or whose shape
the kernels do not support. Results round where the modules of transformers round. They differ from
the modules' results only by the order of fp32 sums.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qllm.kernels import cpu
from qllm.kernels.cpu.attention import Attention, Begun, Latents
from qllm.kernels.cpu.deltas import DeltaNet
from qllm.kernels.cpu.experts import Mlp
from qllm.kernels.cpu.norms import Norm
from qllm.kernels.cpu.routers import Router
from qllm.models.discover import LayerParts
from qllm.models.parts.known import latent_linears
from qllm.runner.cuts import CutCosts
from qllm.runner.layers.attention import Step
from qllm.runner.layers.deltas import DeltaMixer
from qllm.runner.layers.drivers import FastDriver, LayerDriver, Rope, Routed, RouterExtras
from qllm.runner.layers.native_parts import (
    Projection,
    heads_of,
    is_known_norm,
    knows_attention,
    knows_latents,
    knows_mlp,
    knows_router,
    latents_of,
    matrix,
    mlp_of,
    native_norm,
    norm_of,
    router_of,
)


class NativeLayer(NamedTuple):
    """A layer whose submodules, except perhaps the experts, have kernels (kernels/cpu/sweep.h)."""

    mixer: Attention | Latents | DeltaNet
    deltas: DeltaMixer | None
    """Owner of the states of `mixer`; None if it attends."""
    first_norm: Norm | None
    """Norm before `deltas`, or before `gate`."""
    gate: cpu.Matrix | None
    """Weight that makes the gate of the attention's output."""
    out: cpu.Matrix
    router: Router | None
    """Router; None in a dense layer."""
    mlp: Mlp | None
    """Shared experts, or the MLP of a dense layer."""
    norm: Norm | None
    """Norm before the MLP in a dense layer."""
    number: int
    """Number of the layer."""
    window: int | None
    scale: float
    """Factor of the outputs that are added to the residual stream."""

    @property
    def slab(self) -> tuple[int, int, int] | None:
        """KV heads and widths of the slabs: see `Attention`; None if the layer does not attend."""
        return None if isinstance(self.mixer, DeltaNet) else self.mixer.slab

    @property
    def mixes(self) -> str:
        """Name of the mixer's field in `Layer` of sweep.h."""
        kinds = {Attention: "attention", Latents: "latents", DeltaNet: "deltas"}
        return kinds[type(self.mixer)]

    @property
    def into(self) -> cpu.Matrix | None:
        """Projection to the inputs of `mixer`; None if the mixer includes the projection."""
        return self.mixer.into if isinstance(self.mixer, DeltaNet) else None

    @property
    def top_k(self) -> int:
        """Experts per token."""
        return 0 if self.router is None else self.router.top_k

    @property
    def weights(self) -> torch.dtype:
        """Dtype of the experts' weights, as the router returns them."""
        return torch.bfloat16 if self.router is None else self.router.dtype

    def fits(self, others: "Iterable[NativeLayer]") -> bool:
        """Return True if this layer can run in one call with the other layers."""
        return all(
            (None in (self.slab, x.slab) or self.slab == x.slab)
            and (
                None in (self.router, x.router)
                or (self.weights, self.mlp is None) == (x.weights, x.mlp is None)
            )
            for x in others
        )


class NativeDriver(FastDriver):
    """The driver of a layer of known structure. Each submodule uses a kernel if there is one."""

    def __init__(
        self, parts: LayerParts, arena: cpu.Arena, mixer: DeltaMixer | None = None
    ) -> None:
        super().__init__(parts)
        self._arena, self.mixer = arena, mixer
        self._first_norm = native_norm(self._norm)
        self._gate: cpu.Matrix | None = None
        """Weight of the gate, whose input is the output of the norm before attention."""
        self._attention: Attention | Latents | None = None
        self._router_kernel: Router | None = None
        self._mlp_kernel: Mlp | None = None
        self._mlp_norm: Norm | None = None
        attn: Any = parts.self_attn
        if mixer is not None:
            self.covered += mixer.covered
            self._out, self._index = mixer.kernel.out, mixer.index
        elif knows_attention(attn, self._norm):
            self._make_attention(attn)
        elif knows_latents(attn, self._norm):
            self._make_latents(attn)
        if parts.router is not None and knows_router(parts):
            self._make_router(parts.router)
        if parts.shared is not None and knows_mlp(parts.shared, parts.shared_gate):
            self._make_mlp(parts.shared, parts.shared_gate)
        elif not parts.is_moe and is_known_norm(self._post_norm) and knows_mlp(parts.mlp, None):
            self._make_mlp(parts.mlp, None)

    # -- known submodules

    def _make_mlp(self, mlp: Any, gate: Any) -> None:
        self._mlp_kernel = mlp_of(mlp, gate).kernel()
        self._mlp_norm = None if self._parts.is_moe else norm_of(self._post_norm)
        linears = [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        self.covered += (*linears, *([] if gate is None else [gate]))

    def _make_attention(self, attn: Any) -> None:
        weights = heads_of(attn, self._norm)
        if weights.gate is not None:
            self._gate = matrix([weights.gate], self._arena)
        self._attention = weights.kernel(self._arena)
        self._finish_attention(attn, weights.out, [attn.q_proj, attn.k_proj, attn.v_proj])

    def _make_latents(self, attn: Any) -> None:
        weights = latents_of(attn, self._norm)
        self._attention = weights.kernel(self._arena)
        self._finish_attention(attn, weights.out, latent_linears(attn)[:-1])

    def _finish_attention(self, attn: Any, out: Projection, covered: list[nn.Module]) -> None:
        self._out = matrix([out], self._arena)
        self._index = attn.layer_idx
        self.covered += (*covered, attn.o_proj)

    def _make_router(self, router: Any) -> None:
        self._router_kernel = router_of(router, self._post_norm)
        self.covered += (router,)

    @property
    def names(self) -> Iterator[str]:
        """Names of the submodules that run with kernels."""
        if self._attention is not None:
            yield "attention"
        if self._router_kernel is not None:
            yield "router"
        if self._mlp_kernel is not None:
            yield "mlp"

    @property
    def is_complete(self) -> bool:
        """True if all submodules except the experts have kernels."""
        parts, mixes = self._parts, self._attention is not None
        if self.mixer is not None:
            mixes = self._first_norm is not None
        has_mlp = parts.shared is not None or not parts.is_moe
        return (
            mixes
            and (not parts.is_moe or self._router_kernel is not None)
            and (not has_mlp or self._mlp_kernel is not None)
        )

    @property
    def whole(self) -> NativeLayer | None:
        """Data of this layer for one call over several layers; None if a module has no kernel."""
        deltas = self.mixer
        mixer = self._attention if deltas is None else deltas.kernel
        if mixer is None or not self.is_complete:
            return None
        return NativeLayer(
            mixer,
            deltas,
            self._first_norm,
            self._gate,
            self._out,
            self._router_kernel,
            self._mlp_kernel,
            self._mlp_norm,
            self._index,
            self._parts.window,
            1.0 if self._scale is None else self._scale,
        )

    # -- execution

    def attend(self, x_TD: Tensor, rope: Rope, step: Step) -> Tensor:
        if self.mixer is not None:
            norm = self._norm if self._first_norm is None else self._first_norm
            given: dict[str, Any] = {self.mixer.cache_name: step}
            mixed = self.mixer(hidden_states=norm(x_TD).unsqueeze(0), **given)
            return self._add(x_TD, mixed[0])
        if self._attention is None:
            return super().attend(x_TD, rope, step)
        mid, _, _ = self.attend_some(x_TD, rope, step, 0, None, 1 << 62)
        assert mid is not None
        return mid

    def attend_some(
        self, x_TD: Tensor, rope: Rope, step: Step, pos: int, begun: Begun | None, num_keys: int
    ) -> tuple[Tensor | None, Begun | None, int]:
        """Attend to the next `num_keys` keys, a multiple of KEY_BLOCK.

        See the function `attend_some`.
        """
        kernel, window = self._attention, self._parts.window
        if kernel is None:
            return self.attend(x_TD, rope, step), None, 0
        spans = step.addresses(kernel.slab, x_TD)
        step.reach()
        op = self._index, window, spans.address, len(step.spans)
        begin, end = step.first_key(window) if pos == 0 else pos, step.num_keys
        stop = begin + num_keys
        if pos == 0:
            q = kernel.enter(x_TD, rope[0], rope[-1], self._index, spans.address, len(step.spans))
            if stop < end:
                begun = kernel.begin(q)
        if begun is not None and stop < end:
            kernel.attend_some(begun.q, *op, begun.part(begin, stop, pos == 0, False))
            return None, begun, stop
        whole = step.num_attended == step.num_tokens
        if begun is None:
            out = kernel.attend(q, *op, whole)
        else:
            out = kernel.attend(begun.q, *op, whole, begun.part(begin, end, False, True))
        if self._gate is not None:
            assert self._first_norm is not None
            by = self._gate.linear(self._first_norm(x_TD))
            cpu.native.gate(out.data_ptr(), by.data_ptr(), out.numel())
        return self._add(x_TD, self._out.linear(out)), None, 0

    def route(self, x_TD: Tensor, mid_TD: Tensor) -> Routed:
        if self._router_kernel is None:
            return super().route(x_TD, mid_TD)
        x, ids_TK, weights_TK = self._router_kernel(mid_TD)
        return Routed(x, ids_TK, weights_TK, self._shared(x))

    def _shared(self, x_TD: Tensor) -> dict[str, RouterExtras] | None:
        kernel = self._mlp_kernel
        return super()._shared(x_TD) if kernel is None else {"shared": kernel(x_TD)}

    def dense(self, x_TD: Tensor, mid_TD: Tensor) -> Tensor:
        kernel, norm = self._mlp_kernel, self._mlp_norm
        if kernel is None or norm is None:
            return super().dense(x_TD, mid_TD)
        return self._add(mid_TD, kernel(norm(mid_TD)))


def attend_some(
    driver: LayerDriver,
    x_TD: Tensor,
    rope: Rope,
    step: Step,
    pos: int,
    begun: Begun | None,
    costs: CutCosts,
) -> tuple[Tensor | None, Begun | None, int]:
    """Run `driver.attend`, with kernels over as many keys as a segment allows, else over all keys.

    Args:
        driver: Driver of the layer.
        x_TD: Input of the layer: see `LayerDriver.attend`.
        rope: Position embeddings: see `LayerDriver.attend`.
        step: Spans of the op: see `LayerDriver.attend`.
        pos: First key that the previous call did not read; ignored if `begun` is None.
        begun: State that the previous call returned; None starts the op.
        costs: Costs of the model.

    Returns:
        Three values: `mid` if the op is done, else None; the state to continue from; the next
        `pos`.
    """
    if isinstance(driver, NativeDriver):
        pos = 0 if begun is None else pos
        num_keys = costs.keys(step.num_tokens, len(step.spans), step.num_keys - pos)
        return driver.attend_some(x_TD, rope, step, pos, begun, num_keys)
    return driver.attend(x_TD, rope, step), None, 0
