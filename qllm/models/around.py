"""The part of a model's own forward around its decoder layers, learned by running the forward.

Some layers take more than hidden states, positions and the cache: several residual streams, token
ids for a router, masks that an indexer reads, values of earlier layers. Such layers are called as
the model's forward calls them. That forward is run with stubs in place of its layers:

    enter    ids of tokens [lo, hi)  ->  input of the first layer, and the arguments of each
    leave    output of the last layer ->  input of the output head

A placeholder that only knows its length replaces the request's cache. This module stores nothing
of a request.
"""

import copy
import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from qllm.errors import ModelError
from qllm.models.arguments import cache_argument
from qllm.models.layer_cache import LayerCache
from qllm.models.replaced import Stub, Unwind, replaced

TRIED = 3
"""Tokens of the forward that shows the arguments and results of layers."""
CHUNK = 5
"""Tokens per call in the trial that continues one call from another."""
CLOSE = 0.05
"""Relative difference that rounding explains in any dtype. A lost state makes a far larger one."""
MOST = 0.7
"""Share of tokens that must be close. For the rest, the router may choose other experts."""


class Handed(NamedTuple):
    """A value that one layer returns with the hidden states and a later layer takes."""

    name: str
    """Name of the later layer's argument."""
    layer: int
    place: int
    """Place of the value in the tuple that the layer returns."""


class Entry(NamedTuple):
    """The inputs of all layers for some tokens of one request."""

    x_TW: Tensor
    """Input of the first layer: all streams of a token in one row."""
    given: list[dict[str, Any]]
    """Arguments of each layer except hidden states, cache and values of earlier layers."""
    cache: Cache
    """An empty cache that reports the number of earlier tokens as its length."""


