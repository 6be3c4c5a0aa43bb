"""Formulas of the known kinds of parts in plain torch, with the same rounding as the modules.

Our kernels compute the same (`qllm.kernels.cpu`). A module is of a kind if its own forward gives
the same result as the kind's formula (`qllm.models.parts.trials`). `m` is the module, or an object
that replaces it.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

# -- norms


def _rms(x: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


def eps_of(m: Any) -> float:
    """Return the epsilon of a norm, under either of its names."""
    return float(getattr(m, "variance_epsilon", None) or m.eps)


def rms(m: Any, x: Tensor) -> Tensor:
    """Compute an RMS norm that rounds before it multiplies by its weight."""
    out: Tensor = m.weight * _rms(x, eps_of(m)).to(x.dtype)
    return out


def rms_wide(m: Any, x: Tensor) -> Tensor:
    """Compute an RMS norm that rounds after the product with its weight."""
    out: Tensor = (m.weight.float() * _rms(x, eps_of(m))).to(x.dtype)
    return out


def rms_wide_from_one(m: Any, x: Tensor) -> Tensor:
    """Compute an RMS norm that rounds afterwards and adds one to its weight."""
    out: Tensor = ((1 + m.weight.float()) * _rms(x, eps_of(m))).to(x.dtype)
    return out


def layer(m: Any, x: Tensor) -> Tensor:
    """Compute the usual layer norm, with or without a bias."""
    return F.layer_norm(x, m.weight.shape, m.weight, m.bias, eps_of(m))


NORMS = {
    "rms": rms,
    "rms_wide": rms_wide,
    "rms_wide_from_one": rms_wide_from_one,
    "layer": layer,
}

# -- dense layers and experts


def swiglu(m: Any, x: Tensor) -> Tensor:
    """Compute the usual gated MLP."""
    out: Tensor = m.down_proj(F.silu(m.gate_proj(x)) * m.up_proj(x))
    return out


def silu_gate(m: Any, both: Tensor) -> Tensor:
    """Compute a gate that lies before the values that it scales."""
    gate, up = both.chunk(2, -1)
    return F.silu(gate) * up


def clamped_gate(m: Any, both: Tensor) -> Tensor:
    """Compute a gate whose values alternate with the values that it scales; both are clamped."""
    gate = both[..., ::2].clamp(max=m.limit)
    up = both[..., 1::2].clamp(-m.limit, m.limit)
    return (up + 1) * (gate * torch.sigmoid(gate * m.alpha))


GATES = {"swiglu": silu_gate, "clamped": clamped_gate}

# -- routers


class Choice(NamedTuple):
    """The output of a router: the chosen experts and their weights."""

    ids_TK: Tensor
    weights_TK: Tensor


def _softmax_of_all(m: Any, logits: Tensor) -> Choice:
    weights, ids = torch.topk(logits.softmax(-1, dtype=torch.float32), m.top_k, dim=-1)
    return Choice(ids, weights)


def _renormalised(choice: Choice) -> Choice:
    ids, weights = choice
    return Choice(ids, weights / weights.sum(-1, keepdim=True))


def wide_router(m: Any, x: Tensor) -> Choice:
    """Choose by softmax over all experts, then top-k, renormalised, in fp32."""
    return _renormalised(_softmax_of_all(m, F.linear(x, m.weight)))


def flag_router(m: Any, x: Tensor) -> Choice:
    """Choose by softmax over all experts, then top-k, renormalised if `norm_topk_prob` is set."""
    choice = _softmax_of_all(m, F.linear(x, m.weight))
    ids, weights = _renormalised(choice) if m.norm_topk_prob else choice
    return Choice(ids, weights.to(x.dtype))


def chosen_router(m: Any, x: Tensor) -> Choice:
    """Choose by top-k, then softmax over the chosen."""
    logits = F.linear(x, m.weight, getattr(m, "bias", None))
    best, ids = logits.topk(m.top_k, dim=-1)
    return Choice(ids, best.softmax(-1, dtype=torch.float32).to(x.dtype))


def sigmoid_router(m: Any, x: Tensor) -> Choice:
    """Choose by sigmoids, with a correction and groups; renormalise if set, and scale."""
    scores = F.linear(x.float(), m.weight.float()).sigmoid()
    corrected = scores + m.e_score_correction_bias
    groups = corrected.unflatten(-1, (m.num_group, -1))
    best = groups.topk(2, dim=-1)[0].sum(-1).topk(m.topk_group, dim=-1)[1]
    is_kept = torch.zeros(groups.shape[:2], dtype=torch.bool).scatter_(1, best, True)
    corrected = groups.masked_fill(~is_kept[..., None], float("-inf")).flatten(1)
    ids = corrected.topk(m.top_k, dim=-1)[1]
    weights = scores.gather(1, ids)
    if m.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return Choice(ids, weights * m.routed_scaling_factor)


def softmax_fp32_router(m: Any, x: Tensor) -> Choice:
    """Choose by softmax in fp32, then top-k in the groups with the best expert, and scale."""
    scores = F.linear(x.float(), m.weight.float()).softmax(-1)
    if m.topk_method == "group_limited_greedy":
        groups = scores.view(len(scores), m.num_group, -1)
        best = groups.amax(-1).topk(m.topk_group, dim=-1)[1]
        is_kept = torch.zeros(groups.shape[:2], dtype=torch.bool).scatter_(1, best, True)
        scores = groups.masked_fill(~is_kept[..., None], 0.0).flatten(1)
    weights, ids = scores.topk(m.top_k, dim=-1)
    return Choice(ids, weights * m.routed_scaling_factor)


def sparse_mixer_router(m: Any, x: Tensor) -> Choice:
    """Choose two experts, the best first; each weight is a softmax over those near the best."""
    logits = F.linear(x, m.weight)
    left, ids, weights = logits, [], []
    for _ in range(2):
        best, index = left.max(-1, keepdim=True)
        is_far = (best - logits) / logits.abs().clamp(min=best) > 2 * m.router_jitter_noise
        near = left.masked_fill(is_far, float("-inf")).softmax(-1)
        ids.append(index)
        weights.append(near.gather(-1, index))
        left = left.scatter(-1, index, float("-inf"))
    return Choice(torch.cat(ids, -1), torch.cat(weights, -1))


ROUTERS = {
    "wide": wide_router,
    "flag": flag_router,
    "chosen": chosen_router,
    "sigmoid": sigmoid_router,
    "sparse_mixer": sparse_mixer_router,
    "softmax_fp32": softmax_fp32_router,
}

# -- attention


class Seen(NamedTuple):
    """An attention's writes to the cache, and its output."""

    keys: Tensor
    values: Tensor
    out: Tensor


