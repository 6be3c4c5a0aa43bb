"""Layer drivers, which run one decoder layer in the ops that a program names.

Every driver has the same methods over the tokens of an op. `x` is the input of the layer. `mid` is
the driver's result of attention for the sum at the end: x + attention in the fast driver, the bare
attention output in the hooked driver.

    mid = attend(x, rope, step)                                            ATTN
    routed = route(x, mid)              work units over routed.x_TD        ROUTE, EXPERTS
    x' = combine(x, mid, routed, experts)     or dense(x, mid)             COMBINE

All methods are row-wise except `attend`, which reads the cache through `step`. The fast driver
contains the code between the submodules for eight families. Every computation calls a submodule of
the model.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from qllm.errors import InvariantError, ModelError
from qllm.models.arguments import cache_argument
from qllm.models.discover import LayerParts
from qllm.runner.layers.attention import Step
from qllm.runner.layers.hooked import HookedLayer
from qllm.runner.layers.recurrent import OneByOne, RecurrentMixer
from qllm.types import Driver

RouterExtras = Tensor | tuple[Tensor | None, ...]
Rope = tuple[Tensor, ...]
"""Embeddings of the op's positions: cos and sin, each [1, T, H]. They may also be one tensor of
complex numbers [1, T, H / 2], or an empty tuple."""


class Routed(NamedTuple):
    """The result of routing for the tokens of an op."""

    x_TD: Tensor
    """Input of the experts."""
    ids_TK: Tensor
    weights_TK: Tensor
    kept: dict[str, RouterExtras] | None = None
    """Tensors that `combine` needs, by name. The fast driver has only "shared": the output of the
    shared experts."""


class LayerDriver(Protocol):
    """The driver of one layer."""

    kind: Driver
    covered: tuple[nn.Module, ...]
    """Linear modules and routers that are never called."""

    def attend(self, x_TD: Tensor, rope: Rope, step: Step) -> Tensor:
        """Write KV and attend; return `mid`."""
        ...

    def route(self, x_TD: Tensor, mid_TD: Tensor) -> Routed:
        """Choose experts and run the shared experts. Only in a layer with experts."""
        ...

    def combine(self, x_TD: Tensor, mid_TD: Tensor, routed: Routed, experts_TD: Tensor) -> Tensor:
        """Return the input of the next layer, from the weighted sum of the routed experts."""
        ...

    def dense(self, x_TD: Tensor, mid_TD: Tensor) -> Tensor:
        """Return the input of the next layer. Only in a layer without experts."""
        ...


def _attention(parts: LayerParts, x_1TD: Tensor, rope: Rope, step: Step) -> Tensor:
    attention: Any = parts.self_attn
    out: Tensor = attention(
        hidden_states=x_1TD,
        position_embeddings=as_given(rope),
        attention_mask=None,
        qllm_step=step,
        qllm_window=parts.window,
        **{cache_argument(attention): step},
    )[0]
    return out


def as_given(rope: Rope) -> Rope | Tensor | None:
    """Return embeddings in the structure that the model's forward passes to its layers."""
    return rope if len(rope) > 1 else next(iter(rope), None)


class FastDriver:
    """A driver with known code between the model's submodules, also for known dense layers."""

    covered: tuple[nn.Module, ...] = ()

    def __init__(self, parts: LayerParts) -> None:
        if parts.input_layernorm is None or parts.post_attention_layernorm is None:
            raise ModelError(f"the glue of layer {parts.index} is not known to the fast driver")
        self.kind = parts.driver
        self._parts = parts
        self._norm = parts.input_layernorm
        self._post_norm = parts.post_attention_layernorm
        self._router: Any = parts.router
        self._mlp: Any = parts.mlp
        self._scale = parts.residual_multiplier

    def _add(self, residual: Tensor, x: Tensor) -> Tensor:
        return residual + x if self._scale is None else residual + x * self._scale

    def attend(self, x_TD: Tensor, rope: Rope, step: Step) -> Tensor:
        out = _attention(self._parts, self._norm(x_TD).unsqueeze(0), rope, step)
        return self._add(x_TD, out[0])

    def route(self, x_TD: Tensor, mid_TD: Tensor) -> Routed:
        x = self._post_norm(mid_TD)
        first, weights_TK, last = self._router(x)
        ids_TK = first if last.is_floating_point() else last  # the other tensor has the logits
        return Routed(x, ids_TK, weights_TK, self._shared(x))

    def _shared(self, x_TD: Tensor) -> dict[str, RouterExtras] | None:
        parts = self._parts
        if parts.shared is None:
            return None
        shared = parts.shared(x_TD)
        if parts.shared_gate is not None:
            shared = torch.sigmoid(parts.shared_gate(x_TD)) * shared
        return {"shared": shared}

    def combine(self, x_TD: Tensor, mid_TD: Tensor, routed: Routed, experts_TD: Tensor) -> Tensor:
        if routed.kept is not None:
            shared = routed.kept["shared"]
            assert isinstance(shared, Tensor)
            experts_TD = experts_TD + shared
        return self._add(mid_TD, experts_TD)

    def dense(self, x_TD: Tensor, mid_TD: Tensor) -> Tensor:
        return self._add(mid_TD, self._mlp(self._post_norm(mid_TD)))


