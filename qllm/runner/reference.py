"""The results of each component of a model's own forward, and their sensitivity to rounding.

One forward runs a batch. Row 0 is the prompt. In the other rows, the input of every layer is that
of row 0 with a relative noise of a few rounding errors. The resulting change of a layer's output,
per rounding error, is the layer's *spread*. Another correct way to compute the layer differs by a
small multiple of the spread, however ill-conditioned the layer is. A wrong way differs by more.

Each layer is measured by itself: noise does not reach the next layer, and after a router all rows
use the experts of row 0. A token is *clear* if noise does not change its own choice of experts.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from qllm.models.arguments import cache_argument
from qllm.models.discover import LayerParts, ModelParts, base_model
from qllm.models.loader import EXPERTS_IMPLEMENTATION
from qllm.runner.rope import Holding

NOISE = 8.0
"""Standard deviation of the noise, in rounding errors of the value that gets the noise."""
NUM_NOISY = 4
"""Rows with noise: two with random noise, two with the negative of that noise. All four rows miss a
near tie about once in 10,000 tokens."""
QUIET = 2.0**-8
"""Root mean square of the input of a layer with small input. The epsilon of a norm then has an
effect, and the residual stream does not hide the layer's output."""


def unit(dtype: torch.dtype) -> float:
    """Return the largest relative error of one rounding, the measure of noise and spreads."""
    return torch.finfo(dtype).eps / 2


@dataclass(frozen=True, slots=True)
class Routing:
    """The inputs of a layer's experts."""

    ids_TK: Tensor
    weights_TK: Tensor
    clear_T: Tensor
    """True for tokens that have the same experts in every row."""
    spread_T: Tensor
    """Spread of the experts' weights, for clear tokens."""


@dataclass(slots=True)
class LayerPass:
    """One layer in one pass: inputs and outputs of row 0, and spreads per token."""

    x_TD: Tensor
    attn_TD: Tensor | None = None
    """Output of the attention."""
    attn_spread_T: Tensor | None = None
    given_TD: Tensor | None = None
    """Output of the attention that the rest of the layer reads, perhaps scaled to `QUIET`."""
    routing: Routing | None = None
    """Inputs of the experts, with the router's choice."""
    experts_TK: Tensor | None = None
    """Experts that ran."""
    out_TD: Tensor | None = None
    spread_T: Tensor | None = None


@dataclass(slots=True)
class Pass:
    """One forward over some tokens."""

    embedded_TD: Tensor | None = None
    """Input of the first layer, as the model computed it."""
    layers: list[LayerPass] = field(default_factory=list)
    last_TD: Tensor | None = None
    """Input of the last norm."""
    logits_V: Tensor | None = None
    """Logits of the last token."""
    logits_spread: float = 0.0


@contextmanager
def pinned(model: nn.Module) -> Iterator[None]:
    """Make the model compute as a runner does: experts with grouped_mm, attention with sdpa."""
    config = base_model(model).config
    before = config._attn_implementation, getattr(config, "_experts_implementation", None)
    try:
        config._attn_implementation = "sdpa" if getattr(model, "_supports_sdpa", 1) else "eager"
        if before[1] is not None:
            config._experts_implementation = EXPERTS_IMPLEMENTATION
        yield
    finally:
        config._attn_implementation = before[0]
        if before[1] is not None:
            config._experts_implementation = before[1]


def record(
    model: nn.Module, parts: ModelParts, tokens: Sequence[Sequence[int]], *, quiet: bool
) -> list[Pass]:
    """Run passes one after another on one cache, and return the results of each part.

    Args:
        model: Model in evaluation mode, with its weights in place.
        parts: Parts of the model.
        tokens: Token ids of each pass.
        quiet: True scales the input of every layer, the output of its attention, and the input of
            the last norm to `QUIET`, and sends tokens to the experts in turn, not to the router's
            choice.
    """
    device = next(model.parameters()).device
    last = "logits_to_keep" in inspect.signature(model.forward).parameters
    only: dict[str, Any] = {"logits_to_keep": 1} if last else {}
    name, found = cache_argument(model), list[Pass]()
    cache: Any = None
    if parts.has_states and not parts.attentions and parts.around is None:
        cache = Holding(config=base_model(model).config)  # no layer's cache counts tokens
    with _Recorder(parts, quiet) as recorder:
        for ids in tokens:
            recorder.begin()
            batch = torch.tensor([ids], device=device).expand(1 + NUM_NOISY, -1)
            given: dict[str, Any] = {"input_ids": batch, name: cache, "use_cache": True, **only}
            result: Any = model(**given)
            cache = result[name]
            if isinstance(cache, Holding):
                cache.num_tokens += len(ids)
            found.append(recorder.end(result.logits[:, -1]))
    return found


