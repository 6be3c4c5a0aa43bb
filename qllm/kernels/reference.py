"""The functions of the Triton kernels in plain torch: same signatures, any device, no host sync.

The code is simple rather than fast: every token gathers the whole page table of its sequence,
and every expert multiplies every token.
"""

import torch
from torch import Tensor

from qllm.kernels.routing import (
    Activation,
    Angles,
    ExpertWeights,
    Groups,
    HeadNorms,
    Norm,
    Routing,
    Rule,
    RuleKind,
    Sum,
)
from qllm.kernels.tiles import Tiles


def write(k_TGD: Tensor, v_TGE: Tensor, k_SGD: Tensor, v_SGE: Tensor, slots_T: Tensor) -> None:
    """Do what `kernels.triton.attention.write` does; the pages' last slot takes dead tokens."""
    for new, pages in ((k_TGD, k_SGD), (v_TGE, v_SGE)):
        last = pages.shape[0] - 1
        kept = pages[last].clone()
        at = torch.where(slots_T < 0, last, slots_T)
        pages.index_copy_(0, at, new.to(pages.dtype))
        is_last = (slots_T == last)[:, None, None]
        own = torch.where(is_last, new.to(pages.dtype), 0).sum(0)
        pages[last].copy_(torch.where(is_last.any(), own, kept))


def rotate_and_write(
    q_TND: Tensor,
    k_TGD: Tensor,
    v_TGE: Tensor,
    cos_TD: Tensor,
    sin_TD: Tensor,
    k_SGD: Tensor,
    v_SGE: Tensor,
    slots_T: Tensor,
    out_TNE: Tensor,
    norms: HeadNorms | None = None,
    limit: float | None = None,
) -> None:
    """Do what `kernels.triton.rope.rotate_and_write` does."""
    if norms is not None:
        q_TND.copy_(rms_norm(q_TND, norms.q_D, norms.q_eps))
        k_TGD = rms_norm(k_TGD, norms.k_D, norms.k_eps)
    if limit is not None:
        q_TND.clamp_(-limit, limit)
        k_TGD, v_TGE = (x.clamp(-limit, limit) for x in (k_TGD, v_TGE))
    angles = Angles(cos_TD, sin_TD, in_pairs=False)
    q_TND.copy_(_rotated(q_TND, angles))
    out_TNE.copy_(torch.where((slots_T < 0)[:, None, None], 0.0, out_TNE))
    write(_rotated(k_TGD, angles), v_TGE, k_SGD, v_SGE, slots_T)


def write_latents(
    kv_TD: Tensor,
    norm: Norm,
    angles: Angles,
    c_SR: Tensor,
    k_rope_SF: Tensor,
    slots_T: Tensor,
    out_TNR: Tensor,
    q_TQ: Tensor | None = None,
    q_norm: Norm | None = None,
) -> Tensor | None:
    """Do what `kernels.triton.latents.write_latents` does."""
    latents, keys = torch.split(kv_TD, [c_SR.shape[1], k_rope_SF.shape[1]], 1)
    latents, keys = rms_norm(latents, *norm)[:, None], _rotated(keys[:, None], angles)
    write(latents, keys, c_SR[:, None], k_rope_SF[:, None], slots_T)
    out_TNR.copy_(torch.where((slots_T < 0)[:, None, None], 0.0, out_TNR))
    return None if q_TQ is None or q_norm is None else rms_norm(q_TQ, *q_norm)


def _rotated(x_TND: Tensor, angles: Angles) -> Tensor:
    cos_TD, sin_TD, in_pairs = angles
    left, right = (x_TND[..., 0::2], x_TND[..., 1::2]) if in_pairs else x_TND.chunk(2, 2)
    if in_pairs:
        x_TND = torch.cat((left, right), 2)
        cos_TD, sin_TD = (x[:, : left.shape[2]] for x in (cos_TD, sin_TD))
    if cos_TD.shape[1] < x_TND.shape[2]:  # both halves use the same table
        cos_TD, sin_TD = (torch.cat((x, x), 1) for x in (cos_TD, sin_TD))
    return x_TND * cos_TD[:, None] + torch.cat((-right, left), 2) * sin_TD[:, None]


