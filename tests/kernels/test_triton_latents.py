"""Attention over latents, and what goes before it, against plain torch: see test_triton.py."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3RMSNorm,
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_interleave,
)

from qllm.kernels import reference
from qllm.kernels.routing import Angles, Norm
from qllm.kernels.tiles import Query, Tiles, tiles_of
from qllm.kernels.triton import attention, latents
from tests.support.interpret import DEVICES
from tests.support.triton_cases import DTYPES, FEW, Noise, cache, close

ANGLES = ("apart", "alike", "pairs")
"""Halves with angles of their own, halves with the same, and pairs."""


def angles_of(noise: Noise, num: int, width: int, kind: str, dtype: torch.dtype) -> Angles:
    shape = num, width // 2 if kind == "alike" else width
    cos, sin = noise(*shape, dtype=dtype), noise(*shape, dtype=dtype)
    return Angles(cos, sin, kind == "pairs")


def rotated(x_TND: torch.Tensor, angles: Angles) -> torch.Tensor:
    """By transformers' own functions."""
    cos, sin = angles.cos_TD, angles.sin_TD
    if cos.shape[1] < x_TND.shape[2]:
        cos, sin = (torch.cat((x, x), 1) for x in (cos, sin))
    rotate = apply_rotary_pos_emb_interleave if angles.in_pairs else apply_rotary_pos_emb
    x = x_TND.transpose(0, 1)[None]
    turned: torch.Tensor = rotate(x, x, cos[None], sin[None])[0]
    return turned[0].transpose(0, 1)


@DEVICES
@FEW
@given(
    num=st.integers(0, 9),
    widths=st.sampled_from([(24, 32, 16), (1100, 40, 6), (16, 512, 64)]),
    heads=st.integers(1, 3),
    compressed=st.booleans(),
    kind=st.sampled_from(ANGLES),
    dtype=DTYPES,
)
def test_latents_are_normed_and_written_with_their_rotated_keys(
    device: str,
    num: int,
    widths: tuple[int, int, int],
    heads: int,
    compressed: bool,
    kind: str,
    dtype: torch.dtype,
) -> None:
    noise, (queries, rank, width) = Noise(num, device), widths
    angles = angles_of(noise, num, width, kind, dtype)
    both = noise(num, queries + rank + width, dtype=dtype)  # rows of one product
    q, kv = both[:, :queries], both[:, queries:]
    norm, q_norm = (Norm(noise(n, dtype=dtype), eps) for n, eps in ((rank, 1e-6), (queries, 1e-2)))
    slots = noise.order(12)[:num].long()
    slots[1::3] = -1
    live = slots[slots >= 0]
    wanted = []
    for x, (weight, eps) in ((kv[:, :rank], norm), (q, q_norm)):
        module = DeepseekV3RMSNorm(x.shape[1], eps).to(device, dtype)
        module.weight.data = weight
        wanted.append(module(x))
    wanted_key = rotated(kv[:, None, rank:], angles)[:, 0]
    for kernels in (latents, reference):
        pages = [noise(12, n, dtype=dtype) for n in (rank, width)]
        before = [x.clone() for x in pages]
        out = torch.full((num, heads, rank), 7.0, dtype=dtype, device=device)
        more = (q, q_norm) if compressed else ()
        normed = kernels.write_latents(kv, norm, angles, *pages, slots, out, *more)
        assert (out[slots < 0] == 0).all(), "attention writes nothing there"
        assert (out[slots >= 0] == 7).all()
        close(pages[0][live], wanted[0][slots >= 0])
        close(pages[1][live], wanted_key[slots >= 0])
        rest = torch.ones(12, dtype=torch.bool, device=device)
        rest[live] = False
        assert all(torch.equal(x[rest], y[rest]) for x, y in zip(pages, before, strict=True))
        assert (normed is not None) == compressed
        if normed is not None:
            close(normed, wanted[1])


def tiles_for(counts: tuple[int, ...], lengths: list[int], device: str) -> Tiles:
    queries, at = [], 0
    for r, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        queries.append(Query(r, at, length - count, count))
        at += count
    return tiles_of(queries, at, 16, torch.device(device))


@DEVICES
@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["turned", *ANGLES])
@pytest.mark.parametrize(("rope_width", "counts"), [(16, (1, 1)), (8, (5, 1)), (6, (1, 18))])
def test_attention_over_latents(
    device: str, counts: tuple[int, int], rope_width: int, kind: str
) -> None:
    """32 heads of queries over one latent, which is key and value, and one rotated key."""
    noise, lengths, num = Noise(3, device), [33, 70], sum(counts)
    (c, kr), tables = cache(noise, lengths, 16, 1, (128, rope_width), torch.float32)
    q, qr = noise(num, 32, 128), noise(num, 32, 8 + rope_width)[:, :, 8:]
    angles = None if kind == "turned" else angles_of(noise, num, rope_width, kind, torch.float32)
    tiles = tiles_for(counts, lengths, device)
    how = {"page_size": 16, "scale": 0.1, "k_rope_SF": kr[:, 0]}
    by_hand = qr if angles is None else rotated(qr, angles)
    found, wanted, hand = (torch.zeros(num, 32, 128, device=device) for _ in "abc")
    attention.attend(q, c, c, tables, tiles, q_rope_TNF=qr, q_angles=angles, out_TNE=found, **how)
    reference.attend(q, c, c, tables, tiles, q_rope_TNF=qr, q_angles=angles, out_TNE=wanted, **how)
    reference.attend(q, c, c, tables, tiles, q_rope_TNF=by_hand, out_TNE=hand, **how)
    close(found, wanted)
    close(wanted, hand)


@DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_over_latents_has_the_same_bits_in_any_batch(device: str, dtype: torch.dtype) -> None:
    noise, lengths = Noise(5, device), [40, 3, 90]
    (c, kr), tables = cache(noise, lengths, 4, 1, (64, 16), dtype)
    q, qr, kv = (noise(*shape, dtype=dtype) for shape in ((3, 8, 64), (3, 8, 16), (3, 80)))
    norm = Norm(noise(64, dtype=dtype), 1e-6)
    angles = angles_of(noise, 3, 16, "pairs", dtype)

    def run(rows: slice) -> tuple[torch.Tensor, ...]:
        own = Angles(angles.cos_TD[rows], angles.sin_TD[rows], in_pairs=True)
        out = torch.zeros_like(q[rows])
        pages = torch.zeros(3, 64, dtype=dtype, device=device), torch.zeros_like(qr[:, 0])
        slots = torch.arange(3, device=device)[rows]
        normed = latents.write_latents(kv[rows], norm, own, *pages, slots, out, kv[rows, :64], norm)
        assert normed is not None
        tiles = tiles_for((1,) * len(out), lengths[rows], device)
        attention.attend(
            q[rows], c, c, tables[rows], tiles, page_size=4, scale=0.1, q_rope_TNF=qr[rows],
            k_rope_SF=kr[:, 0], q_angles=own, out_TNE=out,
        )  # fmt: skip
        return out, normed, *(page[rows] for page in pages)

    together = run(slice(0, 3))
    for i in range(3):
        for alone, rows in zip(run(slice(i, i + 1)), together, strict=True):
            assert torch.equal(alone[0], rows[i])
