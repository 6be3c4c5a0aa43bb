"""flash-attn 3 through torch: what it is called with, against a stand-in that knows its rules."""

import inspect
from importlib import import_module

import pytest
import torch
from families import DTYPES, make_model
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cuda_runner import NUM_PAGES, Driver, prompt_of

from qllm.config import EngineConfig
from qllm.core import make_runner
from qllm.cuda.runner import CudaRunner
from qllm.errors import ConfigError
from qllm.kernels import flash3, reference
from qllm.kernels.tiles import Query, tiles_of


def varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_q: torch.Tensor,
    cu_seq_k: None, max_q: int, max_k: int, *, scale: float, window_size: tuple[int, int],
    enable_gqa: bool, seqused_k: torch.Tensor, block_table: torch.Tensor, num_splits: int,
) -> torch.Tensor:  # fmt: skip
    """`varlen_attn` with pages as torch documents it; a query that sees nothing gives NaN."""
    assert cu_seq_k is None
    assert num_splits == 1
    assert {cu_seq_q.dtype, seqused_k.dtype, block_table.dtype} == {torch.int32}
    assert key.shape == value.shape
    assert len(cu_seq_q) - 1 == len(seqused_k) == len(block_table)
    assert int(cu_seq_q[-1]) == len(query)
    assert int(seqused_k.max()) <= max_k <= block_table.shape[1] * key.shape[1]
    ratio = query.shape[1] // key.shape[2]
    assert enable_gqa == (ratio > 1)
    out = torch.full_like(query, float("nan"))
    for row, used in enumerate(seqused_k.tolist()):
        a, b = int(cu_seq_q[row]), int(cu_seq_q[row + 1])
        assert b - a <= max_q
        k, v = (x[block_table[row].long()].flatten(0, 1)[:used].float() for x in (key, value))
        k, v = (x.repeat_interleave(ratio, 1) for x in (k, v))
        scores = torch.einsum("qnd,knd->nqk", query[a:b].float(), k) * scale
        i, j = torch.arange(b - a)[:, None] + used - (b - a), torch.arange(used)[None, :]
        seen = (j <= i + window_size[1]) & ((window_size[0] < 0) | (j >= i - window_size[0]))
        weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), 2)
        out[a:b] = torch.einsum("nqk,knd->qnd", weights, v).to(out.dtype)
    return out


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash3, "_varlen", varlen)
    monkeypatch.setattr(flash3, "activate", lambda: None)


def test_it_is_called_with_what_torch_takes() -> None:
    theirs = import_module("torch.nn.attention.varlen").varlen_attn
    ours = [p for p in inspect.signature(varlen).parameters if p != "return_aux"]
    assert set(ours) == set(inspect.signature(theirs).parameters) - {"return_aux"}


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 50)), min_size=1, max_size=4),
    heads=st.sampled_from([(4, 1), (4, 4), (6, 2)]),
    page=st.sampled_from([4, 16]),
    window=st.sampled_from([None, 1, 9]),
    dead=st.booleans(),
    seed=st.integers(0, 99),
)
def test_tiles_attend_as_our_kernel(
    rows: list[tuple[int, int]], heads: tuple[int, int], page: int, window: int | None,
    dead: bool, seed: int,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    per = max(-(-(num + pos) // page) for num, pos in rows)
    tables = torch.randperm(per * len(rows), generator=generator).view(len(rows), per)
    k, v = (
        torch.randn((per * len(rows) * page, heads[1], 16), generator=generator).bfloat16()
        for _ in "kv"
    )
    queries, at = [], 0
    for r, (num, pos) in enumerate(rows):
        if not (dead and r == 0):
            queries.append(Query(r, at, pos, num))
        at += num
    q = torch.randn((at, heads[0], 16), generator=generator).bfloat16()
    tiles = tiles_of(queries, at, 16, torch.device("cpu"))
    outs = [torch.full((at, heads[0], 16), 7.0).bfloat16() for _ in "ab"]
    for attend, out in zip((flash3.attend, reference.attend), outs, strict=True):
        attend(
            q, k, v, tables, tiles, page_size=page, scale=0.25, window=window, out_TNE=out
        )  # fmt: skip
    torch.testing.assert_close(*outs, rtol=0.02, atol=0.02)
    if dead:
        assert (outs[0][: rows[0][0]] == 7.0).all()


def test_an_engine_with_it_gives_the_same_tokens_and_says_so() -> None:
    tokens = []
    for attention in ("triton", "flash3"):
        runner = CudaRunner(
            make_model("mixtral", DTYPES["bf16"]), num_pages=NUM_PAGES, page_size=4,
            graphs=False, attention=attention,
        )  # fmt: skip
        driver = Driver(runner)
        for i in range(2):
            driver.add(i, prompt_of(20 + i, 1))
        for _ in range(5):
            driver.sweep([driver.row(0), driver.row(1)])
        tokens.append(driver.tokens)
        assert ("flash-attn 3" in runner.names["attention"]) == (attention == "flash3")
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize(
    ("family", "dtype", "why"),
    [
        ("gpt_oss", "bf16", "attention sinks"),
        ("deepseek_v3", "bf16", "over latents"),
        ("mixtral", "fp32", "computes in torch.float32"),
    ],
)
def test_models_that_it_is_not_for_are_refused(family: str, dtype: str, why: str) -> None:
    runner = CudaRunner(
        make_model(family, DTYPES[dtype]), num_pages=8, graphs=False, attention="flash3"
    )
    driver = Driver(runner)
    driver.add(0, [1, 2, 3])
    with pytest.raises(ConfigError, match=f"attention='flash3': .*{why}"):
        driver.sweep([driver.row(0)])


def test_where_it_is_not_there_the_message_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"needs flash-attn 3 .*flash_attn_interface.*'triton'"):
        flash3.activate()
    monkeypatch.setattr(flash3, "import_module", lambda name: object())
    with pytest.raises(ConfigError, match=r"needs torch >= 2\.12"):
        flash3.activate()
    config = EngineConfig(attention="flash3")
    with pytest.raises(ConfigError, match="is for CUDA and the model is on cpu"):
        make_runner(make_model("mixtral"), config)
    with pytest.raises(ConfigError, match="attention='flash4' is unknown; use one of triton"):
        EngineConfig(attention="flash4")
