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
from qllm.kernels.cpu import is_usable
from qllm.kernels.cpu.attention import HEAD_MULTIPLE, MAX_ROTATED, Attention, Begun, Latents
from qllm.kernels.cpu.deltas import DeltaNet
from qllm.kernels.cpu.experts import Mlp
from qllm.kernels.cpu.norms import Norm
from qllm.kernels.cpu.quantised import matrix_of
from qllm.kernels.cpu.routers import DTYPES, MAX_TOP_K, Router
from qllm.models.discover import LayerParts
from qllm.models.heard import is_heard
from qllm.models.parts.known import (
    attention_kind,
    is_swiglu,
    latent_linears,
    norm_kind,
    num_turned,
    rotation_of_latents,
    router_kind,
)
from qllm.models.weights.quantised_linears import is_read, linear_in, values_of, weight_of
from qllm.runner.cuts import CutCosts
from qllm.runner.layers.attention import Step
from qllm.runner.layers.deltas import DeltaMixer
from qllm.runner.layers.drivers import FastDriver, LayerDriver, Rope, Routed, RouterExtras


def _is_norm(module: Any) -> bool:
    """Return True if the kernels support a norm.

    A norm that rounds once may have an fp32 weight.
    """
    kind = None if module is None or is_heard(module) else norm_kind(module)
    weight = None if kind is None else module.weight
    wide = str(kind).startswith("rms_wide")
    return weight is not None and is_usable(weight.bfloat16() if wide else weight)


def _norm(module: Any) -> Norm:
    eps = getattr(module, "variance_epsilon", None)
    bias, kind, weight = getattr(module, "bias", None), str(norm_kind(module)), module.weight
    if kind == "rms_wide_from_one":
        kind, weight = "rms_wide", 1.0 + weight.detach().float()
    return Norm(weight, module.eps if eps is None else eps, kind, bias)


def native_norm(module: Any) -> Norm | None:
    """Return the kernels' norm for a module; None if the kernels do not support the norm."""
    return _norm(module) if _is_norm(module) else None


def _matrix(linears: list[Any], arena: cpu.Arena) -> cpu.Matrix:
    """Return linear modules that read the same input as one matrix, stacked along the outputs."""
    biases = [x.bias for x in linears]
    if any(b is not None for b in biases):
        given = zip(linears, biases, strict=True)
        biases = [
            torch.zeros(x.out_features, dtype=torch.bfloat16) if b is None else b for x, b in given
        ]
    return matrix_of([weight_of(x) for x in linears], biases, arena)


def _num_rotated(attn: Any) -> int:
    """Return the number of values at the start of a head that are rotated."""
    is_part = str(attention_kind(attn)).startswith(("gated", "part"))
    return num_turned(attn) if is_part else int(attn.head_dim)


def _halves_of_heads(linear: nn.Linear, heads: int) -> tuple[nn.Linear, nn.Linear]:
    """Return the first and the second half of the outputs of every head, each with its bias."""
    found = []
    for half in (0, 1):
        part = nn.Linear(1, 1, bias=False)
        part.weight = nn.Parameter(_half(linear.weight.detach(), heads, half), requires_grad=False)
        if linear.bias is not None:
            bias = _half(linear.bias.detach(), heads, half)
            part.bias = nn.Parameter(bias, requires_grad=False)
        part.out_features, part.in_features = part.weight.shape
        found.append(part)
    return found[0], found[1]


