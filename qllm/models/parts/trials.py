"""Trials of a model's parts: a part's own forward over random weights, compared with its kind.

A trial runs the module's code as a shadow (`qllm.models.parts.drawn`) and the formula of a kind
(`qllm.models.parts.formulas`) on the same random inputs. In fp32 they agree to a few units of
rounding; in bf16 they round in the same places. Inputs of several sizes reveal an epsilon, a
clamp or a saturated gate. No weight of the model is read.

Every trial yields differences, and none if the part is of the kind.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from qllm.models.arguments import cache_argument, parameters_of
from qllm.models.hybrid import OneState
from qllm.models.parts.drawn import Draw, shadow, with_attention
from qllm.models.parts.formulas import (
    GATES,
    NORMS,
    ROUTERS,
    AttentionCall,
    Choice,
    Seen,
    attention,
    delta_net,
    expand,
    latents,
    swiglu,
)

DTYPES = torch.float32, torch.bfloat16
BOUND = {torch.float32: 3e-5, torch.bfloat16: 2.0**-7}
"""Largest difference, relative to the largest value of a row. It allows sums in another order, and
one unit of rounding.
"""
LOOSE = {torch.float32: 1e-2, torch.bfloat16: 2.0**-4}
"""Largest difference where values are rounded in between, or scores are large."""
ROUNDED_ELSEWHERE = 1 / 16
"""Share of values with a different last bit that counts as rounding in another place."""
TIES = {torch.float32: 1 / 32, torch.bfloat16: 1 / 4}
"""Share of tokens that may have other experts: equal scores, which are few in fp32."""
PAST = 3
"""Earlier tokens in the cache."""
MANY = 130
"""Tokens of a long call: more than two blocks of 64, for code that works in blocks."""
LARGE = 2.0**12
"""Size of an input far beyond the usual, which reveals a limit of values."""
FAR = 1 << 20
"""Position of the first token: attention must read positions only from its embeddings."""
PROBE = "qllm_trial"
"""Name of the attention function of a trial."""
COMPLEX = "complex"
"""Name of the same function for position embeddings that are complex numbers."""

Trial = Callable[..., str]


def trial(run: Callable[..., Iterator[str]]) -> Trial:
    """Make a trial of a function that yields differences. An exception counts as one."""

    @wraps(run)
    def tried(module: nn.Module, *args: Any) -> str:
        try:
            with torch.inference_mode(), _on_cpu():
                for dtype in DTYPES:
                    draw = Draw(dtype)
                    said = next(filter(None, run(module, draw, *args)), "") or draw.kept_more()
                    if said:
                        return said
        except Exception as error:  # noqa: BLE001 - after any error, the part is not of the kind
            text = next(iter(str(error).splitlines()), "")
            return f"it raised {type(error).__name__}: {text}"
        return ""

    return tried


def _on_cpu() -> AbstractContextManager[object]:
    """Make new tensors on the CPU. Enter the slow torch context only if needed."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


def differs(
    what: str, found: Any, expected: Tensor, bound: Tensor | None = None, is_close: bool = False
) -> str:
    """Return a text if a tensor differs from the expected one by more than rounding, else "".

    Args:
        what: Name of the tensor.
        found: The tensor.
        expected: Expected values, [..., rows, values].
        bound: Bound of every row; None is that of the dtype.
        is_close: True if values may be rounded in other places.
    """
    if not isinstance(found, Tensor):
        return f"{what}: {type(found).__name__}, no tensor"
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        kinds = (f"{tuple(t.shape)} of {str(t.dtype)[6:]}" for t in (found, expected))
        return "{}: {}, not {}".format(what, *kinds)
    wide = expected.float()
    error = (found.float() - wide).abs().amax(-1)
    relative = error / wide.abs().amax(-1).clamp_min(1e-30)
    limits = (LOOSE if is_close else BOUND)[expected.dtype] if bound is None else bound
    if not bool((relative <= limits).all()):
        return f"{what}: they differ by {float(relative.max()):.2g} of the largest value"
    if expected.dtype is torch.bfloat16 and bound is None and not is_close:
        share = float((found != expected).float().mean())
        if share > ROUNDED_ELSEWHERE:
            return f"{what}: {share:.0%} of the values are rounded in another place"
    return ""


def rows(draw: Draw, width: int, *sizes: float) -> Tensor:
    """Return one row of random values for each size."""
    return draw.normal(len(sizes), width) * torch.tensor(sizes, dtype=draw.dtype)[:, None]


