"""Mixers that run for one request after the other.

They are layers with a recurrent state: Gated DeltaNet, Mamba, lightning attention, short
convolutions. The model's own module computes, with a state of one request instead of transformers'
cache (`runner.states`). Attention modules that ask the cache for its length also run this way.
"""

import inspect
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from qllm.models.arguments import cache_argument
from qllm.models.hybrid import OneState
from qllm.runner.layers.attention import Span, Step
from qllm.runner.states import NewState

_TRIED = 5
"""Tokens per call in the test that a call continues from the previous call."""
_CLOSE = 0.05
"""Largest relative difference that counts as rounding, in any dtype. A call that ignores the state
differs by a far larger amount."""


def over_spans(
    x_1TD: Tensor, spans: Sequence[Span], run: Callable[[Tensor, Span], Tensor]
) -> Tensor:
    """Return the outputs of `run` for each span's tokens, [1, T, width]; zeros for dead tokens."""
    outs: list[Tensor | int] = []
    at = 0
    for span in spans:
        if span.at > at:
            outs.append(span.at - at)
        at = span.at + span.hi - span.lo
        outs.append(run(x_1TD[:, span.at : at], span))
    if at < x_1TD.shape[1]:
        outs.append(x_1TD.shape[1] - at)
    width = next((out.shape[2] for out in outs if isinstance(out, Tensor)), x_1TD.shape[2])
    made = [x_1TD.new_zeros((1, out, width)) if isinstance(out, int) else out for out in outs]
    return made[0] if len(made) == 1 else torch.cat(made, 1)


class OneByOne:
    """A caller of attention for one span after the other.

    The attention asks the cache for its length.
    """

    def __call__(self, forward: Callable[..., Any], *args: Any, **given: Any) -> Any:
        """Call the module's forward as its layer does.

        Args:
            forward: Forward of the module.
            args: Input x, [1, T, D], first or by name.
            given: Other keyword arguments. The cache and "qllm_step" are the same `Step`.
        """
        step: Step = given["qllm_step"]
        cache_name = next(name for name, value in given.items() if value is step)
        x_1TD = args[0] if args else given.pop("hidden_states")
        rope = given.pop("position_embeddings", None)

        def run(x: Tensor, span: Span) -> Tensor:
            one = Step([span._replace(at=0)], span.hi - span.lo, step.latent)
            at = slice(span.at, span.at + one.num_tokens)
            here = rope[:, at] if isinstance(rope, Tensor) else tuple(t[:, at] for t in rope or ())
            how = {**given, "qllm_step": one, cache_name: one}
            found: Tensor = forward(x, position_embeddings=here, **how)[0]
            return found

        return over_spans(x_1TD, step.spans, run), None


class RecurrentMixer:
    """The mixer of one layer, run over the spans of a step.

    Args:
        module: Module of the model.
        new_state: Function that makes a state of this layer.
    """

    def __init__(self, module: Any, new_state: NewState) -> None:
        self._new_state, self._module = new_state, module
        self.index: int = module.layer_idx
        names = inspect.signature(type(module).forward).parameters
        self.cache_name = cache_argument(module)
        self._takes_positions = "position_embeddings" in names
        self._is_tuple, self._num_beside = False, 0
        self._goes_on_in_chunks: bool | None = None

    @property
    def name(self) -> str:
        """Class name of the module."""
        return type(self._module).__name__

    @property
    def forward(self) -> Callable[..., Any]:
        """Forward of the module."""
        found: Callable[..., Any] = self._module.forward
        return found

    def __call__(self, forward: Callable[..., Any], *args: Any, **given: Any) -> Any:
        """Call the module's forward as its layer does; the cache argument is a `Step`.

        Args:
            forward: Forward of the module.
            args: Input x, [1, T, D], first or by name.
            given: Other keyword arguments.
        """
        x_1TD = args[0] if args else given["hidden_states"]

        def run(x: Tensor, span: Span) -> Tensor:
            return self._span(forward, x, span)

        out = over_spans(x_1TD, given[self.cache_name].spans, run)
        return (out, *[None] * self._num_beside) if self._is_tuple else out

    def _can_go_on(self, forward: Callable[..., Any], like: Tensor) -> bool:
        """Return True if a call with several tokens continues from a state.

        Some modules (Jamba) restart from an empty state instead.
        """
        made = torch.Generator().manual_seed(0)
        x_1TD = torch.randn((1, 2 * _TRIED, like.shape[2]), generator=made, dtype=torch.float32).to(
            like
        )
        outs, state = [], self._new_state()
        for part in torch.split(x_1TD, _TRIED, 1):
            outs.append(self._call(forward, part, state))
        state = self._new_state()
        ones = [self._call(forward, x, state) for x in torch.split(x_1TD, 1, 1)]
        chunks, tokens = torch.cat(outs, 1).float(), torch.cat(ones, 1).float()
        return bool((chunks - tokens).norm() <= _CLOSE * tokens.norm())

    def _span(self, forward: Callable[..., Any], x_1TD: Tensor, span: Span) -> Tensor:
        states, committed = span.kv.states, span.kv.committed
        outs: list[Tensor] = []
        for lo, hi in pairwise(states.stops(span.lo, span.hi)):
            state = states.take(self.index, lo, committed, self._new_state)
            parts = [x_1TD[:, lo - span.lo : hi - span.lo]]
            if lo > 0 and hi - lo > 1:
                if self._goes_on_in_chunks is None:
                    self._goes_on_in_chunks = self._can_go_on(forward, x_1TD)
                if not self._goes_on_in_chunks:
                    parts = list(torch.split(parts[0], 1, 1))
            outs += [self._call(forward, part, state) for part in parts]
            states.put(self.index, hi, state, committed)
        span.kv.reach(span.hi)
        return outs[0] if len(outs) == 1 else torch.cat(outs, 1)

    def _call(self, forward: Callable[..., Any], x_1TD: Tensor, state: Any) -> Tensor:
        how = {self.cache_name: OneState(state), "attention_mask": None}
        if self._takes_positions:
            how["position_embeddings"] = None
        out = forward(x_1TD, **how)
        self._is_tuple = isinstance(out, tuple)
        self._num_beside = len(out) - 1 if self._is_tuple else 0
        found: Tensor = out[0] if self._is_tuple else out
        return found
