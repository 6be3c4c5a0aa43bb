"""Layers that run by the model's own code, called as by the model's forward (`qllm.models.around`).

They run for one request after the other, and for one block of the request's tokens after the other.
A layer with experts is driven by hooks and can stop at its experts. Other layers run whole. All
that a layer keeps in the cache is a state of the request (`runner.states`):

    attend    committed state -> state of the new tokens, as far as the attention writes it
    route     on a copy of the new state; the copy is dropped
    combine   on the new state itself, which is then complete

A layer is called token by token if a call with several tokens cannot continue from a state.
"""

import copy
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from qllm.models.around import Around, Entry
from qllm.models.discover import LayerParts
from qllm.models.layer_cache import LayerCache
from qllm.runner.layers.attention import Span, Step
from qllm.runner.layers.drivers import Routed
from qllm.runner.layers.hooked import (
    Beside,
    HookedLayer,
    RoutedRows,
    RouterExtras,
    tensors_beside,
)
from qllm.runner.layers.recurrent import over_spans

Ids = tuple[Tensor, ...]
"""Token ids, [1, T], which these layers get instead of position embeddings."""


def spans_of(around: Around, step: Step) -> Iterator[Span]:
    """Yield spans of tokens, one call of the layer for each.

    A layer that cannot continue from cached tokens gets one token per call.
    """
    for span in step.spans:
        if span.lo == 0 or around.goes_on:
            yield span
        else:
            for at in range(span.lo, span.hi):
                yield Span(span.kv, span.at + at - span.lo, at, at + 1)


def entry_of(around: Around, ids: Ids, step: Step, span: Span) -> Entry:
    """Return the arguments of all layers for the tokens of a span, made once per step."""
    found = step.entries.get(span.at)
    if found is None:
        here = ids[0][0, span.at : span.at + span.hi - span.lo]
        found = step.entries[span.at] = around.enter(here, span.lo)
    return found


def embed(around: Around, ids: Ids, step: Step) -> Tensor:
    """Return the input of the first layer, [T, W]; zeros for dead tokens."""
    x_1TW = around.like.new_zeros((1, step.num_tokens, around.like.shape[1]))

    def run(_: Tensor, span: Span) -> Tensor:
        return entry_of(around, ids, step, span).x_TW[None]

    return over_spans(x_1TW, list(spans_of(around, step)), run)[0]