class Around:
    """The way in which a model's forward calls its decoder layers.

    Args:
        model: The causal language model, its weights in place.
        base: The decoder in the model.
        layers: The layers that the model declares.
        attentions: The attention of each layer; None if a layer has none, or several.
        top_k: Experts per token; 0 without experts.

    Raises:
        ModelError: The model uses its layers in a way that is not supported here.
    """

    def __init__(
        self,
        model: Any,
        base: Any,
        layers: Sequence[Any],
        attentions: Sequence[nn.Module | None],
        top_k: int,
    ) -> None:
        self._model, self._base, self.top_k = model, base, top_k
        self.layers, self._attentions = tuple(layers), tuple(attentions)
        self.head_width = int(model.get_output_embeddings().in_features)
        self._first = [next(iter(_arguments(layer))) for layer in self.layers]
        """Name of the hidden-states argument of each layer."""
        self.caches: list[set[str]] = [set() for _ in self.layers]
        """Names of the cache arguments of each layer."""
        self.handed: list[list[Handed]] = [[] for _ in self.layers]
        """Values that each layer takes from earlier layers."""
        self.fresh: list[Any] = DynamicCache(config=base.config).layers
        self.fresh += [DynamicLayer() for _ in range(len(self.layers) - len(self.fresh))]  # type: ignore[no-untyped-call]
        """Empty layers of transformers' cache, by index."""
        self._lengths: list[int] = []
        """Lengths of the tuples that layers return; 0 for a layer that returns only hidden states.
        """
        self.shape = torch.Size()
        """Shape of the hidden states of one token: streams and their width."""
        self.like = torch.empty(0, dtype=torch.float32)
        """Dtype and device of hidden states, and their width: [0, W]."""
        self.attention_lengths = [0] * len(self.layers)
        """Lengths of the tuples that each layer's attention returns; 0 if it returns one tensor."""
        self.may_stop = [True] * len(self.layers)
        """True for each layer that can stop at its attention, because it changes no cache before
        that."""
        with torch.inference_mode():
            self._learn()
            self.goes_on = self._tries_chunks()
            """True if a call with several tokens can continue from a cached state."""

    # learned from runs of the forward

    def _ids(self, num_tokens: int) -> Tensor:
        device = self._base.get_input_embeddings().weight.device
        size = self._model.get_output_embeddings().out_features
        ids: Tensor = torch.arange(1, 1 + num_tokens, device=device) % size
        return ids[None]

    def _learn(self) -> None:
        """Run the forward, and record the arguments and results of its layers."""
        outs: list[tuple[int, Any]] = []

        def see(number: int, real: Stub) -> Stub:
            def run(*args: Any, **kwargs: Any) -> Any:
                _, found = self._bound(number, args, kwargs)
                attention = self._attentions[number]
                self.may_stop[number] = _keeps_nothing_before(attention, real, args, kwargs)
                before = {name: _members(value) for name, value in found.items()}
                with replaced(self._measured(number)):
                    out = real(*args, **kwargs)
                for name, members in before.items():
                    if _members(found[name]) != members:
                        raise self._error(f"hands its layers a {name} that they write to")
                outs.append((number, out))
                return out

            return run

        cache = self._new_cache()
        with replaced({x: see(i, x.forward) for i, x in enumerate(self.layers)}):
            self._forward(self._ids(TRIED), cache)
        LayerCache(dict(enumerate(cache.layers))).refuse_unknown()
        if [number for number, _ in outs] != list(range(len(self.layers))):
            raise self._error("does not call each of its layers once and in order")
        firsts = [_first(out) for _, out in outs]
        for x in firsts:
            if not isinstance(x, Tensor) or x.shape[:2] != (1, TRIED):
                raise self._error("has hidden states that are not [batch, tokens, ...]")
        self._lengths = [len(out) if isinstance(out, tuple) else 0 for _, out in outs]
        self.shape = firsts[0].shape[2:]
        self.like = firsts[0].new_empty((0, self.shape.numel()))
        self._follow_values(self._ids(TRIED))
        self._refuse_earlier(self._ids(TRIED))

    def _measured(self, number: int) -> dict[nn.Module, Stub]:
        """Return stubs that record the length of the tuple that a layer's attention returns."""
        attention = self._attentions[number]
        if attention is None:
            return {}
        real: Stub = attention.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            out = real(*args, **kwargs)
            self.attention_lengths[number] = len(out) if isinstance(out, tuple) else 0
            return out

        return {attention: run}

    def _tries_chunks(self) -> bool:
        """Return True if every layer gives the same output token by token and in two chunks."""
        ids_1T = self._ids(2 * CHUNK)
        xs: list[list[Tensor]] = [[] for _ in self.layers]
        ys: list[list[Tensor]] = [[] for _ in self.layers]
        same: list[bool] = []

        def see(number: int, real: Stub) -> Stub:
            def run(*args: Any, **kwargs: Any) -> Any:
                out = real(*args, **kwargs)
                xs[number].append(self._bound(number, args, kwargs)[0])
                ys[number].append(_first(out))
                return out

            return run

        def compare(number: int, real: Stub, lo: int) -> Stub:
            def run(*args: Any, **kwargs: Any) -> Any:
                _, found = self._bound(number, args, kwargs)
                out = real(torch.cat(xs[number][lo : lo + CHUNK], 1), **found)
                right = torch.cat(ys[number][lo : lo + CHUNK], 1)
                off, size = (
                    (t.float().flatten(2).norm(dim=-1)) for t in (_first(out) - right, right)
                )
                same.append(bool((off <= CLOSE * size).float().mean() > MOST))
                return (right, *out[1:]) if isinstance(out, tuple) else right

            return run

        cache = self._new_cache()
        with replaced({x: see(i, x.forward) for i, x in enumerate(self.layers)}):
            for i in range(2 * CHUNK):
                self._forward(ids_1T[:, i : i + 1], cache, i)
        cache = self._new_cache()
        for lo in (0, CHUNK):
            with replaced({x: compare(i, x.forward, lo) for i, x in enumerate(self.layers)}):
                self._forward(ids_1T[:, lo : lo + CHUNK], cache, lo)
        return all(same)

    def _follow_values(self, ids_1T: Tensor) -> None:
        """Find the arguments that are the cache, and those that come from an earlier layer."""
        cache, given = self.cache_of(0), []
        made: list[list[Tensor]] = []

        def stub(number: int) -> Stub:
            def run(*args: Any, **kwargs: Any) -> Any:
                x, found = self._bound(number, args, kwargs)
                if number and x is not made[-1][0]:
                    raise self._error("computes between its layers")
                given.append(found)
                made.append(
                    [x.clone(), *(x.new_empty(0) for _ in range(self._lengths[number] - 1))]
                )
                return tuple(made[-1]) if self._lengths[number] else made[-1][0]

            return run

        with replaced({layer: stub(i) for i, layer in enumerate(self.layers)}):
            self._forward(ids_1T, cache)
        for number, found in enumerate(given):
            for name, value in found.items():
                if value is cache:
                    self.caches[number].add(name)
                for layer, values in enumerate(made[:number]):
                    self.handed[number] += [
                        Handed(name, layer, place)
                        for place, one in enumerate(values)
                        if one is value
                    ]
        if any(value.place == 0 for handed in self.handed for value in handed):
            raise self._error("hands its layers hidden states of earlier ones")

    def _refuse_earlier(self, ids_1T: Tensor) -> None:
        """Raise if values are computed from hidden states of layers other than the last."""
        one, other = (self.enter(ids_1T[0], 0, shift).given for shift in (0.0, 1.0))
        if not _same(_tensors(one), _tensors(other)):
            raise self._error("hands its layers what it computes of hidden states of earlier ones")
        wide = self.like.shape[1]  # not a constant row: a norm after it could cancel the difference
        x_RW = torch.linspace(-1, 1, 2 * wide, dtype=torch.float32).reshape(2, wide).to(self.like)
        if not torch.equal(self.leave(x_RW), self.leave(x_RW, 1.0, 1)):
            raise self._error("computes its output from hidden states of more than its last layer")

    def _bound(self, number: int, args: Any, kwargs: Any) -> tuple[Tensor, dict[str, Any]]:
        """Return the hidden states, and the other arguments by name."""
        names = list(_arguments(self.layers[number]))
        found = {**dict(zip(names, args, strict=False)), **kwargs}
        return found.pop(self._first[number]), found

    def _forward(self, ids_1T: Tensor, cache: Cache, lo: int = 0) -> None:
        """Run the decoder's own forward over tokens at positions from `lo` on."""
        forward = inspect.unwrap(type(self._base).forward)
        given: dict[str, Any] = {"input_ids": ids_1T, "use_cache": True}
        given[cache_argument(self._base)] = cache
        if "position_ids" in inspect.signature(forward).parameters:
            positions = torch.arange(lo, lo + ids_1T.shape[1], device=ids_1T.device)
            given["position_ids"] = positions[None]
        self._base.forward(**given)

    def _new_cache(self) -> Cache:
        return Cache(layers=copy.deepcopy(self.fresh))

    def cache_of(self, length: int) -> Cache:
        """Return an empty cache that reports a length of `length` tokens."""
        return Cache(layers=[_of_length(layer, length, self.like) for layer in self.fresh])

    def new_state(self, number: int) -> LayerCache:
        """Return a layer's cache for a request without tokens."""
        own = {m.layer_idx for m in self.layers[number].modules() if hasattr(m, "layer_idx")}
        return LayerCache({i: copy.deepcopy(self.fresh[i]) for i in sorted(own or {number})})

    def kept_bytes(self, num_tokens: int) -> int:
        """Return the bytes that all layers cache for so many tokens; no expert computes."""
        stubs: dict[nn.Module, Stub] = {m: _nothing for m in self._base.modules() if is_experts(m)}
        cache = self._new_cache()
        with torch.inference_mode(), replaced(stubs):
            self._forward(self._ids(num_tokens), cache)
        kept = LayerCache(dict(enumerate(cache.layers)))
        return sum(t.nbytes for t in kept.tensors().values())

    def _error(self, what: str) -> ModelError:
        return ModelError(f"{type(self._base).__name__} {what}: not supported")

    # -- for drivers

    def enter(self, ids: Tensor, lo: int, shift: float = 0.0) -> Entry:
        """Return the arguments of the layers for tokens `ids`, [T], at positions from `lo` on.

        Args:
            ids: Tokens.
            lo: Position of the first token.
            shift: Number that the stubs of layers add to hidden states.
        """
        cache, given = self.cache_of(lo), []
        first: list[Tensor] = []

        def stub(number: int) -> Stub:
            def run(*args: Any, **kwargs: Any) -> Any:
                x, found = self._bound(number, args, kwargs)
                first.append(x)
                beyond = self.caches[number] | {handed.name for handed in self.handed[number]}
                given.append({name: v for name, v in found.items() if name not in beyond})
                if number == len(self.layers) - 1:
                    raise Unwind
                length, x = self._lengths[number], x + shift if shift else x
                return (x, *[None] * (length - 1)) if length else x

            return run

        with replaced({layer: stub(i) for i, layer in enumerate(self.layers)}), suppress(Unwind):
            self._forward(ids[None], cache, lo)
        x = first[0]
        return Entry(x.reshape(x.shape[1], -1), given, cache)

    def leave(self, x_RW: Tensor, shift: float = 0.0, token: int = 0) -> Tensor:
        """Return the output head's input for rows of the last layer's output: [R, D].

        Args:
            x_RW: The rows.
            shift: Number that the stubs of layers add to hidden states.
            token: Id of the rows' tokens. It must not change the result.
        """
        last, found = len(self.layers) - 1, []
        x = x_RW.reshape(1, len(x_RW), *self.shape)

        def stub(number: int) -> Stub:
            def run(*args: Any, **kwargs: Any) -> Any:
                y = x if number == last else self._bound(number, args, kwargs)[0] + shift
                length = self._lengths[number]
                return (y, *[None] * (length - 1)) if length else y

            return run

        def head(x_1RD: Tensor) -> None:
            found.append(x_1RD)
            raise Unwind

        stubs: dict[nn.Module, Stub] = {layer: stub(i) for i, layer in enumerate(self.layers)}
        stubs[self._model.get_output_embeddings()] = head
        ids = torch.full((1, len(x_RW)), token, device=x_RW.device, dtype=torch.int64)
        with replaced(stubs), suppress(Unwind):
            self._model.forward(input_ids=ids, use_cache=False)
        if not found:
            raise self._error("does not give its hidden states to its output head")
        return found[0][0]


