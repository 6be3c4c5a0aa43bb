"""Layer drivers: who runs one decoder layer, in the parts that a program names.

Every driver has the same five methods over the tokens of an op. `x` is what the layer was given
and `mid` whatever the driver keeps between attention and the sum at the end: the fast driver
keeps x + attention, the hooked driver the bare attention output.

    mid = attend(x, rope, step)                                            ATTN
    routed = route(x, mid)              work units over routed.x_TD        ROUTE, EXPERTS
    x' = combine(x, mid, routed, experts)     or dense(x, mid)             COMBINE

All are row-wise except `attend`, which sees the cache through `step`. The fast driver holds the
glue of eight families; every computation is a call of the model's own submodules.
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
"""Embeddings of the op's positions: cos and sin, each [1, T, H]; one tensor of complex numbers
[1, T, H / 2]; or nothing."""


class Routed(NamedTuple):
    """What routing gave for the tokens of an op."""

    x_TD: Tensor
    """Input of the experts."""
    ids_TK: Tensor
    weights_TK: Tensor
    kept: dict[str, RouterExtras] | None = None
    """What the driver keeps for `combine`, by name; "shared" of the fast driver."""


class LayerDriver(Protocol):
    """Runs one layer."""

    kind: Driver
    covered: tuple[nn.Module, ...]
    """Linear modules and routers that are never called."""

    def attend(self, x_TD: Tensor, rope: Rope, step: Step) -> Tensor:
        """Write KV and attend; return `mid`."""
        ...

    def route(self, x_TD: Tensor, mid_TD: Tensor) -> Routed:
        """Choose experts; run the shared ones. Only in a layer with experts."""
        ...

    def combine(self, x_TD: Tensor, mid_TD: Tensor, routed: Routed, experts_TD: Tensor) -> Tensor:
        """Input of the next layer, given the weighted sum of the routed experts."""
        ...

    def dense(self, x_TD: Tensor, mid_TD: Tensor) -> Tensor:
        """Input of the next layer. Only in a layer without experts."""
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
    """Embeddings as the model's forward gives them to its layers."""
    return rope if len(rope) > 1 else next(iter(rope), None)


class FastDriver:
    """Known glue over the model's own submodules; dense layers of a known family too."""

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
        ids_TK = first if last.is_floating_point() else last  # logits are the other one
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
    """Hooks on the unmodified layer; `mid` is the bare output of its attention.

    Args:
        parts: Of the layer.
        mixer: Computes in the place of the module with a state (see `HookedLayer`); by default
            the module itself does.
        covered: Linear modules that are never called then.
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
    """A layer that attends more than once: all of it runs where others attend."""

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
