"""`experts_implementation="qllm"` in models of transformers that no engine serves."""

import copy
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, MixtralForCausalLM

import qllm.transformers as ours
from qllm import QLLMEngine
from qllm.errors import ModelError
from qllm.kernels import cpu
from qllm.kernels.cpu.experts import Experts
from tests.support.families import FAMILIES, make_model

IDS = torch.tensor([[3, 14, 15, 92, 65, 35, 89, 79, 32, 38]])


@pytest.fixture(autouse=True)
def _nothing_said() -> Iterator[None]:
    ours._said.clear()
    yield
    ours._said.clear()


def model_of(family: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    model = make_model(family, dtype)
    model.set_experts_implementation("qllm")
    return model


def experts_of(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if hasattr(m, "gate_up_proj") and hasattr(m, "has_gate")]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_what_grouped_mm_does_but_for_rounding(
    family: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, plain = model_of(family), make_model(family, torch.bfloat16)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "qllm"):
        found, expected = model(IDS).logits.float(), plain(IDS).logits.float()
    assert caplog.messages == []
    blocks = experts_of(model)
    assert blocks
    assert all(m.gate_up_proj.device.type == "meta" for m in blocks)
    error = (found - expected).norm() / expected.norm()
    assert error < 0.05
    with torch.no_grad():
        again = model(IDS).logits.float()
    assert torch.equal(again, found)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_row_has_the_same_bits_in_a_batch_and_alone(num_threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        [block, *_] = experts_of(model_of("qwen3_moe"))
        x = torch.randn((40, block.gate_up_proj.shape[2])).bfloat16()
        ids = torch.stack([torch.randperm(block.gate_up_proj.shape[0])[:2] for _ in range(40)])
        weights = torch.rand((40, 2))
        with torch.no_grad():
            whole = block(x, ids, weights)
            alone = torch.cat([block(x[i : i + 1], ids[i : i + 1], weights[i : i + 1])
                               for i in range(40)])  # fmt: skip
            assert torch.equal(whole, alone)
            assert block(x[:0], ids[:0], weights[:0]).shape == (0, x.shape[1])
    finally:
        torch.set_num_threads(before)


def test_generate_runs_and_release_puts_every_bit_back() -> None:
    model, plain = model_of("mixtral"), make_model("mixtral", torch.bfloat16)
    model.generate(IDS, max_new_tokens=4, do_sample=False)
    assert experts_of(model)[0].down_proj.device.type == "meta"
    ours.release(model)
    for name, weight in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight), name
    model.set_experts_implementation("grouped_mm")
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, plain(IDS).logits)


def test_a_model_is_saved_whole_and_loads_with_it(tmp_path: Path) -> None:
    model = model_of("mixtral")
    with torch.no_grad():
        expected = model(IDS).logits
    model.save_pretrained(tmp_path)
    loaded, plain = (
        AutoModelForCausalLM.from_pretrained(
            tmp_path, dtype="bfloat16", experts_implementation=name
        ).eval()
        for name in ("qllm", "grouped_mm")
    )
    assert isinstance(loaded, MixtralForCausalLM)
    for name, weight in make_model("mixtral", torch.bfloat16).state_dict().items():
        assert torch.equal(plain.state_dict()[name], weight), name
    with torch.no_grad():
        found, near = loaded(IDS).logits.float(), plain(IDS).logits.float()
        assert torch.equal(model(IDS).logits, expected), "packed again after it was saved"
    assert (found - near).norm() / near.norm() < 0.05
    assert experts_of(loaded)[0].down_proj.device.type == "meta"


@pytest.mark.parametrize(
    ("why", "dtype", "with_grad"),
    [
        ("float32 on cpu", torch.float32, False),
        ("needs gradients; run it under torch.no_grad", torch.bfloat16, True),
    ],
)
def test_what_runs_with_grouped_mm_is_said_once(
    why: str, dtype: torch.dtype, with_grad: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model, plain = model_of("mixtral", dtype), make_model("mixtral", dtype)
    with torch.set_grad_enabled(with_grad), caplog.at_level(logging.WARNING, "qllm"):
        for _ in range(2):
            assert torch.equal(model(IDS).logits, plain(IDS).logits)
    assert len(caplog.messages) == 1
    assert why in caplog.messages[0]


def test_a_call_with_gradients_gets_the_weights_back() -> None:
    model, plain = model_of("mixtral"), make_model("mixtral", torch.bfloat16)
    with torch.no_grad():
        model(IDS)
    for one in (model, plain):
        one(IDS, labels=IDS).loss.backward()
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad), name


def test_experts_of_another_gate_run_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    model, plain = model_of("mixtral"), make_model("mixtral", torch.bfloat16)
    for one in (model, plain):
        for block in experts_of(one):
            block.act_fn = nn.GELU()
    with torch.no_grad(), caplog.at_level(logging.WARNING, "qllm"):
        assert torch.equal(model(IDS).logits, plain(IDS).logits)
    assert "not made for their gate" in caplog.messages[0]


def test_a_block_whose_check_fails_runs_with_grouped_mm(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = Experts.run

    def wrong(self: Experts, x: Any, tokens: Any, units: int, num: int, slots: Any) -> None:
        real(self, x, tokens, units, num, slots)
        slots.mul_(1.1)

    monkeypatch.setattr(Experts, "run", wrong)
    model, plain = model_of("mixtral"), make_model("mixtral", torch.bfloat16)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "qllm"):
        for _ in range(2):
            assert torch.equal(model(IDS).logits, plain(IDS).logits)
    assert "check failed" in caplog.messages[0]


def test_where_kernels_were_not_built_grouped_mm_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "MISSING", "qllm.kernels.cpu._native was not built")
    model, plain = model_of("mixtral"), make_model("mixtral", torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, plain(IDS).logits)


def test_an_engine_and_a_plain_call_do_not_share_packed_weights() -> None:
    model = model_of("mixtral")
    engine = QLLMEngine.from_model(model, conformance=False)
    with engine, torch.no_grad(), pytest.raises(ModelError, match="packed for"):
        model(IDS)
    with torch.no_grad():
        model(IDS)
    other = copy.deepcopy(make_model("mixtral", torch.bfloat16))
    with QLLMEngine.from_model(other, conformance=False):
        pass
    with pytest.raises(ModelError, match="packed for another runner"):
        QLLMEngine.from_model(model, conformance=False)
    ours.release(model)
    with QLLMEngine.from_model(model, conformance=False) as engine:
        assert engine.submit([3, 14, 15], max_tokens=2).result(300).token_ids