class Leave(nn.Module):
    """A module that calls `Around.leave`, used instead of a model's last norm."""

    def __init__(self, around: Around) -> None:
        super().__init__()
        self._leave = around.leave

    def forward(self, x_RW: Tensor) -> Tensor:
        """Return rows [R, W] in the form of the output head's input, [R, D]."""
        return self._leave(x_RW)


def _arguments(layer: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Return the named arguments of a layer's forward, without self."""
    found = inspect.signature(inspect.unwrap(type(layer).forward)).parameters
    named = {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    return {n: p for n, p in list(found.items())[1:] if p.kind in named}


def _members(value: Any) -> list[int] | None:
    """Return the ids of the members of a list or a mapping."""
    if isinstance(value, Mapping):
        return [id(member) for pair in value.items() for member in pair]
    return [id(member) for member in value] if isinstance(value, list) else None


def _keeps_nothing_before(
    attention: nn.Module | None, real: Stub, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    """Return True if a layer calls its attention, and changes no cache before that call.

    Args:
        attention: Attention module of the layer.
        real: The layer's forward.
        args: Positional arguments of the call. Caches among them are copied.
        kwargs: Keyword arguments of the call.
    """
    if attention is None:
        return False
    copies: list[Cache] = []

    def copied(value: Any) -> Any:
        if not isinstance(value, Cache):
            return value
        copies.append(Cache(layers=copy.deepcopy(value.layers)))
        return copies[-1]

    def stub(*_: Any, **__: Any) -> Any:
        raise Unwind

    given = [copied(value) for value in args]
    named = {name: copied(value) for name, value in kwargs.items()}
    before = [_kept(cache) for cache in copies]
    with replaced({attention: stub}):
        try:
            real(*given, **named)
        except Unwind:
            after = [_kept(cache) for cache in copies]
            return all(_same(x, y) for x, y in zip(before, after, strict=True))
    return False


def is_experts(module: nn.Module) -> bool:
    """Return True if `use_experts_implementation` made a module."""
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate")


def _nothing(x_TD: Tensor, *_: Any, **__: Any) -> Tensor:
    """Return zeros instead of the output of experts."""
    return torch.zeros_like(x_TD)


def _first(out: Any) -> Any:
    return out[0] if isinstance(out, tuple) else out


def _tensors(value: Any, name: str = "") -> dict[str, Tensor]:
    """Return all tensors in a value, by their paths."""
    if isinstance(value, Tensor):
        return {name: value}
    members: Any = ()
    if isinstance(value, Mapping):
        members = value.items()
    elif isinstance(value, list | tuple):
        members = enumerate(value)
    return {n: t for key, x in members for n, t in _tensors(x, f"{name}.{key}").items()}


def _kept(cache: Cache) -> dict[str, Tensor]:
    found = LayerCache(dict(enumerate(cache.layers))).tensors()
    return {name: tensor.clone() for name, tensor in found.items()}


def _same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(t, other[name]) for name, t in one.items()
    )


def _of_length(fresh: Any, length: int, like: Tensor) -> Any:
    """Return a copy of an empty cache layer that reports a length of `length` tokens."""
    made: Any = copy.copy(fresh)
    if length and isinstance(fresh, CacheLayerMixin):
        made.keys = made.values = like.new_empty((1, 1, 1, 1)).expand(1, 1, length, 1)
        made.dtype, made.device, made.is_initialized = like.dtype, like.device, True
        if hasattr(made, "cumulative_length"):
            made.cumulative_length = length
        if getattr(made, "indexer_position_ids", made) is None:  # for each kind of rotation
            places = torch.arange(length, device=like.device)
            made.indexer_position_ids = places.expand(3, 1, length)
    return made