def attend(
    q_TND: Tensor,
    k_SGD: Tensor,
    v_SGE: Tensor,
    tables_RP: Tensor,
    tiles: Tiles,
    *,
    page_size: int,
    scale: float,
    window: int | None = None,
    sinks_N: Tensor | None = None,
    q_rope_TNF: Tensor | None = None,
    k_rope_SF: Tensor | None = None,
    q_angles: Angles | None = None,
    out_TNE: Tensor,
) -> None:
    """Do what `kernels.triton.attention.attend` does."""
    ratio = q_TND.shape[1] // k_SGD.shape[1]
    offsets = torch.arange(page_size, device=q_TND.device)
    slots_RS = (tables_RP.long()[:, :, None] * page_size + offsets).flatten(1)
    slots_TS = slots_RS[tiles.seq_T.clamp(min=0)]
    k = k_SGD[slots_TS].float().repeat_interleave(ratio, 2)
    v = v_SGE[slots_TS].float().repeat_interleave(ratio, 2)
    scores = torch.einsum("tnd,tsnd->tns", q_TND.float(), k)
    if q_rope_TNF is not None and k_rope_SF is not None:
        if q_angles is not None:
            q_rope_TNF = _rotated(q_rope_TNF, q_angles)
        scores = scores + torch.einsum(
            "tnf,tsf->tns", q_rope_TNF.float(), k_rope_SF[slots_TS].float()
        )
    j = torch.arange(slots_TS.shape[1], device=q_TND.device)
    seen = j <= tiles.pos_T[:, None]
    if window is not None:
        seen = seen & (j > tiles.pos_T[:, None] - window)
    scores = torch.where(seen[:, None], scores * scale, float("-inf"))
    if sinks_N is not None:
        sink = sinks_N.float()[None, :, None].expand(scores.shape[0], -1, 1)
        scores = torch.cat([scores, sink], 2)
    p = torch.softmax(scores, 2)[:, :, : j.shape[0]]
    v = torch.where(seen[:, :, None, None], v, 0.0)  # a page not written yet may hold anything
    out = torch.einsum("tns,tsne->tne", p, v).to(out_TNE.dtype)
    out_TNE.copy_(torch.where((tiles.seq_T >= 0)[:, None, None], out, out_TNE))


def route(
    ids_TK: Tensor, num_tokens: Tensor, num_experts: int, hits: Tensor, num_shared: int = 0
) -> Routing:
    """Do what `kernels.triton.moe.route` does, but fill only the ids and counts."""
    empty = ids_TK.new_empty(0, dtype=torch.int32)
    token = torch.arange(ids_TK.shape[0], device=ids_TK.device)[:, None]
    every = num_experts + num_shared
    ids = torch.where(token < num_tokens, ids_TK, every)
    counts = (ids[:, :, None] == torch.arange(every, device=ids.device)).sum((0, 1))
    hits.add_((counts[:num_experts] > 0).sum())
    return Routing(ids, counts.to(torch.int32), empty, empty, empty, empty, empty)


def activate(kind: Activation, gate: Tensor, up: Tensor) -> Tensor:
    """Return the gated activation of an expert, in fp32."""
    gate, up = gate.float(), up.float()
    if kind is Activation.SILU:
        return torch.nn.functional.silu(gate) * up
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(gate * 1.702)


def run_experts(
    x_TD: Tensor, weights: ExpertWeights, routing: Routing, lo: int, hi: int, slots_TKD: Tensor
) -> None:
    """Do what `kernels.triton.moe.run_experts` does."""
    for expert in range(lo, hi):
        own = expert - weights.first
        up_FD, down_DI = _of_expert(weights, own)
        both = x_TD.float() @ up_FD.t().float()
        if weights.up_bias_EF is not None:
            both = both + weights.up_bias_EF[own].float()
        both = both.to(x_TD.dtype)
        inner = both.shape[1] // 2
        halves = (
            (both[:, 0::2], both[:, 1::2]) if weights.interleaved else torch.split(both, inner, 1)
        )
        h = activate(weights.activation, *halves).to(x_TD.dtype)
        out = h.float() @ down_DI.t().float()
        if weights.down_bias_ED is not None:
            out = out + weights.down_bias_ED[own].float()
        out = out.to(slots_TKD.dtype)
        is_mine = (routing.ids_TK == expert)[:, :, None]
        slots_TKD.copy_(torch.where(is_mine, out[:, None], slots_TKD))


