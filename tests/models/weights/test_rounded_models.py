"""Models whose products read rows in int8: exact alone and in company, named, checked at start."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from qllm import QLLMEngine
from qllm.config import EngineConfig
from qllm.engine.build import make_runner
from qllm.errors import CheckpointError, ConfigError
from qllm.kernels import cpu, rounded
from qllm.models.discover import discover
from qllm.models.identity import identity
from qllm.models.loader import load
from qllm.models.weights import activations
from qllm.models.weights.quantised_linears import all_linears
from qllm.runner import conformance
from qllm.runner.cpu import cpu_runner
from qllm.runner.runner import TorchRunner
from qllm.types import Grain
from tests.support.families import make_model
from tests.support.packed_linears import made
from tests.support.programs import CUTS, add, logits_of, next_row, prompt_of, serve, sweep
from tests.support.storms import Chaos, Storm, fine, same

assert cpu.MISSING is None, cpu.MISSING
FORMS = [
    ("qwen3_moe", "packed", "i4 g16"),
    ("mixtral", "awq", "u4 g16"),
    ("qwen2_moe", "gptq-8", "i8 g16"),
]


@pytest.fixture(scope="module", params=FORMS, ids=lambda form: form[1])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    family, form, kind = request.param
    return made(tmp_path_factory.mktemp(form), family, form)[0], kind


def runner_of(folder: Path, **settings: Any) -> TorchRunner:
    return cpu_runner(load(folder).model, activations="int8", **settings)


def test_every_product_with_codes_reads_them_and_says_so(checkpoint: Any) -> None:
    folder, kind = checkpoint
    runner = runner_of(folder)
    for part in ("experts", "head"):
        assert runner.names[part].startswith(f"qllm {cpu.kind()} {kind} on int8 rows")
    assert runner.names["sweep"].startswith("3 of 3")
    ids = prompt_of(9)
    ours, plain = logits_of(runner, ids), logits_of(cpu_runner(load(folder).model), ids)
    torchs = logits_of(runner_of(folder, max_packed_bytes=0), ids)
    for one, other, third in zip(ours, plain, torchs, strict=True):
        spread = other.float().std()
        assert 0 < (one - other).float().abs().max() < 0.2 * spread
        assert (one - third).float().abs().max() < 0.1 * spread


def test_the_start_up_check_passes_and_its_forward_rounds_alike(checkpoint: Any) -> None:
    folder, _ = checkpoint
    model = load(folder).model
    held = all_linears(model)["lm_head"]
    x = torch.randn(5, held.weight.shape[1]).bfloat16()
    exact = F.linear(x, held.weight.dequantised())
    runner = cpu_runner(model, activations="int8")
    conformance.check(model, runner)
    assert torch.equal(model.lm_head(x), rounded.linear(x, held.weight))
    assert not torch.equal(model.lm_head(x), exact)
    runner.close()
    assert torch.equal(model.lm_head(x), exact)


def test_experts_of_model_forward_round_alike(checkpoint: Any) -> None:
    """Nearer than without rounding: where last bits of what the gate gave differ, so may a step."""
    model = load(checkpoint[0]).model
    runner = cpu_runner(model, activations="int8")
    module: Any = discover(model).layers[-1].experts
    x, weights = torch.randn(40, model.config.hidden_size).bfloat16(), torch.ones(40, 1).bfloat16()
    ids = (torch.arange(40) % module.num_experts).unsqueeze(1)
    work = runner.backend.new_work(2, ids, Grain.EXPERT)
    bank: Any = runner.backend.compute.banks[2]
    bank.run(x, work, 0, len(work.units))
    ours = bank.combine(work.slots_SD, work.inverse_S, weights).float()
    alike = module.forward(x, ids, weights).float()
    runner.close()
    exact = module.forward(x, ids, weights).float()
    assert (ours - alike).norm() < 0.85 * (ours - exact).norm()


def test_a_storm_leaves_every_stream_equal_to_its_solo_run(checkpoint: Any) -> None:
    with QLLMEngine.from_pretrained(
        checkpoint[0], threads=1, run_in="thread", record=True, activations="int8",
        exactness="batch-invariant", policy=Chaos(5), max_kv_tokens=192, max_step_tokens=48,
        conformance=False,
    ) as engine:  # fmt: skip
        assert "on int8 rows" in engine.kernels["experts"]
        fine(engine)
        storm = Storm(engine, 5)
        results = storm.run()
        solo = [
            engine.submit(priority="BE", **storm.specs[h.number]).result(300)
            for h, _ in storm.handles
        ]
        names = {type(e).__name__ for e in engine.trace.events}
    assert {"Parked", "Split"} <= names
    assert len(results) > 8
    assert all(same(result, alone) for result, alone in zip(results, solo, strict=True))


def test_batch_mates_and_chunks_change_no_bit(checkpoint: Any) -> None:
    lengths = {1: 21, 2: 9, 3: 13}
    logits: list[dict[Any, Tensor]] = []

    def listening(fine_cuts: bool) -> TorchRunner:
        runner, kept = runner_of(checkpoint[0], batch_invariant=True), {}
        runner.on_logits = lambda request, at, x: kept.update({(request, at): x.clone()})
        if fine_cuts:
            runner.backend.cuts = CUTS
        logits.append(kept)
        return runner

    together = listening(True)
    for request, n in lengths.items():
        add(together, request, prompt_of(n, n))
    sweep(together, next_row(together, 3), next_row(together, 1))
    sweep(together, *(next_row(together, i) for i in (1, 2, 3)))
    sweep(together, *(next_row(together, i) for i in lengths))
    together.close()
    alone = listening(False)
    for request, n in lengths.items():
        add(alone, request, prompt_of(n, n))
        serve(alone, request, 2)
    alone.close()
    assert len(logits[0]) == 8
    for key, x in logits[0].items():
        assert torch.equal(x, logits[1][key]), key


# -- names


def test_a_name_says_what_products_read(checkpoint: Any) -> None:
    folder, _ = checkpoint
    model = load(folder).model
    assert identity(model) == identity(model, "auto", "bf16") != identity(model, "auto", "int8")
    ours, plain = runner_of(folder), cpu_runner(load(folder).model)
    assert plain.fingerprint() == identity(model) != ours.fingerprint()
    assert ours.fingerprint() == runner_of(folder).fingerprint()


@pytest.mark.sampled(1)
def test_what_was_kept_by_engines_of_another_name_is_refused(
    checkpoint: Any, tmp_path: Path
) -> None:
    folder, _ = checkpoint
    own: dict[str, Any] = {"run_in": "thread", "threads": 1, "conformance": False}
    how = {**own, "kv_dir": tmp_path, "kv_dir_gib": 0.01}
    with QLLMEngine.from_pretrained(folder, activations="int8", **how) as engine:
        engine.submit(prompt_of(70), max_tokens=2, temperature=0).result(300)
        handle = engine.submit(prompt_of(9), "BE", 200, temperature=0, ignore_eos=True)
        next(iter(handle))
        handle.update(paused=True)
        engine.checkpoint(tmp_path / "saved")
    with pytest.raises(ConfigError, match="model and settings"):
        QLLMEngine.from_pretrained(folder, **how)
    with (
        QLLMEngine.from_pretrained(folder, **own) as engine,
        pytest.raises(CheckpointError, match="another model"),
    ):
        engine.restore(tmp_path / "saved")
    with QLLMEngine.from_pretrained(folder, activations="int8", **how) as engine:
        (handle,) = engine.restore(tmp_path / "saved")
        handle.cancel()


# -- refused


def test_experts_that_are_rounded_at_load_read_them_too(tmp_path: Path) -> None:
    make_model("mixtral", torch.bfloat16).save_pretrained(tmp_path)
    in_memory = load(tmp_path).model
    found = []
    for model in (load(tmp_path, expert_weights="int4").model, in_memory):
        runner = cpu_runner(model, expert_weights="int4", activations="int8")
        assert "u4 g64 on int8 rows" in runner.names["experts"]
        assert "on int8 rows" not in runner.names["head"]
        found.append(logits_of(runner, prompt_of(9)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_what_cannot_read_them_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = make_model("mixtral", torch.bfloat16)
    with pytest.raises(ConfigError, match=r"has none \(not quantised\)"):
        cpu_runner(plain, activations="int8")
    floats = load(made(tmp_path, "qwen2_moe", "fp8")[0]).model
    with pytest.raises(ConfigError, match=r"integers of 4 or 8 bits.* has none \(e4m3 g24\)"):
        make_runner(floats, EngineConfig(activations="int8"))
    expanded = load(made(tmp_path / "order", "mixtral", "gptq-act-order")[0]).model
    with pytest.raises(ConfigError, match=r"has none \(gptq, expanded to bf16\)"):
        make_runner(expanded, EngineConfig(activations="int8"))
    with pytest.raises(ConfigError, match="activations='int4' is unknown; use one of bf16, int8"):
        EngineConfig(activations="int4")
    with pytest.raises(ConfigError, match="needs kernels='fast'"):
        EngineConfig(activations="int8", kernels="reference")
    with pytest.raises(ConfigError, match="kernels='reference' has 'bf16' alone"):
        cpu_runner(floats, activations="int8", kernels="reference")
    for rounding in ("int8", "int8-g64", "mxfp4"):
        with pytest.raises(ConfigError, match=f"with expert_weights='{rounding}'"):
            EngineConfig(activations="int8", expert_weights=rounding)
    monkeypatch.setattr(activations.cpu, "MISSING", "no compiler")
    with pytest.raises(ConfigError, match="needs our CPU kernels: no compiler"):
        cpu_runner(floats, activations="int8")


@pytest.mark.parametrize("family", ["llama4_text", "qwen3"])
def test_a_model_without_experts_that_can_be_rounded_is_refused(
    family: str, tmp_path: Path
) -> None:
    """Llama 4 has experts of its own kind, and Qwen 3 has none."""
    small: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    if family == "llama4_text":
        small |= {"num_local_experts": 2, "intermediate_size_mlp": 64}
    ends = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    config = AutoConfig.for_model(family, **small, **ends)
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"expert_weights='int4'.* can be rounded; use"):
        load(tmp_path, expert_weights="int4")