def _half(x: Tensor, heads: int, half: int) -> Tensor:
    return x.reshape(heads, 2, -1, *x.shape[1:])[:, half].flatten(0, 1)


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
        elif self._knows_attention(attn):
            self._make_attention(attn)
        elif self._knows_latents(attn):
            self._make_latents(attn)
        if parts.router is not None and self._knows_router(parts.router):
            self._make_router(parts.router)
        if parts.shared is not None and self._knows_mlp(parts.shared, parts.shared_gate):
            self._make_mlp(parts.shared, parts.shared_gate)
        elif not parts.is_moe and _is_norm(self._post_norm) and self._knows_mlp(parts.mlp, None):
            self._make_mlp(parts.mlp, None)

    # -- known submodules

    def _knows_attention(self, attn: Any) -> bool:
        kind = attention_kind(attn)
        return (
            kind is not None
            and not is_heard(attn)
            and attn.head_dim % HEAD_MULTIPLE == 0
            and all(is_read(getattr(attn, f"{x}_proj")) for x in "qkvo")
            and (not kind.startswith("gated") or is_usable(attn.q_proj.weight))
            and _num_rotated(attn) % HEAD_MULTIPLE == 0
            and _is_norm(self._norm)
            and ("norm" not in kind or (_is_norm(attn.q_norm) and _is_norm(attn.k_norm)))
        )

    def _knows_latents(self, attn: Any) -> bool:
        return (
            rotation_of_latents(attn) is not None
            and not is_heard(attn)
            and attn.kv_lora_rank % HEAD_MULTIPLE == 0
            and attn.qk_rope_head_dim % HEAD_MULTIPLE == 0
            and attn.qk_rope_head_dim <= MAX_ROTATED
            and attn.qk_nope_head_dim % 2 == 0
            and all(is_read(x) for x in latent_linears(attn))
            and all(_is_norm(x) for x in (self._norm, attn.kv_a_layernorm))
            and (attn.q_lora_rank is None or _is_norm(attn.q_a_layernorm))
        )

    def _knows_router(self, router: Any) -> bool:
        kind = router_kind(router)
        return (
            kind is not None
            and not is_heard(router)
            and is_usable(router.weight, DTYPES if self._is_in_bf16() else (torch.bfloat16,))
            and (router.top_k == 2 if kind == "sparse_mixer" else router.top_k <= MAX_TOP_K)
            and _is_norm(self._post_norm)
        )

    def _is_in_bf16(self) -> bool:
        """Return True if the layer computes in bf16.

        The dtype of its router's weight does not matter.
        """
        return any(x.dtype is torch.bfloat16 for x in self._parts.layer.parameters())

    def _knows_mlp(self, mlp: Any, gate: Any) -> bool:
        return (
            is_swiglu(mlp)
            and not is_heard(mlp)
            and (gate is None or not is_heard(gate))
            and all(is_read(getattr(mlp, f"{x}_proj")) for x in ("gate", "up", "down"))
            and (gate is None or (type(gate) is nn.Linear and gate.bias is None))
            and (gate is None or is_read(gate))
        )

    def _make_mlp(self, mlp: Any, gate: Any) -> None:
        linears = [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        gate_FD, up_FD, down_DF = (weight_of(x) for x in linears)
        share = None if gate is None else weight_of(gate)
        self._mlp_kernel = Mlp(gate_FD, up_FD, down_DF, share)
        self._mlp_norm = None if self._parts.is_moe else _norm(self._post_norm)
        self.covered += (*linears, *([] if gate is None else [gate]))

    def _make_attention(self, attn: Any) -> None:
        qkv = [attn.q_proj, attn.k_proj, attn.v_proj]
        kind, heads = str(attention_kind(attn)), attn.q_proj.out_features // attn.head_dim
        into = qkv
        if kind.startswith("gated"):
            heads //= 2
            queries, gate = _halves_of_heads(attn.q_proj, heads)
            self._gate = _matrix([gate], self._arena)
            into = [queries, *qkv[1:]]
        self._attention = Attention(
            _matrix(into, self._arena),
            _norm(self._norm),
            num_heads=heads,
            num_kv_heads=attn.k_proj.out_features // attn.head_dim,
            head_dim=attn.head_dim,
            scale=attn.scaling,
            qk_norm=(_norm(attn.q_norm), _norm(attn.k_norm)) if "norm" in kind else None,
            sinks_N=attn.sinks if kind == "sinks" else None,
            clip=getattr(attn.config, "clip_qkv", None),
            half_table=kind == "sinks",
            rotated=_num_rotated(attn),
        )
        self._finish_attention(attn, qkv)

    def _make_latents(self, attn: Any) -> None:
        linears = latent_linears(attn)
        up = None
        if attn.q_lora_rank is not None:
            up = _matrix([attn.q_b_proj], self._arena), _norm(attn.q_a_layernorm)
        expanded = linear_in(attn.kv_b_proj)
        if expanded is not None:
            expanded.read("bf16")  # the weight's factors become bf16
        expand = values_of(attn.kv_b_proj).view(attn.num_heads, -1, attn.kv_lora_rank)
        self._attention = Latents(
            _matrix([linears[0], attn.kv_a_proj_with_mqa], self._arena),
            up,
            _norm(self._norm),
            _norm(attn.kv_a_layernorm),
            expand,
            num_rotated=attn.qk_rope_head_dim,
            value_dim=attn.v_head_dim,
            scale=attn.scaling,
            rotation=str(rotation_of_latents(attn)),
            arena=self._arena,
        )
        self._finish_attention(attn, linears[:-1])

    def _finish_attention(self, attn: Any, covered: list[nn.Module]) -> None:
        self._out = _matrix([attn.o_proj], self._arena)
        self._index = attn.layer_idx
        self.covered += (*covered, attn.o_proj)

    def _make_router(self, router: Any) -> None:
        kind = router_kind(router)
        settings: dict[str, Any] = {"renormalise": True, "wide": kind == "wide"}
        if kind == "flag":
            settings["renormalise"] = router.norm_topk_prob
        elif kind == "chosen":
            settings["bias_E"] = getattr(router, "bias", None)
        elif kind == "sigmoid":
            settings = {
                "kind": kind,
                "renormalise": router.norm_topk_prob,
                "wide": True,
                "correction_E": router.e_score_correction_bias,
                "groups": router.num_group,
                "top_groups": router.topk_group,
                "scaling": router.routed_scaling_factor,
            }
        elif kind == "softmax_fp32":
            is_grouped = router.topk_method == "group_limited_greedy"
            settings = {
                "kind": kind,
                "renormalise": False,
                "wide": True,
                "groups": router.num_group if is_grouped else 1,
                "top_groups": router.topk_group if is_grouped else 1,
                "scaling": router.routed_scaling_factor,
            }
        elif kind == "sparse_mixer":
            jitter = torch.tensor(
                2 * router.router_jitter_noise, dtype=torch.bfloat16
            )  # in the form that the model compares
            settings = {"kind": kind, "renormalise": False, "wide": False, "jitter": float(jitter)}
        norm = _norm(self._post_norm)
        weight = router.weight.detach()
        self._router_kernel = Router(weight, norm, top_k=router.top_k, **settings)
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
