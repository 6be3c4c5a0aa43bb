"""An engine of a model's first layers: an identity of its own, and KV in place of the layers."""

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from qllm import QLLMEngine, SamplingParams
from qllm.cli import app
from qllm.config import EngineConfig
from qllm.cores import Held
from qllm.engine import memory
from qllm.engine.sizes import SIZES
from qllm.errors import CheckpointError, ConfigError
from qllm.models.loader import load
from qllm.server.config import ServerConfig, load_config
from qllm.server.ops.banner import banner
from tests.support.draft_models import WITH_MTP, saved
from tests.support.hybrids import make_hybrid
from tests.support.serving import serving, tiny_engine
from tests.support.waiting import wait_for

THREAD: dict[str, Any] = {"run_in": "thread", "conformance": False}
GREEDY = SamplingParams(temperature=0, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.2, seed=3, ignore_eos=True)
TEXT = "def parse(text, at):  # what json.loads does with numbers, strings and lists\n" * 8
WHOLE = 4
"""Layers of the model `tiny`."""
OPEN: dict[str, Any] = dict.fromkeys(SIZES)


def answers(engine: QLLMEngine) -> list[tuple[int, ...]]:
    """Return answers to a prompt of several pages, greedy and seeded."""
    handles = [engine.submit(TEXT, "BE", 24, sampling=how) for how in (GREEDY, SAMPLED)]
    return [tuple(handle.result(60).token_ids) for handle in handles]


def hits(engine: QLLMEngine) -> int:
    return int(engine.stats()["prefix_cache"]["hit_tokens"])


def test_each_depth_is_another_model_in_a_process_of_its_own() -> None:
    found = {}
    for depth in (1, 3, WHOLE, None):
        with tiny_engine(depth=depth, conformance=True) as engine:
            stats = engine.stats()
            assert (stats["depth"], stats["whole_depth"]) == (depth or WHOLE, WHOLE)
            assert len(engine.drivers) == (depth or WHOLE)
            assert engine.config.depth == (None if depth == WHOLE else depth)
            found[depth] = answers(engine)
    assert found[WHOLE] == found[None]
    assert len({str(tokens) for tokens in found.values()}) == 3
    with tiny_engine(depth=3, **THREAD) as engine:
        assert answers(engine) == found[3]


# -- nothing of one depth is used at another


def test_a_page_of_a_file_is_found_at_its_own_depth_alone(tmp_path: Path) -> None:
    how = {**THREAD, "kv_dir": str(tmp_path), "kv_dir_gib": 0.01}
    with tiny_engine(depth=2, **how) as engine:
        expected = answers(engine)
        engine.reset_prefix_cache()
        assert answers(engine) == expected
        wait_for(lambda: engine.stats()["prefix_cache"]["file"]["kept_pages"] > 0)
    for depth in (1, 3, None):
        with pytest.raises(ConfigError, match=r"the KV in kv_dir=.* cannot be used"):
            tiny_engine(depth=depth, **how)
    with tiny_engine(depth=2, **how) as engine:
        assert answers(engine) == expected
        assert hits(engine) > 0, "it does find its own"


def test_pages_have_other_names_at_another_depth() -> None:
    names = []
    for depth in (2, 3, None, WHOLE):
        with tiny_engine(depth=depth, **THREAD) as engine:
            answers(engine)
            client: Any = engine.client
            names.append(frozenset(client.loop.prefix.store._pages))
    assert names[2] == names[3] != frozenset()
    assert sum(map(len, names[:3])) == len(frozenset.union(*names))


def test_a_checkpoint_of_another_depth_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "requests"
    with tiny_engine(depth=2, **THREAD) as engine:
        expected = engine.submit(TEXT, "BE", 200, sampling=GREEDY).result(60).token_ids
        handle = engine.submit(TEXT, "BE", 200, sampling=GREEDY)
        wait_for(lambda: len(handle.token_ids) >= 5)
        handle.update(paused=True)
        assert engine.checkpoint(path) == 1
        handle.cancel()
    for depth in (1, 3, None):
        with (
            tiny_engine(depth=depth, **THREAD) as engine,
            pytest.raises(CheckpointError, match="other weights or another depth"),
        ):
            engine.restore(path)
    with tiny_engine(depth=2, **THREAD) as engine:
        (handle,) = engine.restore(path)
        handle.update(paused=False)
        assert handle.result(60).token_ids == expected