def _of_expert(weights: ExpertWeights, expert: int) -> tuple[Tensor, Tensor]:
    """Return an expert's gates and ups [2 I, D], and its down weight [D, I]."""
    place = expert if weights.place_E is None else int(weights.place_E[expert])
    if weights.packed is not None:
        up, down = (stack.one(place).dequantised() for stack in weights.packed)
        return up, down
    if expert < weights.num_experts or weights.shared is None:
        return weights.up_EFD[place], weights.down_EDI[place]
    inner = weights.down_EDI.shape[2]
    lo = (expert - weights.num_experts) * inner
    gates, ups = (x[lo : lo + inner] for x in weights.shared.up_FD.chunk(2))
    return torch.cat((gates, ups)), weights.shared.down_DF[:, lo : lo + inner]


def choose(
    logits_TE: Tensor,
    rule: Rule,
    top_k: int,
    num_tokens: Tensor,
    hits: Tensor,
    dtype: torch.dtype,
    num_shared: int = 0,
) -> tuple[Routing, Tensor]:
    """Do what `kernels.triton.choose.choose` does."""
    x, num_experts = logits_TE.float(), logits_TE.shape[1]
    ids_TK = torch.topk(x.nan_to_num(-3e38), top_k).indices
    if rule.groups is not None:
        ids_TK, weights_TK = _of_groups(x, rule.groups, top_k)
    elif rule.kind is RuleKind.SPARSE_MIXER:
        weights_TK = _sparse_mixer(logits_TE, ids_TK, rule.jitter)
    else:
        weights_TK = torch.softmax(x, 1).gather(1, ids_TK)
        if rule.kind is RuleKind.RENORMALISED:
            weights_TK = weights_TK / weights_TK.sum(1, keepdim=True)
    shared = torch.arange(num_experts, num_experts + num_shared, device=ids_TK.device)
    ids_TK = torch.cat((ids_TK, shared.expand(len(ids_TK), -1)), 1)
    return route(ids_TK, num_tokens, num_experts, hits, num_shared), weights_TK.to(dtype)


def _of_groups(x_TE: Tensor, groups: Groups, top_k: int) -> tuple[Tensor, Tensor]:
    """Return the experts and weights of DeepSeek-V3's router, the best first."""
    scores = torch.sigmoid(x_TE)
    choice = (scores + groups.correction_E).nan_to_num(-3e38)
    if groups.num_open < groups.num:
        by_group = choice.view(len(choice), groups.num, -1)
        worth = by_group.topk(2, 2).values.sum(2)
        best = worth.topk(groups.num_open, 1).indices
        is_open = torch.zeros_like(worth).scatter(1, best, 1.0)[:, :, None] > 0
        choice = torch.where(is_open, by_group, float("-inf")).flatten(1)
    ids_TK = torch.topk(choice, top_k).indices
    weights_TK = scores.gather(1, ids_TK)
    if groups.renormalised:
        weights_TK = weights_TK / (weights_TK.sum(1, keepdim=True) + 1e-20)
    return ids_TK, weights_TK * groups.scaling


def _sparse_mixer(logits_TE: Tensor, ids_TK: Tensor, jitter: float) -> Tensor:
    left, out = logits_TE, []
    for k in range(ids_TK.shape[1]):
        best = ids_TK[:, k : k + 1]
        peak = left.gather(1, best)
        size = torch.maximum(logits_TE.abs(), peak)
        is_far = (peak - logits_TE) / size > jitter
        near = left.masked_fill(is_far, float("-inf"))
        out.append(torch.softmax(near, 1).gather(1, best))
        left = left.scatter(1, best, float("-inf"))
    return torch.cat(out, 1)


