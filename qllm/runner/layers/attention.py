"""Per-sequence SDPA on KV slabs, inside the model's own attention modules.

Each module gets its own config that makes it call this code: a shallow copy of the model's config
with the attention implementation "qllm". The model's config does not change, so `model.forward`
still builds its masks as before. A call without a `Step` is passed to the implementation that the
model's config names *at that moment*. A runner changes no setting while it drives, so another
thread may use the model.

A `Step` is both the `past_key_values` that the module writes through and the context in the keyword
arguments.
"""

import copy
import sys
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qllm.kernels.cpu.attention import KEY_BLOCK
from qllm.models.discover import Chunk
from qllm.runner.kv import RequestKV

NAME = "qllm"
KV = tuple[Tensor, Tensor]
"""Keys and values, [1, G, S, H] each."""


class Span(NamedTuple):
    """Queries [lo, hi) of one request, at tokens [at, at + hi - lo) of the op."""

    kv: Any
    """A `RequestKV`, of the class that the backend makes."""
    at: int
    lo: int
    hi: int


class SpanAddresses:
    """Spans in the layout of the kernels, 6 integers per span (`Span` in kernels/cpu/kernels.h)."""

    def __init__(self, spans: Sequence[Span], slab: tuple[int, int, int], like: Tensor) -> None:
        self._values = array("q")
        for kv, at, lo, hi in spans:
            k, v = kv.base(slab, like)
            self._values.extend((k, v, kv.capacity, at, lo, hi))
        self.address = self._values.buffer_info()[0]