def test_engines_of_other_depths_are_no_fleet(tmp_path: Path) -> None:
    """So a request that an engine leaves never goes on at another depth."""
    paths = [str(tmp_path / name) for name in ("a", "b", "c")]
    how = {"conformance": False, "max_kv_tokens": 4096}
    with (
        tiny_engine(depth=2, listen=paths[0], **how),
        tiny_engine(depth=3, listen=paths[1], **how),
        tiny_engine(depth=2, listen=paths[2], **how),
    ):
        with pytest.raises(ConfigError, match="depth is 3 there and 2 here"):
            QLLMEngine.connect(f"{paths[0]},{paths[1]}")
        with QLLMEngine.connect(f"{paths[0]},{paths[2]}") as fleet:
            assert fleet.client.info.whole_layers == WHOLE
            assert len(answers(fleet)[0]) == 24


# -- memory that layers leave becomes KV


def test_what_layers_leave_free_becomes_kv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget has room for the whole model and little KV, and doctor names what engines have."""
    folder = wide_model(tmp_path)
    budget = 1 << 30
    found = []
    for depth in (1, None):
        with QLLMEngine.from_pretrained(
            folder, depth=depth, memory=budget, threads=1, conformance=False, **OPEN
        ) as engine:
            stats, config = engine.stats(), engine.config
        assert stats["weight_bytes"] < budget
        assert stats["memory"]["kv_bytes"] + stats["memory"]["kept_bytes"] <= budget
        found.append((config.pool_tokens, config.kept_tokens, stats["weight_bytes"]))
    (cut_kv, cut_kept, cut_bytes), (kv, kept, num_bytes) = found
    assert cut_bytes < num_bytes / 3
    assert cut_kv >= 4 * kv, "each token needs a quarter of the bytes, and more bytes are free"
    assert cut_kept >= 4 * kept
    for depth, (tokens, pages, weights) in zip(("1", "4"), found, strict=True):
        flags = ["--model", str(folder), "--depth", depth, "--memory", str(budget)]
        sizes = [flag for name in SIZES for flag in ("--set", f"{name}=none")]
        with monkeypatch.context() as patch:  # a command of its own holds less than these tests
            patch.setattr(memory, "held_bytes", lambda *_: Held(200 << 20, 0))
            done = CliRunner().invoke(app, ["doctor", *flags, *sizes])
        assert done.exit_code == 0, done.output
        said = " ".join(done.stdout.split())
        assert f"its depth {depth} of 4 layers" in said
        assert f"its weights {weights:,} bytes" in said
        assert f"its KV {tokens:,} tokens" in said
        assert f"its prefix cache {pages:,} tokens" in said
        assert "its seats 32 (max_num_seqs)" in said
        assert f"KV has room for {tokens // 2048:,} requests of 2,048 tokens" in said
        assert ("answers differ" in said) is (depth == "1")


def wide_model(folder: Path) -> Path:
    """Save a model of four layers with 25 MiB each."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.support.dense import save

    config: Any = AutoConfig.for_model(
        "mixtral", hidden_size=512, intermediate_size=1024, num_hidden_layers=4,
        num_local_experts=8, num_experts_per_tok=2, vocab_size=260, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, eos_token_id=1, pad_token_id=None, bos_token_id=None,
        max_position_embeddings=1 << 17,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    torch.manual_seed(0)
    return save(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), folder / "wide")


# -- what answers say


def test_a_server_names_its_depth() -> None:
    with tiny_engine(depth=3, **THREAD) as engine:
        lines = "\n".join(banner(engine, load_config(None, {}, {"model": "tiny"}), 1.0))
        said = "depth    the first 3 of 4 layers; answers differ from those of the whole model"
        assert said in lines
        with serving(engine) as served:
            (card,) = served.get("/v1/models").json()["data"]
            assert (card["depth"], card["whole_depth"]) == (3, WHOLE)
            assert served.get("/v1/models/tiny").json() == card


def test_a_server_of_the_whole_model_says_nothing_of_a_cut() -> None:
    with tiny_engine(**THREAD) as engine:
        lines = "\n".join(banner(engine, load_config(None, {}, {"model": "tiny"}), 1.0))
        assert "depth " not in lines
        with serving(engine) as served:
            (card,) = served.get("/v1/models").json()["data"]
            assert (card["depth"], card["whole_depth"]) == (WHOLE, WHOLE)