class HookedDriver:
    """A driver with hooks on the unmodified layer. `mid` is the bare output of attention.

    Args:
        parts: Parts of the layer.
        mixer: Function that replaces the forward of the module with a state (see `HookedLayer`);
            None lets the module compute.
        covered: Linear modules that are never called because of `mixer`.
    """

    def __init__(
        self,
        parts: LayerParts,
        mixer: Callable[..., Any] | None = None,
        covered: tuple[nn.Module, ...] = (),
    ) -> None:
        self.kind: Driver = Driver.HOOKED if parts.driver is Driver.FAST else parts.driver
        self.covered = covered
        if mixer is None and parts.new_state is not None:
            mixer = RecurrentMixer(parts.self_attn, parts.new_state)
        elif mixer is None and parts.one_by_one:
            mixer = OneByOne()
        self.mixer = mixer
        self._layer = HookedLayer(parts.layer, parts.self_attn, parts.router, parts.experts, mixer)
        self._window, self._cache_name = parts.window, cache_argument(parts.layer)

    def attend(self, x_TD: Tensor, rope: Rope, step: Step) -> Tensor:
        return self._layer.attend(
            x_TD,
            position_embeddings=as_given(rope),
            attention_mask=None,
            qllm_step=step,
            qllm_window=self._window,
            **{self._cache_name: step},
        )

    def route(self, x_TD: Tensor, mid_TD: Tensor) -> Routed:
        hidden, ids, weights, siblings = self._layer.route(
            x_TD, mid_TD, position_embeddings=None, attention_mask=None
        )
        return Routed(hidden, ids, weights, siblings)

    def combine(self, x_TD: Tensor, mid_TD: Tensor, routed: Routed, experts_TD: Tensor) -> Tensor:
        return self._layer.combine(
            x_TD, mid_TD, routed.kept, experts_TD, position_embeddings=None, attention_mask=None
        )

    def dense(self, x_TD: Tensor, mid_TD: Tensor) -> Tensor:
        return self._layer.combine(x_TD, mid_TD, position_embeddings=None, attention_mask=None)


class WholeDriver:
    """A driver of a layer that attends more than once. The whole layer runs in `attend`."""

    covered: tuple[nn.Module, ...] = ()

    def __init__(self, parts: LayerParts) -> None:
        self.kind = parts.driver
        self._layer, self._window = parts.layer, parts.window
        self._cache_name = cache_argument(parts.layer)

    def attend(self, x_TD: Tensor, rope: Rope, step: Step) -> Tensor:
        out = self._layer(
            x_TD[None],
            position_embeddings=as_given(rope),
            attention_mask=None,
            qllm_step=step,
            qllm_window=self._window,
            **{self._cache_name: step},
        )
        found: Tensor = out[0] if isinstance(out, tuple) else out
        return found[0]

    def route(self, x_TD: Tensor, mid_TD: Tensor) -> Routed:
        raise InvariantError("a layer that runs whole has no experts of its own")

    def combine(self, x_TD: Tensor, mid_TD: Tensor, routed: Routed, experts_TD: Tensor) -> Tensor:
        raise InvariantError("a layer that runs whole has no experts of its own")

    def dense(self, x_TD: Tensor, mid_TD: Tensor) -> Tensor:
        return mid_TD