class Step:
    """The spans of one ATTN op in packed order, and their masks, made on demand.

    Spans of one request are adjacent. Tokens without a span are dead, and get zeros.
    """

    __slots__ = (
        "_addresses",
        "_reached",
        "entries",
        "latent",
        "masks",
        "num_attended",
        "num_tokens",
        "single",
        "spans",
    )

    def __init__(self, spans: Sequence[Span], num_tokens: int, latent: bool) -> None:
        self.spans = tuple(spans)
        self.num_tokens = num_tokens
        self.latent = latent
        """True if the cache holds MLA latents. The module expands the latents after `update`."""
        self.single = len(self.spans) == num_tokens > 1
        """True if every token is a sequence of its own: a decode batch."""
        self.num_attended = sum(span.hi - span.lo for span in self.spans)
        """Number of tokens that a span covers. The other tokens are dead."""
        self._addresses: SpanAddresses | None = None
        self._reached = False
        self.masks: dict[tuple[int, int, int, int], Tensor] = {}
        self.entries: dict[int, Any] = {}
        """Arguments of layer calls (`models.around.Entry`), by the first token of each call."""

    def update(
        self, k_1GTH: Tensor, v_1GTH: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values; return the keys and values that the module attends to."""
        if self.single:
            tokens = zip(torch.split(k_1GTH, 1, 2), torch.split(v_1GTH, 1, 2), strict=True)
            for span, (k, v) in zip(self.spans, tokens, strict=True):
                span.kv.write(layer_idx, k, v, span.lo)
        for kv, at, lo, hi in () if self.single else self.spans:
            n = hi - lo
            if n == self.num_tokens:
                kv.write(layer_idx, k_1GTH, v_1GTH, lo)
            else:
                kv.write(layer_idx, k_1GTH[:, :, at : at + n], v_1GTH[:, :, at : at + n], lo)
        if not self.latent:
            return k_1GTH, v_1GTH
        parts = [kv.read(layer_idx, 0, hi) for kv, hi in self.sequences()]
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return k_1GTH[:, :, :0], v_1GTH[:, :, :0]
        return torch.cat([k for k, _ in parts], 2), torch.cat([v for _, v in parts], 2)

    def addresses(self, slab: tuple[int, int, int], like: Tensor) -> SpanAddresses:
        """Return the spans for the kernels, and reserve the KV of new requests (see `SlabKV.base`).

        A caller whose kernel writes into the KV must call `reach`.
        """
        if self._addresses is None:
            self._addresses = SpanAddresses(self.spans, slab, like)
        return self._addresses

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the position of the first token, for modules that are called for one span."""
        return self.spans[0].lo if self.spans else 0

    def reach(self) -> None:
        """Mark the positions of the spans as written. They are written before they are read."""
        if not self._reached:
            for kv, _, _, hi in self.spans:
                kv.reach(hi)
            self._reached = True

    @property
    def num_keys(self) -> int:
        """Position after the last key of any span."""
        return max((span.hi for span in self.spans), default=0)

    def first_key(self, window: int | None) -> int:
        """Return the start of a block of keys, at or before the first key that a span sees."""
        if window is None or not self.spans:
            return 0
        return max(0, min(span.lo for span in self.spans) + 1 - window) // KEY_BLOCK * KEY_BLOCK

    def sequences(self) -> list[tuple[RequestKV, int]]:
        """Return the requests of the spans, each with the end of its attended keys, in order."""
        last: dict[int, tuple[RequestKV, int]] = {}
        for span in self.spans:
            last[id(span.kv)] = (span.kv, span.hi)
        return list(last.values())

    def keys(self, layer_idx: int, k_1GTH: Tensor, v_1GTH: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return, per span, the keys and values of positions [0, hi)."""
        if not self.latent:
            pairs = [kv.read(layer_idx, 0, hi) for kv, _, _, hi in self.spans]
            tiles = k_1GTH.shape[1] // pairs[0][0].shape[1] if pairs else 1
            if tiles > 1:  # the module repeats the whole sequence of heads (JetMoE)
                pairs = [(k.repeat(1, tiles, 1, 1), v.repeat(1, tiles, 1, 1)) for k, v in pairs]
            return pairs
        start, at = {}, 0
        for kv, hi in self.sequences():
            start[id(kv)] = at
            at += hi
        out = []
        for kv, _, _, hi in self.spans:
            a = start[id(kv)]
            out.append((k_1GTH[:, :, a : a + hi], v_1GTH[:, :, a : a + hi]))
        return out

    def mask(self, q_TH: Tensor, first: int, lo: int, hi: int, window: int | None) -> Tensor:
        """Return the mask to add for queries [lo, hi) over keys [first, hi), made once per step."""
        key = (first, lo, hi, -window if isinstance(window, Chunk) else window or 0)
        mask = self.masks.get(key)
        if mask is None:
            q = torch.arange(lo, hi, device=q_TH.device)[:, None]
            k = torch.arange(first, hi, device=q_TH.device)[None, :]
            hidden = k > q
            if window is not None:
                hidden |= k < _first_seen(q, window)
            mask = torch.zeros(hidden.shape, dtype=q_TH.dtype, device=q_TH.device)
            mask.masked_fill_(hidden, float("-inf"))
            self.masks[key] = mask
        return mask


def _first_seen(q: Any, window: int) -> Any:
    """Return the first position that a query at position q sees."""
    return q // window * window if isinstance(window, Chunk) else q - window + 1


class OwnStep(Protocol):
    """A step with its own attention, over KV that is not in slabs."""

    def attend(
        self,
        module: nn.Module,
        q_1NTH: Tensor,
        scaling: float | None,
        window: int | None,
        sinks_N: Tensor | None,
    ) -> Tensor:
        """Return the attention of all queries over the KV written so far: [1, T, N, H]."""
        ...


Attend = Callable[..., tuple[Tensor, Any]]


def _family_eager(module: nn.Module) -> Attend:
    """Return the eager attention function that the module's own file defines."""
    found: Attend = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
    return found


def _visible(span: Span, kv: KV, window: int | None) -> tuple[int, KV, int | None]:
    """Return the first visible key, the KV from there on, and the window if it hides keys."""
    if window is None or span.hi <= window:
        return 0, kv, None
    first = max(0, _first_seen(span.lo, window))
    if first:
        kv = (kv[0][:, :, first:], kv[1][:, :, first:])
    return first, kv, window


def _one(
    module: nn.Module,
    step: Step,
    q_1NTH: Tensor,
    kv: KV,
    span: Span,
    scaling: float | None,
    window: int | None,
    eager: Attend | None,
    softcap: float | None = None,
) -> Tensor:
    """Return the attention of one span: out[1, T, N, H]."""
    lo, hi = span.lo, span.hi
    one_query = hi - lo == 1
    if eager is not None:
        first, (k, v), window = _visible(span, kv, window)
        mask = None if one_query else step.mask(q_1NTH, first, lo, hi, window)
        how = {} if softcap is None else {"softcap": softcap}
        out: Tensor = eager(module, q_1NTH, k, v, mask, scaling=scaling, **how)[0]
        return out
    return _attend_span(q_1NTH, kv, span, step, scaling, window)


def _attend_span(
    q_1NTH: Tensor, kv: KV, span: Span, step: Step, scaling: float | None, window: int | None
) -> Tensor:
    """Return the causal attention of the queries of one span, by torch: out[1, T, N, H].

    Args:
        q_1NTH: Queries of the span.
        kv: Keys and values of positions [0, span.hi).
        span: Positions of the queries.
        step: Step that keeps the masks.
        scaling: Factor of the scores; None is 1 / sqrt(H).
        window: Number of keys that a query of sliding attention sees; None is all.
    """
    lo, hi = span.lo, span.hi
    first, (k, v), window = _visible(span, kv, window)
    one_query = hi - lo == 1
    causal = not one_query and lo == 0 and window is None
    mask = None if one_query or causal else step.mask(q_1NTH, first, lo, hi, window)
    out = F.scaled_dot_product_attention(
        q_1NTH,
        k,
        v,
        attn_mask=mask,
        is_causal=causal,
        scale=scaling,
        enable_gqa=k.shape[1] != q_1NTH.shape[1],
    )
    return out.transpose(1, 2)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    qllm_step: Step | OwnStep | None = None,
    qllm_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """Compute attention. transformers' attention interface calls this function by the name "qllm".

    The window comes from the driver, because some families pass the window only in the mask.
    """
    if qllm_step is None:
        fallback = _configured(module)
        return fallback(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    step, window = qllm_step, qllm_window
    if not isinstance(step, Step):
        return step.attend(module, query, scaling, window, kwargs.get("s_aux")), None
    softcap = kwargs.get("softcap")
    is_plain = softcap is None and kwargs.get("s_aux") is None
    eager = None if is_plain else _family_eager(module)
    pairs = step.keys(module.layer_idx, key, value)  # type: ignore[arg-type]
    if len(pairs) == 1 and step.spans[0].hi - step.spans[0].lo == step.num_tokens:
        span = step.spans[0]
        return _one(module, step, query, pairs[0], span, scaling, window, eager, softcap), None
    outs = []
    at = 0
    for span, pair in zip(step.spans, pairs, strict=True):
        if span.at > at:
            outs.append(_dead(query, value, span.at - at))
        at = span.at + span.hi - span.lo
        q = query[:, :, span.at : at]
        outs.append(_one(module, step, q, pair, span, scaling, window, eager, softcap))
    if at < step.num_tokens:
        outs.append(_dead(query, value, step.num_tokens - at))
    return torch.cat(outs, 1), None


def _dead(query: Tensor, value: Tensor, num_tokens: int) -> Tensor:
    return query.new_zeros((1, num_tokens, query.shape[1], value.shape[3]))


def _configured(module: nn.Module) -> Attend:
    """Return the attention function that the model's own config names now."""
    own: Any = module.config
    config = getattr(own, "qllm_original", own)
    found: Attend = ALL_ATTENTION_FUNCTIONS.get_interface(
        config._attn_implementation, _family_eager(module)
    )
    return found


def install(modules: Sequence[nn.Module]) -> None:
    """Make attention modules call `attend`. Idempotent."""
    AttentionInterface.register(NAME, attend)
    copies: dict[int, Any] = {}
    for module in modules:
        config: Any = module.config
        if hasattr(config, "qllm_original"):
            continue
        if id(config) not in copies:
            own = copy.copy(config)
            own._attn_implementation = NAME
            own.qllm_original = config
            copies[id(config)] = own
        module.config = copies[id(config)]


def uninstall(modules: Sequence[nn.Module]) -> None:
    """Restore the modules' configs."""
    for module in modules:
        config: Any = module.config
        module.config = getattr(config, "qllm_original", config)