def calls(x: Tensor, is_long: bool = True) -> Iterator[Tensor]:
    """Yield all rows of an input, one row, and many rows: a token must not depend on others."""
    yield x
    yield x[-1:]
    if is_long:
        yield x[torch.arange(MANY) % len(x)]


# -- norms, dense layers, experts, routers


@trial
def norm(module: Any, draw: Draw, kind: str) -> Iterator[str]:
    """Compare a norm with a kind of NORMS."""
    made = shadow(module, draw)
    for x in calls(rows(draw, made.weight.numel(), 2**-12, 2**-10, 2**-5, 1, 8, 64, LARGE)):
        yield differs("its output", made(x[None]), NORMS[kind](made, x[None]))


@trial
def mlp(module: Any, draw: Draw) -> Iterator[str]:
    """Compare a dense layer with the usual gated MLP."""
    made = shadow(module, draw)
    for x in calls(rows(draw, module.gate_proj.in_features, 2**-5, 0.5, 1, 2, 8, LARGE)):
        yield differs("its output", made(x[None]), swiglu(made, x[None]))


class _Small(Draw):
    """A source of weights for few, narrow experts."""

    def __init__(self, dtype: torch.dtype, experts: Any) -> None:
        super().__init__(dtype)
        up = experts.gate_up_proj.shape
        wide, inner = (up[1], up[2] // 2) if experts.is_transposed else (up[2], up[1] // 2)
        hidden = {2 * inner: 16, inner: 8}.get(wide, 24)
        self.sizes = {experts.num_experts: 4, 2 * inner: 16, inner: 8, wide: hidden}
        """Sizes of the drawn weights, by sizes of the module."""
        self._shapes = {
            "gate_up_proj": (4, hidden, 16) if experts.is_transposed else (4, 16, hidden),
            "down_proj": (4, 8, hidden) if experts.is_transposed else (4, hidden, 8),
            "gate_up_proj_bias": (4, 16),
            "down_proj_bias": (4, hidden),
        }

    def weight(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return values for a parameter, smaller than the module's."""
        return super().weight(name, self._shapes[name])


@trial
def experts(module: Any, draw: Draw, kind: str) -> Iterator[str]:
    """Compare experts with a kind of GATES: their gate, and both implementations of forward."""
    small = _Small(draw.dtype, module)
    numbers = {k: v for k, v in vars(module).items() if type(v) is int}
    settings: dict[str, Any] = {k: small.sizes.get(v, v) for k, v in numbers.items()}
    if hasattr(module, "config"):
        settings["config"] = with_attention(module.config, "sdpa")
    made = shadow(module, small, **settings)
    both = rows(draw, 16, 2**-5, 1, 4, 16, LARGE)
    yield differs("its gate", made._apply_gate(both), GATES[kind](made, both))
    hidden = made.down_proj.shape[2 if module.is_transposed else 1]
    x = rows(draw, hidden, 0.25, 1, 2, 4, 8, LARGE)
    ids = torch.tensor([[0, 3], [1, 2], [3, 1], [2, 0], [2, 0], [1, 3]])
    weights = draw.uniform(0.1, 1, 6, 2)
    expected = _of_experts(kind, made, x, ids, weights)
    for implementation in ("grouped_mm", "eager"):
        if hasattr(made, "config"):
            made.config._experts_implementation = implementation
        for given in zip(*map(calls, (x, ids, weights, expected)), strict=True):
            yield differs("its output", made(*given[:3]), given[3], is_close=True)
    yield small.kept_more()


def _of_experts(kind: str, m: Any, x: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Compute experts in fp32."""
    ups, downs = m.gate_up_proj.float(), m.down_proj.float()
    if m.is_transposed:
        ups, downs = ups.transpose(1, 2), downs.transpose(1, 2)
    out = torch.zeros(x.shape, dtype=torch.float32)
    for t, k in torch.cartesian_prod(*map(torch.arange, ids_TK.shape)).tolist():
        expert = ids_TK[t, k]
        up_bias, down_bias = (
            (m.gate_up_proj_bias[expert].float(), m.down_proj_bias[expert].float())
            if m.has_bias
            else (None, None)
        )
        inner = GATES[kind](m, F.linear(x[t].float(), ups[expert], up_bias))
        out[t] += weights_TK[t, k].float() * F.linear(inner, downs[expert], down_bias)
    return out.to(x.dtype)


@trial
def router(module: Any, draw: Draw, kind: str) -> Iterator[str]:
    """Compare a router with a kind of ROUTERS."""
    made = shadow(module, draw)
    for x in calls(rows(draw, made.weight.shape[1], *[0.25, 1, 2, 4] * 15, 16, 16, 32, 32)):
        yield from _routes(made, kind, x)


def _routes(made: Any, kind: str, x: Tensor) -> Iterator[str]:
    first, weights, last = made(x)
    ids = first if last.is_floating_point() else last
    expected = ROUTERS[kind](made, x)
    if ids.shape != expected.ids_TK.shape:
        yield f"its experts: {tuple(ids.shape)}, not {tuple(expected.ids_TK.shape)}"
    found, expected = _by_expert(ids, weights), _by_expert(*expected)
    same = (found.ids_TK == expected.ids_TK).all(-1)
    if float((~same).float().mean()) > TIES[x.dtype]:
        yield f"its experts: others for {int((~same).sum())} of {len(same)} tokens"
    yield differs("its weights", found.weights_TK[same], expected.weights_TK[same])


def _by_expert(ids_TK: Tensor, weights_TK: Tensor) -> Choice:
    ids, order = ids_TK.sort(-1)
    return Choice(ids, weights_TK.gather(-1, order))


# -- attention


class Cache:
    """Earlier keys and values of one attention, and a record of its writes."""

    def __init__(self, past: tuple[Tensor, Tensor], index: int) -> None:
        self._past, self._index = past, index
        self.written: tuple[Tensor, Tensor] | None = None

    def update(
        self, keys: Tensor, values: Tensor, index: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values."""
        if index != self._index or self.written is not None:
            raise ValueError(f"layer {self._index} wrote to the cache of layer {index}, or twice")
        self.written = keys.clone(), values.clone()
        past_keys, past_values = self._past
        return torch.cat((past_keys, keys), 2), torch.cat((past_values, values), 2)

    def get_seq_length(self, *_: object) -> int:
        """Refuse: attention that reads the number of earlier tokens may depend on that number."""
        raise ValueError("it asks how many tokens are in the cache")


_HARMLESS = {
    *("dropout", "scaling", "sliding_window", "is_causal", "use_cache"),
    *("position_ids", "cache_position"),
}


def _probe(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **given: Any
) -> Any:
    """Attend as transformers' sdpa, but raise on arguments that sdpa would silently ignore."""
    beyond = {k for k, v in given.items() if v is not None} - _HARMLESS
    if beyond or given.get("dropout"):
        raise ValueError(f"it asks its attention function for {', '.join(beyond) or 'dropout'}")
    return sdpa_attention_forward(module, q, k, v, mask, scaling=given.get("scaling"))


AttentionInterface.register(PROBE, _probe)


def _meet(
    module: Any,
    draw: Draw,
    formula: Callable[[Any, AttentionCall], Seen],
    num_turned: int,
    how: str,
    is_long: bool,
) -> Iterator[str]:
    """Compare an attention with a cache (several tokens, one token) or without (many tokens)."""
    config = with_attention(module.config, PROBE if how == COMPLEX else how)
    made = shadow(module, draw, config=config)
    first = next(m for m in module.children() if type(m) is nn.Linear)
    beyond = 4 * (getattr(module.config, "clip_qkv", None) or 4.0)
    usual = (1.0, 0.5, 2.0, 1.0)
    tried = [((*usual, beyond), PAST), (usual[:1], PAST)]
    tried += [((usual * MANY)[:MANY], 0)] if is_long and draw.dtype is torch.float32 else []
    for sizes, past in tried:
        count = len(sizes)
        x = rows(draw, first.in_features, *sizes)[None]
        angles = draw.uniform(-3, 3, 1, count, num_turned // 2).float()
        if how == PROBE:
            angles = torch.cat((angles, angles), -1)
        tables = angles.cos(), angles.sin()
        given: Any = torch.complex(*tables)
        if how != COMPLEX:
            given = tables = tables[0].to(draw.dtype), tables[1].to(draw.dtype)
        shapes = _kept_shapes(module)
        first_kept, second_kept = (draw.normal(1, n, past, width) for n, width in shapes)
        keys = torch.arange(past + count)
        hidden = keys[None, :] > keys[past:, None]
        mask = torch.zeros(hidden.shape, dtype=draw.dtype)
        mask = mask.masked_fill(hidden, torch.finfo(draw.dtype).min)[None, None]
        asked = AttentionCall(x, *tables, (first_kept, second_kept), mask)
        expected, cache = formula(made, asked), Cache(asked.past, module.layer_idx)
        out = made(
            hidden_states=x,
            position_embeddings=given,
            attention_mask=mask,
            **{cache_argument(module): cache, **positions_for(module, count)},
        )[0]
        if cache.written is None:
            yield "it writes nothing to the cache"
            return
        yield differs("its keys", cache.written[0], expected.keys)
        yield differs("its values", cache.written[1], expected.values)
        bounds = torch.full((1, count), BOUND[torch.float32], dtype=torch.float32)
        bounds[:, [size == beyond for size in sizes]] = LOOSE[torch.float32]  # large scores
        is_wide = draw.dtype is torch.float32
        yield differs("its output", out, expected.out, bounds if is_wide else None, not is_wide)


def positions_for(module: Any, count: int) -> dict[str, Tensor]:
    """Return the positions of tokens under the names that a layer or an attention uses."""
    takes = parameters_of(module).values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in takes)
    made = torch.arange(FAR, FAR + count)
    values = {"position_ids": made[None], "cache_position": made}
    return {k: v for k, v in values.items() if takes_all or k in parameters_of(module)}


def _kept_shapes(attn: Any) -> list[tuple[int, int]]:
    """Return heads and width of keys and of values in the cache."""
    if hasattr(attn, "kv_lora_rank"):
        return [(1, attn.kv_lora_rank), (1, attn.qk_rope_head_dim)]
    linears = attn.k_proj, attn.v_proj
    return [(x.out_features // attn.head_dim, attn.head_dim) for x in linears]


@trial
def attends(module: Any, draw: Draw, kind: str, num_turned: int, is_long: bool) -> Iterator[str]:
    """Compare an attention over keys and values with a kind of `fingerprints.ATTENTION`.

    Args:
        module: The attention.
        draw: Source of weights and inputs.
        kind: Kind to compare with.
        num_turned: Number of first values of a head that are rotated.
        is_long: True tries many tokens too.
    """
    how = "eager" if kind == "sinks" else PROBE
    yield from _meet(module, draw, partial(attention, kind), num_turned, how, is_long)


@trial
def keeps_latents(module: Any, draw: Draw, rotation: str, is_long: bool) -> Iterator[str]:
    """Compare an attention with multi-head latent attention.

    Args:
        module: The attention.
        draw: Source of weights and inputs.
        rotation: A key of `formulas.ROTATIONS`.
        is_long: True tries many tokens too.
    """
    yield from expands(module, draw)
    how = COMPLEX if rotation == "complex" else PROBE
    formula = partial(latents, rotation)
    yield from _meet(module, draw, formula, module.qk_rope_head_dim, how, is_long)


def expands(module: Any, draw: Draw) -> Iterator[str]:
    """Compare the expansion of latents with the usual one."""
    made = shadow(module, draw)
    given = [draw.normal(1, 1, 5, width) for _, width in _kept_shapes(module)]
    pairs = zip(("keys", "values"), made.expand_kv(*given), expand(made, *given), strict=True)
    for name, found, expected in pairs:
        yield differs(f"its expanded {name}", found, expected)


expands_latents = trial(expands)


@trial
def is_delta_net(module: Any, draw: Draw, kind: str, new_state: Callable[[], Any]) -> Iterator[str]:
    """Compare a Gated DeltaNet with a kind of `fingerprints.DELTA_NET`, in chunks and by token.

    Args:
        module: The Gated DeltaNet.
        draw: Source of weights and inputs.
        kind: Kind to compare with.
        new_state: Factory of the state of a request without tokens.
    """
    made, name = shadow(module, draw), cache_argument(module)
    width = module.out_proj.out_features
    x = rows(draw, width, *([0.5, 1, 2, 1, 0.25] * 14)[1:], 64 * LARGE)[None]
    expected = delta_net(kind, made, x)
    for cuts in ([0, 70], [0, 6, 7, 8, 70]):
        cache, outs = OneState(new_state()), []
        for lo, hi in pairwise(cuts):
            out = made(hidden_states=x[:, lo:hi], **{name: cache})
            outs.append(out[0] if isinstance(out, tuple) else out)
        bound = torch.full(expected.shape[:2], 10 * BOUND[torch.float32], dtype=torch.float32)
        is_wide = draw.dtype is torch.float32
        found = torch.cat(outs, 1)
        yield differs("its output", found, expected, bound if is_wide else None, not is_wide)
