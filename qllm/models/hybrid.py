"""The layers that carry a state, found in the cache that transformers makes for `generate`."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from transformers import cache_utils
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from qllm.errors import ModelError
from qllm.models.parts.digests import forward_source

KNOWN = {
    DynamicLayer,
    DynamicSlidingWindowLayer,
    getattr(cache_utils, "DummyLayer", DynamicLayer),  # transformers 5.17 lacks it
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
}
"""Kinds of layers in transformers' cache that are supported, or that other code refuses."""


MOST_LAYERS = 1 << 16
"""A number of layers that no model reaches."""
_KEYS = ("k_proj", "v_proj", "kv_proj", "qkv_proj", "kv_a_proj_with_mqa")


def kv_shapes(attentions: Iterable[nn.Module]) -> set[tuple[Any, ...]]:
    """Return the weights that decide the shapes of keys and values; one entry if all are alike."""
    found = set()
    for attn in attentions:
        children = dict(attn.named_children())
        weights = [getattr(children.get(name), "weight", None) for name in _KEYS]
        shapes = [None if weight is None else tuple(weight.shape) for weight in weights]
        found.add((*shapes, getattr(attn, "head_dim", None)))
    return found


class KeepsMoreError(ModelError):
    """A layer that caches more than keys and values, or more than a state."""


class LightningState:
    """State of MiniMax's lightning attention: one tensor, in a cache of its own kind."""

    def __init__(self) -> None:
        self.value: Any = None


class OneState(Cache):
    """A replacement of transformers' cache for one module: one layer of one request."""

    def __init__(self, state: Any) -> None:
        self.layers = _Always(state)
        self._state = state

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        found: Tensor | None = self._state.value
        return found

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        self._state.value = linear_cache


class _Always(list[Any]):
    """A list of `MOST_LAYERS` places that all hold one value."""

    def __init__(self, value: Any) -> None:
        super().__init__([value])

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(0)

    def __len__(self) -> int:
        return MOST_LAYERS


def state_makers(base: Any, num_layers: int) -> list[Callable[[], Any] | None]:
    """Return each layer's factory of a request's first state; None if the layer attends.

    Raises:
        KeepsMoreError: A layer both carries a state and attends, or caches something else.
    """
    made: list[Any] = DynamicCache(config=base.config).layers
    made += [None] * (num_layers - len(made))
    own_cache = "MiniMaxCache" in forward_source(base)
    types = getattr(base.config, "layer_types", None) or () if own_cache else ()
    lightning = {i for i, kind in enumerate(types) if kind == "linear_attention"}
    return [
        LightningState if i in lightning else _maker(base, i, made[i]) for i in range(num_layers)
    ]


def _maker(base: Any, index: int, fresh: Any) -> Callable[[], Any] | None:
    if fresh is not None and type(fresh) not in KNOWN:
        raise KeepsMoreError(
            f"layer {index} of {type(base).__name__} keeps a {type(fresh).__name__} in its "
            "cache, which is neither keys and values nor a state: not supported"
        )
    if not isinstance(fresh, LinearAttentionCacheLayerMixin):
        return None
    if isinstance(fresh, CacheLayerMixin):
        raise KeepsMoreError(
            f"layer {index} of {type(base).__name__} carries a state and attends side by side: "
            "not supported"
        )
    return lambda: copy.deepcopy(fresh)