def test_qllm_serve_and_run_take_a_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[ServerConfig] = []
    monkeypatch.setattr("qllm.server.serve.serve", served.append)
    for flags in (("--depth", "2"), ("--set", "depth=2"), ()):
        done = CliRunner().invoke(app, ["serve", "tiny", *flags])
        assert done.exit_code == 0, done.output
    assert [config.engine.get("depth") for config in served] == [2, 2, None]
    runner = CliRunner()
    flags = ["--raw", "--max-tokens", "4", "--temperature", "0"]
    said = {
        depth: runner.invoke(app, ["run", "tiny", TEXT[:60], *flags, *depth]).stdout
        for depth in ((), ("--depth", "1"), ("--depth", "4"))
    }
    assert said[()] == said["--depth", "4"] != said["--depth", "1"]


# -- drafts


def test_drafts_of_a_cut_model_leave_below_its_depth(tmp_path: Path) -> None:
    how = {**THREAD, "depth": 3}
    with tiny_engine(**how) as engine:
        expected = answers(engine)
    with tiny_engine(**how, draft="exit:2") as engine:
        assert answers(engine) == expected
        assert engine.stats()["drafts"]["LS"].keys() >= {"accepted"}
    with pytest.raises(ConfigError, match=r"after 3 layers, and the model has 3; .* in \[1, 2\]"):
        tiny_engine(**how, draft="exit:3")
    folder = saved(tmp_path, WITH_MTP)
    named = "draft='mtp' cannot be used with this model: the model is cut to depth=2, .* all 3"
    with pytest.raises(ConfigError, match=named):
        QLLMEngine.from_pretrained(folder, depth=2, draft="mtp", threads=1, **THREAD)
    with QLLMEngine.from_pretrained(folder, depth=3, draft="mtp", threads=1, **THREAD) as engine:
        assert engine.config.depth is None, "the whole model has its layer for further tokens"


def test_a_hybrid_without_a_layer_that_attends_hands_over_and_keeps_pages(tmp_path: Path) -> None:
    make_hybrid("qwen3_next").save_pretrained(tmp_path)
    how: dict[str, Any] = {"depth": 1, "threads": 1, "run_in": "thread", "max_kv_tokens": 4096}
    prompt = list(range(3, 100))
    with QLLMEngine.from_pretrained(tmp_path, **how) as engine:
        expected = engine.submit(prompt, "BE", 12, sampling=GREEDY).result(60).token_ids
        assert engine.submit(prompt, "BE", 12, sampling=GREEDY).result(60).token_ids == expected
    with QLLMEngine.from_pretrained(tmp_path, **how, handover_gib=0.01) as engine:
        assert engine.submit(prompt, "BE", 12, sampling=GREEDY).result(60).token_ids == expected


# -- what is refused


@pytest.mark.parametrize("depth", [0, -1, True, False, 1.0, "2", 1 << 40])
def test_what_is_no_number_of_layers_is_refused_before_a_load(depth: Any) -> None:
    with pytest.raises(ConfigError, match=r"depth=.* must be an integer in \[1, "):
        EngineConfig(depth=depth)
    with pytest.raises(ConfigError, match=r"depth=.* must be an integer in \[1, "):
        QLLMEngine.from_pretrained("tiny", depth=depth)


@pytest.mark.parametrize("run_in", ["thread", "process"])
def test_a_depth_beyond_the_model_names_its_layers(run_in: str) -> None:
    said = re.escape("depth=5 must be an integer in [1, 4], the layers of model 'tiny'")
    with pytest.raises(ConfigError, match=said):
        tiny_engine(depth=5, run_in=run_in)
    done = CliRunner().invoke(app, ["doctor", "--depth", "5"])
    assert done.exit_code == 2
    assert "in [1, 4]" in " ".join(done.output.split())


def test_a_model_in_memory_is_not_cut() -> None:
    loaded = load("tiny")
    for depth in (2, 5):
        with pytest.raises(
            ConfigError, match=rf"4 layers; use from_pretrained\(..., depth={depth}"
        ):
            QLLMEngine.from_model(loaded.model, loaded.tokenizer, depth=depth)
    with QLLMEngine.from_model(loaded.model, loaded.tokenizer, depth=4, conformance=False) as one:
        assert one.config.depth is None
    cut = load("tiny", depth=2)
    with QLLMEngine.from_model(cut.model, cut.tokenizer, conformance=False) as one:
        assert one.config.depth == 2
        assert one.stats()["whole_depth"] == WHOLE