class _Recorder:
    """The hooks on the modules of a model, active inside a `with` block."""

    def __init__(self, parts: ModelParts, quiet: bool) -> None:
        self._parts, self._quiet = parts, quiet
        self._num_experts = parts.shape.num_experts
        self._generator = torch.Generator().manual_seed(0)
        self._hooks = ExitStack()
        self._pass = Pass()

    def __enter__(self) -> "_Recorder":
        for part in self._parts.layers:
            self._hook(part.layer.register_forward_pre_hook(self._enter_layer, with_kwargs=True))
            self._hook(part.layer.register_forward_hook(self._leave_layer))
            if part.self_attn is not None and len(part.attentions) <= 1:
                self._hook(part.self_attn.register_forward_hook(self._leave_attention))
            if part.experts is not None:
                self._hook_experts(part)
        if self._parts.around is None:
            self._hook(self._parts.norm.register_forward_pre_hook(self._enter_norm))
        self._hook(self._parts.lm_head.register_forward_pre_hook(_enter_head))
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def _hook(self, handle: Any) -> None:
        self._hooks.callback(handle.remove)

    def begin(self) -> None:
        """Begin a pass."""
        self._pass = Pass()

    def end(self, logits_BV: Tensor) -> Pass:
        """Return the results of the current pass."""
        done, logits = self._pass, logits_BV.float()
        done.logits_V = logits[0]
        done.logits_spread = float(_spread(logits[:, None])[0])
        return done

    def _input(self, x_BTD: Tensor) -> Tensor:
        """Return row 0, and row 0 with noise, which is seeded and the same on every device."""
        x_TD = x_BTD[0].float()
        if self._quiet:
            x_TD = x_TD * _quieting(x_TD)
        shape = (NUM_NOISY // 2, *x_TD.shape)
        noise = torch.randn(shape, generator=self._generator, dtype=torch.float32).to(x_TD.device)
        moved = x_TD * noise * (NOISE * unit(x_BTD.dtype))
        return torch.cat((x_TD[None], x_TD + moved, x_TD - moved)).to(x_BTD.dtype)

    def _enter_layer(self, _: nn.Module, args: Any, given: Any) -> Any:
        x = args[0] if args else given["hidden_states"]
        if not self._pass.layers:
            self._pass.embedded_TD = _rows(x[:1])[0].clone()
        made = self._input(x)
        self._pass.layers.append(LayerPass(_rows(made[:1])[0].clone()))
        return ((made, *args[1:]), given) if args else (args, {**given, "hidden_states": made})

    def _leave_attention(self, _: nn.Module, __: object, out: Any) -> Any:
        attn_BTD = out[0] if isinstance(out, tuple) else out
        layer = self._pass.layers[-1]
        layer.attn_TD, layer.attn_spread_T = attn_BTD[0].clone(), _spread(attn_BTD)
        if self._quiet:
            attn_BTD = (attn_BTD.float() * _quieting(attn_BTD[0].float())).to(attn_BTD.dtype)
        layer.given_TD = attn_BTD[0].clone()
        return (attn_BTD, *out[1:]) if isinstance(out, tuple) else attn_BTD

    def _leave_layer(self, _: nn.Module, __: object, out: Any) -> Any:
        x_BTD = out[0] if isinstance(out, tuple) else out
        layer, x = self._pass.layers[-1], _rows(x_BTD)
        layer.out_TD, layer.spread_T = x[0].clone(), _spread(x)
        is_last = len(self._pass.layers) == len(self._parts.layers)
        if self._parts.around is None or not is_last:
            return None
        made = self._input(x_BTD)  # the layers start here, wherever the norm is
        self._pass.last_TD = _rows(made[:1])[0].clone()
        return (made, *out[1:]) if isinstance(out, tuple) else made

    def _hook_experts(self, part: LayerParts) -> None:
        experts: Any = part.experts
        signature = inspect.signature(experts.forward)

        def enter(_: nn.Module, args: Any, given: Any) -> Any:
            bound = signature.bind(*args, **given)
            names = list(bound.arguments)[1:3]
            ids, weights = (bound.arguments[name] for name in names)
            layer = self._pass.layers[-1]
            shape = (1 + NUM_NOISY, len(layer.x_TD), -1)
            layer.routing = _routing(ids.reshape(shape), weights.reshape(shape))
            layer.experts_TK = chosen = ids.reshape(shape)[0].clone()
            if self._quiet:  # so experts that no prompt token chooses are tested too
                slots = torch.arange(chosen.numel(), device=chosen.device)
                layer.experts_TK = (slots % self._num_experts).view_as(chosen).to(chosen)
            rows = layer.experts_TK[None], weights.reshape(shape)[:1]
            for name, t, row in zip(names, (ids, weights), rows, strict=True):
                same = row.expand(1 + NUM_NOISY, -1, -1)
                bound.arguments[name] = same.reshape(t.shape).contiguous()
            return bound.args, bound.kwargs

        self._hook(experts.register_forward_pre_hook(enter, with_kwargs=True))

    def _enter_norm(self, _: nn.Module, args: Any) -> Any:
        made = self._input(args[0])
        self._pass.last_TD = made[0].clone()
        return (made, *args[1:])


def _enter_head(_: nn.Module, args: Any) -> Any:
    """Make the last positions of several rows contiguous.

    Without this, torch multiplies row by row, each with a copy of the weight. In bf16 that took 20
    s and 2 GB for the head of a model of 30B parameters, instead of 60 ms.
    """
    return (args[0].contiguous(), *args[1:])


def _quieting(x_TD: Tensor) -> Tensor:
    """Return the factor that scales a tensor down to `QUIET`."""
    return QUIET / x_TD.square().mean().sqrt().clamp_min(1e-30)


def _rows(x_BTD: Tensor) -> Tensor:
    """Return hidden states with all streams of a token in one row: [B, T, W]."""
    return x_BTD.flatten(2)


def _spread(x_BTD: Tensor) -> Tensor:
    """Return the distance of the noisy rows from row 0, per token and rounding error: [T]."""
    moved = (x_BTD[1:].float() - x_BTD[:1].float()).square().sum(-1).mean(0).sqrt()
    return moved / NOISE


def by_expert(ids_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Return ids and weights, with the ids of each token in ascending order."""
    ids, order = ids_TK.sort(-1)
    return ids, weights_TK.float().gather(-1, order)


def _routing(ids_BTK: Tensor, weights_BTK: Tensor) -> Routing:
    ids, weights = by_expert(ids_BTK, weights_BTK)
    clear = (ids == ids[:1]).all(-1).all(0)
    return Routing(ids_BTK[0].clone(), weights_BTK[0].clone(), clear, _spread(weights))