class AttentionCall(NamedTuple):
    """The inputs of an attention."""

    x_1TD: Tensor
    cos: Tensor
    sin: Tensor
    past: tuple[Tensor, Tensor]
    """Keys and values in the cache, in the module's layout."""
    mask: Tensor


def _halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def _half_table(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1] // 2
    cos, sin, first, second = cos[..., :half], sin[..., :half], x[..., 0::2], x[..., 1::2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _complex(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs as complex numbers, in fp32. Cos and sin are half as wide."""
    first, second = x[..., 0::2].float(), x[..., 1::2].float()
    turned = torch.stack((first * cos - second * sin, first * sin + second * cos), -1)
    return turned.flatten(-2).to(x.dtype)


ROTATIONS = {"halves": _halves, "pairs": _pairs, "complex": _complex}


def _part(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[-1]
    return torch.cat((_halves(x[..., :width], cos, sin), x[..., width:]), -1)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """Compute softmax attention in fp32: [1, T, N * E]."""
    times = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(times, 1).float() for t in (k, v))
    scores = q.float() @ k.transpose(2, 3) * scale + mask.float()
    if sinks is not None:
        sink = sinks.float().reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sink), -1)
    shares = scores.softmax(-1)[..., : k.shape[2]]
    return (shares @ v).transpose(1, 2).flatten(2).to(q.dtype)


def attention(kind: str, m: Any, asked: AttentionCall) -> Seen:
    """Compute attention over keys and values, of a kind of `fingerprints.ATTENTION`."""
    x, width, base = asked.x_1TD, m.head_dim, kind.removeprefix("part_")
    q, k, v = m.q_proj(x), m.k_proj(x), m.v_proj(x)
    gate = None
    if base == "gated_head_norm":
        q, gate = (t.flatten(2) for t in q.unflatten(-1, (-1, 2 * width)).chunk(2, -1))
    if base.endswith("row_norm"):
        q, k = m.q_norm(q), m.k_norm(k)
    if base == "clipped_row_norm":
        q, k, v = (t.clamp(-m.config.clip_qkv, m.config.clip_qkv) for t in (q, k, v))
    q, k, v = (t.unflatten(-1, (-1, width)) for t in (q, k, v))
    if base.endswith("head_norm"):
        q, k = m.q_norm(q), m.k_norm(k)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    turn = _half_table if base == "sinks" else _part
    cos, sin = asked.cos.unsqueeze(1), asked.sin.unsqueeze(1)
    q, k = turn(q, cos, sin), turn(k, cos, sin)
    keys, values = (torch.cat(pair, 2) for pair in zip(asked.past, (k, v), strict=True))
    sinks = m.sinks if base == "sinks" else None
    out = _attend(q, keys, values, asked.mask, m.scaling, sinks)
    return Seen(k, v, m.o_proj(out if gate is None else out * torch.sigmoid(gate)))


def expand(m: Any, latents: Tensor, turned: Tensor) -> tuple[Tensor, Tensor]:
    """Expand latents [1, 1, S, R] and rotated keys [1, 1, S, F] to all heads' keys and values."""
    both = m.kv_b_proj(latents[:, 0]).unflatten(-1, (-1, m.qk_nope_head_dim + m.v_head_dim))
    keys, values = both.transpose(1, 2).split([m.qk_nope_head_dim, m.v_head_dim], -1)
    return torch.cat((keys, turned.expand(-1, keys.shape[1], -1, -1)), -1), values


def latents(rotation: str, m: Any, asked: AttentionCall) -> Seen:
    """Compute multi-head latent attention with a rotation of ROTATIONS."""
    x, cos, sin = asked.x_1TD, asked.cos.unsqueeze(1), asked.sin.unsqueeze(1)
    q = m.q_proj(x) if m.q_lora_rank is None else m.q_b_proj(m.q_a_layernorm(m.q_a_proj(x)))
    widths = [m.qk_nope_head_dim, m.qk_rope_head_dim]
    q, q_turned = q.unflatten(-1, (-1, sum(widths))).transpose(1, 2).split(widths, -1)
    latent, turned = m.kv_a_proj_with_mqa(x).split([m.kv_lora_rank, m.qk_rope_head_dim], -1)
    latent, turned = m.kv_a_layernorm(latent).unsqueeze(1), turned.unsqueeze(1)
    turn = ROTATIONS[rotation]
    q_turned, turned = turn(q_turned, cos, sin), turn(turned, cos, sin)
    kept = (torch.cat(pair, 2) for pair in zip(asked.past, (latent, turned), strict=True))
    keys, values = expand(m, *kept)
    out = _attend(torch.cat((q, q_turned), -1), keys, values, asked.mask, m.scaling)
    return Seen(latent, turned, m.o_proj(out))


# -- Gated DeltaNet


def _grouped(m: Any, x: Tensor) -> list[Tensor]:
    """Return projections that are grouped by head of keys: q, k, v, z, b, a."""
    share = m.num_v_heads // m.num_k_heads
    sizes = [m.head_k_dim, m.head_k_dim, share * m.head_v_dim, share * m.head_v_dim]
    found = m.in_proj_qkvz(x).unflatten(-1, (m.num_k_heads, -1)).split(sizes, -1)
    scalars = m.in_proj_ba(x).unflatten(-1, (m.num_k_heads, -1)).split([share, share], -1)
    return [t.flatten(2) for t in (*found, *scalars)]


def _split(m: Any, x: Tensor) -> list[Tensor]:
    """Return projections that lie one after the other."""
    qkv = m.in_proj_qkv(x).split([m.key_dim, m.key_dim, m.value_dim], -1)
    return [*qkv, m.in_proj_z(x), m.in_proj_b(x), m.in_proj_a(x)]


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def delta_net(kind: str, m: Any, x_1TD: Tensor) -> Tensor:
    """Compute a Gated DeltaNet over a whole sequence, token by token."""
    q, k, v, z, b, a = (_grouped if kind == "grouped" else _split)(m, x_1TD)
    mixed, taps = torch.cat((q, k, v), -1).transpose(1, 2), m.conv1d.weight
    mixed = F.conv1d(F.pad(mixed, (taps.shape[-1] - 1, 0)), taps, groups=len(taps))
    widths = [q.shape[-1], k.shape[-1], v.shape[-1]]
    found: Any = torch.split(F.silu(mixed).transpose(1, 2), widths, -1)
    q, k, v = found
    times = m.num_v_heads // m.num_k_heads
    q, k = (
        _unit(t.unflatten(-1, (-1, m.head_k_dim)).float()).repeat_interleave(times, 2)
        for t in (q, k)
    )
    v, q = v.unflatten(-1, (-1, m.head_v_dim)).float(), q * m.head_k_dim**-0.5
    beta = b.sigmoid().float()
    decay = (-m.A_log.float().exp() * F.softplus(a.float() + m.dt_bias)).exp()
    state, outs = torch.zeros(1, m.num_v_heads, m.head_k_dim, m.head_v_dim, dtype=torch.float32), []
    for t in range(x_1TD.shape[1]):
        state = state * decay[:, t, :, None, None]
        error = v[:, t] - (state * k[:, t, :, :, None]).sum(-2)
        state = state + k[:, t, :, :, None] * (error * beta[:, t, :, None])[:, :, None]
        outs.append((state * q[:, t, :, :, None]).sum(-2))
    out = torch.stack(outs, 1).to(x_1TD.dtype)
    out = m.norm.weight * _rms(out, eps_of(m.norm)).to(out.dtype)
    out = (out * F.silu(z.reshape(out.shape).float())).to(x_1TD.dtype)
    result: Tensor = m.out_proj(out.flatten(2))
    return result