class AroundDriver:
    """The driver of one layer.

    Args:
        parts: Parts of the layer.
    """

    covered: tuple[nn.Module, ...] = ()

    def __init__(self, parts: LayerParts) -> None:
        assert parts.around is not None
        assert parts.new_state is not None
        self.kind = parts.driver
        self._around, self._index = parts.around, parts.index
        self._new_state, self._layer = parts.new_state, parts.layer
        self._hooked: HookedLayer | None = None
        if parts.is_moe:
            own = parts.layer, parts.self_attn, parts.router, parts.experts
            length = parts.around.attention_lengths[parts.index]
            self._hooked = HookedLayer(*own, attention_len=length)
        self._sources = sorted({handed.layer for handed in self._around.handed[self._index]})
        later = self._around.handed[self._index + 1 :]
        self._gives = any(handed.layer == self._index for all_ in later for handed in all_)
        taken = {handed.layer for all_ in later for handed in all_}
        self._used_up = [layer for layer in self._sources if layer not in taken]
        """Earlier layers whose values no later layer than this one uses."""

    # methods that a program calls

    def attend(self, x_TD: Tensor, rope: Ids, step: Step) -> Tensor:
        """Return attention outputs, [T, D]. A layer that runs whole returns its outputs, [T, W]."""

        def run(x_1TW: Tensor, span: Span) -> Tensor:
            held, committed = span.kv.states, span.kv.committed
            state = held.take(self._index, span.lo, committed, self._new_state)
            how = self._how(rope, step, span, state)
            out = self._attend(self._streams(x_1TW[0]), how, state, span.lo)
            state.compact()
            held.put(self._index, span.hi, state, committed)
            span.kv.reach(span.hi)
            return out[None]

        spans = list(spans_of(self._around, step))
        if not spans and self._hooked is not None:
            return x_TD.new_zeros((len(x_TD), self._around.head_width))
        return over_spans(x_TD[None], spans, run)[0]

    def _attend(self, x_T: Tensor, how: Mapping[str, Any], state: LayerCache, lo: int) -> Tensor:
        if self._hooked is not None:
            out_TD, beside = self._hooked.attend_all(x_T, **how)
            state.attended[lo] = dict(beside)
            return out_TD
        out = self._layer(x_T[None], **how)
        outs = out if isinstance(out, tuple) else (out,)
        self._hand_on(state, lo, tensors_beside(outs))
        return self._rows(outs[0][0])

    def route(self, x_TD: Tensor, mid_TD: Tensor, rope: Ids = (), step: Any = None) -> Routed:
        """Return the experts of all tokens. The experts of dead tokens have no effect."""
        assert self._hooked is not None
        num, copies = len(x_TD), dict[int, LayerCache]()
        found: list[tuple[slice, RoutedRows]] = []
        for span in spans_of(self._around, step):
            state = span.kv.states.last(self._index, self._new_state)
            key, rows = id(span.kv), slice(span.at, span.at + span.hi - span.lo)
            if key not in copies:
                copies[key] = copy.deepcopy(state)
            how = self._how(rope, step, span, copies[key])
            beside, x_T = state.attended[span.lo], self._streams(x_TD[rows])
            found.append((rows, self._hooked.route(x_T, mid_TD[rows], beside, **how)))
        if not found:
            x = x_TD.new_zeros((num, self._around.head_width))
            ids = torch.arange(self._around.top_k, device=x.device).expand(num, -1)
            return Routed(x, ids, x.new_zeros(ids.shape), {})
        like = found[0][1]
        kept: dict[str, RouterExtras] = {
            name: _put_together(num, [(at, r.siblings[name]) for at, r in found])
            for name in like.siblings
        }
        ids, x, weights = (
            _put_together(num, [(at, getattr(r, name)) for at, r in found])
            for name in ("ids", "hidden", "weights")
        )
        return Routed(x, ids, weights, kept)

    def combine(
        self,
        x_TD: Tensor,
        mid_TD: Tensor,
        routed: Routed,
        experts_TD: Tensor,
        rope: Ids = (),
        step: Any = None,
    ) -> Tensor:
        """Return outputs of the layer, [T, W], and complete the layer's state of the tokens."""
        hooked = self._hooked
        assert hooked is not None

        def run(x_1TW: Tensor, span: Span) -> Tensor:
            state = span.kv.states.last(self._index, self._new_state)
            at = slice(span.at, span.at + span.hi - span.lo)
            kept = {name: t[at] for name, t in (routed.kept or {}).items() if isinstance(t, Tensor)}
            how = self._how(rope, step, span, state)
            beside = state.attended.pop(span.lo)
            x_T = self._streams(x_1TW[0])
            out, more = hooked.combine_all(x_T, mid_TD[at], beside, kept, experts_TD[at], **how)
            self._hand_on(state, span.lo, more)
            state.compact()
            return self._rows(out)[None]

        out_TW = over_spans(x_TD[None], list(spans_of(self._around, step)), run)[0]
        self._let_go(step)
        return out_TW

    def dense(self, x_TD: Tensor, mid_TD: Tensor, rope: Ids = (), step: Any = None) -> Tensor:
        """Return the output of `attend`, which ran the whole layer."""
        self._let_go(step)
        return mid_TD

    # arguments and values

    def _streams(self, x_TW: Tensor) -> Tensor:
        """Return hidden states in the shape that the layer reads: [T, streams, D] or [T, D]."""
        return x_TW.reshape(len(x_TW), *self._around.shape)

    def _rows(self, x_T: Tensor) -> Tensor:
        return x_T.reshape(len(x_T), -1)

    def _how(self, ids: Ids, step: Step, span: Span, state: LayerCache) -> dict[str, Any]:
        """Return the arguments of a call for the tokens of a span, except the hidden states."""
        around, entry = self._around, entry_of(self._around, ids, step, span)
        layers = list(entry.cache.layers)
        for index, own in state.layers.items():
            layers[index] = own
        cache = Cache(layers=layers)
        how = {**entry.given[self._index], **dict.fromkeys(around.caches[self._index], cache)}
        for name, layer, place in around.handed[self._index]:
            source = span.kv.states.last(layer, partial(around.new_state, layer))
            how[name] = source.handed[span.lo].get(place)
        return how

    def _hand_on(self, state: LayerCache, lo: int, values: Beside) -> None:
        if self._gives:
            state.handed[lo] = dict(values)

    def _let_go(self, step: Step) -> None:
        for layer in self._used_up:
            for span in step.spans:
                span.kv.states.last(layer, partial(self._around.new_state, layer)).handed.clear()


def _put_together(num_tokens: int, parts: list[tuple[slice, Any]]) -> Tensor:
    """Return rows of all tokens. Tokens outside all slices get zeros."""
    like = parts[0][1]
    if like.shape[0] == num_tokens:
        return like  # type: ignore[no-any-return]
    made = like.new_zeros((num_tokens, *like.shape[1:]))
    for at, part in parts:
        made[at] = part
    return made  # type: ignore[no-any-return]