def combine(
    slots_TKD: Tensor,
    weights_TK: Tensor,
    num_tokens: Tensor,
    out_TD: Tensor,
    add: Sum | None = None,
) -> None:
    """Do what `kernels.triton.moe.combine` does."""
    total, top_k = torch.zeros_like(slots_TKD[:, 0], dtype=torch.float32), weights_TK.shape[1]
    for k in range(top_k):
        total = total + slots_TKD[:, k].float() * weights_TK[:, k : k + 1].float()
    token = torch.arange(slots_TKD.shape[0], device=slots_TKD.device)[:, None]
    total = torch.where(token < num_tokens, total, 0.0).to(out_TD.dtype)
    if add is not None:
        shared_TD = add.shared_TD
        if slots_TKD.shape[1] > top_k:
            more = slots_TKD[:, top_k:].float().sum(1)
            shared_TD = torch.where(token < num_tokens, more, 0.0).to(out_TD.dtype)
        if shared_TD is not None:
            gate = add.shared_gate_T1
            total = total + (shared_TD if gate is None else torch.sigmoid(gate) * shared_TD)
        total = add.residual_TD + (total if add.multiplier is None else total * add.multiplier)
    out_TD.copy_(total)


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float, wide: bool = False) -> Tensor:
    """Do what `kernels.triton.norm.rms_norm` does, for any leading dimensions."""
    x = x_TD.float()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return (weight_D * x).to(x_TD.dtype) if wide else weight_D * x.to(x_TD.dtype)


def add_rms_norm(
    residual_TD: Tensor,
    x_TD: Tensor,
    multiplier: float | None,
    weight_D: Tensor,
    eps: float,
    wide: bool = False,
    in_fp32: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Do what `kernels.triton.norm.add_rms_norm` does."""
    total = residual_TD + (x_TD if multiplier is None else x_TD * multiplier)
    out = rms_norm(total, weight_D, eps, wide)
    return total, out, out.float() if in_fp32 else out


def silu_mul(x_TF: Tensor) -> Tensor:
    """Do what `kernels.triton.norm.silu_mul` does."""
    gate, up = x_TF.chunk(2, 1)
    return torch.nn.functional.silu(gate) * up


WORD = 0xFFFFFFFF


def uniforms(seeds_B: Tensor, positions_B: Tensor) -> Tensor:
    """Return `runner.sampling.share_of` of every row, over 2^53.

    int64 wraps: the low 64 bits stay.
    """
    c: list[Tensor] = [positions_B & WORD, (positions_B >> 32) & WORD]
    c += [torch.zeros_like(positions_B), torch.zeros_like(positions_B)]
    k0, k1 = seeds_B & WORD, (seeds_B >> 32) & WORD
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        high0, high1 = (p0 >> 32) & WORD, (p1 >> 32) & WORD
        c = [high1 ^ c[1] ^ k0, p1 & WORD, high0 ^ c[3] ^ k1, p0 & WORD]
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return ((c[0] << 21) | (c[1] >> 11)).double() * 2.0**-53


def _top_p(w_BV: Tensor, top_p_B: Tensor) -> Tensor:
    falling, order = torch.sort(w_BV, dim=1, descending=True, stable=True)
    before = falling.cumsum(1) - falling
    kept = torch.where(before < top_p_B[:, None] * falling.sum(1, keepdim=True), falling, 0.0)
    nucleus = torch.zeros_like(w_BV).scatter(1, order, kept)
    return torch.where(top_p_B[:, None] < 1, nucleus, w_BV)


def sample(
    logits_BV: Tensor,
    temperature_B: Tensor,
    top_k_B: Tensor,
    top_p_B: Tensor,
    min_p_B: Tensor,
    seeds_B: Tensor,
    positions_B: Tensor,
    tokens_B: Tensor,
    peaks_B: Tensor,
) -> None:
    """Do what `kernels.triton.sampling.sample` does."""
    x = logits_BV.float()
    peak, best = x.max(1)  # on a CPU the first of equals; the next lines ensure that on all devices
    ids = torch.arange(x.shape[1], device=x.device)
    best = torch.where(x == peak[:, None], ids, x.shape[1]).amin(1)
    greedy = temperature_B == 0
    heat = torch.where(greedy, 1.0, temperature_B)
    w = torch.exp((x.double() - peak[:, None].double()) / heat[:, None])
    w = torch.where(w < min_p_B[:, None], 0.0, w)
    rank = (top_k_B.long() - 1).clamp(0, x.shape[1] - 1)
    kth = w.sort(1, descending=True).values.gather(1, rank[:, None])
    w = torch.where((top_k_B[:, None] > 0) & (w < kth), 0.0, w)
    w = _top_p(w, top_p_B)
    sums = w.cumsum(1)
    target = uniforms(seeds_B, positions_B)[:, None] * sums[:, -1:]
    drawn = torch.searchsorted(sums, target, right=True)[:, 0].clamp(max=x.shape[1] - 1)
    tokens_B.copy_(torch.where(greedy, best, drawn))
    peaks_B.copy_(peak)
